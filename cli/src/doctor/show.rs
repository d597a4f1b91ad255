//! What `peersum doctor` prints: one block that can be pasted into a report, without names of hosts or serial numbers.

use std::io::{self, Write};

use super::{
    finding::{Outcome, Weight},
    nccl_log::Log,
    results,
};
use crate::{model::runs::Run, topology::machine::Machine};

pub(super) fn show(
    out: &mut dyn Write,
    machine: &Machine,
    log: Option<&Log>,
    runs: &[Run],
    outcome: &Outcome,
) -> io::Result<()> {
    writeln!(out, "# peersum doctor {}", env!("CARGO_PKG_VERSION"))?;
    writeln!(
        out,
        "# Read from: {}",
        if machine.sources.is_empty() { "nothing".into() } else { machine.sources.join(", ") }
    )?;
    let mut names: Vec<(&str, usize)> = Vec::new();
    for gpu in &machine.gpus {
        let name = gpu.name.as_deref().unwrap_or("unknown model");
        match names.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => names.push((name, 1)),
        }
    }
    let names: Vec<_> = names.into_iter().map(|(name, count)| format!("{count} x {name}")).collect();
    writeln!(out, "# GPUs: {}", if names.is_empty() { "none".into() } else { names.join(", ") })?;
    if let Some(log) = log {
        transports(out, log)?;
    }
    runs.iter().try_for_each(|run| writeln!(out, "# Results: {}: {}", run.title(), results::figures(run)))?;
    for finding in &outcome.findings {
        writeln!(out, "\n[{}] {} ({})", finding.weight.name(), finding.title, finding.id)?;
        finding.evidence.iter().try_for_each(|line| writeln!(out, "  seen:   {line}"))?;
        writeln!(out, "  costs:  {}", finding.cost)?;
        finding.remedy.iter().try_for_each(|line| writeln!(out, "  remedy: {line}"))?;
    }
    if !outcome.unknown.is_empty() {
        writeln!(out, "\nCould not be looked at:")?;
        outcome.unknown.iter().try_for_each(|unknown| writeln!(out, "  {}: {}", unknown.what, unknown.why))?;
    }
    if !outcome.fine.is_empty() {
        writeln!(out, "\nNothing found:")?;
        outcome.fine.iter().try_for_each(|fine| writeln!(out, "  {fine}"))?;
    }
    let count = |weight| outcome.findings.iter().filter(|finding| finding.weight == weight).count();
    writeln!(
        out,
        "\n# {} severe, {} moderate, {} notes, {} unknown",
        count(Weight::Severe),
        count(Weight::Moderate),
        count(Weight::Note),
        outcome.unknown.len()
    )
}

fn transports(out: &mut dyn Write, log: &Log) -> io::Result<()> {
    let version = log.version.as_deref().unwrap_or("of unknown version");
    let nvls = match (log.nvls_channels, log.nvls) {
        (Some(channels), _) => format!("{channels} channels of NVLS"),
        (None, Some(true)) => "NVLS is available".into(),
        (None, Some(false)) => "NVLS is not available".into(),
        (None, None) => "nothing about NVLS".into(),
    };
    writeln!(out, "# NCCL's log: NCCL {version}, {} hosts, {nvls}; channels:", log.hosts)?;
    for (pair, by) in &log.channels {
        let by: Vec<_> =
            by.iter().map(|(transport, channels)| format!("{} by {}", channels.len(), transport.name())).collect();
        writeln!(out, "#   rank {} to {}: {}", pair.0, pair.1, by.join(", "))?;
    }
    Ok(())
}
