//! The element types.

use std::fmt;

use crate::protocol::bindings;

/// The type of a tensor's elements, for calls that take raw pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 single precision, 4 bytes.
    F32,
    /// IEEE 754 half precision, 2 bytes.
    F16,
    /// bfloat16, 2 bytes.
    BF16,
}

impl DType {
    /// All types, in the order of their codes.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }

    /// The code that the kernels know it by.
    pub(crate) const fn code(self) -> u32 {
        match self {
            DType::F32 => bindings::PEERSUM_F32,
            DType::F16 => bindings::PEERSUM_F16,
            DType::BF16 => bindings::PEERSUM_BF16,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A type whose slices can be reduced: `f32`, [`half::f16`], [`half::bf16`].
///
/// Every bit pattern of these types is a value, and they have no padding; the kernels and the host loops rely on it,
/// so the trait is sealed.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Its [`DType`].
    const DTYPE: DType;

    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;

    /// Exact.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for half::f16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        half::f16::from_f32(value)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        half::f16::to_f32(self)
    }
}

impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        half::bf16::from_f32(value)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        half::bf16::to_f32(self)
    }
}
