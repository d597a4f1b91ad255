//! Calls that are handed over to NCCL, between the library's own. The data are integers whose sums are exact in any order.
//!
//! NCCL is looked for as the library does, or where `PEERSUM_TEST_NCCL` says. Without it the tests skip and say why;
//! `PEERSUM_REQUIRE_NCCL=1` makes that a failure. Where ranks share a device NCCL needs `NCCL_MULTI_RANK_GPU_ENABLE=1`.

use std::{
    ffi::{c_char, c_int, c_void},
    path::PathBuf,
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaGraph, sys};
use peersum::{
    Algorithm, Choice, DType, Error, Nccl, Options, Phase, Placement, ReduceOp, TableFrom,
    crossover::{Curve, Entry, NcclFrom, Step, Table},
    cuda::{Communicator, Verifier},
    interop::cudarc::Buffers,
    nccl::{AllReduce, Borrowed, Library, Version},
};

use crate::{
    common::Random,
    failures::a_new_group_works,
    graphs::capture,
    harness::{self, Devices, Rank},
};

const KIB: u64 = 1 << 10;

fn library() -> Option<PathBuf> {
    std::env::var_os("PEERSUM_TEST_NCCL").map(PathBuf::from)
}

/// Options of groups that have NCCL beside them.
fn options() -> Options {
    let options = harness::options().table(TableFrom::Nowhere).nccl(Nccl::Required);
    library().into_iter().fold(options, |options, path| options.nccl_library(path))
}

/// Devices where NCCL can be joined by 2 ranks, and so by more.
fn devices() -> Option<Devices> {
    let devices = harness::devices()?;
    if harness::is_a_part() {
        return library().map(|_| devices); // each process would ask by a group of its own, all at once
    }
    match Communicator::local(&devices.of(2), &options()) {
        Ok(_) => Some(devices),
        Err(error) => {
            assert!(std::env::var_os("PEERSUM_REQUIRE_NCCL").is_none(), "PEERSUM_REQUIRE_NCCL is set, but {error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn own(algorithm: Algorithm) -> Choice {
    Choice { algorithm, blocks: 4, threads: 256 }
}

#[test]
fn every_type_and_reduction_goes_to_nccl() {
    let Some(devices) = devices() else { return };
    for world in [2, 4, 8] {
        devices.run(world, &options().algorithm(Algorithm::Nccl), |rank| {
            let (input, output) = (rank.bytes(1 << 20), rank.bytes(1 << 20));
            let state = rank.state(Verifier::EXACT);
            rank.meet();
            let mut calls = 0;
            for dtype in DType::ALL {
                for op in ReduceOp::ALL {
                    for count in [1, 1000, 100_003] {
                        for output in [input.address, output.address] {
                            assert_eq!(
                                rank.communicator.plan(count, dtype).unwrap().unwrap().algorithm,
                                Algorithm::Nccl
                            );
                            // SAFETY: both have room for the most elements.
                            unsafe { rank.verified_call(input.address, output, count, dtype, op, &state).unwrap() };
                            calls += 1;
                        }
                    }
                }
            }
            let rounds = state.assert_right(rank, format_args!("{world} ranks"));
            assert_eq!(rounds - Verifier::EXACT, calls);
            rank.meet();
        });
    }
}

/// One-shot, two-shot and NCCL in turn, half of the calls replayed and half eager, back to back.
#[test]
fn nccl_takes_turns_with_the_librarys_own() {
    const IN_A_GRAPH: usize = 10;
    let Some(devices) = devices() else { return };
    for world in [2, 4, 8] {
        let calls = 100 * harness::calls() / 3 / (2 * IN_A_GRAPH);
        devices.run(world, &options(), |rank| {
            let (input, output) = (rank.bytes(1 << 20), rank.bytes(1 << 20));
            let state = rank.state(Verifier::EXACT);
            let turns = [
                own(Algorithm::OneShot),
                Choice::NCCL,
                own(Algorithm::TwoShot),
                own(Algorithm::OneShotLl),
                Choice::NCCL,
            ];
            let mut random = Random::new(world as u64);
            let mut turn = 0;
            let mut call = |rank: &mut Rank| {
                let count = *random.of(&[1, 77, 4096, 50_001, 1 << 18]);
                let output = if random.below(2) == 0 { input.address } else { output.address };
                rank.communicator.force(Some(turns[turn % turns.len()])).unwrap();
                turn += 1;
                // SAFETY: both have room for the most elements.
                unsafe { rank.verified_call(input.address, output, count, DType::F32, ReduceOp::Sum, &state).unwrap() };
            };
            rank.meet();
            let graphs: Vec<_> =
                (0..5).map(|_| capture(rank, |rank| (0..IN_A_GRAPH).for_each(|_| call(rank)))).collect();
            rank.meet();
            for round in 0..calls {
                // A launch that waits for room in its queue keeps the other ranks' threads from launching.
                if round % 5 == 0 {
                    rank.stream.synchronize().unwrap();
                }
                graphs[round % graphs.len()].launch().unwrap();
                (0..IN_A_GRAPH).for_each(|_| call(rank));
            }
            let rounds = state.assert_right(rank, format_args!("{world} ranks"));
            assert_eq!(rounds - Verifier::EXACT, (2 * IN_A_GRAPH * calls) as u64);
            rank.meet();
            drop(graphs);
            rank.meet();
        });
    }
}

/// A table for the group's machine, of that border to NCCL.
fn table(devices: &Devices, world: usize, nccl_from: NcclFrom) -> tempfile::NamedTempFile {
    let group = Communicator::local(&devices.of(world), &options()).unwrap();
    let step = |from_bytes, algorithm| Step { from_bytes, choice: own(algorithm) };
    let curve = |placement, middle| Curve {
        placement,
        dtype: DType::BF16,
        nccl_from,
        steps: vec![step(0, Algorithm::OneShotLl), step(8 * KIB, Algorithm::OneShot), step(64 * KIB, middle)],
        points: Vec::new(),
    };
    let entry = Entry {
        machine: group[0].machine().unwrap(),
        measured: "2026-01-01".into(),
        command: "a test".into(),
        curves: vec![
            curve(Placement::Anywhere, Algorithm::TwoShot),
            curve(Placement::Symmetric, Algorithm::TwoShotDirect),
            curve(Placement::SymmetricInPlace, Algorithm::TwoShotDirect),
        ],
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    Table { entries: vec![entry] }.write(file.path()).unwrap();
    file
}

/// One element below, at and above each border, in place and not, in symmetric memory and not: one gate for all. Field cases
/// A61 (lightseekorg/tokenspeed#1234) and A63 (vllm-project/vllm#48075).
#[test]
fn a_table_hands_over_at_its_borders() {
    let Some(devices) = devices() else { return };
    for world in [2, 4] {
        let file = table(&devices, world, NcclFrom::Bytes(256 * KIB));
        let tabled = options().nccl(Nccl::Tabled).table(TableFrom::File(file.path().into())).symmetric_bytes(4 << 20);
        for deterministic in [false, true] {
            let options = tabled.clone().deterministic(deterministic);
            devices.run(world, &options, |rank| {
                let (input, output) = (rank.bytes(1 << 20), rank.bytes(1 << 20));
                let symmetric = [(); 2].map(|()| rank.communicator.symmetric_memory(1 << 20).unwrap());
                let state = rank.state(Verifier::EXACT);
                assert_eq!(rank.communicator.nccl().is_ok(), !deterministic);
                rank.meet();
                for border in [8 * KIB, 64 * KIB, 256 * KIB] {
                    for count in [border / 2 - 1, border / 2, border / 2 + 1] {
                        let addresses = [
                            (Placement::Anywhere, input.address, output.address),
                            (Placement::Anywhere, input.address, input.address),
                            (Placement::Symmetric, symmetric[0].address(), symmetric[1].address()),
                            (Placement::SymmetricInPlace, symmetric[0].address(), symmetric[0].address()),
                        ];
                        for (placement, input, output) in addresses {
                            let direct = placement != Placement::Anywhere;
                            let expected = match count * 2 {
                                bytes if bytes < 8 * KIB => Algorithm::OneShotLl,
                                bytes if bytes < 64 * KIB => Algorithm::OneShot,
                                bytes if bytes >= 256 * KIB && !deterministic => Algorithm::Nccl,
                                _ if direct => Algorithm::TwoShotDirect,
                                _ => Algorithm::TwoShot,
                            };
                            let (count, dtype) = (count as usize, DType::BF16);
                            let plan = rank.communicator.plan_at(placement, count, dtype).unwrap().unwrap();
                            assert_eq!(plan.algorithm, expected, "{count} {placement:?}");
                            let explained =
                                rank.communicator.explain_at(placement, 2 * count as u64, dtype).unwrap().unwrap();
                            let name = if expected == Algorithm::Nccl { "NCCL for" } else { expected.name() };
                            assert!(explained.to_string().starts_with(name), "{explained}");
                            // SAFETY: all have room for the most elements.
                            unsafe { rank.verified_call(input, output, count, dtype, ReduceOp::Sum, &state).unwrap() };
                        }
                    }
                }
                state.assert_right(rank, format_args!("{world} ranks, deterministic: {deterministic}"));
                rank.meet();
            });
        }
    }
}

/// Field case A37 (openxla/xla#47406): windows of memory of any size, and tensors anywhere in them.
#[test]
fn symmetric_memory_is_a_window_of_nccls() {
    let Some(devices) = devices() else { return };
    for bytes in [1, 4095, 4097, (2 << 20) + 1] {
        let options = options().algorithm(Algorithm::Nccl).symmetric_bytes(2 * bytes + 512);
        devices.run(2, &options, |rank| {
            assert_eq!(rank.communicator.nccl_window(), Ok(()), "{bytes} B");
            let memory = [(); 2].map(|()| rank.communicator.symmetric_memory(bytes).unwrap());
            let state = rank.state(Verifier::EXACT);
            rank.meet();
            let addresses = memory.each_ref().map(|memory| memory.address());
            // From the start, and from a part of it that no vector access fits.
            for start in [0, 4, 20].into_iter().filter(|start| start + 4 <= bytes) {
                let count = (bytes - start) / 4;
                for output in addresses {
                    let (input, output) = (addresses[0] + start as u64, output + start as u64);
                    // SAFETY: both have room for the elements.
                    unsafe { rank.verified_call(input, output, count, DType::F32, ReduceOp::Sum, &state).unwrap() };
                }
            }
            state.assert_right(rank, format_args!("{bytes} B"));
            rank.meet();
        });
    }
}

/// Field case A56 (NVIDIA/nccl#1716) and a machine without NCCL: who can go on without does, and knows why.
#[test]
fn without_nccl_the_rest_works() {
    let Some(devices) = harness::devices() else { return };
    let absent = || harness::options().table(TableFrom::Nowhere).nccl_library("/there/is/no/nccl");
    for options in [absent().nccl(Nccl::Required), absent().algorithm(Algorithm::Nccl)] {
        match Communicator::local(&devices.of(2), &options) {
            Err(Error::NcclUnavailable { reason }) => assert!(reason.contains("/there/is/no/nccl"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
    devices.run(2, &absent().nccl(Nccl::IfThere), |rank| {
        assert!(rank.communicator.nccl().unwrap_err().contains("/there/is/no/nccl"));
        rank.communicator.force(Some(Choice::NCCL)).unwrap();
        assert!(matches!(rank.communicator.plan(100, DType::F32), Err(Error::AlgorithmUnavailable { .. })));
        rank.communicator.force(None).unwrap();
        let sum = rank.all_reduce_values(&[rank.rank as f32 + 1.0; 100], ReduceOp::Sum);
        assert_eq!(sum, [3.0; 100]);
    });
}

/// A rank that doesn't come is named, and one that comes with another call: nobody waits in NCCL.
#[test]
fn the_gate_names_who_is_missing_or_elsewhere() {
    let Some(devices) = devices() else { return };
    for other_call in [false, true] {
        let impatient = options().timeout(Duration::from_secs(3)).algorithm(Algorithm::Nccl);
        let started = Instant::now();
        devices.run(2, &impatient, |rank| {
            let memory = rank.bytes(1 << 16);
            rank.meet();
            let count = if rank.rank == 1 { 5000 } else { 6000 };
            let stream = rank.raw_stream();
            let call = |rank: &mut Rank| {
                // SAFETY: the memory has room for the elements.
                unsafe {
                    rank.communicator.all_reduce_raw(
                        memory.address,
                        memory.address,
                        count,
                        DType::F32,
                        ReduceOp::Sum,
                        stream,
                    )
                }
            };
            if rank.rank == 0 || other_call {
                call(rank).unwrap();
            }
            // Rank 0's gate opens, with nothing reduced; NCCL's kernel behind it leaves as NCCL is aborted.
            rank.stream.synchronize().unwrap();
            rank.meet();
            let error = rank.communicator.check().unwrap_err();
            match &error {
                Error::PeerTimeout { rank: 0, peer: 1, phase: Phase::Gate, .. } if !other_call => {}
                Error::Mismatch { call, peer_call: Some(peer_call), .. } if other_call => {
                    assert_eq!(call.count() + peer_call.count(), 11_000);
                    assert!(error.to_string().contains("(nccl)"), "{error}");
                }
                _ => panic!("{error}"),
            }
            assert_eq!(call(rank).unwrap_err(), error);
            rank.meet();
        });
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        a_new_group_works(&devices, 2);
    }
}

/// Field case A72 (TensorRT-Model-Connect#540, pytorch/pytorch#115388): NCCL's destruction waits for graphs, so nobody may
/// wait for NCCL's. Either goes first, on this thread or on another; what is left works.
#[test]
fn graphs_and_communicators_go_in_any_order() {
    let Some(devices) = devices() else { return };
    for graph_first in [false, true] {
        for elsewhere in [false, true] {
            let started = Instant::now();
            devices.run(2, &options().algorithm(Algorithm::Nccl), |rank| {
                let mut buffers = Buffers::new();
                let tensor = buffers.hold(rank.upload(&[1.0f32; 1000]));
                let mut captured = buffers.capture(&rank.stream).unwrap();
                captured.all_reduce_in_place(&mut rank.communicator, tensor, ReduceOp::Sum).unwrap();
                let mut graph = captured.finish().unwrap();
                rank.meet();
                graph.launch().unwrap();
                rank.stream.synchronize().unwrap();
                rank.meet();
                let own = Communicator::local(&[rank.communicator.device()], &Options::default()).unwrap().remove(0);
                let communicator = std::mem::replace(&mut rank.communicator, own);
                let part = |value: Box<dyn FnOnce() + Send>| match elsewhere {
                    true => thread::scope(|scope| scope.spawn(value).join().unwrap()),
                    false => value(),
                };
                if !graph_first {
                    part(Box::new(|| drop(communicator)));
                    rank.meet();
                    // The graph has what it needs.
                    graph.launch().unwrap();
                    assert_eq!(rank.stream.clone_dtoh(&graph.buffer(tensor)).unwrap(), [4.0; 1000]);
                    rank.meet();
                    drop(graph);
                } else {
                    drop(graph);
                    rank.meet();
                    part(Box::new(|| drop(communicator)));
                }
                rank.meet();
            });
            assert!(started.elapsed() < Duration::from_secs(15), "{graph_first} {elsewhere}: {:?}", started.elapsed());
        }
    }
}

/// A graph of the caller's own that outlives the group: whose end doesn't wait for it.
#[test]
fn a_raw_graph_does_not_hold_up_the_end_of_a_group() {
    struct Kept(CudaGraph);
    // SAFETY: it goes to one thread, which drops it.
    unsafe impl Send for Kept {}
    let Some(devices) = devices() else { return };
    let graphs = devices.run(2, &options().algorithm(Algorithm::Nccl), |rank| {
        let memory = rank.bytes(4000);
        let graph = capture(rank, |rank| {
            // SAFETY: the memory has room for the elements, and the graph is launched while it lives.
            unsafe {
                let stream = rank.raw_stream();
                let call = rank.communicator.all_reduce_raw(
                    memory.address,
                    memory.address,
                    1000,
                    DType::F32,
                    ReduceOp::Max,
                    stream,
                );
                call.unwrap();
            }
        });
        rank.meet();
        graph.launch().unwrap();
        rank.stream.synchronize().unwrap();
        rank.meet();
        (Kept(graph), Instant::now())
    });
    for (graph, done) in graphs {
        assert!(done.elapsed() < Duration::from_secs(5), "{:?}", done.elapsed());
        drop(graph.0);
    }
    a_new_group_works(&devices, 2);
}

/// Replays after an abort return at once, with NCCL in the graph.
#[test]
fn replays_after_an_abort_return() {
    let Some(devices) = devices() else { return };
    devices.run(2, &options().algorithm(Algorithm::Nccl), |rank| {
        let memory = rank.bytes(1 << 20);
        let graph = capture(rank, |rank| {
            for _ in 0..5 {
                let stream = rank.raw_stream();
                // SAFETY: the memory has room for the elements, and outlives the graph.
                unsafe {
                    rank.communicator
                        .all_reduce_raw(memory.address, memory.address, 1 << 18, DType::F32, ReduceOp::Max, stream)
                        .unwrap();
                }
            }
        });
        rank.meet();
        graph.launch().unwrap();
        rank.stream.synchronize().unwrap();
        rank.meet();
        rank.communicator.abort();
        rank.meet();
        // NCCL's communicators are aborted by now.
        thread::sleep(Duration::from_millis(200));
        let started = Instant::now();
        for _ in 0..10 {
            graph.launch().unwrap();
        }
        rank.stream.synchronize().unwrap();
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
        assert_eq!(rank.communicator.check(), Err(Error::Aborted { by: None }));
        rank.meet();
        drop(graph);
        rank.meet();
    });
    a_new_group_works(&devices, 2);
}

/// What an engine has: a communicator of its own, made by NCCL's plain interface.
struct Engine {
    borrowed: Borrowed,
    comm: Mutex<Option<Comm>>,
    functions: Arc<Functions>,
    /// Calls that it makes; behind them it says that it has enqueued, and has not: a rank that is lost between the gate and
    /// NCCL.
    calls: AtomicUsize,
}

struct Comm(*mut c_void);
// SAFETY: NCCL's communicators may be used from any thread, one at a time.
unsafe impl Send for Comm {}

#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([c_char; 128]);

struct Functions {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int) -> c_int,
    abort: unsafe extern "C" fn(*mut c_void) -> c_int,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
}

impl Functions {
    fn load(library: &Library) -> Functions {
        // SAFETY: it is loaded already; the types are those of nccl.h. It is never unloaded.
        unsafe {
            let loaded = std::mem::ManuallyDrop::new(libloading::Library::new(library.name()).unwrap());
            Functions {
                unique_id: *loaded.get(b"ncclGetUniqueId\0").unwrap(),
                init: *loaded.get(b"ncclCommInitRank\0").unwrap(),
                abort: *loaded.get(b"ncclCommAbort\0").unwrap(),
                destroy: *loaded.get(b"ncclCommDestroy\0").unwrap(),
            }
        }
    }
}

// SAFETY: calls are the borrowed communicator's, or none at all, which ends at once.
unsafe impl AllReduce for Engine {
    fn version(&self) -> Version {
        self.borrowed.version()
    }

    unsafe fn all_reduce(
        &self,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: *mut c_void,
    ) -> peersum::Result<()> {
        if self.calls.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
            return Ok(());
        }
        // SAFETY: as the caller vouches.
        unsafe { self.borrowed.all_reduce(input, output, count, dtype, op, stream) }
    }

    fn async_error(&self) -> peersum::Result<()> {
        self.borrowed.async_error()
    }

    fn abort(&self) {
        self.borrowed.abort();
        if let Some(comm) = self.comm.lock().unwrap().take() {
            let functions = self.functions.clone();
            thread::spawn(move || {
                let comm = comm;
                // SAFETY: the communicator is alive, and nobody has it any more.
                unsafe { (functions.abort)(comm.0) }
            });
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(comm) = self.comm.get_mut().unwrap().take() {
            let functions = self.functions.clone();
            thread::spawn(move || {
                let comm = comm;
                // SAFETY: as above.
                unsafe { (functions.destroy)(comm.0) }
            });
        }
    }
}

/// The last rank makes so many calls.
fn engines(devices: &Devices, world: usize, calls: usize) -> Vec<Arc<dyn AllReduce>> {
    let library = Library::open(library().as_deref()).unwrap();
    let functions = Arc::new(Functions::load(&library));
    let mut id = UniqueId([0; 128]);
    // SAFETY: the place has the size of an id.
    assert_eq!(unsafe { (functions.unique_id)(&mut id) }, 0);
    thread::scope(|scope| {
        let ranks = devices.of(world).into_iter().enumerate().map(|(rank, device)| {
            let (functions, library) = (functions.clone(), library.clone());
            scope.spawn(move || {
                harness::stream(device, rank).context().bind_to_thread().unwrap();
                let mut comm = ptr::null_mut();
                // SAFETY: the context is current, the id is the group's, the place is one for a communicator.
                assert_eq!(unsafe { (functions.init)(&mut comm, world as c_int, id, rank as c_int) }, 0);
                // SAFETY: the communicator is of this library, and is ended only by `Engine`.
                let borrowed = unsafe { Borrowed::new(library, comm, rank, world, Duration::from_secs(10)).unwrap() };
                let comm = Mutex::new(Some(Comm(comm)));
                let calls = AtomicUsize::new(if rank == world - 1 { calls } else { usize::MAX });
                Arc::new(Engine { borrowed, comm, functions, calls }) as Arc<dyn AllReduce>
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn an_engines_own_communicator_serves() {
    let Some(devices) = devices() else { return };
    let options = options().algorithm(Algorithm::Nccl);
    let engines = engines(&devices, 2, usize::MAX);
    let communicators = Communicator::local_with_nccl(&devices.of(2), &options, engines.clone()).unwrap();
    devices.run_with(communicators, |rank| {
        let memory = rank.bytes(1 << 20);
        let state = rank.state(Verifier::EXACT);
        rank.meet();
        for count in [1, 1000, 1 << 18] {
            // SAFETY: the memory has room for the elements.
            unsafe {
                rank.verified_call(memory.address, memory.address, count, DType::F32, ReduceOp::Sum, &state).unwrap();
            }
        }
        state.assert_right(rank, "the engine's");
        rank.meet();
    });
    // The group is gone, the engine's communicators are not.
    assert!(engines.iter().all(|engine| engine.async_error().is_ok()));
    let wrong = Communicator::local_with_nccl(&devices.of(2), &options, engines[..1].to_vec());
    assert!(matches!(wrong, Err(Error::NcclUnavailable { .. })), "{wrong:?}");
}

/// A rank that passes the gate and never comes to NCCL: an abort ends NCCL's waits too.
#[test]
fn an_abort_ends_waits_in_nccl() {
    let Some(devices) = devices() else { return };
    let options = options().algorithm(Algorithm::Nccl);
    let communicators = Communicator::local_with_nccl(&devices.of(2), &options, engines(&devices, 2, 1)).unwrap();
    devices.run_with(communicators, |rank| {
        let memory = rank.bytes(1 << 20);
        rank.meet();
        let stream = rank.raw_stream();
        let mut call = || {
            // SAFETY: the memory has room for the elements.
            let called = unsafe {
                rank.communicator.all_reduce_raw(
                    memory.address,
                    memory.address,
                    1 << 18,
                    DType::F32,
                    ReduceOp::Sum,
                    stream,
                )
            };
            called.unwrap();
        };
        // At the first call NCCL's hosts wait for each other.
        call();
        call();
        if rank.rank == 1 {
            rank.stream.synchronize().unwrap();
            thread::sleep(Duration::from_millis(300));
            rank.communicator.abort();
        }
        let started = Instant::now();
        rank.stream.synchronize().unwrap();
        if rank.rank == 0 {
            // It has waited in NCCL until then.
            assert!(started.elapsed() > Duration::from_millis(200), "{:?}", started.elapsed());
        }
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        assert_eq!(rank.communicator.check(), Err(Error::Aborted { by: None }));
        rank.meet();
    });
    a_new_group_works(&devices, 2);
}

/// The context lives on behind all of it.
#[test]
fn the_context_is_alive() {
    let Some(_devices) = harness::devices() else { return };
    let stream = harness::stream(0, 0);
    stream.context().bind_to_thread().unwrap();
    // SAFETY: the context is current.
    assert_eq!(unsafe { sys::cuCtxSynchronize() }, sys::CUresult::CUDA_SUCCESS);
}
