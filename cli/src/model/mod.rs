//! `peersum model`: what all-reduce should take, and how far a measurement is from that.
//!
//! [`hops`] has this library's algorithms, by the hops on their critical path; [`collectives`] the α–β costs of others,
//! in a node and between nodes, and [`plan`] the best of them on a cluster that is on paper. All are pure. [`results`]
//! reads what `peersum perf` measured, [`runs`] what other benchmarks did too, and [`fit`] fits α and β to it.

pub(crate) mod collectives;
pub(crate) mod fit;
pub(crate) mod hops;
mod plan;
mod results;
pub(crate) mod runs;

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
    output, page,
    plot::{Border, Figure, Series, crossing},
    sizes::{Size, Step, Sweep},
    topo,
};
use collectives::{AllReduce, AllToAll, Broadcast, Cluster, Network, Scatter, crossover};
use fit::{Fit, StepFit};
use hops::{Given, Parameters, Way};
use plan::Plan;
use results::Results;
use runs::Run;

/// What `peersum model` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Ranks of a node
    #[arg(short = 'g', long, value_name = "N", default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
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

    /// Fits alpha and beta to what nccl-tests or `peersum perf` printed or wrote (text, JSON, CSV), and says where that
    /// fails; can be given several times
    #[arg(long, value_name = "FILE", help_heading = "Alpha and beta",
        conflicts_with_all = ["results", "alpha", "plan"])]
    fit: Vec<PathBuf>,

    /// Plans for a cluster of --nodes nodes with --ranks GPUs each: which algorithm, how long, and what bounds it
    #[arg(long, help_heading = "Alpha and beta", conflicts_with = "results")]
    plan: bool,

    /// NICs of a node [default: one for each GPU]
    #[arg(long, value_name = "N", requires = "plan", help_heading = "Alpha and beta",
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    nics: Option<u32>,

    /// What a NIC sends [default: 50, which is 400 Gb/s]
    #[arg(long, value_name = "GB/S", requires = "plan", help_heading = "Alpha and beta")]
    nic: Option<f64>,

    /// us of a call that no step takes, such as its launch [default: 0]
    #[arg(long, value_name = "US", requires = "plan", help_heading = "Alpha and beta")]
    operation: Option<f64>,

    /// us of each message beyond the first that a NIC sends in a step [default: 0.5]
    #[arg(long, value_name = "US", requires = "plan", help_heading = "Alpha and beta")]
    message: Option<f64>,

    /// Prints α–β costs instead, with this many us a step within a node
    #[arg(long, value_name = "US", requires = "beta", help_heading = "Alpha and beta")]
    alpha: Option<f64>,

    /// GB/s that a rank sends within a node
    #[arg(long, value_name = "GB/S", requires = "alpha", help_heading = "Alpha and beta")]
    beta: Option<f64>,

    /// Nodes; more than one needs the two below
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Alpha and beta",
        value_parser = clap::value_parser!(u32).range(1..=65536))]
    nodes: u32,

    /// us a step between nodes
    #[arg(long, value_name = "US", help_heading = "Alpha and beta")]
    alpha_between: Option<f64>,

    /// GB/s that a rank sends between nodes
    #[arg(long, value_name = "GB/S", help_heading = "Alpha and beta")]
    beta_between: Option<f64>,

    /// Draws time and bus bandwidth over the size, and where the best algorithm changes, to a file
    #[arg(long, value_name = "FILE.svg", conflicts_with = "results")]
    plot: Option<PathBuf>,

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
    /// Bytes on the wire for each of the message, in bus bandwidth; none if it is that of the flags' ranks.
    factor: Option<f64>,
    /// What its figure marks besides where the best changes.
    borders: Vec<Border>,
}

#[derive(Clone)]
enum Cell {
    Us(Option<f64>),
    Ratio(Option<f64>),
    /// GB/s.
    Rate(Option<f64>),
    Word(String),
}

/// Runs the subcommand.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Arguments { ranks, nodes, .. } = *arguments;
    ensure!(ranks > 1 || arguments.plan && nodes > 1, "--ranks {ranks}: one rank has nobody to sum with");
    ensure!(
        arguments.plan || nodes == 1 || arguments.alpha.is_some(),
        "--nodes {nodes} has a meaning with --alpha and --beta, or --plan: the model of hops is of one node"
    );
    let tables = if !arguments.fit.is_empty() {
        fitted(&arguments.fit)?
    } else if arguments.plan {
        vec![planned(arguments)?]
    } else if let (Some(alpha), Some(beta)) = (arguments.alpha, arguments.beta) {
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
    if let Some(file) = &arguments.plot {
        let pictures = tables.iter().filter_map(|table| table.figure(arguments));
        page::write(file, &page::curves("What all-reduce should take", pictures)?.svg)?;
    }
    let report = json!({
        "schema": "peersum-model",
        "schema_version": 1,
        "peersum_version": env!("CARGO_PKG_VERSION"),
        "tables": tables.iter().map(Table::json).collect::<Vec<_>>(),
    });
    output::report(arguments.json, &report, |out| tables.iter().try_for_each(|table| table.print(out)))?;
    Ok(ExitCode::SUCCESS)
}

/// α and β of what was measured, and each time beside theirs.
fn fitted(files: &[PathBuf]) -> Result<Vec<Table>> {
    let mut runs = Vec::new();
    for file in files {
        let text = topo::text(file)?;
        runs.extend(Run::parse(&text).with_context(|| format!("can't use {}", file.display()))?);
    }
    let mut tables = Vec::new();
    let mut why_not = Vec::new();
    for run in &runs {
        match Fit::of(run) {
            Ok(fit) => tables.push(fit_table(run, &fit)),
            Err(error) => why_not.push(format!("Not fitted: {}: {error}", run.title())),
        }
    }
    ensure!(!tables.is_empty(), "{}", why_not.join("; "));
    if let Some(note) = steps_note(&runs) {
        tables[0].notes.push(note);
    }
    tables[0].notes.extend(why_not);
    Ok(tables)
}

fn fit_table(run: &Run, fit: &Fit) -> Table {
    let rows = run.points.iter().map(|point| {
        let predicted = fit.us(point.bytes);
        let ratio = point.us / predicted;
        let verdict = match ratio {
            ratio if ratio > 1.0 + fit::FAILS => "slower",
            ratio if ratio < 1.0 - fit::FAILS => "faster",
            _ => "",
        };
        let bus = |us: f64| Cell::Rate(Some(fit.factor * point.bytes as f64 / (us * 1e3)));
        let cells = vec![
            Cell::Us(Some(point.us)),
            Cell::Us(Some(predicted)),
            Cell::Ratio(Some(ratio)),
            bus(point.us),
            bus(predicted),
            Cell::Word(verdict.into()),
        ];
        (Size(point.bytes).to_string(), point.bytes, cells)
    });
    let failures = fit.failures(run);
    let mut notes = vec![format!(
        "Half of the time is alpha at {:.0} bytes: below, messages are bound by it, above by bytes",
        fit.half_bytes()
    )];
    for failure in &failures {
        let range = match failure.from == failure.to {
            true => format!("at {}", Size(failure.from)),
            false => format!("from {} to {}", Size(failure.from), Size(failure.to)),
        };
        let why = match failure.worst > 1.0 {
            true => {
                "another protocol or algorithm is taken there, caches no longer hold the message, or it was disturbed"
            }
            false => "another protocol or algorithm is taken there, or the message stays in a cache",
        };
        notes.push(format!("The model fails {range}: measured is {:.2} of it: {why}", failure.worst));
    }
    if failures.is_empty() {
        notes.push("The model holds at every size to a quarter".into());
    }
    Table {
        title: format!("{}: alpha {:.2} us, beta {:.1} GB/s of bus bandwidth", run.title(), fit.alpha_us, fit.gb_per_s),
        columns: ["measured", "predicted", "ratio", "busbw", "predicted busbw", "off"].map(Into::into).into(),
        rows: rows.collect(),
        notes,
        factor: Some(fit.factor),
        borders: vec![Border::at(fit.half_bytes().round() as u64, "half of the time is alpha")],
    }
}

/// What several numbers of ranks say of NCCL's steps, which are those of a ring.
fn steps_note(runs: &[Run]) -> Option<String> {
    let of_nccl = |run: &&Run| {
        let all_reduce = run.collective.as_deref().is_none_or(|name| name == "all_reduce");
        all_reduce && (run.tool.starts_with("nccl-tests") || run.label.split(' ').any(|word| word == "nccl"))
    };
    let runs: Vec<_> = runs.iter().filter(of_nccl).collect();
    let fit = StepFit::of(&runs, |ranks| 2.0 * (f64::from(ranks) - 1.0))?;
    Some(format!(
        "Taken as a ring's, runs of several numbers of ranks give {:.2} us a call, {:.2} us a step, and {:.1} GB/s",
        fit.operation_us, fit.step_us, fit.gb_per_s
    ))
}

/// The best algorithm on a cluster, size by size.
fn planned(arguments: &Arguments) -> Result<Table> {
    let Arguments { ranks, nodes, .. } = *arguments;
    let mut assumed = Vec::new();
    let mut take = |given: Option<f64>, otherwise: f64, what: &str| {
        given.unwrap_or_else(|| {
            assumed.push(format!("{what} {otherwise}"));
            otherwise
        })
    };
    let within = network(take(arguments.alpha, 2.0, "alpha"), take(arguments.beta, 350.0, "beta"))?;
    let between = |take: &mut dyn FnMut(Option<f64>, f64, &str) -> f64| -> Result<(f64, u32, f64, f64)> {
        let nics = arguments.nics.unwrap_or(ranks);
        // What a rank sends between nodes is another way to say what the NICs do.
        let of_rank = arguments.beta_between.map(|rate| rate * f64::from(ranks) / f64::from(nics));
        ensure!(of_rank.is_none() || arguments.nic.is_none(), "--beta-between and --nic say the same: give one");
        let rate = take(arguments.nic.or(of_rank), 50.0, "a NIC's GB/s");
        Ok((
            take(arguments.alpha_between, 15.0, "alpha between nodes"),
            nics,
            rate,
            take(arguments.message, 0.5, "us a further message"),
        ))
    };
    let (between_us, nics, nic_gb_per_s, message_us) = if nodes > 1 { between(&mut take)? } else { (0.0, 1, 1.0, 0.0) };
    network(between_us, nic_gb_per_s)?;
    let operation_us = take(arguments.operation, 0.0, "operation");
    for time in [message_us, operation_us] {
        ensure!(time.is_finite() && time >= 0.0, "{time} us is no time");
    }
    let plan = Plan { nodes, ranks, operation_us, within, between_us, nics, nic_gb_per_s, message_us };
    let row = |bytes: u64| {
        let schemes = plan.schemes(bytes as f64);
        let cell = |place: usize| schemes.get(place).map(|(scheme, spent)| (scheme.name(), spent.us()));
        let spent = schemes.first().map(|(_, spent)| *spent).unwrap_or_default();
        let percent = |part: f64| Cell::Word(format!("{:.0}%", 100.0 * part / spent.us()));
        let cells = vec![
            Cell::Word(cell(0).map_or("", |(name, _)| name).into()),
            Cell::Us(cell(0).map(|(_, us)| us)),
            Cell::Rate(cell(0).map(|(_, us)| plan.bus(bytes as f64, us))),
            Cell::Word(spent.bound().into()),
            percent(spent.operation + spent.steps_within + spent.steps_between),
            percent(spent.bytes_within),
            percent(spent.bytes_between),
            Cell::Word(cell(1).map_or("", |(name, _)| name).into()),
            Cell::Us(cell(1).map(|(_, us)| us)),
        ];
        (Size(bytes).to_string(), bytes, cells)
    };
    let mut notes = Vec::new();
    if !assumed.is_empty() {
        notes.push(format!("Assumed, since not given: {}", assumed.join(", ")));
    }
    if nodes > 1 {
        notes.push(format!("{nics} NICs of {nic_gb_per_s} GB/s a node, {between_us} us a step between nodes"));
    }
    notes.push(
        "A plan on paper: no contention in the network's core, no stragglers, and links that are never shared".into(),
    );
    let columns =
        ["best", "time", "busbw", "bound by", "steps", "bytes in node", "bytes between", "next best", "its time"];
    Ok(Table {
        title: format!(
            "All-reduce, {nodes} node{} of {ranks} ranks ({} in all): alpha {} us, beta {} GB/s in a node, \
             {operation_us} us an operation",
            if nodes == 1 { "" } else { "s" },
            u64::from(nodes) * u64::from(ranks),
            within.alpha_us,
            within.gb_per_s
        ),
        columns: columns.map(Into::into).into(),
        rows: sizes(arguments).into_iter().map(row).collect(),
        notes,
        factor: None,
        borders: Vec::new(),
    })
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
        title: format!("All-reduce between {ranks} ranks, us: {}", parameters),
        columns: ways.iter().map(|way| way.name().to_owned()).chain(["best".into(), "bound by".into()]).collect(),
        rows: sizes(arguments).into_iter().map(row).collect(),
        notes: vec![
            "A limit: reading inputs and writing outputs, and what a kernel does besides, are not in it; the direct \
             ones need symmetric memory"
                .into(),
            "atomics: a one-shot between handshakes by atomics, of another library".into(),
        ],
        factor: None,
        borders: Vec::new(),
    }
}

/// Measurements beside the model.
fn measured(results: &Results, parameters: &Parameters) -> Table {
    let ranks = results.config.world_size;
    let rows = results.results.iter().map(|row| {
        let algorithm = row.plan.as_ref().map_or("", |plan| plan.algorithm.as_str());
        let known = Algorithm::ALL.iter().copied().find(|known| known.name() == algorithm);
        // Without a time there is still a limit.
        let near = parameters.nearness(ranks, known, row.bytes, row.time_us.unwrap_or(f64::NAN));
        let timed = |ratio: Option<f64>| ratio.filter(|_| row.time_us.is_some());
        let cells = vec![
            Cell::Word(format!("{} {} {} {}", row.dtype, row.op, row.placement, row.timing)),
            Cell::Word(if algorithm.is_empty() { "-".into() } else { algorithm.to_owned() }),
            Cell::Us(row.time_us),
            Cell::Us(near.and_then(|near| near.own_us)),
            Cell::Ratio(timed(near.and_then(|near| near.over_own))),
            Cell::Word(near.map_or(String::new(), |near| near.best.to_owned())),
            Cell::Us(near.map(|near| near.limit_us)),
            Cell::Ratio(timed(near.map(|near| near.over_limit))),
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
        title: format!("Measured between {ranks} ranks, and the model, us: {}", parameters),
        columns: columns.map(Into::into).into(),
        rows: rows.collect(),
        notes,
        factor: None,
        borders: Vec::new(),
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
    let all = ranks.saturating_mul(nodes);
    let n = f64::from(all);
    // A title, bus bandwidth over size and time, columns, and what they cost at a size.
    type Costs<'a> = &'a dyn Fn(f64) -> Vec<Option<collectives::Cost>>;
    let table = |title: &str, factor: f64, columns: Vec<String>, costs: Costs<'_>| {
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
            factor: Some(factor),
            borders: Vec::new(),
        }
    };
    let many = nodes > 1;
    let named = |ways: Vec<String>| ways.into_iter().chain(many.then(|| "hierarchical".into())).collect::<Vec<_>>();
    let place = format!("{nodes} node{} of {ranks} ranks", if many { "s" } else { "" });
    let flat = if nodes == 1 { within } else { cluster.between };
    let hops = "All but hierarchical take every hop to be one between nodes";
    let mut reduce = table(
        &format!("All-reduce, {place}, us: steps x alpha + bytes / beta"),
        2.0 * (n - 1.0) / n,
        named(AllReduce::ALL.iter().map(ToString::to_string).collect()),
        &|bytes| {
            let costs = AllReduce::ALL.iter().map(|way| way.cost(all, bytes, flat));
            costs.chain(many.then(|| Some(cluster.hierarchical_all_reduce(bytes)))).collect()
        },
    );
    reduce.notes.extend(many.then(|| hops.to_owned()));
    reduce.notes.push(match crossover(all, flat) {
        Some(bytes) => format!("Two-shot is faster than one-shot from {bytes:.0} bytes on"),
        None => "Two-shot is never faster than one-shot between two ranks".into(),
    });
    reduce.notes.push("No cost for each operation is in it, such as the launch: measured crossovers lie lower".into());
    let mut scatter = table(
        &format!("Reduce-scatter, and all-gather, which costs the same, {place}, us; size is that of the whole"),
        (n - 1.0) / n,
        named(Scatter::ALL.iter().map(ToString::to_string).collect()),
        &|bytes| {
            let costs = Scatter::ALL.iter().map(|way| way.cost(all, bytes, flat));
            costs.chain(many.then(|| Some(cluster.hierarchical_scatter(bytes)))).collect()
        },
    );
    scatter.notes.extend(many.then(|| hops.to_owned()));
    let mut broadcast = table(
        &format!("Broadcast, {place}, us"),
        1.0,
        named(Broadcast::ALL.iter().map(ToString::to_string).collect()),
        &|bytes| {
            let costs = Broadcast::ALL.iter().map(|way| Some(way.cost(all, bytes, flat)));
            costs.chain(many.then(|| Some(cluster.hierarchical_broadcast(bytes)))).collect()
        },
    );
    broadcast.notes.extend(many.then(|| hops.to_owned()));
    let exchange = table(
        &format!("All-to-all, {place}, us; size is what a rank has for all"),
        (n - 1.0) / n,
        AllToAll::ALL.iter().map(ToString::to_string).collect(),
        &|bytes| AllToAll::ALL.iter().map(|&way| cluster.all_to_all(way, bytes)).collect(),
    );
    Ok(vec![reduce, scatter, broadcast, exchange])
}

impl Table {
    /// Its columns of times as curves, with a line where the best changes. None of a table without such.
    fn figure(&self, arguments: &Arguments) -> Option<Figure> {
        let series = self.columns.iter().enumerate().filter(|(_, name)| *name != "its time").map(|(column, name)| {
            let point = |(_, bytes, cells): &(String, u64, Vec<Cell>)| match cells[column] {
                Cell::Us(Some(us)) if *bytes > 0 => Some((*bytes, us)),
                _ => None,
            };
            let points = self.rows.iter().filter_map(point).collect();
            let name = if name == "time" { "the best".into() } else { name.clone() };
            Series { name, points, chosen: false }
        });
        let series: Vec<_> = series.filter(|series| !series.points.is_empty()).collect();
        let best = self.columns.iter().position(|name| name == "best");
        let word = |cells: &[Cell]| match best.map(|best| &cells[best]) {
            Some(Cell::Word(word)) => Some(word.clone()),
            _ => None,
        };
        // Between two sizes of the table, where both have columns: a table's sizes may be far apart.
        let crossing = |pair: &[(String, u64, Vec<Cell>)], from: &str, to: &str| {
            let times = |name: &str| {
                let column = self.columns.iter().position(|column| column == name)?;
                let us = |cells: &[Cell]| if let Cell::Us(us) = cells[column] { us } else { None };
                Some([(pair[0].1, us(&pair[0].2)?), (pair[1].1, us(&pair[1].2)?)])
            };
            crossing(&times(from)?, &times(to)?)
        };
        let change = |pair: &[(String, u64, Vec<Cell>)]| {
            let (from, to) = (word(&pair[0].2)?, word(&pair[1].2)?);
            (from != to).then(|| Border::to(crossing(pair, &from, &to).unwrap_or(pair[1].1), &to))
        };
        let borders = self.borders.iter().cloned().chain(self.rows.windows(2).filter_map(change)).collect();
        let all = f64::from(arguments.ranks) * f64::from(arguments.nodes);
        let factor = self.factor.unwrap_or(2.0 * (all - 1.0) / all);
        let (head, rest) = self.title.split_once([':', ';']).unwrap_or((&self.title, ""));
        let rest = rest.trim();
        (!series.is_empty()).then(|| Figure {
            title: head.trim_end_matches(", us").to_owned(),
            subtitle: rest.to_owned(),
            bandwidth: ("busbw (GB/s)", factor),
            rows: vec![crate::plot::Row { heading: String::new(), series, borders }],
        })
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "# {}", self.title)?;
        self.notes.iter().try_for_each(|note| writeln!(out, "# {note}"))?;
        let shown = |cell: &Cell| match cell {
            Cell::Us(Some(us)) if *us < 1000.0 => format!("{us:.2}"),
            Cell::Us(Some(us)) => format!("{us:.0}"),
            Cell::Ratio(Some(ratio)) => format!("{ratio:.2}"),
            Cell::Rate(Some(rate)) => format!("{rate:.2}"),
            Cell::Us(None) | Cell::Ratio(None) | Cell::Rate(None) => "-".into(),
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
            Cell::Us(figure) | Cell::Ratio(figure) | Cell::Rate(figure) => json!(figure),
            Cell::Word(word) => json!(word),
        };
        let rows = self.rows.iter().map(|(_, bytes, cells)| {
            let mut row = serde_json::Map::from_iter([("bytes".to_owned(), json!(bytes))]);
            for (name, cell) in self.columns.iter().zip(cells) {
                let unit = match cell {
                    Cell::Us(_) => "_us",
                    Cell::Rate(_) => "_gb_per_s",
                    Cell::Ratio(_) | Cell::Word(_) => "",
                };
                row.insert(name.replace([' ', '-'], "_") + unit, value(cell));
            }
            Value::Object(row)
        });
        json!({"title": self.title, "notes": self.notes, "rows": rows.collect::<Vec<_>>()})
    }
}
