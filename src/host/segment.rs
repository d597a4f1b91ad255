//! One rank's segment: the words and slots of `protocol::layout`, by name.

use std::mem::offset_of;
#[cfg(not(any(loom, shuttle)))]
use std::{os::fd::OwnedFd, time::Duration};

use super::{
    packets::{Packets, Region},
    record,
    reduce::{Copying, Stores, Target},
    sync::{AtomicU32, AtomicU64, Held, Memory, Ordering},
};
use crate::{
    Result,
    protocol::{
        bindings::{PEERSUM_CONTROL_BYTES, peersum_control},
        call::{self, Call, Flag},
        layout::Layout,
    },
};

/// The segment of one rank.
pub(super) struct Segment {
    layout: Layout,
    packets: Packets,
    memory: Memory,
    /// How this mapping lies.
    #[cfg(all(test, not(any(loom, shuttle))))]
    pub(super) lie: Option<Lie>,
}

/// A place in the staging.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) half: u32,
    pub(super) block: u32,
    /// Whose slot it is.
    pub(super) source: u32,
    /// How far behind the slot's start, in bytes.
    pub(super) start: u64,
}

/// What a test makes of a peer's mapping.
#[cfg(all(test, not(any(loom, shuttle))))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lie {
    /// What is written to one line of the payload in so many stays behind.
    Stale(u64),
    /// What is written comes so late.
    Late(std::time::Duration),
}

impl Segment {
    /// A segment with no flag set and no packet, whose blocks have all finished `first_epoch` in both regions.
    pub(super) fn new(layout: &Layout, symmetric_bytes: usize, first_epoch: u32) -> Result<Segment> {
        Ok(Segment::fresh(layout, first_epoch, Memory::new(layout, symmetric_bytes)?))
    }

    /// Such a segment, and the descriptor by which other processes open it.
    #[cfg(not(any(loom, shuttle)))]
    pub(super) fn shared(layout: &Layout, symmetric_bytes: usize, first_epoch: u32) -> Result<(Segment, OwnedFd)> {
        let (memory, file) = Memory::shared(layout, symmetric_bytes)?;
        Ok((Segment::fresh(layout, first_epoch, memory), file))
    }

    /// The segment of a rank that is another process.
    #[cfg(not(any(loom, shuttle)))]
    pub(super) fn open(layout: &Layout, symmetric_bytes: usize, file: &OwnedFd) -> Result<Segment> {
        Ok(Segment::of(layout, Memory::open(layout, symmetric_bytes, file)?))
    }

    fn fresh(layout: &Layout, first_epoch: u32, memory: Memory) -> Segment {
        let segment = Segment::of(layout, memory);
        segment.set_epochs(first_epoch);
        segment
    }

    fn of(layout: &Layout, memory: Memory) -> Segment {
        Segment {
            layout: *layout,
            packets: Packets::new(layout),
            memory,
            #[cfg(all(test, not(any(loom, shuttle))))]
            lie: None,
        }
    }

    /// Makes it as new: no flag set and no packet, at `first_epoch`. What the staging holds says nothing by itself. For
    /// the owner alone, while no rank is in a call.
    #[cfg(not(any(loom, shuttle)))]
    pub(super) fn renew(&self, first_epoch: u32) {
        for half in 0..2 {
            for block in 0..self.layout.max_blocks {
                for writer in 0..self.layout.world {
                    for region in [Region::Flags, Region::Packets] {
                        self.signal(region, half, block, writer).store(0, Ordering::Relaxed);
                    }
                    self.packets(half, block, writer).iter().for_each(|packet| packet.store(0, Ordering::Relaxed));
                }
            }
        }
        (0..call::WORDS).for_each(|index| self.memory.word_64(call_offset(index)).store(0, Ordering::Relaxed));
        self.set_epochs(first_epoch);
    }

    fn set_epochs(&self, epoch: u32) {
        for block in 0..self.layout.max_blocks {
            self.set_epoch(Region::Flags, block, epoch);
            self.set_epoch(Region::Packets, block, epoch);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// The last epoch that the owner's block finished. For the owner alone.
    pub(super) fn epoch(&self, region: Region, block: u32) -> u32 {
        self.memory.word_32(self.epoch_offset(region, block)).load(Ordering::Relaxed)
    }

    /// For the owner alone.
    pub(super) fn set_epoch(&self, region: Region, block: u32, epoch: u32) {
        self.memory.word_32(self.epoch_offset(region, block)).store(epoch, Ordering::Relaxed);
    }

    /// Leaves which call the owner is in, before it releases a flag of it. For the owner alone.
    pub(super) fn set_call(&self, call: &Call) {
        for (index, word) in call.words().into_iter().enumerate() {
            self.memory.word_64(call_offset(index)).store(word, Ordering::Relaxed);
        }
    }

    /// The call that the owner is in. For the owner, or for who has acquired a flag of that call which it does not
    /// answer: then the owner stays in that call until the group ends.
    pub(super) fn call(&self) -> Option<Call> {
        let word = |index| self.memory.word_64(call_offset(index)).load(Ordering::Relaxed);
        Call::from_words(std::array::from_fn(word))
    }

    /// Leaves why the owner gives up. For the owner alone, once, before it enters itself as the first.
    pub(super) fn set_record(&self, words: [u64; record::WORDS]) {
        for (index, word) in words.into_iter().enumerate() {
            self.memory.word_64(record_offset(index)).store(word, Ordering::Relaxed);
        }
    }

    /// Why the owner gave up. For who has acquired that it did.
    pub(super) fn record(&self) -> [u64; record::WORDS] {
        std::array::from_fn(|index| self.memory.word_64(record_offset(index)).load(Ordering::Relaxed))
    }

    /// Enters what ended the group, in the form of the abort word, unless something is entered. Returns what is then.
    /// Only the entry of rank 0's segment counts.
    pub(super) fn enter_first(&self, word: u32) -> u32 {
        let first = self.memory.word_32(offset_of!(peersum_control, claimed) as u64);
        first.compare_exchange(0, word, Ordering::AcqRel, Ordering::Acquire).err().unwrap_or(word)
    }

    /// What ended the group: 0, or 1 + the rank that gave up, or `PEERSUM_ABORT_BY_HOST`.
    pub(super) fn load_abort_acquire(&self) -> u32 {
        self.abort().load(Ordering::Acquire)
    }

    pub(super) fn store_abort_release(&self, word: u32) {
        self.abort().store(word, Ordering::Release);
    }

    /// Sleeps until a peer hands over something to the owner's block, at most for so long. `is_there` looks whether one
    /// has. For the owner's thread alone.
    ///
    /// The word that says so and the peer's flag are two, and nothing orders a peer's store of the one and its load of
    /// the other, so a peer may miss that this thread sleeps. Then it sleeps to the end, which is why that is near;
    /// a fence in every hand-over would cost short calls more.
    #[cfg(not(any(loom, shuttle)))]
    pub(super) fn sleep(&self, block: u32, at_most: Duration, is_there: impl FnOnce() -> bool) {
        let sleeps = self.memory.word_32(sleeper_offset(block));
        sleeps.store(1, Ordering::SeqCst);
        if !is_there() {
            self.memory.sleep(sleeper_offset(block), 1, at_most);
        }
        sleeps.store(0, Ordering::Relaxed);
    }

    /// Wakes the owner's block, if it sleeps: after something was handed over to it.
    #[inline]
    pub(super) fn wake(&self, block: u32) {
        // The models have no time, and nobody sleeps there.
        #[cfg(not(any(loom, shuttle)))]
        if self.memory.word_32(sleeper_offset(block)).load(Ordering::Relaxed) != 0 {
            self.memory.wake(sleeper_offset(block));
        }
        let _ = block;
    }

    /// `writer`'s flag of a half, which for packets is the header of its slot. Waits poll it; `writer` alone stores it.
    pub(super) fn signal(&self, region: Region, half: u32, block: u32, writer: u32) -> &AtomicU64 {
        // In a peer's segment a signal is only written.
        #[cfg(all(test, not(any(loom, shuttle))))]
        if let Some(Lie::Late(time)) = self.lie {
            std::thread::sleep(time);
        }
        match region {
            Region::Flags => self.memory.word_64(self.layout.flag(half, block, writer)),
            Region::Packets => &self.memory.packets(self.packets.slot(half, block, writer), 1)[0],
        }
    }

    /// The packets of the slot of `source`, behind its header.
    pub(super) fn packets(&self, half: u32, block: u32, source: u32) -> &[AtomicU64] {
        self.memory.packets(self.packets.packet(half, block, source, 0), self.packets.slot_packets() as usize)
    }

    pub(super) fn store_flag(&self, half: u32, block: u32, writer: u32, flag: Flag, order: Ordering) {
        self.signal(Region::Flags, half, block, writer).store(flag.word(), order);
    }

    /// Copies into the slot of `source`, from `start` on.
    ///
    /// # Safety
    ///
    /// `from` is readable for `bytes` bytes, the instructions are available, and the protocol gives the slot to this
    /// thread.
    pub(super) unsafe fn copy_in(&self, at: Place, from: *const u8, bytes: usize, how: Copying, stores: Stores) {
        #[cfg(all(test, not(any(loom, shuttle))))]
        if let Some(Lie::Stale(one_in)) = self.lie {
            use crate::protocol::layout::LINE_BYTES;
            let start = self.offset(at);
            for at in (0..bytes as u64).step_by(LINE_BYTES as usize) {
                if !((start + at) / LINE_BYTES).is_multiple_of(one_in) {
                    let length = (bytes as u64 - at).min(LINE_BYTES) as usize;
                    // SAFETY: as below, for a line of it: places are on lines.
                    unsafe { self.memory.copy_in(start + at, from.add(at as usize), length, how, stores) }
                }
            }
            return;
        }
        // SAFETY: slots are apart from the words; the caller vouches for the rest.
        unsafe { self.memory.copy_in(self.offset(at), from, bytes, how, stores) }
    }

    /// Copies out of a slot.
    ///
    /// # Safety
    ///
    /// The target is writable for `bytes` bytes, the instructions are available, and nobody writes the slot meanwhile,
    /// as the protocol has it.
    pub(super) unsafe fn copy_out(&self, at: Place, target: Target, bytes: usize, how: Copying) {
        // SAFETY: slots are apart from the words; the caller vouches for the rest.
        unsafe { self.memory.copy_out(self.offset(at), target, bytes, how) }
    }

    /// A slot, to be written in place while `held` lives.
    ///
    /// # Safety
    ///
    /// As for [`Segment::copy_in`], until `held` is dropped, which must be before the segment is.
    pub(super) unsafe fn write(&self, at: Place, bytes: usize, held: &mut Held) -> *mut u8 {
        #[cfg(all(test, not(any(loom, shuttle))))]
        if let Some(Lie::Stale(_)) = self.lie {
            let mut lines = vec![0u64; bytes.div_ceil(size_of::<u64>())];
            let to = lines.as_mut_ptr().cast();
            let segment: *const Segment = self;
            // SAFETY: the caller drops `held` before the segment, and vouches for the slot until then.
            held.at_the_end.push(Box::new(move || unsafe {
                let how = super::reduce::Isa::Portable.into();
                (*segment).copy_in(at, lines.as_ptr().cast(), bytes, how, Stores::Cached);
            }));
            return to;
        }
        // SAFETY: slots are apart from the words; the caller vouches for the rest.
        unsafe { self.memory.write(self.offset(at), bytes, held) }
    }

    /// A slot, to be read in place while `held` lives.
    ///
    /// # Safety
    ///
    /// As for [`Segment::copy_out`], until `held` is dropped, which must be before the segment is.
    pub(super) unsafe fn read(&self, at: Place, bytes: usize, held: &mut Held) -> *const u8 {
        // SAFETY: slots are apart from the words; the caller vouches for the rest.
        unsafe { self.memory.read(self.offset(at), bytes, held) }
    }

    /// The address of a piece of the heap, for its owner.
    pub(super) fn symmetric(&self, offset: u64) -> *mut u8 {
        self.memory.address(offset)
    }

    /// A piece of the heap, to be read in place while `held` lives.
    ///
    /// # Safety
    ///
    /// The piece is of the heap, and a call lends it to this thread to read. `held` is dropped before the segment is.
    pub(super) unsafe fn read_symmetric(&self, offset: u64, bytes: usize, held: &mut Held) -> *const u8 {
        // SAFETY: the heap is apart from the words; the caller vouches for the rest.
        unsafe { self.memory.read(offset, bytes, held) }
    }

    /// A piece of the heap, to be written in place while `held` lives.
    ///
    /// # Safety
    ///
    /// The piece is of the heap, and this thread's alone. `held` is dropped before the segment is.
    pub(super) unsafe fn write_symmetric(&self, offset: u64, bytes: usize, held: &mut Held) -> *mut u8 {
        // SAFETY: the heap is apart from the words; the caller vouches for the rest.
        unsafe { self.memory.write(offset, bytes, held) }
    }

    fn offset(&self, at: Place) -> u64 {
        self.layout.slot(at.half, at.block, at.source) + at.start
    }

    fn epoch_offset(&self, region: Region, block: u32) -> u64 {
        match region {
            Region::Flags => epoch_offset(block),
            Region::Packets => self.packets.epoch(block),
        }
    }

    fn abort(&self) -> &AtomicU32 {
        self.memory.word_32(offset_of!(peersum_control, abort) as u64)
    }
}

fn epoch_offset(block: u32) -> u64 {
    (offset_of!(peersum_control, epochs) + block as usize * size_of::<u32>()) as u64
}

fn call_offset(index: usize) -> u64 {
    debug_assert!(index < call::WORDS);
    (offset_of!(peersum_control, host_call) + index * size_of::<u64>()) as u64
}

/// The record lies behind what both backends have in their control.
const fn record_offset(index: usize) -> u64 {
    const END: usize = size_of::<peersum_control>() + record::WORDS * size_of::<u64>();
    const { assert!(END <= PEERSUM_CONTROL_BYTES as usize) };
    debug_assert!(index < record::WORDS);
    (size_of::<peersum_control>() + index * size_of::<u64>()) as u64
}

/// Whether a block sleeps, on a line of its own: peers look at it in each round.
#[cfg(not(any(loom, shuttle)))]
fn sleeper_offset(block: u32) -> u64 {
    const START: u32 = 512;
    const EACH: u32 = 64;
    const {
        assert!(record_offset(record::WORDS - 1) + 8 <= START as u64);
        assert!(START + super::priors::MAX_BLOCKS * EACH <= PEERSUM_CONTROL_BYTES);
    }
    u64::from(START + block * EACH)
}

/// Where the words of 8 bytes of the control lie that this backend uses.
#[cfg(any(loom, shuttle))]
pub(super) fn control_words_64() -> impl Iterator<Item = u64> {
    (0..call::WORDS).map(call_offset).chain((0..record::WORDS).map(record_offset))
}

/// Where those of 4 bytes lie.
#[cfg(any(loom, shuttle))]
pub(super) fn control_words(layout: &Layout) -> impl Iterator<Item = u64> {
    let epochs = (0..layout.max_blocks).map(epoch_offset);
    let of_packets = (0..layout.max_blocks).map(|block| Packets::new(layout).epoch(block));
    let ends = [offset_of!(peersum_control, abort), offset_of!(peersum_control, claimed)];
    epochs.chain(of_packets).chain(ends.map(|offset| offset as u64))
}
