//! Eight lanes of AVX2, with F16C for the conversions of f16.

use std::arch::x86_64::*;

use super::{Vector, by_op};
use crate::{Element, ReduceOp};

/// # Safety
///
/// As for [`super::reduce`]; the CPU has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn reduce<T: Element>(op: ReduceOp, sources: &[*const u8], to: *mut T, count: usize) {
    // SAFETY: this function has the instructions enabled; the caller vouches for the rest.
    unsafe { by_op::<__m256, T>(op, sources, to, count) }
}

impl Vector for __m256 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: the caller vouches for 8 elements and for AVX2; the load needs no alignment.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 8 elements and for F16C; the load needs no alignment.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 8 elements and for AVX2; the load needs no alignment.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn store_f32(self, to: *mut f32) {
        // SAFETY: the caller vouches for 8 elements and for AVX2; the store needs no alignment.
        unsafe { _mm256_storeu_ps(to, self) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: the caller vouches for 8 elements and for F16C; the store needs no alignment.
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self)) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: the caller vouches for 8 elements and for AVX2; the store needs no alignment.
        unsafe {
            // The rounding is the portable lane's, which says why.
            let bits = _mm256_castps_si256(self);
            let last = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
            let high = _mm256_srli_epi32::<16>(rounded);
            // Packing works within each half of the register, so lanes 0..4 and 4..8 end up in its quarters 0 and 2.
            let packed = _mm256_permute4x64_epi64::<0b10_00>(_mm256_packus_epi32(high, high));
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(packed));
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe { _mm256_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn divide(self, by: Self) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe { _mm256_div_ps(self, by) }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe {
            // The instruction's answer serves where the two are ordered and differ; the rest is the portable lane's.
            let equal = _mm256_cmp_ps::<_CMP_EQ_OQ>(self, other);
            let ordered = _mm256_blendv_ps(_mm256_max_ps(self, other), _mm256_and_ps(self, other), equal);
            _mm256_blendv_ps(ordered, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(self, other))
        }
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe {
            let equal = _mm256_cmp_ps::<_CMP_EQ_OQ>(self, other);
            let ordered = _mm256_blendv_ps(_mm256_min_ps(self, other), _mm256_or_ps(self, other), equal);
            _mm256_blendv_ps(ordered, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(self, other))
        }
    }

    #[inline(always)]
    unsafe fn canonical(self) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe { _mm256_blendv_ps(self, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(self, self)) }
    }
}
