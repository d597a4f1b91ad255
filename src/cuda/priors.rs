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
///
/// For two ranks all of it was measured, by `peersum tune` on two H200 over NVLink.
pub(crate) fn choose(bytes: u64, world: u32, placement: Placement) -> Choice {
    if world <= 2 {
        return between_two(bytes, placement);
    }
    let one_shot_up_to = match world {
        ..=3 => 256 * KIB,
        4 => 128 * KIB,
        5 | 6 => 64 * KIB,
        _ => 32 * KIB,
    };
    // A one-shot reads more bytes than a two-shot, and pays for no fence.
    let one_shot_direct_up_to = if world <= 4 { 256 * KIB } else { 0 };
    let direct = if bytes <= one_shot_direct_up_to && Algorithm::OneShotDirect.serves(placement) {
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

/// The last bytes of each step, and its grid, of the one-shot by packets between two ranks.
const PACKETS_BETWEEN_TWO: [(u64, u32, u32); 10] = [
    (KIB, 2, 64),
    (2 * KIB, 4, 64),
    (4 * KIB, 8, 64),
    (8 * KIB, 8, 96),
    (16 * KIB, 32, 64),
    (32 * KIB, 64, 64),
    (64 * KIB, 43, 128),
    (128 * KIB, 29, 384),
    (256 * KIB, 64, 352),
    (u64::MAX, 64, 512),
];

/// The choice for two ranks. Borders are rounded.
fn between_two(bytes: u64, placement: Placement) -> Choice {
    let choice = |algorithm, blocks, threads| Choice { algorithm, blocks, threads };
    let packets_up_to = if Algorithm::OneShotDirect.serves(placement) { 768 * KIB } else { 960 * KIB };
    if bytes <= packets_up_to {
        let (_, blocks, threads) =
            PACKETS_BETWEEN_TWO.into_iter().find(|&(last, ..)| bytes <= last).unwrap_or((0, 64, 512));
        return choice(Algorithm::OneShotLl, blocks, threads);
    }
    match placement {
        _ if Algorithm::OneShotDirect.serves(placement) => choice(Algorithm::OneShotDirect, 64, 384),
        Placement::SymmetricInPlace if bytes <= 2 * MIB => choice(Algorithm::TwoShotDirect, 32, 256),
        Placement::SymmetricInPlace => choice(Algorithm::TwoShotDirect, 64, 512),
        _ if bytes <= 4 * MIB => choice(Algorithm::OneShot, 64, 512),
        _ => choice(Algorithm::TwoShot, 64, 512),
    }
}

/// The most blocks beside which the next call's may come early, of all ranks that may share a GPU of 132 multiprocessors.
fn small_grid(world: u32) -> u64 {
    u64::from(66 / world.max(1)).clamp(1, 32)
}

/// Blocks and threads for the short form of the one-shot by packets, as far as it goes.
fn one_packet_a_thread_or_two(packets: u64, world: u32) -> (u64, u64) {
    let a_thread = if packets > 512 * small_grid(world) { 2 } else { 1 };
    let threads = packets.div_ceil(a_thread * small_grid(world)).next_multiple_of(32).clamp(64, 512);
    (packets.div_ceil(a_thread * threads), threads)
}

/// Blocks and threads for as many packs a thread as the direct kernels have under way, or more.
fn few_packs_a_thread(packs: u64, world: u32) -> (u64, u64) {
    let a_thread = 2;
    let threads = packs.div_ceil(a_thread * small_grid(world)).next_multiple_of(32).clamp(128, 512);
    (packs.div_ceil(a_thread * threads), threads)
}

#[cfg(test)]
mod tests;
