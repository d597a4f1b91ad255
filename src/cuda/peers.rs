//! What the ranks of a group hand each other when they join, and how a rank learns that the process of another is gone.
//!
//! Among threads of a process it is the values themselves. Among processes it is descriptors of memory, which each maps for its
//! own device, and the identities of devices, whose ordinals differ from process to process.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    driver::{Device, uuid_text},
    group::Ending,
    memory::{Record, Segment},
};
use crate::{
    Error, Result,
    meeting::{Life, Lifelines, Seat},
};

/// The devices of all ranks, as this process has them.
pub(crate) fn devices(seat: &mut Seat, own: &Arc<Device>) -> Result<Vec<Arc<Device>>> {
    if let Seat::Threads(local) = seat {
        return local.all_gather(own.clone());
    }
    let uuid = own.uuid()?;
    let uuids = seat.all_gather(uuid)?;
    let found = uuids.into_iter().enumerate().map(|(rank, theirs)| match theirs == uuid {
        true => Ok(own.clone()),
        false => Device::of_uuid(theirs)?.ok_or_else(|| Error::HiddenDevice { rank, uuid: uuid_text(theirs) }),
    });
    found.collect()
}

/// The segments of all ranks, mapped for this rank's device at least, or why one can't be.
pub(crate) fn segments(
    seat: &mut Seat,
    own: Segment,
    device: &Arc<Device>,
    patience: Duration,
) -> Result<Vec<Result<Arc<Segment>>>> {
    if let Seat::Threads(local) = seat {
        return Ok(local.all_gather(Arc::new(own))?.into_iter().map(Ok).collect());
    }
    let rank = seat.rank();
    let lengths = seat.all_gather(own.bytes())?;
    let descriptors = seat.all_gather_fds(vec![own.export()?])?;
    let mut own = Some(own);
    let segments = lengths.into_iter().zip(descriptors).enumerate().map(|(peer, (bytes, descriptors))| {
        if peer == rank {
            return Ok(Arc::new(own.take().expect("this rank is one of them, once")));
        }
        let [descriptor] = descriptors.as_slice() else { return Err(handed_nothing(peer)) };
        Segment::import(descriptor, bytes, device.clone(), patience).map(Arc::new)
    });
    Ok(segments.collect())
}

/// The records of all ranks.
pub(crate) fn records(seat: &mut Seat, device: &Arc<Device>, patience: Duration) -> Result<Vec<Arc<Record>>> {
    if let Seat::Threads(local) = seat {
        return local.all_gather(Arc::new(Record::new(device.clone(), patience)?));
    }
    let rank = seat.rank();
    let (own, descriptor) = Record::shared(device.clone(), patience)?;
    let mut own = Some(own);
    let descriptors = seat.all_gather_fds(vec![descriptor])?;
    let records = descriptors.into_iter().enumerate().map(|(peer, descriptors)| {
        if peer == rank {
            return Ok(Arc::new(own.take().expect("this rank is one of them, once")));
        }
        let [descriptor] = descriptors.as_slice() else { return Err(handed_nothing(peer)) };
        Record::open(descriptor).map(Arc::new)
    });
    records.collect()
}

fn handed_nothing(peer: usize) -> Error {
    Error::PeerFailed { peer, reason: "it handed on no memory".into() }
}

/// Looks after the other ranks' processes, if they are some, until it is dropped; then it tells them that this rank leaves.
///
/// A kernel can't see that a process is gone, and would wait until its deadline. So a thread asks the system, and ends the
/// group. A rank that has left in order can't be waited for in later calls; but what it took part in before is whole.
pub(crate) struct Vigil {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// Dropped behind the thread.
    _lifelines: Arc<Lifelines>,
}

/// How long the thread sleeps at most, and so the end of a group.
const NAP: Duration = Duration::from_millis(20);

impl Vigil {
    /// `None` among threads.
    pub(crate) fn keep(seat: &mut Seat, ending: &Arc<Ending>) -> Result<Option<Vigil>> {
        if matches!(seat, Seat::Threads(_)) {
            return Ok(None);
        }
        let rank = seat.rank();
        let lifelines = Arc::new(Lifelines::hand_round(seat)?);
        let over = Arc::new(AtomicBool::new(false));
        let watch = {
            let (lifelines, over, ending) = (lifelines.clone(), over.clone(), ending.clone());
            move || {
                let mut known = Vec::new();
                while !over.load(Ordering::Acquire) && known.len() < lifelines.peers() {
                    match lifelines.wait(&known, Instant::now() + NAP) {
                        Some((peer, Life::Gone)) => {
                            ending.fail(Error::PeerGone { rank, peer });
                            known.push(peer);
                        }
                        Some((peer, _)) => {
                            ending.has_left(peer);
                            known.push(peer);
                        }
                        None => {}
                    }
                }
            }
        };
        let spawned = thread::Builder::new().name("peersum-peers".into()).spawn(watch);
        let failed = |error: std::io::Error| Error::System {
            call: "spawning the thread that looks after the peers",
            reason: error.to_string(),
        };
        Ok(Some(Vigil { over, thread: Some(spawned.map_err(failed)?), _lifelines: lifelines }))
    }
}

impl Drop for Vigil {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
