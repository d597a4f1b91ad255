//! A segment's memory as the model checkers see it: every pack of the payload is a cell that notices when two ranks touch
//! it without the protocol's leave.

use std::{cell::UnsafeCell, collections::HashMap, ops::Range, time::Duration};

use super::{AtomicU32, AtomicU64};
use crate::{
    Result,
    host::{
        packets::Packets,
        reduce::{Copying, Stores, Target},
    },
    protocol::{layout::Layout, split::PACK_BYTES},
};

/// A clock that stands still: a model has no time, so no wait of it ends by the deadline.
#[derive(Clone, Copy, Debug)]
pub(in crate::host) struct Instant;

impl Instant {
    pub(in crate::host) fn now() -> Instant {
        Instant
    }

    pub(in crate::host) fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
}

/// As `mapping::Memory`, method by method.
pub(in crate::host) struct Memory {
    words_32: HashMap<u64, AtomicU32>,
    words_64: HashMap<u64, AtomicU64>,
    layout_of_packets: Packets,
    /// Slot after slot: a header and packets, without what lies between slots.
    packets: Vec<AtomicU64>,
    staging: u64,
    /// Those of the heap follow.
    staging_packs: usize,
    heap: u64,
    cells: Vec<Cell>,
    /// In units of 16 bytes, so that the payload is aligned.
    data: Box<[UnsafeCell<u128>]>,
}

// SAFETY: `data` is touched only while `cells` say that nobody else is there; where they are wrong, the model fails.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    pub(in crate::host) fn new(layout: &Layout, symmetric_bytes: usize) -> Result<Memory> {
        let control = crate::host::segment::control_words_64();
        let mut words_64: HashMap<_, _> = control.map(|offset| (offset, AtomicU64::new(0))).collect();
        for parity in 0..2 {
            for block in 0..layout.max_blocks {
                for writer in 0..layout.world {
                    words_64.insert(layout.flag(parity, block, writer), AtomicU64::new(0));
                }
            }
        }
        let layout_of_packets = Packets::new(layout);
        let words = layout_of_packets.slots() * (1 + layout_of_packets.slot_packets());
        let control = crate::host::segment::control_words(layout);
        let staging = layout.slot(0, 0, 0);
        let staging_packs = ((layout.segment_bytes() - staging) / PACK_BYTES) as usize;
        let packs = staging_packs + symmetric_bytes.div_ceil(PACK_BYTES as usize);
        Ok(Memory {
            words_32: control.map(|offset| (offset, AtomicU32::new(0))).collect(),
            words_64,
            layout_of_packets,
            packets: (0..words).map(|_| AtomicU64::new(0)).collect(),
            staging,
            staging_packs,
            heap: layout_of_packets.heap(symmetric_bytes).start,
            cells: (0..packs).map(|_| Cell::new()).collect(),
            data: (0..packs).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    pub(in crate::host) fn check_room(_bytes: u64) -> Result<()> {
        Ok(())
    }

    pub(in crate::host) fn bytes(&self) -> usize {
        self.staging as usize + size_of_val(&*self.data)
    }

    pub(in crate::host) fn word_32(&self, offset: u64) -> &AtomicU32 {
        &self.words_32[&offset]
    }

    pub(in crate::host) fn word_64(&self, offset: u64) -> &AtomicU64 {
        &self.words_64[&offset]
    }

    pub(in crate::host) fn packets(&self, offset: u64, count: usize) -> &[AtomicU64] {
        let start = offset - self.layout_of_packets.slot(0, 0, 0);
        let (slot, word) =
            (start / self.layout_of_packets.slot_bytes(), start % self.layout_of_packets.slot_bytes() / 8);
        let first = slot * (1 + self.layout_of_packets.slot_packets()) + word;
        &self.packets[first as usize..][..count]
    }

    /// # Safety
    ///
    /// As for `mapping::Memory::copy_in`.
    pub(in crate::host) unsafe fn copy_in(&self, offset: u64, from: *const u8, bytes: usize, _: Copying, _: Stores) {
        for (pack, piece) in self.pieces(offset, bytes) {
            let _writing = self.cells[pack].write();
            // SAFETY: the piece lies in the range that the caller vouches for, and the cell just said that nobody else
            // is there.
            unsafe { std::ptr::copy_nonoverlapping(from.add(piece.start), self.at(offset, piece.start), piece.len()) }
        }
    }

    /// # Safety
    ///
    /// As for `mapping::Memory::copy_out`.
    pub(in crate::host) unsafe fn copy_out(&self, offset: u64, target: Target, bytes: usize, _: Copying) {
        let to = target.to;
        for (pack, piece) in self.pieces(offset, bytes) {
            let _reading = self.cells[pack].read();
            // SAFETY: as in `copy_in`, the other way round.
            unsafe { std::ptr::copy_nonoverlapping(self.at(offset, piece.start), to.add(piece.start), piece.len()) }
        }
    }

    /// # Safety
    ///
    /// As for `mapping::Memory::read`.
    pub(in crate::host) unsafe fn read(&self, offset: u64, bytes: usize, held: &mut Held) -> *const u8 {
        held.reading.extend(self.pieces(offset, bytes).map(|(pack, _)| self.cells[pack].read()));
        self.at(offset, 0)
    }

    /// # Safety
    ///
    /// As for `mapping::Memory::write`.
    pub(in crate::host) unsafe fn write(&self, offset: u64, bytes: usize, held: &mut Held) -> *mut u8 {
        held.writing.extend(self.pieces(offset, bytes).map(|(pack, _)| self.cells[pack].write()));
        self.at(offset, 0)
    }

    fn first_pack(&self, offset: u64) -> usize {
        let in_heap = self.data.len() > self.staging_packs && offset >= self.heap;
        let (start, before) = if in_heap { (self.heap, self.staging_packs) } else { (self.staging, 0) };
        before + ((offset - start) / PACK_BYTES) as usize
    }

    /// The address of a pack, whoever is there.
    pub(in crate::host) fn address(&self, offset: u64) -> *mut u8 {
        self.at(offset, 0)
    }

    fn at(&self, offset: u64, start: usize) -> *mut u8 {
        // `pieces` looked every pack up; the pointer is the whole slice's, since a reading spans packs.
        let index = self.first_pack(offset) * PACK_BYTES as usize + (offset % PACK_BYTES) as usize + start;
        self.data.as_ptr().cast_mut().cast::<u8>().wrapping_add(index)
    }

    /// The packs that a range touches, each with the bytes of the range that lie in it.
    fn pieces(&self, offset: u64, bytes: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        // A part without elements may start where the message ends.
        assert!(bytes == 0 || offset.is_multiple_of(PACK_BYTES), "payload starts on a pack");
        let first = self.first_pack(offset);
        let pack = PACK_BYTES as usize;
        (0..bytes.div_ceil(pack)).map(move |index| (first + index, index * pack..((index + 1) * pack).min(bytes)))
    }
}

/// What is being read or written in place.
#[derive(Default)]
pub(in crate::host) struct Held {
    reading: Vec<cell::Read>,
    writing: Vec<cell::Write>,
}

use cell::Cell;

/// loom knows which accesses happen before which, and fails where two are in no order.
#[cfg(loom)]
mod cell {
    use loom::cell::{ConstPtr, MutPtr, UnsafeCell};

    pub(super) struct Cell(UnsafeCell<()>);
    pub(super) type Read = ConstPtr<()>;
    pub(super) type Write = MutPtr<()>;

    impl Cell {
        pub(super) fn new() -> Cell {
            Cell(UnsafeCell::new(()))
        }

        pub(super) fn read(&self) -> Read {
            self.0.get()
        }

        pub(super) fn write(&self) -> Write {
            self.0.get_mut()
        }
    }
}

/// shuttle runs one thread at a time, so a cell lets others run in the middle of an access and fails where one of them
/// comes in.
#[cfg(shuttle)]
mod cell {
    use std::sync::{
        Arc,
        atomic::{AtomicI32, Ordering::SeqCst},
    };

    /// -1 while it is written, else the number of its readers.
    pub(super) struct Cell(Arc<AtomicI32>);
    pub(super) struct Read(Arc<AtomicI32>);
    pub(super) struct Write(Arc<AtomicI32>);

    impl Cell {
        pub(super) fn new() -> Cell {
            Cell(Arc::default())
        }

        pub(super) fn read(&self) -> Read {
            assert!(self.0.fetch_add(1, SeqCst) >= 0, "race: read while written");
            let reading = Read(self.0.clone());
            let_others_run();
            reading
        }

        pub(super) fn write(&self) -> Write {
            assert_eq!(self.0.swap(-1, SeqCst), 0, "race: written while in use");
            let writing = Write(self.0.clone());
            let_others_run();
            writing
        }
    }

    impl Drop for Read {
        fn drop(&mut self) {
            self.0.fetch_sub(1, SeqCst);
        }
    }

    impl Drop for Write {
        fn drop(&mut self) {
            self.0.store(0, SeqCst);
        }
    }

    /// Any access to one of shuttle's atomics is a point where it may switch; its `yield_now` would also tell the
    /// scheduler that this thread can't go on.
    fn let_others_run() {
        shuttle::sync::atomic::AtomicBool::new(false).load(SeqCst);
    }
}
