//! Where all ranks wait for each other before something is timed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::Result;

use super::team::Peers;

/// A barrier that all leave together, and that breaks instead of waiting for a rank that failed.
#[derive(Debug)]
pub(crate) enum Barrier<'a> {
    /// Of ranks that are threads.
    Threads(Spinning),
    /// Of ranks that are processes, of which this is one.
    Processes(&'a Peers),
}

impl Barrier<'_> {
    pub(crate) fn wait(&self) -> Result<()> {
        match self {
            Barrier::Threads(spinning) => Ok(spinning.wait()?),
            Barrier::Processes(peers) => peers.wait(),
        }
    }

    /// Runs a rank's part. If it fails or panics, the others' waits end.
    pub(crate) fn hold<R>(&self, part: impl FnOnce() -> Result<R>) -> Result<R> {
        struct BreakOnDrop<'a>(&'a Barrier<'a>);
        impl Drop for BreakOnDrop<'_> {
            fn drop(&mut self) {
                match self.0 {
                    Barrier::Threads(spinning) => spinning.broken.store(true, Ordering::Release),
                    Barrier::Processes(peers) => peers.give_up(),
                }
            }
        }
        let guard = BreakOnDrop(self);
        let result = part()?;
        std::mem::forget(guard);
        Ok(result)
    }
}

/// The barrier of threads, which spins.
#[derive(Debug)]
pub(crate) struct Spinning {
    world: usize,
    arrived: AtomicUsize,
    generation: AtomicUsize,
    broken: AtomicBool,
}

/// Another rank failed; its own error says why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("another rank failed")
    }
}

impl std::error::Error for Broken {}

impl Spinning {
    pub(crate) fn new(world: usize) -> Self {
        Spinning {
            world,
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
        }
    }

    fn wait(&self) -> Result<(), Broken> {
        /// Spins before it yields: there may be more ranks than cores.
        const SPINS: u32 = 200;
        let generation = self.generation.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.world {
            self.arrived.store(0, Ordering::Relaxed);
            self.generation.store(generation.wrapping_add(1), Ordering::Release);
        }
        let mut spins = 0;
        while self.generation.load(Ordering::Acquire) == generation {
            if self.broken.load(Ordering::Acquire) {
                return Err(Broken);
            }
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_passes_before_all_have_come() {
        let barrier = Barrier::Threads(Spinning::new(3));
        let rounds = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 0..200 {
                        rounds.fetch_add(1, Ordering::SeqCst);
                        barrier.wait().unwrap();
                        assert!(rounds.load(Ordering::SeqCst) >= 3 * (round + 1));
                    }
                });
            }
        });
    }

    #[test]
    fn a_rank_that_fails_ends_the_waits() {
        let barrier = Barrier::Threads(Spinning::new(2));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| barrier.hold(|| barrier.wait()));
            let fails = scope.spawn(|| barrier.hold(|| anyhow::bail!("the reason")) as anyhow::Result<()>);
            assert!(waits.join().unwrap().unwrap_err().is::<Broken>());
            assert_eq!(fails.join().unwrap().unwrap_err().to_string(), "the reason");
        });
    }
}
