//! LL packets: what they are, and where they lie in a segment.
//!
//! A packet is one atomic word of 8 bytes: 4 bytes of payload in its high half, and the round's epoch in its low half. So
//! the arrival of the data is the signal, whatever comes before or after it. A slot starts with a *header*, the packet
//! whose payload is the call's hash: a [`Flag`](crate::protocol::call::Flag)'s word. It is polled as a flag is, and tells
//! a peer in another call apart. Any payload will do, since only the epoch says whether it is there.
//!
//! # Why two halves are enough
//!
//! Words that held packets never hold anything else, and packets count rounds of their own, so rounds by flags don't
//! matter here. To prove: when rank j stores a packet of round e, every rank has finished reading round e−2, whose half
//! it overwrites.
//!
//! * *The first round of a chunk.* j begins it when it has read all packets of round e−1 from every peer. If that was a
//!   one-shot's, or the first of a two-shot, the peer stored its header after it had read all of round e−2, and released
//!   it; j acquired it. If it was the second of a two-shot, the peer stored its last packet of round e−1 after a release
//!   fence behind its last read of round e−2, since that packet is of what it had read; j passed an acquire fence behind
//!   its own last read. A peer whose part is empty reads nothing of round e−2 but headers, all of them before it stored
//!   its header of round e−1.
//! * *The second round of a two-shot.* j begins it when it has every peer's header of round e−1, which the peer released
//!   after it had read all of round e−2, as a round e−1 is a chunk's first. j needs no more: it may still wait for packets
//!   of round e−1, which lie in the other half. So the rounds of a chunk overlap, piece by piece. ∎
//!
//! So the payload's accesses are relaxed, the header's release and acquire, and there is a fence of each kind in the
//! second round.
//!
//! # The wrap
//!
//! A poll compares for equality, and every word of a slot is looked at only in rounds long enough to reach it: a word
//! could wait for one for a whole lap of the epoch, and then be taken for a packet of this lap. So fresh memory is 0, no
//! round has epoch 0 (it goes from 2^32−1 to 2, which keeps the halves in turn), and in each half the last two rounds of a
//! lap, whose epochs [`sweeps`] names, clear their slots before they fill them. Then a half's words of the lap's last round hold that
//! epoch or 0, and those of its last but one clear even that in the next lap, before it is waited for again.

use std::ops::Range;

use crate::{
    Algorithm,
    protocol::layout::{LINE_BYTES, Layout},
};

/// Bytes that a packet carries.
pub(super) const PAYLOAD_BYTES: u64 = 4;
/// Bytes of payload in a half's slots together, at most. Packets are for short messages; longer ones go in chunks.
const HALF_BYTES: u64 = if cfg!(any(loom, shuttle)) { 0 } else { 64 << 10 };
/// The least payload of a slot. The models pay for every word, and want several chunks from few.
const LEAST_BYTES: u64 = if cfg!(loom) {
    PAYLOAD_BYTES
} else if cfg!(shuttle) {
    3 * PAYLOAD_BYTES
} else {
    LINE_BYTES
};
/// Bytes of a packet.
const PACKET_BYTES: u64 = size_of::<u64>() as u64;

/// The two regions of a segment, each with its own epochs. Algorithms of one may follow those of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Region {
    /// What the rounds by flags use: a [`Layout`].
    Flags,
    /// What the rounds by packets use: [`Packets`].
    Packets,
}

impl Region {
    /// The epoch after this one.
    pub(super) fn next(self, epoch: u32) -> u32 {
        match (self, epoch.wrapping_add(1)) {
            (Region::Packets, 0) => 2,
            (_, next) => next,
        }
    }

    pub(super) fn other(self) -> Region {
        match self {
            Region::Flags => Region::Packets,
            Region::Packets => Region::Flags,
        }
    }
}

/// Whether a round of this epoch clears its slots before it fills them.
pub(super) fn sweeps(epoch: u32) -> bool {
    epoch >= u32::MAX - 3
}

/// Where packets lie in a segment: behind its flags and staging, a line of epochs, then the slots
/// `[2 halves][max_blocks][world]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packets {
    start: u64,
    world: u32,
    max_blocks: u32,
    /// Bytes that a slot carries beside its header.
    payload_bytes: u64,
}

impl Packets {
    /// Behind a segment of this layout. A slot carries no more than one of the layout's.
    pub(super) fn new(layout: &Layout) -> Packets {
        let fair = HALF_BYTES / u64::from(layout.world * layout.max_blocks) / LINE_BYTES * LINE_BYTES;
        let payload_bytes = fair.min(layout.slot_bytes).max(LEAST_BYTES);
        let (world, max_blocks) = (layout.world, layout.max_blocks);
        Packets { start: layout.segment_bytes(), world, max_blocks, payload_bytes }
    }

    /// Byte offset of the owner's last finished epoch.
    pub(super) fn epoch(&self, block: u32) -> u64 {
        debug_assert!(block < self.max_blocks && u64::from(self.max_blocks) * 4 <= LINE_BYTES);
        self.start + u64::from(block) * size_of::<u32>() as u64
    }

    /// Byte offset of the slot of `source`: of its header, which [`Packets::slot_packets`] packets follow.
    pub(super) fn slot(&self, half: u32, block: u32, source: u32) -> u64 {
        debug_assert!(half <= 2 && block < self.max_blocks && source < self.world);
        let line = u64::from((half * self.max_blocks + block) * self.world + source);
        self.start + LINE_BYTES + line * self.slot_bytes()
    }

    /// Byte offset of a packet of that slot.
    pub(super) fn packet(&self, half: u32, block: u32, source: u32, index: u64) -> u64 {
        debug_assert!(index <= self.slot_packets());
        self.slot(half, block, source) + (1 + index) * PACKET_BYTES
    }

    /// Packets of a slot.
    pub(super) fn slot_packets(&self) -> u64 {
        self.payload_bytes / PAYLOAD_BYTES
    }

    /// Bytes from one slot to the next: slots of different writers lie on lines of their own.
    pub(super) fn slot_bytes(&self) -> u64 {
        ((1 + self.slot_packets()) * PACKET_BYTES).next_multiple_of(LINE_BYTES)
    }

    /// The number of slots.
    #[cfg(any(loom, shuttle))]
    pub(super) fn slots(&self) -> u64 {
        2 * u64::from(self.max_blocks) * u64::from(self.world)
    }

    /// Bytes of a segment with everything in it.
    pub(super) fn segment_bytes(&self) -> u64 {
        self.slot(2, 0, 0)
    }

    /// Where so many bytes of symmetric memory lie, behind everything else.
    pub(super) fn heap(&self, symmetric_bytes: usize) -> Range<u64> {
        const PAGE: u64 = 4096;
        let start =
            if symmetric_bytes == 0 { self.segment_bytes() } else { self.segment_bytes().next_multiple_of(PAGE) };
        start..start.saturating_add(symmetric_bytes as u64)
    }

    /// The most bytes of a message in one chunk; `None` if the algorithm is not by packets.
    pub(super) fn chunk_bytes(&self, algorithm: Algorithm) -> Option<u64> {
        match algorithm {
            Algorithm::OneShotLl => Some(self.payload_bytes),
            Algorithm::TwoShotLl => Some(self.payload_bytes * u64::from(self.world)),
            _ => None,
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_the_staging_on_lines_of_their_own_and_stay_small() {
        for (world, staging) in [(1, 4 << 20), (2, 4 << 20), (2, 512), (3, 100_000), (8, 4 << 20), (128, 4 << 20)] {
            let layout = Layout::new(world, 1, staging).unwrap();
            let packets = Packets::new(&layout);
            let mut next = layout.segment_bytes() + LINE_BYTES;
            for half in 0..2 {
                for source in 0..world {
                    assert_eq!(packets.slot(half, 0, source), next);
                    assert_eq!(next % LINE_BYTES, 0);
                    next += packets.slot_bytes();
                    assert!(packets.packet(half, 0, source, packets.slot_packets()) <= next);
                }
            }
            assert_eq!(packets.segment_bytes(), next);
            assert!(packets.payload_bytes <= layout.slot_bytes);
            let lines = 1 + 2 * u64::from(world);
            assert!(next - layout.segment_bytes() <= 4 * HALF_BYTES + lines * LINE_BYTES, "{world} ranks");
        }
    }

    #[test]
    fn an_epoch_is_never_0_and_the_halves_stay_in_turn() {
        assert_eq!(Region::Packets.next(0), 1);
        assert_eq!(Region::Packets.next(u32::MAX), 2);
        assert_eq!(Region::Flags.next(u32::MAX), 0);
        assert!([u32::MAX, u32::MAX - 3].into_iter().all(sweeps) && !sweeps(u32::MAX - 4) && !sweeps(2));
    }
}
