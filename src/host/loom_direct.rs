//! loom on tensors in symmetric memory: two ranks that fill theirs, reduce them and look at the sums, call after call.
//!
//!     cargo test --release --package models --lib loom_direct

use loom::thread;

use super::{Communicator, group::Fault};
use crate::{
    Algorithm::{self, OneShotDirect, TwoShotDirect},
    Options, Phase, ReduceOp,
};

const WORLD: usize = 2;
/// A pack and a bit, so that both parts of a two-shot have something in them.
const COUNT: usize = 5;

/// Calls of each kind in turn, with a staged one between them if `staged`.
fn calls(algorithm: Algorithm, in_place: bool, staged: bool, fault: Fault) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let options = Options::default().staging_bytes(WORLD * 2 * 128).symmetric_bytes(512);
        let ranks = Communicator::faulty(WORLD, &options, fault).unwrap();
        let threads = ranks.into_iter().map(|rank| thread::spawn(move || run(rank, algorithm, in_place, staged)));
        for thread in threads.collect::<Vec<_>>() {
            thread.join().unwrap();
        }
    });
}

fn run(mut rank: Communicator, algorithm: Algorithm, in_place: bool, staged: bool) {
    let mut input = rank.symmetric_buffer::<f32>(COUNT).unwrap();
    let mut output = rank.symmetric_buffer::<f32>(COUNT).unwrap();
    for call in 0..2 {
        let value = |rank: usize| (1 + call * 10 + rank * 100) as f32;
        let own = value(rank.rank());
        rank.force(algorithm);
        if in_place {
            rank.touch(&mut output, true, |output| output.fill(own));
            rank.all_reduce_symmetric_in_place(&mut output, ReduceOp::Sum).unwrap();
        } else {
            rank.touch(&mut input, true, |input| input.fill(own));
            rank.all_reduce_symmetric(&input, &mut output, ReduceOp::Sum).unwrap();
        }
        rank.touch(&mut output, false, |output| assert_eq!(output, [value(0) + value(1); COUNT], "wrong sums"));
        if staged {
            let mut buffer = [own; 1];
            rank.force(Algorithm::OneShot);
            rank.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
            assert_eq!(buffer, [value(0) + value(1)]);
        }
    }
}

#[test]
fn one_shot_is_race_free() {
    calls(OneShotDirect, false, false, Fault::None);
}

#[test]
fn two_shot_is_race_free() {
    calls(TwoShotDirect, false, false, Fault::None);
    calls(TwoShotDirect, true, false, Fault::None);
}

#[test]
fn staged_calls_may_come_between() {
    calls(TwoShotDirect, true, true, Fault::None);
}

/// A rank that has not come yet still fills its tensor.
#[test]
#[should_panic(expected = "Causality violation")]
fn without_an_entry_is_a_race() {
    calls(OneShotDirect, false, false, Fault::NoRound(Phase::Entry));
}

/// A rank that goes on writes its tensor while a peer still reads it.
#[test]
#[should_panic(expected = "Causality violation")]
fn without_an_exit_is_a_race() {
    calls(OneShotDirect, false, false, Fault::NoRound(Phase::Exit));
}

/// A rank that looks at its tensor before a peer has written its part.
#[test]
#[should_panic(expected = "wrong sums")]
fn a_two_shot_without_an_exit_is_a_race() {
    calls(TwoShotDirect, true, false, Fault::NoRound(Phase::Exit));
}
