//! Reads the text of `nvidia-smi topo -m`.
//!
//! The text is made for people: columns come and go with versions, and words with languages. So nothing is taken by its
//! place alone: labels name rows and columns, each device has its X where it meets itself, and a cell counts if the one
//! across the diagonal says the same. What doesn't fit is an error, or unknown.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};

use super::matrix::{Connection, Device, Matrix, Relation};

/// A cell, as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    Itself,
    Is(Connection),
    Unknown,
}

/// The matrix, and what is to be said about it.
pub(crate) fn parse(text: &str) -> Result<(Matrix, Vec<String>)> {
    let text = without_escapes(text);
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let Some(labels) = lines.by_ref().find_map(header) else {
        bail!(
            "no line names the columns GPU0, GPU1, ...: this is no text of `nvidia-smi topo -m`, or its head is gone"
        );
    };
    for (index, label) in labels.iter().enumerate() {
        ensure!(!labels[..index].contains(label), "two columns are called {label}");
    }
    let mut rows: BTreeMap<&str, (Vec<Cell>, Device)> = BTreeMap::new();
    let mut names = BTreeMap::new();
    for line in lines {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some(label) = first.strip_suffix(':').filter(|label| is_label(label)) {
            names.insert(label.to_owned(), words.collect::<Vec<_>>().join(" "));
            continue;
        }
        let Some(label) = labels.iter().find(|label| *label == first) else { continue };
        let words: Vec<_> = words.collect();
        ensure!(
            words.len() >= labels.len(),
            "the row of {label} has {} cells of {}: the text is cut off",
            words.len(),
            labels.len()
        );
        let cells: Vec<_> = words[..labels.len()].iter().map(|word| cell(word)).collect();
        let row = (cells, device(label, &words[labels.len()..]));
        ensure!(rows.insert(label, row).is_none(), "there are two rows of {label}");
    }
    let missing: Vec<_> =
        labels.iter().filter(|label| !rows.contains_key(label.as_str())).map(String::as_str).collect();
    ensure!(missing.is_empty(), "the rows of {} are missing: the text is cut off", missing.join(", "));
    for (index, label) in labels.iter().enumerate() {
        let cells = &rows[label.as_str()].0;
        ensure!(
            (0..labels.len()).all(|other| (cells[other] == Cell::Itself) == (other == index)),
            "the row of {label} has its X elsewhere than in the column of {label}: its cells are not where they belong"
        );
    }
    Ok(matrix(&labels, &rows, &names))
}

fn matrix(
    labels: &[String],
    rows: &BTreeMap<&str, (Vec<Cell>, Device)>,
    names: &BTreeMap<String, String>,
) -> (Matrix, Vec<String>) {
    let mut notes = Vec::new();
    let mut cells = vec![vec![Connection::default(); labels.len()]; labels.len()];
    for (a, label) in labels.iter().enumerate() {
        for (b, other) in labels.iter().enumerate().take(a) {
            match (rows[label.as_str()].0[b], rows[other.as_str()].0[a]) {
                (Cell::Is(there), Cell::Is(back)) if there == back => (cells[a][b], cells[b][a]) = (there, back),
                (Cell::Is(there), Cell::Is(back)) => notes.push(format!(
                    "{label} and {other}: the text says {there} one way and {back} the other, so neither is taken"
                )),
                _ => notes.push(format!("{label} and {other}: the text doesn't say how they are connected")),
            }
        }
    }
    let device = |label: &String| {
        let name = names.get(label).cloned();
        // Older versions head the columns of NICs with the devices' names.
        let own = (!label.starts_with("GPU") && !label.starts_with("NIC")).then(|| label.clone());
        Device { name: name.or(own), ..rows[label.as_str()].1.clone() }
    };
    (Matrix { devices: labels.iter().map(device).collect(), cells }, notes)
}

/// The labels of a line that heads the columns.
fn header(line: &str) -> Option<Vec<String>> {
    let labels: Vec<_> = line.split_whitespace().take_while(|word| is_label(word)).map(str::to_owned).collect();
    let heads = labels.first()?.starts_with("GPU") && line.split_whitespace().nth(1) != Some("X");
    heads.then_some(labels)
}

/// `GPU0`, `NIC0`, or an RDMA device such as `mlx5_0`.
fn is_label(word: &str) -> bool {
    let name = word.trim_end_matches(|c: char| c.is_ascii_digit());
    let known = ["GPU", "NIC"].contains(&name) || name.starts_with(|c: char| c.is_ascii_lowercase());
    known && name.len() < word.len() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn cell(word: &str) -> Cell {
    if word == "X" {
        return Cell::Itself;
    }
    let links = word.strip_prefix("NV").filter(|digits| digits.bytes().all(|digit| digit.is_ascii_digit()));
    if let Some(links) = links.and_then(|digits| digits.parse().ok()).filter(|links| (1..=64).contains(links)) {
        return Cell::Is(Connection { nvlinks: Some(links), pci: None });
    }
    // SOC is what SYS was called first.
    let word = if word == "SOC" { "SYS" } else { word };
    let relation = Relation::ALL.into_iter().find(|relation| relation.name() == word);
    relation.map_or(Cell::Unknown, |relation| Cell::Is(Connection { nvlinks: Some(0), pci: Some(relation) }))
}

fn device(label: &str, rest: &[&str]) -> Device {
    let is_list = |word: &&str| word.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b',' | b'-'));
    let cpus = rest.first().copied().filter(is_list);
    Device {
        label: label.into(),
        name: None,
        gpu: label.starts_with("GPU"),
        cpus: cpus.map(Into::into),
        numa: cpus.and_then(|_| rest.get(1)?.parse().ok()),
    }
}

/// Without the escape sequences that underline the head.
fn without_escapes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '\u{1b}' {
            plain.push(character);
        } else if characters.next() == Some('[') {
            let _ = characters.find(|end| end.is_ascii_alphabetic());
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BRIDGES: &str = "\
\t\u{1b}[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\u{1b}[0m
GPU0\t X \tNV4\tPXB\tSYS\tPIX\t0-15,32-47\t0\t\tN/A
GPU1\tNV4\t X \tPHB\tSYS\tNODE\t0-15,32-47\t0\t\tN/A
GPU2\tPXB\tPHB\t X \tNV4\tSYS\t16-31,48-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t16-31,48-63\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
";

    fn cells(text: &str) -> Vec<Vec<String>> {
        let (matrix, _) = parse(text).unwrap();
        matrix.cells.iter().map(|row| row.iter().map(Connection::to_string).collect()).collect()
    }

    #[test]
    fn the_text_of_the_command_is_read() {
        let (matrix, notes) = parse(BRIDGES).unwrap();
        assert_eq!(notes, Vec::<String>::new());
        assert_eq!(cells(BRIDGES)[0], ["?", "NV4", "PXB", "SYS", "PIX"]);
        assert_eq!(cells(BRIDGES)[4], ["PIX", "NODE", "SYS", "SYS", "?"]);
        let labels: Vec<_> = matrix.devices.iter().map(|device| device.label.as_str()).collect();
        assert_eq!(labels, ["GPU0", "GPU1", "GPU2", "GPU3", "NIC0"]);
        assert_eq!((matrix.devices[2].cpus.as_deref(), matrix.devices[2].numa), (Some("16-31,48-63"), Some(1)));
        assert_eq!((matrix.devices[4].name.as_deref(), matrix.devices[4].numa), (Some("mlx5_0"), None));
    }

    #[test]
    fn spaces_for_tabs_rows_in_another_order_and_another_language_are_read_the_same() {
        let spaces = BRIDGES.replace('\t', "    ");
        let mut lines: Vec<_> = BRIDGES.lines().collect();
        lines[1..6].reverse();
        let translated = BRIDGES.replace("CPU Affinity", "CPU-Affinität").replace("Legend", "Legende");
        for text in [spaces, lines.join("\n"), translated, BRIDGES.replace('\n', "\r\n")] {
            assert_eq!(parse(&text).unwrap().0.cells, parse(BRIDGES).unwrap().0.cells, "{text}");
        }
    }

    #[test]
    fn older_names_are_read() {
        let text = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tSOC\tPIX\t0-7\nGPU1\tSOC\t X \
         \tSOC\t8-15\nmlx5_0\tPIX\tSOC\t X \t\n";
        assert_eq!(cells(text)[0], ["?", "SYS", "PIX"]);
        assert_eq!(parse(text).unwrap().0.devices[2].name.as_deref(), Some("mlx5_0"));
    }

    /// Field case A54 (NVIDIA/NVSentinel#1485): the command fails, or half of it does.
    #[test]
    fn what_is_cut_off_or_is_no_matrix_is_an_error() {
        let error = |text: &str| parse(text).unwrap_err().to_string();
        for text in ["", "Failed to get topology: Unknown Error\n", "NVIDIA-SMI has failed because it couldn't ...\n"] {
            assert!(error(text).contains("no line names the columns"), "{text}");
        }
        let lines: Vec<_> = BRIDGES.lines().collect();
        assert!(error(&lines[..4].join("\n")).contains("the rows of GPU3, NIC0 are missing"));
        assert!(
            error(&BRIDGES.replace("GPU3\tSYS\tSYS\tNV4\t X \tSYS\t16-31,48-63\t1\t\tN/A", "GPU3\tSYS\tSYS"))
                .contains("the row of GPU3 has 2 cells of 5")
        );
        // A cell is gone, and the others have moved up.
        assert!(error(&BRIDGES.replace("GPU1\tNV4\t X", "GPU1\t X")).contains("its X elsewhere"));
        assert!(error(&BRIDGES.replace("\tGPU2\tGPU3", "\tGPU3\tGPU2")).contains("its X elsewhere"));
        assert!(error(&BRIDGES.replace("\tGPU2\tGPU3", "\tGPU2\tGPU2")).contains("two columns"));
    }

    #[test]
    fn what_is_not_said_alike_both_ways_is_unknown() {
        let (matrix, notes) = parse(&BRIDGES.replacen("NV4", "NV8", 1)).unwrap();
        assert_eq!(matrix.cells[0][1], Connection::default());
        assert!(notes[0].contains("GPU1 and GPU0"), "{notes:?}");
        let (matrix, notes) = parse(&BRIDGES.replacen("NV4", "ERR!", 1)).unwrap();
        assert!(!matrix.cells[1][0].linked() && notes[0].contains("doesn't say"));
    }

    proptest! {
        /// Whatever happens to one place of the text: no pair is linked that isn't.
        #[test]
        fn a_damaged_text_links_nothing(
            at in 0..BRIDGES.len(), cut in 0..30usize, put in "[ \tNVXGPU0-9\n]{0,4}", truncate in any::<bool>(),
        ) {
            let floor = |at: usize| (0..=at.min(BRIDGES.len())).rev().find(|&at| BRIDGES.is_char_boundary(at)).unwrap();
            let (from, to) = (floor(at), floor(at + cut));
            let tail = if truncate { "" } else { &BRIDGES[to..] };
            let damaged = format!("{}{put}{tail}", &BRIDGES[..from]);
            if let Ok((matrix, _)) = parse(&damaged) {
                let whole = parse(BRIDGES).unwrap().0;
                let place = |label: &str| whole.devices.iter().position(|device| device.label == label);
                for (a, row) in matrix.cells.iter().enumerate() {
                    for (b, cell) in row.iter().enumerate().filter(|(_, cell)| cell.linked()) {
                        let (a, b) = (place(&matrix.devices[a].label).unwrap(), place(&matrix.devices[b].label).unwrap());
                        prop_assert_eq!(whole.cells[a][b], *cell, "{}", damaged);
                    }
                }
            }
        }

        #[test]
        fn no_text_breaks_it(text in "(GPU[0-3]|NIC0|X|NV[0-9]{0,3}|PIX|SYS|\t|\n| |\\PC|\u{1b}\\[4m){0,80}") {
            let _ = parse(&text);
        }
    }
}
