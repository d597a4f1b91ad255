//! The reduction of N sources to one, in f32 and in rank order, with one rounding; and the copies beside it.
//!
//! One loop, generic over the vector ([`Vector`]), the element type and the reduction ([`Fold`]); `portable`, `x86` and
//! `aarch64` bring the vectors. All vectors give the same bits: every step is one IEEE operation, or integer
//! arithmetic, per element. A result that is NaN is always the same NaN, since which of two payloads an addition keeps
//! is up to the instruction and the order of its operands, which the compiler may swap in one loop and not in another.
//!
//! A loop can write its result to several places at once, so that what goes to the caller and to peers is not read
//! again, and by stores that pass the caches by ([`Stores`]).

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::{mem::MaybeUninit, ops::RangeInclusive};

use crate::{DType, Element, ReduceOp};

/// The instructions that the loops may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isa {
    /// What every CPU of the target has.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512: F, BW, DQ and VL, as all have since Skylake's servers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same and its conversions to bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Isa {
    /// All that this CPU has, the widest last.
    pub(super) fn available() -> impl DoubleEndedIterator<Item = Isa> {
        #[cfg(target_arch = "x86_64")]
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        #[cfg(target_arch = "x86_64")]
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        let wider = [
            #[cfg(target_arch = "x86_64")]
            avx2.then_some(Isa::Avx2),
            #[cfg(target_arch = "x86_64")]
            avx512.then_some(Isa::Avx512),
            #[cfg(target_arch = "x86_64")]
            (avx512 && is_x86_feature_detected!("avx512bf16")).then_some(Isa::Avx512Bf16),
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

    /// Whether it has stores that pass the caches by.
    fn streams(self) -> bool {
        match self {
            Isa::Portable => false,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 => true,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => false,
        }
    }
}

/// How stores go to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stores {
    /// Through the caches.
    Cached,
    /// Past them (non-temporal), where the CPU can. Whoever is handed what was stored so needs no more than for cached
    /// stores: the loops end with the fence that orders them.
    Streaming,
}

/// What a loop reads: where the elements of each rank are, in rank order.
#[derive(Clone, Copy)]
pub(super) struct Sources<'a> {
    pub(super) at: &'a [*const u8],
    /// Which of them this rank has just read or written: unless it is longer than a cache, it is not asked for.
    pub(super) own: usize,
}

/// Where a loop writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) to: *mut u8,
    pub(super) stores: Stores,
}

/// How bytes are copied.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copying {
    pub(super) isa: Isa,
    /// What will be read next, as many bytes as are copied, anywhere, or null: it is asked for on the way.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "what asks for lines is not stable there"))]
    pub(super) ahead: *const u8,
}

impl From<Isa> for Copying {
    fn from(isa: Isa) -> Copying {
        Copying { isa, ahead: std::ptr::null() }
    }
}

/// Bytes of a line. Streaming stores go to whole ones.
const LINE: usize = 64;
/// Bytes of a result that are kept on the stack where the targets can't be written together.
const SCRATCH_BYTES: usize = if cfg!(any(loom, shuttle)) { 256 } else { 4 << 10 };
/// Below this a loop doesn't begin with single elements to come to a line's start.
const ALIGN_FROM_BYTES: usize = 1 << 10;

/// How far ahead lines are asked for.
const PREFETCH_BYTES: usize = 2 << 10;
/// For f32 only from here on. Conversions fill the window in which a core looks for loads, so 16-bit elements gain by it
/// at every length.
const PREFETCH_FROM_BYTES: usize = 32 << 10;
/// Lengths that are read at two places in turns: what a peer has just written comes sooner so, whether from memory or from
/// its cache. Longer loops gain nothing by it (docs/measurements.md).
const STREAMS_BYTES: RangeInclusive<usize> = 16 << 10..=256 << 10;
/// Bytes within which the two places are, one in each half.
const WINDOW_BYTES: usize = 8 << 10;
/// Bytes that are read at one place before it is the other's turn.
const TURN_BYTES: usize = 256;

/// A piece that is read at one of two places.
struct Turn {
    /// Where it begins.
    offset: usize,
    /// How many bytes on is what is asked for meanwhile, if that is still to be read.
    ahead: Option<usize>,
}

/// The turns at the two places of the whole windows in so many bytes, of [`TURN_BYTES`] each.
#[inline(always)]
fn turns(bytes: usize) -> impl Iterator<Item = Turn> {
    const HALF: usize = WINDOW_BYTES / 2;
    let windows = bytes / WINDOW_BYTES;
    (0..windows * WINDOW_BYTES / TURN_BYTES).map(move |turn| {
        let (window, within) = (turn / (WINDOW_BYTES / TURN_BYTES), turn % (WINDOW_BYTES / TURN_BYTES));
        let in_half = within / 2 * TURN_BYTES;
        let ahead = match in_half + PREFETCH_BYTES < HALF {
            true => Some(PREFETCH_BYTES),
            // The same half of the next window goes on where this one's ends.
            false => (window + 1 < windows).then_some(HALF + PREFETCH_BYTES),
        };
        Turn { offset: window * WINDOW_BYTES + within % 2 * HALF + in_half, ahead }
    })
}

#[repr(align(64))]
struct Scratch(MaybeUninit<[u8; SCRATCH_BYTES]>);

/// Reduces `count` elements of every source to every target. The sources are in rank order.
///
/// All stores are ordered before a release by this thread.
///
/// # Safety
///
/// `isa` is available. Every source is readable and every target writable for `count` elements of `T`, aligned to `T`.
/// The targets are apart from each other, and each is one of the sources or apart from them. There is one of each at
/// least.
pub(super) unsafe fn reduce<T: Element>(
    isa: Isa,
    op: ReduceOp,
    sources: Sources<'_>,
    targets: &[Target],
    count: usize,
) {
    let streams = isa.streams() && targets.iter().any(|target| target.stores == Stores::Streaming);
    let together = match *targets {
        [_] => true,
        [a, b] => !streams || a.stores != b.stores || (a.to as usize).wrapping_sub(b.to as usize).is_multiple_of(LINE),
        _ => false,
    };
    if together {
        // The loops come to the lines of the first target, and no other streams that lies differently in its own.
        let turned;
        let targets = match *targets {
            [a, b] if b.stores == Stores::Streaming => {
                turned = [b, a];
                &turned
            }
            _ => targets,
        };
        // SAFETY: the caller's promises are handed on.
        unsafe { by_type(isa, T::DTYPE, op, sources, targets, count) }
    } else {
        let mut scratch = Scratch(MaybeUninit::uninit());
        let from = scratch.0.as_mut_ptr().cast::<u8>();
        let mut of_piece: [*const u8; super::priors::MAX_RANKS as usize] = [std::ptr::null(); _];
        let most = SCRATCH_BYTES / size_of::<T>();
        for start in (0..count).step_by(most) {
            let (length, offset) = (most.min(count - start), start * size_of::<T>());
            for (piece, source) in of_piece.iter_mut().zip(sources.at) {
                *piece = source.wrapping_add(offset);
            }
            let piece = Target { to: from, stores: Stores::Cached };
            // SAFETY: the scratch has room for a piece and is apart from all; the rest are parts of what the caller
            // vouches for, and all sources of a piece are read before a target of it is written.
            unsafe {
                let sources = Sources { at: &of_piece[..sources.at.len()], ..sources };
                by_type(isa, T::DTYPE, op, sources, &[piece], length);
                for target in targets {
                    let to = target.to.wrapping_add(offset);
                    copy(isa.into(), from, Target { to, ..*target }, length * size_of::<T>());
                }
            }
        }
    }
    if streams {
        fence_streaming();
    }
}

/// Copies `bytes` bytes. All stores are ordered before a release by this thread.
///
/// # Safety
///
/// The instructions are available, `from` is readable and the target writable for so many bytes, and they are apart.
pub(super) unsafe fn copy(how: Copying, from: *const u8, target: Target, bytes: usize) {
    let isa = how.isa;
    let head = (target.to as usize).wrapping_neg() % LINE;
    // The C library's copy takes an instruction for strings, which is slower to begin with lines of another core's.
    if !isa.streams() || bytes < head + LINE {
        // SAFETY: the caller vouches for both.
        unsafe { target.to.copy_from_nonoverlapping(from, bytes) }
        return;
    }
    let lines = (bytes - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: head, lines and tail are the bytes, in three parts; the lines start on one, and `isa` has their stores.
    unsafe {
        target.to.copy_from_nonoverlapping(from, head);
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::copy_lines(from.add(head), target.to.add(head), lines, target.stores, how.ahead),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 => {
                x86::copy_lines_512(from.add(head), target.to.add(head), lines, target.stores, how.ahead)
            }
            _ => target.to.add(head).copy_from_nonoverlapping(from.add(head), lines * LINE),
        }
        target.to.add(tail).copy_from_nonoverlapping(from.add(tail), bytes - tail);
    }
    if target.stores == Stores::Streaming {
        fence_streaming();
    }
}

/// Orders this thread's streaming stores before what it stores next.
///
/// x86 orders a store behind all earlier ones but for these; so a release, which is an ordinary store there, would not
/// be behind them.
fn fence_streaming() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 CPU has it, and it touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// As [`by_isa`], of the type that is named: so the loops are compiled with this crate, and not in each that makes calls.
///
/// # Safety
///
/// As for [`by_isa`].
unsafe fn by_type(isa: Isa, dtype: DType, op: ReduceOp, sources: Sources<'_>, targets: &[Target], count: usize) {
    // SAFETY: the caller's promises are handed on.
    unsafe {
        match dtype {
            DType::F32 => by_isa::<f32>(isa, op, sources, targets, count),
            DType::F16 => by_isa::<half::f16>(isa, op, sources, targets, count),
            DType::BF16 => by_isa::<half::bf16>(isa, op, sources, targets, count),
        }
    }
}

/// # Safety
///
/// As for [`reduce`], of one target or two; any that streams is as far into its lines as the first.
unsafe fn by_isa<T: Element>(isa: Isa, op: ReduceOp, sources: Sources<'_>, targets: &[Target], count: usize) {
    // SAFETY: the caller's promises are handed on; each arm's instructions are the ones that `isa` names.
    unsafe {
        match isa {
            Isa::Portable => by_op::<f32, T>(op, sources, targets, count),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::reduce::<T>(op, sources, targets, count),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86::reduce_512::<T>(op, sources, targets, count),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => x86::reduce_512_bf16::<T>(op, sources, targets, count),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => aarch64::reduce::<T>(op, sources, targets, count),
        }
    }
}

/// Where a vector goes: so many bytes behind each target. Only on a multiple of the vector's bytes may it stream.
#[derive(Clone, Copy)]
struct Places<'a> {
    targets: &'a [Target],
    offset: usize,
    aligned: bool,
}

impl Places<'_> {
    /// Calls `put` with each place and the stores that it takes: the same for all vectors of a call, so well foretold.
    #[inline(always)]
    fn each(self, mut put: impl FnMut(*mut u8, Stores)) {
        for target in self.targets {
            let stores = if self.aligned { target.stores } else { Stores::Cached };
            put(target.to.wrapping_add(self.offset), stores);
        }
    }
}

/// Some f32 lanes, and how they come from memory and go there. Which lane has which element is the vector's own affair.
///
/// Every method is unsafe: it may only run where the vector's instructions are available. They are inlined into a
/// function that has them enabled.
trait Vector: Copy {
    /// The number of elements.
    const LANES: usize;
    /// What does the rest of fewer elements.
    type Narrower: Vector;
    /// Whether [`Vector::prefetch`] does anything.
    const PREFETCHES: bool;

    unsafe fn splat(value: f32) -> Self;
    /// Asks for a line that will be loaded, for the first cache or, `SECOND`, for the one behind it. It may lie anywhere, and
    /// not be there.
    unsafe fn prefetch<const SECOND: bool>(from: *const u8);
    unsafe fn load_f32(from: *const f32) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Every NaN becomes [`f32::NAN`].
    unsafe fn store_f32(self, places: Places<'_>);
    /// Rounds to nearest, ties to even. Every NaN becomes that of [`f32::NAN`].
    unsafe fn store_f16(self, places: Places<'_>);
    /// Rounds to nearest, ties to even. Every NaN becomes that of [`f32::NAN`].
    unsafe fn store_bf16(self, places: Places<'_>);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn divide(self, by: Self) -> Self;
    /// NaN where either is; +0 is greater than −0.
    unsafe fn max(self, other: Self) -> Self;
    /// NaN where either is; −0 is less than +0.
    unsafe fn min(self, other: Self) -> Self;
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
/// As for [`by_isa`], where V's instructions are available.
#[inline(always)]
unsafe fn by_op<V: Vector, T: Element>(op: ReduceOp, sources: Sources<'_>, targets: &[Target], count: usize) {
    // SAFETY: the caller's promises are handed on.
    unsafe {
        match op {
            ReduceOp::Sum => by_number::<V, T, Sum>(sources, targets, count),
            ReduceOp::Average => by_number::<V, T, Average>(sources, targets, count),
            ReduceOp::Max => by_number::<V, T, Max>(sources, targets, count),
            ReduceOp::Min => by_number::<V, T, Min>(sources, targets, count),
        }
    }
}

/// # Safety
///
/// As for [`by_op`].
#[inline(always)]
unsafe fn by_number<V: Vector, T: Element, F: Fold>(sources: Sources<'_>, targets: &[Target], count: usize) {
    // SAFETY: the caller's promises are handed on.
    unsafe {
        // With the numbers known, the loops over sources and targets are gone and their addresses stay in registers.
        match (sources.at, targets) {
            (&[a, b], &[to]) => all::<V, T, F>(Sources { at: &[a, b], ..sources }, &[to], count),
            (&[a, b], &[to, also]) => all::<V, T, F>(Sources { at: &[a, b], ..sources }, &[to, also], count),
            _ => all::<V, T, F>(sources, targets, count),
        }
    }
}

/// # Safety
///
/// As for [`by_op`].
#[inline(always)]
unsafe fn all<V: Vector, T: Element, F: Fold>(sources: Sources<'_>, targets: &[Target], count: usize) {
    // SAFETY: every access lies below `count`; the caller's promises are handed on. Vectors of T go to multiples of
    // their bytes, which divide a line, once the targets start on one.
    unsafe {
        let mut start = 0;
        if count * size_of::<T>() >= ALIGN_FROM_BYTES {
            // Loads that span two lines cost less than such stores, and streaming ones can't.
            let head = (targets[0].to as usize).wrapping_neg() % LINE / size_of::<T>();
            while start < head {
                tile::<f32, T, F, 1, false>(sources, targets, start);
                start += 1;
            }
            if V::PREFETCHES && STREAMS_BYTES.contains(&(count * size_of::<T>())) {
                start += in_two_streams::<V, T, F>(sources, targets, start, count - start);
            }
            // Not beyond the end, where a peer will write next.
            let ahead = size_of::<T>() < size_of::<f32>() || count * size_of::<T>() >= PREFETCH_FROM_BYTES;
            while ahead && count - start >= 4 * V::LANES + PREFETCH_BYTES / size_of::<T>() {
                for (index, &source) in sources.at.iter().enumerate() {
                    if index != sources.own || count * size_of::<T>() > *STREAMS_BYTES.end() {
                        ask::<V, T, false>(source, start, 4 * V::LANES, PREFETCH_BYTES);
                    }
                }
                tile::<V, T, F, 4, true>(sources, targets, start);
                start += 4 * V::LANES;
            }
            while count - start >= 4 * V::LANES {
                tile::<V, T, F, 4, true>(sources, targets, start);
                start += 4 * V::LANES;
            }
        }
        while count - start >= 4 * V::LANES {
            tile::<V, T, F, 4, false>(sources, targets, start);
            start += 4 * V::LANES;
        }
        while count - start >= V::LANES {
            tile::<V, T, F, 1, false>(sources, targets, start);
            start += V::LANES;
        }
        while count - start >= V::Narrower::LANES {
            tile::<V::Narrower, T, F, 1, false>(sources, targets, start);
            start += V::Narrower::LANES;
        }
        while start < count {
            tile::<f32, T, F, 1, false>(sources, targets, start);
            start += 1;
        }
    }
}

/// Reduces the whole windows of `count` elements from `start` on, and returns how many elements those are.
///
/// # Safety
///
/// As for [`by_op`], with `count` elements from `start` on, where all targets are at the start of a line or of a vector.
#[inline(always)]
unsafe fn in_two_streams<V: Vector, T: Element, F: Fold>(
    sources: Sources<'_>,
    targets: &[Target],
    start: usize,
    count: usize,
) -> usize {
    let elements = TURN_BYTES / size_of::<T>();
    let mut done = 0;
    for turn in turns(count * size_of::<T>()) {
        let from = start + turn.offset / size_of::<T>();
        // SAFETY: a turn is within `count`, and a number of vectors; the caller's promises are handed on.
        unsafe {
            if let Some(ahead) = turn.ahead {
                for (index, &source) in sources.at.iter().enumerate() {
                    if index != sources.own {
                        ask::<V, T, true>(source, from, elements, ahead);
                    }
                }
            }
            for start in (from..from + elements).step_by(2 * V::LANES) {
                tile::<V, T, F, 2, true>(sources, targets, start);
            }
        }
        done += elements;
    }
    done
}

/// Asks for what is so many bytes on from `count` elements of a source.
///
/// # Safety
///
/// V's instructions are available.
#[inline(always)]
unsafe fn ask<V: Vector, T: Element, const SECOND: bool>(source: *const u8, start: usize, count: usize, ahead: usize) {
    let from = source.wrapping_add(start * size_of::<T>() + ahead);
    for offset in (0..count * size_of::<T>()).step_by(LINE) {
        // SAFETY: the caller vouches for the instructions; any address may be asked for.
        unsafe { V::prefetch::<SECOND>(from.wrapping_add(offset)) }
    }
}

/// Reduces the elements of `WIDTH` vectors, from `start` on. All is loaded before anything is stored, so a target may
/// be one of the sources.
///
/// # Safety
///
/// As for [`by_op`], with `start + WIDTH * V::LANES <= count`. If it is `ALIGNED`, targets are at multiples of the
/// bytes of a vector there.
#[inline(always)]
unsafe fn tile<V: Vector, T: Element, F: Fold, const WIDTH: usize, const ALIGNED: bool>(
    sources: Sources<'_>,
    targets: &[Target],
    start: usize,
) {
    // SAFETY: the caller vouches for the range and the instructions.
    unsafe {
        let at = |source: *const u8, index: usize| source.cast::<T>().add(start + index * V::LANES);
        let mut sums = [V::splat(0.0); WIDTH];
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = load::<V, T>(at(sources.at[0], index));
        }
        for &source in &sources.at[1..] {
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum = F::step(*sum, load::<V, T>(at(source, index)));
            }
        }
        let world = V::splat(sources.at.len() as f32);
        for (index, sum) in sums.into_iter().enumerate() {
            let offset = (start + index * V::LANES) * size_of::<T>();
            store::<V, T>(F::finish(sum, world), Places { targets, offset, aligned: ALIGNED });
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
/// All places are writable for `V::LANES` elements, where V's instructions are available.
#[inline(always)]
unsafe fn store<V: Vector, T: Element>(vector: V, places: Places<'_>) {
    // SAFETY: as in `load`.
    unsafe {
        match T::DTYPE {
            DType::F32 => vector.store_f32(places),
            DType::F16 => vector.store_f16(places),
            DType::BF16 => vector.store_bf16(places),
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
        let target = Target { to: to.as_mut_ptr().cast(), stores: Stores::Cached };
        // SAFETY: `isa` is available, and all vectors have the first one's length.
        unsafe { reduce::<T>(isa, op, Sources { at: &pointers, own: 0 }, &[target], to.len()) };
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
                // Lengths around every step of the loops, some that are read at two places, and one with many patterns.
                for count in (0..70).chain([4096, 8191, 20_011, 1 << 16, 100_003]) {
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

    /// Wherever the targets lie in their lines, however many there are, and by whichever stores.
    #[test]
    fn every_target_gets_the_same_and_nothing_around_it_is_written() {
        fn all<T: Element>(of_bits: impl Fn(u32) -> T) {
            const CANARIES: usize = 40;
            for (count, world) in [(3, 2), (700, 2), (700, 3), (2500, 2), (9001, 2), (9001, 3)] {
                let sources: Vec<Vec<T>> =
                    (0..world).map(|rank| patterns(count, rank * 77 + 5).map(&of_bits).collect()).collect();
                let pointers: Vec<_> = sources.iter().map(|source| source.as_ptr().cast()).collect();
                let expected = bits(&reduced(Isa::Portable, ReduceOp::Sum, &sources));
                for isa in Isa::available() {
                    for number in 1..=3 {
                        for turn in 0..8 {
                            let stores = |index| [Stores::Cached, Stores::Streaming][(turn >> index) & 1];
                            // As far into their lines, and not.
                            let start = |index| if turn % 3 == 0 { turn } else { turn + 5 * index } % CANARIES;
                            let canary = T::from_f32(7.0);
                            let mut buffers = vec![vec![canary; count + 2 * CANARIES]; number];
                            let targets: Vec<_> = buffers
                                .iter_mut()
                                .enumerate()
                                .map(|(index, buffer)| Target {
                                    to: buffer[start(index)..].as_mut_ptr().cast(),
                                    stores: stores(index),
                                })
                                .collect();
                            // SAFETY: `isa` is available, and the sources and the rest of each buffer are long enough.
                            unsafe {
                                reduce::<T>(isa, ReduceOp::Sum, Sources { at: &pointers, own: 1 }, &targets, count)
                            };
                            for (index, buffer) in buffers.iter().enumerate() {
                                let (from, to) = (start(index), start(index) + count);
                                let what = format!("{count} of {} by {isa:?}, target {index}, {turn}", T::DTYPE);
                                assert!(bits(&buffer[from..to]) == expected, "{what}");
                                let around = bits(&[&buffer[..from], &buffer[to..]].concat());
                                assert!(around.iter().all(|&bits| bits == self::bits(&[canary])[0]), "{what}");
                            }
                        }
                    }
                }
            }
        }
        all(f32::from_bits);
        all(|bits| f16::from_bits((bits >> 16) as u16));
        all(|bits| bf16::from_bits((bits >> 16) as u16));
    }

    /// What is asked for ahead is read later, at the same of the two places, and all but what comes first there is asked for.
    #[test]
    fn turns_cover_whole_windows_and_ask_for_nothing_beyond() {
        for bytes in [0, 1, WINDOW_BYTES - 1, WINDOW_BYTES, WINDOW_BYTES + 1, 5 * WINDOW_BYTES - 1, 32 * WINDOW_BYTES] {
            let whole = bytes / WINDOW_BYTES * WINDOW_BYTES;
            let all: Vec<Turn> = turns(bytes).collect();
            let mut offsets: Vec<usize> = all.iter().map(|turn| turn.offset).collect();
            let mut asked: Vec<usize> = all.iter().filter_map(|turn| Some(turn.offset + turn.ahead?)).collect();
            for (index, &ahead) in
                all.iter().enumerate().filter_map(|(index, turn)| Some((index, turn.ahead.as_ref()?)))
            {
                let place = all.iter().position(|turn| turn.offset == all[index].offset + ahead).unwrap();
                assert_eq!(place - index, 2 * PREFETCH_BYTES / TURN_BYTES, "{bytes}");
            }
            offsets.sort();
            assert!(offsets.into_iter().eq((0..whole).step_by(TURN_BYTES)), "{bytes}");
            asked.sort();
            let first = |&offset: &usize| offset < WINDOW_BYTES && offset % (WINDOW_BYTES / 2) < PREFETCH_BYTES;
            assert!(asked.into_iter().eq((0..whole).step_by(TURN_BYTES).filter(|offset| !first(offset))), "{bytes}");
        }
    }

    #[test]
    fn copies_are_whole_and_nothing_around_them_is_written() {
        let from: Vec<u8> = (0..300_000).map(|index| (index % 251) as u8 + 1).collect();
        for isa in Isa::available() {
            for stores in [Stores::Cached, Stores::Streaming] {
                for bytes in [0, 1, 63, 64, 65, 127, 128, 200, 4097, 16 << 10, 40_001, 262_208, 299_000] {
                    for (at, skip) in [(0, 0), (1, 3), (16, 0), (63, 64), (64, 1)] {
                        let mut to = vec![0u8; bytes + 300];
                        let target = Target { to: to[at..].as_mut_ptr(), stores };
                        // SAFETY: `isa` is available, and both vectors have so many bytes from there on.
                        unsafe { copy(isa.into(), from[skip..].as_ptr(), target, bytes) };
                        assert_eq!(
                            to[at..at + bytes],
                            from[skip..skip + bytes],
                            "{isa:?}, {stores:?}, {bytes} at {at}"
                        );
                        assert!(to[..at].iter().chain(&to[at + bytes..]).all(|&byte| byte == 0));
                    }
                }
            }
        }
    }

    /// Sums of two 16-bit numbers round as `half` does, on ties, carries, overflows and subnormals. A NaN is `half`'s
    /// of the canonical one.
    #[test]
    fn sums_round_as_half_does() {
        fn all<T: Element>(of_bits: impl Fn(u32) -> T) {
            let sources: Vec<Vec<T>> = (1..3).map(|seed| patterns(1 << 20, seed).map(&of_bits).collect()).collect();
            // Neighbours in size, whose sums need more digits than they have, and subnormals beside zeros.
            let near: Vec<T> = sources[0].iter().map(|value| T::from_f32(value.to_f32() / 300.0)).collect();
            let zeros = vec![T::from_f32(0.0); near.len()];
            let tiny: Vec<T> = (0..near.len() as u32).map(|bits| of_bits((bits % 0x180) << 16)).collect();
            for pair in [sources.clone(), vec![sources[0].clone(), near], vec![zeros, tiny]] {
                let sum = |(a, b): (&T, &T)| {
                    let sum = a.to_f32() + b.to_f32();
                    T::from_f32(if sum.is_nan() { f32::NAN } else { sum })
                };
                let expected: Vec<T> = pair[0].iter().zip(&pair[1]).map(sum).collect();
                for isa in Isa::available() {
                    assert!(bits(&reduced(isa, ReduceOp::Sum, &pair)) == bits(&expected), "{} by {isa:?}", T::DTYPE);
                }
            }
        }
        all(|bits| f16::from_bits((bits >> 16) as u16));
        all(|bits| bf16::from_bits((bits >> 16) as u16));
    }
}
