//! Which algorithm a call takes where none is forced: a pure function, the same on every rank.

use crate::protocol::plan::{Algorithm, Choice, Placement};

/// The most ranks of a group.
pub(super) const MAX_RANKS: u32 = 128;
/// Blocks of a rank: its one thread.
pub(super) const BLOCKS: u32 = 1;
/// Bytes of staging per rank, both halves together, where the caller doesn't say: a chunk of 1 MiB between two ranks,
/// which stays in the cache.
pub(super) const STAGING_BYTES: usize = 4 << 20;

/// From here on outputs are written past the caches.
pub(super) const STREAMED_OUTPUT_BYTES: u64 = 4 << 20;

/// Packets are never chosen: twice the bytes cost more than the flag's line that they save, at every size
/// (docs/measurements.md).
///
/// Between two ranks all algorithms move the same bytes: the two-shot has half as much to fetch in each round, which shows
/// up to 8 KiB, and from there on the one round less of the one-shot counts.
const TWO_RANKS_TWO_SHOT_BYTES: u64 = 8 << 10;
/// Among more, a one-shot reads the message once for each rank, so it hands over the earlier the more there are: at 64 KiB
/// with four. Pulling copies it once and not once for each peer.
const ONE_SHOT_BYTES_OF_ALL_RANKS: u64 = 256 << 10;

pub(super) fn choose(bytes: u64, world: u32, _: Placement) -> Choice {
    let algorithm = if world == 2 {
        if bytes <= TWO_RANKS_TWO_SHOT_BYTES { Algorithm::TwoShot } else { Algorithm::OneShot }
    } else if bytes.saturating_mul(world.into()) <= ONE_SHOT_BYTES_OF_ALL_RANKS {
        Algorithm::OneShotPull
    } else {
        Algorithm::TwoShotPull
    };
    Choice { algorithm, blocks: BLOCKS, threads: 1 }
}
