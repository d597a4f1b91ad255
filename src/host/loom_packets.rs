//! loom runs two ranks by LL packets, with up to two involuntary switches, and in each run every order that the
//! memory model allows: packets are relaxed, so it lets each load find any older packet too.
//!
//! In the models a slot carries one packet beside its header, and packets are reduced one by one.
//!
//!     cargo test --release --package models --lib loom_packets

use loom::thread;

use super::{Communicator, group::Fault};
use crate::{
    Algorithm::{self, OneShot, OneShotLl, TwoShotLl},
    Options, ReduceOp,
};

const WORLD: usize = 2;

/// A call by an algorithm, on so many f32.
type Call = (Algorithm, usize);

/// Runs the calls, from this epoch on.
fn from_epoch<const CALLS: usize>(first: u32, switches: usize, calls: [Call; CALLS], fault: Fault) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(switches);
    model.check(move || {
        let options = Options::default().staging_bytes(WORLD * 2 * 128).first_epoch(first);
        let ranks = Communicator::faulty(WORLD, &options, fault).unwrap();
        let threads = ranks.into_iter().map(|mut rank| thread::spawn(move || run(&mut rank, &calls)));
        for thread in threads.collect::<Vec<_>>() {
            thread.join().unwrap();
        }
    });
}

fn check<const CALLS: usize>(switches: usize, calls: [Call; CALLS], fault: Fault) {
    from_epoch(0, switches, calls, fault);
}

fn run(rank: &mut Communicator, calls: &[Call]) {
    for (call, &(algorithm, count)) in calls.iter().enumerate() {
        let value = |rank: usize, index: usize| (1 + index + call * 10 + rank * 100) as f32;
        let mut buffer: Vec<_> = (0..count).map(|index| value(rank.rank(), index)).collect();
        rank.force(algorithm);
        rank.skip_packet_epochs(2, u32::MAX - 3);
        rank.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
        let sums: Vec<_> = (0..count).map(|index| value(0, index) + value(1, index)).collect();
        assert_eq!(buffer, sums, "wrong sums in call {call}");
    }
}

#[test]
fn one_shot_is_exact() {
    check(1, [(OneShotLl, 1), (OneShotLl, 1), (OneShotLl, 1)], Fault::None);
}

/// Three chunks of one call.
#[test]
fn one_shot_of_several_chunks_is_exact() {
    check(2, [(OneShotLl, 3)], Fault::None);
}

/// Two chunks, so that the second round of one overlaps the first of the next. Of the second chunk one rank has no part.
#[test]
fn two_shot_of_two_chunks_is_exact() {
    check(2, [(TwoShotLl, 3)], Fault::None);
}

#[test]
fn alternating_algorithms_are_exact() {
    check(1, [(OneShotLl, 1), (TwoShotLl, 2), (OneShotLl, 1)], Fault::None);
    check(1, [(OneShotLl, 1), (OneShot, 1), (OneShotLl, 1), (OneShot, 1)], Fault::None);
}

#[test]
fn rounds_across_the_wrap_are_exact() {
    from_epoch(u32::MAX - 2, 1, [(OneShotLl, 1), (OneShotLl, 1), (TwoShotLl, 2)], Fault::None);
}

/// A packet of epoch 2, then a lap whose rounds don't reach its place, and epoch 2 again. Rank 1 has no part of one element.
const A_LAP: [Call; 4] = [(OneShotLl, 1), (OneShotLl, 1), (TwoShotLl, 1), (OneShotLl, 1)];

#[test]
fn a_packet_of_the_lap_before_is_not_taken() {
    from_epoch(1, 1, A_LAP, Fault::None);
}

#[test]
#[should_panic(expected = "wrong sums")]
fn a_packet_of_the_lap_before_is_taken_where_it_was_not_cleared() {
    from_epoch(1, 1, A_LAP, Fault::NoSweep);
}

/// With one half, a fast rank's next packets cover those that a slow one waits for, which then waits for ever.
#[test]
#[should_panic(expected = "maximum number of branches")]
fn one_half_loses_a_packet() {
    check(2, [(OneShotLl, 1), (OneShotLl, 1), (OneShotLl, 1)], Fault::OneHalfOfSlots);
}

/// An epoch that is there before its payload signals what has not come.
#[test]
#[should_panic(expected = "wrong sums")]
fn an_epoch_apart_from_its_payload_signals_too_early() {
    check(2, [(OneShotLl, 1), (OneShotLl, 1), (OneShotLl, 1)], Fault::EpochAhead);
}

/// A rank that stores the next chunk before it has read this one stores into what a peer still reads of the one before.
#[test]
#[should_panic(expected = "maximum number of branches")]
fn a_chunk_that_is_not_concluded_loses_a_packet() {
    check(2, [(OneShotLl, 3)], Fault::NoConclude);
}

/// The same for the second round of a two-shot that does not wait for the headers of the first.
#[test]
#[should_panic(expected = "maximum number of branches")]
fn a_second_round_before_the_peers_headers_loses_a_packet() {
    check(2, [(TwoShotLl, 2), (TwoShotLl, 2)], Fault::EarlySecondRound);
}
