//! A communicator is one rank: two threads can't enqueue on it at once, neither by two exclusive references nor by shared
//! ones.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use peersum::{DType, ReduceOp, cuda::Communicator};

fn exclusively(mut rank: Communicator, stream: Arc<CudaStream>, mut a: CudaSlice<f32>, mut b: CudaSlice<f32>) {
    std::thread::scope(|scope| {
        scope.spawn(|| rank.all_reduce_in_place(&mut a, ReduceOp::Sum, &stream));
        scope.spawn(|| rank.all_reduce_in_place(&mut b, ReduceOp::Sum, &stream));
    });
}

fn shared(rank: &Communicator, stream: Arc<CudaStream>, mut tensor: CudaSlice<f32>) {
    let _ = rank.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &stream);
}

fn raw(rank: &Communicator, tensor: u64) {
    let _ = unsafe { rank.all_reduce_raw(tensor, tensor, 4, DType::F32, ReduceOp::Sum, std::ptr::null_mut()) };
}

fn twice(rank: Communicator) -> [Communicator; 2] {
    [rank.clone(), rank]
}

fn main() {}
