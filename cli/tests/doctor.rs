//! `peersum doctor` from the outside, over the fixtures.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

mod fixtures;

fn doctor(fixture: &str, flags: &[&str]) -> Output {
    let folder = fixtures::unpack(fixture);
    let root = folder.path().to_str().unwrap();
    Command::new(env!("CARGO_BIN_EXE_peersum"))
        .args(["doctor", "--root", root])
        .args(flags)
        .output()
        .expect("the command starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("the output is UTF-8")
}

#[test]
fn the_exit_code_says_whether_anything_was_found_or_could_not_be_looked_at() {
    for (fixture, code) in [
        (fixtures::PCIE4, 0),
        (fixtures::H100X8, 0),
        (fixtures::H200X8, 0),
        (fixtures::EPYC2X2, 3),
        (fixtures::EPYC8, 3),
        (fixtures::BRIDGES4, 3),
        (fixtures::LAPTOP, 2),
        (fixtures::VM1, 2),
        (fixtures::MIG2, 3),
    ] {
        for flags in [&[][..], &["--json"]] {
            let output = doctor(fixture, flags);
            assert_eq!(output.status.code(), Some(code), "{}", stdout(&output));
            assert!(output.stderr.is_empty());
        }
    }
}

#[test]
fn findings_come_with_evidence_cost_and_remedy_and_the_worst_first() {
    let text = stdout(&doctor(fixtures::EPYC2X2, &[]));
    let heads: Vec<_> = text.lines().filter(|line| line.starts_with('[')).collect();
    assert_eq!(heads.len(), 4, "{text}");
    assert!(heads[0].starts_with("[severe] NCCL gives up P2P between") && heads[3].starts_with("[moderate]"), "{text}");
    for part in ["  seen:   ", "  costs:  ", "  remedy: "] {
        assert!(text.matches(part).count() >= 4, "{part} in {text}");
    }
    assert!(text.ends_with("# 1 severe, 3 moderate, 0 notes, 0 unknown\n"), "{text}");
}

#[test]
fn the_json_has_the_same_and_no_serial_numbers() {
    let output = doctor(fixtures::EPYC2X2, &["--json"]);
    let json: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&json["schema"], &json["schema_version"]), (&"peersum-doctor".into(), &1.into()));
    assert_eq!((&json["exit_code"], &json["findings"][0]["weight"]), (&3.into(), &"severe".into()));
    assert_eq!(json["findings"][1]["id"], "acs-redirect");
    assert!(json["findings"][0]["remedy"].as_array().is_some_and(|remedy| !remedy.is_empty()));
    let output = doctor(fixtures::H200X8, &["--json"]);
    assert!(!stdout(&output).contains("GPU-0000"));
}

#[test]
fn a_log_of_nccl_s_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut text = String::new();
    for (rank, bus) in [(0, "1000"), (1, "41000")] {
        text += &format!(
            "secret-host:9:9 [{rank}] NCCL INFO ncclCommInitRank comm 0x1 rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId {bus} - Init START\n\
             secret-host:9:9 [{rank}] NCCL INFO Channel 00/0 : {rank}[{rank}] -> {0}[{0}] via SHM/direct/direct\n",
            1 - rank
        );
    }
    fs::write(&log, text).unwrap();
    let output = doctor(fixtures::EPYC2X2, &["--nccl-log", log.to_str().unwrap()]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(3));
    for part in ["#   rank 0 to 1: 1 by SHM", "(log-shm)", "SHM by NCCL's rule: the path is PHB, beyond PXB"] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(!text.contains("secret-host"), "{text}");
    let json = stdout(&doctor(fixtures::EPYC2X2, &["--nccl-log", log.to_str().unwrap(), "--json"]));
    assert!(!json.contains("secret-host"), "{json}");
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["nccl_log"]["pairs"][1]["channels"], serde_json::json!({"shm": 1}));
    assert_eq!((&json["nccl_log"]["hosts"], &json["nccl_log"]["pairs"][1]["from_rank"]), (&1.into(), &1.into()));
    let missing = doctor(fixtures::EPYC2X2, &["--nccl-log", "/nowhere/log"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("can't read /nowhere/log"));
}

/// Runs the script with a setpci that keeps each bridge's control in a file.
fn run_script(script: &Path, controls: &Path) -> Output {
    let bin = tempfile::tempdir().unwrap();
    let fake = bin.path().join("setpci");
    let text = format!(
        "#!/bin/sh\nfile={}/$2\n[ -e \"$file\" ] || exit 1\ncase $3 in\n\
         *=0000:001c) printf '%04x\\n' $(( 0x$(cat $file) & ~0x1c )) > $file.new && mv $file.new $file ;;\n\
         *=*) exit 9 ;;\n*) cat $file ;;\nesac\n",
        controls.display()
    );
    fs::write(&fake, text).unwrap();
    fs::set_permissions(&fake, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    Command::new("sh").arg(script).env("PATH", path).output().expect("sh starts")
}

#[test]
fn the_fix_is_written_clears_only_redirection_and_replaces_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("fix");
    let output = doctor(fixtures::EPYC2X2, &["--write-acs-fix", to.to_str().unwrap()]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(
        text.contains("nothing applied") && text.contains("again after a restart") && text.contains("grep ACSCtl"),
        "{text}"
    );
    let script = to.join("peersum-acs-redirect-off.sh");
    let unit = fs::read_to_string(to.join("peersum-acs-redirect-off.service")).unwrap();
    assert!(unit.contains("ExecStart=/usr/local/sbin/peersum-acs-redirect-off.sh\n"), "{unit}");
    let controls = folder.path().join("controls");
    fs::create_dir(&controls).unwrap();
    for bridge in ["0000:00:01.1", "0000:40:01.1", "0000:80:01.1"] {
        fs::write(controls.join(bridge), "001d\n").unwrap();
    }
    let ran = run_script(&script, &controls);
    assert!(ran.status.success(), "{ran:?}");
    // Source validation stays; a bridge that is not there is left out.
    assert_eq!(fs::read_to_string(controls.join("0000:00:01.1")).unwrap(), "0001\n");
    assert!(stdout(&ran).contains("0000:40:01.1: ACS control 001d -> 0001"), "{ran:?}");
    assert!(stdout(&ran).contains("0000:c0:01.1: no ACS, or not there"), "{ran:?}");

    let again = doctor(fixtures::EPYC2X2, &["--write-acs-fix", to.to_str().unwrap()]);
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&again.stderr).contains("an older one is not replaced"));
    let none = doctor(fixtures::PCIE4, &["--write-acs-fix", folder.path().join("none").to_str().unwrap()]);
    assert_eq!(none.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&none.stderr).contains("there is nothing to write"));
    assert!(!folder.path().join("none").exists());
}

/// Text as nccl-tests prints it, of 8 ranks on so many hosts; each row is a size, its time, and its bus bandwidth.
fn results(hosts: usize, rows: &[(u64, f64, f64)]) -> String {
    let mut text = String::from("# nccl-tests version 2.19.6\n# Collective test starting: all_reduce_perf\n");
    for rank in 0..8 * hosts {
        let host = rank / 8;
        text += &format!(
            "#  Rank {rank:2} Group  0 Pid  1{rank} on secret-host{host} device {} [0000:18:00] NVIDIA H200\n",
            rank % 8
        );
    }
    text += "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong\n";
    for (bytes, us, bus) in rows {
        let half = format!("{us:.2} 1.0 {bus:.2} 0");
        text += &format!("{bytes} {} float sum -1 {half} {half}\n", bytes / 4);
    }
    text + "# Out of bounds values : 0 OK\n"
}

#[test]
fn results_of_a_benchmark_are_held_against_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let good = file("good", &results(1, &[(1024, 24.0, 0.1), (1 << 29, 2400.0, 391.0)]));
    let fine = doctor(fixtures::H200X8, &["--results", &good]);
    assert_eq!(fine.status.code(), Some(0), "{}", stdout(&fine));
    assert!(stdout(&fine).contains(
        "# Results: nccl-tests 2.19.6, all_reduce, 8 ranks, 1 node: 1K 24.00 us, at best 391.0 GB/s at 512M"
    ));
    let slow = file("slow", &results(1, &[(1024, 180.0, 0.1), (1 << 29, 40_000.0, 23.5)]));
    let bad = doctor(fixtures::H200X8, &["--results", &slow]);
    assert_eq!(bad.status.code(), Some(3));
    let text = stdout(&bad);
    for part in
        ["(results-long-slow)", "512M: 23.5 GB/s of bus bandwidth, of 450", "(results-short-slow)", "1K: 180.00 us"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let two = file("two", &results(2, &[(1024, 60.0, 0.1), (1 << 29, 400_000.0, 2.4)]));
    let text = stdout(&doctor(fixtures::H200X8, &["--results", &good, "--results", &two]));
    assert!(text.contains("2 nodes come to 2.4 GB/s, which is what TCP carries"), "{text}");
    assert!(text.contains("within a node 391.0 GB/s, so 2 nodes have 1 % of that"), "{text}");
    assert!(!text.contains("secret-host"), "{text}");
    let nothing = doctor(fixtures::H200X8, &["--results", &file("nothing", "hello\n")]);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&nothing.stderr).contains("there is no measurement in it"));
}

/// Field case A13 (NVIDIA/nccl#2079, #606): of the bridges that lspci shows, those on the way that redirect are named.
#[test]
fn lspci_tells_what_can_not_be_read_here() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lspci");
    let bridge = |address: &str, control: &str| {
        format!("{address} PCI bridge: A bridge\n\tCapabilities: [100 v1] Advanced Error Reporting\n{control}\n")
    };
    let control = |bits: &str| format!("\t\tACSCtl:\t{bits} UpstreamFwd- EgressCtrl- DirectTrans-\n");
    let redirects = control("SrcValid+ TransBlk- ReqRedir+ CmpltRedir+");
    let valid = control("SrcValid+ TransBlk- ReqRedir- CmpltRedir-");
    let none = control("SrcValid- TransBlk- ReqRedir- CmpltRedir-");
    let ports = ["18:00.0", "18:04.0", "18:08.0", "18:0c.0", "18:10.0"];
    let unreadable = fixtures::PCIE4.replace("acs=0x00", "acs=unreadable");
    let examined = |text: String| {
        fs::write(&file, text).unwrap();
        doctor(&unreadable, &["--lspci", file.to_str().unwrap()])
    };
    let mixed = [&redirects, &valid, &none, &String::new(), &none];
    // A bridge that is on no GPU's way redirects too, and is not named.
    let text = ports.iter().zip(mixed).map(|(port, control)| bridge(port, control)).collect::<String>()
        + &bridge("ff:01.0", &redirects);
    let output = examined(text);
    assert_eq!(output.status.code(), Some(3), "{}", stdout(&output));
    assert!(stdout(&output).contains("ACS redirects P2P at 1 PCIe bridge"), "{}", stdout(&output));
    assert!(stdout(&output).contains("0000:18:00.0 ACSCtl: SrcValid+") && !stdout(&output).contains("ff:01.0"));
    let denied =
        ports.iter().map(|port| format!("{port} PCI bridge: A bridge\n\tCapabilities: <access denied>\n")).collect();
    let output = examined(denied);
    assert_eq!(output.status.code(), Some(2));
    assert!(stdout(&output).contains("lspci was not run as root"), "{}", stdout(&output));
    let clean = ports.iter().map(|port| bridge(port, &none)).collect();
    assert_eq!(examined(clean).status.code(), Some(0));
    let elsewhere = examined(bridge("00:1c.0", &none));
    assert!(String::from_utf8_lossy(&elsewhere.stderr).contains("none of the bridges in it is one of this machine's"));
}

/// Field case A12 (pytorch/pytorch#84803, NVIDIA/nccl#257): translating, passing through, off, and not to be read each
/// have their word, and their exit code.
#[test]
fn each_mode_of_the_iommu_has_its_word() {
    let of = |text: &str| {
        let output = doctor(text, &[]);
        (stdout(&output), output.status.code())
    };
    let (text, code) = of(&fixtures::PCIE4.replace("iommu identity", "iommu DMA-FQ"));
    assert!(
        text.contains("(iommu-translating)") && text.contains("P2P over PCIe is suspect") && code == Some(1),
        "{text}"
    );
    let (text, code) = of(fixtures::PCIE4);
    assert!(text.contains("IOMMU: on, passing addresses through") && code == Some(0), "{text}");
    let off = fixtures::PCIE4
        .lines()
        .filter(|line| !line.starts_with("iommu"))
        .map(|line| line.split(' ').filter(|word| !word.starts_with("group=")).collect::<Vec<_>>().join(" ") + "\n");
    let (text, code) = of(&off.collect::<String>());
    assert!(text.contains("IOMMU: off") && code == Some(0), "{text}");
    let (text, code) = of(&fixtures::PCIE4.replace("iommu identity", "iommu something-new"));
    assert!(text.contains("the IOMMU: whether it translates") && code == Some(2), "{text}");
}

#[test]
fn this_machine_is_examined_whatever_it_is() {
    let output = Command::new(env!("CARGO_BIN_EXE_peersum")).arg("doctor").output().unwrap();
    assert!(matches!(output.status.code(), Some(0..=3)), "{output:?}");
    assert!(stdout(&output).contains("# GPUs: "), "{output:?}");
}
