//! What is known of a run before anything is measured.

use std::io::{self, Write};

use peersum::{Algorithm, Plan};

use super::table::HALVES;
use crate::{measure::case::Placement, sizes::Size};

/// Of the first type's sizes, in their order.
#[derive(Debug, Default)]
pub(super) struct Outlook {
    /// How so many bytes are done.
    pub(super) plans: Vec<(usize, Plan)>,
    pub(super) missing: Vec<Missing>,
}

/// A candidate that can't be timed at one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Missing {
    algorithm: Algorithm,
    bytes: usize,
    /// `None` if in neither.
    half: Option<Placement>,
    reason: String,
}

impl Outlook {
    pub(super) fn plan(&mut self, bytes: usize, plan: Plan) {
        self.plans.push((bytes, plan));
    }

    /// Whether any call goes to NCCL.
    pub(super) fn hands_over(&self) -> bool {
        self.plans.iter().any(|(_, plan)| plan.algorithm == Algorithm::Nccl)
    }

    /// Notes why an algorithm can't be timed in the halves of the row, if it can't.
    pub(super) fn candidate(&mut self, algorithm: Algorithm, bytes: usize, why_not: [Option<&str>; 2]) {
        let mut note = |half, reason: &str| {
            self.missing.push(Missing { algorithm, bytes, half, reason: reason.to_owned() });
        };
        match why_not {
            [Some(out_of_place), Some(in_place)] if out_of_place == in_place => note(None, in_place),
            reasons => HALVES.into_iter().zip(reasons).for_each(|(half, reason)| {
                if let Some(reason) = reason {
                    note(Some(half), reason);
                }
            }),
        }
    }

    /// Where the choice changes, and to what: the first bytes of each choice but the first. Between two sizes of the
    /// run it is looked for by halves, so `algorithm_of` some bytes in between is asked for.
    pub(super) fn borders(
        &self,
        element_bytes: usize,
        mut algorithm_of: impl FnMut(usize) -> Option<Algorithm>,
    ) -> Vec<(u64, Algorithm)> {
        let changes = self.plans.windows(2).filter(|pair| pair[0].1.algorithm != pair[1].1.algorithm);
        changes
            .map(|pair| {
                let ((mut below, _), (mut from, plan)) = (pair[0], pair[1]);
                while from - below > element_bytes {
                    let middle = below + (from - below) / element_bytes / 2 * element_bytes;
                    if algorithm_of(middle) == Some(plan.algorithm) { from = middle } else { below = middle }
                }
                (from as u64, plan.algorithm)
            })
            .collect()
    }
}

/// Says how sizes are done: one line for each run of sizes that are done alike.
pub(super) fn plan_lines(out: &mut dyn Write, plans: &[(usize, Plan)]) -> io::Result<()> {
    let describe = |plan: &Plan| (plan.algorithm, plan.blocks, plan.threads);
    for alike in plans.chunk_by(|(_, a), (_, b)| describe(a) == describe(b)) {
        let [(first, plan), ..] = alike else { continue };
        let (algorithm, blocks, threads) = describe(plan);
        let sizes = range(*first, alike[alike.len() - 1].0);
        match algorithm {
            Algorithm::Nccl => writeln!(out, "# Plan: {sizes}: {algorithm}, behind a gate of one block")?,
            _ => writeln!(out, "# Plan: {sizes}: {algorithm}, blocks: {blocks}, threads of a block: {threads}")?,
        }
    }
    Ok(())
}

/// Says who is not timed: one line for each run of sizes of one algorithm and one reason.
pub(super) fn missing_lines(out: &mut dyn Write, missing: &[Missing]) -> io::Result<()> {
    let half = |missing: &Missing| missing.half.map_or("", Placement::name);
    let mut sorted: Vec<_> = missing.iter().collect();
    sorted.sort_by_key(|missing| (missing.algorithm, half(missing), missing.bytes));
    for alike in sorted.chunk_by(|a, b| (a.algorithm, half(a), &a.reason) == (b.algorithm, half(b), &b.reason)) {
        let Missing { algorithm, bytes, reason, .. } = alike[0];
        let sizes = range(*bytes, alike[alike.len() - 1].bytes);
        match half(alike[0]) {
            "" => writeln!(out, "# Not compared: {algorithm}, {sizes}: {reason}")?,
            half => writeln!(out, "# Not compared: {algorithm}, {sizes}, {half}: {reason}")?,
        }
    }
    Ok(())
}

/// The sizes from one to another.
fn range(first: usize, last: usize) -> String {
    match (Size(first as u64), Size(last as u64)) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first} to {last}"),
    }
}

#[cfg(test)]
mod tests {
    use peersum::{DType, Options};

    use super::*;
    use crate::measure::{
        candidate::{Home, Way},
        case::Placement,
        group::Group,
        host::HostGroup,
    };

    #[test]
    fn borders_are_found_to_the_element() {
        let mut group = HostGroup::new(4, &Options::default(), &[]).unwrap();
        let mut plan = |bytes: usize| {
            let plan = group.plan(Way::Chosen, Home::Plain.of(Placement::OutOfPlace), bytes / 4, DType::F32);
            plan.unwrap().unwrap()
        };
        let plans = [1 << 10, 64 << 10, 1 << 20].map(|bytes| (bytes, plan(bytes))).to_vec();
        let outlook = Outlook { plans, missing: Vec::new() };
        // The last size that the host's priors have for the one-shot among four ranks is 32 KiB.
        let borders = outlook.borders(4, |bytes| Some(plan(bytes).algorithm));
        assert_eq!(borders, [((32 << 10) + 4, Algorithm::TwoShotPull)]);
    }

    #[test]
    fn reasons_are_said_once_for_all_sizes_that_have_them() {
        let mut outlook = Outlook::default();
        for bytes in [1024, 4096] {
            outlook.candidate(Algorithm::Nccl, bytes, [Some("it is not there"); 2]);
            outlook.candidate(Algorithm::OneShot, bytes, [None, Some(&format!("no place for {bytes}"))]);
            outlook.candidate(Algorithm::TwoShot, bytes, [None, None]);
        }
        let mut out = Vec::new();
        missing_lines(&mut out, &outlook.missing).unwrap();
        let want = [
            "# Not compared: one-shot, 1K, in-place: no place for 1024",
            "# Not compared: one-shot, 4K, in-place: no place for 4096",
            "# Not compared: nccl, 1K to 4K: it is not there",
            "",
        ];
        assert_eq!(String::from_utf8(out).unwrap(), want.join("\n"));
    }
}
