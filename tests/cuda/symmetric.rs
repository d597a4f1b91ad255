//! Tensors in symmetric memory, which peers read and write where they are.

use std::time::{Duration, Instant};

use cudarc::driver::DeviceSlice;
use half::bf16;
use peersum::{
    Algorithm, DType, Error, Options, Phase, Placement, ReduceOp,
    cuda::SymmetricMemory,
    interop::{SymmetricBuffer, cudarc::Buffers},
};

use crate::{
    common::{Random, Value, wild},
    data::{self, MOST_BYTES, Shape, WORLDS},
    graphs::capture,
    harness::{self, Rank},
};

const DIRECT: [Algorithm; 2] = [Algorithm::OneShotDirect, Algorithm::TwoShotDirect];

fn options() -> Options {
    harness::options().symmetric_bytes(2 * (MOST_BYTES + 4096))
}

fn memory(rank: &Rank) -> [SymmetricMemory; 2] {
    [(); 2].map(|()| rank.communicator.symmetric_memory(MOST_BYTES + 256).unwrap())
}

/// A call of a run, and where its tensors start in the two pieces: the same on every rank.
type Placed = (Shape, [u64; 2]);

fn shapes(calls: usize, dtype: DType, algorithm: Option<Algorithm>, seed: u64) -> Vec<Placed> {
    let mut random = Random::new(seed);
    let out_of_place_alone = algorithm == Some(Algorithm::OneShotDirect);
    data::shapes(calls, dtype, seed)
        .into_iter()
        .map(|shape| {
            let in_place = shape.in_place && !out_of_place_alone;
            (Shape { in_place, ..shape }, data::offsets(&mut random, dtype))
        })
        .collect()
}

/// Makes a call and checks all of its result.
///
/// # Safety
/// The shape lies within the memory.
unsafe fn call(
    rank: &mut Rank,
    memory: &[SymmetricMemory; 2],
    (shape, offsets): Placed,
    dtype: DType,
    state: &harness::State,
) {
    let input = memory[0].address() + offsets[0];
    let output = if shape.in_place { input } else { memory[1].address() + offsets[1] };
    // SAFETY: the caller's.
    unsafe { rank.verified_call(input, output, shape.count, dtype, shape.op, state).unwrap() };
}

fn eager_and_in_graphs(world: usize) {
    let Some(devices) = harness::devices() else { return };
    for algorithm in [Some(Algorithm::OneShotDirect), Some(Algorithm::TwoShotDirect), None] {
        let mut options = options();
        options.algorithm = algorithm;
        devices.run(world, &options, |rank| {
            let memory = memory(rank);
            for dtype in DType::ALL {
                let what = format!("{algorithm:?} {dtype} {world} ranks");
                let state = rank.state(1000);
                rank.meet();
                let shapes = shapes(harness::calls(), dtype, algorithm, world as u64);
                for &shape in &shapes {
                    // SAFETY: the shapes lie within the memory.
                    unsafe { call(rank, &memory, shape, dtype, &state) };
                }
                assert_eq!(state.assert_right(rank, &what), 1000 + shapes.len() as u64);
                rank.meet();
                let graphs: Vec<_> = shapes[..shapes.len().min(50)]
                    .chunks(5)
                    .map(|shapes| {
                        capture(rank, |rank| {
                            for &shape in shapes {
                                // SAFETY: as above, and the memory outlives the graphs.
                                unsafe { call(rank, &memory, shape, dtype, &state) };
                            }
                        })
                    })
                    .collect();
                rank.meet();
                let mut order = Random::new(3);
                for replay in 0..harness::calls().div_ceil(5) {
                    graphs[order.below(graphs.len())].launch().unwrap();
                    if replay % 3 == 0 {
                        // SAFETY: as above.
                        unsafe { call(rank, &memory, shapes[replay % shapes.len()], dtype, &state) };
                    }
                }
                state.assert_right(rank, format_args!("{what}, graphs"));
                rank.meet();
                drop(graphs);
            }
        });
    }
}

#[test]
fn every_element_is_right_2_ranks() {
    eager_and_in_graphs(2);
}

#[test]
fn every_element_is_right_3_ranks() {
    eager_and_in_graphs(3);
}

#[test]
fn every_element_is_right_4_ranks() {
    eager_and_in_graphs(4);
}

#[test]
fn every_element_is_right_5_ranks() {
    eager_and_in_graphs(5);
}

#[test]
fn every_element_is_right_8_ranks() {
    eager_and_in_graphs(8);
}

/// The bits are those of every other algorithm.
#[test]
fn the_bits_are_those_through_staging() {
    fn check<T: Value + cudarc::driver::DeviceRepr>(devices: &harness::Devices, world: usize, count: usize) {
        let staged = devices.run(world, &harness::options(), |rank| {
            rank.all_reduce_values(&wild::<T>(3, rank.rank, count), ReduceOp::Sum)
        });
        let staged: Vec<u32> = staged.into_iter().next().into_iter().flatten().map(Value::bits).collect();
        for algorithm in DIRECT {
            for in_place in [false, true] {
                if in_place && algorithm == Algorithm::OneShotDirect {
                    continue;
                }
                let results = devices.run(world, &options().algorithm(algorithm), |rank| {
                    let mut input = rank.communicator.symmetric_buffer::<T>(count, &rank.stream).unwrap();
                    let mut output = rank.communicator.symmetric_buffer::<T>(count, &rank.stream).unwrap();
                    rank.stream.memcpy_htod(&wild::<T>(3, rank.rank, count), &mut input.view_mut()).unwrap();
                    rank.stream.synchronize().unwrap();
                    rank.meet();
                    let (communicator, stream) = (&mut rank.communicator, &rank.stream);
                    if in_place {
                        communicator.all_reduce_in_place(&mut input, ReduceOp::Sum, stream).unwrap();
                    } else {
                        communicator.all_reduce(&input, &mut output, ReduceOp::Sum, stream).unwrap();
                    }
                    let values = rank.stream.clone_dtoh(&if in_place { input.view() } else { output.view() }).unwrap();
                    rank.stream.synchronize().unwrap();
                    rank.communicator.check().unwrap();
                    rank.meet();
                    values
                });
                for result in results {
                    let bits: Vec<u32> = result.into_iter().map(Value::bits).collect();
                    assert!(bits == staged, "{algorithm}, {world} ranks, {count} x {}, in place: {in_place}", T::DTYPE);
                }
            }
        }
    }

    let Some(devices) = harness::devices() else { return };
    for world in WORLDS {
        for count in [1, 4096, 300_001] {
            check::<f32>(&devices, world, count);
            check::<half::f16>(&devices, world, count);
            check::<bf16>(&devices, world, count);
        }
    }
}

/// Field case A03 (ROCm/aiter#4082, #3514): the input is read by the peers where it is, and overwritten in the stream directly
/// behind the call, with a slow peer: no peer sees the new content.
#[test]
fn the_input_may_be_overwritten_directly_behind_the_call() {
    let Some(devices) = harness::devices() else { return };
    for algorithm in DIRECT {
        for world in [2, 4, 8] {
            devices.run(world, &options().algorithm(algorithm), |rank| {
                const COUNT: usize = 1 << 18;
                let memory = memory(rank);
                let state = rank.state(0);
                let (input, output) = (memory[0].address(), memory[1].address());
                for round in 0..40 {
                    rank.meet();
                    if round % world == rank.rank {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    let stream = rank.raw_stream();
                    // SAFETY: the memory has room for the elements.
                    unsafe {
                        rank.verified_call(input, output, COUNT, DType::F32, ReduceOp::Sum, &state).unwrap();
                        // Another rank's numbers, of a round that is none.
                        rank.verifier.fill(input, COUNT, DType::F32, harness::POISON, state.round(), stream).unwrap();
                    }
                }
                assert_eq!(state.assert_right(rank, format_args!("{algorithm}, {world} ranks")), 40);
                rank.meet();
            });
        }
    }
}

/// Typed buffers, alone and held by a graph, and the default plan: direct where that is the plan for such tensors.
#[test]
fn typed_buffers_eager_and_in_graphs() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4] {
        devices.run(world, &options(), |rank| {
            const COUNT: usize = 1 << 20;
            let plan = rank.communicator.plan_at(Placement::SymmetricInPlace, COUNT, DType::BF16).unwrap().unwrap();
            assert_eq!(plan.algorithm, Algorithm::TwoShotDirect);
            let mut tensor: SymmetricBuffer<bf16> = rank.communicator.symmetric_buffer(COUNT, &rank.stream).unwrap();
            assert_eq!(DeviceSlice::len(&tensor), COUNT);
            let ones = vec![bf16::ONE; COUNT];
            rank.stream.memcpy_htod(&ones, &mut tensor.view_mut()).unwrap();
            rank.stream.synchronize().unwrap();
            rank.meet();
            rank.communicator.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &rank.stream).unwrap();
            let sum = |power: i32| vec![bf16::from_f32((world as f32).powi(power)); COUNT];
            let values = rank.stream.clone_dtoh(&tensor.view()).unwrap();
            rank.stream.synchronize().unwrap();
            assert!(values == sum(1));
            rank.meet();
            let mut buffers = Buffers::new();
            let held = buffers.hold_symmetric(tensor);
            let mut capture = buffers.capture(&rank.stream).unwrap();
            for _ in 0..2 {
                capture.all_reduce_in_place(&mut rank.communicator, held, ReduceOp::Sum).unwrap();
            }
            let mut graph = capture.finish().unwrap();
            rank.stream.synchronize().unwrap();
            rank.meet();
            graph.launch().unwrap();
            let values = rank.stream.clone_dtoh(&graph.buffer(held)).unwrap();
            rank.stream.synchronize().unwrap();
            rank.communicator.check().unwrap();
            assert!(values == sum(3));
            rank.meet();
        });
    }
}

/// Peers look for a rank's tensor at their own offset: another one there is told, not read.
#[test]
fn offsets_that_differ_are_told_and_so_is_other_memory() {
    let Some(devices) = harness::devices() else { return };
    for elsewhere in [false, true] {
        for world in [2, 4] {
            devices.run(world, &options().timeout(Duration::from_secs(2)), |rank| {
                const BYTES: usize = 1 << 20;
                let memory = memory(rank);
                let other = rank.bytes(BYTES);
                let mut address = memory[0].address();
                if rank.rank == 1 {
                    address = if elsewhere { other.address } else { address + 256 };
                }
                rank.meet();
                let stream = rank.raw_stream();
                let started = Instant::now();
                // A rank that comes late may be told already.
                // SAFETY: the memory has room for it.
                let called = unsafe {
                    let count = BYTES / 4;
                    rank.communicator.all_reduce_raw(address, address, count, DType::F32, ReduceOp::Sum, stream)
                };
                rank.stream.synchronize().unwrap();
                rank.meet();
                let error = rank.communicator.check().unwrap_err();
                assert!(called.is_ok() || called == Err(error.clone()), "{called:?}");
                assert!(matches!(error, Error::Mismatch { .. }), "elsewhere: {elsewhere}: {error}");
                assert!(started.elapsed() < Duration::from_secs(2));
                rank.meet();
            });
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let Some(devices) = harness::devices() else { return };
    for algorithm in DIRECT {
        devices.run(3, &options().algorithm(algorithm).timeout(Duration::from_millis(200)), |rank| {
            let memory = memory(rank);
            rank.meet();
            if rank.rank != 1 {
                let stream = rank.raw_stream();
                let (input, output) = (memory[0].address(), memory[1].address());
                // SAFETY: the memory has room for it.
                unsafe {
                    rank.communicator.all_reduce_raw(input, output, 5000, DType::F16, ReduceOp::Max, stream).unwrap();
                }
            }
            rank.stream.synchronize().unwrap();
            rank.meet();
            let error = rank.communicator.check().unwrap_err();
            assert!(matches!(error, Error::PeerTimeout { peer: 1, phase: Phase::Entry, .. }), "{error}");
            rank.meet();
        });
    }
}

/// What there is room for, what there isn't, and that a piece comes back when it is dropped.
#[test]
fn memory_ends_and_comes_back() {
    let Some(devices) = harness::devices() else { return };
    devices.run(2, &harness::options().symmetric_bytes(1 << 20), |rank| {
        let communicator = &rank.communicator;
        assert!(communicator.memory_bytes() >= (33 << 20));
        let whole = communicator.symmetric_memory(1 << 20).unwrap();
        let full = communicator.symmetric_memory(1).map(drop).unwrap_err();
        let Error::SymmetricMemoryFull { wanted: 1, free: 0, total, .. } = full else { panic!("{full}") };
        assert_eq!((total, whole.bytes()), (1 << 20, 1 << 20));
        let address = whole.address();
        drop(whole);
        let again = communicator.symmetric_buffer::<f32>(1 << 18, &rank.stream).unwrap();
        assert_eq!(rank.stream.clone_dtoh(&again.view()).unwrap(), [0.0; 1 << 18]);
        drop(again);
        assert_eq!(communicator.symmetric_memory(16).unwrap().address(), address);
        rank.meet();
    });
    devices.run(2, &harness::options(), |rank| {
        let none = rank.communicator.symmetric_memory(1).map(drop).unwrap_err();
        assert!(matches!(none, Error::SymmetricMemoryFull { total: 0, .. }), "{none}");
        let memory = rank.bytes(64);
        for algorithm in DIRECT {
            rank.communicator.force(Some(peersum::Choice { algorithm, blocks: 1, threads: 32 })).unwrap();
            let stream = rank.raw_stream();
            // SAFETY: the memory has room for it.
            let refused = unsafe {
                rank.communicator.all_reduce_raw(memory.address, memory.address, 4, DType::F32, ReduceOp::Sum, stream)
            };
            assert!(matches!(refused, Err(Error::AlgorithmUnavailable { .. })), "{refused:?}");
        }
        rank.meet();
    });
}
