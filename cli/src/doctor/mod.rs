//! `peersum doctor`: what makes all-reduce slow on a machine, or impossible, and what to do about it.
//!
//! [`topology`](crate::topology) reads the machine; [`links`], [`p2p`], [`system`] and [`settings`] look at it, and
//! [`nccl_log`] at what NCCL printed, and [`results`] at what a benchmark measured. [`examine`] has each add to an [`Outcome`]:
//! findings, what could not be looked at, and what is fine. Nothing here changes the machine; [`acs_fix`] writes files
//! that would.

mod acs_fix;
mod examine;
mod finding;
mod links;
mod nccl_log;
mod p2p;
mod private;
mod results;
mod settings;
mod show;
mod system;
#[cfg(test)]
mod tests;

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;

use crate::{
    model::runs::Run,
    output, topo,
    topology::{lspci, read},
};
use examine::{Benchmarks, examine};
use finding::Outcome;
use nccl_log::{Log, Transports};
use p2p::Redirected;

/// What `peersum doctor` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Reads what a program with NCCL_DEBUG=INFO printed, too; - is standard input
    #[arg(long, value_name = "FILE")]
    nccl_log: Option<PathBuf>,

    /// Reads what nccl-tests or `peersum perf` printed or wrote (text, JSON, CSV), too; can be given several times, as
    /// for one node and for several
    #[arg(long, value_name = "FILE")]
    results: Vec<PathBuf>,

    /// What one GPU of the results could send, one way, in GB/s, where they are not of this machine
    #[arg(long, value_name = "GB/S", requires = "results")]
    link: Option<f64>,

    /// Reads what `lspci -vvv` printed as root, for the ACS of bridges that can't be read here
    #[arg(long, value_name = "FILE")]
    lspci: Option<PathBuf>,

    /// Writes a script that clears ACS redirection between the GPUs, and a systemd unit that runs it, to a folder;
    /// applies nothing
    #[arg(long, value_name = "DIR")]
    write_acs_fix: Option<PathBuf>,

    /// Reads DIR/sys, DIR/proc, DIR/dev, DIR/etc, DIR/nvml.json and DIR/environment instead of this machine's
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,

    /// Prints everything as JSON
    #[arg(long, conflicts_with = "write_acs_fix")]
    json: bool,
}

/// The JSON.
#[derive(Debug, Serialize)]
struct Report<'a> {
    schema: &'static str,
    /// Grows when a field changes its meaning or goes, not when one is added.
    schema_version: u32,
    peersum_version: &'static str,
    sources: &'a [String],
    gpus: Vec<Option<&'a str>>,
    /// What was read of NCCL's log; null if none was given.
    nccl_log: Option<Transports<'a>>,
    /// What was read of benchmarks, in words.
    results: Vec<String>,
    exit_code: u8,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

/// Runs the subcommand. Its exit code is that of [`Outcome::exit_code`].
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let source = topo::source(arguments.root.as_deref())?;
    let mut machine = read::read(&*source);
    if let Some(file) = &arguments.lspci {
        let text = topo::text(file)?;
        lspci::fill(&mut machine, &text).with_context(|| format!("can't use {}", file.display()))?;
    }
    if let Some(folder) = &arguments.write_acs_fix {
        let said = acs_fix::write(folder, &Redirected::of(&machine))?;
        io::stdout().lock().write_all(said.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let log = arguments.nccl_log.as_deref().map(topo::text).transpose()?.map(|text| Log::parse(&text));
    let mut runs = Vec::new();
    for file in &arguments.results {
        let text = topo::text(file)?;
        runs.extend(Run::parse(&text).with_context(|| format!("can't use {}", file.display()))?);
    }
    if let Some(link) = arguments.link {
        ensure!(link.is_finite() && link > 0.0, "--link {link}: that is no bandwidth");
    }
    let outcome = examine(&*source, &machine, log.as_ref(), &Benchmarks { runs: &runs, link: arguments.link });
    let report = Report {
        schema: "peersum-doctor",
        schema_version: 1,
        peersum_version: env!("CARGO_PKG_VERSION"),
        sources: &machine.sources,
        gpus: machine.gpus.iter().map(|gpu| gpu.name.as_deref()).collect(),
        nccl_log: log.as_ref().map(Log::transports),
        results: runs.iter().map(|run| format!("{}: {}", run.title(), results::figures(run))).collect(),
        exit_code: outcome.exit_code(),
        outcome: &outcome,
    };
    output::report(arguments.json, &report, |out| show::show(out, &machine, log.as_ref(), &runs, &outcome))?;
    Ok(ExitCode::from(outcome.exit_code()))
}
