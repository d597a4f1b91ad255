//! Peers that don't come, calls that differ, aborts: an error that says so, a context that lives, a new group that works.

use std::time::{Duration, Instant};

use cudarc::driver::DevicePtr;
use peersum::{Algorithm, Call, Choice, DType, Error, Options, Phase, ReduceOp};

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

/// A call, and how it is forced to be done.
#[derive(Clone, Copy, Debug)]
struct Made {
    count: usize,
    dtype: DType,
    op: ReduceOp,
    choice: Option<Choice>,
}

impl Made {
    const USUAL: Made = Made { count: 1024, dtype: DType::F32, op: ReduceOp::Sum, choice: None };

    fn by(algorithm: Algorithm, blocks: u32) -> Made {
        Made { choice: Some(Choice { algorithm, blocks, threads: 128 }), ..Made::USUAL }
    }
}

/// One rank makes another call than the rest: each finds a mismatch as soon as its stream is done, all the same, with both
/// calls, well before the deadline.
fn one_rank_differs(devices: &Devices, world: usize, common: Made, other: Made) {
    let odd = world / 2;
    let what = format!("{world} ranks, {common:?}, {other:?}");
    let options = Options::default().timeout(Duration::from_secs(60));
    let results = devices.run(world, &options, |rank| {
        let tensor = rank.upload(&vec![1.0f32; common.count.max(other.count)]);
        let address = tensor.device_ptr(&rank.stream).0;
        let Made { count, dtype, op, choice } = if rank.rank == odd { other } else { common };
        rank.communicator.force(choice).unwrap();
        let plan = rank.communicator.plan(count, dtype).unwrap().unwrap();
        rank.stream.synchronize().unwrap();
        rank.meet();
        let started = Instant::now();
        let stream = rank.raw_stream();
        // A rank that comes late may be told already.
        // SAFETY: the tensor outlives the call, and has room for as many elements of 4 bytes.
        let called = unsafe { rank.communicator.all_reduce_raw(address, address, count, dtype, op, stream) };
        rank.stream.synchronize().unwrap();
        let error = rank.communicator.check().expect_err("no rank has the others' numbers");
        assert!(called.is_ok() || called == Err(error.clone()), "{what}: {called:?}");
        assert!(started.elapsed() < Duration::from_secs(5), "{what}: {:?}", started.elapsed());
        // SAFETY: as above.
        let next = unsafe { rank.communicator.all_reduce_raw(address, address, count, dtype, op, stream) };
        assert_eq!(next, Err(error.clone()));
        rank.meet();
        (error, Call { bytes: (count * dtype.size()) as u64, dtype, op, plan, offsets: [0; 2] })
    });
    let error = &results[0].0;
    let Error::Mismatch { rank, call, peer, peer_call: Some(peer_call), .. } = error else { panic!("{what}: {error}") };
    assert!((*rank == odd) != (*peer == odd), "{what}: {error}");
    assert_eq!((**call, **peer_call), (results[*rank].1, results[*peer].1), "{what}: {error}");
    for text in [format!("rank {rank} called {call},"), format!("rank {peer} {peer_call} ")] {
        assert!(error.to_string().contains(&text), "{error}");
    }
    assert!(results.iter().all(|(each, _)| each == error), "{what}: {results:?}");
}

/// Field cases A22 (NVIDIA/nccl#1417): different counts, a wrong tail or a hang; and A17 (vllm-project/vllm#43616): different
/// grids for the same call.
#[test]
fn different_calls_are_the_same_error_on_every_rank_and_name_both() {
    let Some(devices) = harness::devices() else { return };
    let usual = Made::USUAL;
    let cases = [
        (usual, Made { count: 1000, ..usual }),
        (Made { count: 100, ..usual }, Made { count: 1 << 17, ..usual }),
        // By packets on one rank and by flags on the other.
        (Made { count: 256, ..usual }, Made { count: 1 << 20, ..usual }),
        (usual, Made { op: ReduceOp::Max, ..usual }),
        (usual, Made { op: ReduceOp::Average, ..usual }),
        (usual, Made { dtype: DType::BF16, ..usual }),
        (Made { dtype: DType::F16, ..usual }, Made { dtype: DType::BF16, ..usual }),
        (Made::by(Algorithm::OneShot, 2), Made::by(Algorithm::OneShot, 4)),
        (Made::by(Algorithm::OneShotLl, 2), Made::by(Algorithm::OneShotLl, 4)),
        (Made::by(Algorithm::OneShotLl, 2), Made::by(Algorithm::TwoShotLl, 2)),
        (Made::by(Algorithm::TwoShotLl, 2), Made::by(Algorithm::TwoShotPull, 2)),
        (Made::by(Algorithm::TwoShotPull, 2), Made::by(Algorithm::OneShotPull, 2)),
    ];
    for world in [2, 4, 8] {
        for (common, other) in cases {
            one_rank_differs(&devices, world, common, other);
            one_rank_differs(&devices, world, other, common);
        }
        a_new_group_works(&devices, world);
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
