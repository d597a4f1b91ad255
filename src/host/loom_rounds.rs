//! loom runs every interleaving of two ranks, and every order that the memory model allows.
//!
//!     RUSTFLAGS="--cfg loom" cargo test --release --lib loom_

use loom::thread;

use super::{Communicator, group::Fault};
use crate::{Algorithm, Options, ReduceOp};

const WORLD: usize = 2;

/// Three rounds at least: the third is the first that meets what an earlier one left in its half.
fn rounds(algorithm: Algorithm, fault: Fault) {
    let mut model = loom::model::Builder::new();
    // Two involuntary switches find every known fault here, and all interleavings of two-shot would take hours.
    model.preemption_bound = Some(2);
    model.check(move || {
        let options = Options::default().algorithm(algorithm).staging_bytes(WORLD * 2 * 128);
        let ranks = Communicator::faulty(WORLD, &options, fault).unwrap();
        let threads = ranks.into_iter().map(|mut rank| thread::spawn(move || call(&mut rank, algorithm)));
        for thread in threads.collect::<Vec<_>>() {
            thread.join().unwrap();
        }
    });
}

fn call(rank: &mut Communicator, algorithm: Algorithm) {
    for call in 0..3u32.div_ceil(algorithm.rounds()) {
        // One pack and a bit, so that both parts of a two-shot have something in them.
        let mine = |rank: usize| (1 + call as usize * 10 + rank * 100) as f32;
        let mut buffer = [mine(rank.rank()); 5];
        rank.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, [mine(0) + mine(1); 5]);
    }
    assert_eq!(rank.epochs(), [3u32.next_multiple_of(algorithm.rounds())]);
}

#[test]
fn one_shot_is_race_free() {
    rounds(Algorithm::OneShot, Fault::None);
}

#[test]
fn one_shot_pull_is_race_free() {
    rounds(Algorithm::OneShotPull, Fault::None);
}

#[test]
fn two_shot_is_race_free() {
    rounds(Algorithm::TwoShot, Fault::None);
}

#[test]
fn two_shot_pull_is_race_free() {
    rounds(Algorithm::TwoShotPull, Fault::None);
}

/// With one half, a fast rank writes the round that a slow one still reads.
#[test]
#[should_panic(expected = "Causality violation")]
fn one_half_of_the_slots_is_a_race() {
    rounds(Algorithm::OneShot, Fault::OneHalfOfSlots);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_half_of_the_slots_is_a_race_when_pulling() {
    rounds(Algorithm::OneShotPull, Fault::OneHalfOfSlots);
}

/// With one half, a fast rank's next flag covers the one that a slow rank waits for, which then waits for ever.
#[test]
#[should_panic(expected = "maximum number of branches")]
fn one_half_of_the_flags_loses_one() {
    rounds(Algorithm::OneShot, Fault::OneHalfOfFlags);
}

/// A relaxed flag may come before what it announces.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_flag_is_a_race() {
    rounds(Algorithm::OneShot, Fault::RelaxedFlag);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_flag_is_a_race_when_pulling() {
    rounds(Algorithm::TwoShotPull, Fault::RelaxedFlag);
}
