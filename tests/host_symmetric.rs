//! Tensors of the host backend in symmetric memory: results, lengths, places, and what a failed call leaves.
#![cfg(not(any(loom, shuttle)))]

mod common;

use std::{thread, time::Duration};

use common::{Value, assert_bits, group, integer, integer_sum, references, run_ranks, wild};
use half::{bf16, f16};
use peersum::{
    Algorithm, DType, Error, HostStores, Options, Placement, ReduceOp,
    host::{Communicator, SymmetricBuffer},
};

const DIRECT: [Algorithm; 2] = [Algorithm::OneShotDirect, Algorithm::TwoShotDirect];

fn options() -> Options {
    Options::default().symmetric_bytes(4 << 20).staging_bytes(64 << 10)
}

fn filled<T: Value>(communicator: &Communicator, values: &[T]) -> SymmetricBuffer<T> {
    let mut buffer = communicator.symmetric_buffer::<T>(values.len()).unwrap();
    assert!(buffer.iter().all(|value| value.bits() == 0), "zeros at first");
    buffer.copy_from_slice(values);
    buffer
}

/// Every reduction, type and number of ranks, by every algorithm that is given such tensors, and by stores of both
/// kinds.
#[test]
fn every_reduction_gives_the_references_bits() {
    fn all<T: Value>() {
        for world in [1, 2, 3, 5] {
            for count in [1, 7, 1237, 40_000] {
                let inputs: Vec<Vec<T>> = (0..world).map(|rank| wild(count as u64, rank, count)).collect();
                for (turn, op) in ReduceOp::ALL.into_iter().enumerate() {
                    let expected = references(op, &inputs);
                    for algorithm in [None, Some(DIRECT[0]), Some(DIRECT[1]), Some(Algorithm::TwoShot)] {
                        let mut options = options().blocks(1 + turn as u32 % 2);
                        options.algorithm = algorithm;
                        options.host_stores = [HostStores::Cached, HostStores::Streaming][turn % 2];
                        run_ranks(group(world, &options), |rank, communicator| {
                            let what = format!("{count} x {op} of {world} by {algorithm:?}, rank {rank}");
                            let input = filled(communicator, &inputs[rank]);
                            let mut output = filled(communicator, &inputs[(rank + 1) % world]);
                            communicator.all_reduce_symmetric(&input, &mut output, op).unwrap();
                            assert_bits(&what, &output, &expected);
                            assert_bits(&what, &input, &inputs[rank]);
                            let mut buffer = filled(communicator, &inputs[rank]);
                            if algorithm == Some(Algorithm::OneShotDirect) && world > 1 {
                                let error = communicator.all_reduce_symmetric_in_place(&mut buffer, op).unwrap_err();
                                assert!(matches!(error, Error::AlgorithmUnavailable { .. }), "{error}");
                                assert_bits(&what, &buffer, &inputs[rank]);
                            } else {
                                communicator.all_reduce_symmetric_in_place(&mut buffer, op).unwrap();
                                assert_bits(&what, &buffer, &expected);
                            }
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

/// Buffers come and go between calls, staged calls come between, and nothing around a tensor is written.
#[test]
fn calls_of_all_kinds_may_alternate() {
    for world in [2, 4] {
        run_ranks(group(world, &options()), |rank, communicator| {
            let mut around: [SymmetricBuffer<f32>; 2] = [(); 2].map(|()| communicator.symmetric_buffer(64).unwrap());
            for call in 0..400 {
                let count = 1 + (call * 37) % 3000;
                let sums: Vec<f32> = (0..count).map(|index| integer_sum(call, world, index)).collect();
                let mine: Vec<f32> = (0..count).map(|index| integer(call, rank, index)).collect();
                let what = format!("call {call}, rank {rank} of {world}");
                match call % 3 {
                    0 => {
                        let mut buffer = filled(communicator, &mine);
                        let behind = communicator.symmetric_buffer::<f32>(8).unwrap();
                        communicator.all_reduce_symmetric_in_place(&mut buffer, ReduceOp::Sum).unwrap();
                        assert_bits(&what, &buffer, &sums);
                        assert!(behind.iter().all(|&value| value == 0.0), "{what}");
                    }
                    1 => {
                        let mut output = vec![0.0; count];
                        communicator.all_reduce(&mine, &mut output, ReduceOp::Sum).unwrap();
                        assert_bits(&what, &output, &sums);
                    }
                    _ => {
                        let input = filled(communicator, &mine);
                        let mut output = communicator.symmetric_buffer(count).unwrap();
                        communicator.all_reduce_symmetric(&input, &mut output, ReduceOp::Sum).unwrap();
                        assert_bits(&what, &output, &sums);
                        // Symmetric memory is memory: a call with slices of it is one through staging.
                        communicator.all_reduce_in_place(&mut output, ReduceOp::Max).unwrap();
                        assert_bits(&what, &output, &sums);
                    }
                }
                assert!(around.iter_mut().all(|buffer| buffer.iter_mut().all(|value| *value == 0.0)), "{what}");
            }
        });
    }
}

#[test]
fn the_plan_says_how_and_what_cannot_be_is_an_error() {
    let mut ranks = group(2, &options());
    let plan = |placement, count| ranks[0].plan_at(placement, count, DType::F32).unwrap().unwrap().algorithm;
    assert_eq!(plan(Placement::Symmetric, 100), Algorithm::OneShotDirect);
    assert_eq!(plan(Placement::Symmetric, 100_000), Algorithm::TwoShotDirect);
    assert_eq!(plan(Placement::SymmetricInPlace, 100), Algorithm::TwoShotDirect);
    assert!(!plan(Placement::Anywhere, 100).is_direct());

    let error = ranks[0].symmetric_buffer::<f32>(2 << 20).unwrap_err();
    assert!(matches!(error, Error::SymmetricMemoryFull { rank: 0, free: 4194304, total: 4194304, .. }), "{error}");
    assert!(matches!(ranks[0].symmetric_buffer::<f32>(usize::MAX), Err(Error::TooLarge { .. })));
    assert!(matches!(
        group(2, &Options::default())[0].symmetric_buffer::<f32>(1),
        Err(Error::SymmetricMemoryFull { .. })
    ));

    let (mut foreign, same) = (ranks[1].symmetric_buffer::<f32>(8).unwrap(), ranks[0].symmetric_buffer(8).unwrap());
    for _ in 0..2 {
        let error = ranks[0].all_reduce_symmetric_in_place(&mut foreign, ReduceOp::Sum).unwrap_err();
        assert!(error.to_string().contains("not in this communicator's symmetric memory"), "{error}");
        assert!(ranks[0].all_reduce_symmetric(&same, &mut foreign, ReduceOp::Sum).is_err());
    }
    let mut shorter = ranks[0].symmetric_buffer(7).unwrap();
    let error = ranks[0].all_reduce_symmetric(&same, &mut shorter, ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::LengthMismatch { input: 8, output: 7 }), "{error}");
    assert_eq!(ranks[0].check(), Ok(()), "nothing was started");

    // A direct algorithm can't take tensors that lie elsewhere.
    let mut forced = group(2, &options().algorithm(Algorithm::TwoShotDirect));
    let error = forced[0].all_reduce_in_place(&mut [1.0f32; 8], ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::AlgorithmUnavailable { .. }), "{error}");
}

/// Ranks whose tensors lie at other places would read what is not meant.
#[test]
fn tensors_at_different_places_are_a_mismatch() {
    let errors = run_ranks(group(3, &options()), |rank, communicator| {
        let _before = (rank == 1).then(|| communicator.symmetric_buffer::<f32>(100).unwrap());
        let mut buffer = communicator.symmetric_buffer::<f32>(1000).unwrap();
        communicator.all_reduce_symmetric_in_place(&mut buffer, ReduceOp::Sum).unwrap_err()
    });
    assert!(matches!(errors[0], Error::Mismatch { .. }), "{}", errors[0]);
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
}

/// A late peer may still write what was lent to it, so a buffer leaves it when its call fails; and it is not used
/// again.
#[test]
fn a_failed_call_leaves_zeros_in_other_memory() {
    let mut ranks = group(2, &options().timeout(Duration::from_millis(20)));
    let late = ranks.pop().unwrap();
    let mut rank = ranks.pop().unwrap();
    let input = filled(&rank, &[1.0f32; 1000]);
    let mut output = filled(&rank, &[2.0f32; 1000]);
    let (input_at, output_at) = (input.as_ptr(), output.as_ptr());
    let error = rank.all_reduce_symmetric(&input, &mut output, ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::PeerTimeout { rank: 0, peer: 1, .. }), "{error}");
    assert_ne!(output.as_ptr(), output_at);
    assert!(output.iter().all(|&value| value == 0.0));
    // What was only read stays, until it is written.
    assert_eq!(input.as_ptr(), input_at);
    let mut input = input;
    assert!(input.iter().all(|&value| value == 1.0));
    input[7] = 3.0;
    assert_ne!(input.as_ptr(), input_at);
    assert_eq!((input[6], input[7]), (1.0, 3.0));
    for buffer in [&mut input, &mut output] {
        assert!(rank.all_reduce_symmetric_in_place(buffer, ReduceOp::Sum).is_err());
    }
    drop((input, output));
    let next = rank.symmetric_buffer::<f32>(1000).unwrap();
    assert!(next.as_ptr() > output_at, "what peers may write is nobody's");
    assert_eq!(late.check(), Err(error));
    // Buffers outlive their communicator.
    drop((rank, late));
    assert!(next.iter().all(|&value| value == 0.0));
}

/// A wait of a direct call ends like any other.
#[test]
fn an_abort_ends_a_direct_call() {
    let mut ranks = group(2, &options());
    let aborter = ranks.pop().unwrap();
    let mut rank = ranks.pop().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            let mut buffer = rank.symmetric_buffer::<f32>(1000).unwrap();
            rank.all_reduce_symmetric_in_place(&mut buffer, ReduceOp::Sum)
        });
        thread::sleep(Duration::from_millis(30));
        aborter.abort();
        assert_eq!(waiting.join().unwrap(), Err(Error::Aborted { by: None }));
    });
}
