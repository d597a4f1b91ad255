//! Which algorithm for which message: from a table that was measured on the machine at hand, or from priors.
//!
//! Every algorithm is fastest over some range of sizes. Where one hands over to the next, and where all of them hand
//! over to NCCL, differs from machine to machine, so it is measured (`peersum tune`) and kept in a [`Table`], a file
//! that people can read. Nothing in this module touches a device: who measures hands in a [`Machine`] and times, who
//! joins a group hands in the machine at hand.
//!
//! * The choice is a monotone switch over the bytes of a message: an algorithm that was left doesn't come back, and
//!   equal bytes give equal choices, whatever the tensor's shape. In place or not decides which curve is asked, no
//!   more.
//! * A table holds for the machine that it names. If another GPU, number of ranks, link, driver, release or build of
//!   the kernels is there, or the file is damaged, there is a [`Reason`], and priors choose: a table never makes a call
//!   fail.
//! * All ranks choose alike, since they take the table of rank 0 when they join.
//!
//! ```
//! use peersum::crossover::{Reason, Table};
//!
//! assert_eq!(Table::parse("format = 2").unwrap_err(), "format 2, where this release reads 1: run `peersum tune`");
//! assert!(!Reason::Untuned { path: None }.is_warning());
//! ```

mod agree;
mod explain;
mod file;
mod find;
mod machine;
mod source;
mod table;

pub(crate) use agree::agree;
pub use explain::{Explanation, Facts, NotNccl, Origin, Taken, Why};
pub use file::{FORMAT, MAX_FILE_BYTES};
pub use find::{Found, Place, Reason, TABLE_VARIABLE, default_path, locate};
pub use machine::Machine;
pub use source::{Decision, Question, Source, Tuned};
pub use table::{Curve, Entry, Gap, NcclFrom, Point, Step, Table, Timing};

#[cfg(test)]
mod samples;
