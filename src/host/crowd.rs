//! Whether a thread shares its core with others that wait for it, which decides how long it polls before it yields.
//!
//! A peer that runs on another core answers within a microsecond or two, and polling for it is the shortest wait there
//! is. A peer that waits for this very core answers the later for each poll. A yield tells the two apart: with nobody
//! there to take the core it comes back at once.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

/// Polls before the first yield, about 1.5 µs. shuttle has no time, and is to get further.
const POLLS: u32 = if cfg!(shuttle) { 2 } else { 100 };
/// The same where the core is shared.
const POLLS_IF_SHARED: u32 = 5;
/// A yield that takes so long has let somebody else run: a switch there and one back take more, and a yield that finds
/// nobody a third of it.
const SHARED_FROM: Duration = Duration::from_nanos(900);
/// So many more of such yields than of others, and the core counts as shared. What is counted at most.
const SHARED: u32 = 4;
const MOST: u32 = 8;

/// What one block of a rank knows of its core. For the thread that runs the block.
pub(super) struct Crowd(AtomicU32);

impl Crowd {
    pub(super) fn new() -> Crowd {
        Crowd(AtomicU32::new(0))
    }

    /// Polls before the first yield.
    #[inline]
    pub(super) fn polls(&self) -> u32 {
        if self.0.load(Relaxed) < SHARED { POLLS } else { POLLS_IF_SHARED }
    }

    /// The longest of a wait's first yields took so long.
    pub(super) fn note(&self, took: Duration) {
        let known = self.0.load(Relaxed);
        self.0.store(if took >= SHARED_FROM { (known + 1).min(MOST) } else { known.saturating_sub(1) }, Relaxed);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn polls_are_few_while_yields_are_long() {
        let (crowd, long, short) = (Crowd::new(), Duration::from_micros(3), Duration::from_nanos(300));
        assert_eq!(crowd.polls(), POLLS);
        (0..3).for_each(|_| crowd.note(long));
        assert_eq!(crowd.polls(), POLLS, "now and then others run on every core");
        (0..100).for_each(|_| crowd.note(long));
        assert_eq!(crowd.polls(), POLLS_IF_SHARED);
        (0..5).for_each(|_| crowd.note(short));
        assert_eq!(crowd.polls(), POLLS, "and soon polls again when it is alone");
        (0..100).for_each(|_| crowd.note(short));
        (0..4).for_each(|_| crowd.note(long));
        assert_eq!(crowd.polls(), POLLS_IF_SHARED);
    }
}
