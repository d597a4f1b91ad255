//! CUDA graphs: by the caller's own capture over the raw call, and by `interop::cudarc`.

use std::{
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaGraph, CudaStream, DevicePtr, result, sys};
use half::bf16;
use peersum::{
    DType, Error, ReduceOp, Result,
    interop::cudarc::{Buffers, Capture, Graph, Held},
};

use crate::{
    common::{Random, integer, integer_sum},
    failures::{a_new_group_works, impatient},
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

/// Captures as [`capture`] does, and throws it away before it becomes a graph: the driver does nothing on the device, so
/// no peer has to be waited for.
pub fn capture_in_vain(rank: &mut Rank, calls: impl FnOnce(&mut Rank)) {
    rank.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    rank.capturing = true;
    calls(rank);
    rank.capturing = false;
    // SAFETY: the stream is being captured, and nothing else has what was captured.
    unsafe { result::graph::destroy(result::stream::end_capture(rank.stream.cu_stream()).unwrap()).unwrap() };
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

/// Graphs of one to five calls of several sizes, 3,000 replays of them in random order, between eager calls; captures that
/// are thrown away on the way are as if they had not been.
#[test]
fn three_thousand_replays_between_eager_calls() {
    const REPLAYS: usize = 3000;
    const SIZES: [usize; 6] = [1, 100, 4096, 7168, 33_333, 1 << 16];
    /// A launch that waits for room in its queue keeps the other ranks' threads from launching.
    const REPLAYS_IN_THE_QUEUE: usize = 20;

    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        devices.run(world, &harness::options(), |rank| {
            let (memory, other) = (rank.bytes(4 << 16), rank.bytes(4 << 16));
            let state = rank.state(0);
            let call = |rank: &mut Rank, count, in_place: bool, dtype, op| {
                let output = if in_place { memory.address } else { other.address };
                // SAFETY: both have room for the largest.
                unsafe { rank.verified_call(memory.address, output, count, dtype, op, &state).unwrap() };
            };
            let graphs: Vec<_> = (0..10)
                .map(|graph| {
                    let calls = 1 + graph % 5;
                    let captured = capture(rank, |rank| {
                        for index in 0..calls {
                            let count = SIZES[(graph + index) % SIZES.len()];
                            call(rank, count, (graph + index) % 2 == 0, DType::F32, ReduceOp::Sum);
                        }
                    });
                    (captured, calls as u64)
                })
                .collect();
            rank.meet();
            let mut random = Random::new(11);
            let mut expected = 0;
            for replay in 0..REPLAYS {
                let (graph, calls) = random.of(&graphs);
                graph.launch().unwrap();
                expected += calls;
                if random.below(2) == 0 {
                    call(rank, *random.of(&SIZES), false, DType::F16, ReduceOp::Average);
                    expected += 1;
                }
                if random.below(50) == 0 {
                    let counts = [*random.of(&SIZES), *random.of(&SIZES)];
                    capture_in_vain(rank, |rank| {
                        counts.iter().for_each(|&count| call(rank, count, true, DType::F32, ReduceOp::Max));
                    });
                }
                if replay % REPLAYS_IN_THE_QUEUE == 0 {
                    rank.stream.synchronize().unwrap();
                }
            }
            assert_eq!(state.assert_right(rank, format_args!("{world} ranks")), expected);
            rank.meet();
            drop(graphs);
        });
    }
}

/// Field case A65 (NVIDIA/nccl#1984): one to twenty calls a graph, and a rank that is late by milliseconds before each
/// replay: every result is right, and no rank is through before the late one has begun.
#[test]
fn one_to_twenty_calls_a_graph_with_a_late_rank() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        devices.run(world, &harness::options(), |rank| {
            let memory = rank.bytes(4 << 16);
            let state = rank.state(0);
            let graphs: Vec<_> = (1..=20)
                .map(|calls| {
                    capture(rank, |rank| {
                        for call in 0..calls {
                            let (count, address) = ([1000, 1 << 16, 7168][call % 3], memory.address);
                            // SAFETY: the memory has room for the largest.
                            unsafe {
                                rank.verified_call(address, address, count, DType::F32, ReduceOp::Sum, &state).unwrap()
                            };
                        }
                    })
                })
                .collect();
            let mut random = Random::new(65);
            let mut rounds = 0;
            for (index, graph) in graphs.iter().enumerate() {
                for _ in 0..3 {
                    let (late, delay) = (random.below(world), Duration::from_millis(1 + random.below(5) as u64));
                    let started = Instant::now();
                    rank.meet();
                    if rank.rank == late {
                        std::thread::sleep(delay);
                    }
                    graph.launch().unwrap();
                    rank.stream.synchronize().unwrap();
                    let took = started.elapsed();
                    assert!(took >= delay, "rank {} of {world} took {took:?} and rank {late} {delay:?}", rank.rank);
                    rounds += index as u64 + 1;
                }
                let what = format_args!("{world} ranks, {} calls", index + 1);
                assert_eq!(state.assert_right(rank, what), rounds);
            }
            rank.meet();
            drop(graphs);
        });
    }
}

/// Field case A28 (vllm-project/vllm#46515): hundreds of captures with fresh buffers, thrown away before or after they became
/// graphs, leave no memory and no descriptor behind.
#[test]
fn captures_thrown_away_leave_nothing_behind() {
    fn descriptors() -> usize {
        std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
    }

    let Some(devices) = harness::devices() else { return };
    devices.run(2, &harness::options(), |rank| {
        let captures = |rank: &mut Rank, number: usize| {
            for index in 0..number {
                let mut buffers = Buffers::new();
                let x = buffers.hold(rank.stream.alloc_zeros::<f32>(1 << 18).unwrap());
                let mut captured = buffers.capture(&rank.stream).unwrap();
                for _ in 0..3 {
                    captured.all_reduce_in_place(&mut rank.communicator, x, ReduceOp::Sum).unwrap();
                }
                match index % 2 {
                    0 => drop(captured),
                    _ => drop(captured.finish().unwrap()),
                }
            }
            // No rank has launched anything, so nothing that is waited for here waits for a peer.
            rank.stream.synchronize().unwrap();
            rank.meet();
            let measured = (rank.context.mem_get_info().unwrap().0, descriptors());
            rank.meet();
            measured
        };
        let (memory, open) = captures(rank, 20);
        let (memory_after, open_after) = captures(rank, 1000);
        // CUDA's pool for buffers gives and takes some tens of MiB at once.
        assert!(memory.abs_diff(memory_after) < 80 << 20, "free before: {memory}, after: {memory_after}");
        assert!(open_after < open + 8, "descriptors before: {open}, after: {open_after}");
        assert_eq!(rank.all_reduce_values(&[2.0f32; 64], ReduceOp::Sum), [4.0; 64]);
    });
}

/// Starts the capture of three calls on 5,000 ones.
fn begin(rank: &mut Rank) -> (Capture, Held<f32>) {
    let mut buffers = Buffers::new();
    let x = buffers.hold(rank.upload(&[1.0f32; 5000]));
    rank.stream.synchronize().unwrap();
    (buffers.capture(&rank.stream).unwrap(), x)
}

fn three_calls(rank: &mut Rank, (captured, x): &mut (Capture, Held<f32>)) -> Result<()> {
    (0..3).try_for_each(|_| captured.all_reduce_in_place(&mut rank.communicator, *x, ReduceOp::Sum))
}

/// What a capture comes to once something that can't be captured was done on its stream, after one call of ours.
fn failed_capture(rank: &mut Rank) -> Error {
    let mut captured = begin(rank);
    captured.0.all_reduce_in_place(&mut rank.communicator, captured.1, ReduceOp::Sum).unwrap();
    let forbidden = rank.stream.synchronize().unwrap_err();
    assert_eq!(forbidden.0, sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    let error = three_calls(rank, &mut captured).unwrap_err();
    assert_eq!(captured.0.finish().map(drop).unwrap_err(), error, "the end says the same");
    assert!(matches!(error, Error::CaptureFailed { call: "cuStreamIsCapturing", captured: 1, .. }), "{error}");
    assert!(error.is_recoverable());
    error
}

/// Field cases A27 (sgl-project/sglang#11275) and A29 (pie-project/pie#499): a capture that fails on one rank, by a call that
/// can't be captured or by the caller's own error or panic, fails there, with the reason. No peer has to know: where no rank
/// launches, all go on at once, with eager calls and with new captures.
#[test]
fn a_capture_that_fails_on_one_rank_costs_only_the_capture() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4] {
        devices.run(world, &harness::options(), |rank| {
            for round in 0..9 {
                if rank.rank != round % world {
                    // The others' graphs are made, and never launched.
                    let mut captured = begin(rank);
                    three_calls(rank, &mut captured).unwrap();
                    drop(captured.0.finish().unwrap());
                } else if round % 3 == 0 {
                    failed_capture(rank);
                } else if round % 3 == 1 {
                    let mut captured = begin(rank);
                    three_calls(rank, &mut captured).unwrap();
                    let panic = std::panic::catch_unwind(AssertUnwindSafe(move || {
                        let _captured = captured;
                        std::panic::resume_unwind(Box::new("the caller's own"));
                    }));
                    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"the caller's own"));
                } else {
                    drop(begin(rank));
                }
                assert_eq!(rank.all_reduce_values(&[2.0f32; 100], ReduceOp::Max), [2.0; 100]);
                let mut captured = begin(rank);
                three_calls(rank, &mut captured).unwrap();
                let (mut graph, x) = (captured.0.finish().unwrap(), captured.1);
                rank.meet();
                graph.launch().unwrap();
                rank.stream.synchronize().unwrap();
                rank.communicator.check().unwrap();
                let sums = rank.stream.clone_dtoh(&graph.buffer(x)).unwrap();
                rank.stream.synchronize().unwrap();
                assert_eq!(sums, [world.pow(3) as f32; 5000], "round {round}");
                rank.meet();
            }
        });
    }
}

/// Launches the graph, if there is one, and returns what the group comes to: an error on every rank, in time.
fn launch_alone(rank: &mut Rank, graph: &mut Option<Graph>) -> Error {
    rank.meet();
    let started = Instant::now();
    if let Some(graph) = graph {
        graph.launch().unwrap();
    }
    rank.stream.synchronize().unwrap();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    rank.meet();
    let error = rank.communicator.check().unwrap_err();
    if let Some(graph) = graph {
        assert_eq!(graph.launch().unwrap_err(), error, "the next launch says so too");
    }
    error
}

/// Field case A27 (sgl-project/sglang#11275): a capture that fails on one rank, and its peers launch theirs all the same:
/// every rank is told, by the deadline, and the error names the rank that has no graph.
#[test]
fn a_capture_that_failed_on_one_rank_and_was_launched_on_the_others() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        let failing = world / 2;
        devices.run(world, &impatient(), |rank| {
            let mut graph = None;
            if rank.rank == failing {
                failed_capture(rank);
            } else {
                let mut captured = begin(rank);
                three_calls(rank, &mut captured).unwrap();
                graph = Some(captured.0.finish().unwrap());
            }
            let error = launch_alone(rank, &mut graph);
            assert!(matches!(error, Error::PeerTimeout { peer, .. } if peer == failing), "{error}");
            rank.meet();
        });
        a_new_group_works(&devices, world);
    }
}

/// Field case A24 (vllm-project/vllm#39791): ranks that captured different numbers of calls are told, on every rank.
#[test]
fn graphs_with_different_numbers_of_calls() {
    let Some(devices) = harness::devices() else { return };
    devices.run(2, &impatient(), |rank| {
        let mut captured = begin(rank);
        three_calls(rank, &mut captured).unwrap();
        if rank.rank == 0 {
            captured.0.all_reduce_in_place(&mut rank.communicator, captured.1, ReduceOp::Sum).unwrap();
        }
        let mut graph = Some(captured.0.finish().unwrap());
        let error = launch_alone(rank, &mut graph);
        assert!(matches!(error, Error::PeerTimeout { rank: 0, peer: 1, .. }), "{error}");
        rank.meet();
    });
    a_new_group_works(&devices, 2);
}

/// After an abort a replay returns at once, whether its peers come or not, and the safe layer doesn't launch it.
#[test]
fn replays_after_an_abort_return_at_once() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        devices.run(world, &harness::options(), |rank| {
            let memory = rank.bytes(4 << 20);
            let graph = capture(rank, |rank| {
                let stream = rank.raw_stream();
                // By packets, by flags, and in several blocks.
                for count in [100, 1 << 16, 1 << 20] {
                    let address = memory.address;
                    // SAFETY: the memory has room for the largest, and outlives the graph.
                    let captured = unsafe {
                        rank.communicator.all_reduce_raw(address, address, count, DType::F32, ReduceOp::Max, stream)
                    };
                    captured.unwrap();
                }
            });
            let mut captured = begin(rank);
            three_calls(rank, &mut captured).unwrap();
            let mut safe = captured.0.finish().unwrap();
            rank.meet();
            graph.launch().unwrap();
            safe.launch().unwrap();
            rank.stream.synchronize().unwrap();
            rank.communicator.check().unwrap();
            rank.meet();
            if rank.rank == 0 {
                rank.communicator.abort();
            }
            rank.meet();
            let started = Instant::now();
            if rank.rank != world - 1 {
                for replay in 0..100 {
                    graph.launch().unwrap();
                    if replay % 10 == rank.rank {
                        rank.stream.synchronize().unwrap();
                    }
                }
                rank.stream.synchronize().unwrap();
            }
            let took = started.elapsed();
            assert!(took < Duration::from_secs(1), "100 replays took {took:?}");
            assert_eq!(rank.communicator.check(), Err(Error::Aborted { by: None }));
            assert_eq!(safe.launch(), Err(Error::Aborted { by: None }));
            rank.meet();
            drop((graph, safe));
        });
        a_new_group_works(&devices, world);
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

/// Field case A15 (sgl-project/sglang#31117, pytorch/pytorch#189228): one communicator from two streams, eagerly and by a
/// graph. The safe layer puts each call behind the one before, whichever stream a rank takes; the raw call leaves that to
/// its caller, and says so. Two threads at once don't compile (tests/compile_fail).
#[test]
fn calls_on_two_streams_follow_one_another() {
    const CALLS: usize = 200;
    const CALLS_A_REPLAY: usize = 10;
    const COUNT: usize = 50_000;

    /// Fills, reduces and checks on one stream. Its own kernels are in order with that stream alone.
    fn verified(
        rank: &mut Rank,
        address: u64,
        state: &harness::State,
        stream: &CudaStream,
        reduce: impl FnOnce(&mut Rank),
    ) {
        let (me, world, verifier) = (rank.rank as u32, rank.world as u32, rank.verifier.clone());
        let raw = stream.cu_stream().cast();
        // SAFETY: the tensor has so many elements, and outlives the work.
        unsafe { verifier.fill(address, COUNT, DType::F32, me, state.round(), raw).unwrap() };
        reduce(rank);
        // SAFETY: as above.
        unsafe {
            let (op, round, wrong) = (ReduceOp::Sum, state.round(), state.wrong());
            verifier.check(address, COUNT, DType::F32, world, op, round, wrong, raw).unwrap();
            verifier.advance(state.round(), raw).unwrap();
        }
    }

    let Some(devices) = harness::devices() else { return };
    for world in [2, 4] {
        devices.run(world, &harness::options(), |rank| {
            let streams = [rank.stream.clone(), rank.second_stream()];
            // A tensor for each stream, and one for the graph.
            let [mut first, mut second, third] = [(); 3].map(|()| rank.upload(&[0f32; COUNT]));
            let [of_first, of_second, of_third] =
                [&first, &second, &third].map(|tensor| tensor.device_ptr(&rank.stream).0);
            let states = [(); 3].map(|()| rank.state(0));
            let mut buffers = Buffers::new();
            let held = buffers.hold(third);
            let mut captured = buffers.capture(&streams[1]).unwrap();
            verified(rank, of_third, &states[2], &streams[1], |rank| {
                captured.all_reduce_in_place(&mut rank.communicator, held, ReduceOp::Sum).unwrap();
            });
            let mut graph = captured.finish().unwrap();
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            rank.meet();
            let mut random = Random::new(rank.rank as u64);
            for call in 0..CALLS {
                if random.below(20) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(300) as u64));
                }
                // The ranks take turns of their own: those that are odd begin with the other stream.
                let stream = &streams[(call + rank.rank) % 2];
                let (tensor, address) = if call % 2 == 0 { (&mut first, of_first) } else { (&mut second, of_second) };
                verified(rank, address, &states[call % 2], stream, |rank| {
                    rank.communicator.all_reduce_in_place(tensor, ReduceOp::Sum, stream).unwrap();
                });
                if call % CALLS_A_REPLAY == 0 {
                    graph.launch().unwrap();
                }
                if call % 50 == 0 {
                    streams.iter().for_each(|stream| stream.synchronize().unwrap());
                }
            }
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            for (state, calls) in states.iter().zip([CALLS / 2, CALLS / 2, CALLS / CALLS_A_REPLAY]) {
                assert_eq!(state.assert_right(rank, format_args!("{world} ranks")), calls as u64);
            }
            rank.meet();
            drop(graph);
        });
    }
}

/// An eager call on a second stream, while the rank's first one is being captured, would be taken into that capture.
#[test]
fn an_eager_call_beside_a_capture_stays_out_of_it() {
    let Some(devices) = harness::devices() else { return };
    devices.run(2, &harness::options(), |rank| {
        let (stream, other) = (rank.stream.clone(), rank.second_stream());
        let mut tensor = rank.upload(&[1.0f32; 100]);
        stream.synchronize().unwrap();
        rank.meet();
        rank.communicator.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &stream).unwrap();
        stream.synchronize().unwrap();
        let mut captured = begin(rank);
        three_calls(rank, &mut captured).unwrap();
        let error = rank.communicator.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &other).unwrap_err();
        assert!(matches!(error, Error::Capturing { .. }), "{error}");
        assert_eq!(other.capture_status().unwrap(), sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
        let mut graph = captured.0.finish().unwrap();
        rank.meet();
        rank.communicator.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &other).unwrap();
        graph.launch().unwrap();
        other.synchronize().unwrap();
        stream.synchronize().unwrap();
        rank.meet();
        assert_eq!(rank.download(&tensor), [4.0; 100]);
        let sums = stream.clone_dtoh(&graph.buffer(captured.1)).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(sums, [8.0; 5000]);
        rank.meet();
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
