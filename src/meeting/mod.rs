//! How the ranks of a group find each other.

mod local;

pub(crate) use local::Local;
