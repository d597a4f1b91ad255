//! Inputs whose reduction is known, as pure functions of a seed, the rank and the element's index.

use std::{marker::PhantomData, ops::Range};

use peersum::ReduceOp;

use super::datum::Datum;

/// How values are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Integers, times one power of two per element, so small that every partial sum of any ranks in any order is an
    /// integer that the type holds: whatever the algorithm, no addition rounds, and the sum is known without adding
    /// floats.
    Exact,
    /// Values of many magnitudes, zeros of both signs and subnormals among them, whose sum depends on the order and on
    /// where it is rounded. What is right is the library's definition: f32, rank by rank, rounded once.
    Realistic,
}

impl Pattern {
    pub(crate) const ALL: [Pattern; 2] = [Pattern::Exact, Pattern::Realistic];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Pattern::Exact => "exact integers",
            Pattern::Realistic => "values of many magnitudes",
        }
    }
}

/// The inputs of all ranks for one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs<T> {
    pub(crate) pattern: Pattern,
    pub(crate) seed: u64,
    pub(crate) world: usize,
    pub(crate) element: PhantomData<T>,
}

impl<T: Datum> Inputs<T> {
    pub(crate) fn new(pattern: Pattern, seed: u64, world: usize) -> Self {
        Inputs { pattern, seed, world, element: PhantomData }
    }

    /// A rank's input.
    pub(crate) fn of_rank(&self, rank: usize, indices: Range<usize>) -> Vec<T> {
        match self.pattern {
            Pattern::Exact => indices.map(|index| self.exact(self.integer(rank, index) as f32, index)).collect(),
            Pattern::Realistic => indices.map(|index| self.realistic(rank, index)).collect(),
        }
    }

    /// What every rank must get.
    pub(crate) fn reduced(&self, op: ReduceOp, indices: Range<usize>) -> Vec<T> {
        match self.pattern {
            Pattern::Exact => indices.map(|index| self.exact(self.reduced_integer(op, index), index)).collect(),
            Pattern::Realistic => indices
                .map(|index| {
                    let values = (0..self.world).map(|rank| self.realistic(rank, index).to_f32());
                    T::from_f32(reduce(op, values, self.world))
                })
                .collect(),
        }
    }

    /// An integer of a magnitude of at most 2^digits / world: the magnitudes of all ranks together fit the significand.
    fn integer(&self, rank: usize, index: usize) -> i64 {
        let most = (1u64 << T::DIGITS) / self.world as u64;
        let span = 2 * most + 1;
        let draw = mix(self.seed, rank as u64 + 1, index) >> 32;
        ((draw * span) >> 32) as i64 - most as i64
    }

    /// The reduction of the integers in integers. Only the average can be a fraction: the sum, which f32 holds, divided
    /// and rounded once to f32, as the library defines it.
    fn reduced_integer(&self, op: ReduceOp, index: usize) -> f32 {
        let integers = (0..self.world).map(|rank| self.integer(rank, index));
        match op {
            ReduceOp::Sum => integers.sum::<i64>() as f32,
            ReduceOp::Average => integers.sum::<i64>() as f32 / self.world as f32,
            ReduceOp::Max => integers.max().unwrap_or(0) as f32,
            ReduceOp::Min => integers.min().unwrap_or(0) as f32,
            other => unreachable!("the command offers no {other}"),
        }
    }

    /// A number at the element's scale, which all ranks share.
    fn exact(&self, number: f32, index: usize) -> T {
        T::from_f32(number * power_of_two(pick(T::EXACT_SCALES, mix(self.seed, 0, index))))
    }

    fn realistic(&self, rank: usize, index: usize) -> T {
        let draw = mix(self.seed, rank as u64 + 1, index);
        let sign = if draw & 1 == 0 { 1.0 } else { -1.0 };
        let magnitude = match (draw >> 1) & 63 {
            0 => 0.0,
            // Below every normal number of the type.
            1 => T::from_f32(f32::MIN_POSITIVE / 4.0).to_f32(),
            _ => {
                let fraction = ((draw >> 8) & 0x7f_ffff) as f32 / (1 << 23) as f32;
                (1.0 + fraction) * power_of_two(pick(T::EXPONENTS, draw))
            }
        };
        T::from_f32(sign * magnitude)
    }
}

/// The library's definition of a reduction: in f32, in rank order, starting from rank 0's value.
pub(crate) fn reduce(op: ReduceOp, mut values: impl Iterator<Item = f32>, world: usize) -> f32 {
    let first = values.next().unwrap_or(0.0);
    let choose = |greater: bool| {
        move |a: f32, b: f32| match (a.is_nan(), b.is_nan()) {
            (true, _) => a,
            (_, true) => b,
            // The total order has −0 below +0, as the library has.
            _ if a.total_cmp(&b).is_gt() == greater => a,
            _ => b,
        }
    };
    match op {
        ReduceOp::Sum => values.fold(first, |sum, value| sum + value),
        ReduceOp::Average => values.fold(first, |sum, value| sum + value) / world as f32,
        ReduceOp::Max => values.fold(first, choose(true)),
        ReduceOp::Min => values.fold(first, choose(false)),
        other => unreachable!("the command offers no {other}"),
    }
}

/// 2^`exponent`, for exponents of normal numbers.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// One of a range, from the upper half of a draw.
fn pick(range: std::ops::RangeInclusive<i32>, draw: u64) -> i32 {
    let span = (range.end() - range.start() + 1) as u64;
    range.start() + (((draw >> 32) * span) >> 32) as i32
}

/// 64 bits that look random: the finalizer of MurmurHash3 over the three numbers.
fn mix(seed: u64, stream: u64, index: usize) -> u64 {
    let mut x = (index as u64)
        .wrapping_add(stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add(seed.wrapping_mul(0xd1b5_4a32_d192_ed03));
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    const COUNT: usize = 4000;

    /// Sums in one order, rounding to the element type after every addition, as a ring does.
    fn sum_in_order<T: Datum>(inputs: &[Vec<T>], order: impl Iterator<Item = usize>, index: usize) -> T {
        order.map(|rank| inputs[rank][index]).reduce(|a, b| T::from_f32(a.to_f32() + b.to_f32())).unwrap()
    }

    fn exact_sums_do_not_depend_on_the_order<T: Datum>() {
        for world in [1, 2, 3, 4, 7, 8, 16] {
            let inputs = Inputs::<T>::new(Pattern::Exact, 5, world);
            let ranks: Vec<_> = (0..world).map(|rank| inputs.of_rank(rank, 0..COUNT)).collect();
            let sums = inputs.reduced(ReduceOp::Sum, 0..COUNT);
            for (index, sum) in sums.iter().enumerate() {
                for start in 0..world {
                    let ring = (start..start + world).map(|rank| rank % world);
                    assert_eq!(sum_in_order(&ranks, ring.clone(), index).bits(), sum.bits(), "{world} {index}");
                    assert_eq!(sum_in_order(&ranks, ring.rev(), index).bits(), sum.bits(), "{world} {index}");
                }
            }
        }
    }

    #[test]
    fn exact_inputs_sum_to_the_same_bits_in_any_order() {
        exact_sums_do_not_depend_on_the_order::<f32>();
        exact_sums_do_not_depend_on_the_order::<f16>();
        exact_sums_do_not_depend_on_the_order::<bf16>();
    }

    fn exact_inputs_follow_the_definition<T: Datum>() {
        for world in [1, 2, 3, 8] {
            let inputs = Inputs::<T>::new(Pattern::Exact, 9, world);
            let ranks: Vec<_> = (0..world).map(|rank| inputs.of_rank(rank, 0..COUNT)).collect();
            for op in ReduceOp::ALL {
                for (index, want) in inputs.reduced(op, 0..COUNT).into_iter().enumerate() {
                    let got = T::from_f32(reduce(op, ranks.iter().map(|rank| rank[index].to_f32()), world));
                    assert_eq!(got.bits(), want.bits(), "{op} {world} {index}");
                }
            }
        }
    }

    #[test]
    fn integers_and_floats_agree_on_every_reduction() {
        exact_inputs_follow_the_definition::<f32>();
        exact_inputs_follow_the_definition::<f16>();
        exact_inputs_follow_the_definition::<bf16>();
    }

    #[test]
    fn averages_of_a_power_of_two_of_ranks_are_exact() {
        let inputs = Inputs::<f16>::new(Pattern::Exact, 1, 8);
        let averages = inputs.reduced(ReduceOp::Average, 0..COUNT);
        let sums = inputs.reduced(ReduceOp::Sum, 0..COUNT);
        assert!(averages.iter().zip(&sums).all(|(average, sum)| average.to_f32() * 8.0 == sum.to_f32()));
    }

    fn realistic_inputs_are_wide_and_finite<T: Datum>() {
        let inputs = Inputs::<T>::new(Pattern::Realistic, 3, 8);
        let ranks: Vec<_> = (0..8).map(|rank| inputs.of_rank(rank, 0..COUNT)).collect();
        let magnitudes = || ranks[0].iter().map(|value| value.to_f32().abs()).filter(|&value| value > 0.0);
        assert!(magnitudes().fold(0.0, f32::max) / magnitudes().fold(f32::INFINITY, f32::min) > 1e6);
        assert!(ranks[0].iter().any(|value| value.bits() == T::from_f32(-0.0).bits()));
        assert!(inputs.reduced(ReduceOp::Sum, 0..COUNT).iter().all(|sum| sum.to_f32().is_finite()));
        // The order matters, or the check would not see a wrong one.
        let backwards = (0..COUNT).filter(|&index| {
            let sum = ranks.iter().rev().map(|rank| rank[index].to_f32()).reduce(|a, b| a + b).unwrap();
            let right = ranks.iter().map(|rank| rank[index].to_f32()).reduce(|a, b| a + b).unwrap();
            sum.to_bits() != right.to_bits()
        });
        assert!(backwards.count() > 0);
    }

    #[test]
    fn realistic_inputs_see_the_order_of_additions() {
        realistic_inputs_are_wide_and_finite::<f32>();
        realistic_inputs_are_wide_and_finite::<f16>();
        realistic_inputs_are_wide_and_finite::<bf16>();
    }

    #[test]
    fn seeds_ranks_and_elements_differ() {
        let of = |seed, rank| Inputs::<f32>::new(Pattern::Exact, seed, 4).of_rank(rank, 0..COUNT);
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a == b).count();
        assert!(same(&of(1, 0), &of(2, 0)) < COUNT / 100);
        assert!(same(&of(1, 0), &of(1, 1)) < COUNT / 100);
        assert!(same(&of(1, 0)[1..], &of(1, 0)) < COUNT / 100);
    }

    #[test]
    fn a_part_is_a_part_of_the_whole() {
        let inputs = Inputs::<f32>::new(Pattern::Realistic, 7, 3);
        assert_eq!(inputs.of_rank(2, 100..200), inputs.of_rank(2, 0..300)[100..200]);
    }

    #[test]
    fn zeros_are_ordered_and_nans_win() {
        let of = |op, values: [f32; 2]| reduce(op, values.into_iter(), 2).to_bits();
        for values in [[0.0, -0.0], [-0.0, 0.0]] {
            assert_eq!(of(ReduceOp::Max, values), 0.0f32.to_bits());
            assert_eq!(of(ReduceOp::Min, values), (-0.0f32).to_bits());
        }
        assert_eq!(of(ReduceOp::Sum, [-0.0, -0.0]), (-0.0f32).to_bits());
        for values in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            assert!(f32::from_bits(of(ReduceOp::Max, values)).is_nan());
        }
    }
}
