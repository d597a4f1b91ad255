//! A graph owns its buffers: what it gives are views, so that no other buffer can be put in a buffer's place.

use cudarc::driver::CudaSlice;
use peersum::interop::cudarc::{Graph, Held};

fn taken_out(mut graph: Graph, tensor: Held<f32>, other: CudaSlice<f32>) {
    let taken = std::mem::replace(&mut graph.buffer_mut(tensor), other);
    graph.launch().unwrap();
    drop(taken);
}

fn main() {}
