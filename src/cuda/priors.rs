//! What is chosen where nothing was measured on the machine at hand.

use crate::protocol::plan::{Algorithm, Choice, Placement};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The choice for a message of `bytes` bytes among `world` ranks.
///
/// Which protocol follows from the hops and bytes of each over NVLink. One-shot by packets takes one hop and sends
/// 4/3·(N−1)·S out of each GPU, two-shot by packets two hops and 8/3·(N−1)/N·S; the borders below are where the second hop
/// (about 0.8 µs) costs as much as the bytes it saves at 350 GB/s, rounded to a power of two. Where the message is so long
/// that the packets' extra third costs more than the fences they save (some 2 µs), flags take over, at N = 2 in one shot,
/// which sends the same bytes there as two. Tensors in symmetric memory are read where they are from there on: two barriers
/// more than packets need, and no copy.
///
/// Blocks and threads follow from a sweep on one GPU that the ranks shared (docs/measurements.md). So does the choice of
/// pull over push for long messages, which take as many bytes over NVLink: ranks that share a GPU can't rank the two.
pub(crate) fn choose(bytes: u64, world: u32, placement: Placement) -> Choice {
    let one_shot_up_to = match world {
        0..=2 => 512 * KIB,
        3 => 256 * KIB,
        4 => 128 * KIB,
        5 | 6 => 64 * KIB,
        _ => 32 * KIB,
    };
    let direct = if world <= 2 && Algorithm::OneShotDirect.serves(placement) && bytes <= MIB {
        Algorithm::OneShotDirect
    } else {
        Algorithm::TwoShotDirect
    };
    let packets_up_to = if direct.serves(placement) { 128 * KIB } else { 512 * KIB };
    let algorithm = if bytes <= one_shot_up_to.min(packets_up_to) {
        Algorithm::OneShotLl
    } else if bytes <= packets_up_to {
        Algorithm::TwoShotLl
    } else if direct.serves(placement) {
        direct
    } else if world <= 2 {
        Algorithm::OneShot
    } else {
        Algorithm::TwoShotPull
    };
    let (threads, blocks) = match algorithm {
        Algorithm::OneShotLl => packet_a_thread(bytes.div_ceil(algorithm.unit_bytes()), world),
        _ => (512, bytes.div_ceil(512 * 16)),
    };
    Choice { algorithm, blocks: blocks.clamp(1, 64) as u32, threads: threads as u32 }
}

/// A packet a thread where blocks can be small enough for the next call's to come early beside them, of all ranks that may
/// share a GPU of 132 multiprocessors.
fn packet_a_thread(packets: u64, world: u32) -> (u64, u64) {
    let most_blocks = u64::from(66 / world.max(1)).clamp(1, 32);
    let threads = packets.div_ceil(most_blocks).next_multiple_of(32).clamp(128, 512);
    (threads, packets.div_ceil(threads))
}

#[cfg(test)]
mod tests;
