//! Other crates' streams and buffers over the raw call.

pub mod cudarc;
#[cfg(feature = "cust")]
pub mod cust;
mod symmetric;

pub use symmetric::SymmetricBuffer;
