//! What ranks must agree on in a call, and the flag word that carries it.

use std::fmt;

use super::{
    bindings,
    plan::{Algorithm, Plan},
};
use crate::{DType, ReduceOp};

/// What every rank must do alike in one call.
///
/// ```text
/// all_reduce of 4096 x bf16, sum (two-shot-ll, 8 blocks of 512 threads)
/// ```
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
    /// Elements of the message.
    pub fn count(&self) -> u64 {
        self.bytes / self.dtype.size() as u64
    }

    /// A hash of all of it but the threads per block, which peers need not share. Never 0.
    pub fn hash(&self) -> u32 {
        let [bytes, codes, blocks_threads, chunk_bytes] = self.words();
        let words = [bytes, codes, blocks_threads & u64::from(u32::MAX), chunk_bytes, self.offsets[0], self.offsets[1]];
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

    /// All of it but the offsets as plain data, for memory that ranks of the host share.
    pub(crate) fn words(&self) -> [u64; WORDS] {
        let Call { bytes, dtype, op, plan, .. } = *self;
        [
            bytes,
            u64::from(dtype.code()) | u64::from(op.code()) << 8 | u64::from(plan.algorithm.code()) << 16,
            u64::from(plan.blocks) | u64::from(plan.threads) << 32,
            plan.chunk_bytes,
        ]
    }

    /// From such memory; `None` if no call was ever written there.
    pub(crate) fn from_words(words: [u64; WORDS]) -> Option<Call> {
        let [bytes, codes, blocks_threads, chunk_bytes] = words;
        let code = |shift: u32| usize::from((codes >> shift) as u8);
        let (blocks, threads) = (blocks_threads as u32, (blocks_threads >> 32) as u32);
        let plan = Plan { algorithm: Algorithm::from_code(code(16) as u32)?, blocks, threads, chunk_bytes };
        let (dtype, op) = (*DType::ALL.get(code(0))?, *ReduceOp::ALL.get(code(8))?);
        let call = Call { bytes, dtype, op, plan, offsets: [0; 2] };
        (bytes != 0).then_some(call)
    }
}

/// Words of [`Call::words`].
pub(crate) const WORDS: usize = 4;

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { algorithm, blocks, threads, .. } = self.plan;
        if algorithm == Algorithm::Nccl {
            return write!(f, "all_reduce of {} x {}, {} ({algorithm})", self.count(), self.dtype, self.op);
        }
        let many = |number: u32| if number == 1 { "" } else { "s" };
        write!(
            f,
            "all_reduce of {} x {}, {} ({algorithm}, {blocks} block{} of {threads} thread{}{})",
            self.count(),
            self.dtype,
            self.op,
            many(blocks),
            many(threads),
            if algorithm.is_direct() {
                format!(", at {:#x} and {:#x} of the segment", self.offsets[0], self.offsets[1])
            } else {
                String::new()
            }
        )
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

    fn call() -> Call {
        let plan = Plan { algorithm: Algorithm::OneShot, blocks: 4, threads: 256, chunk_bytes: 4096 };
        Call { bytes: 8192, dtype: DType::BF16, op: ReduceOp::Sum, plan, offsets: [0; 2] }
    }

    #[test]
    fn every_part_of_a_call_changes_the_hash_but_the_threads() {
        let base = call();
        let mut others = vec![base; 8];
        others[0].bytes += 2;
        others[1].dtype = DType::F16;
        others[2].op = ReduceOp::Max;
        others[3].plan.algorithm = Algorithm::TwoShot;
        others[4].plan.blocks += 1;
        others[5].plan.chunk_bytes += 128;
        others[6].offsets[0] = 256;
        others[7].offsets[1] = 256;
        for other in others {
            assert_ne!(base.hash(), other.hash(), "{other:?}");
        }
        let mut same = base;
        same.plan.threads = 512;
        assert_eq!(base.hash(), same.hash());
    }

    #[test]
    fn a_call_survives_its_words_and_fresh_memory_is_none() {
        for algorithm in Algorithm::ALL.into_iter().chain([Algorithm::Nccl]) {
            for dtype in DType::ALL {
                for op in ReduceOp::ALL {
                    let plan = Plan { algorithm, blocks: 64, threads: 512, chunk_bytes: 1 << 40 };
                    let call = Call { bytes: u64::MAX, dtype, op, plan, offsets: [0; 2] };
                    assert_eq!(Call::from_words(call.words()), Some(call));
                }
            }
        }
        assert_eq!(Call::from_words([0; WORDS]), None);
        assert_eq!(Call::from_words([1, u64::MAX, 1, 1]), None);
    }

    #[test]
    fn a_call_says_what_it_is() {
        assert_eq!(call().to_string(), "all_reduce of 4096 x bf16, sum (one-shot, 4 blocks of 256 threads)");
        let mut one = call();
        one.plan = Plan { algorithm: Algorithm::TwoShotPull, blocks: 1, threads: 1, ..one.plan };
        one.dtype = DType::F32;
        assert_eq!(one.to_string(), "all_reduce of 2048 x f32, sum (two-shot-pull, 1 block of 1 thread)");
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
