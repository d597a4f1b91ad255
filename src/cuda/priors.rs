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
    // A one-shot reads more bytes than a two-shot, and pays for no fence.
    let one_shot_direct_up_to = match world {
        0..=2 => MIB,
        3 | 4 => 256 * KIB,
        _ => 0,
    };
    let direct = if bytes <= one_shot_direct_up_to && Algorithm::OneShotDirect.serves(placement) {
        Algorithm::OneShotDirect
    } else {
        Algorithm::TwoShotDirect
    };
    let packets_up_to = match (direct.serves(placement), world) {
        (false, _) => 512 * KIB,
        (true, 0..=2) => 256 * KIB,
        (true, _) => 128 * KIB,
    };
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
    let units = bytes.div_ceil(algorithm.unit_bytes());
    let (blocks, threads) = match algorithm {
        Algorithm::OneShotLl => one_packet_a_thread_or_two(units, world),
        Algorithm::OneShotDirect => few_packs_a_thread(units, world),
        Algorithm::TwoShotDirect => few_packs_a_thread(units.div_ceil(u64::from(world)), world),
        _ => (bytes.div_ceil(512 * 16), 512),
    };
    Choice { algorithm, blocks: blocks.clamp(1, 64) as u32, threads: threads as u32 }
}

/// The most blocks beside which the next call's may come early, of all ranks that may share a GPU of 132 multiprocessors.
fn small_grid(world: u32) -> u64 {
    u64::from(66 / world.max(1)).clamp(1, 32)
}

/// Blocks and threads for the short form of the one-shot by packets, as far as it goes.
fn one_packet_a_thread_or_two(packets: u64, world: u32) -> (u64, u64) {
    let least = if world <= 2 { 128 } else { 64 };
    let a_thread = if packets > 512 * small_grid(world) { 2 } else { 1 };
    let threads = packets.div_ceil(a_thread * small_grid(world)).next_multiple_of(32).clamp(least, 512);
    (packets.div_ceil(a_thread * threads), threads)
}

/// Blocks and threads for as many packs a thread as the direct kernels have under way, or more.
fn few_packs_a_thread(packs: u64, world: u32) -> (u64, u64) {
    let a_thread = if world <= 2 { 4 } else { 2 };
    let threads = packs.div_ceil(a_thread * small_grid(world)).next_multiple_of(32).clamp(128, 512);
    (packs.div_ceil(a_thread * threads), threads)
}

#[cfg(test)]
mod tests;
