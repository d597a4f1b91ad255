//! What the tests of the host backend share: running ranks, inputs, and a reference that knows nothing of the library.
#![allow(dead_code, unreachable_pub)]

mod group;
mod words;

#[allow(unused_imports)]
pub use group::{Barrier, are_processes, group, impatience, rank_outcomes, run_ranks};
use half::{bf16, f16};
use peersum::{DType, Element, ReduceOp};
use rand::{Rng, RngExt, SeedableRng, rngs::SmallRng};

/// Repeatable numbers.
pub struct Random(SmallRng);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(SmallRng::seed_from_u64(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.0.random_range(0..end)
    }

    pub fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}

/// An element type of the tests, with a rounding of its own.
pub trait Value: Element + PartialEq + std::fmt::Debug {
    fn bits(self) -> u32;
    fn of_bits(bits: u32) -> Self;
    /// Rounds `value` to nearest, ties to even, by another way than the library.
    fn rounded(value: f32) -> Self;
    fn value(self) -> f32;
}

impl Value for f32 {
    fn bits(self) -> u32 {
        self.to_bits()
    }

    fn of_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }

    fn rounded(value: f32) -> Self {
        value
    }

    fn value(self) -> f32 {
        self
    }
}

impl Value for f16 {
    fn bits(self) -> u32 {
        self.to_bits().into()
    }

    fn of_bits(bits: u32) -> Self {
        f16::from_bits(bits as u16)
    }

    fn rounded(value: f32) -> Self {
        f16::from_bits(round_to(value, 5, 10) as u16)
    }

    fn value(self) -> f32 {
        widen(self.to_bits().into(), 5, 10)
    }
}

impl Value for bf16 {
    fn bits(self) -> u32 {
        self.to_bits().into()
    }

    fn of_bits(bits: u32) -> Self {
        bf16::from_bits(bits as u16)
    }

    fn rounded(value: f32) -> Self {
        bf16::from_bits(round_to(value, 8, 7) as u16)
    }

    fn value(self) -> f32 {
        widen(self.to_bits().into(), 8, 7)
    }
}

/// The value of a 16-bit float with so many bits of exponent and fraction, by the definition of IEEE 754.
fn widen(bits: u32, exponent_bits: u32, fraction_bits: u32) -> f32 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let sign = if bits >> 15 == 1 { -1.0f64 } else { 1.0 };
    let exponent = (bits >> fraction_bits & ((1 << exponent_bits) - 1)) as i32;
    let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1u32 << fraction_bits);
    let magnitude = if exponent == (1 << exponent_bits) - 1 {
        if fraction == 0.0 { f64::INFINITY } else { f64::NAN }
    } else if exponent == 0 {
        fraction * 2.0f64.powi(1 - bias)
    } else {
        (1.0 + fraction) * 2.0f64.powi(exponent - bias)
    };
    (sign * magnitude) as f32
}

/// The bits of the nearest 16-bit float, ties to even, by the definition of IEEE 754: in f64, whose `round_ties_even` is
/// exact here.
fn round_to(value: f32, exponent_bits: u32, fraction_bits: u32) -> u32 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let infinity = ((1u32 << exponent_bits) - 1) << fraction_bits;
    let sign = u32::from(value.is_sign_negative()) << 15;
    if value.is_nan() {
        return infinity | 1 << (fraction_bits - 1);
    }
    if value.is_infinite() {
        return sign | infinity;
    }
    let magnitude = f64::from(value).abs();
    if magnitude == 0.0 {
        return sign;
    }
    let exponent = (magnitude.log2().floor() as i32).max(1 - bias);
    // log2 may be off by one next to a power of two.
    let exponent = if magnitude < 2.0f64.powi(exponent) && exponent > 1 - bias { exponent - 1 } else { exponent };
    let units = (magnitude / 2.0f64.powi(exponent - fraction_bits as i32)).round_ties_even() as u32;
    // A carry out of the fraction goes into the exponent; a subnormal has no leading bit.
    let bits = ((exponent + bias - 1) as u32) * (1 << fraction_bits) + units;
    sign | bits.min(infinity)
}

/// What one element must become: in f32, in rank order, with one rounding.
pub fn reference<T: Value>(op: ReduceOp, values: impl IntoIterator<Item = T>) -> T {
    let values: Vec<f32> = values.into_iter().map(Value::value).collect();
    if matches!(op, ReduceOp::Max | ReduceOp::Min) && values.iter().any(|value| value.is_nan()) {
        return canonical(T::rounded(f32::NAN));
    }
    let result = match op {
        ReduceOp::Sum => values[1..].iter().fold(values[0], |sum, value| sum + value),
        ReduceOp::Average => values[1..].iter().fold(values[0], |sum, value| sum + value) / values.len() as f32,
        // `total_cmp` puts −0 before +0.
        ReduceOp::Max => values.into_iter().max_by(f32::total_cmp).unwrap(),
        ReduceOp::Min => values.into_iter().min_by(f32::total_cmp).unwrap(),
        _ => unreachable!("a reduction without a reference"),
    };
    canonical(T::rounded(result))
}

/// Every NaN result is the same one.
fn canonical<T: Value>(value: T) -> T {
    if !value.value().is_nan() {
        return value;
    }
    T::of_bits(match T::DTYPE {
        DType::F32 => 0x7fc0_0000,
        DType::F16 => 0x7e00,
        DType::BF16 => 0x7fc0,
        _ => unreachable!("a type without a NaN"),
    })
}

/// The reference for whole buffers, one of each rank.
pub fn references<T: Value>(op: ReduceOp, inputs: &[Vec<T>]) -> Vec<T> {
    (0..inputs[0].len()).map(|index| reference(op, inputs.iter().map(|input| input[index]))).collect()
}

/// Fails at the first element whose bits differ.
#[track_caller]
pub fn assert_bits<T: Value>(what: impl std::fmt::Display, result: &[T], expected: &[T]) {
    assert_eq!(result.len(), expected.len(), "{what}");
    for (index, (result, expected)) in result.iter().zip(expected).enumerate() {
        if result.bits() != expected.bits() {
            panic!(
                "{what}, element {index}: {result:?} ({:#x}), not {expected:?} ({:#x})",
                result.bits(),
                expected.bits()
            );
        }
    }
}

/// Small integers that depend on everything: their sums are exact in every type and order, up to 32 ranks.
pub fn integer<T: Value>(call: usize, rank: usize, index: usize) -> T {
    T::rounded(((call * 5 + rank * 3 + index * 7 + index / 11) % 8) as f32)
}

/// The sum of [`integer`] over the ranks.
pub fn integer_sum<T: Value>(call: usize, world: usize, index: usize) -> T {
    T::rounded((0..world).map(|rank| integer::<T>(call, rank, index).value()).sum())
}

/// Numbers of many magnitudes and both signs, so that the order of a sum shows in its bits.
pub fn wild<T: Value>(seed: u64, rank: usize, count: usize) -> Vec<T> {
    let mut random = Random::new(seed << 8 | rank as u64);
    (0..count)
        .map(|_| {
            let mantissa = random.next() as i32 as f32 / 2.0f32.powi(31);
            // f16 ends at 65504; the sums of 32 ranks stay below in most cases, and may overflow in some.
            let exponent =
                if T::DTYPE == DType::F16 { random.below(26) as i32 - 14 } else { random.below(34) as i32 - 17 };
            T::rounded(mantissa * 2.0f32.powi(exponent))
        })
        .collect()
}

/// A tensor of `rows` rows, with `row` at each of [`places`] and other numbers in the rest.
pub fn among_others<T: Value>(row: &[T], others: &[T], rows: usize) -> Vec<T> {
    let mut tensor: Vec<T> = others.iter().copied().cycle().take(rows * row.len()).collect();
    for place in places(rows) {
        tensor[place * row.len()..][..row.len()].copy_from_slice(row);
    }
    tensor
}

/// Rows of a tensor: the first, the last, and one between.
pub fn places(rows: usize) -> [usize; 3] {
    [0, 3.min(rows - 1), rows - 1]
}
