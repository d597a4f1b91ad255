//! A rank's own communicator: its calls, and its end.

use std::{
    any::Any,
    ffi::{c_int, c_void},
    mem,
    sync::{
        Arc, Condvar, Mutex, Once, PoisonError,
        atomic::AtomicPtr,
        mpsc::{Receiver, channel},
    },
    time::Duration,
};

use super::{
    AllReduce, Library, Version,
    handle::{Call, Handle, Patience, Taken},
    join::Lockstep,
    windows::Windows,
};
use crate::{DType, ReduceOp, Result};

/// How long dropping waits for NCCL to be done, which takes some ten milliseconds where it waits for nobody.
const PATIENCE_WITH_END: Duration = Duration::from_millis(500);

/// How long an end waits for a call into NCCL that is under way.
const PATIENCE_WITH_CALLS: Duration = Duration::from_secs(1);

/// One rank's communicator of NCCL's, made by [`join`](super::join::join).
///
/// # Its end
///
/// NCCL's own end of a communicator waits: for the work on the device, and for captured graphs that hold some, however
/// long they live. It may also wait for the other ranks, since the last rank of a process to come frees what all have.
/// So a thread of its own runs it, and owns what NCCL may still use: the places that NCCL stores handles in, and the
/// memory that the caller asked to be kept. Dropping waits for it a moment, [`AllReduce::abort`] not at all. Neither
/// speaks to other ranks, which may be gone.
///
/// A call may be inside NCCL when another thread aborts: the first of its kind, which waits for all ranks' hosts. It gets a
/// moment to return, since the end frees what it uses. If it doesn't, it is waiting for a rank that won't come, and what ends its
/// wait is the abort; so that comes then, as those who watch over NCCL have it who can't ask the waiting thread.
///
/// Windows are freed with it. From 2.29.7 on NCCL does that itself, once nothing uses them any more. Before, they must
/// be deregistered first, when the communicator is destroyed; but not when it is aborted, since kernels may be using
/// them until NCCL has stopped them, and then the communicator has gone. So those few mappings stay.
pub(crate) struct Communicator {
    pub(super) handle: Arc<Handle<Owned>>,
    pub(super) lockstep: Lockstep,
    /// Makes the context of the rank's device current on a thread of this module's.
    pub(super) enter: Arc<dyn Fn() + Send + Sync>,
}

/// What must live as long as NCCL may use it.
pub(super) struct Owned {
    /// Where NCCL stores the communicator: when the call returns, and again by a thread of its own when the init is
    /// done.
    pub(super) _place: Arc<AtomicPtr<c_void>>,
    /// Its init is over, and has succeeded: it may be destroyed, otherwise only aborted.
    pub(super) ready: bool,
    pub(super) windows: Windows,
    pub(super) _keep: Option<Arc<dyn Any + Send + Sync>>,
}

/// The ends that are under way. A process that ends in the middle of one takes NCCL's and CUDA's own memory from under it.
static ENDS: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());
/// How long they are waited for: a graph that was never destroyed may keep one for ever.
const PATIENCE_WITH_ENDS: Duration = Duration::from_secs(3);

/// Waits for the ends that are under way. They free memory, which waits for the device's kernels and meanwhile keeps other
/// threads from launching theirs: those of the ranks that the kernels wait for, perhaps.
pub(crate) fn wait_for_ends() {
    let (count, changed) = &ENDS;
    let count = count.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = changed.wait_timeout_while(count, PATIENCE_WITH_ENDS, |count| *count > 0);
}

/// One of them, until it is dropped.
struct End;

impl End {
    fn begin() -> End {
        unsafe extern "C" {
            fn atexit(function: extern "C" fn()) -> c_int;
        }
        extern "C" fn at_exit() {
            wait_for_ends();
        }
        static ASKED: Once = Once::new();
        // SAFETY: the function is C's, and what it is given stays in this program. It was asked for behind whatever NCCL and
        // CUDA asked for when they were loaded, and so is called before.
        ASKED.call_once(|| unsafe {
            atexit(at_exit);
        });
        *ENDS.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        End
    }
}

impl Drop for End {
    fn drop(&mut self) {
        *ENDS.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ENDS.1.notify_all();
    }
}

impl Communicator {
    /// Ends the communicator, by a thread of its own, which the receiver hears of.
    fn close(&self, abort: bool) -> Receiver<()> {
        let (done, closed) = channel();
        let handle = self.handle.clone();
        let end = End::begin();
        let close = move || {
            let library = handle.library();
            let functions = library.functions();
            match handle.take(PATIENCE_WITH_CALLS) {
                Taken::Gone => {}
                Taken::Stuck(comm) => {
                    // SAFETY: the communicator is there: nobody has ended it, since who does takes it out, or comes here, and
                    // `end` lets only one do so. The call that is under way looks at its abort flag, and leaves.
                    let status = unsafe { (functions.comm_abort)(comm.raw()) };
                    warn_of(library, "ncclCommAbort", handle.rank(), status);
                    // Should that call still use what is kept for it.
                    mem::forget(handle.clone());
                }
                Taken::Free(comm, mut owned) => {
                    let abort = abort || !owned.ready;
                    if let Some((_, deregister)) = functions.windows.filter(|_| !abort && !library.frees_windows()) {
                        for window in owned.windows.take_all() {
                            // SAFETY: the window is registered, and the communicator there until it is destroyed below.
                            // That nothing uses the window is what `register` asks of its caller. It is no collective.
                            let status = unsafe { deregister(comm.raw(), window.0) };
                            warn_of(library, "ncclCommWindowDeregister", handle.rank(), status);
                        }
                    }
                    let (call, last) = match abort {
                        true => ("ncclCommAbort", functions.comm_abort),
                        false => ("ncclCommDestroy", functions.comm_destroy),
                    };
                    // SAFETY: this thread has taken the communicator out, so that nobody else calls for it, now or later.
                    let status = unsafe { last(comm.raw()) };
                    warn_of(library, call, handle.rank(), status);
                    drop(owned);
                }
            }
            drop(handle);
            drop(end);
            // Nobody may be waiting.
            let _ = done.send(());
        };
        if let Err(error) = std::thread::Builder::new().name("peersum-nccl".into()).spawn(close) {
            tracing::warn!(rank = self.handle.rank(), %error, "no thread to end NCCL's communicator: it stays");
            // With all that NCCL may still use.
            mem::forget(self.handle.clone());
        }
        closed
    }
}

fn warn_of(library: &Library, call: &'static str, rank: usize, status: super::sys::Status) {
    // A process that ends has taken CUDA down before, and nothing depends on it: so it is worth no more than a word.
    if let Err(error) = library.check(call, rank, status) {
        tracing::warn!(%error, "the end of NCCL's communicator");
    }
}

// SAFETY: `all_reduce` makes NCCL's call of that name and nothing else, which enqueues just that; NCCL restores the
// current device; `Handle` has the locks that calls from several threads need.
unsafe impl AllReduce for Communicator {
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
        if self.handle.end() {
            drop(self.close(true));
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // An abort has seen to it already.
        if self.handle.end() {
            // It may be longer, and then it goes on alone.
            let _ = self.close(false).recv_timeout(PATIENCE_WITH_END);
        }
    }
}
