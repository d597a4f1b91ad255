//! The one bounded wait.

use std::time::Duration;

use super::{
    crowd::Crowd,
    distance::Distances,
    group::Group,
    packets::Region,
    sync::{self, Instant, Ordering},
};
use crate::{Error, Phase, Result, protocol::call::Flag};

/// Yields between two looks at the abort word and the clock.
///
/// shuttle has no time, and is to get to the looks; loom gets there once nobody else can go on.
const YIELDS: u32 = if cfg!(shuttle) { 2 } else { 16 };

/// How long a thread polls and yields before it sleeps. A sleep and a wake are some 10 µs; who has waited for as long
/// as this may wait for much longer.
#[cfg(not(any(loom, shuttle)))]
const AWAKE: Duration = Duration::from_millis(1);

/// Between two looks at whether the peer's process still is, which is a system call.
const LIFE: Duration = Duration::from_micros(500);

/// A rank's wait for its peers in one round.
pub(super) struct Wait<'a> {
    pub(super) group: &'a Group,
    pub(super) rank: u32,
    pub(super) block: u32,
    pub(super) phase: Phase,
    /// Where the peers' flags come.
    pub(super) region: Region,
    /// What every peer's flag must be.
    pub(super) flag: Flag,
    pub(super) distances: &'a Distances,
    pub(super) crowd: &'a Crowd,
}

impl Wait<'_> {
    /// Waits for the flags of all `peers`; one deadline holds for all waits with the same `started`.
    ///
    /// What a peer wrote before it released its flag happens before the return.
    pub(super) fn for_all(&self, peers: impl Iterator<Item = u32>, started: &mut Option<Instant>) -> Result<()> {
        self.distances.begin_round();
        for peer in peers {
            if !(self.distances.is_due(peer) && self.timed(peer)?) {
                self.until(peer, started, || self.poll(peer))?;
            }
        }
        Ok(())
    }

    /// Polls as [`Wait::until`] does at first, and tells how long the load took that found the flag. Whether one did.
    #[cold]
    fn timed(&self, peer: u32) -> Result<bool> {
        for _ in 0..self.crowd.polls() {
            let begun = Instant::now();
            sync::hold_loads();
            if self.poll(peer)? {
                self.distances.note(peer, begun.elapsed());
                return Ok(true);
            }
            sync::spin_loop();
        }
        Ok(false)
    }

    /// Waits until `poll` finds what `peer` sends in this round.
    #[inline]
    pub(super) fn until(
        &self,
        peer: u32,
        started: &mut Option<Instant>,
        poll: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        for _ in 0..self.crowd.polls() {
            if poll()? {
                return Ok(());
            }
            sync::spin_loop();
        }
        self.patiently(peer, started, &poll)
    }

    #[cold]
    fn patiently(&self, peer: u32, started: &mut Option<Instant>, poll: &dyn Fn() -> Result<bool>) -> Result<()> {
        let started = *started.get_or_insert_with(Instant::now);
        let mut next_look = started.elapsed().saturating_add(LIFE);
        if self.first_yields(poll)? {
            return Ok(());
        }
        loop {
            let ended = self.group.check(self.rank);
            let elsewhere = ended.is_ok() && self.is_elsewhere(peer);
            let waited = started.elapsed();
            let mut lost = None;
            if waited >= next_look {
                next_look = waited.saturating_add(LIFE);
                lost = self.group.lost(self.rank, peer);
            }
            // This thread may have slept since the last poll. A peer that went on, to another call, until the group
            // ended or out of it, sent what this round needs before.
            if poll()? {
                return Ok(());
            }
            ended?;
            if elsewhere {
                return Err(self.give_up_on_other_call(peer));
            }
            if let Some(error) = lost {
                return Err(self.group.give_up(self.rank, error));
            }
            #[cfg(not(any(loom, shuttle)))]
            if waited >= AWAKE && waited < self.group.timeout {
                let at_most = LIFE.min(self.group.timeout - waited);
                let is_there = || poll().unwrap_or(true) || self.group.check(self.rank).is_err();
                self.group.segment(self.rank).sleep(self.block, at_most, is_there);
            }
            if waited >= self.group.timeout {
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
            for _ in 0..YIELDS {
                if poll()? {
                    return Ok(());
                }
                sync::yield_now();
            }
        }
    }

    /// Yields until `poll` finds what it waits for, for a while, and sees whether others take the core then.
    fn first_yields(&self, poll: &dyn Fn() -> Result<bool>) -> Result<bool> {
        let mut longest = Duration::ZERO;
        for _ in 0..YIELDS {
            if poll()? {
                self.crowd.note(longest);
                return Ok(true);
            }
            let yielding = Instant::now();
            sync::yield_now();
            longest = longest.max(yielding.elapsed());
        }
        self.crowd.note(longest);
        Ok(false)
    }

    /// Whether `peer` has come. It is compared for equality: an older or newer epoch is just not this one.
    #[inline]
    fn poll(&self, peer: u32) -> Result<bool> {
        let word = self.signal(self.region, self.flag.epoch, peer);
        if word == self.flag.word() {
            return Ok(true);
        }
        match Flag::from_word(word) {
            Some(observed) if observed.epoch == self.flag.epoch => Err(self.give_up_on_other_call(peer)),
            _ => Ok(false),
        }
    }

    /// Whether `peer` has begun a round of the other region that this rank has not.
    fn is_elsewhere(&self, peer: u32) -> bool {
        let region = self.region.other();
        let next = region.next(self.group.segment(self.rank).epoch(region, self.block));
        Flag::from_word(self.signal(region, next, peer)).is_some_and(|flag| flag.epoch == next)
    }

    /// What `peer` last told of the half of round `epoch`.
    #[inline]
    fn signal(&self, region: Region, epoch: u32, peer: u32) -> u64 {
        let half = self.group.signal_half(region, epoch);
        self.group.segment(self.rank).signal(region, half, self.block, peer).load(Ordering::Acquire)
    }

    #[cold]
    fn give_up_on_other_call(&self, peer: u32) -> Error {
        let Some(call) = self.group.segment(self.rank).call() else {
            unreachable!("a call is left in the segment before its first round")
        };
        // The peer can't have gone on to a later one: it waits for this rank, in vain.
        let peer_call = self.group.segment(peer).call();
        let (rank, peer) = (self.rank as usize, peer as usize);
        let (call, peer_call) = (Box::new(call), peer_call.map(Box::new));
        let error = Error::Mismatch { rank, call, peer, peer_call, block: self.block, epoch: self.flag.epoch };
        self.group.give_up(self.rank, error)
    }
}
