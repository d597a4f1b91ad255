//! How far away a rank's peers are, which decides by which stores it hands them its data.
//!
//! Two cores that share a cache hand lines over in it, and stores past the caches would cost two to three times as
//! much. Between two that don't, each line that a store has to fetch from the other core's cache costs more than a way
//! over memory (docs/measurements.md). A virtual machine's cores move between the two under way, and nobody tells the
//! guest.
//!
//! So a rank times how long the load takes that finds a peer's flag: the line comes from the cache of the core that
//! has just written it. That is done in a few rounds of many, costs two looks at the clock, and asks nothing of the
//! peer. A flag that takes long to come tells nothing: then the next round is timed, since a peer may always be late in
//! one round of a call and early in the other. The kind of stores is the writer's own business, and ranks need not agree.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use super::reduce::Stores;
use crate::options::HostStores;

/// From here on a load says that the peer is far. A line comes in some 40 to 110 ns from a core that shares a cache, and in
/// 150 to 280 from one that doesn't, the clock included; the two directions differ, as do the lines' homes.
const FAR_NS: u128 = 125;
/// How many more loads must say the other than what is held true, until that is. In long calls up to a fifth say what is
/// wrong: some lines are disturbed on their way, and some are there before.
const AGAINST: u32 = 6;
/// Rounds at first that are all timed.
const FIRST_ROUNDS: u64 = 16;
/// Later, so many from one that told something to the next.
const ONE_IN: u64 = 16;

/// What one block of a rank knows of its peers. For the thread that runs the block.
pub(super) struct Distances {
    stores: HostStores,
    rounds: AtomicU64,
    /// By rank.
    peers: Box<[Peer]>,
}

#[derive(Default)]
struct Peer {
    /// One was timed.
    is_known: AtomicBool,
    is_far: AtomicBool,
    /// By how much the loads that say the other outnumber those that say this, of late.
    against: AtomicU32,
    /// From which round on it is to be timed.
    due: AtomicU64,
}

impl Distances {
    pub(super) fn new(world: u32, stores: HostStores) -> Distances {
        Distances { stores, rounds: AtomicU64::new(0), peers: (0..world).map(|_| Peer::default()).collect() }
    }

    pub(super) fn begin_round(&self) {
        self.rounds.store(self.rounds.load(Relaxed) + 1, Relaxed);
    }

    /// Whether `peer` is to be timed in this round.
    pub(super) fn is_due(&self, peer: u32) -> bool {
        self.stores == HostStores::Probed && self.rounds.load(Relaxed) >= self.peers[peer as usize].due.load(Relaxed)
    }

    /// A load that found the flag of `peer` took so long.
    ///
    /// After the first it takes [`AGAINST`] such times or some more until the stores change, a millisecond of short calls.
    pub(super) fn note(&self, peer: u32, took: Duration) {
        let peer = &self.peers[peer as usize];
        let round = self.rounds.load(Relaxed);
        peer.due.store(round + if round < FIRST_ROUNDS { 1 } else { ONE_IN }, Relaxed);
        let is_far = took.as_nanos() >= FAR_NS;
        let against = match (is_far == peer.is_far.load(Relaxed), peer.against.load(Relaxed)) {
            (true, against) => against.saturating_sub(1),
            (false, against) if against + 1 < AGAINST && peer.is_known.load(Relaxed) => against + 1,
            (false, _) => {
                peer.is_far.store(is_far, Relaxed);
                0
            }
        };
        peer.against.store(against, Relaxed);
        peer.is_known.store(true, Relaxed);
    }

    /// By which stores data goes to `peer`.
    pub(super) fn stores(&self, peer: u32) -> Stores {
        match self.stores {
            HostStores::Cached => Stores::Cached,
            HostStores::Streaming => Stores::Streaming,
            HostStores::Probed if self.peers[peer as usize].is_far.load(Relaxed) => Stores::Streaming,
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
            while !distances.is_due(peer) {
                distances.begin_round();
            }
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
        assert_eq!(noted(&distances, 1, [160; 2 * AGAINST as usize]), Stores::Streaming);
        assert_eq!(noted(&distances, 1, [20, 160, 160]), Stores::Streaming);
        assert_eq!(distances.stores(2), Stores::Cached);
        assert_eq!(distances.stores_for_all([0, 2].into_iter()), Stores::Cached);
        assert_eq!(distances.stores_for_all([0, 1, 2].into_iter()), Stores::Streaming);
        // What long calls gave: of far cores some lines were there before, of near ones some were late.
        let mut far = [40, 40, 160, 170, 170, 181, 160, 170, 200, 170].into_iter().cycle();
        assert!((0..100).all(|_| noted(&distances, 1, far.by_ref().take(7)) == Stores::Streaming));
        assert_eq!(noted(&distances, 1, [60; 2 * AGAINST as usize]), Stores::Cached);
        let mut near = [30, 60, 130, 90, 300, 80, 110, 60, 70, 111].into_iter().cycle();
        assert!((0..100).all(|_| noted(&distances, 1, near.by_ref().take(7)) == Stores::Cached));
    }

    /// As where a call has two rounds, in one of which this rank always waits for long: not that one alone is timed.
    #[test]
    fn a_peer_is_due_until_a_load_tells_something() {
        let distances = Distances::new(3, HostStores::Probed);
        let mut told = [0; 3];
        for round in 0..160 {
            distances.begin_round();
            for peer in [1, 2] {
                if distances.is_due(peer) && (peer == 2 || round % 2 == 1) {
                    distances.note(peer, Duration::from_nanos(60));
                    told[peer as usize] += 1;
                }
            }
        }
        assert!(told[1] >= 8 + 8 && told[2] >= 16 + 8, "{told:?}");
        assert!(told[2] <= 16 + 10, "{told:?}: one round in {ONE_IN} is enough");
    }

    #[test]
    fn forced_stores_stay_and_nothing_is_timed() {
        for (forced, stores) in [(HostStores::Cached, Stores::Cached), (HostStores::Streaming, Stores::Streaming)] {
            let distances = Distances::new(2, forced);
            assert!((0..100).all(|_| {
                distances.begin_round();
                !distances.is_due(1)
            }));
            distances.note(1, Duration::from_nanos(if forced == HostStores::Cached { 900 } else { 1 }));
            assert_eq!(distances.stores(1), stores);
        }
    }
}
