//! `peersum p2p`, `probe` and `paths` from the outside: on GPUs if there are any, and what is said where there are none.
#![cfg(feature = "cuda")]

use std::{
    process::{Command, Output},
    sync::{Mutex, PoisonError},
};

use serde_json::Value;

/// The command: of this build, or of `PEERSUM_COMMAND` where the tests have been taken to another machine.
fn peersum(arguments: &[&str]) -> Output {
    Command::new(std::env::var("PEERSUM_COMMAND").unwrap_or_else(|_| env!("CARGO_BIN_EXE_peersum").to_owned()))
        .args(arguments)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .output()
        .expect("the command starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// One process at a time: the GPU goes from one to the other by time slices, which would be in the figures.
static GPU: Mutex<()> = Mutex::new(());

/// The JSON of a run on a GPU; none where this machine has none, or no kernels were built.
fn on_a_gpu(arguments: &[&str]) -> Option<Value> {
    let _turn = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    let output = peersum(arguments);
    let said = stderr(&output);
    let missing = ["CUDA is not available", "no GPU kernels", "kernels", "shows no device"];
    if output.status.code() == Some(2) && missing.iter().any(|missing| said.contains(missing)) {
        assert!(std::env::var_os("PEERSUM_REQUIRE_GPU").is_none(), "{said}");
        eprintln!("skipped: {said}");
        return None;
    }
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stdout));
    Some(serde_json::from_slice(&output.stdout).expect("it is JSON"))
}

#[test]
fn where_nothing_can_be_measured_it_is_said_with_code_2() {
    for command in ["p2p", "probe", "paths"] {
        // No machine has so many.
        let output = peersum(&[command, "--devices", "4000,4001"]);
        assert_eq!(output.status.code(), Some(2), "{command}");
        assert!(stderr(&output).starts_with("peersum: error: ") && output.stdout.is_empty(), "{output:?}");
    }
    for (arguments, why) in [
        (&["p2p", "-b", "15"][..], "multiple of 16"),
        (&["paths", "-b", "2M", "-e", "1M"], "span no size"),
        (&["probe", "-o", "x.yaml"], "error: "),
    ] {
        let output = peersum(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(why), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn a_pair_of_streams_of_one_gpu_has_all_figures_and_right_data() {
    let Some(report) = on_a_gpu(&["p2p", "--devices", "0,0", "-b", "1M", "--json"]) else { return };
    assert_eq!(report["schema"], "peersum-p2p");
    assert_eq!((&report["verdicts"][0][1], &report["verdicts"][1][0]), (&"good".into(), &"good".into()), "{report}");
    for part in ["compared", "one_way", "both_ways", "copy_latency", "kernel_latency"] {
        for matrix in report[part].as_array().unwrap() {
            for cell in matrix["cells"].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap()) {
                assert!(cell.get("error").is_none(), "{part}: {matrix}");
            }
        }
    }
    assert!(report["one_way"][0]["cells"][0][1]["value"].as_f64().unwrap() > 1.0, "{report}");
    // A store is seen within a microsecond or two, and not in no time.
    let store = report["kernel_latency"][0]["cells"][0][1]["value"].as_f64().unwrap();
    assert!((0.05..50.0).contains(&store), "{store}");
}

#[test]
fn one_gpu_alone_has_a_matrix_too() {
    let Some(report) = on_a_gpu(&["p2p", "--devices", "0", "-b", "1M", "--json"]) else { return };
    assert!(report["notes"][0].as_str().unwrap().contains("there is no pair"), "{report}");
    assert!(report["one_way"][0]["cells"][0][0]["value"].as_f64().unwrap() > 1.0, "{report}");
}

#[test]
fn what_is_probed_is_read_by_the_model() {
    let folder = tempfile::tempdir().unwrap();
    for form in ["json", "toml"] {
        let file = folder.path().join(format!("machine.{form}"));
        let path = file.to_str().unwrap();
        let Some(report) = on_a_gpu(&["probe", "--devices", "0,0", "-o", path, "--json"]) else { return };
        let parameters = &report["parameters"];
        for key in ["t0_us", "push_us", "load_us", "atomic_us", "gb_per_s"] {
            assert!(parameters[key].as_f64().unwrap() > 0.0, "{key}: {report}");
        }
        let model = peersum(&["model", "--parameters", path, "-g", "2"]);
        assert!(model.status.success() && !String::from_utf8_lossy(&model.stdout).contains("Assumed"), "{model:?}");
    }
}

#[test]
fn paths_of_two_ranks_on_one_gpu_are_measured() {
    let Some(report) = on_a_gpu_or_failing(&["paths", "--devices", "0,0", "-b", "1M", "-e", "2M", "--json"]) else {
        return;
    };
    let own = report["ladder"].as_array().unwrap().iter().find(|line| line["contender"] == "peersum");
    assert!(own.is_some_and(|own| own["busbw_gb_per_s"].as_f64().unwrap() > 0.0), "{report}");
}

/// NCCL may be missing, which is code 1 and no reason to fail.
fn on_a_gpu_or_failing(arguments: &[&str]) -> Option<Value> {
    let turn = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    let output = peersum(arguments);
    drop(turn);
    match output.status.code() {
        Some(0 | 1) => Some(serde_json::from_slice(&output.stdout).expect("it is JSON")),
        _ => on_a_gpu(arguments),
    }
}
