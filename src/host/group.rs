//! What the ranks of a group share: their segments, and how the group ended if it did.

#[cfg(not(any(loom, shuttle)))]
use std::os::fd::OwnedFd;
use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use super::{
    packets::{self, Packets, Region},
    record,
    segment::Segment,
    sync::{Memory, Ordering},
};
#[cfg(not(any(loom, shuttle)))]
use crate::meeting::{Life, Lifelines, Seat};
use crate::{
    Error, Options, Result,
    protocol::{bindings::PEERSUM_ABORT_BY_HOST, call, layout::Layout},
};

/// The shared side of a group. Ranks that are threads hold one by `Arc`, those that are processes each have their own,
/// of the same memory: so no segment goes away while a peer may still touch it.
pub(super) struct Group {
    pub(super) layout: Layout,
    /// Where each segment has its symmetric memory.
    pub(super) heap: Range<u64>,
    pub(super) timeout: Duration,
    /// Whether a rank's record is written: threads of one rank may give up at once.
    gave_up: Box<[Mutex<bool>]>,
    segments: Vec<Segment>,
    /// By which a rank that is a process sees whether others still are. Dropping them says that it leaves.
    #[cfg(not(any(loom, shuttle)))]
    lifelines: Option<Lifelines>,
    #[cfg(any(test, loom, shuttle))]
    pub(super) fault: Fault,
}

impl Group {
    pub(super) fn new(layout: Layout, options: &Options) -> Result<Group> {
        let heap = Packets::new(&layout).heap(options.symmetric_bytes);
        Memory::check_room(heap.end.saturating_mul(layout.world.into()))?;
        let segment = |_| Segment::new(&layout, options.symmetric_bytes, options.first_epoch);
        let segments = (0..layout.world).map(segment).collect::<Result<_>>()?;
        Ok(Group {
            layout,
            heap,
            gave_up: (0..layout.world).map(|_| Mutex::new(false)).collect(),
            timeout: options.timeout,
            segments,
            #[cfg(not(any(loom, shuttle)))]
            lifelines: None,
            #[cfg(any(test, loom, shuttle))]
            fault: Fault::None,
        })
    }

    /// The group of the ranks of a meeting of processes, where `open` maps the segment of a peer. Returns once all have
    /// mapped all, or know who could not.
    #[cfg(not(any(loom, shuttle)))]
    pub(super) fn join(
        layout: Layout,
        options: &Options,
        seat: &mut Seat,
        open: impl Fn(usize, &OwnedFd) -> Result<Segment>,
    ) -> Result<Group> {
        let heap = Packets::new(&layout).heap(options.symmetric_bytes);
        Memory::check_room(heap.end.saturating_mul(layout.world.into()))?;
        let (own, file) = Segment::shared(&layout, options.symmetric_bytes, options.first_epoch)?;
        let (mut own, rank) = (Some(own), seat.rank());
        let files = seat.all_gather_fds(vec![file])?;
        let mut segments = Vec::with_capacity(files.len());
        // Who can't goes on with the meeting, so that all are told alike.
        let mut unmapped: Option<(usize, String)> = None;
        for (peer, files) in files.iter().enumerate() {
            let segment = match files.first() {
                _ if peer == rank => own.take().ok_or(Error::RankTaken { rank })?,
                Some(file) => match open(peer, file) {
                    Ok(segment) => segment,
                    Err(error) => {
                        unmapped = Some((peer, error.to_string()));
                        break;
                    }
                },
                None => {
                    unmapped = Some((peer, "it handed round no segment".into()));
                    break;
                }
            };
            segments.push(segment);
        }
        let lifelines = Some(Lifelines::hand_round(seat)?);
        // Nobody goes ahead before all can follow.
        let all = seat.all_gather(unmapped)?;
        if let Some((rank, (peer, reason))) = all.into_iter().enumerate().find_map(|(rank, it)| Some((rank, it?))) {
            return Err(Error::Unmapped { rank, peer, reason });
        }
        Ok(Group {
            layout,
            heap,
            gave_up: (0..layout.world).map(|_| Mutex::new(false)).collect(),
            timeout: options.timeout,
            segments,
            lifelines,
            #[cfg(test)]
            fault: Fault::None,
        })
    }

    /// Why rank `rank` waits for `peer` in vain, if it is a process that has left or is gone.
    pub(super) fn lost(&self, rank: u32, peer: u32) -> Option<Error> {
        #[cfg(not(any(loom, shuttle)))]
        if let Some(lifelines) = &self.lifelines {
            let life = lifelines.look(peer as usize);
            let (rank, peer) = (rank as usize, peer as usize);
            return match life {
                Life::Here => None,
                Life::Left => Some(Error::PeerLeft { rank, peer }),
                Life::Gone => Some(Error::PeerGone { rank, peer }),
            };
        }
        let _ = (rank, peer);
        None
    }

    pub(super) fn segment(&self, rank: u32) -> &Segment {
        &self.segments[rank as usize]
    }

    /// The group's failure, as rank `rank` can know of it.
    pub(super) fn check(&self, rank: u32) -> Result<()> {
        match self.segment(rank).load_abort_acquire() {
            0 => Ok(()),
            word => Err(self.failure(word)),
        }
    }

    /// Ends the group because rank `rank` gave up. Returns what ended it, which is another error if another was first.
    ///
    /// For that rank's threads alone, which are in no call afterwards. The first says why; whoever comes after it finds
    /// the record whole.
    #[cold]
    pub(super) fn give_up(&self, rank: u32, error: Error) -> Error {
        let mut gave_up = self.gave_up[rank as usize].lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *gave_up, true) {
            self.segment(rank).set_record(record::to_words(&error));
        }
        drop(gave_up);
        self.end(1 + rank)
    }

    /// Ends the group because the caller asked.
    #[cold]
    pub(super) fn abort(&self) {
        self.end(PEERSUM_ABORT_BY_HOST);
    }

    fn end(&self, word: u32) -> Error {
        let first = self.segment(0).enter_first(word);
        for segment in &self.segments {
            segment.store_abort_release(first);
        }
        self.failure(first)
    }

    /// What an abort word says.
    fn failure(&self, word: u32) -> Error {
        let by = (word != PEERSUM_ABORT_BY_HOST).then(|| word as usize - 1);
        let record = by.and_then(|rank| self.segments.get(rank)).map(Segment::record);
        record.and_then(record::from_words).unwrap_or(Error::Aborted { by })
    }

    /// The half of the staging that round `epoch` uses.
    pub(super) fn slot_half(&self, epoch: u32) -> u32 {
        #[cfg(any(loom, shuttle))]
        if self.fault == Fault::OneHalfOfSlots {
            return 0;
        }
        call::parity(epoch)
    }

    /// The half of the flags that round `epoch` uses.
    pub(super) fn flag_half(&self, epoch: u32) -> u32 {
        #[cfg(any(loom, shuttle))]
        if self.fault == Fault::OneHalfOfFlags {
            return 0;
        }
        call::parity(epoch)
    }

    /// Whether the flag of round `epoch` from `writer` to `reader` gets lost on the way.
    pub(super) fn loses_flag(&self, epoch: u32, writer: u32, reader: u32) -> bool {
        #[cfg(all(test, not(any(loom, shuttle))))]
        if self.fault == (Fault::LostFlag { epoch, writer, reader }) {
            return true;
        }
        let _ = (epoch, writer, reader);
        false
    }

    /// Whether a direct call goes on without this round.
    pub(super) fn skips(&self, phase: crate::Phase) -> bool {
        #[cfg(any(loom, shuttle))]
        if self.fault == Fault::NoRound(phase) {
            return true;
        }
        let _ = phase;
        false
    }

    /// The half of the words that a wait for round `epoch` looks at.
    pub(super) fn signal_half(&self, region: Region, epoch: u32) -> u32 {
        match region {
            Region::Flags => self.flag_half(epoch),
            Region::Packets => self.slot_half(epoch),
        }
    }

    /// Whether a round by packets clears its slots first.
    pub(super) fn sweeps(&self, epoch: u32) -> bool {
        #[cfg(any(loom, shuttle))]
        if self.fault == Fault::NoSweep {
            return false;
        }
        packets::sweeps(epoch)
    }

    /// The order of the store that hands a round over.
    pub(super) fn flag_order(&self) -> Ordering {
        #[cfg(loom)]
        if self.fault == Fault::RelaxedFlag {
            return Ordering::Relaxed;
        }
        Ordering::Release
    }
}

/// What a model leaves out, to show that it would notice; and what a test breaks, to see that it ends well.
#[cfg(any(test, loom, shuttle))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    #[cfg(any(loom, shuttle))]
    OneHalfOfSlots,
    #[cfg(any(loom, shuttle))]
    OneHalfOfFlags,
    #[cfg(loom)]
    RelaxedFlag,
    #[cfg(not(any(loom, shuttle)))]
    LostFlag {
        epoch: u32,
        writer: u32,
        reader: u32,
    },
    /// A packet's epoch is stored before its payload.
    #[cfg(any(loom, shuttle))]
    EpochAhead,
    /// A rank stores the next chunk's packets before it has read this one's.
    #[cfg(any(loom, shuttle))]
    NoConclude,
    /// The second round of a two-shot begins before the peers' headers of the first have come.
    #[cfg(any(loom, shuttle))]
    EarlySecondRound,
    /// A direct call begins, or ends, without waiting for the peers.
    #[cfg(any(loom, shuttle))]
    NoRound(crate::Phase),
    /// Words that short messages don't reach keep their packets when the epoch wraps.
    #[cfg(any(loom, shuttle))]
    NoSweep,
}
