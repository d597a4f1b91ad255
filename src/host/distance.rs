//! How far away a rank's peers are, which decides by which stores it hands them its data.
//!
//! Two cores that share a cache hand lines over in it, and stores past the caches would cost two to three times as
//! much. Between two that don't, each line that a store has to fetch from the other core's cache costs more than a way
//! over memory (docs/measurements.md). A virtual machine's cores move between the two under way, and nobody tells the
//! guest.
//!
//! So a rank times how long the load takes that finds a peer's flag: the line comes from the cache of the core that
//! has just written it. That is done in a few rounds of many, costs two looks at the clock, and asks nothing of the
//! peer. The kind of stores is the writer's own business, and ranks need not agree.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use super::reduce::Stores;
use crate::options::HostStores;

/// From here on a peer is far. A line comes in some 40 to 80 ns from a core that shares a cache, and in 140 to 260 from
/// one that doesn't, the clock included; the two directions differ, as do the lines' homes.
const FAR_NS: u32 = 105;
/// What a longer time counts as.
const MOST_NS: u32 = 300;
/// The part of a new time in what is known, if it is longer and if it is shorter. What disturbs a load makes it longer,
/// and calls of long messages disturb most of them; so this stays near to the shorter ones.
const PARTS: [i32; 2] = [16, 4];
/// Rounds at first that are all timed.
const FIRST_ROUNDS: u32 = 16;
/// Later, one in so many.
const ONE_IN: u32 = 16;

/// What one block of a rank knows of its peers. For the thread that runs the block.
pub(super) struct Distances {
    stores: HostStores,
    rounds: AtomicU32,
    /// By rank.
    ns: Box<[AtomicU32]>,
}

impl Distances {
    pub(super) fn new(world: u32, stores: HostStores) -> Distances {
        Distances { stores, rounds: AtomicU32::new(0), ns: (0..world).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Begins a round: whether it is to be timed.
    pub(super) fn is_due(&self) -> bool {
        if self.stores != HostStores::Probed {
            return false;
        }
        let round = self.rounds.load(Relaxed).wrapping_add(1);
        self.rounds.store(round, Relaxed);
        round <= FIRST_ROUNDS || round.is_multiple_of(ONE_IN)
    }

    /// A load that found the flag of `peer` took so long.
    ///
    /// After the first it takes some ten such times until the stores change, which are a millisecond of short calls.
    pub(super) fn note(&self, peer: u32, took: Duration) {
        let took = u32::try_from(took.as_nanos()).unwrap_or(u32::MAX).min(MOST_NS);
        let known = &self.ns[peer as usize];
        let before = known.load(Relaxed);
        let change = (took as i32 - before as i32) / PARTS[usize::from(took < before)];
        known.store(if before == 0 { took.max(1) } else { before.saturating_add_signed(change) }, Relaxed);
    }

    /// By which stores data goes to `peer`.
    pub(super) fn stores(&self, peer: u32) -> Stores {
        match self.stores {
            HostStores::Cached => Stores::Cached,
            HostStores::Streaming => Stores::Streaming,
            HostStores::Probed if self.ns[peer as usize].load(Relaxed) >= FAR_NS => Stores::Streaming,
            HostStores::Probed => Stores::Cached,
        }
    }

    /// By which stores data goes where all of `peers` read it.
    pub(super) fn stores_for_all(&self, mut peers: impl Iterator<Item = u32>) -> Stores {
        if peers.any(|peer| self.stores(peer) == Stores::Streaming) { Stores::Streaming } else { Stores::Cached }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn noted(distances: &Distances, peer: u32, times: impl IntoIterator<Item = u64>) -> Stores {
        for ns in times {
            while !distances.is_due() {}
            distances.note(peer, Duration::from_nanos(ns));
        }
        distances.stores(peer)
    }

    #[test]
    fn stores_follow_the_peer() {
        let distances = Distances::new(3, HostStores::Probed);
        assert_eq!(distances.stores(1), Stores::Cached);
        assert_eq!(noted(&distances, 1, [250]), Stores::Streaming);
        assert_eq!(noted(&distances, 1, [50; 40]), Stores::Cached);
        assert_eq!(noted(&distances, 1, [u64::MAX]), Stores::Cached, "an interrupt");
        assert_eq!(noted(&distances, 1, [50, 130, 90, 60]), Stores::Cached);
        assert_eq!(noted(&distances, 1, [160; 40]), Stores::Streaming);
        assert_eq!(noted(&distances, 1, [20, 160, 160]), Stores::Streaming);
        assert_eq!(distances.stores(2), Stores::Cached);
        assert_eq!(distances.stores_for_all([0, 2].into_iter()), Stores::Cached);
        assert_eq!(distances.stores_for_all([0, 1, 2].into_iter()), Stores::Streaming);
    }

    #[test]
    fn forced_stores_stay_and_nothing_is_timed() {
        for (forced, stores) in [(HostStores::Cached, Stores::Cached), (HostStores::Streaming, Stores::Streaming)] {
            let distances = Distances::new(2, forced);
            assert!((0..100).all(|_| !distances.is_due()));
            distances.note(1, Duration::from_nanos(if forced == HostStores::Cached { 900 } else { 1 }));
            assert_eq!(distances.stores(1), stores);
        }
    }
}
