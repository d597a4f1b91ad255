//! How a group of the host backend ends when a rank does not come, or comes with another call.
#![cfg(not(any(loom, shuttle)))]

mod common;

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use common::{group, run_ranks};
use peersum::{
    Algorithm, Error, Options, Phase, ReduceOp,
    host::{self, Communicator},
};

const TIMEOUT: Duration = Duration::from_millis(200);
/// How much later than its deadline a wait may end on a busy machine.
const SLACK: Duration = Duration::from_secs(5);

fn options() -> Options {
    Options::default().timeout(TIMEOUT)
}

fn call(communicator: &mut Communicator, count: usize) -> Result<(), Error> {
    let mut buffer = vec![1.0f32; count];
    communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
    assert!(buffer.iter().all(|&sum| sum == communicator.world_size() as f32));
    Ok(())
}

#[test]
fn a_peer_that_never_calls_is_named_on_every_rank_and_a_new_group_works_at_once() {
    for (algorithm, phase) in [
        (Algorithm::OneShot, Phase::Exchange),
        (Algorithm::OneShotPull, Phase::Exchange),
        (Algorithm::TwoShot, Phase::ReduceScatter),
        (Algorithm::TwoShotPull, Phase::ReduceScatter),
        (Algorithm::OneShotLl, Phase::Exchange),
        (Algorithm::TwoShotLl, Phase::ReduceScatter),
    ] {
        let met = Barrier::new(4);
        let started = Instant::now();
        let errors = run_ranks(group(4, &options().algorithm(algorithm)), |rank, communicator| {
            call(communicator, 1000).unwrap();
            let result = if rank == 2 { Ok(()) } else { call(communicator, 1000) };
            met.wait();
            // The absent rank is told too, at its next call; and all are told the same from then on.
            let error = call(communicator, 1000).unwrap_err();
            assert_eq!(communicator.check(), Err(error.clone()));
            assert!(rank == 2 || result == Err(error.clone()));
            error
        });
        assert!(started.elapsed() < TIMEOUT + SLACK, "{:?}", started.elapsed());
        for error in &errors {
            let Error::PeerTimeout { rank, peer: 2, block: 0, epoch, phase: noted, waited } = *error else {
                panic!("{error}");
            };
            assert_ne!(rank, 2);
            assert_eq!((epoch, noted), (algorithm.rounds() + 1, phase));
            assert!((TIMEOUT..TIMEOUT + SLACK).contains(&waited), "{waited:?}");
            assert_eq!(*error, errors[0], "the first record holds for all");
            assert!(!error.is_recoverable());
        }
        run_ranks(group(4, &options().algorithm(algorithm)), |_, communicator| call(communicator, 1000).unwrap());
    }
}

#[test]
fn a_peer_that_left_is_a_timeout_and_its_memory_stays() {
    let mut communicators = group(2, &options());
    drop(communicators.remove(1));
    let error = call(&mut communicators[0], 100_000).unwrap_err();
    assert!(matches!(error, Error::PeerTimeout { rank: 0, peer: 1, .. }), "{error}");
}

/// Calls that differ in anything end on all ranks, well before the deadline.
#[test]
fn different_calls_are_an_error_on_every_rank() {
    type Odd = fn(&mut Communicator) -> Result<(), Error>;
    let odd: [(&str, Odd); 5] = [
        ("shorter", |communicator| call(communicator, 99)),
        ("shorter, in the same pack", |communicator| call(communicator, 997)),
        ("longer", |communicator| call(communicator, 1 << 20)),
        ("reduction", |communicator| communicator.all_reduce_in_place(&mut [1.0f32; 1000], ReduceOp::Max)),
        ("type", |communicator| communicator.all_reduce_in_place(&mut vec![half::f16::ONE; 2000], ReduceOp::Sum)),
    ];
    for (what, odd) in odd {
        for algorithm in host::ALGORITHMS {
            let options = Options::default().timeout(Duration::from_secs(60)).algorithm(algorithm);
            let started = Instant::now();
            let errors = run_ranks(group(3, &options), |rank, communicator| {
                call(communicator, 1000).unwrap();
                let result = if rank == 1 { odd(communicator) } else { call(communicator, 1000) };
                let error = result.expect_err(what);
                assert_eq!(communicator.check(), Err(error.clone()));
                error
            });
            assert!(started.elapsed() < SLACK, "{what}: {:?}", started.elapsed());
            let Error::Mismatch { rank, peer, block: 0, .. } = errors[0] else { panic!("{what}: {}", errors[0]) };
            assert!((rank == 1) != (peer == 1), "{what}: {}", errors[0]);
            assert!(errors.iter().all(|error| *error == errors[0]), "{what}: {errors:?}");
        }
    }
}

/// A rank that skips a call of no length waits for nobody, so its peers learn of it by the deadline.
#[test]
fn an_empty_call_against_a_full_one_ends_by_the_deadline() {
    let results =
        run_ranks(group(2, &options()), |rank, communicator| call(communicator, if rank == 0 { 0 } else { 64 }));
    assert_eq!(results[0], Ok(()));
    assert!(matches!(results[1], Err(Error::PeerTimeout { rank: 1, peer: 0, .. })), "{:?}", results[1]);
}

#[test]
fn an_abort_ends_waits_that_have_begun_and_all_later_calls() {
    let communicators = group(3, &Options::default().timeout(Duration::from_secs(60)));
    let handle = communicators[0].abort_handle();
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(30));
            handle.clone().abort();
        });
        run_ranks(communicators, |rank, communicator| {
            if rank != 1 {
                assert_eq!(call(communicator, 100), Err(Error::Aborted { by: None }));
            } else {
                while communicator.check().is_ok() {
                    thread::yield_now();
                }
            }
            assert_eq!(call(communicator, 100), Err(Error::Aborted { by: None }));
            assert_eq!(communicator.check(), Err(Error::Aborted { by: None }));
        });
    });
    assert!(started.elapsed() < SLACK);
}

#[test]
fn an_abort_by_a_rank_reaches_all_and_a_handle_may_outlive_the_group() {
    let communicators = group(2, &Options::default());
    let handle = communicators[1].abort_handle();
    communicators[0].abort();
    assert!(communicators.iter().all(|communicator| communicator.check() == Err(Error::Aborted { by: None })));
    drop(communicators);
    handle.abort();
}

/// The first failure stays: what comes later changes nothing.
#[test]
fn an_abort_after_a_failure_leaves_the_failure() {
    let mut communicators = group(2, &options());
    let error = call(&mut communicators[0], 10).unwrap_err();
    assert!(matches!(error, Error::PeerTimeout { .. }), "{error}");
    communicators[1].abort();
    assert_eq!(communicators[1].check(), Err(error));
}

#[test]
fn communicators_and_handles_go_where_they_are_needed() {
    fn send<T: Send>() {}
    fn share<T: Send + Sync + Clone>() {}
    send::<Communicator>();
    share::<peersum::host::AbortHandle>();
}
