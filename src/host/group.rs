//! What the ranks of a group share: their segments, and how the group ended if it did.

use std::time::Duration;

use super::{
    packets::{self, Packets, Region},
    record,
    segment::Segment,
    sync::{Memory, Ordering},
};
use crate::{
    Error, Options, Result,
    protocol::{bindings::PEERSUM_ABORT_BY_HOST, call, layout::Layout},
};

/// The shared side of a group. Every rank holds it by `Arc`, so no segment goes away while a peer may still touch it.
pub(super) struct Group {
    pub(super) layout: Layout,
    pub(super) timeout: Duration,
    segments: Vec<Segment>,
    #[cfg(any(test, loom, shuttle))]
    pub(super) fault: Fault,
}

impl Group {
    pub(super) fn new(layout: Layout, options: &Options) -> Result<Group> {
        Memory::check_room(Packets::new(&layout).segment_bytes().saturating_mul(layout.world.into()))?;
        let segments = (0..layout.world).map(|_| Segment::new(&layout, options.first_epoch)).collect::<Result<_>>()?;
        Ok(Group {
            layout,
            timeout: options.timeout,
            segments,
            #[cfg(any(test, loom, shuttle))]
            fault: Fault::None,
        })
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
    /// For that rank alone, which is in no call afterwards.
    #[cold]
    pub(super) fn give_up(&self, rank: u32, error: Error) -> Error {
        self.segment(rank).set_record(record::to_words(&error));
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
    /// Words that short messages don't reach keep their packets when the epoch wraps.
    #[cfg(any(loom, shuttle))]
    NoSweep,
}
