//! One row of the table.

use peersum::{DType, ReduceOp};
use serde::Serialize;

/// What is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    /// Elements of one rank's tensor.
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
}

impl Case {
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

/// Whether the output replaces the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Placement {
    OutOfPlace,
    InPlace,
}

impl Placement {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Placement::OutOfPlace => "out-of-place",
            Placement::InPlace => "in-place",
        }
    }
}

/// How calls are issued and timed. Figures of different modes can't be compared, so every table names its mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// Calls captured once in a CUDA graph, which is replayed: the launch costs of eager calls are not in it
    Graph,
    /// Calls launched one after the other, awaited at the end
    Queued,
    /// Calls launched one by one, each awaited before the next: launch and wake-up are in every one
    Synchronized,
    /// Calls that return when they are done, as all of the host backend's do
    #[value(skip)]
    Blocking,
}

impl Mode {
    /// The words of the table's mode line.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Mode::Graph => "graph replay, by device events",
            Mode::Queued => "eager, queued, by device events",
            Mode::Synchronized => "eager, synchronized after each call, by the host's clock",
            Mode::Blocking => "blocking calls, by the host's clock",
        }
    }
}
