//! NCCL beside a rank: what calls are handed over to, and the thread that ends its waits.
//!
//! A kernel of NCCL waits for its peers for ever. Before each there is a gate, which all ranks pass or none, so no rank waits in
//! NCCL for one that isn't in the same call. What is left: the group ends while NCCL's kernels wait (a host aborts it, a rank's
//! call fails behind the gate), or NCCL itself finds an error. A thread of each rank looks out for both, since the rank's own
//! may be waiting for its stream: it aborts NCCL's communicator, whose kernels then leave.

use std::{
    ops::Range,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    driver::Device,
    group::{Ending, Group},
    memory::{Scratch, Stream},
};
use crate::{
    Algorithm, Error, Nccl, Options, Result,
    crossover::{NcclFrom, Source},
    meeting::Local,
    nccl::{AllReduce, Library, Registered, Settings, WarmUp, join},
};

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
}

/// NCCL, or why calls can't be handed over to it: the same on every rank.
pub(crate) type Joined = std::result::Result<Arc<Handover>, String>;

/// A rank that joins NCCL.
pub(crate) struct Seat<'a> {
    pub(crate) meeting: &'a mut Local,
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
            Source::Table(tuned)
                if !tuned.entry().curves.iter().any(|curve| matches!(curve.nccl_from, NcclFrom::Bytes(_))) =>
            {
                Some("the table hands no calls over to it".into())
            }
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
        let handover = Handover { nccl: nccl.clone(), window, over: over.clone() };
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
        thread::Builder::new()
            .name("peersum-nccl".into())
            .spawn(watch)
            .map_err(|error| Error::System { call: "spawning the thread beside NCCL", reason: error.to_string() })?;
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
        let scratch = Scratch::new(self.device.clone())?;
        let stream = Stream::new(self.device.clone())?;
        let warm = WarmUp { scratch: scratch.address(), stream: stream.handle().cast() };
        let shared = (SHARED_BLOCKS / self.sharing).clamp(1, MOST_SHARED_BLOCKS);
        let mut settings = Settings::new(options.timeout);
        settings.max_blocks = (self.sharing > 1).then_some(shared);
        settings.sharing = self.sharing > 1;
        settings.keep = Some(self.group.clone());
        let device = self.device.clone();
        settings.enter = Arc::new(move || device.make_current());
        let mut lost = String::new();
        for last in [false, true] {
            let communicator = match join(self.meeting, library, &settings)? {
                Ok(communicator) => communicator,
                Err(declined) => return Ok(Err(declined.reason)),
            };
            // SAFETY: the context is current, and both are the rank's own until the stream has been waited for, below, or by
            // the end of the scratch memory.
            if let Err(declined) = unsafe { communicator.warm_up(self.meeting, warm) }? {
                return Ok(Err(declined.reason));
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
            let finished = stream.finish(Instant::now() + options.timeout);
            let finished = self.meeting.all_gather(finished)?;
            if let Some(rank) = finished.iter().position(|finished| !finished) {
                communicator.abort();
                return Ok(Err(format!("NCCL's first all-reduce did not come to its end on rank {rank}")));
            }
            return Ok(Ok((Arc::new(communicator), window)));
        }
        unreachable!("the last attempt registers nothing that could be lost")
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        // The thread isn't waited for: it holds nothing but NCCL's communicator, and leaves at once.
        *self.over.is.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.over.changed.notify_all();
    }
}
