//! All-reduce between threads of the CPU, by the protocol of [`crate::protocol`] over shared memory.

mod communicator;
mod exchange;
mod group;
mod priors;
mod reduce;
mod segment;
mod sync;
mod wait;

pub use communicator::{AbortHandle, Communicator};
