//! loom on groups that end early, by an abort or at a deadline: every rank ends, and none returns `Ok` with another sum.
//!
//! A model's clock stands still, so a timeout of no time passes at the first look at the clock, and any other never.

use std::time::Duration;

use loom::thread;

use super::{Communicator, group::Fault};
use crate::{
    Algorithm::{self, OneShot, OneShotLl, TwoShot, TwoShotLl},
    Error, Options, ReduceOp, Result,
};

const WORLD: usize = 2;

fn model(algorithm: Algorithm, timeout: Duration, ranks: impl Fn(Vec<Communicator>) + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let options = Options::default().staging_bytes(WORLD * 2 * 128).algorithm(algorithm).timeout(timeout);
        ranks(Communicator::faulty(WORLD, &options, Fault::None).unwrap());
    });
}

/// One call, whose sums are right if it is done.
fn call(rank: &mut Communicator, number: usize) -> Result<()> {
    let value = |rank: usize, index: usize| (1 + index + number * 10 + rank * 100) as f32;
    let mut buffer = [value(rank.rank(), 0), value(rank.rank(), 1)];
    rank.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    assert_eq!(buffer, [value(0, 0) + value(1, 0), value(0, 1) + value(1, 1)], "wrong sums in call {number}");
    Ok(())
}

/// Rank 1 aborts instead of its second call.
#[test]
fn a_rank_that_aborts_ends_the_wait_of_the_other() {
    for algorithm in [OneShot, TwoShot, OneShotLl, TwoShotLl] {
        model(algorithm, Duration::MAX, |mut ranks| {
            let mut second = ranks.pop().unwrap();
            let aborting = thread::spawn(move || {
                let result = call(&mut second, 0);
                second.abort();
                assert_eq!(result, Ok(()));
                assert_eq!(call(&mut second, 1), Err(Error::Aborted { by: None }));
            });
            // The peer has finished the first call when it aborts, so this rank does too.
            assert_eq!(call(&mut ranks[0], 0), Ok(()));
            assert_eq!(call(&mut ranks[0], 1), Err(Error::Aborted { by: None }));
            aborting.join().unwrap();
        });
    }
}

/// A third thread aborts at any time.
#[test]
fn an_abort_at_any_time_ends_both_ranks() {
    for algorithm in [OneShot, OneShotLl, TwoShotLl] {
        model(algorithm, Duration::MAX, |mut ranks| {
            let handle = ranks[0].abort_handle();
            let mut second = ranks.pop().unwrap();
            let threads = [thread::spawn(move || handle.abort()), thread::spawn(move || ends(&mut second))];
            ends(&mut ranks[0]);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(ranks[0].check(), Err(Error::Aborted { by: None }));
        });
    }
    fn ends(rank: &mut Communicator) {
        let result = call(rank, 0);
        assert!(matches!(result, Ok(()) | Err(Error::Aborted { by: None })), "{result:?}");
    }
}

/// Rank 1 leaves after its first call. Either rank may run into its deadline before that too.
#[test]
fn a_deadline_ends_both_ranks() {
    for algorithm in [OneShot, TwoShot, OneShotLl, TwoShotLl] {
        model(algorithm, Duration::ZERO, |mut ranks| {
            let mut second = ranks.pop().unwrap();
            let leaving = thread::spawn(move || (call(&mut second, 0), second));
            let results = [call(&mut ranks[0], 0), call(&mut ranks[0], 1)];
            let (result, second) = leaving.join().unwrap();
            let error = second.check().expect_err("rank 0 waited in vain");
            assert!(matches!(error, Error::PeerTimeout { .. }), "{error}");
            assert_eq!(results[1], Err(error.clone()));
            for result in [&results[0], &result] {
                assert!(*result == Ok(()) || *result == Err(error.clone()), "{result:?}");
            }
        });
    }
}
