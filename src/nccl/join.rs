//! What ranks do together: make their communicators, warm them up, register windows. After each stage they tell each
//! other how it went, so that all go on or none does.

use std::{
    any::Any,
    ffi::c_void,
    fmt, ptr,
    sync::{
        Arc,
        atomic::{AtomicPtr, AtomicU32, Ordering},
        mpsc::{RecvTimeoutError, SendError, sync_channel},
    },
    time::{Duration, Instant},
};

use super::{
    AllReduce, Library, Version,
    communicator::{Communicator, Owned},
    handle::{Call, Comm, Handle, Patience, Unsettled},
    library::is_not_yet_initialized,
    sys::{self, Config},
    windows::{Range, WindowHandle, Windows},
};
use crate::{
    DType, Error, ReduceOp, Result,
    meeting::{Seat, Wire},
    sealed::Sealed,
};

/// How long NCCL gets to register a window after another rank's part has failed. It may not need that rank, and then
/// all can go on without windows; if it isn't done, the communicator is lost.
const GRACE: Duration = Duration::from_millis(250);

/// How a rank joins.
pub(crate) struct Settings {
    /// The meeting's: how long a rank waits for another. NCCL gets three quarters of it, so that a rank whose part
    /// hangs gives up, and says so, before the ranks that wait for its word do.
    pub(crate) timeout: Duration,
    /// The most blocks (CTAs) that a kernel of NCCL's may have; NCCL's own choice if `None`.
    pub(crate) max_blocks: Option<u32>,
    /// Whether another rank uses this rank's device too.
    pub(crate) sharing: bool,
    /// Lives until NCCL is done with the communicator: the memory of *all* ranks' windows, for one.
    pub(crate) keep: Option<Arc<dyn Any + Send + Sync>>,
    /// Makes the context of the rank's device current on a thread of this module's.
    pub(crate) enter: Arc<dyn Fn() + Send + Sync>,
    /// Whether the ranks' group has ended meanwhile: then NCCL is not waited for any more.
    pub(crate) over: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Looks a variable of the environment up.
    pub(crate) environment: fn(&str) -> Option<String>,
}

impl Settings {
    pub(crate) fn new(timeout: Duration) -> Settings {
        let environment = |name: &str| std::env::var(name).ok();
        let (enter, over) = (Arc::new(|| ()), Arc::new(|| false));
        Settings { timeout, max_blocks: None, sharing: false, keep: None, enter, over, environment }
    }
}

/// What all ranks have come to alike.
pub(crate) type Agreed<T> = Result<T, Declined>;

/// Why the ranks do without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Declined {
    /// The rank where it was found, the first of them.
    pub(crate) rank: usize,
    /// What it was. Names the rank.
    pub(crate) reason: String,
}

impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

/// For a caller who can't do without.
impl From<Declined> for Error {
    fn from(declined: Declined) -> Error {
        Error::NcclUnavailable { reason: declined.reason }
    }
}

/// Scratch memory of the device, and a stream to reduce it on.
#[derive(Clone, Copy)]
pub(crate) struct WarmUp {
    pub(crate) scratch: u64,
    /// How many: a multiple of 4.
    pub(crate) bytes: usize,
    pub(crate) stream: *mut c_void,
}

/// What registering has come to, on all ranks alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Registered {
    /// The memory is a window.
    Window,
    /// It is none, on no rank. All-reduces work all the same.
    NoWindow(Declined),
    /// It is none, and the communicators have been aborted, since NCCL can't go on with one of them. Those of another
    /// [`join`] work without windows.
    Lost(Declined),
}

/// How a rank's part of a stage went.
#[derive(Clone, Debug)]
enum Outcome {
    Done,
    Failed(String),
    /// It was not waited for, since another's had failed.
    Stopped,
}

impl Wire for Outcome {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Outcome::Done => Some(Ok::<_, String>(())),
            Outcome::Failed(reason) => Some(Err(reason.clone())),
            Outcome::Stopped => None,
        }
        .put(out);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(match <Option<Result<(), String>> as Wire>::take(from)? {
            Some(Ok(())) => Outcome::Done,
            Some(Err(reason)) => Outcome::Failed(reason),
            None => Outcome::Stopped,
        })
    }
}

impl From<Result<(), Unsettled>> for Outcome {
    fn from(result: Result<(), Unsettled>) -> Outcome {
        match result {
            Ok(()) => Outcome::Done,
            Err(Unsettled::Failed(error) | Unsettled::GivenUp(error)) => Outcome::Failed(error.to_string()),
            Err(Unsettled::Stopped) => Outcome::Stopped,
        }
    }
}

/// What the ranks' parts come to together.
fn verdict<'a>(outcomes: impl Iterator<Item = &'a Outcome> + Clone) -> Agreed<()> {
    let failed = outcomes.clone().enumerate().find_map(|(rank, outcome)| match outcome {
        Outcome::Failed(reason) => Some(Declined { rank, reason: reason.clone() }),
        _ => None,
    });
    let stopped = || {
        let rank = outcomes.clone().position(|outcome: &Outcome| matches!(outcome, Outcome::Stopped))?;
        Some(Declined { rank, reason: format!("rank {rank} stopped waiting for NCCL") })
    };
    failed.or_else(stopped).map_or(Ok(()), Err)
}

/// A word in memory of its own, which other processes see too.
struct Word(Sealed);

impl Word {
    fn get(&self) -> &AtomicU32 {
        // SAFETY: the mapping starts at a page, is zeroed at first and lives as long as this value; nobody touches it but by
        // this, here and in other processes.
        unsafe { AtomicU32::from_ptr(self.0.base().as_ptr().cast()) }
    }
}

/// By what a rank that fails lets the others know before the stage is over: they may be waiting for it inside NCCL.
#[derive(Clone)]
pub(super) struct Lockstep {
    rank: usize,
    /// The last stage that each rank has failed in.
    failed: Arc<Vec<Word>>,
    /// The stage that this rank is in. All ranks have the same stages. No number comes twice, so that nothing need be
    /// reset.
    stage: Arc<AtomicU32>,
    over: Arc<dyn Fn() -> bool + Send + Sync>,
    timeout: Duration,
}

impl Lockstep {
    /// All ranks of the meeting together.
    fn new(seat: &mut Seat, settings: &Settings) -> Result<Lockstep> {
        const BYTES: u64 = size_of::<AtomicU32>() as u64;
        let (_, own) = Sealed::create(BYTES)?;
        let words = seat.all_gather_fds(vec![own])?.into_iter().enumerate().map(|(peer, descriptors)| {
            let [descriptor] = descriptors.as_slice() else {
                return Err(Error::PeerFailed { peer, reason: "it handed on no memory".into() });
            };
            Sealed::open(BYTES, descriptor).map(Word)
        });
        let failed = Arc::new(words.collect::<Result<_>>()?);
        let (over, timeout) = (settings.over.clone(), settings.timeout / 4 * 3);
        Ok(Lockstep { rank: seat.rank(), failed, stage: Arc::default(), over, timeout })
    }

    /// Runs this rank's part of the next stage. If another's fails, it has `grace` to be done.
    fn stage(&self, grace: Duration, part: impl FnOnce(&Patience<'_>) -> Result<(), Unsettled>) -> Outcome {
        let stage = self.stage.fetch_add(1, Ordering::Relaxed) + 1;
        let others = || self.failed.iter().enumerate().filter(|&(rank, _)| rank != self.rank);
        let stopped = || (self.over)() || others().any(|(_, failed)| failed.get().load(Ordering::Relaxed) == stage);
        let result = part(&Patience { timeout: self.timeout, stopped: &stopped, grace });
        if result.is_err() {
            self.failed[self.rank].get().store(stage, Ordering::Relaxed);
        }
        result.into()
    }
}

/// What a rank tells the others first: the version of its NCCL and where it is from, or why it can't use it.
type Hello = Result<(Version, String), String>;

/// Makes this rank's communicator, all ranks of the meeting together: all get one, or all the same reason why not.
///
/// The context of the rank's device must be current. The calls wait for the other ranks, at most for the meeting's
/// deadline at each of a few stages; nothing is enqueued on any stream.
///
/// # Errors
///
/// Those of the meeting: a rank has left, or did not come.
pub(crate) fn join(
    seat: &mut Seat,
    library: &Result<Arc<Library>>,
    settings: &Settings,
) -> Result<Agreed<Communicator>> {
    let rank = seat.rank();
    let mine = match library {
        Ok(library) => match refusal(library.version(), settings) {
            Some(reason) => Err(reason),
            None => Ok((library.version(), library.name().display().to_string())),
        },
        Err(Error::NcclUnavailable { reason }) => Err(reason.clone()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(declined) = same_library(&seat.all_gather(mine)?) {
        return Ok(Err(declined));
    }
    let library = library.as_ref().map_err(Clone::clone)?;
    let lockstep = Lockstep::new(seat, settings)?;
    for last in [false, true] {
        let (outcomes, communicator) = attempt(seat, library, settings, lockstep.clone())?;
        match (verdict(outcomes.iter()), communicator) {
            (Ok(()), Some(communicator)) => return Ok(Ok(communicator)),
            (Err(declined), communicator) => {
                if let Some(communicator) = communicator {
                    communicator.abort();
                }
                let passing =
                    |outcome: &Outcome| matches!(outcome, Outcome::Failed(text) if is_not_yet_initialized(text));
                if last || !outcomes.iter().any(passing) {
                    return Ok(Err(declined));
                }
                tracing::warn!(rank, reason = %declined, "NCCL's init failed in a way that may pass: trying once more");
            }
            (Ok(()), None) => unreachable!("a rank without a communicator has failed"),
        }
    }
    unreachable!("the last attempt returns")
}

/// The first rank that can't use NCCL, or has another than rank 0.
fn same_library(hellos: &[Hello]) -> Agreed<()> {
    let mut first = None;
    for (rank, hello) in hellos.iter().enumerate() {
        let decline = |reason: String| Err(Declined { rank, reason });
        let (version, name) = match hello {
            Ok(library) => library,
            Err(reason) => return decline(format!("rank {rank}: {reason}")),
        };
        let (expected, from) = *first.get_or_insert((version, name));
        if version != expected {
            return decline(format!(
                "rank {rank} has NCCL {version} ({name}), and rank 0 {expected} ({from}): give all ranks the same"
            ));
        }
    }
    Ok(())
}

/// Why NCCL would refuse ranks that share a device. Asked before NCCL is: it finds that out in the middle of the init,
/// and in one case by ending it on some ranks only.
fn refusal(version: Version, settings: &Settings) -> Option<String> {
    if !settings.sharing {
        return None;
    }
    let set = |name| (settings.environment)(name).map(|value| value.trim().to_owned());
    if version < Version::new(2, 30, 0) {
        return Some(format!("ranks share a device, which NCCL serves from 2.30 on, and this is {version}"));
    }
    if set("NCCL_MULTI_RANK_GPU_ENABLE").as_deref() != Some("1") {
        return Some(
            "ranks share a device, which NCCL serves only with NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment".into(),
        );
    }
    let multicast = set("NCCL_NVLS_ENABLE").filter(|value| value != "0")?;
    Some(format!(
        "ranks share a device, which NCCL does not serve with NCCL_NVLS_ENABLE={multicast}: unset it, or set 0"
    ))
}

/// Runs a call into NCCL that waits for other ranks on a thread of its own, so that it need not be waited for: if it isn't,
/// what it comes to goes to `late`.
fn apart<T: Send + 'static>(
    call: &'static str,
    rank: usize,
    enter: &Arc<dyn Fn() + Send + Sync>,
    patience: &Patience<'_>,
    run: impl FnOnce() -> T + Send + 'static,
    late: impl FnOnce(T) + Send + 'static,
) -> Result<T, Unsettled> {
    let (sender, receiver) = sync_channel(0);
    let enter = enter.clone();
    let thread = move || {
        enter();
        // It meets the receiver, or finds that it is gone.
        if let Err(SendError(result)) = sender.send(run()) {
            late(result);
        }
    };
    let failed = |error: std::io::Error| {
        Unsettled::Failed(Error::System { call: "spawning a thread for NCCL", reason: error.to_string() })
    };
    std::thread::Builder::new().name("peersum-nccl".into()).spawn(thread).map_err(failed)?;
    let started = Instant::now();
    let mut stopped = None;
    loop {
        match receiver.recv_timeout(Duration::from_millis(1)) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => {
                let reason = "the thread that called it has panicked".into();
                return Err(Unsettled::Failed(Error::System { call, reason }));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(ended) = patience.ended(call, rank, started, &mut stopped) {
            return Err(ended);
        }
    }
}

/// One try of all ranks. The communicator may be there although the init has failed.
fn attempt(
    seat: &mut Seat,
    library: &Arc<Library>,
    settings: &Settings,
    lockstep: Lockstep,
) -> Result<(Vec<Outcome>, Option<Communicator>)> {
    let (rank, world) = (seat.rank(), seat.world());
    let id = (rank == 0).then(|| library.unique_id(rank).map_err(|error| error.to_string()));
    let id = match seat.all_gather(id)?.into_iter().flatten().next() {
        Some(Ok(id)) => id,
        Some(Err(reason)) => return Ok((vec![Outcome::Failed(reason)], None)),
        None => return Err(Error::PeerFailed { peer: 0, reason: "it shared no id of NCCL's".into() }),
    };

    let place = Arc::new(AtomicPtr::new(ptr::null_mut()));
    let mut handle = None;
    let outcome = lockstep.stage(Duration::ZERO, |patience| {
        let init = {
            let (library, place, max_blocks) = (library.clone(), place.clone(), settings.max_blocks);
            move || {
                let mut config = Config::new(max_blocks);
                // SAFETY: the place lives until NCCL has ended the communicator, or has refused to make one; NCCL copies the
                // configuration. A rank and a number of ranks fit, since the meeting has so many.
                unsafe {
                    let init = library.functions().comm_init_rank_config;
                    init(place.as_ptr(), world as i32, id, rank as i32, &mut config)
                }
            }
        };
        // Nobody may touch a communicator while its init is under way: one that isn't waited for any more is ended by the
        // thread that makes it, if ever it is made.
        let abort = {
            let (library, place) = (library.clone(), place.clone());
            move |_| {
                if let Some(comm) = Comm::new(place.load(Ordering::Acquire)) {
                    // SAFETY: its init has returned, and nobody else has the communicator.
                    unsafe { (library.functions().comm_abort)(comm.raw()) };
                }
            }
        };
        let status = apart("ncclCommInitRankConfig", rank, &settings.enter, patience, init, abort)?;
        let Some(comm) = Comm::new(place.load(Ordering::Acquire)) else {
            let status =
                if status == sys::SUCCESS || status == sys::IN_PROGRESS { sys::INTERNAL_ERROR } else { status };
            return library.check("ncclCommInitRankConfig", rank, status).map_err(Unsettled::Failed);
        };
        let owned = Owned { _place: place, ready: false, windows: Windows::default(), _keep: settings.keep.clone() };
        let handle = handle.insert(Arc::new(Handle::new(library.clone(), rank, settings.timeout, comm, owned)));
        // Also if it says that it is done: NCCL tells of an error that it has found meanwhile.
        let status = if status == sys::SUCCESS { sys::IN_PROGRESS } else { status };
        handle.finish("ncclCommInitRankConfig", status, patience)?;
        handle.with(|_, owned| owned.ready = true).map_err(Unsettled::Failed)
    });
    let communicator = handle.map(|handle| Communicator { handle, lockstep, enter: settings.enter.clone() });
    // If the meeting is over, the communicator is destroyed or aborted as it goes.
    Ok((seat.all_gather(outcome)?, communicator))
}

impl Communicator {
    /// Reduces scratch memory as f32, all ranks together: NCCL connects the ranks at the first call only, and
    /// registers windows only after that. If it fails on any rank, all are aborted.
    ///
    /// Returns when the call is enqueued. Not while the stream is being captured.
    ///
    /// # Safety
    ///
    /// As [`AllReduce::all_reduce`], for the scratch memory and the stream.
    pub(crate) unsafe fn warm_up(&self, seat: &mut Seat, warm: WarmUp) -> Result<Agreed<()>> {
        let WarmUp { scratch, bytes, stream } = warm;
        let call =
            Call { input: scratch, output: scratch, count: bytes / 4, dtype: DType::F32, op: ReduceOp::Sum, stream };
        let outcome = self.lockstep.stage(Duration::ZERO, |patience| {
            let handle = self.handle.clone();
            // SAFETY: the caller vouches for the memory and the stream.
            let reduce = move || unsafe { handle.all_reduce(&call, &Patience::until(handle.timeout())) };
            apart("ncclAllReduce", self.handle.rank(), &self.enter, patience, reduce, drop)?
        });
        let agreed = verdict(seat.all_gather(outcome)?.iter());
        if agreed.is_err() {
            self.abort();
        }
        Ok(agreed)
    }

    /// Makes `bytes` from `address` on a window of symmetric memory, all ranks together, after
    /// [`Communicator::warm_up`]: NCCL refuses windows that are the first thing a communicator is asked for.
    /// All-reduces whose tensors lie in it, at the same offsets on all ranks, are then faster.
    ///
    /// If NCCL refuses it on any rank, all do without, after one more try behind one more warm-up. A range that is
    /// registered already costs the ranks a meeting, and is then registered as often more.
    ///
    /// # Errors
    ///
    /// [`Error::NcclRegistration`] on all ranks if one's range overlaps another of its ranges, is not aligned to 4096
    /// bytes, or is as long as no other rank's: nothing has changed then. And those of the meeting.
    ///
    /// # Safety
    ///
    /// * The memory was made by `cuMemCreate` with handles that NCCL can export, on the rank's device, and stays mapped
    ///   until it is deregistered, or the communicator has ended: [`Settings::keep`] can see to that.
    /// * With versions before 2.29.7, the communicator is dropped only after the work with windows has ended, and no
    ///   graph with such work is launched any more.
    /// * For the scratch memory and the stream, as [`Communicator::warm_up`].
    pub(crate) unsafe fn register(
        &self,
        seat: &mut Seat,
        address: u64,
        bytes: usize,
        warm: WarmUp,
    ) -> Result<Registered> {
        let rank = self.handle.rank();
        let range = self.handle.with(|_, owned| owned.windows.classify(address, bytes));
        let ranges = seat.all_gather((range.map_err(|error| error.to_string()), bytes))?;
        let mut first = None;
        for (peer, (range, bytes)) in ranges.into_iter().enumerate() {
            let wrong = |reason: String| Err(Error::NcclRegistration { rank: peer, reason });
            let range = match range {
                Err(reason) | Ok(Range::Wrong(reason)) => return wrong(reason),
                Ok(range) => range,
            };
            let expected = first.get_or_insert((range.clone(), bytes));
            if *expected != (range, bytes) {
                return wrong(format!(
                    "it has {bytes} bytes, and rank 0 {}, or only one of them was registered",
                    expected.1
                ));
            }
        }
        if first.is_some_and(|(range, _)| range == Range::Again) {
            self.handle.with(|_, owned| owned.windows.use_again(address, bytes))?;
            return Ok(Registered::Window);
        }
        if !self.handle.library().has_windows() {
            let version = self.handle.library().version();
            let reason = format!("NCCL {version} has no windows: they came with 2.27");
            return Ok(Registered::NoWindow(Declined { rank: 0, reason }));
        }

        for last in [false, true] {
            let outcome = self.lockstep.stage(GRACE, |patience| {
                let handle = self.handle.clone();
                let register = move || register_once(&handle, address, bytes);
                apart("ncclCommWindowRegister", rank, &self.enter, patience, register, drop)?
            });
            let here = matches!(outcome, Outcome::Done);
            let usable = !matches!(outcome, Outcome::Stopped) && self.handle.async_error().is_ok();
            let outcomes = seat.all_gather((outcome, usable))?;
            let Err(declined) = verdict(outcomes.iter().map(|(outcome, _)| outcome)) else {
                return Ok(Registered::Window);
            };
            if outcomes.iter().any(|&(_, usable)| !usable) {
                self.abort();
                return Ok(Registered::Lost(declined));
            }
            if here {
                self.deregister(address, bytes)?;
            }
            if last {
                tracing::info!(rank, reason = %declined, "NCCL registers no window: all-reduces do without");
                return Ok(Registered::NoWindow(declined));
            }
            // SAFETY: the caller vouches for the memory and the stream.
            if let Err(declined) = unsafe { self.warm_up(seat, warm) }? {
                return Ok(Registered::Lost(declined));
            }
        }
        unreachable!("the last try returns")
    }

    /// Takes one [`Communicator::register`] back. The last of a range ends the window; this rank's alone, and at once,
    /// so that all ranks do it is for the caller to see to.
    ///
    /// # Errors
    ///
    /// [`Error::NcclRegistration`] if the range is not registered, [`Error::Nccl`] if NCCL can't.
    pub(crate) fn deregister(&self, address: u64, bytes: usize) -> Result<()> {
        const CALL: &str = "ncclCommWindowDeregister";
        let rank = self.handle.rank();
        let _turn = self.handle.turn();
        let status = self.handle.with(|comm, owned| -> Result<sys::Status> {
            let released = owned.windows.release(address, bytes);
            let handle = released.map_err(|reason| Error::NcclRegistration { rank, reason })?;
            let Some((WindowHandle(window), (_, deregister))) = handle.zip(self.handle.library().functions().windows)
            else {
                return Ok(sys::SUCCESS);
            };
            // SAFETY: the communicator has not ended, since `with` gives it, and the window was registered with it and
            // is forgotten now. That nothing uses the window is for the caller, as for whoever frees memory.
            Ok(unsafe { deregister(comm.raw(), window) })
        })??;
        Ok(self.handle.finish(CALL, status, &Patience::until(self.handle.timeout()))?)
    }
}

fn register_once(handle: &Handle<Owned>, address: u64, bytes: usize) -> Result<(), Unsettled> {
    const CALL: &str = "ncclCommWindowRegister";
    let Some((register, _)) = handle.library().functions().windows else {
        return Err(Unsettled::Failed(Error::NcclUnavailable { reason: format!("there is no {CALL}") }));
    };
    let _turn = handle.turn();
    let status = handle.with(|comm, owned| {
        let place = owned.windows.place(address, bytes);
        // SAFETY: the communicator has not ended, since `with` gives it. The place lives as long as the
        // communicator, or until NCCL is done with it. The caller of `register` vouches for the memory.
        unsafe { register(comm.raw(), address as *mut c_void, bytes, place, sys::WINDOW_SYMMETRIC) }
    });
    let result = handle.finish(CALL, status.map_err(Unsettled::Failed)?, &Patience::until(handle.timeout()));
    handle
        .with(|_, owned| match &result {
            Ok(()) if owned.windows.register_last() => result,
            // NCCL says so of communicators whose ranks can't map each other's memory.
            Ok(()) => {
                owned.windows.forget_last();
                let reason = "NCCL has no windows of symmetric memory on these devices".into();
                let error = Error::NcclRegistration { rank: handle.rank(), reason };
                Err(Unsettled::Failed(error))
            }
            Err(Unsettled::Failed(_)) => {
                owned.windows.forget_last();
                result
            }
            // NCCL may still store a handle.
            Err(Unsettled::GivenUp(_) | Unsettled::Stopped) => result,
        })
        .unwrap_or_else(|error| Err(Unsettled::Failed(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Field case A56 (NVIDIA/nccl#1716): several ranks on one device.
    #[test]
    fn ranks_that_share_a_device_are_refused_before_nccl_is_asked() {
        let refused = |version: &str, environment| {
            let settings = Settings { sharing: true, environment, ..Settings::new(Duration::ZERO) };
            refusal(version.parse().unwrap(), &settings)
        };
        let enabled = |name: &str| (name == "NCCL_MULTI_RANK_GPU_ENABLE").then(|| "1".into());
        let multicast = |name: &str| Some(if name == "NCCL_NVLS_ENABLE" { "2" } else { "1" }.into());
        let without_multicast = |name: &str| Some(if name == "NCCL_NVLS_ENABLE" { "0" } else { "1" }.into());
        assert_eq!(refused("2.30.0", enabled), None);
        assert_eq!(refused("2.32.3", without_multicast), None);
        assert!(refused("2.29.7", enabled).unwrap().contains("from 2.30 on, and this is 2.29.7"));
        assert!(refused("2.32.3", |_| None).unwrap().contains("NCCL_MULTI_RANK_GPU_ENABLE=1"));
        assert!(refused("2.32.3", |_| Some("0".into())).unwrap().contains("NCCL_MULTI_RANK_GPU_ENABLE=1"));
        assert!(refused("2.32.3", multicast).unwrap().contains("NCCL_NVLS_ENABLE=2"));
        assert_eq!(refusal("2.18".parse().unwrap(), &Settings::new(Duration::ZERO)), None);
    }
}
