//! Which algorithm a call takes where none is forced: a pure function, the same on every rank.

use crate::protocol::plan::{Algorithm, Choice, Placement};

/// The most ranks of a group.
pub(super) const MAX_RANKS: u32 = 128;
/// The most blocks of a rank, which are its threads.
pub(super) const MAX_BLOCKS: u32 = 32;
/// Bytes of a message for each thread that shares it. It takes a thread some microseconds to wake, in which one alone
/// reduces as much.
const BYTES_OF_A_BLOCK: u64 = 128 << 10;
/// Bytes of staging per rank, both halves together, where the caller doesn't say: a chunk of 1 MiB between two ranks,
/// which stays in the cache.
pub(super) const STAGING_BYTES: usize = 4 << 20;

/// From here on outputs are written past the caches, unless they take the place of the inputs.
pub(super) const STREAMED_OUTPUT_BYTES: u64 = 8 << 20;

/// Packets are never chosen: twice the bytes cost more than the flag's line that they save, at every size
/// (docs/measurements.md).
///
/// Among more than two, a one-shot reads the message once for each rank, so it hands over the earlier the more there
/// are: at 64 KiB with four it takes longer by a fifth, at 32 KiB less by as much. Pulling copies it once and not once for
/// each peer.
const ONE_SHOT_BYTES_OF_ALL_RANKS: u64 = 128 << 10;
/// Between two ranks all algorithms hand over as many bytes. A two-shot reads its input once, converts half as much,
/// and stores to the peer while it waits for loads; a one-shot has one flag less to wait for.
const TWO_SHOT_BYTES_OF_TWO: u64 = 64 << 10;
/// Of tensors in symmetric memory, a one-shot fetches the peers' inputs once for each rank, and a two-shot hands over
/// what is reduced, which costs more lines that have to be fetched to be written.
const DIRECT_ONE_SHOT_BYTES_OF_ALL_RANKS: u64 = 32 << 10;

/// What a group has to choose from: `threads` of a rank.
pub(super) fn choose(bytes: u64, world: u32, placement: Placement, threads: u32) -> Choice {
    let of_all_ranks = bytes.saturating_mul(world.into());
    let algorithm = match placement {
        Placement::Symmetric if of_all_ranks <= DIRECT_ONE_SHOT_BYTES_OF_ALL_RANKS => Algorithm::OneShotDirect,
        Placement::Symmetric | Placement::SymmetricInPlace => Algorithm::TwoShotDirect,
        _ if world == 2 && bytes < TWO_SHOT_BYTES_OF_TWO => Algorithm::OneShot,
        _ if world == 2 => Algorithm::TwoShot,
        _ if of_all_ranks <= ONE_SHOT_BYTES_OF_ALL_RANKS => Algorithm::OneShotPull,
        _ => Algorithm::TwoShotPull,
    };
    let blocks = u64::from(threads).min(bytes / BYTES_OF_A_BLOCK).max(1) as u32;
    Choice { algorithm, blocks, threads: 1 }
}
