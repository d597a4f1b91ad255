//! NEON, which every CPU of this target has. A vector is two registers, so that one of 16-bit elements fills a register in
//! memory.

use std::arch::{aarch64::*, asm};

use super::{Places, Sources, Target, Vector, by_op};
use crate::{Element, ReduceOp};

/// # Safety
///
/// As for [`super::by_isa`]; the CPU has NEON.
#[target_feature(enable = "neon")]
pub(super) unsafe fn reduce<T: Element>(op: ReduceOp, sources: Sources<'_>, targets: &[Target], count: usize) {
    // SAFETY: this function has the instructions enabled; the caller vouches for the rest.
    unsafe { by_op::<Two128, T>(op, sources, targets, count) }
}

/// Eight lanes of NEON.
#[derive(Clone, Copy)]
pub(super) struct Two128([float32x4_t; 2]);

impl Two128 {
    #[inline(always)]
    unsafe fn zip(self, other: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Two128([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
    }
}

impl Vector for Two128 {
    const LANES: usize = 8;
    type Narrower = f32;
    const PREFETCHES: bool = false;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller may use NEON.
        unsafe { Two128([vdupq_n_f32(value); 2]) }
    }

    // Nothing was measured on this target that would ask for it.
    #[inline(always)]
    unsafe fn prefetch<const SECOND: bool>(_: *const u8) {}

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: the caller vouches for 8 elements and for NEON.
        unsafe { Two128([vld1q_f32(from), vld1q_f32(from.add(4))]) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 8 elements and for NEON.
        unsafe {
            let bits = vld1q_u16(from);
            Two128([widened(vget_low_u16(bits)), widened_high(bits)])
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 8 elements and for NEON.
        unsafe {
            let bits = vld1q_u16(from);
            let low = vshll_n_u16::<16>(vget_low_u16(bits));
            Two128([low, vshll_high_n_u16::<16>(bits)].map(|bits| vreinterpretq_f32_u32(bits)))
        }
    }

    #[inline(always)]
    unsafe fn store_f32(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 8 elements in each place and for NEON.
        unsafe {
            let (first, second) = (canonical(self.0[0]), canonical(self.0[1]));
            places.each(|to, _| {
                vst1q_f32(to.cast(), first);
                vst1q_f32(to.cast::<f32>().add(4), second);
            });
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 8 elements in each place and for NEON.
        unsafe {
            let bits = narrowed(canonical(self.0[0]), canonical(self.0[1]));
            places.each(|to, _| vst1q_u16(to.cast(), bits));
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 8 elements in each place and for NEON.
        unsafe {
            let bits = vshrn_high_n_u32::<16>(vshrn_n_u32::<16>(rounded(self.0[0])), rounded(self.0[1]));
            places.each(|to, _| vst1q_u16(to.cast(), bits));
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller may use NEON.
        unsafe { self.zip(other, |a, b| vaddq_f32(a, b)) }
    }

    #[inline(always)]
    unsafe fn divide(self, by: Self) -> Self {
        // SAFETY: the caller may use NEON.
        unsafe { self.zip(by, |a, b| vdivq_f32(a, b)) }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // FMAX gives NaN where either is one, and takes +0 for greater than −0.
        // SAFETY: the caller may use NEON.
        unsafe { self.zip(other, |a, b| vmaxq_f32(a, b)) }
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: the caller may use NEON; FMIN is as FMAX.
        unsafe { self.zip(other, |a, b| vminq_f32(a, b)) }
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

/// What rounds to a bf16's bits, in the upper half of each lane.
///
/// # Safety
///
/// The caller may use NEON.
#[inline(always)]
unsafe fn rounded(value: float32x4_t) -> uint32x4_t {
    // The rounding is the portable lane's, which says why.
    // SAFETY: the caller may use NEON.
    unsafe {
        let bits = vreinterpretq_u32_f32(canonical(value));
        let last = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        vaddq_u32(bits, vaddq_u32(last, vdupq_n_u32(0x7fff)))
    }
}

// The conversions of f16 belong to the base of this target, but the functions for them came with Rust 1.94. What the crate
// half has is no vector's, and asks for the extension with arithmetic of f16.

/// Four of f16 as f32.
///
/// # Safety
///
/// The caller may use NEON.
#[inline(always)]
unsafe fn widened(bits: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: the caller may use NEON; the instruction has these two operands and touches no memory.
    unsafe { asm!("fcvtl {:v}.4s, {:v}.4h", lateout(vreg) wide, in(vreg) bits, options(pure, nomem, nostack)) }
    wide
}

/// The upper four of eight of f16 as f32.
///
/// # Safety
///
/// The caller may use NEON.
#[inline(always)]
unsafe fn widened_high(bits: uint16x8_t) -> float32x4_t {
    let wide;
    // SAFETY: as in `widened`.
    unsafe { asm!("fcvtl2 {:v}.4s, {:v}.8h", lateout(vreg) wide, in(vreg) bits, options(pure, nomem, nostack)) }
    wide
}

/// The f16 nearest to each of eight, ties to even, which is how Rust has its threads round.
///
/// # Safety
///
/// The caller may use NEON.
#[inline(always)]
unsafe fn narrowed(first: float32x4_t, second: float32x4_t) -> uint16x8_t {
    let bits;
    // SAFETY: the caller may use NEON; the instructions touch no memory. The result is begun before `second` is read, so it
    // has a register of its own.
    unsafe {
        asm!(
            "fcvtn {to:v}.4h, {first:v}.4s",
            "fcvtn2 {to:v}.8h, {second:v}.4s",
            to = out(vreg) bits, first = in(vreg) first, second = in(vreg) second,
            options(pure, nomem, nostack)
        )
    }
    bits
}
