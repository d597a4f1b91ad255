//! What strangers and ranks send to a meeting, and what a launcher's environment says.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| peersum::fuzz::parse(bytes));
