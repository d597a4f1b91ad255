//! All checks, one after the other.

use super::{
    finding::Outcome,
    links,
    nccl_log::{self, Log},
    p2p, results,
    settings::{self, Settings},
    system,
};
use crate::{
    model::runs::Run,
    topology::{machine::Machine, nccl, source::Source},
};

/// What was measured elsewhere.
#[derive(Clone, Copy, Default)]
pub(super) struct Benchmarks<'a> {
    pub(super) runs: &'a [Run],
    /// GB/s that a GPU of theirs could send.
    pub(super) link: Option<f64>,
}

/// Looks at everything.
pub(super) fn examine(source: &dyn Source, machine: &Machine, log: Option<&Log>, benchmarks: &Benchmarks) -> Outcome {
    let mut outcome = Outcome::default();
    let settings = Settings::of(source);
    // Checks say these themselves, and what they mean.
    let said_again =
        |unseen: &&String| ["the NVLinks", "the IOMMU", "GPU "].iter().any(|subject| unseen.starts_with(subject));
    for unseen in machine.unseen.iter().filter(|unseen| !said_again(unseen)) {
        outcome.unknown("part of the machine", unseen.clone());
    }
    if machine.gpus.is_empty() {
        outcome.unknown(
            "GPUs",
            "none of NVIDIA's is seen here, so there is nothing between them to look at. If there should be one: \
             `lspci -d 10de:` shows it without a driver, and containers need --gpus all",
        );
    }
    if machine.gpus.len() == 1 {
        outcome.fine("between GPUs: there is one, so there is no NVLink, P2P or ACS between them to look at");
    }
    links::nvlink(machine, &mut outcome);
    p2p::check(machine, &settings, &mut outcome);
    links::pcie(machine, &mut outcome);
    links::places(machine, &mut outcome);
    settings::check(&settings, machine.gpus.len() == 1, &mut outcome);
    system::container(source, machine, &mut outcome);
    system::software(source, machine, &mut outcome);
    system::modes(source, machine, &mut outcome);
    if let Some(log) = log {
        let level = nccl::level(machine, settings.get("NCCL_P2P_DISABLE"), settings.get("NCCL_P2P_LEVEL"));
        nccl_log::check(log, machine, level, &mut outcome);
    }
    results::check(benchmarks.runs, machine, benchmarks.link, &mut outcome);
    outcome.sort();
    outcome
}
