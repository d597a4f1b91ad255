//! Who is measured at one size.

use std::collections::BTreeMap;

use peersum::{Algorithm, Choice, DType, Placement};

use super::kept::Measured;
use crate::measure::{
    candidate::{Candidate, Home, Way},
    case, grids,
    group::{self, Group},
    statistics::median,
};

/// Of each algorithm, as many grids as this go into the rounds that decide.
const FINALISTS: usize = 3;
/// An algorithm that takes so many times what the best takes does not: it is far from any border.
const HOPELESS: f64 = 4.0;

/// The candidates of one size, in and out of place.
///
/// The library's algorithms don't care where tensors lie unless they read them there: one measurement of theirs serves
/// every placement. NCCL has other kernels for its windows, so each placement has its own.
pub(super) struct Lineup {
    pub(super) out_of_place: Vec<Candidate>,
    pub(super) in_place: Vec<Candidate>,
    /// Algorithms that have no grid here, and why.
    pub(super) missing: Vec<(Algorithm, String)>,
}

impl Lineup {
    pub(super) fn new<G: Group>(
        group: &mut G,
        placements: &[Placement],
        with_nccl: bool,
        quick: bool,
        (count, dtype): (usize, DType),
    ) -> Lineup {
        let mut lineup = Lineup { out_of_place: Vec::new(), in_place: Vec::new(), missing: Vec::new() };
        let (bytes, sharing) = (count * dtype.size(), group::sharing(group.devices()));
        let symmetric = placements.iter().any(|&placement| placement != Placement::Anywhere);
        let home = if symmetric { Home::Symmetric } else { Home::Plain };
        for algorithm in Algorithm::ALL {
            let mut reason = None;
            let mut found = false;
            for choice in grids::all(algorithm, bytes, sharing, quick) {
                let mut add = |home: Home, half: case::Placement| match group.plan(
                    Way::Forced(choice),
                    home.of(half),
                    count,
                    dtype,
                ) {
                    Ok(plan) => {
                        let half = match half {
                            case::Placement::OutOfPlace => &mut lineup.out_of_place,
                            case::Placement::InPlace => &mut lineup.in_place,
                        };
                        half.push(Candidate { way: Way::Forced(choice), home, plan });
                        found = true;
                    }
                    Err(error) => reason = Some(error.to_string()),
                };
                if !algorithm.is_direct() {
                    add(home, case::Placement::OutOfPlace);
                    continue;
                }
                if placements.contains(&Placement::Symmetric) {
                    add(Home::Symmetric, case::Placement::OutOfPlace);
                }
                if placements.contains(&Placement::SymmetricInPlace) && algorithm.serves(Placement::SymmetricInPlace) {
                    add(Home::Symmetric, case::Placement::InPlace);
                }
            }
            if let (false, Some(reason)) = (found, reason) {
                lineup.missing.push((algorithm, reason));
            }
        }
        if with_nccl && group.nccl().is_ok() {
            for &placement in placements {
                let (home, half, list) = match placement {
                    Placement::Anywhere => (Home::Plain, case::Placement::OutOfPlace, &mut lineup.out_of_place),
                    Placement::SymmetricInPlace => (Home::Symmetric, case::Placement::InPlace, &mut lineup.in_place),
                    _ => (Home::Symmetric, case::Placement::OutOfPlace, &mut lineup.out_of_place),
                };
                let way = Way::Forced(Choice::NCCL);
                match group.plan(way, home.of(half), count, dtype) {
                    Ok(plan) => list.push(Candidate { way, home, plan }),
                    Err(error) => lineup.missing.push((Algorithm::Nccl, error.to_string())),
                }
            }
        }
        lineup
    }
}

/// Those of what was measured that go into the rounds that decide, by index: of each algorithm the fastest grids. What
/// gave a wrong element doesn't.
pub(super) fn finalists(measured: &[Measured]) -> Vec<usize> {
    let time = |index: &usize| median(measured[*index].samples_us.iter().copied());
    let right: Vec<usize> = (0..measured.len()).filter(|&index| measured[index].wrong == 0).collect();
    let best = right.iter().map(time).fold(f64::INFINITY, f64::min);
    let mut grids: BTreeMap<(&str, Home), Vec<usize>> = BTreeMap::new();
    for index in right {
        grids.entry((&measured[index].algorithm, measured[index].home)).or_default().push(index);
    }
    let mut chosen: Vec<usize> = grids
        .into_values()
        .flat_map(|mut indices| {
            indices.sort_by(|a, b| time(a).total_cmp(&time(b)));
            indices.truncate(FINALISTS);
            indices
        })
        .filter(|index| measured[*index].is_nccl() || time(index) <= HOPELESS * best)
        .collect();
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use peersum::{Options, host};

    use super::*;
    use crate::measure::host::HostGroup;

    fn measured(algorithm: &str, blocks: u32, us: f64, wrong: u64) -> Measured {
        Measured {
            algorithm: algorithm.into(),
            blocks,
            threads: 128,
            home: Home::Symmetric,
            in_place: false,
            calls: 10,
            rounds: 1,
            samples_us: vec![us],
            wrong,
        }
    }

    #[test]
    fn the_best_grids_of_every_algorithm_go_on_and_nccl_always() {
        let all = [
            measured("one-shot", 1, 5.0, 0),
            measured("one-shot", 2, 4.0, 0),
            measured("one-shot", 4, 3.0, 0),
            measured("one-shot", 8, 2.0, 0),
            measured("two-shot", 1, 1.0, 7),
            measured("two-shot", 2, 2.5, 0),
            measured("two-shot-ll", 2, 9.0, 0),
            measured("nccl", 1, 50.0, 0),
        ];
        assert_eq!(finalists(&all), [1, 2, 3, 5, 7]);
        assert!(finalists(&[]).is_empty());
    }

    #[test]
    fn every_algorithm_of_the_backend_is_in_the_lineup_and_the_others_have_a_reason() {
        let mut group = HostGroup::new(2, &Options::default(), &Algorithm::ALL).unwrap();
        let placements = [Placement::Anywhere, Placement::Symmetric, Placement::SymmetricInPlace];
        let lineup = Lineup::new(&mut group, &placements, true, true, (1000, DType::F32));
        let is_there = |algorithm| {
            let of = |candidate: &Candidate| candidate.plan.unwrap().algorithm == algorithm;
            lineup.out_of_place.iter().chain(&lineup.in_place).any(of)
        };
        for algorithm in Algorithm::ALL {
            assert_eq!(is_there(algorithm), host::ALGORITHMS.contains(&algorithm), "{algorithm}");
            let missing = lineup.missing.iter().any(|(missing, reason)| *missing == algorithm && !reason.is_empty());
            assert_eq!(missing, !is_there(algorithm), "{algorithm}");
        }
        assert!(!is_there(Algorithm::Nccl));
    }
}
