//! What a rank of either backend does, and what it is told.

use std::{borrow::Cow, ops::Range};

use anyhow::{Result, anyhow, bail};
use peersum::ReduceOp;
use serde::{Deserialize, Serialize};

use super::{
    barrier::Barrier,
    candidate::Candidate,
    case::{Case, Mode, Placement},
    datum::Datum,
};

/// Which of a rank's two buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Buffer {
    Send,
    Receive,
}

/// A rank of either backend, with its two buffers of `T`. Each is driven by a thread of its own.
///
/// All but `ready`, `call` and `time` are done when they return, and no call of any rank runs meanwhile.
pub(crate) trait Rank<T: Datum>: Send {
    /// What a candidate's timed calls need beforehand: a graph, where they are replayed.
    type Ready;

    fn rank(&self) -> usize;

    /// Comes first on every thread that drives the rank.
    fn settle(&self) {}

    /// Lets a candidate do the calls that follow, on the buffers that lie where it has them. All ranks take the same.
    fn take(&mut self, candidate: &Candidate) -> Result<()>;

    /// Overwrites the elements of a buffer from `first` on.
    fn write(&mut self, buffer: Buffer, first: usize, values: &[T]) -> Result<()>;

    /// Sets a part of the receive buffer to [`Datum::POISON`].
    fn poison(&mut self, range: Range<usize>) -> Result<()>;

    /// A part of the receive buffer.
    fn read(&mut self, range: Range<usize>) -> Result<Cow<'_, [T]>>;

    /// Whether calls with so many bytes a rank are checked where the ranks' memory is, by [`Rank::generate`] and
    /// [`Rank::count_wrong`], for the sake of speed or because that is preferred: the same on every rank.
    fn checks_itself(&self, _bytes: usize, _preferred: bool) -> bool {
        false
    }

    /// Writes what rank `of` has in a tensor in that round, a function of both and of the element's index in the
    /// tensor. Of `exact` inputs every sum is exact, in any order.
    fn generate(&mut self, _buffer: Buffer, _tensor: Range<usize>, _of: usize, _round: Round) -> Result<()> {
        bail!("the inputs of this backend are the command's own")
    }

    /// How many elements of a tensor in the receive buffer differ from what the reduction of that round gives.
    fn count_wrong(&mut self, _tensor: Range<usize>, _op: ReduceOp, _round: Round) -> Result<u64> {
        bail!("the outputs of this backend are checked by the command")
    }

    /// Makes one call ready that is issued as the mode does. The call itself is [`Rank::call`].
    fn prepare(&mut self, call: &Call) -> Result<()>;

    /// Does the call that was prepared; all ranks come here together. Returns when the output is written.
    fn call(&mut self, call: &Call) -> Result<()>;

    /// Makes ready what the candidate that was taken last is timed with; all ranks come here together. An error says
    /// why it can't be timed, and leaves the rank as it was.
    fn ready(&mut self, call: &Call, schedule: &Schedule) -> Result<Self::Ready>;

    /// Warms up and times. Waits at the barrier before what is timed starts.
    fn time(&mut self, ready: &Self::Ready, call: &Call, schedule: &Schedule, barrier: &Barrier<'_>) -> Result<Timing>;
}

/// Which inputs a rank makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) number: u64,
    /// Whether every sum of them is exact, in any order.
    pub(crate) exact: bool,
}

/// What is called, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) case: Case,
    pub(crate) placement: Placement,
    pub(crate) mode: Mode,
}

/// How often, in one round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    /// Calls in a row; in one graph, where there is one.
    pub(crate) iterations: usize,
    /// Calls before the timed ones.
    pub(crate) warmup: usize,
    /// Launches of the graph; 1 where there is none.
    pub(crate) replays: usize,
    /// Whether each of the queued calls gets an event of its own.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) per_iteration: bool,
}

impl Schedule {
    /// Calls that are timed: what the total is divided by.
    pub(crate) fn calls(&self) -> usize {
        self.iterations * self.replays
    }
}

/// One rank's times of one call, in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Timing {
    /// By the mode's clock: the total over the calls.
    pub(crate) time_us: f64,
    /// By the host's clock, from the first launch to the end of the last call: the total over the calls.
    pub(crate) wall_us: f64,
    /// Of each replay (over the calls in it), or of each call; none where they were not timed one by one.
    pub(crate) samples_us: Vec<f64>,
}

/// A library's error, with the rank that had it, unless the error itself names ranks.
pub(crate) fn of_rank(rank: usize) -> impl Fn(peersum::Error) -> anyhow::Error {
    move |error| {
        let message = error.to_string();
        if message.starts_with("rank ") { anyhow!(message) } else { anyhow!("rank {rank}: {message}") }
    }
}
