//! `Element` is sealed: the loops and the kernels rely on what its types are.

use peersum::{DType, Element};

#[derive(Clone, Copy)]
struct Money(f32);

impl Element for Money {
    const DTYPE: DType = DType::F32;

    fn from_f32(value: f32) -> Self {
        Money(value)
    }

    fn to_f32(self) -> f32 {
        self.0
    }
}

fn main() {}
