//! The one bounded wait.

use super::{
    group::Group,
    sync::{self, Instant, Ordering},
};
use crate::{Error, Phase, Result, protocol::call::Flag};

/// Polls before the first yield, about 1.5 µs: a peer that runs answers within it. Spinning on would be for nothing where
/// the peer waits for this core.
const SPINS: u32 = 100;
/// Yields between two looks at the abort word and the clock.
const YIELDS: u32 = 16;

/// A rank's wait for its peers in one round.
pub(super) struct Wait<'a> {
    pub(super) group: &'a Group,
    pub(super) rank: u32,
    pub(super) block: u32,
    pub(super) phase: Phase,
    /// What every peer's flag must be.
    pub(super) flag: Flag,
}

impl Wait<'_> {
    /// Waits for all `peers`; one deadline holds for all of them together.
    ///
    /// What a peer wrote before it released its flag happens before the return.
    pub(super) fn for_all(&self, peers: impl Iterator<Item = u32>) -> Result<()> {
        let mut started = None;
        for peer in peers {
            self.for_one(peer, &mut started)?;
        }
        Ok(())
    }

    #[inline]
    fn for_one(&self, peer: u32, started: &mut Option<Instant>) -> Result<()> {
        for _ in 0..SPINS {
            if self.poll(peer)? {
                return Ok(());
            }
            sync::spin_loop();
        }
        self.patiently(peer, started)
    }

    #[cold]
    fn patiently(&self, peer: u32, started: &mut Option<Instant>) -> Result<()> {
        let started = *started.get_or_insert_with(Instant::now);
        loop {
            for _ in 0..YIELDS {
                if self.poll(peer)? {
                    return Ok(());
                }
                sync::yield_now();
            }
            let ended = self.group.check(self.rank);
            let waited = started.elapsed();
            if ended.is_err() || waited >= self.group.timeout {
                // The peer may have come since the last poll, or this thread may have slept in between; and others may have
                // done this round and failed in a later one.
                if self.poll(peer)? {
                    return Ok(());
                }
                ended?;
                return Err(self.group.give_up(
                    self.rank,
                    Error::PeerTimeout {
                        rank: self.rank as usize,
                        peer: peer as usize,
                        block: self.block,
                        epoch: self.flag.epoch,
                        phase: self.phase,
                        waited,
                    },
                ));
            }
        }
    }

    /// Whether `peer` has come. It is compared for equality: an older or newer epoch is just not this one.
    #[inline]
    fn poll(&self, peer: u32) -> Result<bool> {
        let half = self.group.flag_half(self.flag.epoch);
        let word = self.group.segment(self.rank).flag(half, self.block, peer).load(Ordering::Acquire);
        if word == self.flag.word() {
            return Ok(true);
        }
        match Flag::from_word(word) {
            Some(observed) if observed.epoch == self.flag.epoch => Err(self.mismatch(peer)),
            _ => Ok(false),
        }
    }

    #[cold]
    fn mismatch(&self, peer: u32) -> Error {
        let Some(call) = self.group.segment(self.rank).call() else {
            unreachable!("a call is left in the segment before its first round")
        };
        // The peer can't have gone on to a later one: it waits for a flag of this epoch with its hash, in vain.
        let peer_call = self.group.segment(peer).call();
        let (rank, peer) = (self.rank as usize, peer as usize);
        let error = Error::Mismatch { rank, call, peer, peer_call, block: self.block, epoch: self.flag.epoch };
        self.group.give_up(self.rank, error)
    }
}
