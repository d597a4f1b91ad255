//! All-reduce between threads of the CPU, by the protocol of [`crate::protocol`] over shared memory.

mod communicator;
mod exchange;
mod group;
#[cfg(all(test, loom))]
mod loom_rounds;
mod priors;
mod reduce;
mod segment;
#[cfg(all(test, shuttle))]
mod shuttle_rounds;
mod sync;
mod wait;

pub use communicator::{AbortHandle, Communicator};

/// The algorithms that run here. LL packets save a fence that the host's memory order doesn't need.
pub const ALGORITHMS: [crate::Algorithm; 4] = [
    crate::Algorithm::OneShot,
    crate::Algorithm::TwoShot,
    crate::Algorithm::OneShotPull,
    crate::Algorithm::TwoShotPull,
];
