//! Symmetric memory for the caller's tensors: pieces of a heap in each rank's segment.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{driver::Device, group::Group};
use crate::heap::Heap;

/// A piece of a rank's symmetric memory, from [`Communicator::symmetric_memory`](super::Communicator::symmetric_memory).
///
/// Dropping it waits for the work that was enqueued in the device's context, at most for the group's timeout and a second;
/// if work is still there then, the piece is not used again. The memory itself goes with the group, which it holds.
pub struct SymmetricMemory {
    piece: Range<u64>,
    bytes: usize,
    heap: Arc<Heap>,
    device: Arc<Device>,
    patience: Duration,
    _group: Arc<Group>,
}

impl SymmetricMemory {
    pub(crate) fn new(
        bytes: usize,
        heap: &Arc<Heap>,
        device: &Arc<Device>,
        patience: Duration,
        group: &Arc<Group>,
    ) -> Option<SymmetricMemory> {
        let piece = heap.take(bytes as u64)?;
        let (heap, device, group) = (heap.clone(), device.clone(), group.clone());
        Some(SymmetricMemory { piece, bytes, heap, device, patience, _group: group })
    }

    /// Its address on this rank's device: a multiple of 256.
    pub fn address(&self) -> u64 {
        self.piece.start
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for SymmetricMemory {
    fn drop(&mut self) {
        if self.device.quiesce(Instant::now() + self.patience) {
            self.heap.put_back(self.piece.clone());
        } else {
            let (device, bytes) = (self.device.ordinal, self.bytes);
            tracing::warn!(device, bytes, "work may still use a piece of symmetric memory: it is not used again");
        }
    }
}
