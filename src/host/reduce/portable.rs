//! One lane: for CPUs without wider ones, for the last elements of every loop, and what the others are tested against.

use half::f16;

use super::{Places, Vector};

impl Vector for f32 {
    const LANES: usize = 1;
    type Narrower = f32;
    const PREFETCHES: bool = false;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        value
    }

    #[inline(always)]
    unsafe fn prefetch<const SECOND: bool>(_: *const u8) {}

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: the caller vouches for one element.
        unsafe { *from }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for one element.
        f16::from_bits(unsafe { *from }).to_f32()
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for one element.
        f32::from_bits(u32::from(unsafe { *from }) << 16)
    }

    #[inline(always)]
    unsafe fn store_f32(self, places: Places<'_>) {
        let value = canonical(self);
        // SAFETY: the caller vouches for one element in each place.
        places.each(|to, _| unsafe { *to.cast::<f32>() = value });
    }

    #[inline(always)]
    unsafe fn store_f16(self, places: Places<'_>) {
        let bits = f16::from_f32(canonical(self)).to_bits();
        // SAFETY: the caller vouches for one element in each place.
        places.each(|to, _| unsafe { *to.cast::<u16>() = bits });
    }

    #[inline(always)]
    unsafe fn store_bf16(self, places: Places<'_>) {
        let bits = canonical(self).to_bits();
        // Adding half of the last place, less one if that place is even, carries exactly where rounding goes up. The
        // greatest sum is that of the canonical NaN, which stays one; infinity stays infinity.
        let rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        // SAFETY: the caller vouches for one element in each place.
        places.each(|to, _| unsafe { *to.cast::<u16>() = rounded as u16 });
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self + other
    }

    #[inline(always)]
    unsafe fn divide(self, by: Self) -> Self {
        self / by
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        if self.is_nan() || other.is_nan() {
            f32::NAN
        } else if self == other {
            // Equal numbers have equal bits, but for the zeros: + unless both are −.
            f32::from_bits(self.to_bits() & other.to_bits())
        } else if self > other {
            self
        } else {
            other
        }
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        if self.is_nan() || other.is_nan() {
            f32::NAN
        } else if self == other {
            // As in `max`: − unless both are +.
            f32::from_bits(self.to_bits() | other.to_bits())
        } else if self < other {
            self
        } else {
            other
        }
    }
}

#[inline(always)]
fn canonical(value: f32) -> f32 {
    if value.is_nan() { f32::NAN } else { value }
}
