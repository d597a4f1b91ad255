//! Ranks that are threads, with a stand-in for NCCL that computes on host memory. Its copies are of one test each.

use std::{
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use nccl_stub::{Call, Count, Stub, When, variants};

use super::{
    AllReduce, Borrowed, Library,
    communicator::Communicator,
    join::{Agreed, Declined, Registered, Settings, WarmUp, join},
};
use crate::{
    Element, Error, Meeting, ReduceOp, Result,
    meeting::{Local, Seat},
};

/// NCCL's numbers.
const UNHANDLED_CUDA_ERROR: i32 = 1;
const INTERNAL_ERROR: i32 = 3;
const INVALID_ARGUMENT: i32 = 4;
const REMOTE_ERROR: i32 = 6;
const NOT_YET_INITIALIZED: &str = "Cuda failure 802 'system not yet initialized'";

/// Longer than anything here takes on a busy machine.
const LONG: Duration = Duration::from_secs(20);
/// For ranks of which one hangs.
const SHORT: Duration = Duration::from_millis(400);

fn settings(timeout: Duration) -> Settings {
    Settings { environment: |_| None, ..Settings::new(timeout) }
}

fn library(stub: &Stub) -> Result<Arc<Library>> {
    Library::open(Some(stub.path()))
}

/// Runs every rank on a thread of its own.
fn ranks<T: Send>(world: usize, timeout: Duration, rank: impl Fn(&mut Seat) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let seats = Local::group(world, timeout).into_iter().map(Seat::Threads);
        let rank = &rank;
        let threads: Vec<_> = seats.map(|mut seat| scope.spawn(move || rank(&mut seat))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The same, with seats among processes, which speak by sockets: they don't know that all are in one.
fn processes<T: Send>(world: usize, timeout: Duration, rank: impl Fn(&mut Seat) -> T + Sync) -> Vec<T> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("peersum-nccl-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    std::thread::scope(|scope| {
        let (rank, path) = (&rank, &path);
        let run = move |number: usize| {
            let meeting = Meeting::at_path(path, number, world).timeout(LONG);
            rank(&mut meeting.open(timeout).unwrap())
        };
        let threads: Vec<_> = (0..world).map(|number| scope.spawn(move || run(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What every rank's `join` gives.
fn join_all(stub: &Stub, world: usize, timeout: Duration) -> Vec<Agreed<Communicator>> {
    ranks(world, timeout, |seat| join(seat, &library(stub), &settings(timeout)).unwrap())
}

fn joined(stub: &Stub, world: usize) -> Vec<Communicator> {
    join_all(stub, world, LONG).into_iter().map(|joined| joined.unwrap()).collect()
}

/// The one reason that all ranks have.
fn declined<T: std::fmt::Debug>(all: Vec<Agreed<T>>) -> Declined {
    let mut reasons = all.into_iter().map(|one| one.expect_err("no rank goes on"));
    let first = reasons.next().unwrap();
    assert!(reasons.all(|reason| reason == first), "all ranks have the same reason");
    first
}

fn reduce<T: Element>(communicator: &dyn AllReduce, tensor: &mut [T], op: ReduceOp) -> Result<()> {
    let address = tensor.as_mut_ptr() as u64;
    // SAFETY: the stub takes host memory and needs no stream. The callers let the tensor live until all ranks have
    // called.
    unsafe { communicator.all_reduce(address, address, tensor.len(), T::DTYPE, op, ptr::null_mut()) }
}

/// Waits for what a thread does that nobody waits for.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Memory to register: pages that belong to nothing else.
struct Pages {
    address: u64,
    layout: std::alloc::Layout,
}

impl Pages {
    fn new(bytes: usize) -> Pages {
        let layout = std::alloc::Layout::from_size_align(bytes, 4096).unwrap();
        // SAFETY: the size is not 0.
        Pages { address: unsafe { std::alloc::alloc_zeroed(layout) } as u64, layout }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it with this layout.
        unsafe { std::alloc::dealloc(self.address as *mut u8, self.layout) }
    }
}

/// A rank that can warm up.
fn with_scratch<T>(rank: impl FnOnce(WarmUp) -> T) -> T {
    let mut scratch = 1f32;
    rank(WarmUp { bytes: 4, scratch: (&raw mut scratch) as u64, stream: ptr::null_mut() })
}

fn register(communicator: &Communicator, seat: &mut Seat, pages: &Pages, range: [usize; 2]) -> Result<Registered> {
    with_scratch(|warm| {
        // SAFETY: the stub registers any memory; it is there until all ranks are done, and the scratch until all have
        // returned from the meeting that follows a warm-up.
        unsafe { communicator.register(seat, pages.address + range[0] as u64, range[1], warm) }
    })
}

fn warm_up(communicator: &Communicator, seat: &mut Seat) -> Agreed<()> {
    // SAFETY: the scratch is there until all ranks have met after their calls.
    with_scratch(|warm| unsafe { communicator.warm_up(seat, warm) }).unwrap()
}

/// Rank r holds r + 1 everywhere.
fn check<T: Element>(communicators: &[Communicator], op: ReduceOp, expected: f32) {
    let mut tensors: Vec<_> = (1..=communicators.len()).map(|rank| vec![T::from_f32(rank as f32); 33]).collect();
    std::thread::scope(|scope| {
        for (communicator, tensor) in communicators.iter().zip(&mut tensors) {
            scope.spawn(move || reduce(communicator, tensor, op).unwrap());
        }
    });
    let right = |tensor: &Vec<T>| tensor.iter().all(|value| value.to_f32() == expected);
    assert!(tensors.iter().all(right), "{op} of {} ranks in {}", communicators.len(), T::DTYPE);
}

#[test]
fn the_results_are_those_of_all_ranks() {
    let stub = Stub::new(variants::V2_32);
    for world in [1, 2, 4] {
        let communicators = joined(&stub, world);
        for op in ReduceOp::ALL {
            let expected = match op {
                ReduceOp::Sum => (1..=world).sum::<usize>() as f32,
                ReduceOp::Average => (1..=world).sum::<usize>() as f32 / world as f32,
                ReduceOp::Max => world as f32,
                ReduceOp::Min => 1.0,
            };
            check::<f32>(&communicators, op, expected);
            check::<half::f16>(&communicators, op, expected);
            check::<half::bf16>(&communicators, op, expected);
        }
    }
    assert_eq!((stub.count(Count::Inits), stub.count(Count::Destroys)), (7, 7));
    assert_eq!((stub.count(Count::Aborts), stub.count(Count::Misuses)), (0, 0));
}

#[test]
fn the_most_blocks_are_handed_on() {
    let stub = Stub::new(variants::V2_18);
    drop(joined(&stub, 2));
    assert_eq!(stub.max_ctas(), i32::MIN);
    ranks(2, LONG, |seat| {
        let settings = Settings { max_blocks: Some(8), ..settings(LONG) };
        drop(join(seat, &library(&stub), &settings).unwrap().unwrap());
    });
    assert_eq!(stub.max_ctas(), 8);
}

#[test]
fn ranks_without_a_library_or_with_another_are_named() {
    let stub = Stub::new(variants::V2_32);
    let reason = declined(ranks(3, LONG, |seat| {
        let none = Err(Error::NcclUnavailable { reason: "it was not installed".into() });
        let library = if seat.rank() == 1 { none } else { library(&stub) };
        join(seat, &library, &settings(LONG)).unwrap().map(drop)
    }));
    assert_eq!(reason, Declined { rank: 1, reason: "rank 1: it was not installed".into() });
    assert_eq!(Error::from(reason).to_string(), "NCCL is not available: rank 1: it was not installed");

    let other = Stub::new(variants::V2_27);
    let reason = declined(ranks(3, LONG, |seat| {
        let library = library(if seat.rank() == 2 { &other } else { &stub });
        join(seat, &library, &settings(LONG)).unwrap().map(drop)
    }));
    assert_eq!(reason.rank, 2);
    assert!(reason.reason.contains("2.27.3") && reason.reason.contains("2.32.3"), "{reason}");
    assert_eq!((stub.count(Count::Ids), stub.count(Count::Inits)), (0, 0));
}

/// Field case A56 (NVIDIA/nccl#1716): several ranks on one device.
#[test]
fn sharing_is_refused_on_all_ranks_before_any_init() {
    let join_sharing = |stub: &Stub, environment| {
        ranks(2, LONG, |seat| {
            let settings = Settings { sharing: seat.rank() == 1, environment, ..settings(LONG) };
            join(seat, &library(stub), &settings).unwrap().map(drop)
        })
    };
    let (new, old) = (Stub::new(variants::V2_30), Stub::new(variants::V2_27));
    let enabled = |name: &str| (name == "NCCL_MULTI_RANK_GPU_ENABLE").then(|| "1".into());
    let reason = declined(join_sharing(&new, |_| None));
    assert!(reason.rank == 1 && reason.reason.contains("NCCL_MULTI_RANK_GPU_ENABLE=1"), "{reason}");
    let reason = declined(join_sharing(&old, enabled));
    assert!(reason.reason.contains("this is 2.27.3"), "{reason}");
    assert_eq!((new.count(Count::Inits), old.count(Count::Inits)), (0, 0));
    assert!(join_sharing(&new, enabled).iter().all(Result::is_ok));
}

/// Field case A59 (pie-project/pie#500): NVLS multicast can't be set up.
#[test]
fn an_init_that_fails_is_told_to_all_with_nccls_words_and_a_hint() {
    for when in [When::AtOnce, When::Later] {
        let stub = Stub::new(variants::V2_32);
        stub.fail(Call::Init, 1, UNHANDLED_CUDA_ERROR, 1, when, "Failed to bind NVLink SHARP (NVLS) Multicast memory");
        // As in NCCL, the others wait for the rank that has failed; they hear of it at once nevertheless.
        [0, 2, 3].into_iter().for_each(|rank| stub.hang_init(rank, true));
        let started = Instant::now();
        let reason = declined(join_all(&stub, 4, LONG).into_iter().map(|joined| joined.map(drop)).collect());
        assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
        assert_eq!(reason.rank, 1);
        for words in
            ["rank 1", "ncclCommInitRankConfig", "ncclUnhandledCudaError (1)", "unhandled cuda error", "NVLink SHARP"]
        {
            assert!(reason.reason.contains(words), "{words} is not in: {reason}");
        }
        for words in ["NCCL_NVLS_ENABLE=0", "NCCL_DEBUG=WARN"] {
            assert!(reason.reason.contains(words), "{words} is not in: {reason}");
        }
        // Those that wait in NCCL are left to it, and ended once they are made: never, if a rank never comes.
        [0, 2, 3].into_iter().for_each(|rank| stub.hang_init(rank, false));
        let (made, aborted) = if matches!(when, When::Later) { (4, 4) } else { (3, 0) };
        eventually("all that were made are aborted", || stub.count(Count::Aborts) == aborted);
        assert_eq!((stub.count(Count::Inits), stub.count(Count::Destroys)), (made, 0));
        assert_eq!((stub.count(Count::Ids), stub.count(Count::Misuses)), (1, 0));
    }
}

/// By messages and words that processes have between them.
#[test]
fn ranks_that_are_processes_join_alike_and_are_told_alike() {
    let stub = Stub::new(variants::V2_32);
    let join_by_sockets = |world| -> Vec<Agreed<Communicator>> {
        processes(world, LONG, |seat| join(seat, &library(&stub), &settings(LONG)).unwrap())
    };
    let communicators: Vec<_> = join_by_sockets(3).into_iter().map(|joined| joined.unwrap()).collect();
    check::<f32>(&communicators, ReduceOp::Sum, 6.0);
    drop(communicators);
    assert_eq!((stub.count(Count::Destroys), stub.count(Count::Misuses)), (3, 0));

    stub.fail(Call::Init, 1, INTERNAL_ERROR, 1, When::AtOnce, "out of luck");
    [0, 2].into_iter().for_each(|rank| stub.hang_init(rank, true));
    let started = Instant::now();
    let reason = declined(join_by_sockets(3).into_iter().map(|joined| joined.map(drop)).collect());
    assert!(reason.rank == 1 && reason.reason.contains("out of luck"), "{reason}");
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    [0, 2].into_iter().for_each(|rank| stub.hang_init(rank, false));
}

/// As of a process that is gone, which whoever looks after the group finds out.
#[test]
fn an_init_is_not_waited_for_once_the_group_has_ended() {
    let stub = Stub::new(variants::V2_32);
    stub.hang_init(1, true);
    let started = Instant::now();
    let soon = || -> Arc<dyn Fn() -> bool + Send + Sync> {
        let started = Instant::now();
        Arc::new(move || started.elapsed() > LONG / 40)
    };
    let all = processes(2, LONG, |seat| {
        join(seat, &library(&stub), &Settings { over: soon(), ..settings(LONG) }).unwrap().map(drop)
    });
    assert!(declined(all).reason.contains("stopped waiting for NCCL"));
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    stub.hang_init(1, false);
}

#[test]
fn ranks_that_are_processes_register_windows_alike() {
    let stub = Stub::new(variants::V2_32);
    const BYTES: usize = 16384;
    let pages: Vec<_> = (0..2).map(|_| Pages::new(BYTES)).collect();
    let registered = processes(2, LONG, |seat| {
        let communicator = join(seat, &library(&stub), &settings(LONG)).unwrap().unwrap();
        warm_up(&communicator, seat).unwrap();
        let pages = &pages[seat.rank()];
        let whole = [0, BYTES];
        let results = [whole, whole, [0, BYTES / 2]].map(|range| register(&communicator, seat, pages, range));
        // Nobody goes while another is still here.
        seat.all_gather(()).unwrap();
        results
    });
    for [first, again, within] in registered {
        assert_eq!((first.unwrap(), again.unwrap()), (Registered::Window, Registered::Window));
        assert!(matches!(within, Err(Error::NcclRegistration { rank: 0, .. })), "{within:?}");
    }
}

#[test]
fn a_unique_id_that_cannot_be_made_is_told_to_all() {
    let stub = Stub::new(variants::V2_32);
    stub.fail(Call::UniqueId, 0, 2, 1, When::AtOnce, "no socket interface found");
    let reason = declined(join_all(&stub, 2, LONG).into_iter().map(|joined| joined.map(drop)).collect());
    assert!(reason.rank == 0 && reason.reason.contains("no socket interface found"), "{reason}");
}

#[test]
fn an_init_that_hangs_ends_at_the_deadline_for_all() {
    let stub = Stub::new(variants::V2_32);
    stub.hang_init(2, true);
    let started = Instant::now();
    let reason = declined(join_all(&stub, 4, SHORT).into_iter().map(|joined| joined.map(drop)).collect());
    assert!(started.elapsed() >= SHORT / 4 * 3);
    assert_eq!(reason.rank, 2);
    assert!(reason.reason.contains("ncclCommInitRankConfig of rank 2 was not over after"), "{reason}");
    eventually("the others are aborted", || stub.count(Count::Aborts) == 3);
    // Nobody touches what is being made; if it ever is, it is ended.
    stub.hang_init(2, false);
    eventually("all are aborted", || stub.count(Count::Aborts) == 4);
    assert_eq!((stub.count(Count::Destroys), stub.count(Count::Misuses)), (0, 0));
}

/// As of a NCCL that waits in the call itself.
#[test]
fn an_init_call_that_does_not_return_ends_at_the_deadline_for_all() {
    let stub = Stub::new(variants::V2_32);
    stub.block_init(1, true);
    let reason = declined(join_all(&stub, 3, SHORT).into_iter().map(|joined| joined.map(drop)).collect());
    // All wait in NCCL, which doesn't say for whom.
    let words = format!("ncclCommInitRankConfig of rank {} was not over after", reason.rank);
    assert!(reason.reason.contains(&words), "{reason}");
    assert_eq!((stub.count(Count::Inits), stub.count(Count::Aborts)), (2, 0));
    // The others wait for it in NCCL. When it is there at last, all that were made are ended.
    stub.block_init(1, false);
    eventually("all are aborted", || stub.count(Count::Aborts) == 3);
    assert_eq!((stub.count(Count::Destroys), stub.count(Count::Misuses)), (0, 0));
}

/// Field case A60 (meta-pytorch/torchcomms#3130): CUDA 802, which passes.
#[test]
fn error_802_is_tried_once_more_by_all_ranks_together() {
    let stub = Stub::new(variants::V2_32);
    for rank in [1, 3] {
        stub.fail(Call::Init, rank, UNHANDLED_CUDA_ERROR, 1, When::Later, NOT_YET_INITIALIZED);
    }
    let communicators = joined(&stub, 4);
    assert_eq!((communicators.len(), stub.count(Count::Ids), stub.count(Count::Inits)), (4, 2, 8));
    eventually("the first four are aborted", || stub.count(Count::Aborts) == 4);
    drop(communicators);
    assert_eq!((stub.count(Count::Destroys), stub.count(Count::Misuses)), (4, 0));
}

/// Field case A60: CUDA 802, which stays.
#[test]
fn error_802_that_stays_lets_all_ranks_do_without() {
    let stub = Stub::new(variants::V2_32);
    for rank in [1, 3] {
        stub.fail(Call::Init, rank, UNHANDLED_CUDA_ERROR, i32::MAX, When::Later, NOT_YET_INITIALIZED);
    }
    let reason = declined(join_all(&stub, 4, LONG).into_iter().map(|joined| joined.map(drop)).collect());
    assert!(reason.reason.contains("802") && reason.reason.contains("fabric manager"), "{reason}");
    assert_eq!((stub.count(Count::Ids), stub.count(Count::Inits)), (2, 8));
    eventually("all are aborted", || stub.count(Count::Aborts) == 8);
}

/// Field case A60: any other error is not tried again.
#[test]
fn another_error_is_final() {
    let stub = Stub::new(variants::V2_32);
    stub.fail(Call::Init, 1, INTERNAL_ERROR, 1, When::Later, "Cuda failure 700 'an illegal memory access'");
    let reason = declined(join_all(&stub, 4, LONG).into_iter().map(|joined| joined.map(drop)).collect());
    assert_eq!((reason.rank, stub.count(Count::Ids)), (1, 1));
    assert!(!reason.reason.contains("NCCL_NVLS_ENABLE"), "{reason}");
}

/// Field case A57 (pytorch/pytorch#188567): registration before the first collective.
#[test]
fn windows_are_registered_behind_a_warm_up() {
    let stub = Stub::new(variants::V2_32);
    stub.lazy_windows(true);
    for warm in [true, false] {
        ranks(2, LONG, |seat| {
            let communicator = join(seat, &library(&stub), &settings(LONG)).unwrap().unwrap();
            let pages = Pages::new(8192);
            if warm {
                warm_up(&communicator, seat).unwrap();
            }
            // Without, it is refused once, and then the library warms up by itself.
            assert_eq!(register(&communicator, seat, &pages, [0, 8192]), Ok(Registered::Window));
            seat.all_gather(()).unwrap();
            communicator.deregister(pages.address, 8192).unwrap();
        });
    }
    assert_eq!((stub.count(Count::Registers), stub.count(Count::Deregisters)), (4, 4));
    assert_eq!((stub.count(Count::AllReduces), stub.count(Count::Misuses)), (4, 0));
}

/// Field case A57: registration that never works.
#[test]
fn ranks_do_without_windows_where_one_has_none() {
    let stub = Stub::new(variants::V2_32);
    stub.fail(Call::Register, 1, INVALID_ARGUMENT, i32::MAX, When::AtOnce, "out of address space");
    let reasons = ranks(3, LONG, |seat| {
        let communicator = join(seat, &library(&stub), &settings(LONG)).unwrap().unwrap();
        warm_up(&communicator, seat).unwrap();
        let pages = Pages::new(4096);
        let registered = register(&communicator, seat, &pages, [0, 4096]).unwrap();
        let Registered::NoWindow(reason) = registered else { panic!("{registered:?}") };
        let mut tensor = vec![1f32; 10];
        reduce(&communicator, &mut tensor, ReduceOp::Sum).unwrap();
        seat.all_gather(()).unwrap();
        assert_eq!(tensor, [3.0; 10]);
        Err::<(), _>(reason)
    });
    let reason = declined(reasons);
    assert!(reason.rank == 1 && reason.reason.contains("out of address space"), "{reason}");
    // Both tries, on the ranks where it works.
    assert_eq!((stub.count(Count::Registers), stub.count(Count::Deregisters)), (4, 4));
    assert_eq!((stub.count(Count::Destroys), stub.count(Count::Misuses)), (3, 0));

    let old = Stub::new(variants::V2_18);
    ranks(2, LONG, |seat| {
        let communicator = join(seat, &library(&old), &settings(LONG)).unwrap().unwrap();
        let registered = register(&communicator, seat, &Pages::new(4096), [0, 4096]).unwrap();
        let Registered::NoWindow(reason) = registered else { panic!("{registered:?}") };
        assert!(reason.reason.contains("NCCL 2.18.0 has no windows"), "{reason}");
    });
}

/// An error that NCCL keeps for a communicator, as non-blocking ones do, ends it.
#[test]
fn a_communicator_that_registering_has_broken_is_lost_on_all_ranks() {
    let stub = Stub::new(variants::V2_32);
    stub.fail(Call::Register, 0, INTERNAL_ERROR, 1, When::Later, "");
    ranks(2, LONG, |seat| {
        let communicator = join(seat, &library(&stub), &settings(LONG)).unwrap().unwrap();
        warm_up(&communicator, seat).unwrap();
        let pages = Pages::new(4096);
        let registered = register(&communicator, seat, &pages, [0, 4096]).unwrap();
        assert!(matches!(&registered, Registered::Lost(reason) if reason.rank == 0), "{registered:?}");
        assert_eq!(communicator.async_error(), Err(Error::Aborted { by: None }));
        // A new one works.
        let communicator = join(seat, &library(&stub), &settings(LONG)).unwrap().unwrap();
        warm_up(&communicator, seat).unwrap();
    });
    eventually("the first two are aborted", || stub.count(Count::Aborts) == 2);
    assert_eq!((stub.count(Count::Destroys), stub.count(Count::Misuses)), (2, 0));
}

/// Field case A58 (NVIDIA/nccl#2331): the same buffer again and again.
#[test]
fn registering_one_range_again_takes_nothing() {
    let stub = Stub::new(variants::V2_32);
    ranks(2, LONG, |seat| {
        let communicator = join(seat, &library(&stub), &settings(LONG)).unwrap().unwrap();
        let pages = Pages::new(4096);
        for _ in 0..2 {
            for _ in 0..2500 {
                assert_eq!(register(&communicator, seat, &pages, [0, 4096]), Ok(Registered::Window));
            }
            for _ in 0..2500 {
                communicator.deregister(pages.address, 4096).unwrap();
            }
            // More than a communicator has room for, had any stayed.
            for _ in 0..2500 {
                assert_eq!(register(&communicator, seat, &pages, [0, 4096]), Ok(Registered::Window));
                communicator.deregister(pages.address, 4096).unwrap();
            }
            let error = communicator.deregister(pages.address, 4096).unwrap_err();
            assert!(matches!(error, Error::NcclRegistration { .. }) && error.is_recoverable(), "{error}");
        }
    });
    let [registers, deregisters] = [Count::Registers, Count::Deregisters].map(|count| stub.count(count));
    assert_eq!((registers, deregisters, stub.count(Count::Misuses)), (2 * 2 * 2501, 2 * 2 * 2501, 0));
}

/// Field case A58: ranges that overlap. And A37 (openxla/xla#47406): ranges that are not aligned.
#[test]
fn ranges_that_overlap_or_are_not_aligned_are_errors_on_all_ranks() {
    let stub = Stub::new(variants::V2_32);
    ranks(2, LONG, |seat| {
        let communicator = join(seat, &library(&stub), &settings(LONG)).unwrap().unwrap();
        let pages = Pages::new(4 * 4096);
        let mut register = |range| register(&communicator, seat, &pages, range);
        assert_eq!(register([4096, 8192]), Ok(Registered::Window));
        for (range, words) in [
            ([0, 4097], "overlap"),
            ([8192, 4096], "overlap"),
            ([0, 4 * 4096], "overlap"),
            ([4096, 8191], "overlap"),
            ([12288 + 256, 256], "multiple of 4096"),
            ([0, 0], "no memory"),
        ] {
            let error = register(range).unwrap_err();
            assert!(matches!(&error, Error::NcclRegistration { rank: 0, reason } if reason.contains(words)), "{error}");
        }
        for range in [[0, 4095], [12288, 1]] {
            assert_eq!(register(range), Ok(Registered::Window));
        }
        let bytes = if seat.rank() == 1 { 1000 } else { 1001 };
        let error = self::register(&communicator, seat, &pages, [12288 - 4096, bytes]).unwrap_err();
        assert!(matches!(error, Error::NcclRegistration { .. }), "{error}");
    });
    assert_eq!((stub.count(Count::Registers), stub.count(Count::Misuses)), (6, 0));
}

/// Field case A58 (pytorch/pytorch#181610): communicators that end with windows alive.
#[test]
fn windows_end_with_their_communicator_whoever_frees_them() {
    for (variant, nccl_frees) in [(variants::V2_32, true), (variants::V2_27, false)] {
        for abort in [false, true] {
            let stub = Stub::new(variant);
            let pages = [Pages::new(8192), Pages::new(8192)];
            ranks(2, LONG, |seat| {
                let communicator = join(seat, &library(&stub), &settings(LONG)).unwrap().unwrap();
                for _ in 0..3 {
                    register(&communicator, seat, &pages[seat.rank()], [0, 4096]).unwrap();
                    register(&communicator, seat, &pages[seat.rank()], [4096, 4096]).unwrap();
                }
                if abort {
                    communicator.abort();
                }
            });
            eventually("both have ended", || stub.count(Count::Aborts) + stub.count(Count::Destroys) == 2);
            assert_eq!(stub.count(Count::Aborts), if abort { 2 } else { 0 });
            assert_eq!((stub.count(Count::Registers), stub.count(Count::Misuses)), (4, 0));
            let freed = (stub.count(Count::Deregisters), stub.count(Count::Reclaimed));
            // Of an old version's aborted communicator they stay: nobody can know before that nothing uses them.
            let expected = match (nccl_frees, abort) {
                (true, _) => (0, 4),
                (false, false) => (4, 0),
                (false, true) => (0, 0),
            };
            assert_eq!(freed, expected, "abort: {abort}");
        }
    }
}

#[test]
fn errors_that_nccl_finds_later_are_typed() {
    let stub = Stub::new(variants::V2_32);
    let communicators = joined(&stub, 2);
    assert_eq!(communicators[0].async_error(), Ok(()));
    stub.async_error(1, REMOTE_ERROR, "socket closed by peer");
    assert_eq!(communicators[0].async_error(), Ok(()));
    let error = communicators[1].async_error().unwrap_err();
    assert!(
        matches!(&error, Error::Nccl { rank: 1, code: REMOTE_ERROR, name, description, hint: None, .. }
            if name == "ncclRemoteError" && description.contains("remote error") && description.contains("by peer")),
        "{error}"
    );
    assert!(!error.is_recoverable());
    communicators.iter().for_each(AllReduce::abort);
    assert_eq!(communicators[1].async_error(), Err(Error::Aborted { by: None }));
}

/// A call that waits for other ranks inside NCCL: an abort gives it a moment, and then ends its wait.
#[test]
fn an_abort_ends_a_call_that_does_not_return() {
    let stub = Stub::new(variants::V2_32);
    let communicators = joined(&stub, 1);
    stub.polls(i32::MAX);
    let communicator = &communicators[0];
    std::thread::scope(|scope| {
        let call = scope.spawn(|| reduce(communicator, &mut [1f32], ReduceOp::Sum));
        eventually("the call has begun", || stub.count(Count::AllReduces) == 1);
        let started = Instant::now();
        for _ in 0..3 {
            communicator.abort();
        }
        assert!(started.elapsed() < Duration::from_millis(500), "{:?}", started.elapsed());
        let error = call.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Nccl { call: "ncclAllReduce", .. }) && !error.is_recoverable(), "{error}");
        assert!(started.elapsed() > Duration::from_millis(800), "it had no moment: {:?}", started.elapsed());
    });
    assert_eq!(reduce(communicator, &mut [1f32], ReduceOp::Sum), Err(Error::Aborted { by: None }));
    drop(communicators);
    assert_eq!((stub.count(Count::Aborts), stub.count(Count::Destroys), stub.count(Count::Misuses)), (1, 0, 0));
}

/// Field case A72 (NVIDIA/TensorRT-Model-Connect#540): NCCL's end waits while captured graphs live.
#[test]
fn dropping_and_aborting_do_not_wait_for_an_end_that_does_not_come() {
    let stub = Stub::new(variants::V2_32);
    let kept: Arc<()> = Arc::default();
    let mut communicators = ranks(2, LONG, |seat| {
        let settings = Settings { keep: Some(kept.clone()), ..settings(LONG) };
        join(seat, &library(&stub), &settings).unwrap().unwrap()
    });
    stub.block_end(true);
    let started = Instant::now();
    communicators[1].abort();
    drop(communicators.pop());
    assert!(started.elapsed() < Duration::from_millis(400), "{:?}", started.elapsed());
    drop(communicators);
    assert!(started.elapsed() < LONG / 2, "{:?}", started.elapsed());
    // What NCCL may still use is there, however long it takes.
    assert_eq!((Arc::strong_count(&kept), stub.count(Count::Destroys), stub.count(Count::Aborts)), (3, 0, 0));
    stub.block_end(false);
    eventually("both are gone", || Arc::strong_count(&kept) == 1);
    assert_eq!((stub.count(Count::Destroys), stub.count(Count::Aborts), stub.count(Count::Misuses)), (1, 1, 0));
}

/// Field case A73 (sgl-project/sglang#33434): the others, and what they met by, are gone before.
#[test]
fn dropping_needs_nobody_else() {
    let stub = Stub::new(variants::V2_32);
    for order in [[0, 1], [1, 0]] {
        // The meeting is gone with `joined`; the other rank with the first drop, and this library's handle too.
        let mut communicators = joined(&stub, 2).into_iter().map(Some).collect::<Vec<_>>();
        let started = Instant::now();
        order.into_iter().for_each(|rank| communicators[rank] = None);
        assert!(started.elapsed() < LONG / 2);
    }
    // After an error, and after an abort.
    let communicators = joined(&stub, 2);
    stub.async_error(0, REMOTE_ERROR, "");
    communicators[1].abort();
    communicators[1].abort();
    drop(communicators);
    eventually("all have ended once", || stub.count(Count::Destroys) + stub.count(Count::Aborts) == 6);
    assert_eq!((stub.count(Count::Aborts), stub.count(Count::Misuses)), (1, 0));
}

/// Field case A74 (vllm-project/vllm#36651): an error that stays where none is any more.
#[test]
fn a_call_that_fails_leaves_the_next_as_it_was() {
    let stub = Stub::new(variants::V2_32);
    let communicators = joined(&stub, 1);
    let communicator = &communicators[0];
    for code in [INVALID_ARGUMENT, INTERNAL_ERROR] {
        stub.fail(Call::AllReduce, 0, code, 1, When::AtOnce, "refused");
        let error = reduce(communicator, &mut [1f32], ReduceOp::Sum).unwrap_err();
        assert!(
            matches!(error, Error::Nccl { call: "ncclAllReduce", rank: 0, code: got, .. } if got == code),
            "{error}"
        );
        assert_eq!(reduce(communicator, &mut [1f32], ReduceOp::Sum), Ok(()));
        assert_eq!(communicator.async_error(), Ok(()));
    }
    // From two threads at once, one of which fails: exactly the calls that failed say so.
    stub.fail(Call::AllReduce, 0, INVALID_ARGUMENT, 50, When::AtOnce, "refused");
    let before = stub.count(Count::AllReduces);
    let failures: usize = std::thread::scope(|scope| {
        let calls = || (0..100).filter(|_| reduce(communicator, &mut [1f32], ReduceOp::Sum).is_err()).count();
        let threads = [scope.spawn(calls), scope.spawn(calls)];
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((failures, stub.count(Count::AllReduces) - before, stub.count(Count::Misuses)), (50, 150, 0));
}

/// Field case A74: two communicators, of which one has failed for good.
#[test]
fn one_communicators_failure_is_not_anothers() {
    let stub = Stub::new(variants::V2_32);
    let (broken, good) = (joined(&stub, 1), joined(&stub, 1));
    stub.fail(Call::AllReduce, 0, INTERNAL_ERROR, 1, When::Later, "");
    // NCCL keeps this one.
    for _ in 0..2 {
        assert!(reduce(&broken[0], &mut [1f32], ReduceOp::Sum).is_err());
    }
    assert_eq!(reduce(&good[0], &mut [1f32], ReduceOp::Sum), Ok(()));
}

#[test]
fn a_communicator_that_is_lent_is_used_and_left() {
    let stub = Stub::new(variants::V2_32);
    let owned = joined(&stub, 2);
    let library = library(&stub).unwrap();
    let raw = |rank: usize| owned[rank].handle.with(|comm, _| comm.raw()).unwrap();
    // SAFETY: the communicators outlive what is borrowed, and nobody else calls for them.
    let lend = |rank, as_rank, world| unsafe { Borrowed::new(library.clone(), raw(rank), as_rank, world, LONG) };
    let lent: Vec<Arc<dyn AllReduce>> = vec![Arc::new(lend(0, 0, 2).unwrap()), Arc::new(lend(1, 1, 2).unwrap())];
    let mut tensors = [[1f32; 5], [2.0; 5]];
    std::thread::scope(|scope| {
        for (lent, tensor) in lent.iter().zip(&mut tensors) {
            scope.spawn(move || reduce(&**lent, tensor, ReduceOp::Max).unwrap());
        }
    });
    assert_eq!(tensors, [[2.0; 5]; 2]);
    assert_eq!((lent[0].version().to_string(), lent[0].async_error()), ("2.32.3".into(), Ok(())));
    lent[0].abort();
    assert_eq!(lent[0].async_error(), Err(Error::Aborted { by: None }));
    assert_eq!(reduce(&*lent[0], &mut [1f32], ReduceOp::Sum), Err(Error::Aborted { by: None }));
    drop(lent);
    assert_eq!((stub.count(Count::Aborts), stub.count(Count::Destroys)), (0, 0));
    assert_eq!(owned[0].async_error(), Ok(()));

    for (rank, world, words) in [(0, 3, "ranks of 2, not 3"), (1, 2, "rank 0, not 1")] {
        let error = lend(0, rank, world).err().unwrap();
        assert!(error.to_string().contains(words), "{error}");
    }
    // SAFETY: there is no communicator to be used.
    let none = unsafe { Borrowed::new(library.clone(), ptr::null_mut(), 0, 1, LONG) };
    assert!(matches!(none.err(), Some(Error::NullPointer { .. })));
}

/// The real one, if this machine has it.
fn real_library() -> Option<Arc<Library>> {
    let path = std::env::var_os("PEERSUM_TEST_NCCL").map(std::path::PathBuf::from);
    match Library::open(path.as_deref()) {
        Ok(library) => Some(library),
        Err(error) if path.is_none() => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// No GPU is needed for that.
#[test]
fn the_real_library_gives_ids() {
    let Some(library) = real_library() else { return };
    eprintln!("NCCL {} ({}), windows: {}", library.version(), library.name().display(), library.has_windows());
    let ids = [library.unique_id(0).unwrap(), library.unique_id(0).unwrap()];
    assert_ne!(ids[0].bytes, ids[1].bytes);
    assert_eq!(library.has_windows(), library.version() >= "2.27.3".parse().unwrap());
    assert!(library.check("ncclAllReduce", 0, INTERNAL_ERROR).unwrap_err().to_string().contains("internal error"));
}

#[test]
fn the_real_library_without_a_gpu_declines_on_all_ranks() {
    let Some(library) = real_library() else { return };
    if crate::cuda::device_count().is_ok_and(|count| count > 0) {
        return eprintln!("skipped: there are GPUs, and no context is current here");
    }
    let reason = declined(ranks(2, LONG, |seat| join(seat, &Ok(library.clone()), &settings(LONG)).unwrap().map(drop)));
    eprintln!("{reason}");
    assert!(reason.reason.contains("ncclCommInitRankConfig failed on rank 0"), "{reason}");
}
