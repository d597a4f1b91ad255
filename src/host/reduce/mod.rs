//! The reduction of N sources to one, in f32 and in rank order, with one rounding.
//!
//! One loop, generic over the vector ([`Vector`]), the element type and the reduction ([`Fold`]); `portable`, `x86` and
//! `aarch64` bring the vectors. All vectors give the same bits: every step is one IEEE operation, or integer arithmetic,
//! per element. A result that is NaN is always the same NaN, since which of two payloads an addition keeps is up to the
//! instruction and the order of its operands, which the compiler may swap in one loop and not in another.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::{DType, Element, ReduceOp};

/// The instructions that the loops may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isa {
    /// What every CPU of the target has.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Isa {
    /// All that this CPU has, the widest last.
    pub(super) fn available() -> impl DoubleEndedIterator<Item = Isa> {
        let wider = [
            #[cfg(target_arch = "x86_64")]
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")).then_some(Isa::Avx2),
            #[cfg(target_arch = "aarch64")]
            std::arch::is_aarch64_feature_detected!("neon").then_some(Isa::Neon),
        ];
        let wider: Vec<Option<Isa>> = wider.into_iter().collect();
        [Isa::Portable].into_iter().chain(wider.into_iter().flatten())
    }

    /// The widest that this CPU has.
    pub(super) fn widest() -> Isa {
        Isa::available().next_back().unwrap_or(Isa::Portable)
    }
}

/// Reduces `count` elements of every source to `to`. The sources are in rank order.
///
/// # Safety
///
/// `isa` is available. Every source is readable and `to` writable for `count` elements of `T`, aligned to `T`, and `to`
/// is one of the sources or apart from it. `sources` is not empty.
pub(super) unsafe fn reduce<T: Element>(isa: Isa, op: ReduceOp, sources: &[*const u8], to: *mut u8, count: usize) {
    let to = to.cast::<T>();
    // SAFETY: the caller's promises are handed on; each arm's instructions are the ones that `isa` names.
    unsafe {
        match isa {
            Isa::Portable => by_op::<f32, T>(op, sources, to, count),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::reduce::<T>(op, sources, to, count),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => aarch64::reduce::<T>(op, sources, to, count),
        }
    }
}

/// Some f32 lanes, and how they come from memory and go there.
///
/// Every method is unsafe: it may only run where the vector's instructions are available. They are inlined into a function
/// that has them enabled.
trait Vector: Copy {
    /// The number of elements.
    const LANES: usize;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load_f32(from: *const f32) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn store_f32(self, to: *mut f32);
    /// Rounds to nearest, ties to even.
    unsafe fn store_f16(self, to: *mut u16);
    /// Rounds to nearest, ties to even. No lane is a NaN but the canonical one.
    unsafe fn store_bf16(self, to: *mut u16);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn divide(self, by: Self) -> Self;
    /// NaN where either is; +0 is greater than −0.
    unsafe fn max(self, other: Self) -> Self;
    /// NaN where either is; −0 is less than +0.
    unsafe fn min(self, other: Self) -> Self;
    /// The same, with every NaN replaced by [`f32::NAN`].
    unsafe fn canonical(self) -> Self;
}

/// A reduction, as a fold and what follows it.
trait Fold {
    unsafe fn step<V: Vector>(sum: V, next: V) -> V;

    #[inline(always)]
    unsafe fn finish<V: Vector>(sum: V, _world: V) -> V {
        sum
    }
}

struct Sum;
struct Average;
struct Max;
struct Min;

impl Fold for Sum {
    #[inline(always)]
    unsafe fn step<V: Vector>(sum: V, next: V) -> V {
        // SAFETY: the caller may use V's instructions.
        unsafe { sum.add(next) }
    }
}

impl Fold for Average {
    #[inline(always)]
    unsafe fn step<V: Vector>(sum: V, next: V) -> V {
        // SAFETY: the caller may use V's instructions.
        unsafe { sum.add(next) }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector>(sum: V, world: V) -> V {
        // SAFETY: the caller may use V's instructions.
        unsafe { sum.divide(world) }
    }
}

impl Fold for Max {
    #[inline(always)]
    unsafe fn step<V: Vector>(sum: V, next: V) -> V {
        // SAFETY: the caller may use V's instructions.
        unsafe { sum.max(next) }
    }
}

impl Fold for Min {
    #[inline(always)]
    unsafe fn step<V: Vector>(sum: V, next: V) -> V {
        // SAFETY: the caller may use V's instructions.
        unsafe { sum.min(next) }
    }
}

/// # Safety
///
/// As for [`reduce`], where V's instructions are available.
#[inline(always)]
unsafe fn by_op<V: Vector, T: Element>(op: ReduceOp, sources: &[*const u8], to: *mut T, count: usize) {
    // SAFETY: the caller's promises are handed on.
    unsafe {
        match op {
            ReduceOp::Sum => by_world::<V, T, Sum>(sources, to, count),
            ReduceOp::Average => by_world::<V, T, Average>(sources, to, count),
            ReduceOp::Max => by_world::<V, T, Max>(sources, to, count),
            ReduceOp::Min => by_world::<V, T, Min>(sources, to, count),
        }
    }
}

/// # Safety
///
/// As for [`by_op`].
#[inline(always)]
unsafe fn by_world<V: Vector, T: Element, F: Fold>(sources: &[*const u8], to: *mut T, count: usize) {
    // SAFETY: the caller's promises are handed on.
    unsafe {
        match *sources {
            // With the number known, the loop over the sources is gone and their addresses stay in registers.
            [a, b] => all::<V, T, F>(&[a, b], to, count),
            _ => all::<V, T, F>(sources, to, count),
        }
    }
}

/// # Safety
///
/// As for [`by_op`].
#[inline(always)]
unsafe fn all<V: Vector, T: Element, F: Fold>(sources: &[*const u8], to: *mut T, count: usize) {
    // SAFETY: every access lies below `count`; the caller's promises are handed on.
    unsafe {
        let mut start = 0;
        while count - start >= 4 * V::LANES {
            tile::<V, T, F, 4>(sources, to, start);
            start += 4 * V::LANES;
        }
        while count - start >= V::LANES {
            tile::<V, T, F, 1>(sources, to, start);
            start += V::LANES;
        }
        while start < count {
            tile::<f32, T, F, 1>(sources, to, start);
            start += 1;
        }
    }
}

/// Reduces the elements of `WIDTH` vectors, from `start` on. All is loaded before anything is stored, so `to` may be one
/// of the sources.
///
/// # Safety
///
/// As for [`by_op`], with `start + WIDTH * V::LANES <= count`.
#[inline(always)]
unsafe fn tile<V: Vector, T: Element, F: Fold, const WIDTH: usize>(sources: &[*const u8], to: *mut T, start: usize) {
    // SAFETY: the caller vouches for the range and the instructions.
    unsafe {
        let at = |source: *const u8, index: usize| source.cast::<T>().add(start + index * V::LANES);
        let mut sums = [V::splat(0.0); WIDTH];
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = load::<V, T>(at(sources[0], index));
        }
        for &source in &sources[1..] {
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum = F::step(*sum, load::<V, T>(at(source, index)));
            }
        }
        let world = V::splat(sources.len() as f32);
        for (index, sum) in sums.into_iter().enumerate() {
            store::<V, T>(F::finish(sum, world).canonical(), to.add(start + index * V::LANES));
        }
    }
}

/// # Safety
///
/// `from` is readable for `V::LANES` elements, where V's instructions are available.
#[inline(always)]
unsafe fn load<V: Vector, T: Element>(from: *const T) -> V {
    // SAFETY: T is the type that its DTYPE names, f16 and bf16 are their bits; the caller vouches for the rest.
    unsafe {
        match T::DTYPE {
            DType::F32 => V::load_f32(from.cast()),
            DType::F16 => V::load_f16(from.cast()),
            DType::BF16 => V::load_bf16(from.cast()),
        }
    }
}

/// # Safety
///
/// `to` is writable for `V::LANES` elements, where V's instructions are available.
#[inline(always)]
unsafe fn store<V: Vector, T: Element>(vector: V, to: *mut T) {
    // SAFETY: as in `load`.
    unsafe {
        match T::DTYPE {
            DType::F32 => vector.store_f32(to.cast()),
            DType::F16 => vector.store_f16(to.cast()),
            DType::BF16 => vector.store_bf16(to.cast()),
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use half::{bf16, f16};

    use super::*;

    fn reduced<T: Element>(isa: Isa, op: ReduceOp, sources: &[Vec<T>]) -> Vec<T> {
        let mut to = vec![T::from_f32(7.0); sources[0].len()];
        let pointers: Vec<_> = sources.iter().map(|source| source.as_ptr().cast()).collect();
        // SAFETY: `isa` is available, and all vectors have the first one's length.
        unsafe { reduce::<T>(isa, op, &pointers, to.as_mut_ptr().cast(), to.len()) };
        to
    }

    /// The bits of the elements.
    fn bits<T: Element>(values: &[T]) -> Vec<u32> {
        let bits = |&value: &T| match T::DTYPE {
            // SAFETY: T has the size of its DTYPE, and no padding.
            DType::F32 => unsafe { std::mem::transmute_copy::<T, u32>(&value) },
            // SAFETY: as above.
            DType::F16 | DType::BF16 => unsafe { std::mem::transmute_copy::<T, u16>(&value) }.into(),
        };
        values.iter().map(bits).collect()
    }

    /// Bits of all kinds: every exponent, both signs, with fractions that include all ends and ties.
    fn patterns(count: usize, seed: u32) -> impl Iterator<Item = u32> {
        let ends = [0, 1, 0x7fff, 0x8000, 0x8001, 0x0fff, 0x1000, 0x1001, 0x7f_ffff, 0x40_0000, 0x3f_8000, 0x01_8000];
        let mut state = seed;
        (0..count).map(move |index| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if index % 2 == 0 { state & 0xff80_0000 | ends[(state >> 9) as usize % ends.len()] } else { state }
        })
    }

    #[test]
    fn all_vectors_give_the_same_bits() {
        fn all<T: Element>(of_bits: impl Fn(u32) -> T) {
            for world in [2, 3, 8] {
                // Lengths around every step of the loops, and one with many patterns.
                for count in (0..70).chain([100_003]) {
                    let sources: Vec<Vec<T>> = (0..world)
                        .map(|rank| patterns(count, rank * 77 + count as u32).map(&of_bits).collect())
                        .collect();
                    for op in ReduceOp::ALL {
                        let expected = bits(&reduced(Isa::Portable, op, &sources));
                        for isa in Isa::available() {
                            let result = bits(&reduced(isa, op, &sources));
                            assert!(result == expected, "{op} of {world} times {count} of {} by {isa:?}", T::DTYPE);
                        }
                    }
                }
            }
        }
        all(f32::from_bits);
        all(|bits| f16::from_bits((bits >> 16) as u16));
        all(|bits| bf16::from_bits((bits >> 16) as u16));
    }

    /// Every 16-bit number survives the way to f32 and back; NaNs become the canonical one.
    #[test]
    fn conversions_there_and_back_change_nothing_but_nans() {
        fn all<T: Element>(of_bits: fn(u16) -> T, nan: u32) {
            let values: Vec<T> = (0..=u16::MAX).map(of_bits).collect();
            let expected: Vec<u32> = values
                .iter()
                .zip(0u32..)
                .map(|(value, bits)| if value.to_f32().is_nan() { nan } else { bits })
                .collect();
            for isa in Isa::available() {
                assert_eq!(bits(&reduced(isa, ReduceOp::Sum, std::slice::from_ref(&values))), expected, "{isa:?}");
            }
        }
        all(f16::from_bits, 0x7e00);
        all(bf16::from_bits, 0x7fc0);
    }

    /// The stores round as `half` does, on ties, carries, overflows and subnormals. A NaN is `half`'s of the canonical one.
    #[test]
    fn stores_round_as_half_does() {
        fn store_all<V: Vector, const N: usize>(from: &[f32; N]) -> ([u16; N], [u16; N]) {
            assert_eq!(V::LANES, N);
            let (mut halves, mut brains) = ([0; N], [0; N]);
            // SAFETY: the arrays hold as many lanes; the callers checked that the instructions are there.
            unsafe {
                let vector = V::load_f32(from.as_ptr()).canonical();
                vector.store_f16(halves.as_mut_ptr());
                vector.store_bf16(brains.as_mut_ptr());
            }
            (halves, brains)
        }
        let values: Vec<f32> = patterns(1 << 20, 1).map(f32::from_bits).collect();
        for lanes in values.chunks_exact(8) {
            let lanes: [f32; 8] = lanes.try_into().unwrap();
            let canonical = lanes.map(|value| if value.is_nan() { f32::NAN } else { value });
            let halves = canonical.map(|value| f16::from_f32(value).to_bits());
            let brains = canonical.map(|value| bf16::from_f32(value).to_bits());
            for lane in 0..8 {
                let stored = store_all::<f32, 1>(&[lanes[lane]]);
                assert_eq!(stored, ([halves[lane]], [brains[lane]]), "{:#x}", lanes[lane].to_bits());
            }
            #[cfg(target_arch = "x86_64")]
            if Isa::available().any(|isa| isa == Isa::Avx2) {
                use std::arch::x86_64::__m256;
                assert_eq!(store_all::<__m256, 8>(&lanes), (halves, brains), "{lanes:?}");
            }
        }
    }
}
