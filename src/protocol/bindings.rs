//! Generated from kernels/layout.h by `cargo xtask bindings`; don't edit.
#![allow(dead_code, missing_docs, non_camel_case_types, unreachable_pub)]

pub const PEERSUM_MAX_RANKS: u32 = 8;
pub const PEERSUM_MAX_BLOCKS: u32 = 64;
pub const PEERSUM_MAX_THREADS: u32 = 512;
pub const PEERSUM_LINE_BYTES: u32 = 128;
pub const PEERSUM_PACK_BYTES: u32 = 16;
pub const PEERSUM_LL_PAYLOAD_BYTES: u32 = 12;
pub const PEERSUM_CONTROL_BYTES: u32 = 4096;
pub const PEERSUM_F32: u32 = 0;
pub const PEERSUM_F16: u32 = 1;
pub const PEERSUM_BF16: u32 = 2;
pub const PEERSUM_SUM: u32 = 0;
pub const PEERSUM_AVERAGE: u32 = 1;
pub const PEERSUM_MAX: u32 = 2;
pub const PEERSUM_MIN: u32 = 3;
pub const PEERSUM_ONE_SHOT: u32 = 0;
pub const PEERSUM_TWO_SHOT: u32 = 1;
pub const PEERSUM_ONE_SHOT_PULL: u32 = 2;
pub const PEERSUM_TWO_SHOT_PULL: u32 = 3;
pub const PEERSUM_ONE_SHOT_LL: u32 = 4;
pub const PEERSUM_TWO_SHOT_LL: u32 = 5;
pub const PEERSUM_ONE_SHOT_DIRECT: u32 = 6;
pub const PEERSUM_TWO_SHOT_DIRECT: u32 = 7;
pub const PEERSUM_NCCL: u32 = 8;
pub const PEERSUM_PHASE_EXCHANGE: u32 = 0;
pub const PEERSUM_PHASE_REDUCE_SCATTER: u32 = 1;
pub const PEERSUM_PHASE_ALL_GATHER: u32 = 2;
pub const PEERSUM_PHASE_ENTRY: u32 = 3;
pub const PEERSUM_PHASE_EXIT: u32 = 4;
pub const PEERSUM_PHASE_GATE: u32 = 5;
pub const PEERSUM_GAVE_UP_TIMEOUT: u32 = 1;
pub const PEERSUM_GAVE_UP_MISMATCH: u32 = 2;
pub const PEERSUM_GAVE_UP_ABORTED: u32 = 3;
pub const PEERSUM_ABORT_BY_HOST: u32 = 2147483648;
pub const PEERSUM_HASH_SHIFT: u32 = 32;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct peersum_control {
    pub abort: u32,
    pub claimed: u32,
    pub host_call: [u64; 4usize],
    pub reserved: [u32; 22usize],
    pub epochs: [u32; 64usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of peersum_control"][::core::mem::size_of::<peersum_control>() - 384usize];
    ["Alignment of peersum_control"][::core::mem::align_of::<peersum_control>() - 8usize];
    ["Offset of field: peersum_control::abort"][::core::mem::offset_of!(peersum_control, abort) - 0usize];
    ["Offset of field: peersum_control::claimed"][::core::mem::offset_of!(peersum_control, claimed) - 4usize];
    ["Offset of field: peersum_control::host_call"][::core::mem::offset_of!(peersum_control, host_call) - 8usize];
    ["Offset of field: peersum_control::reserved"][::core::mem::offset_of!(peersum_control, reserved) - 40usize];
    ["Offset of field: peersum_control::epochs"][::core::mem::offset_of!(peersum_control, epochs) - 128usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct peersum_record {
    pub abort_requested: u32,
    pub state: u32,
    pub reason: u32,
    pub rank: u32,
    pub peer: u32,
    pub block: u32,
    pub phase: u32,
    pub epoch: u32,
    pub abort: u32,
    pub dtype: u32,
    pub op: u32,
    pub algorithm: u32,
    pub blocks: u32,
    pub threads: u32,
    pub count: u64,
    pub chunk_units: u64,
    pub input: u64,
    pub output: u64,
    pub expected: u64,
    pub observed: u64,
    pub waited_ns: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of peersum_record"][::core::mem::size_of::<peersum_record>() - 112usize];
    ["Alignment of peersum_record"][::core::mem::align_of::<peersum_record>() - 8usize];
    ["Offset of field: peersum_record::abort_requested"]
        [::core::mem::offset_of!(peersum_record, abort_requested) - 0usize];
    ["Offset of field: peersum_record::state"][::core::mem::offset_of!(peersum_record, state) - 4usize];
    ["Offset of field: peersum_record::reason"][::core::mem::offset_of!(peersum_record, reason) - 8usize];
    ["Offset of field: peersum_record::rank"][::core::mem::offset_of!(peersum_record, rank) - 12usize];
    ["Offset of field: peersum_record::peer"][::core::mem::offset_of!(peersum_record, peer) - 16usize];
    ["Offset of field: peersum_record::block"][::core::mem::offset_of!(peersum_record, block) - 20usize];
    ["Offset of field: peersum_record::phase"][::core::mem::offset_of!(peersum_record, phase) - 24usize];
    ["Offset of field: peersum_record::epoch"][::core::mem::offset_of!(peersum_record, epoch) - 28usize];
    ["Offset of field: peersum_record::abort"][::core::mem::offset_of!(peersum_record, abort) - 32usize];
    ["Offset of field: peersum_record::dtype"][::core::mem::offset_of!(peersum_record, dtype) - 36usize];
    ["Offset of field: peersum_record::op"][::core::mem::offset_of!(peersum_record, op) - 40usize];
    ["Offset of field: peersum_record::algorithm"][::core::mem::offset_of!(peersum_record, algorithm) - 44usize];
    ["Offset of field: peersum_record::blocks"][::core::mem::offset_of!(peersum_record, blocks) - 48usize];
    ["Offset of field: peersum_record::threads"][::core::mem::offset_of!(peersum_record, threads) - 52usize];
    ["Offset of field: peersum_record::count"][::core::mem::offset_of!(peersum_record, count) - 56usize];
    ["Offset of field: peersum_record::chunk_units"][::core::mem::offset_of!(peersum_record, chunk_units) - 64usize];
    ["Offset of field: peersum_record::input"][::core::mem::offset_of!(peersum_record, input) - 72usize];
    ["Offset of field: peersum_record::output"][::core::mem::offset_of!(peersum_record, output) - 80usize];
    ["Offset of field: peersum_record::expected"][::core::mem::offset_of!(peersum_record, expected) - 88usize];
    ["Offset of field: peersum_record::observed"][::core::mem::offset_of!(peersum_record, observed) - 96usize];
    ["Offset of field: peersum_record::waited_ns"][::core::mem::offset_of!(peersum_record, waited_ns) - 104usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct peersum_call {
    pub segments: [u64; 8usize],
    pub input: u64,
    pub output: u64,
    pub count: u64,
    pub packet_region: u64,
    pub slot_bytes: u64,
    pub block_units: u64,
    pub chunk_units: u64,
    pub timeout_ns: u64,
    pub record: u64,
    pub rank: u32,
    pub world: u32,
    pub max_blocks: u32,
    pub op: u32,
    pub hash: u32,
    pub vector_input: u32,
    pub vector_output: u32,
    pub longer_blocks: u32,
    pub early: u32,
    pub dtype: u16,
    pub algorithm: u16,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of peersum_call"][::core::mem::size_of::<peersum_call>() - 176usize];
    ["Alignment of peersum_call"][::core::mem::align_of::<peersum_call>() - 8usize];
    ["Offset of field: peersum_call::segments"][::core::mem::offset_of!(peersum_call, segments) - 0usize];
    ["Offset of field: peersum_call::input"][::core::mem::offset_of!(peersum_call, input) - 64usize];
    ["Offset of field: peersum_call::output"][::core::mem::offset_of!(peersum_call, output) - 72usize];
    ["Offset of field: peersum_call::count"][::core::mem::offset_of!(peersum_call, count) - 80usize];
    ["Offset of field: peersum_call::packet_region"][::core::mem::offset_of!(peersum_call, packet_region) - 88usize];
    ["Offset of field: peersum_call::slot_bytes"][::core::mem::offset_of!(peersum_call, slot_bytes) - 96usize];
    ["Offset of field: peersum_call::block_units"][::core::mem::offset_of!(peersum_call, block_units) - 104usize];
    ["Offset of field: peersum_call::chunk_units"][::core::mem::offset_of!(peersum_call, chunk_units) - 112usize];
    ["Offset of field: peersum_call::timeout_ns"][::core::mem::offset_of!(peersum_call, timeout_ns) - 120usize];
    ["Offset of field: peersum_call::record"][::core::mem::offset_of!(peersum_call, record) - 128usize];
    ["Offset of field: peersum_call::rank"][::core::mem::offset_of!(peersum_call, rank) - 136usize];
    ["Offset of field: peersum_call::world"][::core::mem::offset_of!(peersum_call, world) - 140usize];
    ["Offset of field: peersum_call::max_blocks"][::core::mem::offset_of!(peersum_call, max_blocks) - 144usize];
    ["Offset of field: peersum_call::op"][::core::mem::offset_of!(peersum_call, op) - 148usize];
    ["Offset of field: peersum_call::hash"][::core::mem::offset_of!(peersum_call, hash) - 152usize];
    ["Offset of field: peersum_call::vector_input"][::core::mem::offset_of!(peersum_call, vector_input) - 156usize];
    ["Offset of field: peersum_call::vector_output"][::core::mem::offset_of!(peersum_call, vector_output) - 160usize];
    ["Offset of field: peersum_call::longer_blocks"][::core::mem::offset_of!(peersum_call, longer_blocks) - 164usize];
    ["Offset of field: peersum_call::early"][::core::mem::offset_of!(peersum_call, early) - 168usize];
    ["Offset of field: peersum_call::dtype"][::core::mem::offset_of!(peersum_call, dtype) - 172usize];
    ["Offset of field: peersum_call::algorithm"][::core::mem::offset_of!(peersum_call, algorithm) - 174usize];
};
