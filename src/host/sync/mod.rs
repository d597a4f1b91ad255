//! The one door to shared memory: atomics, waiting primitives, the clock and the payload of a segment.
//!
//! Everything that two ranks touch goes through here, so that `--cfg loom` and `--cfg shuttle` check the very code that
//! ships: they swap this module's types and nothing else.

#[cfg(not(any(loom, shuttle)))]
mod mapping;
#[cfg(any(loom, shuttle))]
mod model;

#[cfg(loom)]
pub(super) use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
    thread::yield_now,
};
#[cfg(not(any(loom, shuttle)))]
pub(super) use mapping::{Held, Memory};
#[cfg(any(loom, shuttle))]
pub(super) use model::{Held, Instant, Memory};
#[cfg(shuttle)]
pub(super) use shuttle::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
    thread::yield_now,
};
#[cfg(not(any(loom, shuttle)))]
pub(super) use std::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
    thread::yield_now,
    time::Instant,
};

/// Lets no load after it begin before what comes before it has ended, where that can be asked for. It orders nothing
/// that others see: it is for timing a load.
pub(super) fn hold_loads() {
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle))))]
    // SAFETY: every x86-64 CPU has it, and it touches no memory.
    unsafe {
        std::arch::x86_64::_mm_lfence();
    }
}
