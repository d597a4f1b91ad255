//! Tensors in memory of every kind that a device reaches.

use std::{
    ffi::{c_int, c_void},
    mem, ptr,
};

use cudarc::driver::sys;
use peersum::{Algorithm, DType, ReduceOp};

use crate::{graphs::capture, harness};

/// The granularity of physical memory on all devices there are.
const CHUNK: usize = 2 << 20;
const BYTES: usize = 2 * CHUNK;
/// Elements of a tensor in the middle, which spans both chunks.
const COUNT: usize = 3000;
const OFFSET: u64 = (CHUNK - 4096) as u64;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Two physical allocations behind one another, as of allocators with segments that grow.
    Chunks,
    /// Of the device's pool.
    Pool,
    Managed,
    /// Of the host.
    Pinned,
}

/// [`BYTES`] of such memory, in the context that is current.
struct Memory {
    kind: Kind,
    address: u64,
    handles: Vec<sys::CUmemGenericAllocationHandle>,
}

impl Memory {
    fn new(kind: Kind, device: usize, stream: sys::CUstream) -> Memory {
        let mut memory = Memory { kind, address: 0, handles: Vec::new() };
        // SAFETY: the context is current, the places for answers are valid, and each step uses what the one before it made.
        unsafe {
            match kind {
                Kind::Chunks => memory.map(device),
                Kind::Pool => sys::cuMemAllocAsync(&mut memory.address, BYTES, stream).result().unwrap(),
                Kind::Managed => {
                    let global = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
                    sys::cuMemAllocManaged(&mut memory.address, BYTES, global).result().unwrap();
                }
                Kind::Pinned => {
                    let mut address: *mut c_void = ptr::null_mut();
                    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
                    sys::cuMemHostAlloc(&mut address, BYTES, flags).result().unwrap();
                    memory.address = address as u64;
                }
            }
            sys::cuStreamSynchronize(stream).result().unwrap();
        }
        memory
    }

    /// # Safety
    /// The context is current.
    unsafe fn map(&mut self, device: usize) {
        // SAFETY: all zeros is a valid property; a location begins with two ints, its type (1: a device) and its number. The
        // range is reserved before it is mapped, chunk by chunk, and then made accessible.
        unsafe {
            let mut property: sys::CUmemAllocationProp = mem::zeroed();
            property.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            let mut access: sys::CUmemAccessDesc = mem::zeroed();
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            for location in [&raw mut property.location, &raw mut access.location] {
                location.cast::<c_int>().write(1);
                location.cast::<c_int>().add(1).write(device as c_int);
            }
            sys::cuMemAddressReserve(&mut self.address, BYTES, 0, 0, 0).result().unwrap();
            for chunk in 0..BYTES / CHUNK {
                let mut handle = 0;
                sys::cuMemCreate(&mut handle, CHUNK, &property, 0).result().unwrap();
                self.handles.push(handle);
                sys::cuMemMap(self.address + (chunk * CHUNK) as u64, CHUNK, 0, handle, 0).result().unwrap();
            }
            sys::cuMemSetAccess(self.address, BYTES, &access, 1).result().unwrap();
        }
    }

    /// # Safety
    /// Nothing uses it any more, and its context is current.
    unsafe fn free(self, stream: sys::CUstream) {
        // SAFETY: each kind is freed as it was made, once.
        unsafe {
            match self.kind {
                Kind::Chunks => {
                    sys::cuMemUnmap(self.address, BYTES).result().unwrap();
                    sys::cuMemAddressFree(self.address, BYTES).result().unwrap();
                    self.handles.iter().for_each(|&handle| sys::cuMemRelease(handle).result().unwrap());
                }
                Kind::Pool => sys::cuMemFreeAsync(self.address, stream).result().unwrap(),
                Kind::Managed => sys::cuMemFree_v2(self.address).result().unwrap(),
                Kind::Pinned => sys::cuMemFreeHost(self.address as *mut c_void).result().unwrap(),
            }
        }
    }
}

/// Field case A30 (vllm-project/vllm#42609, sgl-project/sglang#27593): tensors are read by their rank alone, and go through staging, so it
/// does not matter whose memory they are in, nor that it could not be handed to a peer; eager and captured.
#[test]
fn tensors_may_lie_in_memory_of_any_kind() {
    let Some(devices) = harness::devices() else { return };
    for algorithm in Algorithm::STAGED {
        devices.run(2, &harness::options().algorithm(algorithm), |rank| {
            let stream = rank.stream.cu_stream();
            for kind in [Kind::Chunks, Kind::Pool, Kind::Managed, Kind::Pinned] {
                rank.context.bind_to_thread().unwrap();
                let memories = [(); 2].map(|()| Memory::new(kind, rank.communicator.device(), stream));
                let [input, output] = [&memories[0], &memories[1]].map(|memory| memory.address + OFFSET);
                let state = rank.state(100);
                let call = |rank: &mut harness::Rank| {
                    // SAFETY: both tensors lie in memory that is there until all is synchronised below.
                    unsafe { rank.verified_call(input, output, COUNT, DType::F32, ReduceOp::Sum, &state).unwrap() };
                };
                rank.meet();
                (0..5).for_each(|_| call(rank));
                let graph = capture(rank, |rank| (0..5).for_each(|_| call(rank)));
                rank.meet();
                (0..3).for_each(|_| graph.launch().unwrap());
                let rounds = state.assert_right(rank, format_args!("{algorithm}, {kind:?}"));
                assert_eq!(rounds, 100 + 5 + 15);
                rank.meet();
                drop(graph);
                rank.context.bind_to_thread().unwrap();
                // SAFETY: the stream was synchronised, and the context is current.
                memories.into_iter().for_each(|memory| unsafe { memory.free(stream) });
                rank.stream.synchronize().unwrap();
                rank.meet();
            }
        });
    }
}
