//! The host backend at work with threads as ranks, where data races would show under ThreadSanitizer (`ci/tsan.sh`): all
//! algorithms, staging that is used again at once, ranks that fail and leave. Every result is checked too.

use std::{thread, time::Duration};

use half::{bf16, f16};
use peersum::{
    Element, Error, Options, ReduceOp,
    host::{self, Communicator},
};

/// Runs every rank in a thread of its own. The communicators stay with the caller's thread: the standard library drops
/// the last reference to what they share behind a fence, which the sanitizer doesn't understand.
fn on_all<R: Send>(ranks: &mut [Communicator], work: impl Fn(&mut Communicator) -> R + Sync) -> Vec<R> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

/// What a rank has at an index in a call: small integers, whose sums are exact in every type.
fn value(call: usize, rank: usize, index: usize) -> f32 {
    ((call * 5 + rank * 3 + index * 7) % 8) as f32
}

fn call<T: Element + PartialEq>(communicator: &mut Communicator, call: usize, count: usize) -> Result<(), Error> {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let mut input: Vec<T> = (0..count).map(|index| T::from_f32(value(call, rank, index))).collect();
    let mut output = vec![T::from_f32(-1.0); count];
    communicator.all_reduce(&input, &mut output, ReduceOp::Sum)?;
    // At once, as callers do.
    input.fill(T::from_f32(f32::NAN));
    for (index, sum) in output.iter().enumerate() {
        let expected = (0..world).map(|rank| value(call, rank, index)).sum::<f32>();
        assert!(*sum == T::from_f32(expected), "call {call}, rank {rank} of {world}, element {index} of {count}");
    }
    Ok(())
}

fn group(world: usize, options: &Options) -> Vec<Communicator> {
    Communicator::local(world, options).expect("a group of this size")
}

/// In slots that are used again at once, and in several chunks; what the plan chooses changes with the size.
fn every_algorithm() {
    for world in [2, 3, 5] {
        for algorithm in [None].into_iter().chain(host::ALGORITHMS.map(Some)) {
            let mut options = Options::default().staging_bytes(world * 2 * 512);
            options.algorithm = algorithm;
            on_all(&mut group(world, &options), |rank| {
                for number in 0..150 {
                    let count = [1, 7, 64, 200, 1100][number % 5];
                    call::<f32>(rank, number, count).expect("a right call");
                    call::<f16>(rank, number, count).expect("a right call");
                    call::<bf16>(rank, number, count).expect("a right call");
                }
            });
        }
    }
}

/// Field case A01 (vllm-project/vllm#2760): ranks raced on a flag.
fn many_short_calls() {
    for (world, calls) in [(2, 60_000), (4, 6_000), (8, 1_000)] {
        on_all(&mut group(world, &Options::default()), |rank| {
            for number in 0..calls {
                call::<f32>(rank, number, [4, 16, 33, 256, 1024][number % 5]).expect("a right call");
            }
        });
    }
}

fn failures() {
    for algorithm in host::ALGORITHMS {
        let options = Options::default().algorithm(algorithm).timeout(Duration::from_millis(200));
        // One makes another call.
        let mut ranks = group(3, &options);
        let errors = on_all(&mut ranks, |rank| {
            call::<f32>(rank, 0, 500).expect("a right call");
            call::<f32>(rank, 1, 500 + 100 * (rank.rank() / 2)).expect_err("a mismatch")
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        // One never calls, and learns of it.
        let mut ranks = group(3, &options);
        let errors = on_all(&mut ranks[..2], |rank| call::<f32>(rank, 0, 500).expect_err("a timeout"));
        assert!(matches!(errors[0], Error::PeerTimeout { peer: 2, .. }), "{errors:?}");
        assert_eq!(ranks[2].check(), Err(errors[0].clone()));
        // One asks for the end while the others wait.
        let mut ranks = group(3, &Options::default().algorithm(algorithm));
        let handle = ranks[2].abort_handle();
        let aborts = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            handle.abort();
        });
        on_all(&mut ranks[..2], |rank| {
            assert_eq!(call::<f32>(rank, 0, 500), Err(Error::Aborted { by: None }));
        });
        aborts.join().expect("an abort");
    }
}

fn main() {
    every_algorithm();
    many_short_calls();
    failures();
    println!("every call was right");
}
