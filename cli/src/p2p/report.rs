//! What is made of the matrices: verdicts, rates that could be, text and JSON.

use std::io::{self, Write};

use serde::Serialize;

use super::{
    links::{Compared, CopyLatency, Device, Entry, Links, Matrix, Measured, Way},
    theory::{self, Rate},
};
use crate::topology::{machine::Machine, matrix, nvml::Status};

/// Whether a pair may be used. Figures have no part in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// The owner of the memory found all that was sent, by every route.
    Good,
    /// It did not.
    Bad,
    /// There is no P2P.
    NoP2p,
    /// Something failed before that could be seen.
    Unknown,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Good => "ok",
            Verdict::Bad => "BAD",
            Verdict::NoP2p => "no",
            Verdict::Unknown => "error",
        }
    }
}

/// The report. Grows as `peersum perf`'s does.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema: &'static str,
    schema_version: u32,
    peersum_version: &'static str,
    /// Of each copy.
    bytes: usize,
    pub(crate) devices: Vec<Device>,
    /// The labels that `nvidia-smi topo -m` has, where they are known.
    connections: Vec<Vec<Option<String>>>,
    pub(crate) verdicts: Vec<Vec<Option<Verdict>>>,
    /// One way, straight.
    theory: Vec<Vec<Option<Rate>>>,
    theory_through_host: Vec<Vec<Option<Rate>>>,
    /// Percent of the theoretical rate that the faster engine's writes reach.
    efficiency_percent: Vec<Vec<Option<f64>>>,
    #[serde(flatten)]
    pub(crate) measured: Measured,
    pub(crate) notes: Vec<String>,
}

impl Report {
    pub(crate) fn new(links: &dyn Links, bytes: usize, measured: Measured, machine: Option<&Machine>) -> Report {
        let devices = links.devices();
        let count = devices.len();
        let grid = |cell: &dyn Fn(usize, usize) -> Option<Rate>| -> Vec<Vec<_>> {
            (0..count).map(|from| (0..count).map(|to| cell(from, to)).collect()).collect()
        };
        let places = |from: usize, to: usize| {
            let machine = machine?;
            Some((machine, theory::place(machine, &devices[from].pci)?, theory::place(machine, &devices[to].pci)?))
        };
        // A device that stands twice has one memory, which both read and write.
        let straight = |from: usize, to: usize| {
            if links.same_device(from, to) {
                return theory::local(&devices[from]).map(|rate| match from == to {
                    true => rate,
                    false => Rate { gb_per_s: rate.gb_per_s / 2.0, by: "half of the memory's bandwidth".into() },
                });
            }
            places(from, to).and_then(|(machine, a, b)| theory::between(machine, a, b, true))
        };
        let theory = grid(&straight);
        let theory_through_host = grid(&|from, to| {
            let (machine, a, b) = places(from, to).filter(|_| !links.same_device(from, to))?;
            theory::between(machine, a, b, false)
        });
        let connections = (0..count)
            .map(|from| {
                let cell = |to: usize| match (from == to, links.same_device(from, to), places(from, to)) {
                    (true, ..) => Some("X".into()),
                    (_, true, _) => Some("same".into()),
                    (.., Some((machine, a, b))) => Some(matrix::gpus(machine, (a, b)).to_string()),
                    (.., None) => None,
                };
                (0..count).map(cell).collect()
            })
            .collect();
        let mut notes = Vec::new();
        if (1..count).all(|device| links.same_device(0, device)) {
            notes.push(match count {
                1 => "One GPU: there is no pair. What is shown is within the device's own memory.".to_owned(),
                _ => {
                    "All places are of one GPU: no link is measured, only how this goes between two streams.".to_owned()
                }
            });
        }
        notes.push("From one to the same: reads and writes both count, as in p2pBandwidthLatencyTest.".into());
        notes.push(
            "Data are compared by the device that owns the memory, with its own loads. Bandwidth has no part in the verdict."
                .into(),
        );
        let verdicts = (0..count)
            .map(|from| (0..count).map(|to| (from != to).then(|| verdict(&measured, from, to))).collect())
            .collect();
        let mut report = Report {
            schema: "peersum-p2p",
            schema_version: 1,
            peersum_version: env!("CARGO_PKG_VERSION"),
            bytes,
            connections,
            verdicts,
            efficiency_percent: Vec::new(),
            theory,
            theory_through_host,
            devices,
            measured,
            notes,
        };
        report.count_local_twice();
        report.efficiency_percent =
            (0..count).map(|from| (0..count).map(|to| report.efficiency(from, to)).collect()).collect();
        report
    }

    fn count_local_twice(&mut self) {
        for matrix in &mut self.measured.one_way {
            for (place, row) in matrix.cells.iter_mut().enumerate() {
                if let Some(Entry::Value(rate)) = &mut row[place] {
                    *rate *= 2.0;
                }
            }
        }
    }

    fn efficiency(&self, from: usize, to: usize) -> Option<f64> {
        let theory = self.theory[from][to].as_ref()?.gb_per_s;
        let written = self
            .measured
            .one_way
            .iter()
            .filter(|matrix| matrix.route.is_some_and(|route| route.p2p && route.way == Way::Write));
        let best =
            written.filter_map(|matrix| matrix.cells[from][to].as_ref()?.value().copied()).max_by(f64::total_cmp)?;
        Some(best / theory * 100.0)
    }

    /// Whether data were wrong anywhere.
    pub(crate) fn any_bad(&self) -> bool {
        let wrong = |matrix: &Matrix<Compared>| {
            let mut entries = matrix.cells.iter().flatten().flatten();
            entries.any(|entry| entry.value().is_some_and(|compared| compared.wrong > 0))
        };
        self.measured.compared.iter().any(wrong)
    }

    /// Whether something failed that was to be measured. A pair without P2P is no failure.
    pub(crate) fn any_failed(&self) -> bool {
        let refused = |from: usize, to: usize| {
            let cell = |a: usize, b: usize| matches!(self.measured.reaches[a][b], Some(Entry::Error(_)));
            cell(from, to) || cell(to, from)
        };
        fn failed<T>(matrices: &[Matrix<T>], refused: &dyn Fn(usize, usize) -> bool) -> bool {
            matrices.iter().any(|matrix| {
                let cells = matrix.cells.iter().enumerate();
                let mut cells =
                    cells.flat_map(|(from, row)| row.iter().enumerate().map(move |(to, cell)| (from, to, cell)));
                cells.any(|(from, to, cell)| matches!(cell, Some(Entry::Error(_))) && !refused(from, to))
            })
        }
        let measured = &self.measured;
        failed(&measured.compared, &refused)
            || failed(&measured.one_way, &refused)
            || failed(&measured.both_ways, &refused)
            || failed(&measured.copy_latency, &refused)
            || failed(&measured.kernel_latency, &refused)
    }

    pub(crate) fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut footnotes = Vec::new();
        for (place, device) in self.devices.iter().enumerate() {
            writeln!(out, "# {place}: device {}, {}, {}", device.ordinal, device.name, device.pci)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(out, "# {note}"))?;
        let count = self.devices.len();
        let table = |out: &mut dyn Write, title: &str, cell: &mut dyn FnMut(usize, usize) -> String| {
            let cells: Vec<Vec<_>> = (0..count).map(|from| (0..count).map(|to| cell(from, to)).collect()).collect();
            let width = cells.iter().flatten().map(String::len).max().unwrap_or(0).max(6);
            writeln!(out, "\n{title}")?;
            write!(out, "   D\\D")?;
            (0..count).try_for_each(|to| write!(out, " {to:>width$}"))?;
            writeln!(out)?;
            for (from, row) in cells.iter().enumerate() {
                write!(out, "{from:>6}")?;
                row.iter().try_for_each(|cell| write!(out, " {cell:>width$}"))?;
                writeln!(out)?;
            }
            io::Result::Ok(())
        };
        let at = |cells: &[Vec<Option<String>>], from: usize, to: usize| cells[from][to].clone().unwrap_or("?".into());
        table(out, "Connection, as nvidia-smi topo -m has it", &mut |from, to| at(&self.connections, from, to))?;
        table(out, "P2P connectivity (1: the row's device reaches the column's memory)", &mut |from, to| match &self
            .measured
            .reaches[from][to]
        {
            None | Some(Entry::Value(true)) => "1".into(),
            Some(Entry::Value(false)) => "0".into(),
            Some(Entry::Error(why)) => footnote(&mut footnotes, "0", why),
        })?;
        table(out, "Verdict: what was written or read, compared by the owner of the memory", &mut |from, to| {
            let cell = |cells: &Vec<Vec<Option<Verdict>>>| cells[from][to].map_or("-", Verdict::name).to_owned();
            cell(&self.verdicts)
        })?;
        for matrix in &self.measured.compared {
            for (from, row) in matrix.cells.iter().enumerate() {
                for (to, entry) in row.iter().enumerate() {
                    let Some(Entry::Value(compared)) = entry else { continue };
                    if let (1.., Some(first)) = (compared.wrong, compared.first_wrong) {
                        let (wrong, words) = (compared.wrong, compared.words);
                        writeln!(
                            out,
                            "  {from} -> {to}, {}: {wrong} of {words} words are wrong, the first at {first}",
                            matrix.title
                        )?;
                    }
                }
            }
        }
        let rate = |cells: &Vec<Vec<Option<Rate>>>, from: usize, to: usize| {
            cells[from][to].as_ref().map_or("?".into(), |rate| format!("{:.1}", rate.gb_per_s))
        };
        table(out, "Theoretical bandwidth, one way, straight (GB/s)", &mut |from, to| rate(&self.theory, from, to))?;
        if self.theory_through_host.iter().flatten().any(Option::is_some) {
            table(out, "Theoretical bandwidth, one way, through the host's memory (GB/s)", &mut |from, to| {
                if from == to { "-".into() } else { rate(&self.theory_through_host, from, to) }
            })?;
        }
        let shown = |entry: &Option<Entry<f64>>, footnotes: &mut Vec<String>| match entry {
            None => "-".to_owned(),
            Some(Entry::Value(value)) => format!("{value:.2}"),
            Some(Entry::Error(why)) => footnote(footnotes, "err", why),
        };
        for (kind, matrices) in
            [("Unidirectional", &self.measured.one_way), ("Bidirectional", &self.measured.both_ways)]
        {
            for matrix in matrices {
                table(out, &format!("{kind} bandwidth, {} ({})", matrix.title, matrix.unit), &mut |from, to| {
                    shown(&matrix.cells[from][to], &mut footnotes)
                })?;
            }
        }
        table(out, "Efficiency: the faster engine's P2P writes, of the theoretical rate (%)", &mut |from, to| {
            self.efficiency_percent[from][to].map_or("?".into(), |percent| format!("{percent:.0}"))
        })?;
        for matrix in &self.measured.copy_latency {
            for (who, part) in
                [("GPU", (|latency| latency.gpu_us) as fn(&CopyLatency) -> f64), ("CPU", |latency| latency.host_us)]
            {
                table(out, &format!("Latency, {}, {who} (us)", matrix.title), &mut |from, to| {
                    let entry = matrix.cells[from][to].clone();
                    let of = |entry| match entry {
                        Entry::Value(latency) => Entry::Value(part(&latency)),
                        Entry::Error(why) => Entry::Error(why),
                    };
                    shown(&entry.map(of), &mut footnotes)
                })?;
            }
        }
        for matrix in &self.measured.kernel_latency {
            table(out, &format!("Latency, {} ({})", matrix.title, matrix.unit), &mut |from, to| {
                shown(&matrix.cells[from][to], &mut footnotes)
            })?;
        }
        if !footnotes.is_empty() {
            writeln!(out)?;
        }
        footnotes.iter().enumerate().try_for_each(|(index, why)| writeln!(out, "[{}] {why}", index + 1))
    }
}

/// The word with the number of a footnote, which is the same for the same text.
fn footnote(footnotes: &mut Vec<String>, word: &str, text: &str) -> String {
    let index = footnotes.iter().position(|known| known == text).unwrap_or_else(|| {
        footnotes.push(text.to_owned());
        footnotes.len() - 1
    });
    format!("{word}[{}]", index + 1)
}

/// Over a pair in this direction.
fn verdict(measured: &Measured, from: usize, to: usize) -> Verdict {
    let of = |p2p: bool| {
        let matrices =
            measured.compared.iter().filter(move |matrix| matrix.route.is_some_and(|route| route.p2p == p2p));
        matrices.filter_map(move |matrix| matrix.cells[from][to].as_ref())
    };
    let wrong = |entry: &Entry<Compared>| entry.value().is_some_and(|compared| compared.wrong > 0);
    if of(true).chain(of(false)).any(wrong) {
        return Verdict::Bad;
    }
    let refused = |a: usize, b: usize| matches!(measured.reaches[a][b], Some(Entry::Error(_)));
    if refused(from, to) {
        return Verdict::NoP2p;
    }
    let mut entries = of(true).peekable();
    if entries.peek().is_some() && entries.all(|entry| entry.value().is_some()) {
        Verdict::Good
    } else {
        Verdict::Unknown
    }
}

/// Why a pair has no P2P, as NVML knows it.
pub(crate) fn reason(machine: &Machine, (a, b): (usize, usize)) -> Option<String> {
    if [a, b].iter().any(|&gpu| machine.gpus[gpu].mig == Some(true)) {
        return Some("a GPU is divided (MIG), and parts of it have no P2P".into());
    }
    let status = machine.p2p_refused((a, b)).filter(|status| *status != Status::Unknown)?;
    Some(format!("NVML says {}", status.meaning()))
}
