//! Lengths, alignments and capacities of the host backend.
#![cfg(not(any(loom, shuttle)))]

mod common;

use common::{Value, assert_bits, group, integer, integer_sum, run_ranks};
use half::{bf16, f16};
use peersum::{
    Algorithm, DType, Error, Options, ReduceOp,
    host::{self, Communicator},
};
use proptest::prelude::*;

const CANARY: u32 = 0x6b6b;

/// A buffer with `count` elements from `offset` on, and canaries around them.
fn guarded<T: Value>(offset: usize, count: usize, value: impl Fn(usize) -> T) -> Vec<T> {
    let mut buffer = vec![T::of_bits(CANARY); offset + count + 33];
    for (index, element) in buffer[offset..offset + count].iter_mut().enumerate() {
        *element = value(index);
    }
    buffer
}

#[track_caller]
fn assert_guarded<T: Value>(what: &str, buffer: &[T], offset: usize, expected: &[T]) {
    let after = offset + expected.len();
    assert_bits(what, &buffer[offset..after], expected);
    let canaries = buffer[..offset].iter().chain(&buffer[after..]);
    assert!(canaries.into_iter().all(|canary| canary.bits() == CANARY), "{what}: written outside");
}

/// One call out of place and one in place, with canaries around every buffer.
fn call<T: Value>(communicator: &mut Communicator, offsets: [usize; 2], count: usize) {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let what = format!("{count} of {} at {offsets:?}, rank {rank} of {world}", T::DTYPE);
    let sums: Vec<T> = (0..count).map(|index| integer_sum(count, world, index)).collect();
    let mine: Vec<T> = (0..count).map(|index| integer(count, rank, index)).collect();

    let mut input = guarded(offsets[0], count, |index| mine[index]);
    let mut output = guarded(offsets[1], count, |_| T::of_bits(0x5555));
    let [from, to] = offsets;
    communicator.all_reduce(&input[from..from + count], &mut output[to..to + count], ReduceOp::Sum).unwrap();
    assert_guarded(&what, &input, from, &mine);
    assert_guarded(&what, &output, to, &sums);

    communicator.all_reduce_in_place(&mut input[from..from + count], ReduceOp::Sum).unwrap();
    assert_guarded(&what, &input, from, &sums);
}

/// Field case A39 (ROCm/rccl#1556): a message that was not whole packets was corrupted.
#[test]
fn every_length_is_exact_and_nothing_around_it_is_written() {
    for world in [2, 3, 4, 7, 8] {
        for algorithm in host::ALGORITHMS {
            // Slots of 512 bytes, so that most lengths take several chunks.
            let options = Options::default().algorithm(algorithm).staging_bytes(world * 2 * 512);
            run_ranks(group(world, &options), |_, communicator| {
                for count in 1..=1100 {
                    // Ranks that take turns on few cores pay for each call; there the types take turns too.
                    let all = world <= 4;
                    if all || count % 3 == 0 {
                        call::<f32>(communicator, [0, 0], count);
                    }
                    if all || count % 3 == 1 {
                        call::<f16>(communicator, [0, 0], count);
                    }
                    if all || count % 3 == 2 {
                        call::<bf16>(communicator, [0, 0], count);
                    }
                }
            });
        }
    }
}

/// Field case A38 (a user's public tracker): buffers that started off a boundary of 16 bytes faulted.
#[test]
fn every_alignment_is_exact_and_ranks_may_differ_in_it() {
    for algorithm in host::ALGORITHMS {
        let options = Options::default().algorithm(algorithm).staging_bytes(3 * 2 * 512);
        run_ranks(group(3, &options), |rank, communicator| {
            for from in 0..8 {
                for to in 0..8 {
                    for count in [8, 64, 808] {
                        call::<f32>(communicator, [(from + rank) % 8, (to + 3 * rank) % 8], count);
                        call::<f16>(communicator, [(from + rank) % 8, (to + 3 * rank) % 8], count);
                        call::<bf16>(communicator, [(from + rank) % 8, (to + 3 * rank) % 8], count);
                    }
                }
            }
        });
    }
}

/// Field case A40 (microsoft/mscclpp#322): with fewer elements than ranks, some ranks' parts are empty.
#[test]
fn fewer_elements_than_ranks_are_exact() {
    for world in 2..=8 {
        for algorithm in [Algorithm::TwoShot, Algorithm::TwoShotPull, Algorithm::TwoShotLl] {
            let options = Options::default().algorithm(algorithm).staging_bytes(8192);
            run_ranks(group(world, &options), |_, communicator| {
                for count in 1..=world + 1 {
                    call::<f32>(communicator, [0, 0], count);
                    call::<f16>(communicator, [0, 0], count);
                    call::<bf16>(communicator, [0, 0], count);
                }
            });
        }
    }
}

/// Field case A41 (vllm-project/vllm#50932): a message that the gate let pass did not fit. Here it is chunked.
#[test]
fn messages_at_the_borders_of_the_capacity_are_exact() {
    for world in [2, 3, 5] {
        // The odd sizes are cut down to whole lines a slot.
        for staging in [world * 2 * 128, world * 2 * 384, world * 2 * 512 + 1, world * 2 * 640 - 1] {
            for algorithm in host::ALGORITHMS {
                let options = Options::default().algorithm(algorithm).staging_bytes(staging);
                run_ranks(group(world, &options), |_, communicator| {
                    let plan = communicator.plan(1, DType::F16).unwrap().expect("more than one rank");
                    assert_eq!(plan.algorithm, algorithm);
                    let capacity = plan.chunk_bytes as usize;
                    assert!(capacity <= staging / 2, "a half holds a chunk");
                    for bytes in [capacity - 16, capacity - 2, capacity, capacity + 2, capacity + 16] {
                        call::<f16>(communicator, [0, 0], bytes / 2);
                    }
                    for bytes in [2 * capacity, 2 * capacity + 2, 3 * capacity - 2, 3 * capacity] {
                        call::<f16>(communicator, [0, 0], bytes / 2);
                    }
                });
            }
        }
    }
}

/// Field case A42 (flashinfer-ai/flashinfer#1223, #1229): sizes wrapped above 2 GiB.
#[test]
fn sizes_are_planned_without_wrapping_or_refused() {
    let communicators = group(2, &Options::default());
    for dtype in DType::ALL {
        for count in [(1 << 31) - 1, 1 << 31, (1 << 32) + 16, isize::MAX as usize / dtype.size()] {
            assert!(communicators[0].plan(count, dtype).unwrap().is_some(), "{count}");
        }
        for count in [isize::MAX as usize / dtype.size() + 1, usize::MAX / 2 + 1, usize::MAX] {
            assert_eq!(communicators[0].plan(count, dtype), Err(Error::TooLarge { count, dtype }));
        }
    }
}

/// Field case A43 (sgl-project/sglang#23609, pytorch/pytorch#46572): no elements broke the call after them.
#[test]
fn no_elements_do_nothing_and_the_next_call_works() {
    for world in [1, 2, 3] {
        run_ranks(group(world, &Options::default()), |_, communicator| {
            call::<f32>(communicator, [0, 0], 10);
            let before = communicator.epochs();
            assert_eq!(communicator.plan(0, DType::F32), Ok(None));
            communicator.all_reduce_in_place::<f32>(&mut [], ReduceOp::Sum).unwrap();
            communicator.all_reduce::<f16>(&[], &mut [], ReduceOp::Max).unwrap();
            assert_eq!(communicator.epochs(), before);
            communicator.check().unwrap();
            call::<bf16>(communicator, [0, 0], 1000);
        });
    }
}

/// A no-op on one rank waits for nobody, even where others never call.
#[test]
fn no_elements_wait_for_nobody() {
    let mut communicators = group(2, &Options::default());
    communicators[0].all_reduce_in_place::<f32>(&mut [], ReduceOp::Sum).unwrap();
}

#[test]
fn one_rank_copies() {
    let mut alone = group(1, &Options::default()).remove(0);
    let input = [f32::from_bits(0x7f80_0001), -0.0, 3.0];
    let mut output = [9.0; 3];
    for op in ReduceOp::ALL {
        alone.all_reduce(&input, &mut output, op).unwrap();
        assert_bits(op, &output, &input);
    }
    assert_eq!(alone.plan(3, DType::F32), Ok(None));
}

#[test]
fn different_lengths_of_input_and_output_are_an_error_that_harms_nothing() {
    run_ranks(group(2, &Options::default()), |_, communicator| {
        let result = communicator.all_reduce(&[1.0f32; 3], &mut [0.0; 4], ReduceOp::Sum);
        assert_eq!(result, Err(Error::LengthMismatch { input: 3, output: 4 }));
        assert!(result.unwrap_err().is_recoverable());
        call::<f32>(communicator, [0, 0], 100);
    });
}

#[test]
fn worlds_options_and_staging_that_cannot_be_are_refused() {
    for world in [0, 129, usize::MAX] {
        let error = Communicator::local(world, &Options::default()).unwrap_err();
        assert!(matches!(error, Error::UnsupportedWorld { world: asked, most: 128, .. } if asked == world), "{error}");
    }
    for staging in [0, 2 * 2 * 128 - 1, usize::MAX] {
        let error = Communicator::local(2, &Options::default().staging_bytes(staging)).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "staging_bytes", .. }), "{error}");
    }
    // These take tensors in symmetric memory alone.
    let mut communicators = group(2, &Options::default().algorithm(Algorithm::TwoShotDirect).symmetric_bytes(4096));
    let error = communicators[0].all_reduce_in_place(&mut [0.0f32; 100], ReduceOp::Sum).unwrap_err();
    assert!(matches!(error, Error::AlgorithmUnavailable { .. }), "{error}");
    assert!(error.is_recoverable());
}

#[test]
fn the_segment_is_whole_pages_and_holds_the_staging() {
    let communicators = group(3, &Options::default().staging_bytes(100_000));
    for communicator in communicators {
        assert_eq!(communicator.memory_bytes() % 4096, 0);
        // Packets take twice their payload, which is at most that of the staging.
        assert!((290_000..320_000).contains(&communicator.memory_bytes()), "{}", communicator.memory_bytes());
    }
    // However much the staging, the packets take some 256 KiB.
    for world in [2, 8, 128] {
        let bytes = group(world, &Options::default()).remove(0).memory_bytes();
        assert!(((4 << 20) + (250 << 10)..(4 << 20) + (400 << 10)).contains(&bytes), "{world} ranks: {bytes}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Any world, length, staging, algorithm and alignment.
    #[test]
    fn any_call_is_exact(
        world in 1usize..7, count in 1usize..6000, lines in 1usize..12, algorithm in 0..host::ALGORITHMS.len(), from in 0usize..9,
        to in 0usize..9,
    ) {
        let options = Options::default().algorithm(host::ALGORITHMS[algorithm]).staging_bytes(world * 2 * 128 * lines);
        run_ranks(group(world, &options), |_, communicator| {
            call::<f32>(communicator, [from, to], count);
            call::<f16>(communicator, [from, to], count);
            call::<bf16>(communicator, [from, to], count);
        });
    }
}

/// What runs on GPUs only is refused, with the reason.
#[test]
fn what_the_host_does_not_have_is_refused() {
    // The direct ones have no symmetric memory here.
    let others = Algorithm::ALL.into_iter().filter(|algorithm| !host::ALGORITHMS.contains(algorithm));
    for algorithm in others.chain([Algorithm::Nccl]) {
        let error = Communicator::local(2, &Options::default().algorithm(algorithm)).map(drop).unwrap_err();
        assert!(
            matches!(error, Error::AlgorithmUnavailable { algorithm: refused, .. } if refused == algorithm),
            "{error}"
        );
    }
}
