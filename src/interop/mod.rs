//! Other crates' streams and buffers.
