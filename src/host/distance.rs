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
//!
//! A flag says little where ranks share cores and change between them, since it often comes from the very core that looks
//! for it, and where cores are far from each other and yet share a cache. So where there is more to store than fits into
//! the queue of a core's stores, a rank times some of its stores through the caches. Where they are so slow that lines must
//! come from afar, it stores past the caches for a while, keeps to that if it is faster, and then tries again, or as soon as
//! the flags say that all peers are near.

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
/// Picoseconds a byte from which on stores through the caches are taken for slow. A copy takes 22 to 35 from a cache, up to
/// 100 from memory, and 400 where each line comes from a core that shares no cache.
const SLOW_PS: u64 = 200;
/// Fewer bytes than this fit into the queue of a core's stores, and tell nothing.
const TIMED_BYTES: usize = 16 << 10;
/// So many slow ones after each other, since an interrupt makes one slow too.
const SLOW: u32 = 3;
/// For so many rounds stores go past the caches then, the first time, and at most, after as many times without success.
const HOLD: u64 = 64;
const MOST_HOLD: u64 = 8192;
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
    own: Own,
}

/// How this block's own stores do.
#[derive(Default)]
struct Own {
    /// From which round on one is to be timed.
    due: AtomicU64,
    /// Slow ones after each other.
    slow: AtomicU32,
    /// Picoseconds a byte of the last of them, while it is to be seen whether those past the caches are faster.
    against: AtomicU64,
    /// Until this round all go past the caches.
    until: AtomicU64,
    /// For how many rounds the next time.
    hold: AtomicU64,
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
        let peers = (0..world).map(|_| Peer::default()).collect();
        Distances { stores, rounds: AtomicU64::new(0), peers, own: Own::default() }
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
                if !self.peers.iter().any(|peer| peer.is_far.load(Relaxed)) {
                    self.own.until.store(0, Relaxed);
                    self.own.due.store(0, Relaxed);
                }
                0
            }
        };
        peer.against.store(against, Relaxed);
        peer.is_known.store(true, Relaxed);
    }

    /// Whether stores of so many bytes are to be timed in this round.
    pub(super) fn is_own_due(&self, bytes: usize) -> bool {
        self.stores == HostStores::Probed
            && bytes >= TIMED_BYTES
            && self.rounds.load(Relaxed) >= self.own.due.load(Relaxed)
    }

    /// A copy of so many bytes to staging took so long.
    pub(super) fn note_own(&self, stores: Stores, bytes: usize, took: Duration) {
        let Own { due, slow, against, until, hold } = &self.own;
        let (round, ps) = (self.rounds.load(Relaxed), took.as_nanos() as u64 * 1000 / bytes as u64);
        let (mut next, held) = (round + ONE_IN, hold.load(Relaxed).max(HOLD));
        match stores {
            Stores::Cached if ps < SLOW_PS => {
                slow.store(0, Relaxed);
                hold.store(HOLD, Relaxed);
            }
            Stores::Cached => {
                let number = slow.load(Relaxed) + 1;
                next = round;
                // The first after a while past the caches is enough.
                slow.store(number.min(SLOW - 1), Relaxed);
                if number >= SLOW {
                    until.store(round + held, Relaxed);
                    hold.store((2 * held).min(MOST_HOLD), Relaxed);
                    against.store(ps, Relaxed);
                }
            }
            Stores::Streaming => match against.swap(0, Relaxed) {
                0 => {}
                cached if 2 * ps <= cached => next = until.load(Relaxed),
                // It was not that lines came from afar.
                _ => {
                    until.store(round, Relaxed);
                    next = round + held;
                }
            },
        }
        due.store(next, Relaxed);
    }

    /// By which stores so many bytes go to `peer`.
    pub(super) fn stores(&self, peer: u32, bytes: usize) -> Stores {
        let streams = match self.stores {
            HostStores::Cached => false,
            HostStores::Streaming => true,
            HostStores::Probed if bytes >= TIMED_BYTES => self.rounds.load(Relaxed) < self.own.until.load(Relaxed),
            HostStores::Probed => self.peers[peer as usize].is_far.load(Relaxed),
        };
        if streams { Stores::Streaming } else { Stores::Cached }
    }

    /// By which stores so many bytes go where all of `peers` read them.
    pub(super) fn stores_for_all(&self, mut peers: impl Iterator<Item = u32>, bytes: usize) -> Stores {
        let streams = peers.any(|peer| self.stores(peer, bytes) == Stores::Streaming);
        if streams { Stores::Streaming } else { Stores::Cached }
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
        distances.stores(peer, 8 << 10)
    }

    #[test]
    fn stores_follow_the_peer() {
        let distances = Distances::new(3, HostStores::Probed);
        assert_eq!(distances.stores(1, 8 << 10), Stores::Cached);
        assert_eq!(noted(&distances, 1, [250]), Stores::Streaming);
        assert_eq!(noted(&distances, 1, [50; 40]), Stores::Cached);
        assert_eq!(noted(&distances, 1, [u64::MAX]), Stores::Cached, "an interrupt");
        assert_eq!(noted(&distances, 1, [50, 130, 90, 60]), Stores::Cached);
        assert_eq!(noted(&distances, 1, [160; 2 * AGAINST as usize]), Stores::Streaming);
        assert_eq!(noted(&distances, 1, [20, 160, 160]), Stores::Streaming);
        assert_eq!(distances.stores(2, 8 << 10), Stores::Cached);
        assert_eq!(distances.stores_for_all([0, 2].into_iter(), 8 << 10), Stores::Cached);
        assert_eq!(distances.stores_for_all([0, 1, 2].into_iter(), 8 << 10), Stores::Streaming);
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

    /// A rank among others that share its core, whose flags say that they are near: copies of so many ns a KiB, for stores
    /// through the caches and past them, and how many of the rounds went past them.
    fn streamed(distances: &Distances, rounds: usize, cached: u64, streaming: u64) -> usize {
        (0..rounds)
            .filter(|_| {
                distances.begin_round();
                let stores = distances.stores_for_all([0, 2].into_iter(), 64 << 10);
                if distances.is_own_due(64 << 10) {
                    let ns = 64 * if stores == Stores::Cached { cached } else { streaming };
                    distances.note_own(stores, 64 << 10, Duration::from_nanos(ns));
                }
                stores == Stores::Streaming
            })
            .count()
    }

    #[test]
    fn slow_stores_go_past_the_caches_for_a_while() {
        let distances = Distances::new(3, HostStores::Probed);
        assert_eq!(streamed(&distances, 1000, 30, 40), 0);
        // Flags that come from afar alone don't make them.
        assert_eq!(noted(&distances, 1, [250; 20]), Stores::Streaming);
        assert_eq!(streamed(&distances, 1000, 60, 40), 0);
        // An interrupt.
        distances.begin_round();
        distances.note_own(Stores::Cached, 64 << 10, Duration::from_millis(1));
        assert_eq!(streamed(&distances, 1000, 30, 40), 0);
        // The cores moved apart: a few tries are slow.
        let past = streamed(&distances, 10_000, 420, 40);
        assert!((9_900..10_000).contains(&past), "{past}");
        // And together.
        let past = streamed(&distances, 20_000, 30, 40);
        assert!((1..=MOST_HOLD as usize).contains(&past), "{past}");
        assert_eq!(streamed(&distances, 1000, 30, 40), 0);
        let past = streamed(&distances, 1000, 420, 40);
        assert!((900..1000).contains(&past), "{past}: it is noticed as soon as at first");
        // And together, of which the flags tell sooner than the next try would.
        let past = streamed(&distances, 5_000, 420, 40);
        assert!((4_990..5_000).contains(&past), "{past}");
        assert_eq!(noted(&distances, 1, [60; 20]), Stores::Cached);
        assert_eq!(streamed(&distances, 1000, 30, 40), 0);
    }

    /// As where all cores together ask more of the memory than it gives.
    #[test]
    fn stores_that_are_slow_either_way_go_through_the_caches() {
        let distances = Distances::new(3, HostStores::Probed);
        let past = streamed(&distances, 10_000, 300, 280);
        assert!((1..100).contains(&past), "{past}");
        assert!(!distances.is_own_due(TIMED_BYTES - 1), "which fit into the core's queue");
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
            assert_eq!(distances.stores(1, 8 << 10), stores);
        }
    }
}
