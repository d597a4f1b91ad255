//! Which algorithm a call takes where none is forced: a pure function, the same on every rank.

use crate::protocol::plan::{Algorithm, Choice};

/// The most ranks of a group.
pub(super) const MAX_RANKS: u32 = 128;
/// Blocks of a rank: its one thread.
pub(super) const BLOCKS: u32 = 1;
/// Bytes of staging per rank, both halves together, where the caller doesn't say.
pub(super) const STAGING_BYTES: usize = 4 << 20;

pub(super) fn choose(_bytes: u64, _world: u32) -> Choice {
    Choice { algorithm: Algorithm::OneShot, blocks: BLOCKS, threads: 1 }
}
