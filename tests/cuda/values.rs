//! What sums are made of: order, rounding, special values.

use half::{bf16, f16};
use peersum::{Algorithm, ReduceOp};

use crate::{
    common::{Value, assert_bits, reference},
    harness,
};

/// Field case A48 (pytorch/pytorch#129501): f32 in rank order gives 1 (2^-14 for f16); an order of its own on a rank
/// gives 0 there.
#[test]
fn every_rank_sums_in_rank_order() {
    let Some(devices) = harness::devices() else { return };
    for algorithm in Algorithm::STAGED {
        devices.run(4, &harness::options().algorithm(algorithm), |rank| {
            let of = |terms: [f32; 4]| terms[rank.rank];
            let (single, brain, half) = (
                of([1e8, 1.0, -1e8, 1.0]),
                of([134217728.0, 1.0, -134217728.0, 1.0]),
                of([32768.0, 2.0f32.powi(-14), -32768.0, 2.0f32.powi(-14)]),
            );
            assert_eq!(rank.all_reduce_values(&vec![single; 777], ReduceOp::Sum), vec![1.0; 777]);
            let sums = rank.all_reduce_values(&vec![bf16::from_f32(brain); 777], ReduceOp::Sum);
            assert_eq!(sums, vec![bf16::ONE; 777]);
            let sums = rank.all_reduce_values(&vec![f16::from_f32(half); 777], ReduceOp::Sum);
            assert_eq!(sums, vec![f16::from_f32(2.0f32.powi(-14)); 777]);
        });
    }
}

/// Field case A50 (NVIDIA/nccl#1026): small terms and overflow on the way.
#[test]
fn sums_are_made_in_f32_and_rounded_once() {
    let Some(devices) = harness::devices() else { return };
    for algorithm in Algorithm::STAGED {
        let options = harness::options().algorithm(algorithm);
        devices.run(8, &options, |rank| {
            let is_first = rank.rank == 0;
            let first = |value: f32| if is_first { value } else { 1.0 };
            let sums = rank.all_reduce_values(&[f16::from_f32(first(2048.0)); 100], ReduceOp::Sum);
            assert_eq!(sums, [f16::from_f32(2056.0); 100]); // 2055 rounds to even
            let sums = rank.all_reduce_values(&[bf16::from_f32(first(256.0)); 100], ReduceOp::Sum);
            assert_eq!(sums, [bf16::from_f32(264.0); 100]);
        });
        devices.run(4, &options, |rank| {
            let term = if rank.rank < 2 { 60000.0 } else { -60000.0 };
            assert_eq!(rank.all_reduce_values(&[f16::from_f32(term); 100], ReduceOp::Sum), [f16::ZERO; 100]);
        });
        devices.run(2, &options, |rank| {
            let sums = rank.all_reduce_values(&[f16::from_f32(60000.0); 100], ReduceOp::Sum);
            assert_eq!(sums, [f16::INFINITY; 100]);
        });
    }
}

/// Field case A07 (flashinfer-ai/flashinfer#3304, #2923, #1136): no input is a signal.
#[test]
fn no_bit_pattern_is_mistaken_for_data_that_has_not_come() {
    fn check<T: Value + cudarc::driver::DeviceRepr>(devices: &harness::Devices, patterns: &[u32]) {
        for algorithm in Algorithm::STAGED {
            devices.run(3, &harness::options().algorithm(algorithm), |rank| {
                for &pattern in patterns {
                    let value = T::of_bits(pattern);
                    let sums = rank.all_reduce_values(&[value; 1001], ReduceOp::Sum);
                    let expected = reference(ReduceOp::Sum, [value; 3]);
                    if expected.value().is_nan() {
                        assert!(sums.iter().all(|sum| sum.value().is_nan()), "{pattern:#x}");
                    } else {
                        assert_bits(format_args!("{algorithm} {pattern:#x}"), &sums, &[expected; 1001]);
                    }
                    // One element at a time.
                    let mut input = [T::rounded(1.0); 65];
                    input[pattern as usize % 65] = value;
                    let sums = rank.all_reduce_values(&input, ReduceOp::Sum);
                    assert!(sums.iter().filter(|sum| sum.value() == 3.0).count() >= 64, "{pattern:#x}");
                }
            });
        }
    }

    let Some(devices) = harness::devices() else { return };
    check::<f32>(&devices, &[0x8000_0000, 0, 0x8000_0001, 0x7fc0_0000, 0xffff_ffff, 0x7f80_0001, 1]);
    check::<f16>(&devices, &[0x8000, 0, 0x8001, 0x7e00, 0xffff, 0x7c01, 1]);
    check::<bf16>(&devices, &[0x8000, 0, 0x8001, 0x7fc0, 0xffff, 0x7f81, 1]);
}

/// Max and min as `ReduceOp` says: NaN wins, +0 is greater than −0. And the average is the f32 sum over N, rounded.
#[test]
fn max_min_and_average_are_what_their_page_says() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 3, 5, 6, 7, 8] {
        devices.run(world, &harness::options(), |rank| {
            let zero = if rank.rank == 0 { 0.0f32 } else { -0.0 };
            let input = [zero, if rank.rank == 1 { f32::NAN } else { 1.0 }, rank.rank as f32, f32::NEG_INFINITY];
            let max = rank.all_reduce_values(&input, ReduceOp::Max);
            assert_eq!(max[0].to_bits(), 0);
            assert!(max[1].is_nan());
            assert_eq!(max[2..], [(rank.world - 1) as f32, f32::NEG_INFINITY]);
            let min = rank.all_reduce_values(&input, ReduceOp::Min);
            assert_eq!(min[0].to_bits(), 0x8000_0000);
            assert!(min[1].is_nan());
            assert_eq!(min[2..], [0.0, f32::NEG_INFINITY]);

            let inputs: Vec<Vec<f32>> =
                (0..rank.world).map(|peer| crate::common::wild::<f32>(world as u64, peer, 20_000)).collect();
            let expected = crate::common::references(ReduceOp::Average, &inputs);
            let averages = rank.all_reduce_values(&inputs[rank.rank], ReduceOp::Average);
            assert_bits(format_args!("average of {world}"), &averages, &expected);
        });
    }
}
