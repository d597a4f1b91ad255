//! How a call is done: a pure function of what all ranks agree on.

use std::{fmt, str::FromStr};

use super::{bindings, layout::Layout, split::PACK_BYTES};
use crate::{Error, Result};

/// How an all-reduce moves its data.
///
/// All of them reduce in rank order in f32 with one rounding, so all give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank stores its input into all peers' staging, and reduces all of it. One hop, (N−1)·S bytes out of each.
    OneShot,
    /// Reduce-scatter, then all-gather, by stores into the peers' staging. Two hops, 2(N−1)/N·S bytes out of each.
    TwoShot,
    /// Every rank stages its input in its own memory, and the peers load from there. A hop and a load there and back.
    OneShotPull,
    /// Reduce-scatter, then all-gather, by loads from the peers' staging.
    TwoShotPull,
    /// One-shot by LL packets, which carry their own signal: no fence, a third more bytes on GPUs and as many again on the
    /// host, whose packets are smaller.
    OneShotLl,
    /// Two-shot by LL packets.
    TwoShotLl,
    /// Every rank loads all peers' inputs where they are, without staging: for inputs in symmetric memory. Two barriers and
    /// a load there and back, (N−1)·S bytes out of each.
    OneShotDirect,
    /// Every rank loads its part of all peers' inputs where they are, and stores the result into all peers' outputs: for
    /// inputs and outputs in symmetric memory. Two barriers and a load there and back, 2(N−1)/N·S bytes out of each.
    TwoShotDirect,
    /// NCCL's all-reduce, behind a gate at which all ranks meet: a round of flags that tells ranks whose calls differ, and
    /// ends in an error where one doesn't come. What NCCL does is its own choice, and so are the bits. CUDA only, where NCCL
    /// was joined (`Options::nccl`).
    Nccl,
}

/// Where a call's tensors lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Placement {
    /// Anywhere.
    #[default]
    Anywhere,
    /// The input lies in symmetric memory, the output anywhere else.
    SymmetricInput,
    /// Both lie in symmetric memory, apart.
    Symmetric,
    /// The input is the output too, in symmetric memory.
    SymmetricInPlace,
}

impl Algorithm {
    /// All algorithms of this library, in the order of their codes: each gives the same bits.
    pub const ALL: [Algorithm; 8] = [
        Algorithm::OneShot,
        Algorithm::TwoShot,
        Algorithm::OneShotPull,
        Algorithm::TwoShotPull,
        Algorithm::OneShotLl,
        Algorithm::TwoShotLl,
        Algorithm::OneShotDirect,
        Algorithm::TwoShotDirect,
    ];

    /// Those that take tensors anywhere, through staging.
    pub const STAGED: [Algorithm; 6] = [
        Algorithm::OneShot,
        Algorithm::TwoShot,
        Algorithm::OneShotPull,
        Algorithm::TwoShotPull,
        Algorithm::OneShotLl,
        Algorithm::TwoShotLl,
    ];

    /// Whether it can reduce tensors that lie so.
    pub const fn serves(self, placement: Placement) -> bool {
        match self {
            Algorithm::OneShotDirect => matches!(placement, Placement::SymmetricInput | Placement::Symmetric),
            Algorithm::TwoShotDirect => matches!(placement, Placement::Symmetric | Placement::SymmetricInPlace),
            _ => true,
        }
    }

    /// Whether it reads the peers' tensors where they are.
    pub const fn is_direct(self) -> bool {
        matches!(self, Algorithm::OneShotDirect | Algorithm::TwoShotDirect)
    }

    fn every() -> impl Iterator<Item = Algorithm> {
        Algorithm::ALL.into_iter().chain([Algorithm::Nccl])
    }

    pub(crate) fn from_code(code: u32) -> Option<Algorithm> {
        Algorithm::every().find(|algorithm| algorithm.code() == code)
    }

    pub(crate) const fn code(self) -> u32 {
        match self {
            Algorithm::OneShot => bindings::PEERSUM_ONE_SHOT,
            Algorithm::TwoShot => bindings::PEERSUM_TWO_SHOT,
            Algorithm::OneShotPull => bindings::PEERSUM_ONE_SHOT_PULL,
            Algorithm::TwoShotPull => bindings::PEERSUM_TWO_SHOT_PULL,
            Algorithm::OneShotLl => bindings::PEERSUM_ONE_SHOT_LL,
            Algorithm::TwoShotLl => bindings::PEERSUM_TWO_SHOT_LL,
            Algorithm::OneShotDirect => bindings::PEERSUM_ONE_SHOT_DIRECT,
            Algorithm::TwoShotDirect => bindings::PEERSUM_TWO_SHOT_DIRECT,
            Algorithm::Nccl => bindings::PEERSUM_NCCL,
        }
    }

    /// Its name in commands and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::OneShot => "one-shot",
            Algorithm::TwoShot => "two-shot",
            Algorithm::OneShotPull => "one-shot-pull",
            Algorithm::TwoShotPull => "two-shot-pull",
            Algorithm::OneShotLl => "one-shot-ll",
            Algorithm::TwoShotLl => "two-shot-ll",
            Algorithm::OneShotDirect => "one-shot-direct",
            Algorithm::TwoShotDirect => "two-shot-direct",
            Algorithm::Nccl => "nccl",
        }
    }

    /// Rounds that a call of one chunk takes. On GPUs a two-shot by flags takes one more for each further chunk, since the
    /// second half of a chunk goes with the first half of the next; all others take as many again.
    pub const fn rounds(self) -> u32 {
        match self {
            Algorithm::OneShot | Algorithm::OneShotPull | Algorithm::OneShotLl | Algorithm::Nccl => 1,
            Algorithm::TwoShot | Algorithm::TwoShotPull | Algorithm::TwoShotLl => 2,
            Algorithm::OneShotDirect | Algorithm::TwoShotDirect => 2,
        }
    }

    /// Those of them that go by LL packets, which count epochs of their own; the rest are by flags.
    pub const fn packet_rounds(self) -> u32 {
        match self {
            Algorithm::OneShotLl => 1,
            Algorithm::TwoShotLl => 2,
            _ => 0,
        }
    }

    /// Bytes of the units that it splits a message into: a pack of 16 bytes, or the payload of a packet. The host's packets
    /// carry 4 bytes, and its units are that where these are 12.
    pub const fn unit_bytes(self) -> u64 {
        match self {
            Algorithm::OneShotLl | Algorithm::TwoShotLl => bindings::PEERSUM_LL_PAYLOAD_BYTES as u64,
            _ => PACK_BYTES,
        }
    }

    /// The most bytes of a message that one block can move in one chunk: the gate and the kernels both use it. `None` if
    /// nothing goes through slots, and there are no chunks.
    ///
    /// One-shot hands the whole chunk to every peer's slot. Two-shot hands each peer its part, and beside it the reduced part
    /// of the chunk before. The pulls stage the chunk in the rank's own slots of the half, which lie side by side.
    /// The host's packets have slots of their own, which hold less: [`Plan::chunk_bytes`] says what a call does.
    pub fn chunk_capacity(self, layout: &Layout) -> Option<u64> {
        let payload = layout.slot_bytes / PACK_BYTES * u64::from(bindings::PEERSUM_LL_PAYLOAD_BYTES);
        match self {
            Algorithm::OneShot => Some(layout.slot_bytes),
            Algorithm::OneShotPull => Some(layout.slot_bytes * u64::from(layout.world)),
            // Half a slot for each half of the algorithm, which overlap; of a pull the last slot for the second.
            Algorithm::TwoShot => Some(layout.slot_bytes / 2 * u64::from(layout.world)),
            Algorithm::TwoShotPull => Some(layout.slot_bytes * u64::from(layout.world.saturating_sub(1).max(1))),
            // A packet takes a pack of the slot.
            Algorithm::OneShotLl => Some(payload),
            Algorithm::TwoShotLl => Some(payload * u64::from(layout.world)),
            Algorithm::OneShotDirect | Algorithm::TwoShotDirect | Algorithm::Nccl => None,
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Algorithm::every().find(|algorithm| algorithm.name() == name).ok_or_else(|| {
            let names: Vec<_> = Algorithm::every().map(Algorithm::name).collect();
            format!("unknown algorithm '{name}'; there are {}", names.join(", "))
        })
    }
}

/// How one call is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Plan {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Blocks (CTAs) that share the message.
    pub blocks: u32,
    /// Threads of a block. The host backend has one, and a block is a thread there.
    pub threads: u32,
    /// Bytes that a block moves in one chunk: a multiple of [`Algorithm::unit_bytes`], or on the
    /// host of what its packets carry.
    pub chunk_bytes: u64,
}

/// What this library's part of a call by NCCL is: a round of flags by one block.
const GATE: Plan = Plan { algorithm: Algorithm::Nccl, blocks: 1, threads: 32, chunk_bytes: PACK_BYTES };

/// What a table says for one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The blocks it wants.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
}

impl Choice {
    /// NCCL, whose blocks are its own affair.
    pub const NCCL: Choice = Choice { algorithm: GATE.algorithm, blocks: GATE.blocks, threads: GATE.threads };
}

/// What is forced, whatever the choice: of [`Options`](crate::Options), or by whoever measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forced {
    /// The algorithm.
    pub algorithm: Option<Algorithm>,
    /// The blocks.
    pub blocks: Option<u32>,
    /// Threads of a block.
    pub threads: Option<u32>,
}

/// Choices where nothing was measured: a pure function of the message's bytes, the number of ranks, and where the tensors
/// lie.
pub type Priors = fn(bytes: u64, world: u32, placement: Placement) -> Choice;

/// What bounds the blocks of a call: given an algorithm and the threads of a block, how many can be resident together.
pub type Resident<'a> = &'a dyn Fn(Algorithm, u32) -> u32;

/// The plan of a message of `bytes` bytes, or why the forced choice can't run.
///
/// It must be the same on every rank: `layout`, `forced`, `resident` and where `choice` comes from are agreed when ranks
/// join, `bytes` and `placement` by the caller. `bytes` is not 0. What is forced stands before `choice`.
pub fn plan(
    bytes: u64,
    placement: Placement,
    layout: &Layout,
    forced: Forced,
    mut choice: Choice,
    resident: Resident<'_>,
) -> Result<Plan> {
    if let Some(algorithm) = forced.algorithm {
        choice.algorithm = algorithm;
    }
    if let Some(threads) = forced.threads {
        choice.threads = threads;
    }
    if choice.algorithm == Algorithm::Nccl {
        return Ok(Plan { algorithm: choice.algorithm, ..GATE });
    }
    if !choice.algorithm.serves(placement) {
        let reason = match choice.algorithm {
            Algorithm::OneShotDirect if placement == Placement::SymmetricInPlace => "it can't reduce in place",
            Algorithm::OneShotDirect => "it needs the input in symmetric memory (`Options::symmetric_bytes`)",
            _ => "it needs input and output in symmetric memory (`Options::symmetric_bytes`)",
        };
        return Err(Error::AlgorithmUnavailable { algorithm: choice.algorithm, reason: reason.into() });
    }
    // A block without a unit would wait for nobody and be waited for by nobody, but costs a launch.
    let units = bytes.div_ceil(choice.algorithm.unit_bytes());
    let most_by_size = units.min(u64::from(layout.max_blocks)) as u32;
    let most_resident = resident(choice.algorithm, choice.threads);
    if most_resident == 0 {
        // One block would be launched all the same, and wait for blocks that can't come while it is there.
        return Err(Error::AlgorithmUnavailable {
            algorithm: choice.algorithm,
            reason: format!("not one block of {} threads can be resident beside those of all ranks", choice.threads),
        });
    }
    let blocks = match forced.blocks {
        Some(forced) if forced > layout.max_blocks || forced > most_resident => {
            return Err(Error::AlgorithmUnavailable {
                algorithm: choice.algorithm,
                reason: format!(
                    "{forced} blocks of {} threads were forced, but only {} can be resident together",
                    choice.threads,
                    most_resident.min(layout.max_blocks)
                ),
            });
        }
        Some(forced) => forced,
        // Packets are for short calls, where it matters that the next call's blocks may come while these run.
        None if choice.algorithm.packet_rounds() > 0 => choice.blocks.min((most_resident / 2).max(1)),
        None => choice.blocks.min(most_resident),
    };
    let blocks = blocks.clamp(1, most_by_size.max(1));
    let unit_bytes = choice.algorithm.unit_bytes();
    let whole_block = || units.div_ceil(u64::from(blocks)) * unit_bytes;
    let chunk_bytes = choice.algorithm.chunk_capacity(layout).unwrap_or_else(whole_block);
    if choice.algorithm.is_direct() && chunk_bytes > u64::from(u32::MAX) * unit_bytes {
        return Err(Error::AlgorithmUnavailable {
            algorithm: choice.algorithm,
            reason: format!("{blocks} blocks would have more than 64 GiB each to reduce"),
        });
    }
    debug_assert!(chunk_bytes > 0 && chunk_bytes.is_multiple_of(unit_bytes));
    Ok(Plan { algorithm: choice.algorithm, blocks, threads: choice.threads, chunk_bytes })
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;
