//! What the packets rest on, and the flags: that accesses of 16 and of 8 bytes come whole.

use std::time::Duration;

use cudarc::driver::DevicePtr;

use crate::harness;

const BLOCKS: u32 = 64;
const PLACES: usize = BLOCKS as usize * 256;
/// All places together have 10⁹.
const ROUNDS: u32 = 61_036;

/// 10⁹ packets and 10⁹ words from each rank to the other, and none torn: over NVLink where there are two devices.
///
/// A reader sees some of a place's rounds, since they come faster than it looks; but it looks as often.
#[test]
fn none_of_a_billion_is_torn() {
    let Some(devices) = harness::devices() else { return };
    let options = harness::options().symmetric_bytes(1 << 20);
    devices.run(2, &options, |rank| {
        let places = rank.communicator.symmetric_memory(16 * PLACES).unwrap();
        let peers = rank.communicator.peer_address(1 - rank.rank, places.address());
        // The reader beside the writer: on another stream, and on a shared device in what the others leave free.
        let reader = rank.second_stream();
        for packets in [false, true] {
            let zeros = vec![0u8; 16 * PLACES];
            rank.context.bind_to_thread().unwrap();
            // SAFETY: the memory has so many bytes, and nothing else uses it now.
            unsafe { cudarc::driver::result::memcpy_htod_sync(places.address(), &zeros).unwrap() };
            let counts = rank.stream.clone_htod(&[0u64; 3]).unwrap();
            rank.stream.synchronize().unwrap();
            rank.meet();
            let address = counts.device_ptr(&rank.stream).0;
            // SAFETY: all places and counts are there until both streams are synchronised, by both ranks.
            unsafe {
                let (verifier, patience) = (&rank.verifier, Duration::from_secs(10));
                let stream = reader.cu_stream().cast();
                verifier.read_whole(packets, BLOCKS, places.address(), ROUNDS, patience, address, stream).unwrap();
                verifier.write_whole(packets, BLOCKS, peers, ROUNDS, rank.raw_stream()).unwrap();
            }
            reader.synchronize().unwrap();
            rank.stream.synchronize().unwrap();
            rank.meet();
            let counts = rank.stream.clone_dtoh(&counts).unwrap();
            rank.stream.synchronize().unwrap();
            let [loads, fresh, torn] = counts[..] else { panic!("three counts") };
            let what = if packets { "packets" } else { "words" };
            let written = PLACES as u64 * u64::from(ROUNDS);
            eprintln!("rank {}: {written} {what} written: {loads} loads, {fresh} rounds seen, {torn} torn", rank.rank);
            assert!(written >= 1_000_000_000 && fresh > 10 * PLACES as u64, "{fresh} rounds seen");
            assert_eq!(torn, 0, "{what}");
            rank.meet();
        }
    });
}
