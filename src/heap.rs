//! What is free of a rank's symmetric memory.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Mutex, PoisonError},
};

/// Every piece starts and ends at a multiple of this.
const PIECE_BYTES: u64 = 256;

/// What is free of a rank's heap, by first fit: ranks that allocate and free alike get the same offsets.
pub(crate) struct Heap {
    range: Range<u64>,
    /// Length by start, never two next to each other.
    free: Mutex<BTreeMap<u64, u64>>,
}

impl Heap {
    /// Over these addresses.
    pub(crate) fn new(range: Range<u64>) -> Heap {
        let length = range.end.saturating_sub(range.start);
        let free = if length > 0 { BTreeMap::from([(range.start, length)]) } else { BTreeMap::new() };
        Heap { range, free: Mutex::new(free) }
    }

    #[cfg_attr(any(not(feature = "cuda"), loom, shuttle), allow(dead_code))]
    pub(crate) fn start(&self) -> u64 {
        self.range.start
    }

    pub(crate) fn total(&self) -> u64 {
        self.range.end - self.range.start
    }

    pub(crate) fn free(&self) -> u64 {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).values().sum()
    }

    /// Whether all of `bytes` at `address` lie in the heap.
    #[cfg_attr(any(not(feature = "cuda"), loom, shuttle), allow(dead_code))]
    pub(crate) fn holds(&self, address: u64, bytes: u64) -> bool {
        address >= self.range.start && address.checked_add(bytes).is_some_and(|end| end <= self.range.end)
    }

    /// A free piece of so many bytes, whose start is a multiple of 256 if the heap's is.
    pub(crate) fn take(&self, bytes: u64) -> Option<Range<u64>> {
        let length = bytes.max(1).checked_next_multiple_of(PIECE_BYTES)?;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (&start, &room) = free.iter().find(|&(_, &room)| room >= length)?;
        free.remove(&start);
        if room > length {
            free.insert(start + length, room - length);
        }
        Some(start..start + length)
    }

    /// Frees a piece that was taken.
    pub(crate) fn put_back(&self, piece: Range<u64>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut start, mut length) = (piece.start, piece.end - piece.start);
        if let Some(after) = free.remove(&piece.end) {
            length += after;
        }
        if let Some((&before, &room)) =
            free.range(..start).next_back().filter(|&(&before, &room)| before + room == start)
        {
            free.remove(&before);
            (start, length) = (before, room + length);
        }
        free.insert(start, length);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_heap_gives_the_first_piece_that_fits() {
        let heap = Heap::new(4096..4096 + 1024);
        let pieces: Vec<_> = [1, 256, 257].map(|bytes| heap.take(bytes).unwrap()).into();
        assert_eq!(pieces, [4096..4352, 4352..4608, 4608..5120]);
        assert_eq!((heap.free(), heap.take(1)), (0, None));
        heap.put_back(pieces[1].clone());
        assert_eq!((heap.take(300), heap.take(256)), (None, Some(4352..4608)));
        assert_eq!(Heap::new(0..0).take(0), None);
        assert_eq!(heap.take(u64::MAX), None);
    }

    proptest! {
        /// Pieces never overlap, and once all are back the heap is whole.
        #[test]
        fn pieces_are_apart_and_come_back(steps in proptest::collection::vec((0usize..8, 0u64..3000), 1..100)) {
            let heap = Heap::new(256..256 + (16 << 10));
            let mut held: Vec<Range<u64>> = Vec::new();
            for (which, bytes) in steps {
                if which < held.len() {
                    heap.put_back(held.swap_remove(which));
                } else if let Some(piece) = heap.take(bytes) {
                    prop_assert!(heap.holds(piece.start, bytes));
                    prop_assert!(held.iter().all(|other| other.end <= piece.start || piece.end <= other.start));
                    held.push(piece);
                }
            }
            held.into_iter().for_each(|piece| heap.put_back(piece));
            prop_assert_eq!(heap.take(16 << 10), Some(256..256 + (16 << 10)));
        }
    }
}
