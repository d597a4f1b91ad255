//! AVX2, with F16C for the conversions of f16, and AVX-512. A vector is two registers, so that one of 16-bit elements
//! fills a register in memory.

use std::arch::x86_64::*;

use super::{LINE, Places, STREAMS_BYTES, Sources, Stores, TURN_BYTES, Target, Vector, by_op, turns};
use crate::{Element, ReduceOp};

/// # Safety
///
/// As for [`super::by_isa`]; the CPU has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn reduce<T: Element>(op: ReduceOp, sources: Sources<'_>, targets: &[Target], count: usize) {
    // SAFETY: this function has the instructions enabled; the caller vouches for the rest.
    unsafe { by_op::<Two256, T>(op, sources, targets, count) }
}

/// # Safety
///
/// As for [`super::by_isa`]; the CPU has what [`super::Isa::Avx512`] says.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn reduce_512<T: Element>(op: ReduceOp, sources: Sources<'_>, targets: &[Target], count: usize) {
    // SAFETY: as in `reduce`.
    unsafe { by_op::<Two512<false>, T>(op, sources, targets, count) }
}

/// # Safety
///
/// As for [`super::by_isa`]; the CPU has what [`super::Isa::Avx512Bf16`] says.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn reduce_512_bf16<T: Element>(op: ReduceOp, sources: Sources<'_>, targets: &[Target], count: usize) {
    // SAFETY: as in `reduce`.
    unsafe { by_op::<Two512<true>, T>(op, sources, targets, count) }
}

/// A line that is copied in one go.
trait Line {
    /// # Safety
    ///
    /// A line is readable from `from` on and writable from `to` on, where a line starts; its instructions are available.
    unsafe fn copy(from: *const u8, to: *mut u8, stores: Stores);
}

struct By256;
struct By512;

impl Line for By256 {
    #[inline(always)]
    unsafe fn copy(from: *const u8, to: *mut u8, stores: Stores) {
        // SAFETY: both halves of the line lie in what the caller vouches for.
        unsafe {
            let first = _mm256_loadu_si256(from.cast());
            let second = _mm256_loadu_si256(from.add(LINE / 2).cast());
            put(to, first, stores);
            put(to.add(LINE / 2), second, stores);
        }
    }
}

impl Line for By512 {
    #[inline(always)]
    unsafe fn copy(from: *const u8, to: *mut u8, stores: Stores) {
        // SAFETY: the caller vouches for the line.
        unsafe { put_512(to, _mm512_loadu_si512(from.cast()), stores) }
    }
}

/// # Safety
///
/// So many lines are readable and writable, apart from each other; `to` is the start of a line, and the CPU has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy_lines(from: *const u8, to: *mut u8, lines: usize, stores: Stores, ahead: *const u8) {
    // SAFETY: the caller's promises are handed on.
    unsafe { copy_by::<By256>(from, to, lines, stores, ahead) }
}

/// # Safety
///
/// As for [`copy_lines`]; the CPU has AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn copy_lines_512(from: *const u8, to: *mut u8, lines: usize, stores: Stores, ahead: *const u8) {
    // SAFETY: the caller's promises are handed on.
    unsafe { copy_by::<By512>(from, to, lines, stores, ahead) }
}

/// # Safety
///
/// As for [`copy_lines`], where the line's instructions are available.
#[inline(always)]
unsafe fn copy_by<L: Line>(from: *const u8, to: *mut u8, lines: usize, stores: Stores, ahead: *const u8) {
    let bytes = lines * LINE;
    let mut done = 0;
    if ahead.is_null() && STREAMS_BYTES.contains(&bytes) {
        for turn in turns(bytes) {
            for offset in (turn.offset..turn.offset + TURN_BYTES).step_by(LINE) {
                if let Some(ahead) = turn.ahead {
                    prefetch::<true>(from.wrapping_add(offset + ahead));
                }
                // SAFETY: a turn is within the bytes.
                unsafe { L::copy(from.add(offset), to.add(offset), stores) }
            }
            done += TURN_BYTES;
        }
    }
    for offset in (done..bytes).step_by(LINE) {
        if !ahead.is_null() {
            // To the second cache: the first is small.
            prefetch::<true>(ahead.wrapping_add(offset));
        }
        // SAFETY: the line lies in what the caller vouches for.
        unsafe { L::copy(from.add(offset), to.add(offset), stores) }
    }
}

/// Asks for a line, which may lie anywhere, for the first cache or the second.
#[inline(always)]
fn prefetch<const SECOND: bool>(from: *const u8) {
    // SAFETY: every x86-64 CPU has it, and no address makes it fail.
    unsafe { if SECOND { _mm_prefetch::<_MM_HINT_T1>(from.cast()) } else { _mm_prefetch::<_MM_HINT_T0>(from.cast()) } }
}

/// Sixteen lanes of AVX2. Of bf16, the first register has the elements at even places and the second those at odd ones,
/// which saves taking them apart and packing them again.
#[derive(Clone, Copy)]
pub(super) struct Two256([__m256; 2]);

impl Two256 {
    #[inline(always)]
    unsafe fn zip(self, other: Self, f: impl Fn(__m256, __m256) -> __m256) -> Self {
        Two256([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
    }
}

impl Vector for Two256 {
    const LANES: usize = 16;
    type Narrower = f32;
    const PREFETCHES: bool = true;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe { Two256([_mm256_set1_ps(value); 2]) }
    }

    #[inline(always)]
    unsafe fn prefetch<const SECOND: bool>(from: *const u8) {
        prefetch::<SECOND>(from)
    }

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: the caller vouches for 16 elements and for AVX2; the loads need no alignment.
        unsafe { Two256([_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))]) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 16 elements and for F16C; the loads need no alignment.
        unsafe {
            let half = |from: *const u16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
            Two256([half(from), half(from.add(8))])
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 16 elements and for AVX2; the load needs no alignment.
        unsafe {
            let bits = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(bits, _mm256_set1_epi32(!0xffff));
            Two256([_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)), _mm256_castsi256_ps(odd)])
        }
    }

    #[inline(always)]
    unsafe fn store_f32(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 16 elements in each place and for AVX2.
        unsafe {
            let first = _mm256_castps_si256(canonical(self.0[0]));
            let second = _mm256_castps_si256(canonical(self.0[1]));
            places.each(|to, stores| {
                put(to, first, stores);
                put(to.add(32), second, stores);
            });
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 16 elements in each place and for F16C.
        unsafe {
            let first = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(canonical(self.0[0]));
            let second = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(canonical(self.0[1]));
            let bits = _mm256_set_m128i(second, first);
            places.each(|to, stores| put(to, bits, stores));
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 16 elements in each place and for AVX2.
        unsafe {
            let (even, odd) = (rounded(self.0[0]), rounded(self.0[1]));
            let bits = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even), odd);
            places.each(|to, stores| put(to, bits, stores));
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe { self.zip(other, |a, b| _mm256_add_ps(a, b)) }
    }

    #[inline(always)]
    unsafe fn divide(self, by: Self) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe { self.zip(by, |a, b| _mm256_div_ps(a, b)) }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // The instruction's answer serves where the two are ordered and differ; the rest is the portable lane's.
        // SAFETY: the caller may use AVX2.
        unsafe {
            self.zip(other, |a, b| {
                let equal = _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b);
                let ordered = _mm256_blendv_ps(_mm256_max_ps(a, b), _mm256_and_ps(a, b), equal);
                _mm256_blendv_ps(ordered, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b))
            })
        }
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: the caller may use AVX2.
        unsafe {
            self.zip(other, |a, b| {
                let equal = _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b);
                let ordered = _mm256_blendv_ps(_mm256_min_ps(a, b), _mm256_or_ps(a, b), equal);
                _mm256_blendv_ps(ordered, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b))
            })
        }
    }
}

/// # Safety
///
/// The caller may use AVX2.
#[inline(always)]
unsafe fn canonical(value: __m256) -> __m256 {
    // SAFETY: the caller may use AVX2.
    unsafe { _mm256_blendv_ps(value, _mm256_set1_ps(f32::NAN), _mm256_cmp_ps::<_CMP_UNORD_Q>(value, value)) }
}

/// What rounds to a bf16's bits, in the upper half of each lane.
///
/// # Safety
///
/// The caller may use AVX2.
#[inline(always)]
unsafe fn rounded(value: __m256) -> __m256i {
    // The rounding is the portable lane's, which says why.
    // SAFETY: the caller may use AVX2.
    unsafe {
        let bits = _mm256_castps_si256(canonical(value));
        let last = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)))
    }
}

/// # Safety
///
/// `to` is writable for 32 bytes, at a multiple of them if it streams; the caller may use AVX2.
#[inline(always)]
unsafe fn put(to: *mut u8, bits: __m256i, stores: Stores) {
    // SAFETY: the caller vouches for the place.
    unsafe {
        match stores {
            Stores::Cached => _mm256_storeu_si256(to.cast(), bits),
            Stores::Streaming => _mm256_stream_si256(to.cast(), bits),
        }
    }
}

/// Thirty-two lanes of AVX-512, with its conversion to bf16 if `BF16`.
#[derive(Clone, Copy)]
pub(super) struct Two512<const BF16: bool>([__m512; 2]);

impl<const BF16: bool> Two512<BF16> {
    #[inline(always)]
    unsafe fn zip(self, other: Self, f: impl Fn(__m512, __m512) -> __m512) -> Self {
        Two512([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
    }

    /// # Safety
    ///
    /// The caller may use AVX-512.
    #[inline(always)]
    unsafe fn rounded_to_bf16(self) -> __m512i {
        // SAFETY: the caller may use AVX-512.
        unsafe {
            let (first, second) = (rounded_512(self.0[0]), rounded_512(self.0[1]));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second)
        }
    }
}

impl<const BF16: bool> Vector for Two512<BF16> {
    const LANES: usize = 32;
    type Narrower = Two256;
    const PREFETCHES: bool = true;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller may use AVX-512.
        unsafe { Two512([_mm512_set1_ps(value); 2]) }
    }

    #[inline(always)]
    unsafe fn prefetch<const SECOND: bool>(from: *const u8) {
        prefetch::<SECOND>(from)
    }

    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: the caller vouches for 32 elements and for AVX-512; the loads need no alignment.
        unsafe { Two512([_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))]) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 32 elements and for AVX-512; the loads need no alignment.
        unsafe {
            let half = |from: *const u16| _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
            Two512([half(from), half(from.add(16))])
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for 32 elements and for AVX-512; the loads need no alignment.
        unsafe {
            let half = |from: *const u16| {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            };
            Two512([half(from), half(from.add(16))])
        }
    }

    #[inline(always)]
    unsafe fn store_f32(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 32 elements in each place and for AVX-512.
        unsafe {
            let first = _mm512_castps_si512(canonical_512(self.0[0]));
            let second = _mm512_castps_si512(canonical_512(self.0[1]));
            places.each(|to, stores| {
                put_512(to, first, stores);
                put_512(to.add(64), second, stores);
            });
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 32 elements in each place and for AVX-512.
        unsafe {
            let first = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(canonical_512(self.0[0]));
            let second = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(canonical_512(self.0[1]));
            let bits = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second);
            places.each(|to, stores| put_512(to, bits, stores));
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, places: Places<'_>) {
        // SAFETY: the caller vouches for 32 elements in each place and for AVX-512, with the conversion if `BF16`.
        unsafe {
            let bits = if BF16 {
                // The instruction rounds to nearest even but takes subnormals for 0 and keeps a NaN's payload, so lanes
                // with either go the other way. What is no subnormal doesn't round to one.
                const SUBNORMAL_OR_NAN: i32 = 0x20 | 0x80 | 0x01;
                let [first, second] = self.0;
                let odd = _mm512_fpclass_ps_mask::<SUBNORMAL_OR_NAN>(first)
                    | _mm512_fpclass_ps_mask::<SUBNORMAL_OR_NAN>(second);
                if odd == 0 {
                    std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first))
                } else {
                    self.rounded_to_bf16()
                }
            } else {
                self.rounded_to_bf16()
            };
            places.each(|to, stores| put_512(to, bits, stores));
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller may use AVX-512.
        unsafe { self.zip(other, |a, b| _mm512_add_ps(a, b)) }
    }

    #[inline(always)]
    unsafe fn divide(self, by: Self) -> Self {
        // SAFETY: the caller may use AVX-512.
        unsafe { self.zip(by, |a, b| _mm512_div_ps(a, b)) }
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // SAFETY: the caller may use AVX-512.
        unsafe {
            self.zip(other, |a, b| {
                let equal = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b);
                let ordered = _mm512_mask_and_ps(_mm512_max_ps(a, b), equal, a, b);
                _mm512_mask_mov_ps(ordered, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, b), _mm512_set1_ps(f32::NAN))
            })
        }
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        // SAFETY: the caller may use AVX-512.
        unsafe {
            self.zip(other, |a, b| {
                let equal = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b);
                let ordered = _mm512_mask_or_ps(_mm512_min_ps(a, b), equal, a, b);
                _mm512_mask_mov_ps(ordered, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, b), _mm512_set1_ps(f32::NAN))
            })
        }
    }
}

/// # Safety
///
/// The caller may use AVX-512.
#[inline(always)]
unsafe fn canonical_512(value: __m512) -> __m512 {
    // SAFETY: the caller may use AVX-512.
    unsafe { _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value), _mm512_set1_ps(f32::NAN)) }
}

/// # Safety
///
/// The caller may use AVX-512.
#[inline(always)]
unsafe fn rounded_512(value: __m512) -> __m256i {
    // The rounding is the portable lane's, which says why.
    // SAFETY: the caller may use AVX-512.
    unsafe {
        let bits = _mm512_castps_si512(canonical_512(value));
        let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
    }
}

/// # Safety
///
/// `to` is writable for 64 bytes, at a multiple of them if it streams; the caller may use AVX-512.
#[inline(always)]
unsafe fn put_512(to: *mut u8, bits: __m512i, stores: Stores) {
    // SAFETY: the caller vouches for the place.
    unsafe {
        match stores {
            Stores::Cached => _mm512_storeu_si512(to.cast(), bits),
            Stores::Streaming => _mm512_stream_si512(to.cast(), bits),
        }
    }
}
