//! Many calls: reuse of memory, changes of size and algorithm, wraps, delays.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use cudarc::driver::{DevicePtr, sys};
use half::f16;
use peersum::{Algorithm, DType, Error, ReduceOp, cuda::Communicator};

use crate::{
    common::{Random, Value, wild},
    harness,
};

/// Field cases A01 (vllm-project/vllm#2760) and A04 (sgl-project/sglang#11609): sizes drawn at random, so that the plan
/// goes from one-shot to two-shot and back, and the grid changes all the time.
#[test]
fn sizes_and_algorithms_change_all_the_time() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        devices.run(world, &harness::options(), |rank| {
            let most = 4 << 20;
            let memory = rank.bytes(most);
            let state = rank.state(0);
            rank.meet();
            let mut random = Random::new(world as u64);
            let mut algorithms = std::collections::HashSet::new();
            let calls = 200 * harness::calls() as u64;
            for _ in 0..calls {
                let bytes = *random.of(&[16, 48, 4096, 7168 * 2, 1 << 20, most]);
                let count = (bytes / 2) >> if bytes > 1 << 16 { random.below(3) } else { 0 };
                algorithms.insert(rank.communicator.plan(count, DType::BF16).unwrap().unwrap().algorithm);
                // SAFETY: the memory has room for the most.
                unsafe {
                    rank.verified_call(memory.address, memory.address, count, DType::BF16, ReduceOp::Sum, &state)
                        .unwrap();
                }
            }
            assert_eq!(state.assert_right(rank, format_args!("{world} ranks")), calls);
            assert!(algorithms.len() > 1 || world == 2, "the sizes don't cross from one algorithm to another");
            rank.meet();
        });
    }
}

/// Ranks that share a device and wait for one leave it place for what it does ahead of its call. They may be anywhere on
/// the device by then, with one block or two on a multiprocessor.
#[test]
fn the_kernels_ahead_of_a_late_ranks_call_find_place() {
    let Some(devices) = harness::devices() else { return };
    for world in [3, 4, 8] {
        for algorithm in [Algorithm::OneShot, Algorithm::OneShotLl] {
            devices.run(world, &harness::options().algorithm(algorithm), |rank| {
                let memory = rank.bytes(1 << 20);
                let state = rank.state(0);
                for round in 0..60 {
                    rank.meet();
                    if round % world == rank.rank {
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    let count = (1 << 18) >> (round % 5);
                    // SAFETY: the memory has room for the most elements.
                    unsafe {
                        rank.verified_call(memory.address, memory.address, count, DType::F32, ReduceOp::Max, &state)
                            .unwrap();
                    }
                }
                assert_eq!(state.assert_right(rank, format_args!("{algorithm}, {world} ranks")), 60);
                rank.meet();
            });
        }
    }
}

/// Field case A02 (vllm-project/vllm#57059, ROCm/aiter#4812): calls back to back without a host synchronisation, in step
/// and with one rank 50 ms late: result k is the sum of call k, never of call k−1.
#[test]
fn back_to_back_calls_never_see_the_one_before() {
    const CALLS: usize = 64;
    const COUNT: usize = 4 << 20;
    let Some(devices) = harness::devices() else { return };
    for late in [false, true] {
        devices.run(2, &harness::options(), |rank| {
            let inputs: Vec<_> = (0..CALLS)
                .map(|call| rank.upload(&vec![f16::from_f32((4 * call + rank.rank) as f32); COUNT]))
                .collect();
            let mut outputs: Vec<_> = (0..CALLS).map(|_| rank.upload(&vec![f16::NAN; COUNT])).collect();
            rank.stream.synchronize().unwrap();
            rank.meet();
            if late && rank.rank == 1 {
                std::thread::sleep(Duration::from_millis(50));
            }
            for (input, output) in inputs.iter().zip(&mut outputs) {
                rank.communicator.all_reduce(input, output, ReduceOp::Sum, &rank.stream).unwrap();
            }
            for (call, output) in outputs.iter().enumerate() {
                let sum = f16::from_f32((8 * call + 1) as f32);
                assert!(rank.download(output).iter().all(|&value| value == sum), "call {call}, late: {late}");
            }
            rank.meet();
        });
    }
}

/// Field case A03 (ROCm/aiter#4082, #3514): the input is the caller's again as soon as the stream passes the call, even
/// with a slow peer.
#[test]
fn the_input_may_be_overwritten_at_once() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        for algorithm in Algorithm::STAGED {
            devices.run(world, &harness::options().algorithm(algorithm), |rank| {
                let count = 30_000;
                let (input, output) = (rank.bytes(4 * count), rank.bytes(4 * count));
                let state = rank.state(0);
                rank.meet();
                for call in 0..2 * harness::calls() {
                    if call % 50 == 0 && rank.rank == call / 50 % world {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    rank.pace();
                    let stream = rank.raw_stream();
                    // SAFETY: both have room for the tensor.
                    unsafe {
                        let (from, to) = (input.address, output.address);
                        rank.verifier.fill(from, count, DType::F32, rank.rank as u32, state.round(), stream).unwrap();
                        rank.communicator.all_reduce_raw(from, to, count, DType::F32, ReduceOp::Sum, stream).unwrap();
                        rank.verifier.fill(from, count, DType::F32, harness::POISON, state.round(), stream).unwrap();
                        let (world, wrong) = (world as u32, state.wrong());
                        rank.verifier
                            .check(to, count, DType::F32, world, ReduceOp::Sum, state.round(), wrong, stream)
                            .unwrap();
                        rank.verifier.advance(state.round(), stream).unwrap();
                    }
                }
                state.assert_right(rank, format_args!("{algorithm}, {world} ranks"));
                rank.meet();
            });
        }
    }
}

/// Field case A05 (lightseekorg/tokenspeed#351): one-shot and two-shot in turn, half of them replayed; the counters of
/// all ranks are equal at the end.
#[test]
fn algorithms_alternate_in_graphs_and_out_and_epochs_stay_in_step() {
    let Some(devices) = harness::devices() else { return };
    let epochs = devices.run(4, &harness::options(), |rank| {
        let (small, large) = (512, 1 << 19);
        let algorithm = |count| rank.communicator.plan(count, DType::F16).unwrap().unwrap().algorithm;
        assert_ne!(algorithm(small), algorithm(large));
        let memory = rank.bytes(2 * large);
        let state = rank.state(0);
        let graph = crate::graphs::capture(rank, |rank| {
            for count in [small, large] {
                // SAFETY: the memory has room for the large one.
                unsafe {
                    rank.verified_call(memory.address, memory.address, count, DType::F16, ReduceOp::Sum, &state)
                        .unwrap();
                }
            }
        });
        rank.meet();
        for _ in 0..25 * harness::calls() {
            graph.launch().unwrap();
            for count in [small, large] {
                // SAFETY: as above.
                unsafe {
                    rank.verified_call(memory.address, memory.address, count, DType::F16, ReduceOp::Sum, &state)
                        .unwrap();
                }
            }
        }
        state.assert_right(rank, "alternating");
        let epochs = rank.communicator.epochs().unwrap();
        rank.meet();
        epochs
    });
    assert!(epochs.iter().all(|of_rank| *of_rank == epochs[0]));
    assert!(epochs.iter().all(|of_rank| of_rank[0] > 100));
}

/// Field case A06 (meta-pytorch/torchcomms#2133): epochs wrap, at 2^32 and where a signed comparison would.
#[test]
fn epochs_wrap() {
    let Some(devices) = harness::devices() else { return };
    for first in [u32::MAX - 20, (1 << 31) - 20, u32::MAX, u32::MAX - 1, (1 << 31) - 1] {
        for algorithm in Algorithm::STAGED {
            let epochs = devices.run(3, &harness::options().algorithm(algorithm).first_epoch(first), |rank| {
                let memory = rank.bytes(1 << 16);
                let state = rank.state(0);
                rank.meet();
                for _ in 0..64 {
                    // SAFETY: the memory has room for the tensor.
                    unsafe {
                        rank.verified_call(memory.address, memory.address, 9999, DType::F32, ReduceOp::Sum, &state)
                            .unwrap();
                    }
                }
                state.assert_right(rank, format_args!("{algorithm} from {first}"));
                let epochs = rank.communicator.epochs().unwrap();
                rank.meet();
                (epochs[0], epochs[epochs.len() / 2])
            });
            // A packet's epoch is never 0, since that is what fresh memory holds; 2 keeps the halves in turn.
            let next_packet = |epoch: u32| if epoch == u32::MAX { 2 } else { epoch + 1 };
            let packet_rounds = 64 * algorithm.packet_rounds();
            let by_flags = first.wrapping_add(64 * algorithm.rounds() - packet_rounds);
            let by_packets = (0..packet_rounds).fold(first, |epoch, _| next_packet(epoch));
            assert!(
                epochs.iter().all(|&epochs| epochs == (by_flags, by_packets)),
                "{algorithm} from {first}: {epochs:?}"
            );
        }
    }
}

/// Field case A08 (apache/tvm#16797, pytorch/pytorch#196546): the first call of a thousand new groups, with a rank that is
/// late by up to 20 ms: no signal of the others is lost. A rank clears its memory before any peer knows of it.
#[test]
fn the_first_call_of_many_groups() {
    let Some(devices) = harness::devices() else { return };
    let mut random = Random::new(8);
    for group in 0..10 * harness::calls() {
        let world = 2 + group % 3;
        // Most are late by so little that the others are on their way.
        let (late, most) = (random.below(world), if group % 10 == 0 { 20_000 } else { 500 });
        let delay = Duration::from_micros(random.below(most) as u64);
        devices.run(world, &harness::options().staging_bytes(1 << 20), |rank| {
            let mut tensor = rank.upload(&[1.0f32; 1000]);
            rank.stream.synchronize().unwrap();
            rank.meet();
            if rank.rank == late {
                std::thread::sleep(delay);
            }
            rank.communicator.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &rank.stream).unwrap();
            rank.meet();
            assert_eq!(rank.download(&tensor), [world as f32; 1000], "group {group}");
        });
    }
}

/// Field case A49 (vllm-project/vllm#51292): the same input gives one result, however the ranks are delayed.
#[test]
fn the_same_input_gives_one_result() {
    let Some(devices) = harness::devices() else { return };
    for algorithm in Algorithm::STAGED {
        let hashes = devices.run(4, &harness::options().algorithm(algorithm), |rank| {
            let input = rank.upload(&wild::<f32>(9, rank.rank, 5000));
            let mut output = rank.upload(&vec![0f32; 5000]);
            rank.stream.synchronize().unwrap();
            let mut random = Random::new(rank.rank as u64);
            let mut hashes = std::collections::HashSet::new();
            rank.meet();
            for call in 0..5 * harness::calls() {
                if random.below(20) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(300) as u64));
                }
                rank.communicator.all_reduce(&input, &mut output, ReduceOp::Sum, &rank.stream).unwrap();
                if call % 4 == 0 {
                    // A copy waits in a queue that the ranks of a device share: not before all ranks have made the calls
                    // that it waits for.
                    rank.meet();
                    let mut hasher = DefaultHasher::new();
                    rank.download(&output).into_iter().for_each(|value| value.bits().hash(&mut hasher));
                    hashes.insert(hasher.finish());
                }
            }
            rank.meet();
            hashes
        });
        let first = hashes.first().cloned().unwrap_or_default();
        assert!(first.len() < 2 && hashes.iter().all(|hashes| *hashes == first), "{algorithm}");
    }
}

/// Field case A20 (NVIDIA/nccl#48, #787): a thread that allocates and frees, which waits for the device, while its peer's
/// kernel waits for it; and a buffer of its that another thread drops. It ends, with the right sum or with an error that names the peer; never a hang.
#[test]
fn a_rank_that_allocates_between_the_launches_of_two_ranks() {
    let Some(devices) = harness::devices() else { return };
    let options = harness::options().timeout(Duration::from_secs(2));
    let outcomes = devices.run(2, &options, |rank| {
        let tensor = rank.upload(&[1.0f32; 1000]);
        let address = tensor.device_ptr(&rank.stream).0;
        rank.stream.synchronize().unwrap();
        rank.meet();
        let mut outcome = Ok(());
        for call in 0..10 {
            if rank.rank == 1 {
                let dropped = rank.stream.alloc_zeros::<u8>(1 << 20).unwrap();
                std::thread::spawn(move || drop(dropped)).join().unwrap();
                // SAFETY: plain allocations, freed at once.
                unsafe {
                    rank.context.bind_to_thread().unwrap();
                    let mut device = 0;
                    sys::cuMemAlloc_v2(&mut device, 32 << 20).result().unwrap();
                    sys::cuMemFree_v2(device).result().unwrap();
                    let mut host = std::ptr::null_mut();
                    sys::cuMemHostAlloc(&mut host, 1 << 20, 0).result().unwrap();
                    sys::cuMemFreeHost(host).result().unwrap();
                }
            }
            let stream = rank.raw_stream();
            // SAFETY: the tensor outlives the calls.
            outcome =
                unsafe { rank.communicator.all_reduce_raw(address, address, 1000, DType::F32, ReduceOp::Max, stream) };
            if outcome.is_err() {
                break;
            }
            if call % 2 == 1 {
                rank.stream.synchronize().unwrap();
            }
        }
        rank.stream.synchronize().unwrap();
        outcome.and_then(|()| rank.communicator.check())
    });
    for outcome in &outcomes {
        assert!(matches!(outcome, Ok(()) | Err(Error::PeerTimeout { .. } | Error::Aborted { .. })), "{outcome:?}");
    }
    eprintln!("outcomes: {outcomes:?}");
    // The context is alive, whatever happened.
    devices.run(2, &harness::options(), |rank| {
        assert_eq!(rank.all_reduce_values(&[1.0f32; 10], ReduceOp::Sum), [2.0; 10]);
    });
}

/// Threads of one process that enqueue without end: CUDA makes a launch wait for room in its queue, and may keep the other
/// threads from launching meanwhile. It ends all the same, with the right sums or with an error that names the peer.
#[test]
fn thousands_of_calls_without_a_synchronisation() {
    let Some(devices) = harness::devices() else { return };
    let options = harness::options().timeout(Duration::from_secs(3));
    let outcomes = devices.run(4, &options, |rank| {
        let tensor = rank.upload(&[1.0f32; 1000]);
        let address = tensor.device_ptr(&rank.stream).0;
        rank.stream.synchronize().unwrap();
        rank.meet();
        let stream = rank.raw_stream();
        let enqueued = (0..3000).try_for_each(|_| {
            // SAFETY: the tensor outlives the calls.
            unsafe { rank.communicator.all_reduce_raw(address, address, 1000, DType::F32, ReduceOp::Max, stream) }
        });
        rank.stream.synchronize().unwrap();
        enqueued.and_then(|()| rank.communicator.check())
    });
    for outcome in &outcomes {
        assert!(matches!(outcome, Ok(()) | Err(Error::PeerTimeout { .. })), "{outcome:?}");
    }
    eprintln!("outcomes: {outcomes:?}");
}

/// Groups made and dropped leave no memory behind.
#[test]
fn groups_leave_no_memory_behind() {
    let Some(devices) = harness::devices() else { return };
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let cycle = || drop(Communicator::local(&devices.of(2), &harness::options()).unwrap());
    cycle();
    let before = context.mem_get_info().unwrap().0;
    for _ in 0..20 {
        cycle();
    }
    let after = context.mem_get_info().unwrap().0;
    assert!(before.abs_diff(after) < 8 << 20, "free before: {before}, after: {after}");
}
