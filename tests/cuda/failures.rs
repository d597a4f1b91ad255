//! Peers that don't come, calls that differ, aborts: an error that says so, a context that lives, a new group that works.

use std::time::{Duration, Instant};

use cudarc::driver::DevicePtr;
use peersum::{DType, Error, Options, Phase, ReduceOp};

use crate::harness::{self, Devices};

pub fn impatient() -> Options {
    Options::default().timeout(Duration::from_millis(300))
}

pub fn a_new_group_works(devices: &Devices, world: usize) {
    devices.run(world, &harness::options(), |rank| {
        let sums = rank.all_reduce_values(&[1.0f32; 5000], ReduceOp::Sum);
        assert_eq!(sums, [world as f32; 5000]);
    });
}

#[test]
fn a_rank_that_never_calls_is_named_on_every_rank() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        let absent = world - 1;
        devices.run(world, &impatient(), |rank| {
            let tensor = rank.upload(&[1.0f32; 5000]);
            let address = tensor.device_ptr(&rank.stream).0;
            rank.stream.synchronize().unwrap();
            rank.meet();
            let started = Instant::now();
            if rank.rank != absent {
                let stream = rank.raw_stream();
                // SAFETY: the tensor outlives the call.
                unsafe {
                    rank.communicator
                        .all_reduce_raw(address, address, 5000, DType::F32, ReduceOp::Sum, stream)
                        .unwrap();
                }
            }
            rank.stream.synchronize().unwrap();
            assert!(started.elapsed() < Duration::from_secs(5));
            rank.meet();
            let error = rank.communicator.check().unwrap_err();
            let Error::PeerTimeout { peer, epoch: 1, phase: Phase::Exchange, waited, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(peer, absent);
            assert!(waited >= Duration::from_millis(300) && waited < Duration::from_secs(2), "{waited:?}");
            // The next call says so too, and enqueues nothing; other work on the device goes on.
            let stream = rank.raw_stream();
            // SAFETY: as above.
            let next =
                unsafe { rank.communicator.all_reduce_raw(address, address, 5000, DType::F32, ReduceOp::Sum, stream) };
            assert_eq!(next, Err(error));
            assert_eq!(rank.stream.clone_dtoh(&rank.upload(&[7.0f32; 9])).unwrap(), [7.0; 9]);
            rank.meet();
        });
        a_new_group_works(&devices, world);
    }
}

#[test]
fn ranks_in_different_calls_are_told() {
    let Some(devices) = harness::devices() else { return };
    // The last goes by packets on one rank and by flags on the other.
    let lengths = [(1024, 1000), (100, 1 << 17), (100, 1 << 20)];
    for (first, second) in lengths {
        devices.run(2, &impatient(), |rank| {
            let tensor = rank.upload(&vec![1.0f32; first.max(second)]);
            let address = tensor.device_ptr(&rank.stream).0;
            let count = if rank.rank == 0 { first } else { second };
            rank.stream.synchronize().unwrap();
            rank.meet();
            let stream = rank.raw_stream();
            // SAFETY: the tensor outlives the call.
            unsafe {
                rank.communicator.all_reduce_raw(address, address, count, DType::F32, ReduceOp::Sum, stream).unwrap();
            }
            rank.stream.synchronize().unwrap();
            rank.meet();
            let error = rank.communicator.check().unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
            rank.meet();
        });
        a_new_group_works(&devices, 2);
    }
}

#[test]
fn an_abort_ends_the_wait_and_every_later_call() {
    let Some(devices) = harness::devices() else { return };
    devices.run(3, &Options::default().timeout(Duration::from_secs(600)), |rank| {
        let tensor = rank.upload(&[1.0f32; 5000]);
        let address = tensor.device_ptr(&rank.stream).0;
        let graph = crate::graphs::capture(rank, |rank| {
            let stream = rank.raw_stream();
            // SAFETY: the tensor outlives the graph.
            unsafe {
                rank.communicator.all_reduce_raw(address, address, 5000, DType::F32, ReduceOp::Max, stream).unwrap();
            }
        });
        rank.meet();
        let started = Instant::now();
        if rank.rank == 2 {
            std::thread::sleep(Duration::from_millis(50));
            rank.communicator.abort();
        } else {
            graph.launch().unwrap();
        }
        rank.stream.synchronize().unwrap();
        rank.meet();
        assert_eq!(rank.communicator.check(), Err(Error::Aborted { by: None }));
        // A replay after the abort returns at once, though no peer comes.
        if rank.rank == 0 {
            graph.launch().unwrap();
            rank.stream.synchronize().unwrap();
        }
        assert!(started.elapsed() < Duration::from_secs(10));
        rank.meet();
    });
    a_new_group_works(&devices, 3);
}
