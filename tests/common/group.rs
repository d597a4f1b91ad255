//! Groups of ranks that are threads of the test, or, with `PEERSUM_TEST_RANKS=processes`, processes that it forks.
//!
//! A forked rank has all that the test's closure refers to, so the same tests run both ways, whatever they draw at random;
//! what ranks return goes through a pipe ([`Returned`]), and a [`Barrier`] lies in memory that they share.

use std::{
    any::Any,
    cell::OnceCell,
    io::{self, PipeReader, Read, Write},
    ops::{Deref, DerefMut},
    panic::{self, AssertUnwindSafe},
    path::PathBuf,
    process, ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use peersum::{Meeting, Options, host::Communicator};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    mm::{MapFlags, ProtFlags, mmap_anonymous, munmap},
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
};

use super::words::Returned;

/// Nothing that ranks do here takes as long.
const PATIENCE: Duration = Duration::from_secs(240);

/// The ranks of a group. They are made as threads when something asks for one of them.
pub struct Group {
    world: usize,
    options: Options,
    made: OnceCell<Vec<Communicator>>,
}

pub fn group(world: usize, options: &Options) -> Group {
    Group { world, options: options.clone(), made: OnceCell::new() }
}

impl Group {
    fn made(&self) -> &Vec<Communicator> {
        self.made.get_or_init(|| Communicator::local(self.world, &self.options).expect("a group of this size"))
    }
}

impl Deref for Group {
    type Target = Vec<Communicator>;

    fn deref(&self) -> &Self::Target {
        self.made()
    }
}

impl DerefMut for Group {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.made();
        self.made.get_mut().expect("they are made")
    }
}

impl IntoIterator for Group {
    type Item = Communicator;
    type IntoIter = std::vec::IntoIter<Communicator>;

    fn into_iter(self) -> Self::IntoIter {
        self.made();
        self.made.into_inner().expect("they are made").into_iter()
    }
}

/// Whether ranks are to be processes.
pub fn are_processes() -> bool {
    match std::env::var("PEERSUM_TEST_RANKS").as_deref() {
        Ok("processes") => true,
        Ok("threads") | Err(_) => false,
        Ok(other) => panic!("PEERSUM_TEST_RANKS is {other}: there are threads and processes"),
    }
}

/// How long ranks wait for each other where some don't come: so long between threads. It holds for the end of a meeting of
/// processes too, which takes longer than what threads do.
pub fn impatience(threads: Duration) -> Duration {
    if are_processes() { Duration::from_millis(600) } else { threads }
}

/// Runs every rank in a thread, or a process, of its own, and returns what they returned, in rank order.
#[track_caller]
pub fn run_ranks<R: Returned>(group: Group, work: impl Fn(usize, &mut Communicator) -> R + Sync) -> Vec<R> {
    let outcomes = rank_outcomes(group, work);
    let failed: Vec<_> = outcomes.iter().filter_map(|outcome| Some(outcome.as_ref().err()?.as_str())).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    outcomes.into_iter().flatten().collect()
}

/// The same, for ranks that may panic: of those, what they said. A communicator is dropped when its rank returns or panics.
pub fn rank_outcomes<R: Returned>(
    group: Group,
    work: impl Fn(usize, &mut Communicator) -> R + Sync,
) -> Vec<Result<R, String>> {
    let world = group.world;
    let outcomes = if are_processes() && group.made.get().is_none() {
        run_processes(world, &group.options, &work)
    } else {
        run_threads(group, &work)
    };
    let named = |(rank, outcome): (usize, Result<R, String>)| {
        outcome.map_err(|reason| format!("rank {rank} of {world}: {reason}"))
    };
    outcomes.into_iter().enumerate().map(named).collect()
}

fn run_threads<R: Send>(
    group: Group,
    work: &(impl Fn(usize, &mut Communicator) -> R + Sync),
) -> Vec<Result<R, String>> {
    thread::scope(|scope| {
        let ranks = group.into_iter().enumerate();
        let threads: Vec<_> = ranks
            .map(|(rank, mut communicator)| {
                scope.spawn(move || {
                    assert_eq!(communicator.rank(), rank);
                    work(rank, &mut communicator)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().map_err(|panic| said(&*panic))).collect()
    })
}

/// What a panic says.
fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it panicked").to_owned()
}

/// All ranks come to it before one goes on, again and again. It serves threads and forked processes.
pub struct Barrier {
    ranks: u64,
    /// How often one has come, in a page of shared memory.
    came: *const AtomicU64,
}

// SAFETY: the word is an atomic, and stays until the barrier is dropped.
unsafe impl Send for Barrier {}
// SAFETY: as above.
unsafe impl Sync for Barrier {}

impl Barrier {
    pub fn new(ranks: usize) -> Barrier {
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the system's choice.
        let page = unsafe { mmap_anonymous(ptr::null_mut(), size_of::<AtomicU64>(), access, kind) }.expect("a page");
        Barrier { ranks: ranks as u64, came: page.cast() }
    }

    pub fn wait(&self) {
        // SAFETY: the page is mapped as long as `self` is, at an address that suits every type, and zeros are such a word.
        let came = unsafe { &*self.came };
        let all = (came.fetch_add(1, Ordering::AcqRel) / self.ranks + 1) * self.ranks;
        let until = Instant::now() + PATIENCE;
        while came.load(Ordering::Acquire) < all {
            assert!(Instant::now() < until, "not all ranks come to a barrier");
            thread::sleep(Duration::from_micros(100));
        }
    }
}

impl Drop for Barrier {
    fn drop(&mut self) {
        // SAFETY: it is what `new` has mapped, and nobody refers to it any more.
        let _ = unsafe { munmap(self.came.cast_mut().cast(), size_of::<AtomicU64>()) };
    }
}

/// A rank that was forked. It is killed if nobody waits for it.
struct Forked {
    id: Pid,
    from: PipeReader,
    reaped: bool,
}

fn run_processes<R: Returned>(
    world: usize,
    options: &Options,
    work: &dyn Fn(usize, &mut Communicator) -> R,
) -> Vec<Result<R, String>> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let place = std::env::temp_dir().join(format!("peersum-ranks-{}-{number}", process::id()));
    let ranks: Vec<_> = (0..world).map(|rank| Forked::start(rank, world, &place, options, work)).collect();
    let until = Instant::now() + PATIENCE;
    ranks.into_iter().map(|rank| rank.result(until).map(|words| R::take(&mut words.into_iter()))).collect()
}

impl Forked {
    fn start<R: Returned>(
        rank: usize,
        world: usize,
        place: &PathBuf,
        options: &Options,
        work: &dyn Fn(usize, &mut Communicator) -> R,
    ) -> Forked {
        let (from, to) = io::pipe().unwrap();
        // SAFETY: the child goes on with this thread alone. It takes no lock that another thread of the test could have
        // held: the system's library sees to its own, and nothing is printed. It never returns from here.
        match unsafe { libc::fork() } {
            0 => {
                let answer = be(rank, world, place, options, work);
                let _ = (&to).write_all(&answer);
                // SAFETY: it ends the process, and runs nothing of the test's.
                unsafe { libc::_exit(0) }
            }
            id => Forked { id: Pid::from_raw(id).filter(|_| id > 0).expect("a fork"), from, reaped: false },
        }
    }

    /// What it returned, or why it did not.
    fn result(mut self, until: Instant) -> Result<Vec<u64>, String> {
        let mut answer = Vec::new();
        loop {
            // Another fork may have the pipe's other end for a while, so its end says nothing.
            if let Some((tag, rest)) = whole(&answer) {
                return match tag {
                    0 => Ok(rest.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect()),
                    _ => Err(String::from_utf8_lossy(rest).into_owned()),
                };
            }
            let left = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            let came = poll(&mut [PollFd::new(&self.from, PollFlags::IN)], Some(&left)).unwrap_or(0) > 0;
            let mut part = [0; 4096];
            match came.then(|| self.from.read(&mut part)) {
                Some(Ok(bytes @ 1..)) => answer.extend(&part[..bytes]),
                _ if self.has_ended() => return Err("it ended without a word".into()),
                _ if Instant::now() > until => return Err(format!("it does not end within {PATIENCE:?}")),
                _ => {}
            }
        }
    }

    fn has_ended(&mut self) -> bool {
        self.reaped = self.reaped || matches!(waitpid(Some(self.id), WaitOptions::NOHANG), Ok(Some(_)));
        self.reaped
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if !self.reaped {
            // One that has answered ends by itself; its memory may be large, and goes with it.
            let asked = Instant::now();
            while !self.has_ended() {
                if asked.elapsed() > Duration::from_secs(5) {
                    let _ = kill_process(self.id, Signal::KILL);
                }
                thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

/// An answer that is there as a whole: what it is, and the rest.
fn whole(answer: &[u8]) -> Option<(u8, &[u8])> {
    let (&tag, rest) = answer.split_first()?;
    let (bytes, rest) = rest.split_at_checked(8)?;
    let bytes = u64::from_ne_bytes(bytes.try_into().unwrap()) as usize;
    Some((tag, rest.get(..bytes)?))
}

/// One rank, in its own process: what it has to say.
fn be<R: Returned>(
    rank: usize,
    world: usize,
    place: &PathBuf,
    options: &Options,
    work: &dyn Fn(usize, &mut Communicator) -> R,
) -> Vec<u8> {
    let told = Arc::new(Mutex::new(String::new()));
    let tell = told.clone();
    panic::set_hook(Box::new(move |info| *tell.lock().unwrap_or_else(|poison| poison.into_inner()) = info.to_string()));
    let done = panic::catch_unwind(AssertUnwindSafe(|| {
        let meeting = Meeting::at_path(place, rank, world).secret(place.as_os_str().as_encoded_bytes());
        // It has tests of its own, and groups here are many and short.
        let options = options.clone().self_test(false);
        let mut communicator = Communicator::meet(&meeting, &options).expect("a group of these processes");
        assert_eq!(communicator.rank(), rank);
        let mut words = Vec::new();
        work(rank, &mut communicator).give(&mut words);
        words
    }));
    let (tag, bytes) = match done {
        Ok(words) => (0, words.iter().flat_map(|word| word.to_ne_bytes()).collect()),
        Err(_) => (1, told.lock().unwrap_or_else(|poison| poison.into_inner()).clone().into_bytes()),
    };
    [&[tag][..], &(bytes.len() as u64).to_ne_bytes(), &bytes].concat()
}
