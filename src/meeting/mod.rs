//! How the ranks of a group find each other.

// The host backend's ranks are made together and have nobody to meet.
#![cfg_attr(not(all(feature = "cuda", not(any(loom, shuttle)))), allow(dead_code, unused_imports))]

mod local;

pub(crate) use local::Local;
