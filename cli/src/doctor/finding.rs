//! What the doctor says.

use serde::Serialize;

use crate::topology::machine::{Machine, Pair};

/// How much a finding costs. Findings are shown in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Weight {
    /// Something doesn't work, or is several times slower.
    Severe,
    /// Something is slower than it could be.
    Moderate,
    /// Worth knowing; no reason for another exit code.
    Note,
}

impl Weight {
    pub(super) fn name(self) -> &'static str {
        match self {
            Weight::Severe => "severe",
            Weight::Moderate => "moderate",
            Weight::Note => "note",
        }
    }
}

/// Something that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// Stable, for scripts.
    pub(super) id: &'static str,
    pub(super) weight: Weight,
    pub(super) title: String,
    /// What was seen. No names of hosts, no serial numbers.
    pub(super) evidence: Vec<String>,
    /// Why it costs.
    pub(super) cost: String,
    pub(super) remedy: Vec<String>,
}

/// Something that could not be looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Unknown {
    pub(super) what: String,
    pub(super) why: String,
}

/// All that checks come to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Outcome {
    pub(super) findings: Vec<Finding>,
    pub(super) unknown: Vec<Unknown>,
    /// What was looked at without anything to say.
    pub(super) fine: Vec<String>,
}

impl Outcome {
    pub(super) fn found(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    pub(super) fn unknown(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.unknown.push(Unknown { what: what.into(), why: why.into() });
    }

    pub(super) fn fine(&mut self, what: impl Into<String>) {
        self.fine.push(what.into());
    }

    /// By weight; of one weight in the order of the checks.
    pub(super) fn sort(&mut self) {
        self.findings.sort_by_key(|finding| finding.weight);
    }

    /// 3 if anything severe was found, 1 if only moderate things were, 2 if nothing was and something could not be
    /// looked at, else 0. Notes don't count. 2 is also a command's code that can't run, which knows nothing either.
    pub(super) fn exit_code(&self) -> u8 {
        match self.findings.iter().map(|finding| finding.weight).min() {
            Some(Weight::Severe) => 3,
            Some(Weight::Moderate) => 1,
            _ if self.unknown.is_empty() => 0,
            _ => 2,
        }
    }
}

/// More pairs than this are counted, not named.
const NAMED: usize = 8;

/// Names pairs of GPUs.
pub(super) fn pairs(machine: &Machine, pairs: &[Pair]) -> String {
    let all = machine.gpu_pairs().count();
    if pairs.len() == all && all > 1 {
        return format!("all {all} pairs of GPUs");
    }
    list(pairs.iter().map(|(a, b)| format!("GPU{a}-GPU{b}")))
}

/// The first of many, with commas.
pub(super) fn list(of: impl IntoIterator<Item = String>) -> String {
    let all: Vec<_> = of.into_iter().collect();
    match all.len() {
        count if count > NAMED => format!("{} and {} more", all[..NAMED].join(", "), count - NAMED),
        _ => all.join(", "),
    }
}
