//! The threads of a rank beside the one that calls: each runs one block of each call that is shared.

use std::{
    any::Any,
    fmt, panic,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

use crate::{Error, Result};

/// How long a thread looks for its next job before it sleeps. Layers of a network follow each other within this;
/// between steps the cores are the engine's own.
const AWAKE: Duration = Duration::from_micros(20);

/// What a thread is to do once.
type Job = Box<dyn FnOnce() -> Result<()> + Send>;
/// What came of it, or what it panicked with.
type Outcome = Result<Result<()>, Box<dyn Any + Send>>;

/// Threads that sleep between jobs. Dropping it ends them; no job runs then.
pub(super) struct Pool {
    workers: Vec<Worker>,
}

struct Worker {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

/// Where a thread gets its jobs.
#[derive(Default)]
struct Desk {
    /// Jobs that were laid here so far, and those that were done.
    laid: AtomicU32,
    done: AtomicU32,
    ends: AtomicBool,
    job: Mutex<Option<(Job, Thread)>>,
    outcome: Mutex<Option<Outcome>>,
}

impl Pool {
    /// So many threads.
    pub(super) fn new(threads: u32, rank: u32) -> Result<Pool> {
        let worker = |index| {
            let desk = Arc::new(Desk::default());
            let of_thread = desk.clone();
            let name = format!("peersum-{rank}.{}", index + 1);
            let thread = thread::Builder::new().name(name).spawn(move || of_thread.work());
            let failed = |error: std::io::Error| Error::System {
                call: "starting a thread of a rank",
                reason: error.to_string(),
            };
            Ok(Worker { desk, thread: Some(thread.map_err(failed)?) })
        };
        Ok(Pool { workers: (0..threads).map(worker).collect::<Result<_>>()? })
    }

    /// Runs `first` here and `other(block)` for each block from 1 on in a thread of its own, and returns when all have
    /// ended: with the first error of the lowest block.
    pub(super) fn run<'a>(
        &mut self,
        blocks: u32,
        other: impl Fn(u32) -> Box<dyn FnOnce() -> Result<()> + Send + 'a>,
        first: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let workers = &self.workers[..blocks as usize - 1];
        // Waits for all that were started, also if something panics on the way.
        let mut started = Started { workers: &workers[..0] };
        for (index, worker) in workers.iter().enumerate() {
            let job = other(index as u32 + 1);
            // SAFETY: the job ends before this function does, by `Started`, and so before what it borrows does. The two
            // types differ in the lifetime alone.
            let job = unsafe { std::mem::transmute::<Box<dyn FnOnce() -> Result<()> + Send + 'a>, Job>(job) };
            worker.desk.lay(job);
            started.workers = &workers[..=index];
            worker.wake();
        }
        let result = first();
        drop(started);
        for worker in workers {
            let outcome = worker.desk.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
            match outcome {
                Some(Ok(of_block)) => result.clone().and(of_block)?,
                Some(Err(panicked)) => panic::resume_unwind(panicked),
                None => unreachable!("a job that has ended leaves what came of it"),
            }
        }
        result
    }
}

/// Jobs under way.
struct Started<'a> {
    workers: &'a [Worker],
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        for worker in self.workers {
            worker.desk.wait();
        }
    }
}

impl Desk {
    fn lay(&self, job: Job) {
        *self.job.lock().unwrap_or_else(PoisonError::into_inner) = Some((job, thread::current()));
        self.laid.fetch_add(1, Ordering::Release);
    }

    /// Until the job is done. Its waits are bounded, so this is.
    fn wait(&self) {
        let laid = self.laid.load(Ordering::Relaxed);
        let begun = Instant::now();
        while self.done.load(Ordering::Acquire) != laid {
            if begun.elapsed() < AWAKE { std::hint::spin_loop() } else { thread::park() }
        }
    }

    fn work(&self) {
        let mut done = 0;
        loop {
            let mut begun = None;
            while self.laid.load(Ordering::Acquire) == done {
                if self.ends.load(Ordering::Acquire) {
                    return;
                }
                let begun: &mut Instant = begun.get_or_insert_with(Instant::now);
                if begun.elapsed() < AWAKE { std::hint::spin_loop() } else { thread::park() }
            }
            let Some((job, caller)) = self.job.lock().unwrap_or_else(PoisonError::into_inner).take() else { continue };
            let outcome = panic::catch_unwind(panic::AssertUnwindSafe(job));
            *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
            done = done.wrapping_add(1);
            self.done.store(done, Ordering::Release);
            caller.unpark();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.desk.ends.store(true, Ordering::Release);
            worker.wake();
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

impl Worker {
    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.workers.len()).finish()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn every_block_runs_once_and_the_lowest_error_is_told() {
        let mut pool = Pool::new(3, 0).unwrap();
        for round in 0..2000 {
            let blocks = 1 + round % 4;
            let (seen, failing) = (AtomicU32::new(0), if round % 5 == 0 { blocks - 1 } else { 99 });
            let block = |block: u32| {
                seen.fetch_add(1 << (8 * block), Ordering::Relaxed);
                if block >= failing { Err(Error::PeerGone { rank: 0, peer: block as usize }) } else { Ok(()) }
            };
            if round % 100 == 0 {
                thread::sleep(AWAKE * 3);
            }
            let block = &block;
            let result = pool.run(blocks, |index| Box::new(move || block(index)), || block(0));
            let expected =
                if failing < blocks { Err(Error::PeerGone { rank: 0, peer: failing as usize }) } else { Ok(()) };
            assert_eq!(result, expected);
            assert_eq!(seen.into_inner(), (0..blocks).map(|block| 1 << (8 * block)).sum::<u32>());
        }
    }

    #[test]
    fn a_panic_comes_out_when_all_have_ended_and_the_threads_stay() {
        let mut pool = Pool::new(2, 0).unwrap();
        let ended = AtomicBool::new(false);
        let run = panic::AssertUnwindSafe(|| {
            let job = |index: u32| -> Box<dyn FnOnce() -> Result<()> + Send + '_> {
                if index == 1 {
                    return Box::new(|| panic::resume_unwind(Box::new("a block's")));
                }
                Box::new(|| {
                    thread::sleep(Duration::from_millis(20));
                    ended.store(true, Ordering::Relaxed);
                    Ok(())
                })
            };
            pool.run(3, job, || Ok(()))
        });
        assert_eq!(*panic::catch_unwind(run).unwrap_err().downcast::<&str>().unwrap(), "a block's");
        assert!(ended.load(Ordering::Relaxed));
        assert_eq!(pool.run(3, |_| Box::new(|| Ok(())), || Ok(())), Ok(()));
    }
}
