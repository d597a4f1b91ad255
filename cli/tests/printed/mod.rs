//! What `peersum perf` prints and writes.

use std::{path::Path, process::Output};

use serde_json::Value;

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("the table is UTF-8")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("errors are UTF-8")
}

/// The lines that are not comments, in columns.
pub(crate) fn rows(output: &Output) -> Vec<Vec<String>> {
    stdout(output)
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().map(str::to_owned).collect())
        .collect()
}

pub(crate) fn report(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("the report is there")).expect("the report is JSON")
}
