//! Lengths, alignments, limits, arguments.

use cudarc::driver::{DevicePtr, sys};
use half::{bf16, f16};
use peersum::{Algorithm, DType, Error, Options, ReduceOp, cuda::Communicator, interop::cudarc::Buffers};

use crate::{
    common::{Value, integer, integer_sum, wild},
    harness::{self, Devices},
};

/// Field cases A39 (ROCm/rccl#1556), A40 (microsoft/mscclpp#322) and A45 (flashinfer-ai/flashinfer#4393): every short
/// length, with fewer elements than ranks too, is reduced and no byte around it is touched.
#[test]
fn every_count_to_1100_and_nothing_around_it() {
    const GUARD: usize = 64; // elements
    const MOST: usize = 1100;

    fn check<T: Value + cudarc::driver::DeviceRepr>(devices: &Devices, world: usize, algorithm: Algorithm) {
        let starts: Vec<usize> = (0..=MOST)
            .scan(GUARD, |next, count| Some(std::mem::replace(next, (*next + count + GUARD).next_multiple_of(8))))
            .collect();
        let length = starts[MOST] + MOST + GUARD;
        let canary = T::of_bits(0xabcd_abcd);
        devices.run(world, &harness::options().algorithm(algorithm), |rank| {
            let value = |rank: usize, count: usize, index: usize| integer::<T>(count, rank, index);
            let mut host = vec![canary; length];
            for count in 1..=MOST {
                for index in 0..count {
                    host[starts[count] + index] = value(rank.rank, count, index);
                }
            }
            let input = rank.upload(&host);
            let output = rank.upload(&vec![canary; length]);
            let (from, to) = (input.device_ptr(&rank.stream).0, output.device_ptr(&rank.stream).0);
            rank.stream.synchronize().unwrap();
            rank.meet();
            for (count, start) in starts.iter().enumerate() {
                rank.pace();
                let offset = (start * size_of::<T>()) as u64;
                let stream = rank.raw_stream();
                // SAFETY: the ranges lie in the two tensors.
                unsafe {
                    rank.communicator
                        .all_reduce_raw(from + offset, to + offset, count, T::DTYPE, ReduceOp::Sum, stream)
                        .unwrap();
                }
            }
            let mut expected = vec![canary; length];
            for count in 1..=MOST {
                for index in 0..count {
                    expected[starts[count] + index] = integer_sum(count, rank.world, index);
                }
            }
            let what = format!("{algorithm}, {} ranks, {}", rank.world, T::DTYPE);
            crate::common::assert_bits(format_args!("output: {what}"), &rank.download(&output), &expected);
            crate::common::assert_bits(format_args!("input: {what}"), &rank.download(&input), &host);
            rank.meet();
        });
    }

    let Some(devices) = harness::devices() else { return };
    for world in [2, 3, 4, 7, 8] {
        for algorithm in Algorithm::STAGED {
            check::<f32>(&devices, world, algorithm);
            check::<f16>(&devices, world, algorithm);
            check::<bf16>(&devices, world, algorithm);
        }
    }
}

/// Field case A38 (a device fault on a guard that checked the size only): any offset that the type allows, another on
/// every rank.
#[test]
fn every_alignment_and_another_on_every_rank() {
    let Some(devices) = harness::devices() else { return };
    for algorithm in Algorithm::STAGED {
        devices.run(3, &harness::options().algorithm(algorithm), |rank| {
            let input = rank.bytes(1 << 16);
            let output = rank.bytes(1 << 16);
            let state = rank.state(5);
            rank.meet();
            for dtype in DType::ALL {
                let steps = 16 / dtype.size();
                for from in 0..steps {
                    for to in 0..steps {
                        for count in [8, 1024, 4099] {
                            let from = input.address + ((from + rank.rank) % steps * dtype.size()) as u64;
                            let to = output.address + ((to + 2 * rank.rank) % steps * dtype.size()) as u64;
                            // SAFETY: both have room for the largest behind the largest offset.
                            unsafe { rank.verified_call(from, to, count, dtype, ReduceOp::Sum, &state).unwrap() };
                            // SAFETY: as above.
                            unsafe { rank.verified_call(from, from, count, dtype, ReduceOp::Sum, &state).unwrap() };
                        }
                    }
                }
            }
            state.assert_right(rank, algorithm);
            rank.meet();
        });
    }
}

/// Field case A41 (vllm-project/vllm#50932): at the staging's capacity, just below, just above, and far beyond; the gate
/// and the kernels use one function.
#[test]
fn messages_beside_and_beyond_the_staging() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 5, 8] {
        for algorithm in Algorithm::STAGED {
            for (staging, blocks) in [(300_000, 1), (1 << 20, 3), (777_777, 8)] {
                let options = harness::options().algorithm(algorithm).staging_bytes(staging).blocks(blocks);
                devices.run(world, &options, |rank| {
                    let plan = rank.communicator.plan(1 << 20, DType::F32).unwrap().unwrap();
                    let capacity = (plan.chunk_bytes * u64::from(plan.blocks)) as usize;
                    let memory = rank.bytes(4 * capacity + 64);
                    let state = rank.state(0);
                    rank.meet();
                    for bytes in [capacity - 16, capacity, capacity + 2, capacity + 16, 2 * capacity, 3 * capacity + 6]
                    {
                        // SAFETY: the memory has room for four times the capacity.
                        unsafe {
                            rank.verified_call(
                                memory.address,
                                memory.address,
                                bytes / 2,
                                DType::F16,
                                ReduceOp::Sum,
                                &state,
                            )
                            .unwrap();
                        }
                    }
                    state.assert_right(rank, format_args!("{algorithm}, staging {staging}, {blocks} blocks"));
                    rank.meet();
                });
            }
        }
    }
}

/// Field case A43 (sgl-project/sglang#23609): no elements, no launch, no error left behind, epochs in step.
#[test]
fn no_elements_is_no_launch() {
    let Some(devices) = harness::devices() else { return };
    devices.run(4, &harness::options(), |rank| {
        let before = rank.communicator.epochs().unwrap();
        let empty = rank.context.default_stream().null::<f32>().unwrap();
        let mut out = rank.context.default_stream().null::<f32>().unwrap();
        rank.communicator.all_reduce(&empty, &mut out, ReduceOp::Sum, &rank.stream).unwrap();
        let stream = rank.raw_stream();
        // SAFETY: no elements are touched.
        unsafe { rank.communicator.all_reduce_raw(0, 0, 0, DType::BF16, ReduceOp::Max, stream).unwrap() };
        assert_eq!(rank.communicator.epochs().unwrap(), before);
        assert_eq!(rank.all_reduce_values(&[1.0f32; 10], ReduceOp::Sum), [4.0; 10]);
        rank.context.check_err().unwrap();
    });
}

/// Field case A43 (sgl-project/sglang#23609): calls without elements between others, eagerly and in graphs, and graphs of
/// nothing else.
#[test]
fn no_elements_between_others() {
    let Some(devices) = harness::devices() else { return };
    let epochs = devices.run(4, &harness::options(), |rank| {
        let memory = rank.bytes(1 << 19);
        let state = rank.state(0);
        let counts = [0, 5, 0, 0, 4096, 0, 100_001, 0];
        let all = |rank: &mut harness::Rank| {
            for count in counts {
                let address = if count == 0 { 0 } else { memory.address };
                // SAFETY: the memory has room for the largest.
                unsafe { rank.verified_call(address, address, count, DType::F32, ReduceOp::Sum, &state).unwrap() };
            }
        };
        let graph = crate::graphs::capture(rank, |rank| all(rank));
        let of_nothing = crate::graphs::capture(rank, |rank| {
            let stream = rank.raw_stream();
            // SAFETY: no elements are touched.
            unsafe { rank.communicator.all_reduce_raw(0, 0, 0, DType::F16, ReduceOp::Sum, stream).unwrap() };
        });
        let mut buffers = Buffers::new();
        let empty = buffers.hold(rank.stream.null::<f32>().unwrap());
        let mut captured = buffers.capture(&rank.stream).unwrap();
        captured.all_reduce_in_place(&mut rank.communicator, empty, ReduceOp::Sum).unwrap();
        let mut safe = captured.finish().unwrap();
        rank.meet();
        for _ in 0..10 {
            all(rank);
            of_nothing.launch().unwrap();
            graph.launch().unwrap();
            safe.launch().unwrap();
            rank.stream.synchronize().unwrap();
        }
        assert_eq!(state.assert_right(rank, "no elements between others"), 20 * counts.len() as u64);
        rank.context.check_err().unwrap();
        let epochs = rank.communicator.epochs().unwrap();
        rank.meet();
        drop((graph, of_nothing, safe));
        epochs
    });
    assert!(epochs.iter().all(|of_rank| *of_rank == epochs[0]));
}

/// A world of one copies, or does nothing in place.
#[test]
fn one_rank_alone() {
    let Some(devices) = harness::devices() else { return };
    devices.run(1, &harness::options(), |rank| {
        let values = wild::<bf16>(1, 0, 1001);
        crate::common::assert_bits("a world of one", &rank.all_reduce_values(&values, ReduceOp::Average), &values);
        let mut tensor = rank.upload(&values);
        rank.communicator.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &rank.stream).unwrap();
        crate::common::assert_bits("in place", &rank.download(&tensor), &values);
    });
}

/// Wrong arguments are typed errors before any launch, and cost nothing: the next call is right.
#[test]
fn wrong_arguments_are_errors_before_any_launch() {
    let Some(devices) = harness::devices() else { return };
    devices.run(2, &harness::options(), |rank| {
        let tensor = rank.upload(&[1.0f32; 100]);
        let mut other = rank.upload(&[1.0f32; 99]);
        let address = tensor.device_ptr(&rank.stream).0;
        let stream = rank.raw_stream();
        let communicator = &mut rank.communicator;
        let mut raw = |input, output, count, dtype| {
            // SAFETY: each of these is refused before anything is enqueued.
            unsafe { communicator.all_reduce_raw(input, output, count, dtype, ReduceOp::Sum, stream) }
        };
        assert!(matches!(raw(0, address, 4, DType::F32), Err(Error::NullPointer { what: "input", .. })));
        assert!(matches!(raw(address + 2, address, 4, DType::F32), Err(Error::Misaligned { what: "input", .. })));
        assert!(matches!(raw(address, address + 16, 8, DType::F32), Err(Error::Overlap)));
        assert!(matches!(raw(address, address, usize::MAX, DType::F32), Err(Error::TooLarge { .. })));
        let error = rank.communicator.all_reduce(&tensor, &mut other, ReduceOp::Sum, &rank.stream).unwrap_err();
        assert_eq!(error, Error::LengthMismatch { input: 100, output: 99 });
        assert!(error.is_recoverable());
        assert_eq!(rank.all_reduce_values(&[2.0f32; 100], ReduceOp::Sum), [4.0; 100]);
    });
}

/// Options and worlds that can't be.
#[test]
fn impossible_groups_are_refused() {
    let Some(devices) = harness::devices() else { return };
    let local = |world: usize, options: Options| Communicator::local(&devices.of(world), &options).unwrap_err();
    assert!(matches!(local(0, Options::default()), Error::UnsupportedWorld { world: 0, .. }));
    assert!(matches!(local(9, Options::default()), Error::UnsupportedWorld { world: 9, most: 8, .. }));
    assert!(matches!(local(2, Options::default().threads(48)), Error::InvalidOption { option: "threads", .. }));
    assert!(matches!(local(2, Options::default().blocks(0)), Error::InvalidOption { option: "blocks", .. }));
    assert!(matches!(local(2, Options::default().staging_bytes(1000)), Error::InvalidOption { .. }));
    assert!(matches!(
        Communicator::local(&[0, 4242], &Options::default()).unwrap_err(),
        Error::NoSuchDevice { device: 4242, .. }
    ));
    // Blocks that could not be resident together are refused at the call, and nothing hangs.
    devices.run(8, &harness::options().blocks(64).threads(512), |rank| {
        let plan = rank.communicator.plan(1 << 20, DType::F32);
        if devices.of(8).iter().filter(|&&device| device == 0).count() == 8 {
            assert!(matches!(plan, Err(Error::AlgorithmUnavailable { .. })), "{plan:?}");
        }
    });
}

/// Field case A36 (huggingface/candle#3525): the caller's current context stays current, and threads that never touched
/// CUDA may call.
#[test]
fn the_current_context_stays_the_callers() {
    fn current() -> usize {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is initialised and `context` a valid place for the answer.
        unsafe { sys::cuCtxGetCurrent(&mut context).result().unwrap() };
        context as usize
    }

    /// A context on the device beside the primary one, made current. cudarc has it only for some toolkits.
    fn another_context(device: usize) -> usize {
        type Create = unsafe extern "C" fn(*mut sys::CUcontext, u32, i32) -> sys::CUresult;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver is loaded and initialised, this is the type of its function, and device handles are
        // ordinals.
        unsafe {
            let library = libloading::Library::new("libcuda.so.1").unwrap();
            let create = library.get::<Create>(b"cuCtxCreate_v2\0").unwrap();
            create(&mut context, 0, device as i32).result().unwrap();
        }
        context as usize
    }

    let Some(devices) = harness::devices() else { return };
    devices.run(2, &harness::options(), |rank| {
        let mut tensor = rank.upload(&[1.0f32; 64]);
        rank.stream.synchronize().unwrap();
        let mine = another_context(rank.communicator.device());
        assert_eq!(current(), mine);
        rank.meet();
        let address = {
            let address = tensor.device_ptr(&rank.stream).0;
            // SAFETY: the context lives; cudarc's own call may have changed what is current.
            unsafe { sys::cuCtxSetCurrent(mine as sys::CUcontext).result().unwrap() };
            address
        };
        let stream = rank.raw_stream();
        // SAFETY: the tensor has 64 elements and outlives the call.
        unsafe { rank.communicator.all_reduce_raw(address, address, 64, DType::F32, ReduceOp::Sum, stream).unwrap() };
        assert_eq!(current(), mine, "after a call");
        rank.communicator.check().unwrap();
        rank.communicator.plan(64, DType::F32).unwrap();
        rank.communicator.epochs().unwrap();
        assert_eq!(current(), mine, "after check, plan and epochs");
        let lone = Communicator::local(&[rank.communicator.device()], &harness::options()).unwrap();
        assert_eq!(current(), mine, "after making a communicator");
        drop(lone);
        assert_eq!(current(), mine, "after dropping one");
        rank.meet();
        assert_eq!(rank.download(&tensor), [2.0; 64]);
        rank.stream.memset_zeros(&mut tensor).unwrap();

        // SAFETY: as above.
        let fresh = std::thread::scope(|scope| {
            let communicator = &mut rank.communicator;
            let stream = stream as usize;
            let thread = scope.spawn(move || {
                // SAFETY: as above; a stream handle may be used from any thread.
                unsafe {
                    communicator
                        .all_reduce_raw(address, address, 64, DType::F32, ReduceOp::Sum, stream as *mut _)
                        .map(|()| current())
                }
            });
            thread.join().unwrap()
        });
        assert_eq!(fresh, Ok(0), "a thread that had no context has none");
        rank.stream.synchronize().unwrap();
        rank.meet();
    });
}

/// Field case A35 (torch/cutorch#114, meta-pytorch/torchcomms#2399): access to a peer that the caller has enabled is no error
/// here, and stays when communicators go. The library maps its own memory, and neither enables access nor takes it away.
#[test]
fn access_that_the_caller_has_enabled_stays() {
    let Some(devices) = harness::devices() else { return };
    let devices = devices.of(2);
    if devices[0] == devices[1] {
        return eprintln!("skipped: there is one device");
    }
    let contexts = devices.clone().into_iter().map(|device| cudarc::driver::CudaContext::new(device).unwrap());
    let contexts: Vec<_> = contexts.collect();
    contexts[0].bind_to_thread().unwrap();
    // SAFETY: both contexts live until the end.
    let enable = || unsafe { sys::cuCtxEnablePeerAccess(contexts[1].cu_ctx(), 0) };
    enable().result().unwrap();
    for _ in 0..2 {
        let ranks = Communicator::local(&devices, &harness::options()).unwrap();
        ranks.iter().for_each(|rank| rank.check().unwrap());
    }
    contexts[0].bind_to_thread().unwrap();
    assert_eq!(enable(), sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    // SAFETY: as above; nothing uses the access.
    unsafe { sys::cuCtxDisablePeerAccess(contexts[1].cu_ctx()) }.result().unwrap();
}
