//! What the host backend computes: the reference's bits, on every rank, whichever way it goes.
#![cfg(not(any(loom, shuttle)))]

mod common;

use common::{
    Random, Value, among_others, assert_bits, group, integer, integer_sum, places, references, run_ranks, wild,
};
use half::{bf16, f16};
use peersum::{
    Options, ReduceOp,
    host::{self, Communicator},
};

/// All algorithms, in both forms of the call, give every rank the reference's bits. Returns them.
fn check<T: Value>(inputs: &[Vec<T>], op: ReduceOp) -> Vec<T> {
    let expected = references(op, inputs);
    for algorithm in host::ALGORITHMS {
        let options = Options::default().algorithm(algorithm).staging_bytes(inputs.len() * 2 * 256);
        let what = |rank: usize, form| format!("{op} of {} by {algorithm}, rank {rank}, {form}", inputs.len());
        run_ranks(group(inputs.len(), &options), |rank, communicator| {
            let mut output = vec![T::of_bits(0x4242_4242); inputs[rank].len()];
            communicator.all_reduce(&inputs[rank], &mut output, op).unwrap();
            assert_bits(what(rank, "out of place"), &output, &expected);
            let mut buffer = inputs[rank].clone();
            communicator.all_reduce_in_place(&mut buffer, op).unwrap();
            assert_bits(what(rank, "in place"), &buffer, &expected);
        });
    }
    expected
}

fn wild_inputs<T: Value>(world: usize, count: usize) -> Vec<Vec<T>> {
    (0..world).map(|rank| wild(count as u64, rank, count)).collect()
}

/// Every reduction, type and world at a length with tails everywhere, against the reference.
#[test]
fn every_reduction_gives_the_references_bits() {
    fn all<T: Value>() {
        for world in [2, 3, 5, 8] {
            for op in ReduceOp::ALL {
                check::<T>(&wild_inputs(world, 1237), op);
            }
        }
    }
    all::<f32>();
    all::<f16>();
    all::<bf16>();
}

/// Field case A48 (pytorch/pytorch#129501): each rank summed in its own order, so ranks differed.
#[test]
fn sums_go_in_rank_order_on_every_rank() {
    fn sharp<T: Value>(values: [f32; 4], expected: f32) {
        let inputs: Vec<_> = values.iter().map(|&value| vec![T::rounded(value); 77]).collect();
        assert!(check(&inputs, ReduceOp::Sum).iter().all(|sum| sum.value() == expected));
    }
    sharp::<f32>([1e8, 1.0, -1e8, 1.0], 1.0);
    let big = 2.0f32.powi(27);
    sharp::<bf16>([big, 1.0, -big, 1.0], 1.0);
    let small = 2.0f32.powi(-14);
    sharp::<f16>([32768.0, small, -32768.0, small], small);
    for world in 2..=8 {
        check::<f32>(&wild_inputs(world, 999), ReduceOp::Sum);
        check::<bf16>(&wild_inputs(world, 999), ReduceOp::Sum);
    }
}

/// Field case A50 (NVIDIA/nccl#1026, NVIDIA/TransformerEngine#1761): half-precision sums lost small terms, and partial
/// sums overflowed.
#[test]
fn sums_accumulate_in_f32_and_round_once() {
    fn sum<T: Value>(values: &[f32]) -> f32 {
        let inputs: Vec<_> = values.iter().map(|&value| vec![T::rounded(value); 41]).collect();
        let sums = check(&inputs, ReduceOp::Sum);
        assert!(sums.iter().all(|sum| sum.bits() == sums[0].bits()));
        sums[0].value()
    }
    let with_ones = |first: f32| [first, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    assert_eq!(sum::<f16>(&with_ones(2048.0)), 2056.0, "2055 rounds to the even 2056");
    assert_eq!(sum::<bf16>(&with_ones(256.0)), 264.0, "263 rounds to the even 264");
    assert_eq!(sum::<f16>(&[60000.0, 60000.0, -60000.0, -60000.0]), 0.0);
    assert_eq!(sum::<f16>(&[60000.0, 60000.0]), f32::INFINITY);
    assert_eq!(sum::<f16>(&[-60000.0, -60000.0]), f32::NEG_INFINITY);
}

/// Field case A07 (flashinfer-ai/flashinfer#3304, #2923, #1136): a payload that looked like "not yet arrived" hung.
#[test]
fn no_bit_pattern_is_taken_for_a_missing_one() {
    fn patterns<T: Value>(patterns: &[u32]) {
        for world in [2, 3] {
            for &pattern in patterns {
                for op in ReduceOp::ALL {
                    // The whole buffer, and one element of one rank among ordinary ones.
                    check::<T>(&vec![vec![T::of_bits(pattern); 67]; world], op);
                    let mut inputs: Vec<Vec<T>> = wild_inputs(world, 67);
                    for rank in 0..world {
                        inputs[rank][13 + rank * 20] = T::of_bits(pattern);
                    }
                    check::<T>(&inputs, op);
                }
            }
        }
    }
    // −0, +0, the smallest subnormals, infinities, quiet and signalling NaNs of both signs, all ones.
    patterns::<f32>(&[
        0x8000_0000,
        0,
        0x8000_0001,
        1,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0x7f80_0001,
        0xffc0_1234,
        u32::MAX,
    ]);
    patterns::<f16>(&[0x8000, 0, 0x8001, 1, 0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xfe12, 0xffff]);
    patterns::<bf16>(&[0x8000, 0, 0x8001, 1, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffc3, 0xffff]);
}

/// Field case A07, and the documented signs of zero.
#[test]
fn zeros_keep_the_documented_sign() {
    let of = |values: [f32; 2], op| check(&[vec![values[0]; 9], vec![values[1]; 9]], op)[0].to_bits();
    let (minus, plus) = ((-0.0f32).to_bits(), 0.0f32.to_bits());
    assert_eq!(of([-0.0, -0.0], ReduceOp::Sum), minus);
    assert_eq!(of([-0.0, 0.0], ReduceOp::Sum), plus);
    assert_eq!(of([-0.0, -0.0], ReduceOp::Average), minus);
    assert_eq!(of([-0.0, 0.0], ReduceOp::Max), plus);
    assert_eq!(of([0.0, -0.0], ReduceOp::Max), plus);
    assert_eq!(of([-0.0, 0.0], ReduceOp::Min), minus);
    assert_eq!(of([0.0, -0.0], ReduceOp::Min), minus);
}

#[test]
fn a_nan_on_any_rank_is_a_nan_on_all() {
    for op in ReduceOp::ALL {
        for rank in 0..4 {
            let mut inputs = vec![vec![1.0f32; 50]; 4];
            inputs[rank][17] = f32::NAN;
            let result = check(&inputs, op);
            assert!((0..50).all(|index| result[index].is_nan() == (index == 17)), "{op}, rank {rank}");
        }
    }
}

/// Field case A44 (gpustack/gpustack#4072, vllm-project/vllm#14447): some numbers of ranks were not served.
#[test]
fn every_world_size_is_served() {
    for world in (1..=9).chain([16, 32]) {
        for algorithm in [None].into_iter().chain(host::ALGORITHMS.map(Some)) {
            let mut options = Options::default().staging_bytes(world * 2 * 1024);
            options.algorithm = algorithm;
            run_ranks(group(world, &options), |rank, communicator| {
                assert_eq!(communicator.world_size(), world);
                for count in [1, 31, 1000, 5000] {
                    let mut buffer: Vec<f32> = (0..count).map(|index| integer(count, rank, index)).collect();
                    communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
                    let expected: Vec<f32> = (0..count).map(|index| integer_sum(count, world, index)).collect();
                    assert_bits(format!("{world} ranks, {count}"), &buffer, &expected);
                }
            });
        }
    }
}

/// Field case A45 (flashinfer-ai/flashinfer#4393): a call returned success and had done nothing.
#[test]
fn a_call_that_returns_ok_has_written_everything() {
    fn all<T: Value>(canary: u32) {
        for world in [1, 2, 3, 4, 8] {
            for algorithm in host::ALGORITHMS {
                let options = Options::default().algorithm(algorithm).staging_bytes(8192);
                run_ranks(group(world, &options), |rank, communicator| {
                    for count in [1, 2, 7, 64, 1000, 4097] {
                        let input: Vec<T> = (0..count).map(|index| integer(count, rank, index)).collect();
                        let mut output = vec![T::of_bits(canary); count];
                        communicator.all_reduce(&input, &mut output, ReduceOp::Sum).unwrap();
                        let expected: Vec<T> = (0..count).map(|index| integer_sum(count, world, index)).collect();
                        assert_bits(format!("{algorithm}, {world} ranks"), &output, &expected);
                    }
                });
            }
        }
    }
    all::<f32>(0xffbe_efff);
    all::<f16>(0xfeef);
    all::<bf16>(0xffef);
}

/// A row has the same bits whatever tensor it is part of, and wherever it is there: another length takes another plan,
/// other chunks, and another split over the ranks.
#[test]
fn a_row_has_the_same_bits_in_any_tensor() {
    const ROW: usize = 7168;
    for world in [2, 3, 4, 8] {
        let (row, others) = (wild_inputs::<bf16>(world, ROW), wild_inputs::<bf16>(world, 3 * ROW + 5));
        let expected = references(ReduceOp::Sum, &row);
        for algorithm in [None].into_iter().chain(host::ALGORITHMS.map(Some)) {
            let mut options = Options::default();
            options.algorithm = algorithm;
            run_ranks(group(world, &options), |rank, communicator| {
                for rows in [1, 2, 3, 4, 5, 8, 16, 33, 64] {
                    let mut tensor = among_others(&row[rank], &others[rank], rows);
                    communicator.all_reduce_in_place(&mut tensor, ReduceOp::Sum).unwrap();
                    for place in places(rows) {
                        let what = format!("{world} ranks by {algorithm:?}, row {place} of {rows}");
                        assert_bits(what, &tensor[place * ROW..][..ROW], &expected);
                    }
                }
            });
        }
    }
}

/// Field case A49 (vllm-project/vllm#51292, #51290): the order of arrival showed in the result.
#[test]
fn the_order_of_arrival_does_not_show() {
    let (world, count) = (4, 600);
    let options = Options::default().staging_bytes(world * 2 * 512);
    let expected = references(ReduceOp::Sum, &wild_inputs::<f32>(world, count));
    run_ranks(group(world, &options), |rank, communicator: &mut Communicator| {
        let mut random = Random::new(rank as u64);
        let input = wild::<f32>(count as u64, rank, count);
        let mut output = vec![0.0; count];
        for call in 0..2000 {
            for _ in 0..random.below(300) {
                std::hint::spin_loop();
            }
            if random.below(50) == 0 {
                std::thread::yield_now();
            }
            communicator.all_reduce(&input, &mut output, ReduceOp::Sum).unwrap();
            assert_bits(format!("call {call}"), &output, &expected);
        }
    });
}

/// So that a run with processes is one.
#[test]
fn ranks_are_what_was_asked_for() {
    let own = std::process::id();
    let ranks = run_ranks(group(3, &Options::default()), |_, _| vec![std::process::id()]).concat();
    match common::are_processes() {
        true => {
            assert!((0..3).all(|rank| ranks[rank] != own && ranks[rank] != ranks[(rank + 1) % 3]), "{own}, {ranks:?}")
        }
        false => assert_eq!(ranks, [own; 3]),
    }
}
