//! Field case A25 (ROCm/aiter#3838): buffers that were made during the capture were freed and their addresses used again
//! while the graph still had them. A capture takes the handles of buffers alone that went in before it began.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use peersum::{
    ReduceOp,
    cuda::Communicator,
    interop::cudarc::{Buffers, Held},
};

fn made_during_the_capture(rank: &mut Communicator, stream: Arc<CudaStream>, mut late: CudaSlice<f32>) {
    let mut capture = Buffers::new().capture(&stream).unwrap();
    let _ = capture.all_reduce_in_place(rank, &mut late, ReduceOp::Sum);
}

fn handed_in_during_the_capture(stream: Arc<CudaStream>, late: CudaSlice<f32>) {
    let mut buffers = Buffers::new();
    let capture = buffers.capture(&stream).unwrap();
    let late = buffers.hold(late);
    drop((capture, late));
}

fn handle_from_nowhere() -> Held<f32> {
    Held { index: 0 }
}

fn main() {}
