//! Communicators that an engine has already.

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
    time::Duration,
};

use super::{
    AllReduce, Library, Version,
    handle::{Call, Comm, Handle, Patience},
    sys::CommNumber,
};
use crate::{DType, Error, ReduceOp, Result};

/// A communicator of NCCL that belongs to somebody else, an `ncclComm_t`.
///
/// It is used, never finalised, aborted or destroyed: [`AllReduce::abort`] ends its use here, and makes calls that poll
/// for it return, but work that waits for other ranks goes on until the owner aborts the communicator. It may be blocking,
/// and then its calls wait as long as NCCL does; or non-blocking, and then they are polled for until the timeout.
pub struct Borrowed {
    handle: Handle<()>,
}

impl Borrowed {
    /// Borrows rank `rank` of `world`. `timeout` bounds the wait for a call to be enqueued.
    ///
    /// # Errors
    ///
    /// [`Error::NullPointer`] if `comm` is null, [`Error::NcclUnavailable`] if NCCL says that it is another rank, or of
    /// another number of ranks.
    ///
    /// # Safety
    ///
    /// * `comm` is a communicator that this very `library` has made, and its init is over.
    /// * It is neither aborted nor destroyed before this value has gone, and its last call has returned.
    /// * The owner makes no call for it while one from here is under way, and all ranks make their calls for it, the
    ///   owner's and those from here, in one order.
    pub unsafe fn new(
        library: Arc<Library>,
        comm: *mut c_void,
        rank: usize,
        world: usize,
        timeout: Duration,
    ) -> Result<Borrowed> {
        let comm = Comm::new(comm).ok_or(Error::NullPointer { what: "the communicator", count: world })?;
        let ask = |what, call, function: Option<CommNumber>, expected: usize| {
            let Some(function) = function else { return Ok(()) };
            let mut number: c_int = 0;
            // SAFETY: the caller vouches for the communicator; `number` is a valid place for the answer.
            library.check(call, rank, unsafe { function(comm.raw(), &mut number) })?;
            if usize::try_from(number).ok() != Some(expected) {
                let reason = format!("the communicator lent to rank {rank} has {what} {number}, not {expected}");
                return Err(Error::NcclUnavailable { reason });
            }
            Ok(())
        };
        ask("a number of ranks of", "ncclCommCount", library.functions().comm_count, world)?;
        ask("rank", "ncclCommUserRank", library.functions().comm_user_rank, rank)?;
        Ok(Borrowed { handle: Handle::new(library, rank, timeout, comm, ()) })
    }
}

// SAFETY: `all_reduce` makes NCCL's call of that name and nothing else, which enqueues just that; NCCL restores the current
// device; `Handle` has the locks that calls from several threads need.
unsafe impl AllReduce for Borrowed {
    fn version(&self) -> Version {
        self.handle.library().version()
    }

    unsafe fn all_reduce(
        &self,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: *mut c_void,
    ) -> Result<()> {
        let call = Call { input, output, count, dtype, op, stream };
        // SAFETY: the caller vouches for what the call asks for.
        Ok(unsafe { self.handle.all_reduce(&call, &Patience::until(self.handle.timeout())) }?)
    }

    fn async_error(&self) -> Result<()> {
        self.handle.async_error()
    }

    fn abort(&self) {
        self.handle.end();
    }
}
