//! Measuring: all ranks time a call, then check it, on either backend.
//!
//! [`rank`] says what a rank of a backend does, [`group`] what a backend has; [`host`] and [`cuda`] are the two.
//! [`run`] drives all ranks through what is timed, [`check`] through what is looked at; [`team`] says whether they are
//! threads of this process, or processes.

pub(crate) mod barrier;
pub(crate) mod candidate;
pub(crate) mod case;
mod check;
mod cores;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod datum;
pub(crate) mod geometry;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) mod grids;
pub(crate) mod group;
pub(crate) mod host;
mod inputs;
pub(crate) mod machine;
pub(crate) mod rank;
pub(crate) mod run;
pub(crate) mod statistics;
pub(crate) mod team;
pub(crate) mod verify;
