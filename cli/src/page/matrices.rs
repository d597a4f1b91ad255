//! Reads a report of `peersum p2p --json`, and draws its matrices.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{
    Picture,
    heat::{Cell, Heat},
};

/// The matrices of a report of `peersum p2p --json`.
pub(crate) fn matrices(text: &str) -> Result<Vec<Picture>> {
    let report: Value = serde_json::from_str(text).context("it is no JSON")?;
    match report["schema"].as_str() {
        Some("peersum-p2p") if report["schema_version"] == 1 => (),
        Some("peersum-p2p") => {
            bail!("the report has schema_version {}, and 1 is what is read here", report["schema_version"])
        }
        _ => bail!("this is no report of `peersum p2p --json`"),
    }
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let devices = list(&report["devices"]);
    ensure!(!devices.is_empty() && devices.len() <= 64, "the report has {} devices", devices.len());
    let labels: Vec<_> = devices.iter().map(|device| format!("device {}", device["ordinal"])).collect();
    let square = |rows: &Value, cell: &dyn Fn(&Value) -> Cell| -> Vec<Vec<Cell>> {
        (0..labels.len()).map(|row| (0..labels.len()).map(|column| cell(&rows[row][column])).collect()).collect()
    };
    let mut pictures = Vec::new();
    let verdicts = Heat {
        title: "Whether data arrive".into(),
        unit: "compared by the owner of the memory".into(),
        labels: labels.clone(),
        cells: square(&report["verdicts"], &|cell| match cell.as_str() {
            Some("good") => Cell::Word("ok".into()),
            Some("bad") => Cell::Bad("BAD".into()),
            Some("no_p2p") => Cell::Word("no P2P".into()),
            Some(_) => Cell::Word("error".into()),
            None => Cell::Nothing,
        }),
    };
    if labels.len() > 1 {
        pictures.push(verdicts.picture());
    }
    let mut add = |title: String, unit: &str, cells: Vec<Vec<Cell>>| {
        if cells.iter().flatten().any(|cell| *cell != Cell::Nothing) {
            pictures.push(Heat { title, unit: unit.into(), labels: labels.clone(), cells }.picture());
        }
    };
    for (key, kind) in [
        ("one_way", "One way"),
        ("both_ways", "Both ways"),
        ("copy_latency", "Latency on the device"),
        ("kernel_latency", "Latency"),
    ] {
        for matrix in list(&report[key]) {
            // A copy has two times, of which the host's is none of the link's.
            let figure = |cell: &Value| cell["value"].as_f64().or(cell["value"]["gpu_us"].as_f64());
            let cells = square(&matrix["cells"], &|cell| match (figure(cell), &cell["error"]) {
                (Some(value), _) => Cell::Value(value),
                (None, Value::String(_)) => Cell::Word("error".into()),
                _ => Cell::Nothing,
            });
            let title = format!("{kind}, {}", matrix["title"].as_str().unwrap_or(""));
            add(title, matrix["unit"].as_str().unwrap_or(""), cells);
        }
        if key == "one_way" {
            let percent =
                square(&report["efficiency_percent"], &|cell| cell.as_f64().map_or(Cell::Nothing, Cell::Value));
            add("Efficiency, P2P writes by the faster engine".into(), "% of the theoretical rate", percent);
        }
    }
    Ok(pictures)
}
