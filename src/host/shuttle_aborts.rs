//! shuttle on groups of more ranks that end early: every rank ends, and none returns `Ok` with another sum.

use std::time::Duration;

use shuttle::{rand::Rng, thread};

use super::Communicator;
use crate::{
    Algorithm::{self, OneShot, OneShotLl, TwoShotLl, TwoShotPull},
    Error, Options, ReduceOp, Result,
};

/// Elements of the calls.
const COUNTS: [usize; 3] = [5, 33, 1];

/// What one rank does of its own accord, at a random call: it aborts the group, or just leaves.
#[derive(Clone, Copy, PartialEq)]
enum Odd {
    Aborts,
    Leaves,
}

fn call(rank: &mut Communicator, number: usize, count: usize) -> Result<()> {
    let value = |rank: usize, index: usize| ((number * 7 + rank * 3 + index) % 32) as f32;
    let mut buffer: Vec<f32> = (0..count).map(|index| value(rank.rank(), index)).collect();
    rank.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    let sum = |index| (0..rank.world_size()).map(|rank| value(rank, index)).sum::<f32>();
    assert!((0..count).all(|index| buffer[index] == sum(index)), "wrong sums in call {number}");
    Ok(())
}

fn ends(world: usize, algorithm: Algorithm, odd: Odd) {
    // The clock of a model stands still: a timeout of no time passes at the first look, any other never.
    let timeout = if odd == Odd::Leaves { Duration::ZERO } else { Duration::MAX };
    let options = Options::default().staging_bytes(world * 2 * 128).algorithm(algorithm).timeout(timeout);
    let (odd_rank, odd_call) =
        (shuttle::rand::thread_rng().gen_range(0..world), shuttle::rand::thread_rng().gen_range(0..COUNTS.len()));
    let threads = Communicator::local(world, &options).unwrap().into_iter().map(|mut rank| {
        thread::spawn(move || {
            let mut failure = None;
            for (number, count) in COUNTS.into_iter().enumerate() {
                if (rank.rank(), number) == (odd_rank, odd_call) {
                    if odd == Odd::Leaves {
                        break;
                    }
                    rank.abort();
                }
                let result = call(&mut rank, number, count);
                assert!(failure.is_none() || result == Err(failure.clone().unwrap()), "a group that ended goes on");
                failure = result.err();
            }
            (rank, failure)
        })
    });
    let ranks: Vec<_> = threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect();
    for (rank, failure) in &ranks {
        let error = rank.check().expect_err("not all ranks made all calls");
        match odd {
            Odd::Aborts => assert_eq!(error, Error::Aborted { by: None }),
            Odd::Leaves => assert!(matches!(error, Error::PeerTimeout { .. }), "{error}"),
        }
        assert_eq!(ranks[0].0.check(), Err(error.clone()));
        assert!(failure.as_ref().is_none_or(|failure| *failure == error));
    }
}

fn check(world: usize, schedules: usize) {
    for algorithm in [OneShot, TwoShotPull, OneShotLl, TwoShotLl] {
        for odd in [Odd::Aborts, Odd::Leaves] {
            shuttle::check_random(move || ends(world, algorithm, odd), schedules);
            shuttle::check_pct(move || ends(world, algorithm, odd), schedules, 3);
        }
    }
}

#[test]
fn four_ranks_end() {
    check(4, 2000);
}

#[test]
fn eight_ranks_end() {
    check(8, 500);
}
