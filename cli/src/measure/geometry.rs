//! Where tensors stand in a rank's buffers.

use std::ops::Range;

use super::datum::Datum;

/// Bytes before and after the tensors that no call may write to.
const GUARD_BYTES: usize = 256;
/// Tensors start at multiples of this, as an allocator's do, unless `--unalign` shifts them.
pub(crate) const ALIGN_BYTES: usize = 256;

/// A buffer: a guard, the shift of `--unalign`, room for the largest tensor, a guard. In elements.
///
/// Calls that are timed rotate through as many tensors as fit, as those of nccl-tests do, so that a call finds its
/// tensor in no cache because the one before has just used it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    guard: usize,
    unalign: usize,
    capacity: usize,
    align: usize,
}

impl Geometry {
    /// For tensors of at most `capacity` elements of `T`.
    pub(crate) fn new<T: Datum>(capacity: usize, unalign: usize) -> Self {
        Geometry { guard: GUARD_BYTES / size_of::<T>(), unalign, capacity, align: ALIGN_BYTES / size_of::<T>() }
    }

    /// Elements of the whole buffer.
    pub(crate) fn len(&self) -> usize {
        self.lead() + self.capacity + self.guard
    }

    /// Elements before the first tensor.
    pub(crate) fn lead(&self) -> usize {
        self.guard + self.unalign
    }

    /// Where the tensor of the `call`th call stands.
    pub(crate) fn tensor(&self, count: usize, call: usize) -> Range<usize> {
        let stride = count.next_multiple_of(self.align).max(1);
        let slots = (self.capacity / stride).max(1);
        let start = self.lead() + call % slots * stride;
        start..start + count
    }

    /// A tensor's place and the elements around it that must not change. Of the first tensor, all that is before it.
    pub(crate) fn window(&self, tensor: &Range<usize>) -> Range<usize> {
        0..tensor.end + self.guard
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    /// Field case A69 (NVIDIA/nccl-tests#55): a small buffer that stays in a cache.
    #[test]
    fn tensors_rotate_through_the_buffer_and_stay_inside() {
        let geometry = Geometry::new::<f32>(1024, 0);
        let starts: Vec<_> = (0..6).map(|call| geometry.tensor(256, call).start).collect();
        assert_eq!(starts, [64, 320, 576, 832, 64, 320]);
        for count in [0, 1, 63, 64, 65, 500, 1000, 1024] {
            for call in 0..100 {
                let tensor = geometry.tensor(count, call);
                assert!(tensor.start >= geometry.lead() && tensor.end <= geometry.lead() + 1024, "{count} {call}");
                assert!(geometry.window(&geometry.tensor(count, 0)).end <= geometry.len());
            }
        }
    }

    #[test]
    fn rotation_keeps_the_alignment() {
        let geometry = Geometry::new::<f16>(10_000, 3);
        for call in 0..10 {
            assert_eq!((geometry.tensor(1001, call).start - 3) * 2 % ALIGN_BYTES, 0);
        }
    }
}
