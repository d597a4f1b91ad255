//! NCCL beside a rank: what calls are handed over to, and the thread that ends its waits.
//!
//! A kernel of NCCL waits for its peers for ever. Before each there is a gate, which all ranks pass or none, so no rank waits in
//! NCCL for one that isn't in the same call. What is left: the group ends while NCCL's kernels wait (a host aborts it, a rank's
//! call fails behind the gate), or NCCL itself finds an error. A thread of each rank looks out for both, since the rank's own
//! may be waiting for its stream: it aborts NCCL's communicator, whose kernels then leave.

use std::{
    io,
    ops::Range,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    driver::Device,
    group::{Ending, Group},
    memory::{Scratch, Stream},
};
use crate::{
    Algorithm, Error, Nccl, Options, Result,
    crossover::Source,
    meeting,
    nccl::{self, AllReduce, Library, Registered, Settings, WarmUp, join},
};

/// Device memory that NCCL's first calls get, if there is as much: as long as messages for which it still changes its ways.
const MOST_SCRATCH_BYTES: usize = 256 << 20;
/// What windows of NCCL's start and end at multiples of.
pub(crate) const WINDOW_BYTES: u64 = 4096;
/// How often the thread looks.
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// Blocks of NCCL's kernels on a device that ranks share, of all of them together: they too must be resident together, beside
/// the gates and what waits for a gate.
const SHARED_BLOCKS: u32 = 64;
/// And the most of one rank.
const MOST_SHARED_BLOCKS: u32 = 16;

/// A rank's communicator of NCCL. The last of its group's communicators and graphs lets it go.
pub(crate) struct Handover {
    nccl: Arc<dyn AllReduce>,
    /// Whether symmetric memory is a window of NCCL's, or why not.
    window: std::result::Result<(), String>,
    over: Arc<Over>,
    /// The thread.
    watch: Option<JoinHandle<()>>,
}

/// NCCL, or why calls can't be handed over to it: the same on every rank.
pub(crate) type Joined = std::result::Result<Arc<Handover>, String>;

/// A rank that joins NCCL.
pub(crate) struct Seat<'a> {
    pub(crate) meeting: &'a mut meeting::Seat,
    pub(crate) device: &'a Arc<Device>,
    /// How many ranks its device has.
    pub(crate) sharing: u32,
    pub(crate) group: &'a Arc<Group>,
    /// Its symmetric memory.
    pub(crate) heap: Range<u64>,
}

#[derive(Default)]
struct Over {
    is: Mutex<bool>,
    changed: Condvar,
}

impl Over {
    /// Whether it is over, within the time between two looks.
    fn within_a_look(&self) -> bool {
        let is = self.is.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(is, BETWEEN_LOOKS, |is| !*is);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Why a group does without NCCL, if it is to. Every rank has the same options and the same source.
pub(crate) fn unwanted(options: &Options, source: &Source) -> Option<String> {
    if options.algorithm == Some(Algorithm::Nccl) {
        return None;
    }
    match options.nccl {
        Nccl::Off => Some("the group was made without it (Options::nccl)".into()),
        Nccl::IfThere | Nccl::Required => None,
        Nccl::Tabled if options.deterministic => Some("a deterministic group does not hand over to it".into()),
        Nccl::Tabled => match source {
            Source::Priors(_) => Some("nothing was measured, and priors never hand over to it".into()),
            Source::Table(tuned) if !tuned.entry().hands_over() => Some("the table hands no calls over to it".into()),
            Source::Table(tuned) => tuned.without_nccl().map(str::to_owned),
        },
    }
}

/// Whether a group that wants NCCL can't be without.
fn required(options: &Options) -> bool {
    options.nccl == Nccl::Required || options.algorithm == Some(Algorithm::Nccl)
}

impl Handover {
    /// Joins NCCL, all ranks together, or takes what the caller lends.
    ///
    /// # Errors
    /// Those of the meeting; and where NCCL is required, [`Error::NcclUnavailable`].
    pub(crate) fn join(
        mut seat: Seat<'_>,
        options: &Options,
        library: &Result<Arc<Library>>,
        lent: Option<Arc<dyn AllReduce>>,
    ) -> Result<Joined> {
        let ending = seat.group.ending.clone();
        if let Some(nccl) = lent {
            let window = Err("the communicator is the caller's".into());
            return Ok(Ok(Arc::new(Handover::new(nccl, window, ending)?)));
        }
        let joined = seat.make(options, library)?;
        match joined {
            Ok((nccl, window)) => Ok(Ok(Arc::new(Handover::new(nccl, window, ending)?))),
            Err(reason) if required(options) => Err(Error::NcclUnavailable { reason }),
            Err(reason) => {
                tracing::warn!(rank = seat.meeting.rank(), reason, "NCCL can't be joined: the group goes on without");
                Ok(Err(reason))
            }
        }
    }

    /// Looks after `nccl` from now on.
    fn new(nccl: Arc<dyn AllReduce>, window: std::result::Result<(), String>, ending: Arc<Ending>) -> Result<Handover> {
        let over = Arc::new(Over::default());
        let mut handover = Handover { nccl: nccl.clone(), window, over: over.clone(), watch: None };
        let watch = move || {
            while !over.within_a_look() {
                if let Err(error) = nccl.async_error() {
                    ending.fail(error);
                }
                if ending.has_come() {
                    nccl.abort();
                    return;
                }
            }
        };
        let spawned = thread::Builder::new().name("peersum-nccl".into()).spawn(watch);
        let failed = |error: io::Error| Error::System { call: "spawning NCCL's thread", reason: error.to_string() };
        handover.watch = Some(spawned.map_err(failed)?);
        Ok(handover)
    }

    pub(crate) fn nccl(&self) -> &dyn AllReduce {
        &*self.nccl
    }

    pub(crate) fn window(&self) -> std::result::Result<(), &str> {
        self.window.as_ref().copied().map_err(String::as_str)
    }
}

/// A communicator, and whether it has a window.
type Made = (Arc<dyn AllReduce>, std::result::Result<(), String>);

impl Seat<'_> {
    /// Makes the rank's communicator, warms it up, and registers the symmetric memory; or why not, the same on every rank.
    fn make(&mut self, options: &Options, library: &Result<Arc<Library>>) -> Result<std::result::Result<Made, String>> {
        let _entered = self.device.enter()?;
        let scratch = Scratch::new(self.device.clone(), MOST_SCRATCH_BYTES)?;
        let stream = Stream::new(self.device.clone())?;
        let warm = WarmUp { scratch: scratch.address(), bytes: 4, stream: stream.handle().cast() };
        let shared = (SHARED_BLOCKS / self.sharing).clamp(1, MOST_SHARED_BLOCKS);
        let mut settings = Settings::new(options.timeout);
        settings.max_blocks = (self.sharing > 1).then_some(shared);
        settings.sharing = self.sharing > 1;
        settings.keep = Some(self.group.clone());
        let ending = self.group.ending.clone();
        settings.over = Arc::new(move || ending.has_come());
        let device = self.device.clone();
        settings.enter = Arc::new(move || device.make_current());
        let mut lost = String::new();
        for last in [false, true] {
            let communicator = match join(self.meeting, library, &settings)? {
                Ok(communicator) => communicator,
                Err(declined) => return Ok(Err(declined.reason)),
            };
            if let Err(reason) = self.warm_up(&communicator, warm, scratch.bytes(), &stream, options)? {
                return Ok(Err(reason));
            }
            let bytes = (self.heap.end - self.heap.start).next_multiple_of(WINDOW_BYTES);
            let window = if bytes == 0 {
                Err("the group has no symmetric memory (Options::symmetric_bytes)".into())
            } else if last {
                Err(std::mem::take(&mut lost))
            } else {
                // SAFETY: the heap lies in a segment, which was made so and lives as long as the group, which the communicator
                // keeps. It starts and ends at whole pages.
                match unsafe { communicator.register(self.meeting, self.heap.start, bytes as usize, warm) }? {
                    Registered::Window => Ok(()),
                    Registered::NoWindow(declined) => Err(declined.reason),
                    Registered::Lost(declined) => {
                        tracing::warn!(reason = %declined, "NCCL lost a communicator over a window: joining again");
                        lost = declined.reason;
                        continue;
                    }
                }
            };
            if window.is_ok() {
                let heap = WarmUp { scratch: self.heap.start, ..warm };
                if let Err(reason) = self.warm_up(&communicator, heap, bytes as usize, &stream, options)? {
                    return Ok(Err(reason));
                }
            }
            return Ok(Ok((Arc::new(communicator), window)));
        }
        unreachable!("the last attempt registers nothing that could be lost")
    }

    /// Reduces messages of every kind within this memory of zeros, up to `most` bytes. NCCL connects the ranks for an algorithm
    /// at its first call, by allocations that may wait for what runs on the device: for kernels that wait for ranks whose
    /// hosts are in that same call. So the first calls are made now, each when nothing of the last runs any more.
    fn warm_up(
        &mut self,
        communicator: &nccl::Communicator,
        warm: WarmUp,
        most: usize,
        stream: &Stream,
        options: &Options,
    ) -> Result<std::result::Result<(), String>> {
        let most = self.meeting.all_gather(most)?.into_iter().min().unwrap_or(0);
        for bytes in
            (2..).map(|power| 1usize << (3 * power - 4)).take_while(|&bytes| bytes <= most).chain([most / 4 * 4])
        {
            let warm = WarmUp { bytes, ..warm };
            // SAFETY: the context is current. The memory is the rank's own and has so many bytes, and the stream is waited for
            // here, or by the end of the memory.
            if let Err(declined) = unsafe { communicator.warm_up(self.meeting, warm) }? {
                return Ok(Err(declined.reason));
            }
            let finished = self.meeting.all_gather(stream.finish(Instant::now() + options.timeout))?;
            if let Some(rank) = finished.iter().position(|finished| !finished) {
                communicator.abort();
                return Ok(Err(format!("NCCL's first all-reduce of {bytes} B did not come to its end on rank {rank}")));
            }
        }
        Ok(Ok(()))
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        *self.over.is.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.over.changed.notify_all();
        // It leaves at once, and must have left: else NCCL's communicator would go by its hand, perhaps as the process ends.
        if let Some(watch) = self.watch.take() {
            let _ = watch.join();
        }
    }
}
