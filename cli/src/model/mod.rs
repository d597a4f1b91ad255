//! `peersum model`: what all-reduce should take, and how far a measurement is from that.
//!
//! [`hops`] has this library's algorithms, by the hops on their critical path; [`collectives`] the α–β costs of others,
//! in a node and between nodes. Both are pure; [`results`] reads what `peersum perf` measured.

pub(crate) mod collectives;
pub(crate) mod hops;
mod results;

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use peersum::Algorithm;
use serde_json::{Value, json};

use crate::{
    sizes::{Size, Step, Sweep},
    topo,
};
use collectives::{AllReduce, AllToAll, Cluster, Network, crossover};
use hops::{Given, Parameters, Way};
use results::Results;

/// What `peersum model` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Ranks of a node
    #[arg(short = 'g', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=1024))]
    ranks: u32,

    /// Sizes: bytes, or with a suffix K, M, G (powers of 1024); several with commas [default: 1K to 64M, times 4]
    #[arg(short = 'b', long, value_name = "SIZES", value_delimiter = ',')]
    bytes: Vec<Size>,

    /// A JSON object with t0_us, L, R, A, F (us) and B (GB/s), as far as they are known; the flags go before it
    #[arg(long, value_name = "FILE.json", help_heading = "Hops")]
    parameters: Option<PathBuf>,

    /// T0: an empty kernel, in us [default: 0, so that times are without the launch]
    #[arg(long, value_name = "US", help_heading = "Hops")]
    t0: Option<f64>,

    /// A store into a peer's memory until the peer sees it, in us [default: 0.6]
    #[arg(short = 'L', value_name = "US", help_heading = "Hops")]
    push: Option<f64>,

    /// A load from a peer's memory, there and back, in us [default: twice L]
    #[arg(short = 'R', value_name = "US", help_heading = "Hops")]
    load: Option<f64>,

    /// An atomic in a peer's memory, in us [default: twice L]
    #[arg(short = 'A', value_name = "US", help_heading = "Hops")]
    atomic: Option<f64>,

    /// A fence that waits for remote stores, in us [default: twice L]
    #[arg(short = 'F', value_name = "US", help_heading = "Hops")]
    fence: Option<f64>,

    /// What one GPU sends, in GB/s [default: 343.6]
    #[arg(short = 'B', value_name = "GB/S", help_heading = "Hops")]
    bandwidth: Option<f64>,

    /// A report of `peersum perf -J`: prints how far each measurement is from the model
    #[arg(long, value_name = "FILE.json", help_heading = "Hops")]
    results: Option<PathBuf>,

    /// Prints α–β costs instead, with this many us a step within a node
    #[arg(long, value_name = "US", requires = "beta", help_heading = "Alpha and beta")]
    alpha: Option<f64>,

    /// GB/s that a rank sends within a node
    #[arg(long, value_name = "GB/S", requires = "alpha", help_heading = "Alpha and beta")]
    beta: Option<f64>,

    /// Nodes; more than one needs the two below
    #[arg(long, value_name = "N", default_value_t = 1, requires = "alpha", help_heading = "Alpha and beta",
        value_parser = clap::value_parser!(u32).range(1..=65536))]
    nodes: u32,

    /// us a step between nodes
    #[arg(long, value_name = "US", requires = "beta_between", help_heading = "Alpha and beta")]
    alpha_between: Option<f64>,

    /// GB/s that a rank sends between nodes
    #[arg(long, value_name = "GB/S", requires = "alpha_between", help_heading = "Alpha and beta")]
    beta_between: Option<f64>,

    /// Prints everything as JSON
    #[arg(long)]
    json: bool,
}

/// A table: names of columns, and rows. A figure that isn't defined is none.
struct Table {
    title: String,
    columns: Vec<String>,
    rows: Vec<(String, u64, Vec<Cell>)>,
    notes: Vec<String>,
}

#[derive(Clone)]
enum Cell {
    Us(Option<f64>),
    Ratio(Option<f64>),
    Word(String),
}

/// Runs the subcommand.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let tables = if let (Some(alpha), Some(beta)) = (arguments.alpha, arguments.beta) {
        ensure!(arguments.results.is_none(), "--results is held against the model of hops: leave --alpha out");
        alpha_beta(arguments, network(alpha, beta)?)?
    } else {
        let file = arguments.parameters.as_deref().map(|file| {
            topo::text(file)
                .and_then(|text| Given::parse(&text))
                .with_context(|| format!("can't use {}", file.display()))
        });
        let flags = Given {
            t0_us: arguments.t0,
            push_us: arguments.push,
            load_us: arguments.load,
            atomic_us: arguments.atomic,
            fence_us: arguments.fence,
            gb_per_s: arguments.bandwidth,
        };
        let (parameters, assumed) = flags.or(file.transpose()?.unwrap_or_default()).complete()?;
        let mut table = match &arguments.results {
            Some(file) => {
                let results = topo::text(file).and_then(|text| Results::parse(&text));
                measured(&results.with_context(|| format!("can't use {}", file.display()))?, &parameters)
            }
            None => hops(arguments, &parameters),
        };
        if !assumed.is_empty() {
            table.notes.insert(0, format!("Assumed, since not given: {}", assumed.join(", ")));
        }
        vec![table]
    };
    let mut out = io::stdout().lock();
    if arguments.json {
        let tables: Vec<_> = tables.iter().map(Table::json).collect();
        let report = json!({
            "schema": "peersum-model",
            "schema_version": 1,
            "peersum_version": env!("CARGO_PKG_VERSION"),
            "tables": tables,
        });
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        tables.iter().try_for_each(|table| table.print(&mut out))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn network(alpha_us: f64, gb_per_s: f64) -> Result<Network> {
    ensure!(alpha_us.is_finite() && alpha_us >= 0.0, "{alpha_us} us is no time that a step takes");
    ensure!(gb_per_s.is_finite() && gb_per_s > 0.0, "{gb_per_s} GB/s is no bandwidth");
    Ok(Network { alpha_us, gb_per_s })
}

fn sizes(arguments: &Arguments) -> Vec<u64> {
    if !arguments.bytes.is_empty() {
        return arguments.bytes.iter().map(|size| size.0).collect();
    }
    let sweep = Sweep { min_bytes: 1 << 10, max_bytes: 64 << 20, step: Step::Factor(4) };
    sweep.counts(1).map(|bytes| bytes as u64).collect()
}

fn parameters_line(parameters: &Parameters) -> String {
    let Parameters { t0_us, push_us, load_us, atomic_us, fence_us, gb_per_s } = parameters;
    format!("T0 {t0_us}, L {push_us}, R {load_us}, A {atomic_us}, F {fence_us} us, B {gb_per_s} GB/s")
}

/// Every algorithm's time by the model of hops.
fn hops(arguments: &Arguments, parameters: &Parameters) -> Table {
    let ranks = arguments.ranks;
    let ways = Way::all();
    let row = |bytes: u64| {
        let limit = |way: &Way| way.hops(ranks).map(|hops| parameters.limit(hops, bytes as f64).us());
        let mut cells: Vec<_> = ways.iter().map(|way| Cell::Us(limit(way))).collect();
        let best = parameters.best(ranks, bytes as f64);
        cells.push(Cell::Word(best.map_or(String::new(), |(way, _)| way.name().to_owned())));
        cells.push(Cell::Word(best.map_or(String::new(), |(_, limit)| limit.bound().to_owned())));
        (Size(bytes).to_string(), bytes, cells)
    };
    Table {
        title: format!("All-reduce between {ranks} ranks, us: {}", parameters_line(parameters)),
        columns: ways.iter().map(|way| way.name().to_owned()).chain(["best".into(), "bound by".into()]).collect(),
        rows: sizes(arguments).into_iter().map(row).collect(),
        notes: vec![
            "A limit: reading inputs and writing outputs, and what a kernel does besides, are not in it; the direct \
             ones need symmetric memory"
                .into(),
            "atomics: a one-shot between handshakes by atomics, of another library".into(),
        ],
    }
}

/// Measurements beside the model.
fn measured(results: &Results, parameters: &Parameters) -> Table {
    let ranks = results.config.world_size;
    let rows = results.results.iter().map(|row| {
        let algorithm = row.plan.as_ref().map_or("", |plan| plan.algorithm.as_str());
        let way = Algorithm::ALL.iter().copied().find(|known| known.name() == algorithm).map(Way::Own);
        let own = way.and_then(|way| way.hops(ranks)).map(|hops| parameters.limit(hops, row.bytes as f64).us());
        let best = parameters.best(ranks, row.bytes as f64);
        let limit = best.map(|(_, limit)| limit.us());
        let over = |model: Option<f64>| row.time_us.zip(model).map(|(measured, model)| measured / model);
        let cells = vec![
            Cell::Word(format!("{} {} {} {}", row.dtype, row.op, row.placement, row.timing)),
            Cell::Word(if algorithm.is_empty() { "-".into() } else { algorithm.to_owned() }),
            Cell::Us(row.time_us),
            Cell::Us(own),
            Cell::Ratio(over(own)),
            Cell::Word(best.map_or(String::new(), |(way, _)| way.name().to_owned())),
            Cell::Us(limit),
            Cell::Ratio(over(limit)),
        ];
        (Size(row.bytes).to_string(), row.bytes, cells)
    });
    let columns = ["call", "algorithm", "measured", "predicted", "ratio", "best", "limit", "over limit"];
    let mut notes = vec![
        "predicted: of the algorithm that was measured; limit: of the best one. A ratio of 1 is at the model's limit; \
         below 1 the parameters are not this machine's"
            .into(),
    ];
    if results.config.backend != "cuda" {
        notes.push(format!(
            "The report is of the {} backend, whose packets send more than the model's: see README.md",
            results.config.backend
        ));
    }
    Table {
        title: format!("Measured between {ranks} ranks, and the model, us: {}", parameters_line(parameters)),
        columns: columns.map(Into::into).into(),
        rows: rows.collect(),
        notes,
    }
}

fn alpha_beta(arguments: &Arguments, within: Network) -> Result<Vec<Table>> {
    let (ranks, nodes) = (arguments.ranks, arguments.nodes);
    let between = match (arguments.alpha_between, arguments.beta_between) {
        (Some(alpha), Some(beta)) => Some(network(alpha, beta)?),
        _ => None,
    };
    ensure!(nodes == 1 || between.is_some(), "--nodes {nodes} needs --alpha-between and --beta-between");
    let cluster = Cluster { nodes, ranks, within, between: between.unwrap_or(within) };
    let table = |title: &str, columns: Vec<String>, costs: &dyn Fn(f64) -> Vec<Option<collectives::Cost>>| {
        let row = |bytes: u64| {
            let costs = costs(bytes as f64);
            let best = (0..costs.len()).filter(|&index| costs[index].is_some()).min_by(|&a, &b| {
                let us = |index: usize| costs[index].map_or(f64::INFINITY, |cost| cost.us());
                us(a).total_cmp(&us(b))
            });
            let bound = best
                .and_then(|best| costs[best])
                .map(|cost| if cost.bytes_us > cost.steps_us { "bytes" } else { "steps" });
            let mut cells: Vec<_> = costs.iter().map(|cost| Cell::Us(cost.map(|cost| cost.us()))).collect();
            cells.push(Cell::Word(best.map_or(String::new(), |best| columns[best].clone())));
            cells.push(Cell::Word(bound.unwrap_or("").into()));
            (Size(bytes).to_string(), bytes, cells)
        };
        Table {
            title: title.into(),
            rows: sizes(arguments).into_iter().map(row).collect(),
            columns: columns.iter().cloned().chain(["best".into(), "bound by".into()]).collect(),
            notes: Vec::new(),
        }
    };
    let all = ranks.saturating_mul(nodes);
    let flat = if nodes == 1 { within } else { cluster.between };
    let mut columns: Vec<_> = AllReduce::ALL.iter().map(ToString::to_string).collect();
    if nodes > 1 {
        columns.push("hierarchical".into());
    }
    let mut reduce = table(
        &format!("All-reduce, {nodes} nodes of {ranks} ranks, us: steps x alpha + bytes / beta"),
        columns,
        &|bytes| {
            let mut costs: Vec<_> = AllReduce::ALL.iter().map(|way| way.cost(all, bytes, flat)).collect();
            if nodes > 1 {
                costs.push(Some(cluster.hierarchical_all_reduce(bytes)));
            }
            costs
        },
    );
    if nodes > 1 {
        reduce.notes.push("All but hierarchical take every hop to be one between nodes".into());
    }
    reduce.notes.push(match crossover(all, flat) {
        Some(bytes) => format!("Two-shot is faster than one-shot from {bytes:.0} bytes on"),
        None => "Two-shot is never faster than one-shot between two ranks".into(),
    });
    reduce.notes.push("No cost for each operation is in it, such as the launch: measured crossovers lie lower".into());
    let exchange = table(
        &format!("All-to-all, {nodes} nodes of {ranks} ranks, us; size is what a rank has for all"),
        AllToAll::ALL.iter().map(ToString::to_string).collect(),
        &|bytes| AllToAll::ALL.iter().map(|&way| cluster.all_to_all(way, bytes)).collect(),
    );
    Ok(vec![reduce, exchange])
}

impl Table {
    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "# {}", self.title)?;
        self.notes.iter().try_for_each(|note| writeln!(out, "# {note}"))?;
        let shown = |cell: &Cell| match cell {
            Cell::Us(Some(us)) if *us < 1000.0 => format!("{us:.2}"),
            Cell::Us(Some(us)) => format!("{us:.0}"),
            Cell::Ratio(Some(ratio)) => format!("{ratio:.2}"),
            Cell::Us(None) | Cell::Ratio(None) => "-".into(),
            Cell::Word(word) => word.clone(),
        };
        let widths: Vec<_> = (0..self.columns.len())
            .map(|column| {
                let cells = self.rows.iter().map(|(.., cells)| shown(&cells[column]).len());
                cells.chain([self.columns[column].len()]).max().unwrap_or(0) + 2
            })
            .collect();
        let line = |out: &mut dyn Write, size: &str, cells: &[String]| {
            write!(out, "{size:>10}")?;
            cells.iter().zip(&widths).try_for_each(|(cell, width)| write!(out, "{cell:>width$}"))?;
            writeln!(out)
        };
        line(out, "size", &self.columns)?;
        for (size, _, cells) in &self.rows {
            line(out, size, &cells.iter().map(shown).collect::<Vec<_>>())?;
        }
        writeln!(out)
    }

    fn json(&self) -> Value {
        let value = |cell: &Cell| match cell {
            Cell::Us(figure) | Cell::Ratio(figure) => json!(figure),
            Cell::Word(word) => json!(word),
        };
        let rows = self.rows.iter().map(|(_, bytes, cells)| {
            let mut row = serde_json::Map::from_iter([("bytes".to_owned(), json!(bytes))]);
            for (name, cell) in self.columns.iter().zip(cells) {
                let unit = if matches!(cell, Cell::Us(_)) { "_us" } else { "" };
                row.insert(name.replace([' ', '-'], "_") + unit, value(cell));
            }
            Value::Object(row)
        });
        json!({"title": self.title, "notes": self.notes, "rows": rows.collect::<Vec<_>>()})
    }
}
