use std::{collections::HashMap, fs};

use super::{super::samples::*, *};

/// An environment of these variables.
fn environment<'a>(variables: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + Copy + 'a {
    |name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
}

#[test]
fn the_file_is_the_callers_or_the_variables_or_the_users() {
    let all =
        environment(&[("PEERSUM_TABLE", "by/variable.toml"), ("XDG_CACHE_HOME", "/cache"), ("HOME", "/home/user")]);
    let named = |path: &str| Some(Place { path: path.into(), named: true });
    let users = |path: &str| Some(Place { path: path.into(), named: false });
    assert_eq!(locate(Some(Path::new("mine.toml")), all), named("mine.toml"));
    assert_eq!(locate(None, all), named("by/variable.toml"));
    let without = environment(&[("PEERSUM_TABLE", ""), ("XDG_CACHE_HOME", "/cache"), ("HOME", "/home/user")]);
    assert_eq!(locate(None, without), users("/cache/peersum/table.toml"));
    let home = environment(&[("HOME", "/home/user")]);
    assert_eq!(locate(None, home), users("/home/user/.cache/peersum/table.toml"));
    // As the XDG specification has it.
    let relative = environment(&[("XDG_CACHE_HOME", "cache"), ("HOME", "/home/user")]);
    assert_eq!(locate(None, relative), users("/home/user/.cache/peersum/table.toml"));
    assert_eq!(locate(None, environment(&[("HOME", "")])), None);
    assert_eq!(locate(None, environment(&[])), None);
}

/// What `find` says on a machine that `change` tells from the measured one.
fn elsewhere(change: impl FnOnce(&mut Machine)) -> (String, bool) {
    let mut here = machine();
    change(&mut here);
    table().find(&here).unwrap_err()
}

/// Field case A23 (vllm-project/vllm#8735), what was measured with another driver or on other devices.
#[test]
fn what_differs_from_the_nearest_entry_is_told() {
    let table = table();
    assert_eq!(table.find(&machine()).unwrap(), Found { entry: &table.entries[0], without_nccl: None });
    for (told, stale, change) in [
        (
            "measured with driver 580.159.04, this is 590.2",
            true,
            (|here| here.driver = "590.2".into()) as fn(&mut Machine),
        ),
        ("measured by peersum 0.1.0, this is 0.2.0", true, |here| here.peersum = "0.2.0".into()),
        ("measured with kernels 00c0ffee, these are 1234", true, |here| here.kernels = "1234".into()),
        ("measured on NVIDIA H200, this is NVIDIA B200", false, |here| here.gpu = "NVIDIA B200".into()),
        ("measured with links =N N=, here they are =P P=", false, |here| {
            here.links = vec!["=P".into(), "P=".into()];
        }),
        ("measured with 2 ranks, here are 3", false, |here| {
            here.world = 3;
            here.links = vec!["===".into(); 3];
        }),
        ("measured on NVIDIA H200, this is B; measured with driver 580.159.04, this is 1", false, |here| {
            (here.gpu, here.driver) = ("B".into(), "1".into())
        }),
    ] {
        assert_eq!(elsewhere(change), (told.into(), stale));
    }
    assert_eq!(Table::default().find(&machine()).unwrap_err(), ("it has no entries".into(), false));

    // Another machine with the same driver is farther than this one with another.
    let mut many = table.clone();
    let mut other = entry();
    other.machine.gpu = "NVIDIA B200".into();
    other.machine.driver = "590.2".into();
    many.entries.insert(0, other);
    let here = Machine { driver: "590.2".into(), ..machine() };
    assert_eq!(many.find(&here).unwrap_err().0, "measured with driver 580.159.04, this is 590.2");
}

#[test]
fn another_nccl_takes_the_border_alone() {
    let table = table();
    let without = |nccl: Option<&str>| {
        let here = Machine { nccl: nccl.map(Into::into), ..machine() };
        table.find(&here).unwrap().without_nccl
    };
    assert_eq!(without(Some("2.32.3")), None);
    assert_eq!(without(Some("2.33.0")).unwrap(), "measured with NCCL 2.32.3, this is 2.33.0");
    assert_eq!(without(None).unwrap(), "measured with NCCL 2.32.3, there is none here");

    let mut both = table.clone();
    let mut newer = entry();
    newer.machine.nccl = Some("2.33.0".into());
    both.upsert(newer.clone());
    let found = both.find(&newer.machine).unwrap();
    assert_eq!(found, Found { entry: &newer, without_nccl: None });
}

/// Field case A23 (vllm-project/vllm#6299), a file that is not there or can't be read.
#[test]
fn whatever_is_wrong_priors_choose_and_the_reason_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().to_str().unwrap();
    let path = folder.path().join(".cache/peersum/table.toml");
    let variables = [("HOME", home)];
    let unasked = environment(&variables);
    let reason = |named: Option<&Path>, here: &Machine| {
        let source = Source::load(here, named, unasked);
        let reason = source.reason().cloned();
        reason.map(|reason| (reason.to_string(), reason.is_warning()))
    };
    let shown = path.display();

    // Nobody tuned: nothing to warn of, unless a file was asked for.
    let untuned = format!("no table was measured ({shown}): run `peersum tune`");
    assert_eq!(reason(None, &machine()), Some((untuned, false)));
    let missing = format!("{shown}: No such file or directory (os error 2)");
    assert_eq!(reason(Some(&path), &machine()), Some((missing.clone(), true)));
    let variables = [("HOME", home), (TABLE_VARIABLE, path.to_str().unwrap())];
    let by_variable = Source::load(&machine(), None, environment(&variables));
    assert_eq!(by_variable.reason().map(ToString::to_string), Some(missing));
    let nowhere = Source::load(&machine(), None, environment(&[]));
    let told = "no table was measured (neither XDG_CACHE_HOME nor HOME is set): run `peersum tune`";
    assert_eq!(nowhere.reason().map(ToString::to_string).as_deref(), Some(told));

    table().write(&path).unwrap();
    assert_eq!(reason(None, &machine()), None);
    assert_eq!(reason(Some(&path), &machine()), None);

    // Measured here, and out of date: worth a warning. Never measured here: not, unless the file was named.
    let newer = Machine { driver: "590.2".into(), ..machine() };
    let told =
        format!("{shown} does not hold here: measured with driver 580.159.04, this is 590.2: run `peersum tune`");
    assert_eq!(reason(None, &newer), Some((told, true)));
    let other = Machine { gpu: "NVIDIA B200".into(), ..machine() };
    assert!(!reason(None, &other).unwrap().1);
    assert!(reason(Some(&path), &other).unwrap().1);

    fs::write(&path, "format = 9").unwrap();
    let told =
        format!("{shown} is not a table that can be used: format 9, where this release reads 1: run `peersum tune`");
    assert_eq!(reason(None, &machine()), Some((told, true)));
}

/// What is found doesn't depend on the order in which machines were measured.
#[test]
fn each_machine_finds_its_own_entry() {
    let mut table = Table::default();
    let mut wanted = HashMap::new();
    for gpu in ["A", "B"] {
        for driver in ["1", "2"] {
            for kernels in ["x", "y"] {
                let machine = Machine { gpu: gpu.into(), driver: driver.into(), kernels: kernels.into(), ..machine() };
                let entry = Entry { machine: machine.clone(), command: format!("{gpu}{driver}{kernels}"), ..entry() };
                wanted.insert(machine, entry.command.clone());
                table.upsert(entry);
            }
        }
    }
    table.entries.reverse();
    assert_eq!(table.validate(), Ok(()));
    for (machine, command) in wanted {
        assert_eq!(table.find(&machine).unwrap().entry.command, command);
    }
}
