//! How a group of the host backend ends when a rank does not come, or comes with another call. Ranks are threads or
//! processes, as `ci/processes.sh` has them; but threads in tests that hold several communicators in one thread.
#![cfg(not(any(loom, shuttle)))]

mod common;

use std::{
    thread,
    time::{Duration, Instant},
};

use common::{Barrier, group, impatience, run_ranks};
use half::{bf16, f16};
use peersum::{
    Algorithm, Call, DType, Element, Error, Options, Phase, ReduceOp,
    host::{self, Communicator},
};

/// How much later than its deadline a wait may end on a busy machine.
const SLACK: Duration = Duration::from_secs(5);

fn timeout() -> Duration {
    impatience(Duration::from_millis(200))
}

fn options() -> Options {
    Options::default().timeout(timeout())
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
        assert!(started.elapsed() < timeout() + SLACK, "{:?}", started.elapsed());
        for error in &errors {
            let Error::PeerTimeout { rank, peer: 2, block: 0, epoch, phase: noted, waited } = *error else {
                panic!("{error}");
            };
            assert_ne!(rank, 2);
            assert_eq!((epoch, noted), (algorithm.rounds() + 1, phase));
            assert!((timeout()..timeout() + SLACK).contains(&waited), "{waited:?}");
            assert_eq!(*error, errors[0], "the first record holds for all");
            assert!(!error.is_recoverable());
        }
        run_ranks(group(4, &options().algorithm(algorithm)), |_, communicator| call(communicator, 1000).unwrap());
    }
}

/// Of threads; of processes it is another error, which `tests/processes` has.
#[test]
fn a_peer_that_left_is_a_timeout_and_its_memory_stays() {
    let mut communicators = group(2, &options());
    drop(communicators.remove(1));
    let error = call(&mut communicators[0], 100_000).unwrap_err();
    assert!(matches!(error, Error::PeerTimeout { rank: 0, peer: 1, .. }), "{error}");
}

/// The call that this rank makes of so many elements.
fn described(communicator: &Communicator, count: usize, dtype: DType, op: ReduceOp) -> Call {
    let plan = communicator.plan(count, dtype).unwrap().expect("something to exchange");
    Call { bytes: (count * dtype.size()) as u64, dtype, op, plan, offsets: [0; 2] }
}

/// One rank makes another call than the rest: a mismatch on every rank, the same, with both calls, well before the
/// deadline; and a new group works.
fn one_rank_differs<T: Element, U: Element>(
    world: usize,
    options: &Options,
    (count, op): (usize, ReduceOp),
    (odd_count, odd_op): (usize, ReduceOp),
) -> Error {
    let odd = world / 2;
    let met = Barrier::new(world);
    let started = Instant::now();
    let results = run_ranks(group(world, &options.clone().timeout(Duration::from_secs(60))), |rank, communicator| {
        call(communicator, 1000).unwrap();
        met.wait(); // else a slow rank may still be in that call when the others find that they differ
        let result = if rank == odd {
            communicator.all_reduce_in_place(&mut vec![U::from_f32(1.0); odd_count], odd_op)
        } else {
            communicator.all_reduce_in_place(&mut vec![T::from_f32(1.0); count], op)
        };
        let error = result.expect_err("no rank has the others' numbers");
        assert_eq!(communicator.check(), Err(error.clone()));
        assert_eq!(call(communicator, 1000), Err(error.clone()));
        let calls =
            [described(communicator, count, T::DTYPE, op), described(communicator, odd_count, U::DTYPE, odd_op)];
        (error, calls)
    });
    assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    let (error, [common, others]) = &results[0];
    let Error::Mismatch { rank, call, peer, peer_call: Some(peer_call), block: 0, .. } = error else {
        panic!("{error}")
    };
    assert!((*rank == odd) != (*peer == odd), "{error}");
    let of = |rank: usize| if rank == odd { others } else { common };
    assert_eq!((&**call, &**peer_call), (of(*rank), of(*peer)), "{error}");
    for text in [format!("rank {rank} called {call},"), format!("rank {peer} {peer_call} ")] {
        assert!(error.to_string().contains(&text), "{error}");
    }
    assert!(!error.is_recoverable());
    assert!(results.iter().all(|(each, _)| each == error), "{results:?}");
    run_ranks(group(world, &Options::default()), |_, communicator| self::call(communicator, 1000).unwrap());
    error.clone()
}

#[test]
fn different_calls_are_the_same_error_on_every_rank_and_name_both() {
    use ReduceOp::{Max, Sum};
    for world in [2, 4, 8] {
        for algorithm in host::ALGORITHMS {
            let options = Options::default().algorithm(algorithm);
            let usual = (1000, Sum);
            one_rank_differs::<f32, f32>(world, &options, usual, (99, Sum));
            one_rank_differs::<f32, f32>(world, &options, usual, (997, Sum)); // in the same pack
            one_rank_differs::<f32, f32>(world, &options, usual, (1 << 20, Sum)); // in more chunks
            one_rank_differs::<f32, f32>(world, &options, usual, (1000, Max));
            one_rank_differs::<f32, f16>(world, &options, usual, (2000, Sum)); // of the same bytes
            one_rank_differs::<f16, bf16>(world, &options, usual, usual);
        }
    }
}

/// Field case A22 (NVIDIA/nccl#1417): different counts hang, or give a wrong tail. Those whose plans take another
/// algorithm are among them.
#[test]
fn different_counts_are_told_before_any_wrong_tail() {
    for world in [2, 4, 8] {
        let options = Options::default();
        one_rank_differs::<f32, f32>(world, &options, (1024, ReduceOp::Sum), (1000, ReduceOp::Sum));
        let error = one_rank_differs::<f32, f32>(world, &options, (256, ReduceOp::Sum), (1 << 20, ReduceOp::Sum));
        let Error::Mismatch { call, peer_call: Some(peer_call), .. } = error else { panic!("{error}") };
        assert_ne!(call.plan.algorithm, peer_call.plan.algorithm);
    }
}

#[test]
fn ranks_that_all_differ_are_told_of_two() {
    let results = run_ranks(group(4, &Options::default().timeout(Duration::from_secs(60))), |rank, communicator| {
        call(communicator, 100 + rank).expect_err("all differ")
    });
    let Error::Mismatch { rank, call, peer, peer_call: Some(peer_call), .. } = &results[0] else {
        panic!("{}", results[0])
    };
    assert_ne!(rank, peer);
    assert_eq!((call.count(), peer_call.count()), (100 + *rank as u64, 100 + *peer as u64));
    assert!(results.iter().all(|error| *error == results[0]), "{results:?}");
}

/// Field case A22, with nothing against something. A rank that skips a call of no length waits for nobody, so its peers learn of it by the deadline.
#[test]
fn an_empty_call_against_a_full_one_ends_by_the_deadline() {
    let ended = Barrier::new(2);
    let results = run_ranks(group(2, &options()), |rank, communicator| {
        let result = call(communicator, if rank == 0 { 0 } else { 64 });
        ended.wait(); // a process that leaves would be told of at once
        result
    });
    assert_eq!(results[0], Ok(()));
    assert!(matches!(results[1], Err(Error::PeerTimeout { rank: 1, peer: 0, .. })), "{:?}", results[1]);
}

#[test]
fn an_abort_ends_waits_that_have_begun_and_all_later_calls() {
    let aborted = Err(Error::Aborted { by: None });
    let started = Instant::now();
    run_ranks(group(3, &Options::default().timeout(Duration::from_secs(60))), |rank, communicator| {
        let handle = communicator.abort_handle();
        thread::scope(|scope| {
            if rank == 0 {
                scope.spawn(move || {
                    thread::sleep(Duration::from_millis(30));
                    handle.clone().abort();
                });
            }
            if rank != 1 {
                assert_eq!(call(communicator, 100), aborted);
            } else {
                while communicator.check().is_ok() {
                    thread::yield_now();
                }
            }
            assert_eq!(call(communicator, 100), aborted);
            assert_eq!(communicator.check(), aborted);
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
    let failed = Barrier::new(2);
    let errors = run_ranks(group(2, &options()), |rank, communicator| {
        if rank == 0 {
            call(communicator, 10).unwrap_err();
        }
        failed.wait();
        communicator.abort();
        communicator.check().unwrap_err()
    });
    assert!(matches!(errors[0], Error::PeerTimeout { rank: 0, peer: 1, .. }), "{}", errors[0]);
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn communicators_and_handles_go_where_they_are_needed() {
    fn send<T: Send>() {}
    fn share<T: Send + Sync + Clone>() {}
    send::<Communicator>();
    share::<peersum::host::AbortHandle>();
}
