//! What the benchmark must know of an element type beyond what the library tells.

use half::{bf16, f16};
use peersum::Element;

/// An element type that can be generated, poisoned and compared bit by bit.
pub(crate) trait Datum: Element {
    /// Bits of a significand, the hidden one included: integers up to 2 to this are exact.
    const DIGITS: u32;
    /// Powers of two that integers of up to [`Datum::DIGITS`] bits, and their averages, can be scaled by and stay
    /// exact.
    const EXACT_SCALES: std::ops::RangeInclusive<i32>;
    /// Powers of two of realistic values: wide, but the sum of 64 of them is finite.
    const EXPONENTS: std::ops::RangeInclusive<i32>;
    /// A NaN that no reduction of numbers gives: all bits set.
    const POISON: Self;

    fn bits(self) -> u32;
}

impl Datum for f32 {
    const DIGITS: u32 = f32::MANTISSA_DIGITS;
    const EXACT_SCALES: std::ops::RangeInclusive<i32> = -40..=40;
    const EXPONENTS: std::ops::RangeInclusive<i32> = -30..=20;
    const POISON: Self = f32::from_bits(u32::MAX);

    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Datum for f16 {
    const DIGITS: u32 = f16::MANTISSA_DIGITS;
    const EXACT_SCALES: std::ops::RangeInclusive<i32> = -8..=4;
    const EXPONENTS: std::ops::RangeInclusive<i32> = -13..=9;
    const POISON: Self = f16::from_bits(u16::MAX);

    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Datum for bf16 {
    const DIGITS: u32 = bf16::MANTISSA_DIGITS;
    const EXACT_SCALES: std::ops::RangeInclusive<i32> = -40..=40;
    const EXPONENTS: std::ops::RangeInclusive<i32> = -30..=20;
    const POISON: Self = bf16::from_bits(u16::MAX);

    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poison_is_a_nan_of_set_bits() {
        assert!(f32::POISON.is_nan() && f16::POISON.is_nan() && bf16::POISON.is_nan());
        assert_eq!((f32::POISON.bits(), f16::POISON.bits(), bf16::POISON.bits()), (u32::MAX, 0xffff, 0xffff));
    }
}
