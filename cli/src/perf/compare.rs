//! Who is timed beside what the library chooses.

use std::str::FromStr;

use anyhow::Result;
use peersum::{Algorithm, Choice, DType, Options, host};

use crate::{
    dtypes::once_each,
    measure::{
        candidate::{Candidate, Home, Way},
        case::Placement,
        grids,
        group::{self, Backend, Group},
    },
};

/// A name in `--compare`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rival {
    One(Algorithm),
    All,
}

impl FromStr for Rival {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "all" => Ok(Rival::All),
            name => name.parse().map(Rival::One).map_err(|error| format!("{error}; and all")),
        }
    }
}

/// What was named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Compared {
    named: Vec<Algorithm>,
    all: bool,
}

impl Compared {
    pub(crate) fn new(rivals: &[Rival]) -> Self {
        let named = rivals.iter().filter_map(|rival| match rival {
            Rival::One(algorithm) => Some(*algorithm),
            Rival::All => None,
        });
        Compared { named: once_each(named), all: rivals.contains(&Rival::All) }
    }

    pub(crate) fn with_nccl(&self) -> bool {
        self.all || self.named.contains(&Algorithm::Nccl)
    }

    /// By name first; `all` adds what the backend has for tensors that lie there.
    pub(crate) fn algorithms(&self, backend: Backend, home: Home) -> Vec<Algorithm> {
        let all: Vec<_> = match (self.all, backend) {
            (false, _) => Vec::new(),
            (true, Backend::Host) => host::ALGORITHMS.to_vec(),
            (true, Backend::Cuda) => {
                let own = Algorithm::ALL.into_iter();
                own.filter(|algorithm| home == Home::Symmetric || !algorithm.is_direct())
                    .chain([Algorithm::Nccl])
                    .collect()
            }
        };
        once_each(self.named.iter().copied().chain(all))
    }
}

/// Who is timed in one half of a row.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    /// What the library chooses, then those of the others that can run.
    pub(crate) candidates: Vec<Candidate>,
    /// By algorithm: which candidate it is, or why it is none.
    pub(crate) others: Vec<Result<usize, String>>,
}

impl Field {
    pub(crate) fn new<G: Group>(
        group: &mut G,
        algorithms: &[Algorithm],
        options: &Options,
        home: Home,
        placement: Placement,
        (count, dtype): (usize, DType),
    ) -> peersum::Result<Field> {
        let lies = home.of(placement);
        let chosen = group.plan(Way::Chosen, lies, count, dtype)?;
        let mut candidates = vec![Candidate { way: Way::Chosen, home, plan: chosen }];
        let mut others = Vec::new();
        for &algorithm in algorithms {
            let same = chosen.filter(|plan| plan.algorithm == algorithm);
            let sharing = group::sharing(group.devices());
            let usual = grids::usual(algorithm, count * dtype.size(), sharing);
            let choice = match same {
                Some(plan) => Choice { algorithm, blocks: plan.blocks, threads: plan.threads },
                None if algorithm == Algorithm::Nccl => usual,
                None => Choice {
                    algorithm,
                    blocks: options.blocks.unwrap_or(usual.blocks),
                    threads: options.threads.unwrap_or(usual.threads),
                },
            };
            others.push(resident(group, choice, home, lies, (count, dtype)).map(|candidate| {
                candidates.push(candidate);
                candidates.len() - 1
            }));
        }
        Ok(Field { candidates, others })
    }
}

/// The candidate on this grid, or on the largest part of it that can be resident.
fn resident<G: Group>(
    group: &mut G,
    choice: Choice,
    home: Home,
    lies: peersum::Placement,
    (count, dtype): (usize, DType),
) -> Result<Candidate, String> {
    if choice.algorithm == Algorithm::Nccl {
        group.nccl()?;
    }
    let mut reason = None;
    for choice in std::iter::successors(Some(choice), |&choice| grids::halved(choice)) {
        let way = if choice == Choice::NCCL { Way::NcclAlone } else { Way::Forced(choice) };
        match group.plan(way, lies, count, dtype) {
            Ok(plan) => return Ok(Candidate { way, home, plan }),
            Err(error) => reason = Some(error.to_string()),
        }
    }
    Err(reason.unwrap_or_else(|| "it has no grid".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::host::HostGroup;

    #[test]
    fn names_are_kept_in_their_order_and_all_adds_the_rest() {
        let parse = |names: &str| {
            let rivals: Vec<Rival> = names.split(',').map(|name| name.parse().unwrap()).collect();
            Compared::new(&rivals)
        };
        let two = parse("nccl,one-shot,nccl");
        assert_eq!(two.algorithms(Backend::Host, Home::Plain), [Algorithm::Nccl, Algorithm::OneShot]);
        let all = parse("two-shot,all");
        let on = |backend, home| all.algorithms(backend, home);
        assert_eq!(on(Backend::Host, Home::Plain)[0], Algorithm::TwoShot);
        assert_eq!(on(Backend::Host, Home::Plain).len(), host::ALGORITHMS.len());
        assert_eq!(on(Backend::Cuda, Home::Plain).len(), Algorithm::STAGED.len() + 1);
        assert_eq!(on(Backend::Cuda, Home::Symmetric).len(), Algorithm::ALL.len() + 1);
        assert!("ring".parse::<Rival>().unwrap_err().ends_with("nccl; and all"));
    }

    #[test]
    fn what_can_not_run_has_a_reason_and_what_can_its_plan() {
        let algorithms = [Algorithm::Nccl, Algorithm::TwoShotPull, Algorithm::OneShotDirect];
        let options = Options::default();
        let mut group = HostGroup::new(2, &options, &algorithms).unwrap();
        let size = (1000, DType::F32);
        let field = Field::new(&mut group, &algorithms, &options, Home::Plain, Placement::OutOfPlace, size).unwrap();
        let plans: Vec<_> = field.candidates.iter().map(|candidate| candidate.plan.unwrap().algorithm).collect();
        assert_eq!(plans, [Algorithm::OneShot, Algorithm::TwoShotPull]);
        assert_eq!(field.others[1], Ok(1));
        assert_eq!(field.others[0], Err("NCCL is for GPUs".to_owned()));
        assert!(field.others[2].as_ref().unwrap_err().contains("in symmetric memory"));
    }
}
