//! `kernels/layout.h` as a C compiler sees it.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char},
};

pub mod bindings;

#[repr(C)]
struct Number {
    name: *const c_char,
    value: u64,
}

// SAFETY: these are the signatures in probe.c. The functions marked safe compute from their arguments alone.
unsafe extern "C" {
    safe fn layout_probe_number(index: usize) -> Number;
    /// Divides by `parts`.
    fn layout_probe_split_start(total: u64, parts: u64, index: u64) -> u64;
    safe fn layout_probe_flag_offset(world: u32, max_blocks: u32, parity: u32, block: u32, writer: u32) -> u64;
    safe fn layout_probe_slot_offset(
        world: u32,
        max_blocks: u32,
        slot_bytes: u64,
        parity: u32,
        block: u32,
        source: u32,
    ) -> u64;
}

/// The header's numbers in C, named as [`bindings::numbers`] names them.
pub fn numbers() -> BTreeMap<String, u64> {
    (0..)
        .map(|index| layout_probe_number(index))
        .take_while(|number| !number.name.is_null())
        .map(|number| {
            // SAFETY: a name that is not null is a string literal of probe.c.
            let name = unsafe { CStr::from_ptr(number.name) };
            (name.to_str().expect("C identifiers are ASCII").to_owned(), number.value)
        })
        .collect()
}

/// `peersum_split_start`.
///
/// # Panics
///
/// If `parts` is 0.
pub fn split_start(total: u64, parts: u64, index: u64) -> u64 {
    assert_ne!(parts, 0, "there is no split over no parts");
    // SAFETY: the function divides by `parts`, which is not 0, and does nothing else that could fail.
    unsafe { layout_probe_split_start(total, parts, index) }
}

/// `peersum_flag_offset`.
pub fn flag_offset(world: u32, max_blocks: u32, parity: u32, block: u32, writer: u32) -> u64 {
    layout_probe_flag_offset(world, max_blocks, parity, block, writer)
}

/// `peersum_slot_offset`.
pub fn slot_offset(world: u32, max_blocks: u32, slot_bytes: u64, parity: u32, block: u32, source: u32) -> u64 {
    layout_probe_slot_offset(world, max_blocks, slot_bytes, parity, block, source)
}
