//! The input is not the output, and the types are those that are reduced.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use peersum::{ReduceOp, cuda::Communicator};

fn input_is_output(rank: &mut Communicator, tensor: &mut CudaSlice<f32>, stream: &Arc<CudaStream>) {
    let _ = rank.all_reduce(&*tensor, tensor, ReduceOp::Sum, stream);
}

fn input_overlaps_output(rank: &mut Communicator, tensor: &mut CudaSlice<f32>, stream: &Arc<CudaStream>) {
    let _ = rank.all_reduce(&tensor.slice(..4), &mut tensor.slice_mut(2..6), ReduceOp::Sum, stream);
}

fn main() {}
