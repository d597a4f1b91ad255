//! What is chosen where nothing was measured on the machine at hand.

use crate::protocol::plan::{Algorithm, Choice};

/// The choice for a message of `bytes` bytes among `world` ranks.
///
/// Which protocol follows from the hops and bytes of each over NVLink, since ranks that share a GPU can't rank a push
/// against a pull; blocks and threads follow from a sweep on such a GPU (docs/measurements.md).
pub(crate) fn choose(bytes: u64, world: u32) -> Choice {
    // One-shot sends (N−1)·S out of each GPU, two-shot 2(N−1)/N·S but another hop: at N = 2 the same bytes.
    let one_shot_up_to: u64 = match world {
        0..=2 => u64::MAX,
        3 | 4 => 256 << 10,
        5 | 6 => 128 << 10,
        _ => 64 << 10,
    };
    let algorithm = if bytes <= one_shot_up_to { Algorithm::OneShot } else { Algorithm::TwoShot };
    let packs = bytes.div_ceil(16);
    let threads: u32 = if bytes <= 32 << 10 { 128 } else { 512 };
    // A pack a thread, until the blocks run out.
    let blocks = packs.div_ceil(u64::from(threads)).clamp(1, 64) as u32;
    Choice { algorithm, blocks, threads }
}

#[cfg(test)]
mod tests;
