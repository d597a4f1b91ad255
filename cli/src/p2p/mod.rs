//! `peersum p2p`: what each two GPUs can move between them, and whether it arrives.
//!
//! [`links`] says what is measured, [`cuda`] measures it, [`theory`] knows what links could carry, and [`report`]
//! judges.

mod cuda;
pub(crate) mod links;
pub(crate) mod report;
#[cfg(test)]
mod tests;
pub(crate) mod theory;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Result, ensure};
use clap::Args;
use indicatif::ProgressBar;

use crate::{
    output, page,
    probe::gpu,
    sizes::Size,
    topology::{machine::Machine, read, source::Here},
};
use cuda::Cuda;
use report::Report;

/// What `peersum p2p` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Devices, as 0,1,2 [default: all]; a device that stands twice is a pair of streams, to try this on one GPU
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    devices: Vec<usize>,

    /// Bytes of a copy; five follow each other. Each device needs twice as much memory
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "128M")]
    bytes: Size,

    /// Draws the matrices as heat maps, to a page that opens without a network
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,

    /// Prints everything as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand. An error is returned where nothing could be measured.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let bytes = usize::try_from(arguments.bytes.0).unwrap_or(usize::MAX);
    ensure!(bytes >= 16 && bytes.is_multiple_of(16), "-b {}: it must be a multiple of 16 bytes", arguments.bytes);
    let ranks = gpu::ranks(&gpu::devices(&arguments.devices)?)?;
    let mut cuda = Cuda::new(ranks, bytes)?;
    let machine = read::read(&Here);
    let machine = (!machine.gpus.is_empty()).then_some(&machine);
    let report = measured(&mut cuda, bytes, machine);
    if let Some(file) = &arguments.html {
        let mut text = Vec::new();
        report.print(&mut text)?;
        let pictures = page::matrices(&serde_json::to_string(&report)?)?;
        let text = String::from_utf8_lossy(&text);
        page::write(file, &page::html("What each two GPUs can move, and whether it arrives", &text, &pictures))?;
    }
    output::report(arguments.json, &report, |out| report.print(out))?;
    Ok(ExitCode::from(u8::from(report.any_bad() || report.any_failed())))
}

fn measured(links: &mut dyn links::Links, bytes: usize, machine: Option<&Machine>) -> Report {
    let devices = links.devices();
    let reason = |from: usize, to: usize| {
        let machine = machine?;
        let place = |device: usize| theory::place(machine, &devices[device].pci);
        report::reason(machine, (place(from)?, place(to)?))
    };
    let spinner = ProgressBar::new_spinner();
    let measured = links::measure(links, &reason, &mut |step| {
        spinner.set_message(step.to_owned());
        spinner.tick();
    });
    spinner.finish_and_clear();
    Report::new(links, bytes, measured, machine)
}
