//! Not the numbers, which follow from measurements, but what must hold of any.

use super::*;
use crate::protocol::{
    bindings,
    layout::Layout,
    plan::{Forced, Plan, plan},
};

const WORLDS: std::ops::RangeInclusive<u32> = 2..=8;

/// Every power of two and what is next to it, some sizes between, and every size of a few packs.
fn sizes() -> Vec<u64> {
    let mut sizes: Vec<u64> = (1..300).collect();
    for power in (8..63).map(|exponent| 1u64 << exponent) {
        let eighths = (0..8).map(|eighth| power / 8 * (8 + eighth));
        sizes.extend(eighths.flat_map(|size| [size - 1, size, size + 1, size + 16]));
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn planned(bytes: u64, world: u32) -> Plan {
    let layout = Layout::new(world, bindings::PEERSUM_MAX_BLOCKS, 16 << 20).unwrap();
    let choice = choose(bytes, world, Placement::Anywhere);
    plan(bytes, Placement::Anywhere, &layout, Forced::default(), choice, &|_, _| 132).unwrap()
}

#[test]
fn choices_can_be_launched() {
    for world in 1..=bindings::PEERSUM_MAX_RANKS {
        for bytes in sizes() {
            let Choice { blocks, threads, .. } = choose(bytes, world, Placement::Anywhere);
            assert!((1..=bindings::PEERSUM_MAX_BLOCKS).contains(&blocks), "{bytes} {world}: {blocks} blocks");
            assert!(threads > 0 && threads <= bindings::PEERSUM_MAX_THREADS, "{bytes} {world}: {threads} threads");
            assert!(threads.is_multiple_of(32), "{bytes} {world}: {threads} threads");
        }
    }
}

/// Field case A61 (lightseekorg/tokenspeed#1234): a rule by tokens, not by bytes.
#[test]
fn an_algorithm_that_was_left_does_not_come_back() {
    for world in WORLDS {
        let mut seen = Vec::new();
        for bytes in sizes() {
            let plan = planned(bytes, world);
            if seen.last() != Some(&plan.algorithm) {
                assert!(!seen.contains(&plan.algorithm), "{} again at {bytes} B of {world} ranks", plan.algorithm);
                seen.push(plan.algorithm);
            }
        }
        // More hops buy fewer bytes, which pays the more the longer the message is, and never the other way.
        assert!(seen.is_sorted_by_key(|algorithm| algorithm.rounds()), "{world} ranks: {seen:?}");
    }
}

/// Field case A61: one-shot was chosen for 8 or 16 ranks as for 2, though each sends its tensor to all others.
#[test]
fn more_ranks_do_not_get_longer_one_shots() {
    let longest = |world| sizes().into_iter().filter(|&bytes| planned(bytes, world).algorithm.rounds() == 1).max();
    let longest: Vec<_> = WORLDS.map(longest).collect();
    assert!(longest.is_sorted_by(|fewer, more| fewer >= more), "{longest:?}");
}

#[test]
fn equal_bytes_are_done_alike() {
    for world in WORLDS {
        for (tokens, hidden) in [(1u64, 1u64 << 20), (7, 8192), (1, 16)] {
            assert_eq!(planned(tokens * hidden, world), planned(hidden * tokens, world));
        }
        // And longer messages of one algorithm never get fewer blocks, at the same number of threads.
        for pair in sizes().windows(2) {
            let (shorter, longer) = (planned(pair[0], world), planned(pair[1], world));
            if (shorter.algorithm, shorter.threads) == (longer.algorithm, longer.threads) {
                assert!(shorter.blocks <= longer.blocks, "{} and {} B of {world} ranks", pair[0], pair[1]);
            }
        }
    }
}
