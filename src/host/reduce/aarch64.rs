//! Four lanes of NEON.

use std::arch::aarch64::*;

use super::{Places, Target, Vector, by_op};
use crate::{Element, ReduceOp};

/// # Safety
///
/// As for [`super::by_isa`]; the CPU has NEON.
#[target_feature(enable = "neon")]
pub(super) unsafe fn reduce<T: Element>(op: ReduceOp, sources: &[*const u8], targets: &[Target], count: usize) {
    // SAFETY: this function has the instructions enabled; the caller vouches for the rest.
    unsafe { by_op::<float32x4_t, T>(op, sources, targets, count) }
}

impl Vector for float32x4_t {
    const LANES: usize = 4;
    type Narrower = f32;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller may use NEON.
        unsafe { vdupq_n_f32(value) }
    }

    // What asks for lines is not stable for this target.
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: the caller vouches for 4 elements and for NEON.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // The vector conversion needs Rust's own f16, which is not stable; each lane is one instruction here.
        // SAFETY: the caller vouches for 4 elements and for NEON.
        unsafe {
            let lanes: [f32; 4] = std::array::from_fn(|lane| <f32 as Vector>::load_f16(from.add(lane)));
            vld1q_f32(lanes.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 4 elements and for NEON.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))) }
    }

    #[inline(always)]
    unsafe fn store_f32(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 4 elements in each place and for NEON.
        unsafe {
            let value = canonical(self);
            places.each(|to, _| vst1q_f32(to.cast(), value));
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 4 elements in each place and for NEON.
        unsafe {
            let mut lanes = [0.0f32; 4];
            vst1q_f32(lanes.as_mut_ptr(), self);
            for (lane, value) in lanes.into_iter().enumerate() {
                <f32 as Vector>::store_f16(value, Places { offset: places.offset + 2 * lane, ..places });
            }
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 4 elements in each place and for NEON.
        unsafe {
            // The rounding is the portable lane's, which says why.
            let bits = vreinterpretq_u32_f32(canonical(self));
            let last = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vshrn_n_u32::<16>(vaddq_u32(bits, vaddq_u32(last, vdupq_n_u32(0x7fff))));
            places.each(|to, _| vst1_u16(to.cast(), rounded));
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller may use NEON.
        unsafe { vaddq_f32(self, other) }
    }

    #[inline(always)]
    unsafe fn divide(self, by: Self) -> Self {
        // SAFETY: the caller may use NEON.
        unsafe { vdivq_f32(self, by) }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // FMAX gives NaN where either is one, and takes +0 for greater than −0.
        // SAFETY: the caller may use NEON.
        unsafe { vmaxq_f32(self, other) }
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: the caller may use NEON; FMIN is as FMAX.
        unsafe { vminq_f32(self, other) }
    }
}

/// # Safety
///
/// The caller may use NEON.
#[inline(always)]
unsafe fn canonical(value: float32x4_t) -> float32x4_t {
    // SAFETY: the caller may use NEON.
    unsafe { vbslq_f32(vceqq_f32(value, value), value, vdupq_n_f32(f32::NAN)) }
}
