//! What is chosen where nothing was measured on the machine at hand.

use crate::protocol::plan::{Algorithm, Choice};

/// The choice for a message of `bytes` bytes among `world` ranks.
///
/// Which protocol follows from the hops and bytes of each over NVLink. One-shot by packets takes one hop and sends
/// 4/3·(N−1)·S out of each GPU, two-shot by packets two hops and 8/3·(N−1)/N·S; the borders below are where the second hop
/// (about 0.8 µs) costs as much as the bytes it saves at 350 GB/s, rounded to a power of two. Where the message is so long
/// that the packets' extra third costs more than the fences they save (some 2 µs), flags take over, at N = 2 in one shot,
/// which sends the same bytes there as two.
///
/// Blocks and threads follow from a sweep on one GPU that the ranks shared (docs/measurements.md). So does the choice of
/// pull over push for long messages, which take as many bytes over NVLink: ranks that share a GPU can't rank the two.
pub(crate) fn choose(bytes: u64, world: u32) -> Choice {
    const KIB: u64 = 1 << 10;
    let (one_shot_up_to, packets_up_to) = match world {
        0..=2 => (512 * KIB, 512 * KIB),
        3 => (256 * KIB, 512 * KIB),
        4 => (128 * KIB, 512 * KIB),
        5 | 6 => (64 * KIB, 512 * KIB),
        _ => (32 * KIB, 512 * KIB),
    };
    let algorithm = if bytes <= one_shot_up_to {
        Algorithm::OneShotLl
    } else if bytes <= packets_up_to {
        Algorithm::TwoShotLl
    } else if world <= 2 {
        Algorithm::OneShot
    } else {
        Algorithm::TwoShotPull
    };
    let (threads, bytes_a_thread) = match (algorithm, bytes / KIB) {
        (Algorithm::OneShotLl, 0..=8) => (384, 12),
        (Algorithm::OneShotLl, 9..=32) => (128, 16),
        (Algorithm::OneShotLl, 33..=64) => (256, 16),
        _ => (512, 16),
    };
    let blocks = bytes.div_ceil(threads * bytes_a_thread).clamp(1, 64) as u32;
    Choice { algorithm, blocks, threads: threads as u32 }
}

#[cfg(test)]
mod tests;
