//! `peersum paths`: bandwidth layer by layer, from the nearest pair to host memory, as one would go through them by hand.
//!
//! [`tiers`] says what is measured, [`child`] measures it in a process of its own, and here is what is made of it.

mod child;
#[cfg(test)]
mod tests;
pub(crate) mod tiers;

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use indicatif::ProgressBar;
use serde::Serialize;

use crate::{
    bandwidth,
    model::runs::Point,
    output,
    p2p::theory,
    page::{self, Picture},
    plot::{Figure, Row, Series},
    probe::gpu,
    sizes::Size,
    topology::{read, source::Here},
};
use tiers::{Path, Tier};

/// What `peersum paths` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Devices, as 0,1,2 [default: all]; a device may stand several times, to try this on one GPU
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    devices: Vec<usize>,

    /// First size
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "1M")]
    min: Size,

    /// Last size
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "512M")]
    max: Size,

    /// Each size is this many times the one before
    #[arg(short = 'f', long = "stepfactor", value_name = "N", default_value_t = 2,
        value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,

    /// Measures every pair, and not one of each kind alone
    #[arg(long)]
    all_pairs: bool,

    /// Seconds after which a run is ended
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,

    /// Where libnccl.so.2 is, or the folder that it is in [default: as `peersum perf` finds it]
    #[arg(long, value_name = "PATH")]
    nccl_library: Option<PathBuf>,

    /// Draws bandwidth over the size to a file
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,

    /// Writes a page with all of it, which opens without a network
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,

    /// Prints everything as JSON
    #[arg(long)]
    json: bool,
}

/// Sizes of a run.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sizes {
    min: u64,
    max: u64,
    factor: u64,
}

/// Who all-reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Contender {
    Nccl,
    /// This library's two-shot: what it has for long messages.
    Peersum,
}

impl Contender {
    const ALL: [Contender; 2] = [Contender::Nccl, Contender::Peersum];

    fn algorithm(self) -> &'static str {
        match self {
            Contender::Nccl => "nccl",
            Contender::Peersum => "two-shot",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Contender::Nccl => "NCCL",
            Contender::Peersum => "peersum",
        }
    }
}

/// What came of one contender in one tier.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Measured {
    contender: Contender,
    error: Option<String>,
    points: Vec<Rate>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Rate {
    bytes: u64,
    time_us: f64,
    busbw_gb_per_s: f64,
    wrong_elements: Option<u64>,
}

/// A tier with what was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Layer {
    #[serde(flatten)]
    tier: Tier,
    measured: Vec<Measured>,
}

/// A line of the last table.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Line {
    tier: String,
    contender: Contender,
    busbw_gb_per_s: f64,
    bytes: u64,
    theory_gb_per_s: Option<f64>,
    efficiency_percent: Option<f64>,
    /// How many times slower than the line above.
    loss: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    schema_version: u32,
    peersum_version: &'static str,
    sizes: Sizes,
    notes: Vec<String>,
    tiers: Vec<Layer>,
    /// From the fastest to the slowest.
    ladder: Vec<Line>,
}

/// Runs the subcommand. An error is returned where nothing could be measured.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let sizes = Sizes { min: arguments.min.0, max: arguments.max.0, factor: arguments.factor };
    ensure!(sizes.min > 0 && sizes.min <= sizes.max, "-b {} and -e {} span no size", arguments.min, arguments.max);
    peersum::cuda::available().context(gpu::NONE)?;
    let ordinals = gpu::devices(&arguments.devices)?;
    ensure!(
        ordinals.len() > 1,
        "there is one GPU, so there are no paths between GPUs; --devices 0,0 tries this with two ranks on it"
    );
    let machine = read::read(&Here);
    let addresses = gpu::addresses(&ordinals)?;
    let devices: Vec<_> = ordinals
        .iter()
        .zip(&addresses)
        .map(|(&ordinal, address)| tiers::Device { ordinal, place: theory::place(&machine, address) })
        .collect();
    let machine = (!machine.gpus.is_empty()).then_some(&machine);
    let tiers = tiers::tiers(machine, &devices, arguments.all_pairs);
    let limit = Duration::from_secs(arguments.limit);
    let progress = ProgressBar::new(tiers.len() as u64 * 2);
    let report = measure(tiers, sizes, &mut |tier, contender| {
        progress.set_message(format!("{}, {}", tier.name, contender.name()));
        progress.inc(1);
        let library = arguments.nccl_library.as_deref();
        child::measure(tier, contender, &sizes, limit, library).map_err(|error| format!("{error:#}"))
    });
    progress.finish_and_clear();
    if let Some(file) = &arguments.plot {
        page::write(file, &report.picture()?.svg)?;
    }
    if let Some(file) = &arguments.html {
        let text = report.text()?;
        page::write(file, &page::html("What each path between GPUs carries", &text, &[report.picture()?]))?;
    }
    output::report(arguments.json, &report, |out| report.print(out))?;
    Ok(ExitCode::from(report.code()))
}

/// Who measures.
type Measure<'a> = dyn FnMut(&Tier, Contender) -> Result<Vec<Point>, String> + 'a;

fn measure(tiers: Vec<Tier>, sizes: Sizes, measure: &mut Measure) -> Report {
    let mut rows = Vec::new();
    for tier in tiers {
        // Without P2P this library has no ranks on GPUs.
        let contenders = Contender::ALL.into_iter().filter(|&who| tier.path == Path::P2p || who == Contender::Nccl);
        let factor = bandwidth::bus_factor(tier.devices.len());
        let measured = contenders
            .map(|contender| {
                let (points, error) = match measure(&tier, contender) {
                    Ok(points) => (points, None),
                    Err(error) => (Vec::new(), Some(error)),
                };
                let rate = |point: Point| Rate {
                    bytes: point.bytes,
                    time_us: point.us,
                    busbw_gb_per_s: bandwidth::algorithm(point.bytes as usize, point.us) * factor,
                    wrong_elements: point.wrong,
                };
                Measured { contender, error, points: points.into_iter().map(rate).collect() }
            })
            .collect();
        rows.push(Layer { tier, measured });
    }
    let mut notes = vec![
        "Bus bandwidth: 2(n-1)/n x size / time, to be held against what one GPU's links carry one way".to_owned(),
        "NVLS is off (NCCL_NVLS_ENABLE=0) unless the environment has it: a switch that sums is another path".into(),
    ];
    if rows.iter().any(|row| row.tier.path != Path::P2p) {
        notes.push("Without P2P there is NCCL alone: peersum's GPU ranks reach each other's memory".into());
    }
    if rows.iter().any(|row| row.tier.path == Path::Network && !row.tier.is_one_device()) {
        notes.push("Without P2P and host memory NCCL goes by the network of this machine with itself".into());
    }
    if rows.iter().any(|row| row.tier.is_one_device() && row.tier.path != Path::P2p) {
        notes.push(
            "Between ranks of one device NCCL stays in that device's memory, with P2P and host memory off too: those \
             paths are the first one again, and what they differ by is noise"
                .into(),
        );
    }
    if rows.iter().any(|row| row.tier.shares_devices()) {
        notes.push("Ranks share a device: no link is measured between these".into());
    }
    Report {
        schema: "peersum-paths",
        schema_version: 1,
        peersum_version: env!("CARGO_PKG_VERSION"),
        sizes,
        notes,
        ladder: ladder(&rows),
        tiers: rows,
    }
}

/// Each contender's best in each tier, the fastest first.
fn ladder(rows: &[Layer]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for Layer { tier, measured } in rows {
        for Measured { contender, points, .. } in measured {
            let right = points.iter().filter(|rate| rate.wrong_elements.unwrap_or(0) == 0);
            let Some(best) = right.max_by(|a, b| a.busbw_gb_per_s.total_cmp(&b.busbw_gb_per_s)) else { continue };
            let theory = tier.theory.as_ref().map(|rate| rate.gb_per_s);
            lines.push(Line {
                tier: tier.name.clone(),
                contender: *contender,
                busbw_gb_per_s: best.busbw_gb_per_s,
                bytes: best.bytes,
                theory_gb_per_s: theory,
                efficiency_percent: theory.map(|theory| 100.0 * best.busbw_gb_per_s / theory),
                loss: None,
            });
        }
    }
    lines.sort_by(|a, b| b.busbw_gb_per_s.total_cmp(&a.busbw_gb_per_s));
    for index in 1..lines.len() {
        lines[index].loss = Some(lines[index - 1].busbw_gb_per_s / lines[index].busbw_gb_per_s);
    }
    lines
}

impl Report {
    /// 0 if all was measured and right, 1 if anything was wrong or failed, 2 if nothing could be measured.
    fn code(&self) -> u8 {
        if self.ladder.is_empty() {
            return 2;
        }
        let bad = |measured: &Measured| {
            measured.error.is_some() || measured.points.iter().any(|rate| rate.wrong_elements.unwrap_or(0) > 0)
        };
        u8::from(self.tiers.iter().flat_map(|row| &row.measured).any(bad))
    }

    fn text(&self) -> Result<String> {
        let mut out = Vec::new();
        self.print(&mut out)?;
        String::from_utf8(out).context("the text is UTF-8")
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        self.notes.iter().try_for_each(|note| writeln!(out, "# {note}"))?;
        for Layer { tier, measured } in &self.tiers {
            let devices: Vec<_> = tier.devices.iter().map(ToString::to_string).collect();
            let connection = tier.connection.as_ref().map_or(String::new(), |name| format!(", {name}"));
            let theory = tier.theory.as_ref();
            let theory = theory
                .map_or("theory unknown".into(), |rate| format!("at most {:.1} GB/s ({})", rate.gb_per_s, rate.by));
            writeln!(out, "\n{}: devices {}{connection}, {theory}", tier.name, devices.join(","))?;
            let mut sizes: Vec<_> = measured.iter().flat_map(|of| of.points.iter().map(|rate| rate.bytes)).collect();
            sizes.sort_unstable();
            sizes.dedup();
            if !sizes.is_empty() {
                write!(out, "{:>10}", "size")?;
                measured.iter().try_for_each(|of| write!(out, "{:>16}", format!("{} (GB/s)", of.contender.name())))?;
                writeln!(out)?;
            }
            for bytes in sizes {
                write!(out, "{:>10}", Size(bytes).to_string())?;
                for of in measured {
                    let rate = of.points.iter().find(|rate| rate.bytes == bytes);
                    let shown = rate.map_or("-".into(), |rate| match rate.wrong_elements {
                        Some(wrong @ 1..) => format!("{wrong} WRONG"),
                        _ => format!("{:.2}", rate.busbw_gb_per_s),
                    });
                    write!(out, "{shown:>16}")?;
                }
                writeln!(out)?;
            }
            for of in measured {
                if let Some(error) = &of.error {
                    writeln!(out, "  {}: not measured: {error}", of.contender.name())?;
                }
            }
        }
        if self.ladder.is_empty() {
            return Ok(());
        }
        let width = self.ladder.iter().map(|line| line.tier.len()).max().unwrap_or(0).max(4) + 2;
        writeln!(out, "\nFrom the fastest to the slowest, each at its best size\n")?;
        writeln!(
            out,
            "{:width$}{:10}{:>10}{:>8}{:>10}{:>12}{:>10}",
            "path", "by", "GB/s", "at", "theory", "efficiency", "loss"
        )?;
        for line in &self.ladder {
            let theory = line.theory_gb_per_s.map_or("?".into(), |theory| format!("{theory:.1}"));
            let efficiency = line.efficiency_percent.map_or("?".into(), |percent| format!("{percent:.0}%"));
            let loss = line.loss.map_or("-".into(), |loss| format!("{loss:.2}x"));
            let (by, at) = (line.contender.name(), Size(line.bytes).to_string());
            writeln!(
                out,
                "{:width$}{by:10}{:>10.2}{at:>8}{theory:>10}{efficiency:>12}{loss:>10}",
                line.tier, line.busbw_gb_per_s
            )?;
        }
        Ok(())
    }

    fn picture(&self) -> Result<Picture> {
        // A row for each number of ranks, of which bus bandwidth is another multiple of size over time.
        let mut counts: Vec<_> = self.tiers.iter().map(|row| row.tier.devices.len()).collect();
        counts.sort_unstable();
        counts.dedup();
        let mut parts = Vec::new();
        for count in counts {
            let series = self.tiers.iter().filter(|row| row.tier.devices.len() == count).flat_map(|row| {
                row.measured.iter().filter(|of| !of.points.is_empty()).map(|of| Series {
                    name: format!("{}, {}", of.contender.name(), row.tier.name),
                    points: of.points.iter().map(|rate| (rate.bytes, rate.time_us)).collect(),
                    chosen: false,
                })
            });
            let series: Vec<_> = series.collect();
            if !series.is_empty() {
                parts.push((count, series));
            }
        }
        page::curves(
            "Bus bandwidth of each path",
            parts.into_iter().map(|(count, series)| Figure {
                title: format!("Paths between {count} ranks"),
                subtitle: format!("all-reduce of f32, peersum {}", self.peersum_version),
                bandwidth: ("busbw (GB/s)", bandwidth::bus_factor(count)),
                rows: vec![Row { heading: String::new(), series, borders: Vec::new() }],
            }),
        )
    }
}
