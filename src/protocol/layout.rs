//! Where things lie in a rank's segment of symmetric memory.

use super::bindings;
use crate::{Error, Result};

/// Bytes of the line that each flag has for itself.
pub const LINE_BYTES: u64 = bindings::PEERSUM_LINE_BYTES as u64;

/// The layout of every rank's segment: the same on all ranks, whatever the size of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Number of ranks.
    pub world: u32,
    /// The most blocks of a call.
    pub max_blocks: u32,
    /// Bytes that one rank hands to one block of one peer in one round: a multiple of [`LINE_BYTES`].
    pub slot_bytes: u64,
}

impl Layout {
    /// The layout whose staging takes at most `staging_bytes` a rank, both halves together.
    pub fn new(world: u32, max_blocks: u32, staging_bytes: usize) -> Result<Layout> {
        let slots = 2 * u64::from(world) * u64::from(max_blocks);
        let slot_bytes = staging_bytes as u64 / slots / LINE_BYTES * LINE_BYTES;
        if slot_bytes == 0 {
            return Err(Error::InvalidOption {
                option: "staging_bytes",
                value: staging_bytes.to_string(),
                reason: format!("{world} ranks with {max_blocks} blocks need at least {} bytes", slots * LINE_BYTES),
            });
        }
        if slot_bytes.checked_mul(slots).is_none_or(|bytes| bytes > isize::MAX as u64 / 2) {
            return Err(Error::InvalidOption {
                option: "staging_bytes",
                value: staging_bytes.to_string(),
                reason: "more than memory can be addressed by".into(),
            });
        }
        Ok(Layout { world, max_blocks, slot_bytes })
    }

    /// Byte offset of the flag line that rank `writer` writes for `block` in rounds of this parity.
    pub fn flag(&self, parity: u32, block: u32, writer: u32) -> u64 {
        debug_assert!(parity <= 2 && block < self.max_blocks && writer < self.world);
        u64::from(bindings::PEERSUM_CONTROL_BYTES) + self.line(parity, block, writer) * LINE_BYTES
    }

    /// Byte offset of the slot that holds what rank `source` hands to `block` in rounds of this parity.
    pub fn slot(&self, parity: u32, block: u32, source: u32) -> u64 {
        debug_assert!(parity <= 2 && block < self.max_blocks && source < self.world);
        self.flag(2, 0, 0) + self.line(parity, block, source) * self.slot_bytes
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        self.slot(2, 0, 0)
    }

    fn line(&self, parity: u32, block: u32, rank: u32) -> u64 {
        (u64::from(parity) * u64::from(self.max_blocks) + u64::from(block)) * u64::from(self.world) + u64::from(rank)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Field case A01 (vllm-project/vllm#2760): flags that share a word race.
    #[test]
    fn every_flag_word_has_one_writer_on_a_line_of_its_own() {
        for world in 1..=9 {
            let layout = Layout::new(world, 16, 8 << 20).unwrap();
            let mut lines = HashSet::new();
            for parity in 0..2 {
                for block in 0..16 {
                    for writer in 0..world {
                        let offset = layout.flag(parity, block, writer);
                        assert_eq!(offset % LINE_BYTES, 0);
                        assert!(lines.insert(offset), "two writers at {offset}");
                        assert!(offset >= u64::from(bindings::PEERSUM_CONTROL_BYTES));
                        assert!(offset + LINE_BYTES <= layout.slot(0, 0, 0));
                    }
                }
            }
        }
    }

    #[test]
    fn slots_are_disjoint_and_fill_the_staging() {
        for (world, max_blocks, staging) in [(1, 1, 256), (3, 5, 1 << 20), (8, 128, 32 << 20), (7, 64, 12345678)] {
            let layout = Layout::new(world, max_blocks, staging).unwrap();
            let mut next = layout.slot(0, 0, 0);
            for parity in 0..2 {
                for block in 0..max_blocks {
                    for source in 0..world {
                        assert_eq!(layout.slot(parity, block, source), next);
                        next += layout.slot_bytes;
                    }
                }
            }
            assert_eq!(layout.segment_bytes(), next);
            assert!(next - layout.slot(0, 0, 0) <= staging as u64);
        }
    }

    /// Field case A42 (flashinfer-ai/flashinfer#1223): sizes above 2 GiB.
    #[test]
    fn staging_above_4_gib_keeps_its_offsets_and_absurd_sizes_are_refused() {
        let layout = Layout::new(8, 128, 5 << 30).unwrap();
        assert!(layout.segment_bytes() > 5 << 30);
        assert_eq!(layout.slot(1, 127, 7) + layout.slot_bytes, layout.segment_bytes());
        for staging in [0, 1, (1 << 10) - 1, usize::MAX] {
            assert!(matches!(Layout::new(8, 128, staging), Err(Error::InvalidOption { .. })), "{staging}");
        }
    }
}
