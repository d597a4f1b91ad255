//! CUDA graphs: by the caller's own capture over the raw call, and by `interop::cudarc`.

use std::sync::Arc;

use cudarc::driver::{CudaGraph, sys};
use half::bf16;
use peersum::{DType, Error, ReduceOp, interop::cudarc::Buffers};

use crate::{
    common::{Random, integer, integer_sum},
    harness::{self, Rank},
};

/// Captures what `calls` enqueues, as an engine would: a plain capture of its own.
pub fn capture(rank: &mut Rank, calls: impl FnOnce(&mut Rank)) -> CudaGraph {
    let stream = rank.stream.clone();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    rank.capturing = true;
    calls(rank);
    rank.capturing = false;
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    graph.upload().unwrap();
    stream.synchronize().unwrap();
    graph
}

/// Field case A26 (flashinfer-ai/flashinfer#1894, sgl-project/sglang#14193): the tensor lies within a larger allocation,
/// and the capture is the caller's own.
#[test]
fn a_part_of_an_allocation_in_the_callers_own_capture() {
    let Some(devices) = harness::devices() else { return };
    devices.run(4, &harness::options(), |rank| {
        let memory = rank.bytes(1 << 20);
        let state = rank.state(0);
        let address = memory.address + 4096 + 16;
        let graph = capture(rank, |rank| {
            for count in [1, 4096, 100_001] {
                // SAFETY: the tensors lie within the memory, which outlives the graph.
                unsafe { rank.verified_call(address, address, count, DType::BF16, ReduceOp::Sum, &state).unwrap() };
            }
        });
        rank.meet();
        for _ in 0..50 {
            graph.launch().unwrap();
        }
        assert_eq!(state.assert_right(rank, "a part of an allocation"), 150);
        rank.meet();
    });
}

/// Field case A25 (ROCm/aiter#3838): what a graph uses lives as long as the graph, because the graph owns it. That a
/// buffer of the capture itself can't be used is a test that must not compile (tests/compile_fail).
#[test]
fn a_graph_owns_its_buffers_and_outlives_the_communicator() {
    let Some(devices) = harness::devices() else { return };
    let communicators = peersum::cuda::Communicator::local(&devices.of(2), &harness::options()).unwrap();
    let graphs = devices.run_with(communicators, |rank| {
        let count = 10_000;
        let mut buffers = Buffers::new();
        let x = buffers.hold(rank.upload(&vec![bf16::ZERO; count]));
        let y = buffers.hold(rank.upload(&vec![bf16::ZERO; count]));
        let mut captured = buffers.capture(&rank.stream).unwrap();
        captured.all_reduce(&mut rank.communicator, x, y, ReduceOp::Sum).unwrap();
        captured.all_reduce_in_place(&mut rank.communicator, y, ReduceOp::Max).unwrap();
        let mut graph = captured.finish().unwrap();
        for call in 0..20 {
            let values: Vec<bf16> = (0..count).map(|index| integer(call, rank.rank, index)).collect();
            rank.stream.memcpy_htod(&values, &mut graph.buffer_mut(x)).unwrap();
            rank.stream.synchronize().unwrap();
            rank.meet();
            graph.launch().unwrap();
            let result = rank.stream.clone_dtoh(&graph.buffer(y)).unwrap();
            rank.stream.synchronize().unwrap();
            rank.communicator.check().unwrap();
            assert!((0..count).all(|index| result[index] == integer_sum(call, 2, index)), "call {call}");
            rank.meet();
        }
        Ungated(graph, x, y, rank.stream.clone())
    });
    // The communicators are gone; their group's memory is not, since the graphs hold it.
    std::thread::scope(|scope| {
        for mut graph in graphs {
            scope.spawn(move || {
                let graph = &mut graph;
                graph.0.launch().unwrap();
                graph.3.synchronize().unwrap();
            });
        }
    });
}

struct Ungated<H>(peersum::interop::cudarc::Graph, H, H, Arc<cudarc::driver::CudaStream>);
// SAFETY: a graph may be used from one thread at a time, and each of these goes to one thread.
unsafe impl<H> Send for Ungated<H> {}

/// Five calls in a graph, graphs of several sizes in random order, eager calls between them, captures thrown away.
#[test]
fn graphs_and_eager_calls_in_any_order() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        devices.run(world, &harness::options(), |rank| {
            let memory = rank.bytes(8 << 20);
            let other = rank.bytes(8 << 20);
            let state = rank.state(0);
            let sizes = [1, 100, 4096, 33_333, 1 << 20];
            let graphs: Vec<_> = (0..5)
                .map(|graph| {
                    capture(rank, |rank| {
                        for call in 0..5 {
                            let count = sizes[(graph + call) % sizes.len()];
                            let (from, to) =
                                (memory.address, if call % 2 == 0 { other.address } else { memory.address });
                            // SAFETY: both have room for the largest.
                            unsafe { rank.verified_call(from, to, count, DType::F32, ReduceOp::Sum, &state).unwrap() };
                        }
                    })
                })
                .collect();
            drop(capture(rank, |rank| {
                // SAFETY: as above.
                unsafe {
                    rank.verified_call(memory.address, other.address, 5, DType::F32, ReduceOp::Sum, &state).unwrap()
                }
            }));
            rank.meet();
            let mut random = Random::new(11);
            let mut expected = 0;
            for _ in 0..harness::calls() {
                if random.below(2) == 0 {
                    graphs[random.below(graphs.len())].launch().unwrap();
                    expected += 5;
                } else {
                    let count = *random.of(&sizes);
                    // SAFETY: as above.
                    unsafe {
                        rank.verified_call(memory.address, other.address, count, DType::F16, ReduceOp::Average, &state)
                            .unwrap();
                    }
                    expected += 1;
                }
            }
            assert_eq!(state.assert_right(rank, format_args!("{world} ranks")), expected);
            rank.meet();
        });
    }
}

/// What safe code could do to a graph's addresses is refused: eager calls on a captured stream, handles of other buffers.
#[test]
fn what_would_outlive_its_buffers_is_refused() {
    let Some(devices) = harness::devices() else { return };
    devices.run(1, &harness::options(), |rank| {
        let (mut tensor, other) = (rank.upload(&[1.0f32; 100]), rank.upload(&[bf16::ONE; 50]));
        let foreign = Buffers::new().hold(other);
        let mut buffers = Buffers::new();
        let x = buffers.hold(rank.upload(&[bf16::ONE; 50]));
        let mut captured = buffers.capture(&rank.stream).unwrap();
        let stream = captured.stream().clone();
        let error = rank.communicator.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &stream).unwrap_err();
        assert!(matches!(error, Error::Capturing { .. }), "{error}");
        let error = captured.all_reduce(&mut rank.communicator, x, foreign, ReduceOp::Sum).unwrap_err();
        assert_eq!(error, Error::ForeignHandle);
        captured.all_reduce_in_place(&mut rank.communicator, x, ReduceOp::Sum).unwrap();
        captured.finish().unwrap().launch().unwrap();
    });
}

/// One communicator from two streams: the safe layer puts one behind the other.
#[test]
fn calls_on_two_streams_follow_one_another() {
    let Some(devices) = harness::devices() else { return };
    devices.run(2, &harness::options(), |rank| {
        let other = rank.second_stream();
        let mut tensor = rank.upload(&vec![1.0f32; 50_000]);
        rank.stream.synchronize().unwrap();
        rank.meet();
        let calls = 20;
        for call in 0..calls {
            // The ranks take turns of their own: rank 1 begins with the other stream.
            let stream = if (call + rank.rank) % 2 == 0 { rank.stream.clone() } else { other.clone() };
            rank.communicator.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &stream).unwrap();
        }
        other.synchronize().unwrap();
        rank.stream.synchronize().unwrap();
        rank.meet();
        assert_eq!(rank.download(&tensor), vec![2.0f32.powi(calls as i32); 50_000]);
    });
}

/// An error inside a capture leaves the communicator as it was.
#[test]
fn an_error_in_a_capture_costs_only_the_capture() {
    let Some(devices) = harness::devices() else { return };
    devices.run(2, &harness::options(), |rank| {
        let mut buffers = Buffers::new();
        let x = buffers.hold(rank.upload(&[1.0f32; 100]));
        let y = buffers.hold(rank.upload(&[1.0f32; 99]));
        let mut captured = buffers.capture(&rank.stream).unwrap();
        let error = captured.all_reduce(&mut rank.communicator, x, y, ReduceOp::Sum).unwrap_err();
        assert_eq!(error, Error::LengthMismatch { input: 100, output: 99 });
        drop(captured);
        rank.meet();
        assert_eq!(rank.all_reduce_values(&[2.0f32; 64], ReduceOp::Sum), [4.0; 64]);
    });
}
