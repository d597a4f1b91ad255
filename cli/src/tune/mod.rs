//! Measures every algorithm on the machine at hand, and decides which one is for which message.

#[allow(dead_code)] // until the command calls it
mod fit;
