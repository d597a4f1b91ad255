//! What the ranks of a group share, and how a group ends.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use super::{
    driver::Device,
    memory::{Record, Segment},
    peers::Vigil,
};
use crate::{
    Algorithm, DType, Error, Phase, Plan, ReduceOp, Result,
    protocol::{bindings, call::Call, layout::Layout},
};

/// How long a check waits for the record of a rank that is in another call. Its kernel looks up every some hundred
/// microseconds, so it is there, or as good as never.
const PATIENCE_WITH_PEER: Duration = Duration::from_millis(50);

/// What all communicators of a group hold, and its graphs.
pub(crate) struct Group {
    /// This rank.
    pub(crate) rank: u32,
    pub(crate) ending: Arc<Ending>,
    /// The regions of every segment, one behind the other: for flags and their slots, and for LL packets.
    pub(crate) regions: [Layout; 2],
    /// Of all ranks; of the others none, if ranks don't reach each other's memory.
    pub(crate) segments: Vec<Option<Arc<Segment>>>,
    pub(crate) devices: Vec<Arc<Device>>,
    /// Goes last: this rank leaves when nothing of it runs any more.
    pub(crate) _vigil: Option<Vigil>,
}

impl Group {
    /// The rank's own segment.
    pub(crate) fn own(&self) -> &Segment {
        self.segments[self.rank as usize].as_ref().expect("every rank has its own")
    }
}

/// How a group ends, if it does before its communicators go. It holds no memory but the ranks' records.
pub(crate) struct Ending {
    /// For all ranks alike, once one has found out.
    failure: OnceLock<Error>,
    records: Vec<Arc<Record>>,
    /// 1 + a rank that has left in order, or 0.
    left: AtomicUsize,
}

impl Ending {
    pub(crate) fn new(records: Vec<Arc<Record>>) -> Ending {
        Ending { failure: OnceLock::new(), records, left: AtomicUsize::new(0) }
    }

    pub(crate) fn record(&self, rank: u32) -> &Record {
        &self.records[rank as usize]
    }

    /// Whether it has come.
    pub(crate) fn has_come(&self) -> bool {
        self.records.iter().any(|record| record.has_given_up() || record.abort_requested() != 0)
    }

    /// The failure, if there is one.
    pub(crate) fn check(&self) -> Result<()> {
        if self.has_come() {
            return Err(self.failure.get_or_init(|| self.cause()).clone());
        }
        Ok(())
    }

    /// Whether rank `rank` can make another call: not once the group has ended, nor without a rank that has left.
    pub(crate) fn check_for_call(&self, rank: usize) -> Result<()> {
        self.check()?;
        match self.left.load(Ordering::Acquire).checked_sub(1) {
            None => Ok(()),
            Some(peer) => Err(Error::PeerLeft { rank, peer }),
        }
    }

    /// Rank `peer` has left in order: it comes to no further call.
    pub(crate) fn has_left(&self, peer: usize) {
        self.left.store(1 + peer, Ordering::Release);
    }

    /// Ends every rank's wait, now and later, as the caller asks.
    pub(crate) fn request_abort(&self) {
        self.request(BY_CALLER);
    }

    /// Ends the group for this reason, unless it has ended already.
    pub(crate) fn fail(&self, error: Error) {
        if !self.has_come() {
            let reason = reason_of(&error);
            // Every process finds that out, each for itself: the first to say so says it for all.
            if !matches!(error, Error::PeerGone { .. }) {
                self.failure.get_or_init(|| error);
            }
            self.request(reason);
        }
    }

    /// The reason in the first record is the group's.
    fn request(&self, reason: u32) {
        self.records.iter().for_each(|record| record.request_abort(reason));
    }

    /// What ended the group: the first cause, not what it did to the others. Only once something has.
    #[cold]
    fn cause(&self) -> Error {
        // A rank writes its record before it tells the others, so where one was seen, the record of its cause is there.
        let records: Vec<_> = self.records.iter().map(|record| record.read()).collect();
        let mut aborted = None;
        for record in records.iter().flatten() {
            match self.error_of(record) {
                error @ Error::Aborted { .. } => aborted = aborted.or(Some(error)),
                cause => return cause,
            }
        }
        let asked = self.records.iter().map(|record| record.abort_requested()).find(|&reason| reason != 0);
        asked.map(error_of_reason).or(aborted).unwrap_or(Error::Aborted { by: None })
    }

    fn error_of(&self, record: &bindings::peersum_record) -> Error {
        let peers = self.records.get(record.peer as usize);
        let peers = match record.reason {
            // The peer finds that out too, or that this rank did, and gives up.
            bindings::PEERSUM_GAVE_UP_MISMATCH => peers.and_then(|peers| peers.read_within(PATIENCE_WITH_PEER)),
            _ => None,
        };
        error_of(record, peers.as_ref())
    }
}

/// Why a host asks for an abort, as a word that hosts of other processes read: the caller's wish, or in the low byte what was
/// found, then the rank that found it, and of whom.
const BY_CALLER: u32 = 1;
const GONE: u32 = 2;
const FAILED: u32 = 3;

fn reason_of(error: &Error) -> u32 {
    match error {
        Error::PeerGone { rank, peer } => GONE | (*rank as u32) << 8 | (*peer as u32) << 16,
        Error::Nccl { rank, .. } | Error::NcclTimeout { rank, .. } => FAILED | (*rank as u32) << 8,
        _ => BY_CALLER,
    }
}

fn error_of_reason(reason: u32) -> Error {
    let (rank, peer) = ((reason >> 8 & 0xff) as usize, (reason >> 16 & 0xff) as usize);
    match reason & 0xff {
        GONE => Error::PeerGone { rank, peer },
        FAILED => Error::Aborted { by: Some(rank) },
        _ => Error::Aborted { by: None },
    }
}

/// What a rank's record says; of a mismatch, together with its peer's.
fn error_of(record: &bindings::peersum_record, peers: Option<&bindings::peersum_record>) -> Error {
    let phase = match record.phase {
        bindings::PEERSUM_PHASE_REDUCE_SCATTER => Phase::ReduceScatter,
        bindings::PEERSUM_PHASE_ALL_GATHER => Phase::AllGather,
        bindings::PEERSUM_PHASE_ENTRY => Phase::Entry,
        bindings::PEERSUM_PHASE_EXIT => Phase::Exit,
        bindings::PEERSUM_PHASE_GATE => Phase::Gate,
        _ => Phase::Exchange,
    };
    let (rank, peer) = (record.rank as usize, record.peer as usize);
    let (block, epoch) = (record.block, record.epoch);
    match record.reason {
        bindings::PEERSUM_GAVE_UP_TIMEOUT => {
            Error::PeerTimeout { rank, peer, block, epoch, phase, waited: Duration::from_nanos(record.waited_ns) }
        }
        bindings::PEERSUM_GAVE_UP_MISMATCH => {
            let Some(call) = call_of(record) else { return Error::Aborted { by: Some(rank) } };
            let peer_call = peers.and_then(call_of);
            if peer_call.is_some_and(|peer_call| peer_call.hash() == call.hash()) {
                // The peer had given up this same call, and its next ones left their flags as they went through undone.
                return Error::Aborted { by: Some(peer) };
            }
            let (call, peer_call) = (Box::new(call), peer_call.map(Box::new));
            Error::Mismatch { rank, call, peer, peer_call, block, epoch }
        }
        _ if record.abort == bindings::PEERSUM_ABORT_BY_HOST => Error::Aborted { by: None },
        _ => Error::Aborted { by: Some(record.abort.saturating_sub(1) as usize) },
    }
}

/// Where peers look for a call's tensors, of where they lie from the start of their segment, if they look at all.
pub(crate) fn offsets(algorithm: Algorithm, input: u64, output: u64) -> [u64; 2] {
    match algorithm {
        Algorithm::OneShotDirect => [input, 0],
        Algorithm::TwoShotDirect => [input, output],
        _ => [0, 0],
    }
}

/// The call that a rank gave up. `None` if the record says none: other processes can write theirs.
fn call_of(record: &bindings::peersum_record) -> Option<Call> {
    let dtype = *DType::ALL.get(record.dtype as usize)?;
    let op = *ReduceOp::ALL.get(record.op as usize)?;
    let algorithm = Algorithm::from_code(record.algorithm)?;
    let chunk_bytes = record.chunk_units.checked_mul(algorithm.unit_bytes())?;
    let plan = Plan { algorithm, blocks: record.blocks, threads: record.threads, chunk_bytes };
    let offsets = offsets(algorithm, record.input, record.output);
    Some(Call { bytes: record.count.checked_mul(dtype.size() as u64)?, dtype, op, plan, offsets })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_different_calls_are_a_mismatch_and_of_one_call_are_not() {
        let record = |rank, peer, reason, count| bindings::peersum_record {
            abort_requested: 0,
            state: 1,
            reason,
            rank,
            peer,
            block: 3,
            phase: bindings::PEERSUM_PHASE_EXCHANGE,
            epoch: 7,
            abort: 1,
            dtype: DType::F16.code(),
            op: ReduceOp::Max.code(),
            algorithm: Algorithm::OneShotLl.code(),
            blocks: 4,
            threads: 128,
            count,
            chunk_units: 10,
            input: 256,
            output: 512,
            expected: 0,
            observed: 0,
            waited_ns: 0,
        };
        let plan = Plan { algorithm: Algorithm::OneShotLl, blocks: 4, threads: 128, chunk_bytes: 120 };
        let offsets = [0; 2];
        let call = |count: u64| Call { bytes: count * 2, dtype: DType::F16, op: ReduceOp::Max, plan, offsets };
        let noticed = record(2, 0, bindings::PEERSUM_GAVE_UP_MISMATCH, 100);
        let mismatch = |peer_call: Option<Call>| {
            let (call, peer_call) = (Box::new(call(100)), peer_call.map(Box::new));
            Error::Mismatch { rank: 2, call, peer: 0, peer_call, block: 3, epoch: 7 }
        };
        let aborted = |count| record(0, 2, bindings::PEERSUM_GAVE_UP_ABORTED, count);
        assert_eq!(error_of(&noticed, Some(&aborted(99))), mismatch(Some(call(99))));
        assert_eq!(error_of(&noticed, None), mismatch(None));
        assert_eq!(error_of(&noticed, Some(&aborted(100))), Error::Aborted { by: Some(0) });
    }

    /// As another process could leave it there.
    #[test]
    fn a_record_of_any_words_is_some_error() {
        let mut state = 1u32;
        let mut word = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        for _ in 0..10_000 {
            let mut records = [(); 2].map(|()| {
                // SAFETY: a record is plain numbers, for which any bytes are a value.
                unsafe { std::mem::zeroed::<bindings::peersum_record>() }
            });
            for record in &mut records {
                (record.reason, record.rank, record.peer, record.abort) = (word() % 5, word(), word(), word());
                (record.dtype, record.op, record.algorithm) = (word() % 4, word() % 6, word() % 12);
                (record.blocks, record.threads, record.phase) = (word(), word(), word() % 9);
                (record.count, record.chunk_units) = (u64::from(word()) << (word() % 41), u64::from(word()) << 40);
            }
            assert!(!error_of(&records[0], Some(&records[1])).to_string().is_empty());
        }
    }

    #[test]
    fn reasons_come_back_from_their_words() {
        let gone = Error::PeerGone { rank: 7, peer: 3 };
        assert_eq!(error_of_reason(reason_of(&gone)), gone);
        let nccl = Error::NcclTimeout { rank: 5, call: "ncclAllReduce", waited: Duration::ZERO };
        assert_eq!(error_of_reason(reason_of(&nccl)), Error::Aborted { by: Some(5) });
        assert_eq!(error_of_reason(BY_CALLER), Error::Aborted { by: None });
        assert!([gone, nccl].iter().all(|error| reason_of(error) > BY_CALLER));
    }
}
