//! How a group ended, as plain words in a segment: what one process found out, all return.
//!
//! A rank that gives up writes its record into its own segment, where nobody else writes, and only then enters itself
//! as the first to have ended the group, by one compare-exchange. So whoever sees the entry sees the whole record, and
//! nobody waits for a rank that may have been killed half-way.

use std::time::Duration;

use crate::{
    Error, Phase,
    protocol::{
        bindings,
        call::{self, Call},
    },
};

/// Words of a record.
pub(super) const WORDS: usize = 3 + 2 * call::WORDS;

const TIMEOUT: u64 = 1;
const MISMATCH: u64 = 2;
const GONE: u64 = 3;
const LEFT: u64 = 4;

/// What a rank gave up for. Other errors don't end a group.
pub(super) fn to_words(error: &Error) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    let head = |kind: u64, phase: u32, rank: usize, peer: usize| {
        kind | u64::from(phase) << 8 | (rank as u64) << 16 | (peer as u64) << 32
    };
    match error {
        Error::PeerTimeout { rank, peer, block, epoch, phase, waited } => {
            words[0] = head(TIMEOUT, code(*phase), *rank, *peer);
            words[1] = u64::from(*block) | u64::from(*epoch) << 32;
            words[2] = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        }
        Error::Mismatch { rank, call, peer, peer_call, block, epoch } => {
            words[0] = head(MISMATCH, 0, *rank, *peer);
            words[1] = u64::from(*block) | u64::from(*epoch) << 32;
            words[3..][..call::WORDS].copy_from_slice(&call.words());
            if let Some(call) = peer_call {
                words[3 + call::WORDS..].copy_from_slice(&call.words());
            }
        }
        Error::PeerGone { rank, peer } => words[0] = head(GONE, 0, *rank, *peer),
        Error::PeerLeft { rank, peer } => words[0] = head(LEFT, 0, *rank, *peer),
        _ => {}
    }
    words
}

/// What a rank's record says; `None` if it says nothing that makes sense, which only a peer that writes at random can
/// do.
pub(super) fn from_words(words: [u64; WORDS]) -> Option<Error> {
    let [head, place, waited, calls @ ..] = words;
    let (rank, peer) = (usize::from((head >> 16) as u16), usize::from((head >> 32) as u16));
    let (block, epoch) = (place as u32, (place >> 32) as u32);
    let call = |from: usize| Call::from_words(std::array::from_fn(|index| calls[from + index])).map(Box::new);
    Some(match head & 0xff {
        TIMEOUT => {
            let phase = phase((head >> 8) as u8)?;
            Error::PeerTimeout { rank, peer, block, epoch, phase, waited: Duration::from_nanos(waited) }
        }
        MISMATCH => Error::Mismatch { rank, call: call(0)?, peer, peer_call: call(call::WORDS), block, epoch },
        GONE => Error::PeerGone { rank, peer },
        LEFT => Error::PeerLeft { rank, peer },
        _ => return None,
    })
}

fn code(phase: Phase) -> u32 {
    match phase {
        Phase::Exchange => bindings::PEERSUM_PHASE_EXCHANGE,
        Phase::ReduceScatter => bindings::PEERSUM_PHASE_REDUCE_SCATTER,
        Phase::AllGather => bindings::PEERSUM_PHASE_ALL_GATHER,
        Phase::Entry => bindings::PEERSUM_PHASE_ENTRY,
        Phase::Exit => bindings::PEERSUM_PHASE_EXIT,
        Phase::Gate => bindings::PEERSUM_PHASE_GATE,
    }
}

fn phase(code: u8) -> Option<Phase> {
    let phases = [Phase::Exchange, Phase::ReduceScatter, Phase::AllGather, Phase::Entry, Phase::Exit, Phase::Gate];
    phases.into_iter().find(|&phase| self::code(phase) == u32::from(code))
}

/// From any bytes, as a peer's memory may hold.
#[cfg(fuzzing)]
pub(in crate::host) fn fuzz(bytes: &[u8]) {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(size_of::<u64>())) {
        *word = bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
    }
    let _ = from_words(words).map(|error| error.to_string());
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Algorithm, DType, Plan, ReduceOp};

    fn call(bytes: u64) -> Box<Call> {
        let plan = Plan { algorithm: Algorithm::TwoShotPull, blocks: 1, threads: 1, chunk_bytes: 1 << 20 };
        Box::new(Call { bytes, dtype: DType::F16, op: ReduceOp::Min, plan, offsets: [0; 2] })
    }

    #[test]
    fn what_ends_a_group_survives_its_words() {
        let (rank, peer, block, epoch) = (127, 126, 3, u32::MAX);
        let mut errors = vec![
            Error::PeerGone { rank, peer },
            Error::PeerLeft { rank, peer },
            Error::Mismatch { rank, call: call(8), peer, peer_call: Some(call(16)), block, epoch },
            Error::Mismatch { rank, call: call(8), peer, peer_call: None, block, epoch },
        ];
        for phase in (0..=255).filter_map(phase) {
            let waited = Duration::from_nanos(12_345_678_901);
            errors.push(Error::PeerTimeout { rank, peer, block, epoch, phase, waited });
        }
        assert_eq!(errors.len(), 4 + 6);
        for error in errors {
            assert_eq!(from_words(to_words(&error)), Some(error));
        }
        assert_eq!(from_words([0; WORDS]), None);
    }

    proptest! {
        #[test]
        fn words_at_random_are_an_error_or_nothing(words: [u64; WORDS], kind in 0u64..6, phase in 0u64..8) {
            let mut words = words;
            words[0] = words[0] >> 16 << 16 | phase << 8 | kind;
            if let Some(error) = from_words(words) {
                prop_assert!(!error.to_string().is_empty());
                prop_assert_eq!(from_words(to_words(&error)), Some(error));
            }
        }
    }
}
