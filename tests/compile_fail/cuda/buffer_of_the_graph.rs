//! A graph owns its buffers: nobody else frees or writes them, and nobody holds them beyond it.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use peersum::interop::cudarc::{Buffers, Graph, Held};

fn freed_after_the_capture(stream: Arc<CudaStream>, tensor: CudaSlice<f32>) {
    let mut buffers = Buffers::new();
    buffers.hold(tensor);
    let mut graph = buffers.capture(&stream).unwrap().finish().unwrap();
    drop(tensor);
    graph.launch().unwrap();
}

fn written_after_the_capture(stream: Arc<CudaStream>, mut tensor: CudaSlice<f32>) {
    let mut buffers = Buffers::new();
    buffers.hold(tensor);
    let mut graph = buffers.capture(&stream).unwrap().finish().unwrap();
    stream.memcpy_htod(&[0.0; 4], &mut tensor).unwrap();
    graph.launch().unwrap();
}

fn read_while_it_is_launched(mut graph: Graph, tensor: Held<f32>, stream: Arc<CudaStream>) {
    let result = graph.buffer(tensor);
    graph.launch().unwrap();
    stream.clone_dtoh(&result).unwrap();
}

fn kept_beyond_the_graph(graph: Graph, tensor: Held<f32>, stream: Arc<CudaStream>) {
    let result = graph.buffer(tensor);
    drop(graph);
    stream.clone_dtoh(&result).unwrap();
}

fn main() {}
