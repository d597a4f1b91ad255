//! The CUDA backend on real devices. Several ranks share a device where there are fewer devices than ranks.
//!
//! Without a driver, a device or kernels the tests skip and say why; `PEERSUM_REQUIRE_GPU=1` makes that a failure.
//! `PEERSUM_TEST_CALLS` (default 100) is how many calls with new data each combination makes.
#![cfg(feature = "cuda")]
#![allow(unreachable_pub)] // nothing of a test is public

#[path = "../common/mod.rs"]
mod common;

mod data;
mod edges;
mod failures;
mod faults;
mod graphs;
mod harness;
mod kinds;
mod nccl;
mod overlap;
mod packets;
mod processes;
mod stress;
mod symmetric;
mod values;
