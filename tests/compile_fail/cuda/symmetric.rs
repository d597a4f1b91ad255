//! Field case A03 (ROCm/aiter#4082, #3514): a tensor that peers read where it is can't be freed, or be given away, while a
//! graph or a view has it, nor be input and output at once.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use peersum::{
    ReduceOp,
    cuda::Communicator,
    interop::{SymmetricBuffer, cudarc::Buffers},
};

fn freed_while_a_graph_has_it(mut buffers: Buffers, tensor: SymmetricBuffer<f32>) {
    let held = buffers.hold_symmetric(tensor);
    drop(tensor);
    drop((buffers, held));
}

fn freed_while_it_is_viewed(tensor: SymmetricBuffer<f32>) {
    let view = tensor.view();
    drop(tensor);
    drop(view);
}

fn input_is_output(rank: &mut Communicator, tensor: &mut SymmetricBuffer<f32>, stream: &Arc<CudaStream>) {
    let _ = rank.all_reduce(&*tensor, tensor, ReduceOp::Sum, stream);
}

fn freed_by_cudarc(tensor: SymmetricBuffer<f32>) -> CudaSlice<f32> {
    tensor.slice
}

fn main() {}
