//! Types that are not reduced, and types that differ.

use half::{bf16, f16};
use peersum::{ReduceOp, host::Communicator};

fn bytes(rank: &mut Communicator, tensor: &mut [u8]) {
    let _ = rank.all_reduce_in_place(tensor, ReduceOp::Sum);
}

fn doubles(rank: &mut Communicator, tensor: &mut [f64]) {
    let _ = rank.all_reduce_in_place(tensor, ReduceOp::Sum);
}

fn of_two_types(rank: &mut Communicator, input: &[f16], output: &mut [bf16]) {
    let _ = rank.all_reduce(input, output, ReduceOp::Sum);
}

fn main() {}
