//! Tensors in symmetric memory: peers read and write them where they are.

use std::{
    fmt,
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
    slice,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use super::group::Group;
use crate::{Element, heap::Heap};

/// A tensor in a rank's symmetric memory, from
/// [`Communicator::symmetric_buffer`](super::Communicator::symmetric_buffer): peers read and write it where it is, with
/// no copy through staging. Between calls it is a slice of the caller's alone.
///
/// # When a call with it fails
///
/// A peer that is late may still be in the call that this rank has given up, and touch the memory that was lent to it.
/// So a buffer that was to be written is given other memory then, all zeros: what it held is lost. One that was only
/// read keeps what it holds, and moves to other memory when it is next written. Neither serves in further calls, which
/// the group would refuse anyway.
pub struct SymmetricBuffer<T: Element> {
    home: Home<T>,
    count: usize,
    /// A call that had it as its input has failed, so a peer may still read it.
    lent: AtomicBool,
}

enum Home<T> {
    Symmetric { at: NonNull<T>, piece: Range<u64>, rank: u32, heap: Arc<Heap>, group: Arc<Group> },
    Own(Vec<T>),
}

// SAFETY: the memory is this buffer's alone, but in calls, which order what they do with it; where it lies does not
// depend on the thread, and the elements are plain data.
unsafe impl<T: Element> Send for SymmetricBuffer<T> {}
// SAFETY: shared references only read.
unsafe impl<T: Element> Sync for SymmetricBuffer<T> {}

impl<T: Element> SymmetricBuffer<T> {
    /// Zeros, or `None` if the heap has no room.
    pub(super) fn new(count: usize, bytes: usize, rank: u32, heap: &Arc<Heap>, group: &Arc<Group>) -> Option<Self> {
        let piece = heap.take(bytes as u64)?;
        let at = NonNull::new(group.segment(rank).symmetric(piece.start).cast::<T>())?;
        // SAFETY: the piece is this buffer's from here on, and has room; its start is a multiple of 256 in a
        // page-aligned segment. Zeros are elements of all types.
        unsafe { at.as_ptr().write_bytes(0, count) };
        let (heap, group) = (heap.clone(), group.clone());
        Some(SymmetricBuffer {
            home: Home::Symmetric { at, piece, rank, heap, group },
            count,
            lent: AtomicBool::new(false),
        })
    }

    /// Where it lies in the segment of this rank of this group, if it does.
    pub(super) fn offset(&self, of: &Arc<Group>, of_rank: u32) -> Option<u64> {
        match &self.home {
            Home::Symmetric { piece, rank, group, .. } if Arc::ptr_eq(group, of) && *rank == of_rank => {
                (!self.lent.load(Relaxed)).then_some(piece.start)
            }
            _ => None,
        }
    }

    /// Its address, for a call.
    pub(super) fn address(&self) -> *const T {
        match &self.home {
            Home::Symmetric { at, .. } => at.as_ptr().cast_const(),
            Home::Own(elements) => elements.as_ptr(),
        }
    }

    /// A call that read it has failed.
    pub(super) fn stay_lent(&self) {
        self.lent.store(true, Relaxed);
    }

    /// A call that wrote it has failed: peers may still write what it had.
    pub(super) fn leave(&mut self) {
        self.lent.store(true, Relaxed);
        self.move_to(vec![T::from_f32(0.0); self.count]);
    }

    fn move_to(&mut self, elements: Vec<T>) {
        if let Home::Symmetric { .. } = self.home {
            // The piece is not put back: nobody may be given it while a peer may touch it.
            self.home = Home::Own(elements);
        }
    }
}

impl<T: Element> Deref for SymmetricBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the piece or the vector has so many elements, which were written. Nobody writes them: the owner has
        // no `&mut` now, and peers write in calls alone, which hold one; if such a call failed they write other
        // memory.
        unsafe { slice::from_raw_parts(self.address(), self.count) }
    }
}

impl<T: Element> DerefMut for SymmetricBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        if self.lent.load(Relaxed) {
            self.move_to(self.to_vec());
        }
        match &mut self.home {
            // SAFETY: as in `deref`; and nobody reads them either, since no call is under way or was left by this rank.
            Home::Symmetric { at, .. } => unsafe { slice::from_raw_parts_mut(at.as_ptr(), self.count) },
            Home::Own(elements) => elements,
        }
    }
}

impl<T: Element> Drop for SymmetricBuffer<T> {
    fn drop(&mut self) {
        if let Home::Symmetric { piece, heap, .. } = &self.home
            && !self.lent.load(Relaxed)
        {
            heap.put_back(piece.clone());
        }
    }
}

impl<T: Element> fmt::Debug for SymmetricBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SymmetricBuffer").field("count", &self.count).finish_non_exhaustive()
    }
}
