//! Faults of a rank on GPUs: late, absent, gone, a flag that gets lost. The others end by the deadline with an error that
//! names it, or with the right result; other streams go on, the context lives, and a new group works at once.
//!
//! One thread drives all ranks here, so that what comes in which order is not the machine's choice: calls only enqueue.

use std::{
    ffi::c_void,
    panic,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, sys};
use peersum::{
    Algorithm, DType, Error, Options, Phase, ReduceOp, Result,
    cuda::{Communicator, Verifier},
};

use crate::harness::{self, Devices};

const TIMEOUT: Duration = Duration::from_millis(300);
/// How much later than its deadline a wait may end.
const SLACK: Duration = Duration::from_secs(2);
const MOST: usize = 1 << 18;
/// By packets and by flags.
const COUNTS: [usize; 2] = [2000, MOST];

fn impatient() -> Options {
    Options::default().timeout(TIMEOUT)
}

/// Memory that a stream's kernels fill and check: elements, a round, a count of wrong elements.
struct Checked {
    stream: Arc<CudaStream>,
    verifier: Verifier,
    tensor: (CudaSlice<f32>, u64),
    words: (CudaSlice<u64>, u64),
}

impl Checked {
    fn new(device: usize, stream: usize) -> Checked {
        let stream = harness::stream(device, stream);
        let tensor = stream.alloc_zeros::<f32>(MOST).unwrap();
        let words = stream.alloc_zeros::<u64>(2).unwrap();
        stream.synchronize().unwrap();
        let (tensor_address, words_address) = (tensor.device_ptr(&stream).0, words.device_ptr(&stream).0);
        let verifier = Verifier::new(device).unwrap();
        Checked { verifier, tensor: (tensor, tensor_address), words: (words, words_address), stream }
    }

    fn raw_stream(&self) -> *mut c_void {
        self.stream.cu_stream().cast()
    }

    /// Whether all that was enqueued has finished.
    fn is_idle(&self) -> bool {
        self.stream.context().bind_to_thread().unwrap();
        // SAFETY: the stream lives, and its context is current.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => false,
            status => status.result().map(|()| true).unwrap(),
        }
    }

    /// Waits for all that was enqueued: how many elements were wrong in how many rounds.
    fn wrong_and_rounds(&self) -> (u64, u64) {
        let words = self.stream.clone_dtoh(&self.words.0).unwrap();
        self.stream.synchronize().unwrap();
        (words[1], words[0])
    }
}

/// A rank, and what it reduces.
struct Seat {
    // Goes first: what its kernels use stays until the stream has passed them.
    communicator: Communicator,
    data: Checked,
}

impl Seat {
    /// Enqueues: fill, reduce in place, check, go on to the next round.
    fn call(&mut self, count: usize) -> Result<()> {
        let (tensor, round) = (self.data.tensor.1, self.data.words.1);
        let (world, stream) = (self.communicator.world_size() as u32, self.data.raw_stream());
        let verifier = &self.data.verifier;
        assert!(count <= MOST);
        // SAFETY: the tensor has room for the count, and the two words are the round and the count of wrong elements.
        unsafe {
            verifier.fill(tensor, count, DType::F32, self.communicator.rank() as u32, round, stream)?;
            self.communicator.all_reduce_raw(tensor, tensor, count, DType::F32, ReduceOp::Sum, stream)?;
            verifier.check(tensor, count, DType::F32, world, ReduceOp::Sum, round, round + 8, stream)?;
            verifier.advance(round, stream)
        }
    }

    /// Enqueues a wait of so long ahead of what comes next in the stream.
    fn delay_stream(&self, delay: Duration) {
        unsafe extern "C" fn sleep(milliseconds: *mut c_void) {
            thread::sleep(Duration::from_millis(milliseconds as usize as u64));
        }
        self.data.stream.context().bind_to_thread().unwrap();
        let milliseconds = delay.as_millis() as usize as *mut c_void;
        // SAFETY: the function takes a number for its argument and calls nothing of CUDA.
        unsafe { sys::cuLaunchHostFunc(self.data.stream.cu_stream(), Some(sleep), milliseconds).result().unwrap() }
    }
}

fn group(devices: &Devices, world: usize, options: &Options) -> Vec<Seat> {
    // The verifiers first: they load the kernels, which may take longer than an impatient group waits for its ranks.
    let data: Vec<_> =
        devices.of(world).into_iter().enumerate().map(|(rank, device)| Checked::new(device, rank)).collect();
    let communicators = Communicator::local(&devices.of(world), options).expect("a group of this size");
    let seats = communicators.into_iter().zip(data).map(|(communicator, data)| Seat { communicator, data });
    seats.collect()
}

/// Makes one call on all of them.
fn call(seats: &mut [Seat], count: usize) {
    for seat in seats {
        seat.call(count).unwrap();
    }
}

/// Waits for all calls, whose results must be right.
#[track_caller]
fn assert_right(seats: &[Seat], rounds: u64) {
    for seat in seats {
        assert_eq!(seat.data.wrong_and_rounds(), (0, rounds), "rank {}", seat.communicator.rank());
        seat.communicator.check().unwrap();
    }
}

#[track_caller]
fn a_new_group_works(devices: &Devices, world: usize) {
    let mut seats = group(devices, world, &harness::options());
    let started = Instant::now();
    for count in COUNTS {
        call(&mut seats, count);
    }
    assert_right(&seats, 2);
    assert!(started.elapsed() < SLACK, "{:?}", started.elapsed());
    for seat in &seats {
        seat.data.stream.context().synchronize().unwrap();
        seat.data.stream.context().check_err().unwrap();
    }
}

/// Waits for what the ranks enqueued: it ends by the deadline, and all have the same error, also at their next call.
#[track_caller]
fn error_of(seats: &mut [Seat], since: Instant, timeout: Duration) -> Error {
    for seat in seats.iter() {
        seat.data.stream.synchronize().unwrap();
    }
    assert!(since.elapsed() < timeout + SLACK, "{:?}", since.elapsed());
    let error = seats[0].communicator.check().unwrap_err();
    for seat in seats {
        assert_eq!(seat.communicator.check(), Err(error.clone()));
        assert_eq!(seat.call(2000), Err(error.clone()));
    }
    error
}

/// [`error_of`] the ranks that are left, which is a timeout of one of them that waited for one of `absent`.
#[track_caller]
fn assert_named(seats: &mut [Seat], absent: &[usize], since: Instant) {
    let error = error_of(seats, since, TIMEOUT);
    let Error::PeerTimeout { rank, peer, waited, .. } = error else { panic!("{error}") };
    assert!(absent.contains(&peer) && !absent.contains(&rank), "{error}");
    assert!((TIMEOUT..TIMEOUT + SLACK).contains(&waited), "{error}");
}

/// While all of these wait in a kernel, kernels on another stream of each of their devices run to their end.
#[track_caller]
fn other_streams_go_on(seats: &[Seat], others: &[Checked]) {
    for other in others {
        let (tensor, round, stream) = (other.tensor.1, other.words.1, other.raw_stream());
        // SAFETY: as in `Seat::call`.
        unsafe {
            other.verifier.fill(tensor, MOST, DType::F32, 0, round, stream).unwrap();
            other.verifier.check(tensor, MOST, DType::F32, 1, ReduceOp::Sum, round, round + 8, stream).unwrap();
            other.verifier.advance(round, stream).unwrap();
        }
    }
    for other in others {
        assert_eq!(other.wrong_and_rounds().0, 0);
    }
    for seat in seats {
        assert!(!seat.data.is_idle(), "rank {} does not wait any more", seat.communicator.rank());
    }
}

/// One for each device of a group, on a stream that no rank of up to 8 has.
fn other_streams(devices: &Devices, world: usize) -> Vec<Checked> {
    let mut ordinals = devices.of(world);
    ordinals.dedup();
    ordinals.into_iter().map(|device| Checked::new(device, 15)).collect()
}

/// The last rank is so late, but within the timeout.
fn a_late_rank_is_waited_for(devices: &Devices, world: usize, delay: Duration) {
    for count in COUNTS {
        let others = other_streams(devices, world);
        let mut seats = group(devices, world, &harness::options());
        call(&mut seats, count);
        let (late, punctual) = seats.split_last_mut().unwrap();
        call(punctual, count);
        let started = Instant::now();
        other_streams_go_on(punctual, &others);
        thread::sleep(delay.saturating_sub(started.elapsed()));
        assert!(punctual.iter().all(|seat| !seat.data.is_idle()), "they wait");
        late.call(count).unwrap();
        call(&mut seats, count);
        assert_right(&seats, 3);
        drop(seats);
        a_new_group_works(devices, world);
    }
}

#[test]
fn a_rank_that_is_50_ms_late() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        a_late_rank_is_waited_for(&devices, world, Duration::from_millis(50));
    }
}

/// Field case A21 (sgl-project/sglang#30209): a rank that is stopped for a while and goes on, on the host's side here, for
/// less than the timeout.
#[test]
fn a_rank_that_is_5_s_late() {
    let Some(devices) = harness::devices() else { return };
    let mut seats = group(&devices, 4, &harness::options());
    let (late, punctual) = seats.split_last_mut().unwrap();
    call(punctual, 2000);
    thread::sleep(Duration::from_secs(5));
    late.call(2000).unwrap();
    assert_right(&seats, 1);
    drop(seats);
    a_new_group_works(&devices, 4);
}

/// Later than the timeout: at its call, or with its kernel, which its stream held up.
#[test]
fn a_rank_that_is_later_than_the_timeout_is_named_and_told() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        for count in COUNTS {
            for enqueued_in_time in [false, true] {
                let mut seats = group(&devices, world, &impatient());
                call(&mut seats, count);
                assert_right(&seats, 1);
                let (late, punctual) = seats.split_last_mut().unwrap();
                if enqueued_in_time {
                    late.delay_stream(2 * TIMEOUT);
                    late.call(count).unwrap();
                }
                let started = Instant::now();
                call(punctual, count);
                assert_named(punctual, &[world - 1], started);
                let error = punctual[0].communicator.check().unwrap_err();
                if !enqueued_in_time {
                    assert_eq!(late.call(count), Err(error.clone()));
                }
                // What comes late finds the group ended, and does not wait.
                late.data.stream.synchronize().unwrap();
                assert!(started.elapsed() < 2 * TIMEOUT + SLACK, "{:?}", started.elapsed());
                assert_eq!(late.communicator.check(), Err(error));
                drop(seats);
                a_new_group_works(&devices, world);
            }
        }
    }
}

/// Kernels of other streams run while the ranks wait for one that never comes.
#[test]
fn a_rank_that_never_calls() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        for absent in [0, world - 1] {
            for count in COUNTS {
                let others = other_streams(&devices, world);
                let mut seats = group(&devices, world, &impatient());
                let absentee = seats.remove(absent);
                let started = Instant::now();
                call(&mut seats, count);
                other_streams_go_on(&seats, &others);
                assert_named(&mut seats, &[absent], started);
                assert_eq!(absentee.communicator.check(), seats[0].communicator.check());
                drop((seats, absentee));
                a_new_group_works(&devices, world);
            }
        }
    }
}

/// How a rank leaves.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    Drops,
    Panics,
}

/// Some leave after so many calls, in whose middle the others still are. The rest makes another.
fn some_leave(devices: &Devices, world: usize, leavers: &[usize], after: usize, leaving: Leaving, count: usize) {
    let mut seats = group(devices, world, &impatient());
    for _ in 0..after {
        call(&mut seats, count);
    }
    let (gone, mut rest): (Vec<_>, Vec<_>) =
        seats.into_iter().partition(|seat| leavers.contains(&seat.communicator.rank()));
    let started = Instant::now();
    match leaving {
        Leaving::Drops => drop(gone),
        Leaving::Panics => {
            let panicking = thread::spawn(move || {
                let _gone = gone;
                panic::resume_unwind(Box::new("leaves")); // without the message of a panic
            });
            panicking.join().unwrap_err();
        }
    }
    assert!(started.elapsed() < TIMEOUT + SLACK, "{:?}", started.elapsed());
    let started = Instant::now();
    call(&mut rest, count);
    assert_named(&mut rest, leavers, started);
    drop(rest);
    a_new_group_works(devices, world);
}

/// Field case A21: a rank dies in the middle of a sequence.
#[test]
fn a_rank_that_leaves_in_the_middle_of_a_sequence() {
    let Some(devices) = harness::devices() else { return };
    for leaving in [Leaving::Drops, Leaving::Panics] {
        for (world, leaver) in [(2, 0), (3, 1), (8, 7)] {
            for count in COUNTS {
                some_leave(&devices, world, &[leaver], 50, leaving, count);
            }
        }
    }
}

#[test]
fn three_of_eight_ranks_vanish() {
    let Some(devices) = harness::devices() else { return };
    for leaving in [Leaving::Drops, Leaving::Panics] {
        for after in [0, 3] {
            some_leave(&devices, 8, &[1, 4, 7], after, leaving, 2000);
        }
    }
}

/// Field case A21: an arrival that gets lost. Rank 1's flag is taken out of rank 0's memory before rank 0 comes. The others
/// have got all they need, and their results are right.
#[test]
fn a_lost_flag_ends_the_group_by_the_deadline() {
    let Some(devices) = harness::devices() else { return };
    for algorithm in [Algorithm::OneShot, Algorithm::OneShotPull, Algorithm::OneShotLl] {
        let mut seats = group(&devices, 3, &impatient().algorithm(algorithm).blocks(1));
        let other = Checked::new(devices.of(3)[0], 15);
        let line = seats[0].communicator.flag_address(algorithm.packet_rounds() > 0, 1, 0, 1);
        let stream = other.stream.cu_stream();
        seats[1].call(2000).unwrap();
        let started = Instant::now();
        other.stream.context().bind_to_thread().unwrap();
        let flag = || {
            let mut word = 0u64;
            // SAFETY: a flag is 8 bytes in rank 0's segment, which the device of that stream maps; the copy is waited for.
            unsafe { sys::cuMemcpyDtoHAsync_v2((&raw mut word).cast(), line, 8, stream).result().unwrap() };
            other.stream.synchronize().unwrap();
            word
        };
        while flag() == 0 {
            assert!(started.elapsed() < TIMEOUT / 2, "rank 1 has not come");
        }
        // SAFETY: as above.
        unsafe { sys::cuMemsetD8Async(line, 0, 8, stream).result().unwrap() };
        assert_eq!(flag(), 0);
        seats[0].call(2000).unwrap();
        seats[2].call(2000).unwrap();
        assert!(started.elapsed() < TIMEOUT / 2, "rank 1 may not wait any more");
        for seat in &seats[1..] {
            assert_eq!(seat.data.wrong_and_rounds(), (0, 1), "{algorithm}, rank {}", seat.communicator.rank());
        }
        let error = error_of(&mut seats, started, TIMEOUT);
        let Error::PeerTimeout { rank: 0, peer: 1, block: 0, epoch: 1, phase: Phase::Exchange, .. } = error else {
            panic!("{algorithm}: {error}")
        };
        drop(seats);
        a_new_group_works(&devices, 3);
    }
}

#[test]
fn an_abort_while_ranks_wait() {
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        for count in COUNTS {
            let others = other_streams(&devices, world);
            let mut seats = group(&devices, world, &Options::default().timeout(Duration::from_secs(600)));
            let aborter = seats.pop().unwrap();
            call(&mut seats, count);
            thread::sleep(Duration::from_millis(20));
            other_streams_go_on(&seats, &others);
            let started = Instant::now();
            aborter.communicator.abort();
            assert_eq!(error_of(&mut seats, started, Duration::ZERO), Error::Aborted { by: None });
            drop((seats, aborter));
            a_new_group_works(&devices, world);
        }
    }
}

/// A group's memory goes with its last communicator, which so waits for its kernel, whose peer is gone: until the deadline.
#[test]
fn a_drop_ends_by_the_deadline_though_the_peer_is_gone() {
    let Some(devices) = harness::devices() else { return };
    for count in COUNTS {
        let mut seats = group(&devices, 2, &impatient());
        call(&mut seats, count);
        drop(seats.pop());
        seats[0].call(count).unwrap();
        let started = Instant::now();
        drop(seats);
        let took = started.elapsed();
        eprintln!("dropping a rank that waits for one that is gone took {took:?}; the timeout is {TIMEOUT:?}");
        assert!(took < TIMEOUT + SLACK, "{took:?}");
        a_new_group_works(&devices, 2);
    }
}
