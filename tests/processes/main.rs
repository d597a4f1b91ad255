//! The host backend with ranks that are processes: right results, and an end to every wait when processes die.
//!
//! A test starts this very executable again for each rank, and tells it by lines what to do (`harness`).
#![allow(unreachable_pub)] // nothing of a test is public

#[path = "../common/mod.rs"]
mod common;

mod deaths;
mod groups;
mod harness;
mod meetings;
mod results;
