//! Faults of a rank of the host backend: late, absent, gone. The others end by the deadline with an error that names it,
//! or with the right result; and a new group works at once. Ranks are threads or processes, as `ci/processes.sh` has them.
//!
//! A flag that gets lost is a test of `src/host/communicator.rs`, which can lose one.
#![cfg(not(any(loom, shuttle)))]

mod common;

use std::{
    panic, thread,
    time::{Duration, Instant},
};

use common::{Barrier, are_processes, group, impatience, integer, integer_sum, rank_outcomes, run_ranks};
use peersum::{
    Error, Options, ReduceOp,
    host::{self, Communicator},
};

/// How much later than its deadline a wait may end on a busy machine.
const SLACK: Duration = Duration::from_secs(5);

fn timeout() -> Duration {
    impatience(Duration::from_millis(150))
}

fn options() -> Options {
    Options::default().timeout(timeout())
}

/// Call number `call`. Where it returns `Ok`, every element is right.
fn reduce(communicator: &mut Communicator, call: usize, count: usize) -> Result<(), Error> {
    let input: Vec<f32> = (0..count).map(|index| integer(call, communicator.rank(), index)).collect();
    let mut output = vec![f32::NAN; count];
    communicator.all_reduce(&input, &mut output, ReduceOp::Sum)?;
    for (index, sum) in output.into_iter().enumerate() {
        assert_eq!(sum, integer_sum(call, communicator.world_size(), index), "call {call}, element {index}");
    }
    Ok(())
}

#[track_caller]
fn a_new_group_works(world: usize) {
    let started = Instant::now();
    run_ranks(group(world, &Options::default()), |_, communicator| {
        for (call, count) in [1, 1000, 100_000].into_iter().enumerate() {
            reduce(communicator, call, count).unwrap();
        }
    });
    assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
}

/// All have the same error, a timeout of a wait for one of `absent`.
#[track_caller]
fn assert_named(errors: &[Error], absent: &[usize]) {
    let Error::PeerTimeout { rank, peer, waited, .. } = errors[0] else { panic!("{}", errors[0]) };
    assert!(absent.contains(&peer) && !absent.contains(&rank), "{}", errors[0]);
    assert!(waited < timeout() + SLACK, "{waited:?}");
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
}

/// One rank comes to its second call so late. Within the timeout that changes nothing; else all are told who was late, and
/// so is that rank when it comes.
fn a_late_rank(world: usize, delay: Duration, options: &Options) {
    let late = world - 1;
    if delay < options.timeout {
        run_ranks(group(world, options), |rank, communicator| {
            for call in 0..5 {
                if call == 1 && rank == late {
                    thread::sleep(delay);
                }
                reduce(communicator, call, 3000).unwrap();
            }
        });
    } else {
        let gave_up = Barrier::new(world);
        let errors = run_ranks(group(world, options), |rank, communicator| {
            gave_up.wait(); // processes come out of their meeting one by one
            reduce(communicator, 0, 3000).unwrap();
            if rank == late {
                thread::sleep(delay);
                gave_up.wait(); // on a busy machine the others may be late too
                reduce(communicator, 1, 3000).unwrap_err()
            } else {
                let error = reduce(communicator, 1, 3000).unwrap_err();
                gave_up.wait();
                error
            }
        });
        assert_named(&errors, &[late]);
    }
    a_new_group_works(world);
}

#[test]
fn a_rank_that_is_50_ms_late() {
    let delay = Duration::from_millis(50);
    for algorithm in host::ALGORITHMS {
        a_late_rank(4, delay, &Options::default().algorithm(algorithm));
        // Two ranks: which of more is late within so short a time may be the machine's choice. In a meeting of processes
        // it would be too short.
        if !are_processes() {
            a_late_rank(2, delay, &options().timeout(Duration::from_millis(10)).algorithm(algorithm));
        }
    }
}

/// Field case A21 (sgl-project/sglang#30209): a rank that is stopped for a while and goes on.
#[test]
fn a_rank_that_is_5_s_late() {
    let delay = Duration::from_secs(5);
    thread::scope(|scope| {
        scope.spawn(|| a_late_rank(4, delay, &Options::default()));
        scope.spawn(|| a_late_rank(4, delay, &options()));
    });
}

#[test]
fn a_rank_that_never_calls() {
    for world in [2, 4, 8] {
        for absent in [0, world - 1] {
            let (came, gave_up) = (Barrier::new(world), Barrier::new(world));
            let errors = run_ranks(group(world, &options()), |rank, communicator| {
                came.wait();
                let started = Instant::now();
                let result = if rank == absent { Ok(()) } else { reduce(communicator, 0, 500) };
                gave_up.wait();
                assert!(started.elapsed() < timeout() + SLACK, "{:?}", started.elapsed());
                let error = communicator.check().unwrap_err();
                assert!(rank == absent || result == Err(error.clone()), "{result:?}");
                error
            });
            assert_named(&errors, &[absent]);
            a_new_group_works(world);
        }
    }
}

/// How a rank leaves its group.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    Drops,
    Panics,
}

/// Runs `calls` calls on every rank, of which those in `leavers` leave before call `after`. The others are told at that very
/// call, and all the same: threads by the deadline, processes at once, and who of them has left.
#[track_caller]
fn some_leave(world: usize, leavers: &[usize], after: usize, calls: usize, leaving: Leaving) {
    let outcomes = rank_outcomes(group(world, &options()), |rank, communicator| {
        let leaves = leavers.contains(&rank);
        for call in 0..calls {
            if leaves && call == after {
                match leaving {
                    Leaving::Drops => return None,
                    // Without the message of a panic, which would look like a failure of the test.
                    Leaving::Panics => panic::resume_unwind(Box::new("leaves")),
                }
            }
            if let Err(error) = reduce(communicator, call, 64) {
                assert_eq!((call, leaves), (after, false), "{error}");
                assert_eq!(communicator.check(), Err(error.clone()));
                return Some(error);
            }
        }
        panic!("all calls came back, though ranks {leavers:?} left");
    });
    let mut errors = Vec::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(error) => errors.extend(error),
            Err(_) if leavers.contains(&rank) => {}
            Err(failure) => panic!("{failure}"),
        }
    }
    assert_eq!(errors.len(), world - leavers.len());
    if are_processes() {
        let Error::PeerLeft { rank, peer } = errors[0] else { panic!("{}", errors[0]) };
        assert!(leavers.contains(&peer) && !leavers.contains(&rank), "{}", errors[0]);
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    } else {
        assert_named(&errors, leavers);
    }
    a_new_group_works(world);
}

/// Field case A21: a rank dies in the middle of 10,000 calls.
#[test]
fn a_rank_that_leaves_in_the_middle_of_a_sequence() {
    for leaving in [Leaving::Drops, Leaving::Panics] {
        for (world, leaver) in [(2, 0), (3, 1), (4, 3)] {
            some_leave(world, &[leaver], 5000, 10_000, leaving);
        }
    }
}

#[test]
fn three_of_eight_ranks_vanish() {
    for leaving in [Leaving::Drops, Leaving::Panics] {
        for after in [0, 3] {
            some_leave(8, &[1, 4, 7], after, 5, leaving);
        }
    }
}

#[test]
fn an_abort_while_ranks_wait() {
    for world in [2, 8] {
        let came = Barrier::new(world);
        let started = Instant::now();
        run_ranks(group(world, &Options::default().timeout(Duration::from_secs(60))), |rank, communicator| {
            came.wait();
            if rank == world - 1 {
                thread::sleep(Duration::from_millis(30));
                assert_eq!(communicator.check(), Ok(()), "they wait for this rank");
                communicator.abort();
            } else {
                assert_eq!(reduce(communicator, 0, 500), Err(Error::Aborted { by: None }));
            }
            assert_eq!(communicator.check(), Err(Error::Aborted { by: None }));
        });
        assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
        a_new_group_works(world);
    }
}

/// Whatever the timeout is: a drop waits for nobody. Of threads, since one has to drop several.
#[test]
fn a_drop_waits_for_nobody() {
    for fails_first in [false, true] {
        let timeout = if fails_first { timeout() } else { Duration::from_secs(600) };
        let mut ranks = group(3, &Options::default().timeout(timeout));
        drop(ranks.remove(1));
        if fails_first {
            assert!(matches!(reduce(&mut ranks[0], 0, 500), Err(Error::PeerTimeout { rank: 0, .. })));
        }
        let started = Instant::now();
        drop(ranks);
        let took = started.elapsed();
        eprintln!("dropping the last two of three ranks took {took:?}");
        assert!(took < SLACK, "{took:?}");
        a_new_group_works(3);
    }
}
