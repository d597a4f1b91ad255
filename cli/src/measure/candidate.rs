//! Who may do a call, and where its tensors lie.

use peersum::{Algorithm, Choice, Plan, ReduceOp};
use serde::{Deserialize, Serialize};

use super::{case::Placement, inputs::Pattern};

/// Who does a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Whoever the library chooses.
    Chosen,
    /// This, whatever the library would choose.
    Forced(Choice),
    /// NCCL by itself, without the gate that the library has before it.
    NcclAlone,
    /// A kernel that does nothing: what any kernel of such a grid costs. It leaves no result.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Empty { blocks: u32, threads: u32 },
}

/// The memory that tensors are taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Home {
    /// An allocation of the rank's own.
    Plain,
    /// The group's symmetric memory.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Symmetric,
}

impl Home {
    /// The library's word for where the tensors of a call lie.
    pub(crate) fn of(self, placement: Placement) -> peersum::Placement {
        match (self, placement) {
            (Home::Plain, _) => peersum::Placement::Anywhere,
            (Home::Symmetric, Placement::OutOfPlace) => peersum::Placement::Symmetric,
            (Home::Symmetric, Placement::InPlace) => peersum::Placement::SymmetricInPlace,
        }
    }
}

/// One who does a call at one size: several of them are timed in turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) way: Way,
    pub(crate) home: Home,
    /// What it comes to; `None` for no elements, or one rank.
    pub(crate) plan: Option<Plan>,
}

impl Candidate {
    pub(crate) fn is_nccl(&self) -> bool {
        self.plan.is_some_and(|plan| plan.algorithm == Algorithm::Nccl)
    }

    /// The inputs with which its bits are known. NCCL adds in an order of its own, so they are with sums that are exact
    /// in every order. Averages are not among those unless the ranks are a power of two: NCCL multiplies by a rounded
    /// reciprocal.
    pub(crate) fn patterns(&self, op: ReduceOp, world: usize) -> &'static [Pattern] {
        match (self.is_nccl(), op) {
            (false, _) => &Pattern::ALL,
            (true, ReduceOp::Average) if !world.is_power_of_two() => &[],
            (true, _) => &[Pattern::Exact],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_home_and_the_half_of_the_row_say_where_tensors_lie() {
        assert_eq!(Home::Plain.of(Placement::InPlace), peersum::Placement::Anywhere);
        assert_eq!(Home::Symmetric.of(Placement::OutOfPlace), peersum::Placement::Symmetric);
        assert_eq!(Home::Symmetric.of(Placement::InPlace), peersum::Placement::SymmetricInPlace);
    }

    #[test]
    fn the_bits_of_the_library_are_known_with_all_inputs() {
        let own = Candidate { way: Way::Chosen, home: Home::Plain, plan: None };
        assert!(!own.is_nccl());
        for op in ReduceOp::ALL {
            assert_eq!(own.patterns(op, 3), Pattern::ALL);
        }
    }
}
