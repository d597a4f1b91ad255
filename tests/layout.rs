//! Rust and C agree on the memory that host and device share.
//!
//! The C side is `kernels/layout.h` as the machine's C compiler compiles it (`tests/layout-probe`).

use peersum::protocol::{layout::Layout, split};
use proptest::prelude::*;

#[test]
fn sizes_offsets_and_constants_are_those_of_c() {
    let rust = layout_probe::bindings::numbers(include_str!("../src/protocol/bindings.rs"));
    let c = layout_probe::numbers();
    assert_eq!(rust.len(), c.len());
    for (name, value) in rust {
        assert_eq!(value, c[&name], "{name}: left: Rust, right: C");
    }
}

/// Holds one layout against C, at the places given.
fn agree(layout: Layout, parity: u32, block: u32, rank: u32) {
    let Layout { world, max_blocks, slot_bytes } = layout;
    assert_eq!(layout.flag(parity, block, rank), layout_probe::flag_offset(world, max_blocks, parity, block, rank));
    assert_eq!(
        layout.slot(parity, block, rank),
        layout_probe::slot_offset(world, max_blocks, slot_bytes, parity, block, rank)
    );
    assert_eq!(layout.segment_bytes(), layout_probe::slot_offset(world, max_blocks, slot_bytes, 2, 0, 0));
}

/// Field case A42 (flashinfer-ai/flashinfer#1223): offsets and sizes that no 32-bit number holds.
#[test]
fn offsets_beyond_32_bits_are_those_of_c() {
    for slot_bytes in [(1u64 << 31) - 128, 1 << 31, (1 << 32) - 128, 1 << 32, (1 << 32) + 128, 1 << 40] {
        for world in [1, 2, 8] {
            let layout = Layout { world, max_blocks: 128, slot_bytes };
            assert!(layout.slot(1, 127, world - 1) > u64::from(u32::MAX));
            agree(layout, 1, 127, world - 1);
            agree(layout, 0, 0, 0);
        }
    }
}

/// Field case A42, for the split of a message.
#[test]
fn splits_around_32_bits_are_those_of_c() {
    let edges = [1u64 << 31, 1 << 32, 1 << 33, 1 << 36].map(|edge| (edge - 3)..=(edge + 3));
    for total in edges.into_iter().flatten() {
        for parts in [1, 2, 3, 7, 8, 127, 128] {
            for index in 0..parts {
                let part = split::split(total, parts, index);
                assert_eq!(part.start, layout_probe::split_start(total, parts, index));
                assert_eq!(part.end, layout_probe::split_start(total, parts, index + 1));
            }
            assert_eq!(layout_probe::split_start(total, parts, parts), total);
        }
    }
}

proptest! {
    #[test]
    fn offsets_are_those_of_c(
        world in 1u32..=64,
        max_blocks in 1u32..=1024,
        slot_lines in 1u64..1 << 30,
        parity in 0u32..2,
        (block, rank) in (any::<u32>(), any::<u32>()),
    ) {
        let layout = Layout { world, max_blocks, slot_bytes: slot_lines * 128 };
        agree(layout, parity, block % max_blocks, rank % world);
    }

    #[test]
    fn splits_are_those_of_c(total in any::<u64>(), parts in 1u64..=4096, index in any::<u64>()) {
        let index = index % parts;
        let part = split::split(total, parts, index);
        prop_assert_eq!(part.start, layout_probe::split_start(total, parts, index));
        prop_assert_eq!(part.end, layout_probe::split_start(total, parts, index + 1));
    }
}
