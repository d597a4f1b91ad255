//! All-reduce across the GPUs, or the CPU cores, of one machine.
//!
//! Every rank holds a `Communicator`: [`cuda::Communicator`] where ranks are GPUs, [`host::Communicator`] where they
//! are threads, or processes, of the CPU. Both have the same verbs and run the same protocol, described in [`protocol`].
//!
//! What holds for every call, on both backends:
//!
//! * **Same bits everywhere.** Sums accumulate in f32 in rank order 0..N−1 and round once, so every rank gets the same
//!   bits, whichever algorithm and however long the message. Where a table hands a call over to NCCL, which was measured to be
//!   faster there, the bits are NCCL's; [`Options::deterministic`] keeps it out.
//! * **Nothing is silently not done.** A call either reduces, or returns an [`Error`] that says what to change.
//! * **Waits end.** A rank that waits longer than [`Options::timeout`] for a peer gives up, tells all others, and the
//!   error names the peer that did not come.
//!
//! ```
//! use peersum::{Options, ReduceOp, host::Communicator};
//!
//! let ranks = Communicator::local(2, &Options::default())?;
//! std::thread::scope(|scope| {
//!     for mut rank in ranks {
//!         scope.spawn(move || {
//!             let mut tensor = vec![1.5f32; 1000];
//!             rank.all_reduce_in_place(&mut tensor, ReduceOp::Sum).unwrap();
//!             assert!(tensor.iter().all(|&sum| sum == 3.0));
//!         });
//!     }
//! });
//! # Ok::<(), peersum::Error>(())
//! ```
#![warn(missing_docs)]

#[cfg(all(feature = "cuda", not(any(loom, shuttle))))]
pub mod crossover;
#[cfg(all(feature = "cuda", not(any(loom, shuttle))))]
pub mod cuda;
mod dtype;
mod error;
#[cfg(all(fuzzing, not(any(loom, shuttle))))]
#[doc(hidden)]
pub mod fuzz;
mod heap;
pub mod host;
#[cfg(all(feature = "cuda", not(any(loom, shuttle))))]
pub mod interop;
mod meeting;
#[cfg(all(feature = "cuda", not(any(loom, shuttle))))]
pub mod nccl;
mod op;
mod options;
pub mod protocol;
#[cfg(not(any(loom, shuttle)))]
mod sealed;
#[cfg(not(any(loom, shuttle)))]
mod self_test;

pub use dtype::{DType, Element};
pub use error::{Error, Phase, Result};
#[cfg(not(any(loom, shuttle)))]
pub use meeting::Meeting;
pub use op::ReduceOp;
pub use options::{HostStores, Nccl, Options, Overlap, TableFrom};
pub use protocol::{
    call::Call,
    plan::{Algorithm, Choice, Placement, Plan},
};

/// Runs the examples of the README with the tests, where all of them compile.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../README.md")]
struct Readme;
