//! Ranks on devices: threads that meet, and buffers.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use peersum::{
    DType, Meeting as Place, Options, Overlap, ReduceOp, Result,
    cuda::{self, Communicator, Verifier},
    host,
};

use crate::common::Value;

/// The devices, for one test at a time: groups whose blocks must be resident together must not share a device.
pub struct Devices {
    count: usize,
    _alone: MutexGuard<'static, ()>,
}

/// `None`, with a word on stderr, where the tests can't run.
pub fn devices() -> Option<Devices> {
    static ALONE: Mutex<()> = Mutex::new(());
    if let Err(error) = cuda::available() {
        assert!(std::env::var_os("PEERSUM_REQUIRE_GPU").is_none(), "PEERSUM_REQUIRE_GPU is set, but {error}");
        eprintln!("skipped: {error}");
        return None;
    }
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Some(Devices { count: cuda::device_count().unwrap(), _alone: alone })
}

/// How many calls a combination makes.
pub fn calls() -> usize {
    std::env::var("PEERSUM_TEST_CALLS").ok().map_or(100, |calls| calls.parse().expect("a number of calls"))
}

/// Short enough that a test that would hang fails soon: `PEERSUM_TEST_TIMEOUT` seconds, 20 unless set otherwise, so that
/// a debugger has time. `PEERSUM_TEST_OVERLAP` is early (the default), late or off.
pub fn options() -> Options {
    let overlap = match std::env::var("PEERSUM_TEST_OVERLAP").as_deref() {
        Err(_) | Ok("early") => Overlap::Early,
        Ok("late") => Overlap::Late,
        Ok("off") => Overlap::Off,
        Ok(other) => panic!("PEERSUM_TEST_OVERLAP={other}: it is early, late or off"),
    };
    let seconds = std::env::var("PEERSUM_TEST_TIMEOUT").map_or(20, |seconds| seconds.parse().expect("seconds"));
    Options::default().timeout(Duration::from_secs(seconds)).overlap(overlap)
}

/// The streams of the ranks, made once: streams that are made for every group come to share hardware queues, and ranks
/// whose streams do wait for each other.
pub fn stream(device: usize, rank: usize) -> Arc<CudaStream> {
    static STREAMS: Mutex<BTreeMap<usize, Vec<Arc<CudaStream>>>> = Mutex::new(BTreeMap::new());
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let of_device = streams.entry(device).or_insert_with(|| {
        let context = CudaContext::new(device).unwrap();
        (0..16).map(|_| context.new_stream().unwrap()).collect()
    });
    of_device[rank].clone()
}

pub struct Rank {
    pub rank: usize,
    pub world: usize,
    pub communicator: Communicator,
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    pub verifier: Arc<Verifier>,
    /// No synchronisation while a graph is captured.
    pub capturing: bool,
    enqueued: usize,
    meeting: Arc<Meeting>,
}

impl Devices {
    /// Devices for the ranks of a group: spread over what there is.
    pub fn of(&self, world: usize) -> Vec<usize> {
        (0..world).map(|rank| rank * self.count.min(world) / world).collect()
    }

    /// Runs every rank of a group in a thread of its own, and returns what they returned, in rank order. Where the test is
    /// run by [several processes](Part), this one is a rank at most, and returns what that returned.
    pub fn run<R: Send>(&self, world: usize, options: &Options, work: impl Fn(&mut Rank) -> R + Sync) -> Vec<R> {
        if let Some(part) = Part::of_this_process() {
            return part.run(self.of(world), options, work).into_iter().collect();
        }
        let communicators = Communicator::local(&self.of(world), options).expect("a group of this size");
        self.run_with(communicators, work)
    }

    pub fn run_with<R: Send>(&self, communicators: Vec<Communicator>, work: impl Fn(&mut Rank) -> R + Sync) -> Vec<R> {
        let world = communicators.len();
        assert!(Part::of_this_process().is_none(), "a group of threads, in a test that processes are to run");
        let meeting = Arc::new(Meeting::of_threads(world));
        let work = &work;
        std::thread::scope(|scope| {
            let threads: Vec<_> = communicators
                .into_iter()
                .map(|communicator| {
                    let meeting = meeting.clone();
                    scope.spawn(move || {
                        let _leaves = Leaves(meeting.clone());
                        Rank::new(communicator, meeting).run(work)
                    })
                })
                .collect();
            let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            results.into_iter().map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }
}

/// What a process is of a run of the tests by several, all of which run the same ones in the same order: rank
/// `PEERSUM_TEST_PART` of the `PEERSUM_TEST_PARTS` of the job `PEERSUM_TEST_JOB`, which is the start of a path. A group of
/// fewer ranks is without it, and one of more is not made.
struct Part {
    rank: usize,
    parts: usize,
    job: String,
}

/// Whether this process is one of several that run the tests.
pub fn is_a_part() -> bool {
    Part::of_this_process().is_some()
}

impl Part {
    fn of_this_process() -> Option<Part> {
        let rank = std::env::var("PEERSUM_TEST_PART").ok()?.parse().expect("a rank");
        let parts = std::env::var("PEERSUM_TEST_PARTS").ok()?.parse().expect("a number of ranks");
        Some(Part { rank, parts, job: std::env::var("PEERSUM_TEST_JOB").expect("where its ranks meet") })
    }

    fn run<R>(self, devices: Vec<usize>, options: &Options, work: impl Fn(&mut Rank) -> R) -> Option<R> {
        static GROUPS: AtomicUsize = AtomicUsize::new(0);
        let group = GROUPS.fetch_add(1, Ordering::Relaxed);
        let (rank, world) = (self.rank, devices.len());
        let device = *devices.get(rank).filter(|_| world <= self.parts)?;
        // Ranks that the groups before were without wait here for the others.
        let place = |what: &str| {
            Place::at_path(format!("{}-{group}-{what}", self.job), rank, world).timeout(Duration::from_secs(120))
        };
        let hosts = host::Communicator::meet(&place("hosts"), &Options::default().timeout(Duration::from_secs(60)));
        let communicator = Communicator::meet(&place("ranks"), device, options).expect("a group of this size");
        Some(Rank::new(communicator, Arc::new(Meeting::Processes(Mutex::new(hosts.unwrap())))).run(&work))
    }
}

impl Rank {
    fn new(communicator: Communicator, meeting: Arc<Meeting>) -> Rank {
        let stream = stream(communicator.device(), communicator.rank());
        Rank {
            rank: communicator.rank(),
            world: communicator.world_size(),
            context: stream.context().clone(),
            stream,
            verifier: Arc::new(Verifier::new(communicator.device()).unwrap()),
            communicator,
            capturing: false,
            enqueued: 0,
            meeting,
        }
    }

    fn run<R>(mut self, work: impl Fn(&mut Rank) -> R) -> R {
        // All ranks are set up before the first call, and before any of them frees anything.
        self.meet();
        let result = work(&mut self);
        self.stream.synchronize().unwrap();
        self.meet();
        result
    }

    /// Waits for all ranks: before calls whose peers must not be kept from theirs by an allocation, a free or a
    /// synchronisation here.
    pub fn meet(&self) {
        self.meeting.meet();
    }

    /// Another stream than the rank's.
    pub fn second_stream(&self) -> Arc<CudaStream> {
        stream(self.communicator.device(), 8 + self.rank)
    }

    /// Called once a call: keeps the queue of the stream short. A launch that waits for room in its queue keeps the
    /// other threads of the process from launching theirs.
    pub fn pace(&mut self) {
        self.enqueued += 1;
        if !self.capturing && self.enqueued.is_multiple_of(100) {
            self.stream.synchronize().unwrap();
        }
    }

    pub fn raw_stream(&self) -> *mut c_void {
        self.stream.cu_stream().cast()
    }

    pub fn upload<T: Value + DeviceRepr>(&self, values: &[T]) -> CudaSlice<T> {
        self.stream.clone_htod(values).unwrap()
    }

    pub fn download<T: Value + DeviceRepr>(&self, tensor: &CudaSlice<T>) -> Vec<T> {
        let values = self.stream.clone_dtoh(tensor).unwrap();
        self.stream.synchronize().unwrap();
        self.communicator.check().unwrap();
        values
    }

    pub fn bytes(&self, count: usize) -> Bytes {
        Bytes::new(self, count)
    }

    /// Reduces on the device and returns the result: a call with everything around it.
    pub fn all_reduce_values<T: Value + DeviceRepr>(&mut self, input: &[T], op: ReduceOp) -> Vec<T> {
        let from = self.upload(input);
        let mut to = self.upload(&vec![T::of_bits(0xdead_beef); input.len()]);
        self.stream.synchronize().unwrap();
        self.meet();
        self.communicator.all_reduce(&from, &mut to, op, &self.stream).unwrap();
        let result = self.download(&to);
        self.meet();
        result
    }

    /// Enqueues: fill the input, poison the output, reduce, check every element, go on to the next round.
    ///
    /// # Safety
    /// `input` and `output` are addresses of `count` elements each, which may be the same.
    pub unsafe fn verified_call(
        &mut self,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        state: &State,
    ) -> Result<()> {
        self.pace();
        let stream = self.raw_stream();
        // SAFETY: the caller vouches for the tensors, `state` has both words.
        unsafe {
            // Other numbers than any that could be right. By a kernel: a fill by the copy engine would wait in a queue that
            // the ranks of a device share.
            if input != output {
                self.verifier.fill(output, count, dtype, POISON, state.round(), stream)?;
            }
            self.verifier.fill(input, count, dtype, self.rank as u32, state.round(), stream)?;
            self.communicator.all_reduce_raw(input, output, count, dtype, op, stream)?;
            let world = self.world as u32;
            self.verifier.check(output, count, dtype, world, op, state.round(), state.wrong(), stream)?;
            self.verifier.advance(state.round(), stream)
        }
    }

    /// What [`Rank::verified_call`] counts, starting at a round of the test's choice.
    pub fn state(&self, first_round: u64) -> State {
        let words = self.stream.clone_htod(&[first_round, 0u64]).unwrap();
        self.stream.synchronize().unwrap();
        let (address, guard) = words.device_ptr(&self.stream);
        drop(guard);
        State { words, address }
    }
}

/// A rank that there is not: its numbers are no result.
pub const POISON: u32 = 0xdead;

/// A round and a count of wrong elements, on the device.
pub struct State {
    words: CudaSlice<u64>,
    address: u64,
}

impl State {
    pub fn round(&self) -> u64 {
        self.address
    }

    pub fn wrong(&self) -> u64 {
        self.address + 8
    }

    /// Fails if any element was wrong so far; returns how many rounds were made in all.
    #[track_caller]
    pub fn assert_right(&self, rank: &Rank, what: impl std::fmt::Display) -> u64 {
        // The copy below waits for this rank's calls, and may hold up the other ranks' work: all must be enqueued first.
        rank.meet();
        let words = rank.stream.clone_dtoh(&self.words).unwrap();
        rank.stream.synchronize().unwrap();
        rank.communicator.check().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(words[1], 0, "{what}: wrong elements on rank {}", rank.rank);
        words[0]
    }
}

/// Untyped device memory, 256-byte aligned.
pub struct Bytes {
    pub address: u64,
    _memory: CudaSlice<u8>,
}

impl Bytes {
    fn new(rank: &Rank, count: usize) -> Bytes {
        let memory = rank.stream.alloc_zeros::<u8>(count).unwrap();
        rank.stream.synchronize().unwrap();
        let (address, guard) = memory.device_ptr(&rank.stream);
        drop(guard);
        Bytes { address, _memory: memory }
    }
}

/// A barrier that a rank's panic opens for the others, so that a failing test ends.
enum Meeting {
    Threads {
        world: usize,
        state: Mutex<(usize, usize, bool)>, // arrived, generation, broken
        changed: Condvar,
    },
    Processes(Mutex<host::Communicator>),
}

impl Meeting {
    fn of_threads(world: usize) -> Meeting {
        Meeting::Threads { world, state: Mutex::new((0, 0, false)), changed: Condvar::new() }
    }

    fn meet(&self) {
        let (world, state, changed) = match self {
            Meeting::Threads { world, state, changed } => (*world, state, changed),
            Meeting::Processes(hosts) => {
                hosts.lock().unwrap().all_reduce_in_place(&mut [1f32], ReduceOp::Sum).expect("all other ranks");
                return;
            }
        };
        let mut state = state.lock().unwrap();
        state.0 += 1;
        if state.0 == world {
            *state = (0, state.1 + 1, state.2);
            changed.notify_all();
            return;
        }
        let generation = state.1;
        while state.1 == generation {
            assert!(!state.2, "another rank has failed");
            state = changed.wait(state).unwrap();
        }
    }
}

/// Breaks the meeting if its thread panics.
struct Leaves(Arc<Meeting>);

impl Drop for Leaves {
    fn drop(&mut self) {
        if let (true, Meeting::Threads { state, changed, .. }) = (std::thread::panicking(), &*self.0) {
            state.lock().unwrap_or_else(PoisonError::into_inner).2 = true;
            changed.notify_all();
        }
    }
}
