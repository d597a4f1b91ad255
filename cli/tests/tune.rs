//! `peersum tune` from the outside, where there is no GPU.
#![cfg(feature = "cuda")]

use std::{
    path::Path,
    process::{Command, Output},
};

/// With no GPU to be seen, and a home of its own.
fn tune(flags: &str, home: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peersum"))
        .arg("tune")
        .args(flags.split_whitespace())
        .env("CUDA_VISIBLE_DEVICES", "")
        .env("HOME", home)
        .env_remove("XDG_CACHE_HOME")
        .env_remove("PEERSUM_TABLE")
        .output()
        .expect("the command starts")
}

fn said(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(output.stdout, b"", "nothing was measured");
    String::from_utf8(output.stderr.clone()).expect("errors are UTF-8")
}

#[test]
fn where_nothing_can_be_tuned_one_sentence_says_why_and_nothing_is_written() {
    let home = tempfile::tempdir().expect("a directory");
    let error = said(&tune("--quick", home.path()));
    assert!(error.starts_with("peersum: error: nothing can be tuned here: "), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert_eq!(std::fs::read_dir(home.path()).expect("the directory").count(), 0);
}

#[test]
fn what_can_not_be_is_told_before_a_gpu_is_looked_for() {
    let home = tempfile::tempdir().expect("a directory");
    for (flags, says) in [
        ("-g 0", "-g 0"),
        ("-b 2M -e 1M", "-b 2M"),
        ("-f 1", "-f 1"),
        ("--samples all.txt", ".csv"),
        ("--plot all.png", ".svg"),
        ("-d double", "bfloat16"),
        ("--placement nowhere", "symmetric-in-place"),
        ("--no-nccl --nccl-library /a", "--nccl-library"),
    ] {
        let error = said(&tune(flags, home.path()));
        assert!(error.contains(says), "{flags}: {error}");
        assert!(!error.contains("nothing can be tuned"), "{flags}: {error}");
    }
}

/// Each of them would measure all GPUs, at the same time.
#[test]
fn several_that_a_launcher_started_are_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_peersum"))
        .args(["tune", "--quick"])
        .envs([("RANK", "1"), ("WORLD_SIZE", "4")])
        .output()
        .expect("the command starts");
    let error = said(&output);
    assert!(error.contains("a launcher started 4 of this"), "{error}");
}

#[test]
fn help_says_what_becomes_of_it() {
    let home = tempfile::tempdir().expect("a directory");
    let output = tune("--help", home.path());
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("UTF-8").split_whitespace().collect::<Vec<_>>().join(" ");
    for words in
        ["CUDA graphs", "with one wrong element is refused", "goes on where it was", "PEERSUM_TABLE", "--no-nccl"]
    {
        assert!(text.contains(words), "{words} is not in {text}");
    }
}
