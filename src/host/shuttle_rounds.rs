//! shuttle runs more ranks than loom can, in random schedules and in those of probabilistic concurrency testing.
//!
//!     cargo test --release --package models --lib --no-default-features --features shuttle

use shuttle::thread;

use super::{Communicator, group::Fault};
use crate::{
    Algorithm::{self, OneShot, OneShotLl, OneShotPull, TwoShot, TwoShotLl, TwoShotPull},
    Options, ReduceOp,
};

/// Calls of a rank, with lengths that need one chunk, several, and fewer packs than ranks.
const COUNTS: [usize; 4] = [1, 40, 7, 33];

/// `algorithms` take turns.
fn calls(world: usize, algorithms: &'static [Algorithm], fault: Fault) {
    calls_by_slots(world, 128, algorithms, fault);
}

fn calls_by_slots(world: usize, slot_bytes: usize, algorithms: &'static [Algorithm], fault: Fault) {
    let options = Options::default().staging_bytes(world * 2 * slot_bytes);
    let ranks = Communicator::faulty(world, &options, fault).unwrap();
    let threads = ranks.into_iter().map(|mut rank| {
        thread::spawn(move || {
            for (call, count) in COUNTS.into_iter().enumerate() {
                let value = |rank: usize, index: usize| ((call * 7 + rank * 3 + index) % 32) as f32;
                let input: Vec<f32> = (0..count).map(|index| value(rank.rank(), index)).collect();
                let mut output = vec![f32::NAN; count];
                rank.force(algorithms[call % algorithms.len()]);
                rank.all_reduce(&input, &mut output, ReduceOp::Sum).unwrap();
                let sum = |index| (0..world).map(|rank| value(rank, index)).sum::<f32>();
                assert!((0..count).all(|index| output[index] == sum(index)), "race: stale or torn data in call {call}");
            }
            rank.epochs()
        })
    });
    let epochs: Vec<_> = threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect();
    assert!(epochs.iter().all(|epoch| *epoch == epochs[0]));
}

fn check(world: usize, schedules: usize, fault: Fault) {
    let orders: [&[Algorithm]; 9] = [
        &[OneShot],
        &[TwoShot],
        &[OneShotPull],
        &[TwoShotPull],
        &[OneShot, OneShotPull, TwoShot, TwoShotPull],
        &[TwoShotPull, OneShot, TwoShot, OneShotPull],
        &[OneShotLl],
        &[TwoShotLl],
        &[TwoShotLl, OneShotLl, TwoShot, TwoShotLl],
    ];
    for algorithms in orders {
        shuttle::check_random(move || calls(world, algorithms, fault), schedules);
        shuttle::check_pct(move || calls(world, algorithms, fault), schedules, 3);
    }
}

#[test]
fn four_ranks_agree() {
    check(4, 1000, Fault::None);
}

/// In slots of three lines short chunks take turns.
#[test]
fn four_ranks_agree_where_chunks_take_turns() {
    let orders: [&[Algorithm]; 3] =
        [&[OneShot], &[TwoShot, OneShotPull], &[TwoShotPull, OneShot, TwoShot, OneShotPull]];
    for algorithms in orders {
        shuttle::check_random(move || calls_by_slots(4, 384, algorithms, Fault::None), 1000);
        shuttle::check_pct(move || calls_by_slots(4, 384, algorithms, Fault::None), 1000, 3);
    }
}

#[test]
fn eight_ranks_agree() {
    check(8, 200, Fault::None);
}

#[test]
#[should_panic(expected = "race: ")]
fn one_half_of_the_slots_is_a_race() {
    shuttle::check_random(|| calls(4, &[OneShot], Fault::OneHalfOfSlots), 2000);
}

#[test]
#[should_panic(expected = "race: ")]
fn one_half_of_the_slots_is_a_race_when_pulling() {
    shuttle::check_random(|| calls(4, &[OneShotPull], Fault::OneHalfOfSlots), 2000);
}

/// The rank whose flag was covered waits for ever, which ends at shuttle's bound on the steps of a schedule.
#[test]
#[should_panic(expected = "exceeded max_steps bound")]
fn one_half_of_the_flags_loses_one() {
    // Rare, one schedule in a thousand or two: a rank must get a whole call ahead between two polls of another.
    shuttle::check_random(|| calls(4, &[OneShot], Fault::OneHalfOfFlags), 40_000);
}

/// With packets there is nothing to race on: what is covered is waited for, for ever.
#[test]
#[should_panic(expected = "exceeded max_steps bound")]
fn one_half_loses_a_packet() {
    shuttle::check_random(|| calls(4, &[OneShotLl], Fault::OneHalfOfSlots), 2000);
}

#[test]
#[should_panic(expected = "race: ")]
fn an_epoch_apart_from_its_payload_signals_too_early() {
    shuttle::check_random(|| calls(4, &[TwoShotLl], Fault::EpochAhead), 2000);
}

#[test]
#[should_panic(expected = "exceeded max_steps bound")]
fn a_chunk_that_is_not_concluded_loses_a_packet() {
    shuttle::check_random(|| calls(4, &[OneShotLl], Fault::NoConclude), 2000);
}
