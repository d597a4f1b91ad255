//! `peersum probe`: measures what the model of hops is made of.
//!
//! [`gpu`] has devices and kernels, [`bench`] the measurements.

pub(crate) mod bench;
pub(crate) mod gpu;

use std::{
    fs,
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::model::hops::Parameters;
use bench::{Ball, Bench};

/// What `peersum probe` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Devices of the ranks, as 0,1,2; a device may stand several times [default: all, or 0,0 where there is one]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    devices: Vec<usize>,

    /// Writes the parameters to a file, for `peersum model --parameters`; its form is that of its ending, .json or .toml
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Prints everything in this form instead of text
    #[arg(long, value_name = "FORM")]
    format: Option<Form>,

    /// Prints everything as JSON
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    Json,
    Toml,
}

/// What is written.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    schema_version: u32,
    peersum_version: &'static str,
    notes: Vec<String>,
    /// Of the group: the slowest pair's, and the least that a rank sends, since each rank waits for all.
    parameters: Parameters,
    devices: Vec<Device>,
    launches: Vec<Launch>,
    pairs: Vec<Pair>,
    sent: Vec<Sent>,
}

/// Of a rank.
#[derive(Debug, Serialize)]
struct Device {
    rank: usize,
    ordinal: usize,
    name: String,
    pci: String,
}

/// An empty kernel in a graph.
#[derive(Debug, Serialize)]
struct Launch {
    rank: usize,
    blocks: u32,
    threads: u32,
    time_us: f64,
}

/// From one rank to another, in µs.
#[derive(Debug, Serialize)]
struct Pair {
    from: usize,
    to: usize,
    flag_us: f64,
    packet_us: f64,
    load_us: f64,
    atomic_us: f64,
    store_us: f64,
    fence_us: f64,
}

#[derive(Debug, Serialize)]
struct Sent {
    rank: usize,
    gb_per_s: f64,
}

/// The grid whose launch counts as T0: about that of short messages.
const GRID: (u32, u32) = (16, 256);

/// Runs the subcommand. An error is returned where something could not be measured: the model needs all of it.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let mut devices = gpu::devices(&arguments.devices)?;
    if devices.len() == 1 {
        devices.push(devices[0]);
    }
    ensure!(devices.len() <= gpu::Targets::MOST, "{} ranks, and 16 are the most", devices.len());
    let form = arguments.output.as_ref().map(|file| match file.extension().and_then(|ending| ending.to_str()) {
        Some("json") => Ok((file, Form::Json)),
        Some("toml") => Ok((file, Form::Toml)),
        _ => Err(anyhow::anyhow!("-o {}: the name must end in .json or .toml", file.display())),
    });
    let form = form.transpose()?;
    let bench = Bench::new(gpu::ranks(&devices)?)?;
    bench.connect()?;
    let report = measure(&bench)?;
    if let Some((file, form)) = form {
        fs::write(file, report.text(form)?).with_context(|| format!("can't write {}", file.display()))?;
    }
    let mut out = io::stdout().lock();
    match arguments.format.or(arguments.json.then_some(Form::Json)) {
        Some(form) => out.write_all(report.text(form)?.as_bytes())?,
        None => report.print(&mut out)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(bench: &Bench) -> Result<Report> {
    let count = bench.ranks.len();
    let mut launches = Vec::new();
    for (rank, of) in bench.ranks.iter().enumerate() {
        if bench.ranks[..rank].iter().any(|other| other.same_device(of)) {
            continue;
        }
        for (blocks, threads) in [(1, 32), GRID, (64, 512), (of.device.description.multiprocessors, 512)] {
            let time_us = bench.empty(rank, blocks, threads).context("the launch of an empty kernel")?;
            launches.push(Launch { rank, blocks, threads, time_us });
        }
    }
    let mut pairs = Vec::new();
    for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))).filter(|(from, to)| from != to) {
        let pair = || -> Result<Pair> {
            let fence = bench.fence(from, to)?;
            Ok(Pair {
                from,
                to,
                flag_us: bench.push(Ball::Flag, from, to)?,
                packet_us: bench.push(Ball::Packet, from, to)?,
                load_us: bench.load(from, to)?,
                atomic_us: bench.atomic(from, to)?,
                store_us: fence.store_us,
                fence_us: (fence.fenced_us - fence.store_us).max(0.0),
            })
        };
        pairs.push(pair().with_context(|| format!("from rank {from} to rank {to}"))?);
    }
    let sent = bench.send().context("sending to all others")?;
    let sent: Vec<_> = sent.into_iter().enumerate().map(|(rank, gb_per_s)| Sent { rank, gb_per_s }).collect();
    let devices = bench.ranks.iter().enumerate().map(|(rank, of)| {
        let description = &of.device.description;
        let (name, pci) = (description.name.clone(), description.pci.clone());
        Device { rank, ordinal: description.ordinal, name, pci }
    });
    let mut notes = Vec::new();
    if bench.ranks.iter().enumerate().any(|(rank, of)| bench.ranks[..rank].iter().any(|other| other.same_device(of))) {
        notes.push("Ranks share a device: what is between them is its L2 cache and memory, no link.".to_owned());
    }
    Ok(Report {
        schema: "peersum-probe",
        schema_version: 1,
        peersum_version: env!("CARGO_PKG_VERSION"),
        notes,
        parameters: parameters(&launches, &pairs, &sent),
        devices: devices.collect(),
        launches,
        pairs,
        sent,
    })
}

/// Those of the group.
fn parameters(launches: &[Launch], pairs: &[Pair], sent: &[Sent]) -> Parameters {
    let worst = |of: fn(&Pair) -> f64| pairs.iter().map(of).fold(0.0, f64::max);
    let t0 = launches.iter().filter(|launch| (launch.blocks, launch.threads) == GRID);
    Parameters {
        t0_us: t0.map(|launch| launch.time_us).fold(0.0, f64::max),
        push_us: worst(|pair| pair.flag_us),
        load_us: worst(|pair| pair.load_us),
        atomic_us: worst(|pair| pair.atomic_us),
        fence_us: worst(|pair| pair.fence_us),
        gb_per_s: sent.iter().map(|sent| sent.gb_per_s).fold(f64::INFINITY, f64::min),
    }
}

impl Report {
    fn text(&self, form: Form) -> Result<String> {
        Ok(match form {
            Form::Json => serde_json::to_string_pretty(self)? + "\n",
            Form::Toml => toml::to_string(self)?,
        })
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        for device in &self.devices {
            writeln!(out, "# rank {}: device {}, {}, {}", device.rank, device.ordinal, device.name, device.pci)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(out, "# {note}"))?;
        let Parameters { t0_us, push_us, load_us, atomic_us, fence_us, gb_per_s } = self.parameters;
        writeln!(out, "\nOf the group: the slowest pair, and the least that a rank sends\n")?;
        writeln!(out, "  T0  {t0_us:8.3} us    an empty kernel of {} x {} in a graph", GRID.0, GRID.1)?;
        writeln!(out, "  L   {push_us:8.3} us    a store until the peer's poll sees it")?;
        writeln!(out, "  R   {load_us:8.3} us    a load from a peer, there and back")?;
        writeln!(out, "  A   {atomic_us:8.3} us    an atomic addition at a peer, there and back")?;
        writeln!(out, "  F   {fence_us:8.3} us    a fence that waits for a store to a peer")?;
        writeln!(out, "  B   {gb_per_s:8.1} GB/s  what a rank sends while all send to all others")?;
        writeln!(out, "\nEmpty kernels in a graph (us)\n\n{:>6}{:>8}{:>9}{:>9}", "rank", "blocks", "threads", "time")?;
        for Launch { rank, blocks, threads, time_us } in &self.launches {
            writeln!(out, "{rank:>6}{blocks:>8}{threads:>9}{time_us:>9.3}")?;
        }
        writeln!(
            out,
            "\nBetween ranks (us)\n\n{:>6}{:>6}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}",
            "from", "to", "flag", "packet", "load", "atomic", "store", "fence"
        )?;
        for Pair { from, to, flag_us, packet_us, load_us, atomic_us, store_us, fence_us } in &self.pairs {
            write!(out, "{from:>6}{to:>6}")?;
            for time in [flag_us, packet_us, load_us, atomic_us, store_us, fence_us] {
                write!(out, "{time:>9.3}")?;
            }
            writeln!(out)?;
        }
        writeln!(out, "\nSent by each rank to all others at once (GB/s)\n")?;
        self.sent.iter().try_for_each(|sent| writeln!(out, "{:>6}{:>9.1}", sent.rank, sent.gb_per_s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::hops::Given;

    fn report() -> Report {
        let pair = |from, to, flag_us| Pair {
            from,
            to,
            flag_us,
            packet_us: 0.7,
            load_us: 1.2,
            atomic_us: 1.3,
            store_us: 0.1,
            fence_us: 0.8,
        };
        let launches = vec![
            Launch { rank: 0, blocks: 1, threads: 32, time_us: 0.4 },
            Launch { rank: 0, blocks: GRID.0, threads: GRID.1, time_us: 0.5 },
        ];
        let pairs = vec![pair(0, 1, 0.5), pair(1, 0, 0.6)];
        let sent = vec![Sent { rank: 0, gb_per_s: 380.0 }, Sent { rank: 1, gb_per_s: 370.0 }];
        Report {
            schema: "peersum-probe",
            schema_version: 1,
            peersum_version: "0",
            notes: vec!["a \"note\"".into()],
            parameters: parameters(&launches, &pairs, &sent),
            devices: vec![Device { rank: 0, ordinal: 0, name: "Fake".into(), pci: "0000:01:00.0".into() }],
            launches,
            pairs,
            sent,
        }
    }

    #[test]
    fn the_slowest_pair_and_the_least_sent_count() {
        let parameters = report().parameters;
        assert_eq!((parameters.push_us, parameters.gb_per_s, parameters.t0_us), (0.6, 370.0, 0.5));
    }

    #[test]
    fn the_model_reads_what_is_written_in_either_form() {
        let report = report();
        for form in [Form::Json, Form::Toml] {
            let text = report.text(form).unwrap();
            let (parameters, assumed) = Given::parse(&text).unwrap().complete().unwrap();
            assert_eq!(parameters, report.parameters, "{text}");
            assert!(assumed.is_empty());
        }
    }

    #[test]
    fn the_text_has_every_parameter() {
        let mut out = Vec::new();
        report().print(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        for word in ["T0     0.500", "L      0.600", "B      370.0 GB/s", "fence"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}
