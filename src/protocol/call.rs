//! What ranks must agree on in a call, and the flag word that carries it.

use super::{bindings, plan::Plan};
use crate::{DType, ReduceOp};

/// What every rank must do alike in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// Bytes of the message.
    pub bytes: u64,
    /// The element type.
    pub dtype: DType,
    /// The reduction.
    pub op: ReduceOp,
    /// How it is done.
    pub plan: Plan,
    /// Where peers find the rank's input and output in its segment, if the plan is direct; else 0.
    pub offsets: [u64; 2],
}

impl Call {
    /// A hash of all of it but the threads per block, which peers need not share. Never 0.
    pub fn hash(&self) -> u32 {
        let words = [
            self.bytes,
            u64::from(self.dtype.code()) | u64::from(self.op.code()) << 8 | u64::from(self.plan.algorithm.code()) << 16,
            u64::from(self.plan.blocks),
            self.plan.chunk_bytes,
            self.offsets[0],
            self.offsets[1],
        ];
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for word in words {
            // The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
            state = state.wrapping_add(word).wrapping_add(0x9e37_79b9_7f4a_7c15);
            state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            state ^= state >> 31;
        }
        ((state >> 32) as u32).max(1)
    }
}

/// The word that a rank releases to its peers once a round is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    /// The round.
    pub epoch: u32,
    /// [`Call::hash`].
    pub hash: u32,
}

impl Flag {
    /// As it stands in memory.
    pub fn word(self) -> u64 {
        u64::from(self.hash) << bindings::PEERSUM_HASH_SHIFT | u64::from(self.epoch)
    }

    /// From memory; `None` if no flag was ever written there.
    pub fn from_word(word: u64) -> Option<Flag> {
        let flag = Flag { epoch: word as u32, hash: (word >> bindings::PEERSUM_HASH_SHIFT) as u32 };
        (flag.hash != 0).then_some(flag)
    }
}

/// The half that a round uses.
pub fn parity(epoch: u32) -> u32 {
    epoch & 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Algorithm;

    fn call() -> Call {
        let plan = Plan { algorithm: Algorithm::OneShot, blocks: 4, threads: 256, chunk_bytes: 4096 };
        Call { bytes: 8192, dtype: DType::BF16, op: ReduceOp::Sum, plan, offsets: [0; 2] }
    }

    #[test]
    fn every_part_of_a_call_changes_the_hash_but_the_threads() {
        let base = call();
        let mut others = vec![base; 6];
        others[0].bytes += 2;
        others[1].dtype = DType::F16;
        others[2].op = ReduceOp::Max;
        others[3].plan.algorithm = Algorithm::TwoShot;
        others[4].plan.blocks += 1;
        others[5].plan.chunk_bytes += 128;
        for other in others {
            assert_ne!(base.hash(), other.hash(), "{other:?}");
        }
        let mut same = base;
        same.plan.threads = 512;
        assert_eq!(base.hash(), same.hash());
    }

    #[test]
    fn a_flag_survives_the_word_and_fresh_memory_is_none() {
        for epoch in [0, 1, u32::MAX] {
            let flag = Flag { epoch, hash: call().hash() };
            assert_eq!(Flag::from_word(flag.word()), Some(flag));
        }
        assert_eq!(Flag::from_word(0), None);
    }

    #[test]
    fn halves_alternate_across_the_wrap() {
        assert_ne!(parity(u32::MAX), parity(u32::MAX.wrapping_add(1)));
    }
}
