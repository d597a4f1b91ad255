//! All-reduce between threads of the CPU, by the protocol of [`crate::protocol`] over shared memory.

mod communicator;
mod crowd;
mod distance;
mod exchange;
mod group;
#[cfg(all(test, loom))]
mod loom_aborts;
#[cfg(all(test, loom))]
mod loom_direct;
#[cfg(all(test, loom))]
mod loom_packets;
#[cfg(all(test, loom))]
mod loom_rounds;
mod packet_exchange;
mod packets;
#[cfg(not(any(loom, shuttle)))]
mod pool;
mod priors;
mod record;
mod reduce;
mod segment;
#[cfg(not(any(loom, shuttle)))]
mod self_test;
#[cfg(all(test, not(any(loom, shuttle))))]
mod self_test_lies;
#[cfg(all(test, shuttle))]
mod shuttle_aborts;
#[cfg(all(test, shuttle))]
mod shuttle_rounds;
mod symmetric;
mod sync;
mod wait;

pub use communicator::{AbortHandle, Communicator};
pub use symmetric::SymmetricBuffer;

/// The algorithms that run here on tensors anywhere. On tensors in symmetric memory
/// [`OneShotDirect`](crate::Algorithm::OneShotDirect) and [`TwoShotDirect`](crate::Algorithm::TwoShotDirect) do too.
pub const ALGORITHMS: [crate::Algorithm; 6] = [
    crate::Algorithm::OneShot,
    crate::Algorithm::TwoShot,
    crate::Algorithm::OneShotPull,
    crate::Algorithm::TwoShotPull,
    crate::Algorithm::OneShotLl,
    crate::Algorithm::TwoShotLl,
];

/// Gives the bytes to every parser of this module.
#[cfg(all(fuzzing, not(any(loom, shuttle))))]
pub(crate) fn fuzz(bytes: &[u8]) {
    record::fuzz(bytes);
    crate::self_test::fuzz(bytes);
}
