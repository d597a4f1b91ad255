//! Ranks of the host backend with several threads, and both kinds of stores.
#![cfg(not(any(loom, shuttle)))]

mod common;

use std::{
    thread,
    time::{Duration, Instant},
};

use common::{Value, assert_bits, group, references, run_ranks, wild};
use half::{bf16, f16};
use peersum::{DType, Error, HostStores, Options, ReduceOp, host};

/// Lengths that one thread does alone, and that two to four share, with an odd end; unaligned and in place too.
#[test]
fn ranks_of_one_to_four_threads_give_the_references_bits() {
    fn all<T: Value>() {
        const COUNTS: [usize; 4] = [1000, 140_001, 300_007, 600_001];
        for world in [2, 3] {
            for (turn, count) in COUNTS.into_iter().enumerate() {
                let inputs: Vec<Vec<T>> = (0..world).map(|rank| wild(count as u64, rank, count)).collect();
                let op = ReduceOp::ALL[turn];
                let expected = references(op, &inputs);
                for threads in 1..=4 {
                    for algorithm in host::ALGORITHMS {
                        let options = Options::default().blocks(threads).algorithm(algorithm);
                        let stores = [HostStores::Cached, HostStores::Streaming][(turn + threads as usize) % 2];
                        run_ranks(group(world, &options.host_stores(stores)), |rank, communicator| {
                            let blocks = communicator.plan(count, T::DTYPE).unwrap().unwrap().blocks;
                            assert!(
                                blocks <= threads
                                    && (blocks > 1) == (threads > 1 && count * size_of::<T>() >= 256 << 10)
                            );
                            let what = format!("{op} of {count} {} by {algorithm}, {threads} threads", T::DTYPE);
                            let mut output = vec![T::of_bits(0); count + 1];
                            communicator.all_reduce(&inputs[rank], &mut output[1..], op).unwrap();
                            assert_bits(&what, &output[1..], &expected);
                            output[1..].copy_from_slice(&inputs[rank]);
                            communicator.all_reduce_in_place(&mut output[1..], op).unwrap();
                            assert_bits(&what, &output[1..], &expected);
                            assert_eq!(output[0].bits(), 0);
                        });
                    }
                }
            }
        }
    }
    all::<f32>();
    all::<f16>();
    all::<bf16>();
}

/// A message so long that the output goes past the caches, by ranks that hand over in different ways: the kind of
/// stores is each rank's own business, which a rank that is a process may show.
#[test]
fn long_messages_by_either_kind_of_stores_are_exact() {
    fn all<T: Value>() {
        let count = (5 << 20) / T::DTYPE.size() + 3;
        let inputs: Vec<Vec<T>> = (0..2).map(|rank| wild(count as u64, rank, count)).collect();
        let expected = references(ReduceOp::Sum, &inputs);
        for stores in [HostStores::Probed, HostStores::Cached, HostStores::Streaming] {
            for algorithm in [None].into_iter().chain(host::ALGORITHMS.map(Some)) {
                let mut options = Options::default().host_stores(stores).blocks(2);
                options.algorithm = algorithm;
                run_ranks(group(2, &options), |rank, communicator| {
                    let mut output = vec![T::of_bits(0); count];
                    communicator.all_reduce(&inputs[rank], &mut output, ReduceOp::Sum).unwrap();
                    assert_bits(format!("{} by {algorithm:?}, {stores:?}", T::DTYPE), &output, &expected);
                });
            }
        }
    }
    all::<f32>();
    all::<bf16>();
    all::<f16>();
}

#[test]
fn a_number_of_threads_that_cannot_be_is_an_error() {
    for threads in [0, 33, u32::MAX] {
        let error = host::Communicator::local(2, &Options::default().blocks(threads)).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "blocks", .. }), "{error}");
    }
    let ranks = group(2, &Options::default().blocks(32));
    assert_eq!(ranks[0].plan(64 << 20, DType::F32).unwrap().unwrap().blocks, 32);
    assert_eq!(ranks[0].epochs(), [0; 64]);
}

/// All threads of all ranks notice, whichever of them is first, and a drop ends the threads.
#[test]
fn a_rank_of_several_threads_that_never_calls_ends_the_others() {
    for threads in [2, 4] {
        let timeout = Duration::from_millis(100);
        let mut ranks = group(3, &Options::default().blocks(threads).timeout(timeout));
        let absent = ranks.remove(1);
        let started = Instant::now();
        let errors: Vec<_> = thread::scope(|scope| {
            let each = |mut rank: host::Communicator| {
                let mut buffer = vec![1.0f32; 500_000];
                let error = rank.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap_err();
                assert_eq!(rank.check(), Err(error.clone()));
                error
            };
            let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || each(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(started.elapsed() < timeout + Duration::from_secs(5), "{:?}", started.elapsed());
        assert!(matches!(errors[0], Error::PeerTimeout { peer: 1, .. }), "{}", errors[0]);
        assert_eq!(absent.check(), Err(errors[0].clone()));
        assert_eq!(errors[0], errors[1]);
    }
}

/// An abort while all threads of a rank wait, and have long gone to sleep.
#[test]
fn an_abort_wakes_who_sleeps() {
    let mut ranks = group(2, &Options::default().blocks(3));
    let aborter = ranks.pop().unwrap();
    let mut rank = ranks.pop().unwrap();
    let waiting = thread::spawn(move || rank.all_reduce_in_place(&mut vec![1.0f32; 500_000], ReduceOp::Sum));
    thread::sleep(Duration::from_millis(50));
    let started = Instant::now();
    aborter.abort();
    assert_eq!(waiting.join().unwrap(), Err(Error::Aborted { by: None }));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

/// A rank that comes after the other has gone to sleep: the sums are right, and a wait costs little of the core.
#[test]
fn a_long_wait_sleeps_and_is_woken() {
    let mut ranks = group(2, &Options::default());
    let mut late = ranks.pop().unwrap();
    let mut rank = ranks.pop().unwrap();
    let waiting = thread::spawn(move || {
        let mut longest = Duration::ZERO;
        for _ in 0..5 {
            let before = cpu_time();
            rank.all_reduce_in_place(&mut [1.0f32; 1000], ReduceOp::Sum).unwrap();
            longest = longest.max(cpu_time() - before);
        }
        longest
    });
    for _ in 0..5 {
        thread::sleep(Duration::from_millis(200));
        let mut buffer = [2.0f32; 1000];
        late.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, [3.0; 1000]);
    }
    let longest = waiting.join().unwrap();
    assert!(longest < Duration::from_millis(100), "{longest:?} of the core in a wait of 200 ms");
}

/// Of this thread.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}
