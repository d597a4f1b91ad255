//! NCCL, loaded at run time: one candidate for long messages that is not this library's own.
//!
//! [`Library`] finds it. The ranks of a group make a communicator of their own from the meeting that they have anyway,
//! or an engine that has one already lends it as [`AllReduce`], by [`Borrowed`] or a type of its own, so that the
//! memory of two isn't paid for.
//!
//! Nothing here knows CUDA: contexts are made current by the caller, addresses and streams are numbers that NCCL reads.

mod borrowed;
mod communicator;
mod handle;
mod join;
mod library;
mod sys;
#[cfg(test)]
mod tests;
mod version;
mod windows;

use std::ffi::c_void;

pub use borrowed::Borrowed;
pub(crate) use communicator::{Communicator, wait_for_ends};
pub(crate) use join::{Registered, Settings, WarmUp, join};
pub use library::Library;
pub use version::{ParseVersionError, Version};

use crate::{DType, ReduceOp, Result};

/// The oldest that has what is used.
const OLDEST: Version = Version::new(2, 18, 0);
/// The newest of those that this was written for. Newer ones are taken too, since NCCL keeps its interface.
const NEWEST_TRIED: Version = Version::new(2, 32, u32::MAX);

/// One rank's communicator of NCCL, or of something that does an all-reduce as NCCL does.
///
/// NCCL's sums are not those of this library: the order of the ranks, and how often is rounded, are NCCL's choice by
/// length, algorithm and version. Every rank gets the same bits of one call.
///
/// # Safety
///
/// * [`AllReduce::all_reduce`] must enqueue on the stream nothing but work that reads `count` elements from `input` and
///   writes `count` to `output`, after what the stream holds already, and that ends once all ranks have made the call,
///   or after [`AllReduce::abort`] at last.
/// * No method may leave another CUDA context current than it has found.
/// * All may be called from any thread.
pub unsafe trait AllReduce: Send + Sync {
    /// The version of NCCL.
    fn version(&self) -> Version;

    /// Enqueues an all-reduce of `count` elements on `stream`, a `CUstream`. In place if `input` and `output` are the
    /// same address; otherwise they may not overlap.
    ///
    /// Returns once the work is enqueued, not when it is done; NCCL may wait for the other ranks' calls before, the
    /// first time above all. Errors of one call are of that call: whether the next can work is for NCCL to say.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`](crate::Error::Nccl) if NCCL refuses, [`Error::NcclTimeout`](crate::Error::NcclTimeout) if it
    /// doesn't come to an end, [`Error::Aborted`](crate::Error::Aborted) after [`AllReduce::abort`].
    ///
    /// # Safety
    ///
    /// The context of the communicator's device is current, the stream is of that context, and both addresses are of
    /// `count` elements that the device can access, until the work on the stream has ended. Nobody else uses the output
    /// meanwhile, or changes the input.
    unsafe fn all_reduce(
        &self,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: *mut c_void,
    ) -> Result<()>;

    /// What has gone wrong since, on this rank or another, in work that was enqueued. Doesn't wait.
    ///
    /// # Errors
    ///
    /// As [`AllReduce::all_reduce`].
    fn async_error(&self) -> Result<()>;

    /// Ends the work that waits for other ranks, if the communicator is the implementor's to end, and all use of it.
    /// From any thread, as often as one likes; returns at once.
    fn abort(&self);
}
