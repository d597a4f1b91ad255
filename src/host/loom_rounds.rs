//! loom runs every interleaving of two ranks (of two-shots, those with up to three involuntary switches), and in each
//! every order that the memory model allows.
//!
//!     cargo test --release --package models --lib

use loom::thread;

use super::{Communicator, group::Fault};
use crate::{
    Algorithm::{self, OneShot, OneShotPull, TwoShot, TwoShotPull},
    Options, ReduceOp,
};

const WORLD: usize = 2;

/// Runs one call by each of the algorithms. They take three rounds at least: the third is the first that meets what an
/// earlier one left in its half.
fn rounds<const CALLS: usize>(algorithms: [Algorithm; CALLS], fault: Fault) {
    assert!(algorithms.iter().map(|algorithm| algorithm.rounds()).sum::<u32>() >= 3);
    let mut model = loom::model::Builder::new();
    // All interleavings of a two-shot's rounds would take minutes; every fault below shows with two switches.
    model.preemption_bound = algorithms.iter().any(|algorithm| algorithm.rounds() > 1).then_some(3);
    model.check(move || {
        let ranks = Communicator::faulty(WORLD, &Options::default().staging_bytes(WORLD * 2 * 128), fault).unwrap();
        let threads = ranks.into_iter().map(|mut rank| thread::spawn(move || calls(&mut rank, &algorithms)));
        for thread in threads.collect::<Vec<_>>() {
            thread.join().unwrap();
        }
    });
}

fn calls(rank: &mut Communicator, algorithms: &[Algorithm]) {
    let (mut flags, mut packets) = (0, 0);
    for (call, &algorithm) in algorithms.iter().enumerate() {
        // One pack and a bit, so that both parts of a two-shot have something in them.
        let value = |rank: usize| (1 + call * 10 + rank * 100) as f32;
        let mut buffer = [value(rank.rank()); 5];
        rank.force(algorithm);
        rank.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, [value(0) + value(1); 5]);
        flags += algorithm.rounds() - algorithm.packet_rounds();
        packets += algorithm.packet_rounds();
    }
    assert_eq!(rank.epochs(), [flags, packets]);
}

#[test]
fn one_shot_is_race_free() {
    rounds([OneShot; 3], Fault::None);
}

#[test]
fn one_shot_pull_is_race_free() {
    rounds([OneShotPull; 3], Fault::None);
}

#[test]
fn two_shot_is_race_free() {
    rounds([TwoShot; 2], Fault::None);
}

#[test]
fn two_shot_pull_is_race_free() {
    rounds([TwoShotPull; 2], Fault::None);
}

/// A push meets what a pull left in the same slots, and the other way round.
#[test]
fn alternating_algorithms_are_race_free() {
    rounds([OneShot, OneShotPull, OneShot], Fault::None);
    rounds([OneShotPull, OneShot, OneShotPull], Fault::None);
    rounds([OneShot, TwoShotPull, OneShot], Fault::None);
    rounds([OneShotPull, TwoShot, OneShotPull], Fault::None);
    rounds([TwoShot, TwoShotPull], Fault::None);
    rounds([TwoShotPull, TwoShot], Fault::None);
}

/// With one half, a fast rank writes the round that a slow one still reads.
#[test]
#[should_panic(expected = "Causality violation")]
fn one_half_of_the_slots_is_a_race() {
    rounds([OneShot; 3], Fault::OneHalfOfSlots);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_half_of_the_slots_is_a_race_when_pulling() {
    rounds([OneShotPull; 3], Fault::OneHalfOfSlots);
}

/// With one half, a fast rank's next flag covers the one that a slow rank waits for, which then waits for ever.
#[test]
#[should_panic(expected = "maximum number of branches")]
fn one_half_of_the_flags_loses_one() {
    rounds([OneShot; 3], Fault::OneHalfOfFlags);
}

/// A relaxed flag may come before what it announces.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_flag_is_a_race() {
    rounds([OneShot; 3], Fault::RelaxedFlag);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_flag_is_a_race_when_pulling() {
    rounds([TwoShotPull; 2], Fault::RelaxedFlag);
}
