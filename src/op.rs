//! The reductions.

use std::fmt;

use crate::protocol::bindings;

/// What an all-reduce computes of the ranks' elements.
///
/// All of them compute in f32, in rank order 0..N−1, and round once to the element type at the end. Where several NaNs
/// meet, which payload survives is not specified across backends; on one backend it is the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// x₀ + x₁ + … + xₙ₋₁. The sum starts from x₀, so ranks that all hold −0 get −0.
    Sum,
    /// The sum divided by the number of ranks, in f32, before the rounding.
    Average,
    /// The greatest. A NaN on any rank gives NaN. +0 is greater than −0.
    Max,
    /// The least. A NaN on any rank gives NaN. −0 is less than +0.
    Min,
}

impl ReduceOp {
    /// All reductions, in the order of their codes.
    pub const ALL: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Max, ReduceOp::Min];

    /// The code that the kernels know it by.
    pub(crate) const fn code(self) -> u32 {
        match self {
            ReduceOp::Sum => bindings::PEERSUM_SUM,
            ReduceOp::Average => bindings::PEERSUM_AVERAGE,
            ReduceOp::Max => bindings::PEERSUM_MAX,
            ReduceOp::Min => bindings::PEERSUM_MIN,
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Average => "avg",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        })
    }
}
