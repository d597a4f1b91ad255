//! Calls into NCCL for one communicator: one at a time, their waits bounded, none after an abort.

use std::{
    ffi::{c_int, c_void},
    ptr::NonNull,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{Library, sys, sys::Status};
use crate::{DType, Error, ReduceOp, Result};

/// Polls without sleeping before the first sleep: longer than NCCL takes to enqueue a call.
const EAGER_POLLS: u32 = 500;
const SLEEP: Duration = Duration::from_micros(50);

/// A communicator of NCCL's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comm(NonNull<c_void>);

// SAFETY: NCCL allows calls for a communicator from any thread, one at a time, which `Handle` sees to.
unsafe impl Send for Comm {}
// SAFETY: it is a name, which only such calls make anything of.
unsafe impl Sync for Comm {}

impl Comm {
    pub(super) fn new(comm: sys::Comm) -> Option<Comm> {
        NonNull::new(comm).map(Comm)
    }

    pub(super) fn raw(self) -> sys::Comm {
        self.0.as_ptr()
    }
}

/// A communicator, with what the owner keeps beside it, and the locks around it.
///
/// There are two. `turn` is held for a whole operation, its polls included, since NCCL refuses a second operation
/// before the first is over. `open` is held for each call into NCCL, and free between polls: whoever aborts gets in
/// there. A call returns soon, but the first of its kind, for which NCCL connects the ranks; who aborts waits for one a while
/// ([`Handle::take`]).
pub(super) struct Handle<T> {
    /// What `open` has until it is taken out.
    comm: Comm,
    library: Arc<Library>,
    rank: usize,
    timeout: Duration,
    turn: Mutex<()>,
    open: Mutex<Option<(Comm, T)>>,
    ended: AtomicBool,
}

/// What there was to take out.
pub(super) enum Taken<T> {
    /// The communicator, for which nobody calls any more.
    Free(Comm, T),
    /// A call into NCCL is under way that doesn't return, and has all the rest.
    Stuck(Comm),
    /// It was taken before.
    Gone,
}

/// The arguments of an all-reduce.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) count: usize,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) stream: *mut c_void,
}

// SAFETY: addresses and a stream, of which the driver makes sense on any thread.
unsafe impl Send for Call {}

/// How long an operation is waited for.
pub(super) struct Patience<'a> {
    pub(super) timeout: Duration,
    /// Whether another rank's part has failed, without which NCCL may never be done.
    pub(super) stopped: &'a dyn Fn() -> bool,
    /// How long NCCL gets to be done from then on.
    pub(super) grace: Duration,
}

impl Patience<'_> {
    /// Until the timeout, whatever others do.
    pub(super) fn until(timeout: Duration) -> Patience<'static> {
        Patience { timeout, stopped: &|| false, grace: Duration::ZERO }
    }

    /// How it has ended by now, for an operation that was begun at `started`. `stopped` keeps since when another's part has
    /// failed.
    pub(super) fn ended(
        &self,
        call: &'static str,
        rank: usize,
        started: Instant,
        stopped: &mut Option<Instant>,
    ) -> Option<Unsettled> {
        if stopped.is_none() && (self.stopped)() {
            *stopped = Some(Instant::now());
        }
        if stopped.is_some_and(|since| since.elapsed() >= self.grace) {
            return Some(Unsettled::Stopped);
        }
        let waited = started.elapsed();
        (waited >= self.timeout).then_some(Unsettled::GivenUp(Error::NcclTimeout { rank, call, waited }))
    }
}

/// How an operation that NCCL goes on with by itself ended.
pub(super) enum Unsettled {
    /// NCCL has come to an error, or can't be asked.
    Failed(Error),
    /// It may still be at it.
    GivenUp(Error),
    /// It may still be at it, and was not waited for, since another rank's has failed.
    Stopped,
}

impl<T> Handle<T> {
    pub(super) fn new(library: Arc<Library>, rank: usize, timeout: Duration, comm: Comm, owned: T) -> Handle<T> {
        let (turn, open) = (Mutex::new(()), Mutex::new(Some((comm, owned))));
        Handle { comm, library, rank, timeout, turn, open, ended: AtomicBool::new(false) }
    }

    pub(super) fn library(&self) -> &Arc<Library> {
        &self.library
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Nobody else's operation is under way until the guard goes.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a call into NCCL, if the communicator is still there.
    pub(super) fn with<R>(&self, call: impl FnOnce(Comm, &mut T) -> R) -> Result<R> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *open {
            Some((comm, owned)) if !self.has_ended() => Ok(call(*comm, owned)),
            _ => Err(Error::Aborted { by: None }),
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Lets no call begin from now on. True the first time.
    pub(super) fn end(&self) -> bool {
        !self.ended.swap(true, Ordering::AcqRel)
    }

    /// Takes the communicator out, once the call into NCCL that is under way has returned: at most so long is waited for that.
    /// Not for calls that begin meanwhile: there are none after [`Handle::end`].
    pub(super) fn take(&self, patience: Duration) -> Taken<T> {
        let deadline = Instant::now() + patience;
        loop {
            match self.open.try_lock() {
                Ok(mut open) => return open.take().map_or(Taken::Gone, |(comm, owned)| Taken::Free(comm, owned)),
                Err(TryLockError::Poisoned(open)) => {
                    return open.into_inner().take().map_or(Taken::Gone, |(comm, owned)| Taken::Free(comm, owned));
                }
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(SLEEP),
                Err(TryLockError::WouldBlock) => return Taken::Stuck(self.comm),
            }
        }
    }

    /// What NCCL says of the communicator.
    fn state(&self) -> Result<Status> {
        self.with(|comm, _| self.state_of(comm))?
    }

    /// The same, for who has the communicator.
    fn state_of(&self, comm: Comm) -> Result<Status> {
        let mut state = sys::SUCCESS;
        // SAFETY: the communicator has not ended, since the caller has it from `open`, and `state` is a valid place for the
        // answer.
        let asked = unsafe { (self.library.functions().comm_get_async_error)(comm.raw(), &mut state) };
        self.library.check("ncclCommGetAsyncError", self.rank, asked)?;
        Ok(state)
    }

    /// Waits for the operation that `call` began and that NCCL goes on with by itself.
    pub(super) fn settle(&self, call: &'static str, patience: &Patience<'_>) -> Result<(), Unsettled> {
        let started = Instant::now();
        let mut stopped = None;
        for poll in 0.. {
            match self.state() {
                Ok(sys::IN_PROGRESS) => {}
                Ok(state) => return self.library.check(call, self.rank, state).map_err(Unsettled::Failed),
                Err(error) => return Err(Unsettled::Failed(error)),
            }
            if let Some(ended) = patience.ended(call, self.rank, started, &mut stopped) {
                return Err(ended);
            }
            if poll < EAGER_POLLS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(SLEEP);
            }
        }
        unreachable!("the timeout ends it")
    }

    /// Takes a call to its end whose first answer was `status`.
    pub(super) fn finish(&self, call: &'static str, status: Status, patience: &Patience<'_>) -> Result<(), Unsettled> {
        match status {
            sys::IN_PROGRESS => self.settle(call, patience),
            status => self.library.check(call, self.rank, status).map_err(Unsettled::Failed),
        }
    }

    /// # Safety
    ///
    /// As [`super::AllReduce::all_reduce`].
    pub(super) unsafe fn all_reduce(&self, call: &Call, patience: &Patience<'_>) -> Result<(), Unsettled> {
        let (input, output) = (call.input as *const c_void, call.output as *mut c_void);
        let (dtype, op) = (dtype_code(call.dtype), op_code(call.op));
        let _turn = self.turn();
        let status = self.with(|comm, _| {
            let all_reduce = self.library.functions().all_reduce;
            // SAFETY: the communicator has not ended, since `with` gives it. The caller vouches for the context, the
            // stream and the memory; NCCL reads the addresses as pointers of the device.
            unsafe { all_reduce(input, output, call.count, dtype, op, comm.raw(), call.stream) }
        });
        self.finish("ncclAllReduce", status.map_err(Unsettled::Failed)?, patience)
    }

    /// Asks, unless a call into NCCL is under way, which says itself how it ended: who watches over it must not wait for it.
    pub(super) fn async_error(&self) -> Result<()> {
        let open = match self.open.try_lock() {
            Ok(open) => open,
            Err(TryLockError::Poisoned(open)) => open.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let state = match &*open {
            Some((comm, _)) if !self.has_ended() => self.state_of(*comm)?,
            _ => return Err(Error::Aborted { by: None }),
        };
        match state {
            // Another thread's call, which has not failed yet.
            sys::IN_PROGRESS => Ok(()),
            state => self.library.check("ncclCommGetAsyncError", self.rank, state),
        }
    }
}

/// The error of an operation that nobody stops.
impl From<Unsettled> for Error {
    fn from(ended: Unsettled) -> Error {
        match ended {
            Unsettled::Failed(error) | Unsettled::GivenUp(error) => error,
            Unsettled::Stopped => Error::Aborted { by: None },
        }
    }
}

const fn dtype_code(dtype: DType) -> c_int {
    match dtype {
        DType::F16 => 6,
        DType::F32 => 7,
        DType::BF16 => 9,
    }
}

const fn op_code(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Average => 4,
    }
}
