//! `peersum page` from the outside, over the fixtures.

use std::{
    fs,
    process::{Command, Output},
};

mod fixtures;

fn page(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peersum")).arg("page").args(arguments).output().expect("the command starts")
}

#[test]
fn a_page_has_the_graph_the_matrices_and_the_curves_and_needs_no_network() {
    let root = fixtures::unpack(fixtures::H200X8);
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let p2p = r#"{"schema": "peersum-p2p", "schema_version": 1, "devices": [{"ordinal": 0}, {"ordinal": 1}],
        "verdicts": [[null, "good"], ["good", null]], "one_way": [{"title": "copy engine, P2P writes", "unit": "GB/s",
        "cells": [[{"value": 4000.0}, {"value": 390.0}], [{"value": 391.0}, {"value": 4001.0}]]}]}"#;
    fs::write(file("p2p.json"), p2p).unwrap();
    let rows = (10..26).map(|shift| format!("nccl,8,{},{}\n", 1u64 << shift, 20.0 + (1u64 << shift) as f64 / 2e5));
    fs::write(file("results.csv"), format!("algorithm,ranks,bytes,time_us\n{}", rows.collect::<String>())).unwrap();
    fs::write(file("probe.toml"), "L = 0.6\nB = 400\n").unwrap();
    let output = page(&[
        "--root",
        root.path().to_str().unwrap(),
        "--p2p",
        &file("p2p.json"),
        "--results",
        &file("results.csv"),
        "--parameters",
        &file("probe.toml"),
        "--svg",
        &file("svg"),
        "-o",
        &file("page.html"),
    ]);
    assert!(output.status.success(), "{output:?}");
    let html = fs::read_to_string(file("page.html")).unwrap();
    for part in
        ["NVLink, all to all", "One way, copy engine", "limit by hops", "model of nccl", "prefers-color-scheme:dark"]
    {
        assert!(html.contains(part), "{part}");
    }
    let rest = html.replace("http://www.w3.org/2000/svg", "");
    assert!(!rest.contains("http") && !rest.contains("<script") && !rest.contains("src="));
    let mut names: Vec<_> =
        fs::read_dir(file("svg")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names.len(), 4, "{names:?}");
    assert_eq!(names[0], "00-how-gpus-and-nics-are-connected.svg");
}

#[test]
fn what_can_not_be_drawn_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = folder.path().join("wrong");
    fs::write(&wrong, "hello").unwrap();
    let (wrong, out) = (wrong.to_str().unwrap(), folder.path().join("page.html"));
    for flag in ["--from", "--p2p", "--results"] {
        let output = page(&[flag, wrong, "-o", out.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(2), "{flag}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(wrong), "{output:?}");
        assert!(!out.exists());
    }
}
