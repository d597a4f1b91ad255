//! How a message is split: over blocks, over chunks, over ranks. All in packs of 16 bytes; the last may be partial.

use std::ops::Range;

use super::bindings;

/// Bytes of a pack.
pub const PACK_BYTES: u64 = bindings::PEERSUM_PACK_BYTES as u64;

/// Part `index` of `total` units over `parts` parts, as even as can be, the longer parts first.
pub fn split(total: u64, parts: u64, index: u64) -> Range<u64> {
    let start = |index: u64| {
        let (base, longer) = (total / parts, total % parts);
        base * index + index.min(longer)
    };
    start(index)..start(index + 1)
}

/// The packs that a message of so many bytes needs.
pub fn packs(bytes: u64) -> u64 {
    bytes.div_ceil(PACK_BYTES)
}

/// The packs of block `block` of `blocks`.
pub fn block_packs(bytes: u64, blocks: u32, block: u32) -> Range<u64> {
    split(packs(bytes), u64::from(blocks), u64::from(block))
}

/// `range` in pieces of `chunk` packs; the last may be shorter.
pub fn chunks(range: Range<u64>, chunk: u64) -> impl Iterator<Item = Range<u64>> {
    debug_assert!(chunk > 0);
    let end = range.end;
    range.step_by(chunk as usize).map(move |start| start..(start + chunk).min(end))
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_cover_the_whole_once_and_differ_by_one_at_most(total in 0u64..1 << 40, parts in 1u64..200) {
            let mut next = 0;
            let (mut least, mut most) = (u64::MAX, 0);
            for index in 0..parts {
                let part = split(total, parts, index);
                prop_assert_eq!(part.start, next);
                next = part.end;
                least = least.min(part.end - part.start);
                most = most.max(part.end - part.start);
            }
            prop_assert_eq!(next, total);
            prop_assert!(most - least <= 1);
        }

        #[test]
        fn chunks_cover_a_range_once(start in 0u64..1000, length in 0u64..1000, chunk in 1u64..300) {
            let mut next = start;
            for piece in chunks(start..start + length, chunk) {
                prop_assert_eq!(piece.start, next);
                prop_assert!(piece.end > piece.start && piece.end - piece.start <= chunk);
                next = piece.end;
            }
            prop_assert_eq!(next, start + length);
        }
    }
}
