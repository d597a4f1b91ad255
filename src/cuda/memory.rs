//! Memory that ranks share: segments on the devices, records on the host.

use std::{
    ffi::{c_int, c_void},
    mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::driver::{Device, check};
use crate::{Error, Result, protocol::bindings, sealed::Sealed};

/// By what processes hand allocations on.
const HANDLES: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A rank's segment: physical memory on its device, mapped where every device of the group reaches it.
pub(crate) struct Segment {
    address: sys::CUdeviceptr,
    reserved: usize,
    handle: sys::CUmemGenericAllocationHandle,
    /// Those whose kernels may use it, its own device first.
    devices: Vec<Arc<Device>>,
    /// How long its end may wait for them.
    patience: Duration,
}

impl Segment {
    /// At least `bytes` zeroed bytes on `devices[0]`, which all `devices` can read and write.
    pub(crate) fn new(devices: Vec<Arc<Device>>, bytes: u64, patience: Duration) -> Result<Segment> {
        let device = devices[0].clone();
        let ordinal = Some(device.ordinal);
        // SAFETY: a property of all zeros is valid: no flags, no handle to be passed on.
        let mut property: sys::CUmemAllocationProp = unsafe { mem::zeroed() };
        property.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        property.requestedHandleTypes = HANDLES;
        property.location = location(&device);
        let mut granularity = 0;
        let wanted = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: the property is complete and `granularity` a valid place for the answer.
        let status = unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &property, wanted) };
        check("cuMemGetAllocationGranularity", ordinal, status)?;
        let reserved = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_next_multiple_of(granularity.max(1)));
        let reserved = reserved.ok_or_else(|| Error::InvalidOption {
            option: "staging_bytes or symmetric_bytes",
            value: bytes.to_string(),
            reason: "more than a device can be asked for".into(),
        })?;
        // From here on the drop of `segment` undoes what was done.
        let mut segment = Segment { address: 0, reserved, handle: 0, devices, patience };
        // SAFETY: the size is a multiple of the granularity, the property complete.
        check("cuMemCreate", ordinal, unsafe { sys::cuMemCreate(&mut segment.handle, reserved, &property, 0) })?;
        segment.map()?;
        Ok(segment)
    }

    /// What another process needs to map it.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let mut descriptor: c_int = -1;
        let place = ptr::from_mut(&mut descriptor).cast();
        // SAFETY: the allocation was made with handles of this type, which are ints.
        let status = unsafe { sys::cuMemExportToShareableHandle(place, self.handle, HANDLES, 0) };
        check("cuMemExportToShareableHandle", Some(self.devices[0].ordinal), status)?;
        // SAFETY: the driver has made the descriptor for this call, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// The segment of another process, of `bytes` bytes, mapped for this rank's device.
    pub(crate) fn import(
        descriptor: &OwnedFd,
        bytes: usize,
        device: Arc<Device>,
        patience: Duration,
    ) -> Result<Segment> {
        let ordinal = Some(device.ordinal);
        let mut segment = Segment { address: 0, reserved: bytes, handle: 0, devices: vec![device.clone()], patience };
        let place = descriptor.as_raw_fd() as usize as *mut c_void;
        let _entered = device.enter()?;
        // SAFETY: a handle of this type is the descriptor itself, in the place of a pointer; the driver keeps what it needs.
        let status = unsafe { sys::cuMemImportFromShareableHandle(&mut segment.handle, place, HANDLES) };
        check("cuMemImportFromShareableHandle", ordinal, status)?;
        segment.map()?;
        Ok(segment)
    }

    /// Maps the allocation where all of its devices reach it.
    fn map(&mut self) -> Result<()> {
        let ordinal = Some(self.devices[0].ordinal);
        // SAFETY: the handle is of so many bytes, a multiple of the granularity; each step uses what the one before it made.
        unsafe {
            let status = sys::cuMemAddressReserve(&mut self.address, self.reserved, 0, 0, 0);
            check("cuMemAddressReserve", ordinal, status)?;
            check("cuMemMap", ordinal, sys::cuMemMap(self.address, self.reserved, 0, self.handle, 0))?;
            let accesses: Vec<_> = self
                .devices
                .iter()
                .map(|device| sys::CUmemAccessDesc {
                    location: location(device),
                    flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                })
                .collect();
            let status = sys::cuMemSetAccess(self.address, self.reserved, accesses.as_ptr(), accesses.len());
            check("cuMemSetAccess", ordinal, status)
        }
    }

    /// Fills it with zeros, and the epochs of the regions that start at these offsets with `first_epoch`, and waits.
    pub(crate) fn clear(&self, regions: [u64; 2], first_epoch: u32) -> Result<()> {
        let stream = Stream::new(self.devices[0].clone())?;
        let ordinal = Some(self.devices[0].ordinal);
        let blocks = bindings::PEERSUM_MAX_BLOCKS as usize;
        let _entered = self.devices[0].enter()?;
        // SAFETY: the range is the segment, which no other rank knows of yet.
        let status = unsafe { sys::cuMemsetD8Async(self.address, 0, self.reserved, stream.handle) };
        check("cuMemsetD8Async", ordinal, status)?;
        for region in regions {
            let epochs = self.address + region + mem::offset_of!(bindings::peersum_control, epochs) as u64;
            // SAFETY: a region starts with its control, so the range lies in the segment.
            let status = unsafe { sys::cuMemsetD32Async(epochs, first_epoch, blocks, stream.handle) };
            check("cuMemsetD32Async", ordinal, status)?;
        }
        // SAFETY: the stream is ours.
        check("cuStreamSynchronize", ordinal, unsafe { sys::cuStreamSynchronize(stream.handle) })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Bytes that it takes on its device.
    pub(crate) fn bytes(&self) -> usize {
        self.reserved
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let deadline = Instant::now() + self.patience;
        let device = self.devices[0].ordinal;
        if self.address != 0 && !self.devices.iter().all(|device| device.quiesce(deadline)) {
            // Unmapping memory that a kernel may still use would break the context.
            tracing::warn!(device, bytes = self.reserved, "work may still use a peersum segment: it is not freed");
            return;
        }
        // SAFETY: nothing uses the segment: no kernel, as was just waited for, and no communicator, since each holds
        // its group's segments. What `new` did not get to is still 0, and undoing that does nothing but fail.
        unsafe {
            if self.address != 0 {
                let _ = sys::cuMemUnmap(self.address, self.reserved);
                let _ = sys::cuMemAddressFree(self.address, self.reserved);
            }
            if self.handle != 0 {
                let _ = sys::cuMemRelease(self.handle);
            }
        }
    }
}

fn location(device: &Device) -> sys::CUmemLocation {
    // cudarc's struct has a field `id`, or a union with it, as the toolkit at hand does; both are these two ints.
    const _: () = assert!(size_of::<sys::CUmemLocation>() == 2 * size_of::<c_int>());
    // SAFETY: all zeros is a valid location of type 0; the type and the device are then stored where C has them, two
    // ints at offsets 0 and 4, which the size above confirms.
    unsafe {
        let mut location: sys::CUmemLocation = mem::zeroed();
        let ints = ptr::from_mut(&mut location).cast::<c_int>();
        ints.write(sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_int);
        ints.add(1).write(device.handle);
        location
    }
}

/// A rank's record: host memory that its kernels write when they give up, and that every rank's host reads.
pub(crate) struct Record {
    address: *mut bindings::peersum_record,
    /// As the rank's kernels address it.
    device_address: u64,
    memory: RecordMemory,
}

/// Where a record lies.
enum RecordMemory {
    /// In memory of the driver's, for the hosts of this process.
    Pinned { device: Arc<Device>, patience: Duration },
    /// In memory that processes share; registered with the driver by the rank whose record it is.
    Shared { registered: Option<(Arc<Device>, Duration)>, mapping: Sealed },
}

// SAFETY: the address is valid on every thread for the record's life, and all access is atomic or behind `state`.
unsafe impl Send for Record {}
// SAFETY: as above.
unsafe impl Sync for Record {}

const RECORD_BYTES: usize = size_of::<bindings::peersum_record>();

impl Record {
    /// For the hosts of this process.
    pub(crate) fn new(device: Arc<Device>, patience: Duration) -> Result<Record> {
        let mut address: *mut c_void = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        {
            let _entered = device.enter()?;
            // SAFETY: the context is current and `address` a valid place for the answer.
            let status = unsafe { sys::cuMemHostAlloc(&mut address, RECORD_BYTES, flags) };
            check("cuMemHostAlloc", Some(device.ordinal), status)?;
        }
        // SAFETY: the allocation is that long, and nobody else knows of it yet.
        unsafe { ptr::write_bytes(address.cast::<u8>(), 0, RECORD_BYTES) };
        // Under unified addressing the same on the host and on every device.
        let device_address = address as u64;
        Ok(Record { address: address.cast(), device_address, memory: RecordMemory::Pinned { device, patience } })
    }

    /// For the hosts of several processes, and by what the others open it.
    pub(crate) fn shared(device: Arc<Device>, patience: Duration) -> Result<(Record, OwnedFd)> {
        let (mapping, descriptor) = Sealed::create(RECORD_BYTES as u64)?;
        let address = mapping.base().as_ptr();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let mut device_address = 0;
        {
            let _entered = device.enter()?;
            let ordinal = Some(device.ordinal);
            // SAFETY: the mapping is whole pages that stay until `drop` has unregistered them.
            let status = unsafe { sys::cuMemHostRegister_v2(address.cast(), mapping.bytes(), flags) };
            check("cuMemHostRegister", ordinal, status)?;
            // SAFETY: the memory is registered so, and the place for the answer valid.
            let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device_address, address.cast(), 0) };
            check("cuMemHostGetDevicePointer", ordinal, status)?;
        }
        let memory = RecordMemory::Shared { registered: Some((device, patience)), mapping };
        Ok((Record { address: address.cast(), device_address, memory }, descriptor))
    }

    /// That of a rank in another process, for this process's host.
    pub(crate) fn open(descriptor: &OwnedFd) -> Result<Record> {
        let mapping = Sealed::open(RECORD_BYTES as u64, descriptor)?;
        let address = mapping.base().as_ptr().cast();
        let memory = RecordMemory::Shared { registered: None, mapping };
        Ok(Record { address, device_address: 0, memory })
    }

    /// As the rank's own kernels address it.
    pub(crate) fn device_address(&self) -> u64 {
        self.device_address
    }

    /// Asks the rank's kernels to give up at their next look, for this reason, which is not 0. The first reason stays.
    pub(crate) fn request_abort(&self, reason: u32) {
        let _ = self.abort_word().compare_exchange(0, reason, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Why that was asked for, or 0 if it wasn't.
    pub(crate) fn abort_requested(&self) -> u32 {
        self.abort_word().load(Ordering::Acquire)
    }

    fn abort_word(&self) -> &AtomicU32 {
        // SAFETY: an aligned u32 in memory that lives as long as the record; kernels load it as one and never write it, and
        // hosts touch it by this alone.
        unsafe { AtomicU32::from_ptr(ptr::addr_of_mut!((*self.address).abort_requested)) }
    }

    /// Whether the rank gave up.
    pub(crate) fn has_given_up(&self) -> bool {
        // SAFETY: `state` is an aligned u32 in live memory, and the kernels write it as one.
        let state = unsafe { AtomicU32::from_ptr(ptr::addr_of_mut!((*self.address).state)) };
        state.load(Ordering::Acquire) != 0
    }

    /// What was written, if the rank gave up.
    pub(crate) fn read(&self) -> Option<bindings::peersum_record> {
        if !self.has_given_up() {
            return None;
        }
        // SAFETY: the kernel released `state` after it wrote the rest, and nobody writes again: the claim is kept.
        Some(unsafe { self.address.read_volatile() })
    }

    /// What was written, if the rank gives up within that time.
    pub(crate) fn read_within(&self, patience: Duration) -> Option<bindings::peersum_record> {
        let deadline = Instant::now() + patience;
        while !self.has_given_up() && Instant::now() < deadline {
            std::thread::yield_now();
        }
        self.read()
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let (device, patience) = match &self.memory {
            RecordMemory::Pinned { device, patience } => (device, *patience),
            RecordMemory::Shared { registered: Some((device, patience)), .. } => (device, *patience),
            RecordMemory::Shared { registered: None, .. } => return,
        };
        if !device.quiesce(Instant::now() + patience) {
            // A kernel may still write it.
            if let RecordMemory::Shared { mapping, .. } = &mut self.memory {
                mapping.leak();
            }
            return;
        }
        let Ok(_entered) = device.enter() else { return };
        // SAFETY: `new` allocated it, or `shared` registered it, and no kernel uses it.
        unsafe {
            let _ = match &self.memory {
                RecordMemory::Pinned { .. } => sys::cuMemFreeHost(self.address.cast()),
                RecordMemory::Shared { .. } => sys::cuMemHostUnregister(self.address.cast()),
            };
        }
    }
}

/// Memory on a device for what is done while a group is made: zeros.
pub(crate) struct Scratch {
    address: sys::CUdeviceptr,
    bytes: usize,
    device: Arc<Device>,
}

impl Scratch {
    /// So many bytes, or the largest part of them by halves that there is room for.
    pub(crate) fn new(device: Arc<Device>, most: usize) -> Result<Scratch> {
        let (mut scratch, mut bytes) = (Scratch { address: 0, bytes: 0, device }, most);
        let ordinal = Some(scratch.device.ordinal);
        let stream = Stream::new(scratch.device.clone())?;
        let device = scratch.device.clone();
        let _entered = device.enter()?;
        loop {
            // SAFETY: the context is current and `address` a valid place for the answer.
            match unsafe { sys::cuMemAlloc_v2(&mut scratch.address, bytes) } {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY if bytes > 4 => bytes = (bytes / 2).max(4),
                status => break check("cuMemAlloc", ordinal, status)?,
            }
        }
        scratch.bytes = bytes;
        // SAFETY: the memory has so many bytes, and nobody else knows of it.
        check("cuMemsetD8Async", ordinal, unsafe { sys::cuMemsetD8Async(scratch.address, 0, bytes, stream.handle) })?;
        // SAFETY: the stream is ours.
        check("cuStreamSynchronize", ordinal, unsafe { sys::cuStreamSynchronize(stream.handle) })?;
        Ok(scratch)
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        if self.address != 0 {
            // SAFETY: `new` allocated it. The driver waits for what still uses it.
            unsafe {
                let _ = sys::cuMemFree_v2(self.address);
            }
        }
    }
}

/// A stream of ours, for what is done while a group is made; it waits for nobody's.
pub(crate) struct Stream {
    handle: sys::CUstream,
    device: Arc<Device>,
}

impl Stream {
    pub(crate) fn new(device: Arc<Device>) -> Result<Stream> {
        let mut handle = ptr::null_mut();
        {
            let _entered = device.enter()?;
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the context is current and `handle` a valid place for the answer.
            check("cuStreamCreate", Some(device.ordinal), unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        }
        Ok(Stream { handle, device })
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Whether its work has ended well before the deadline; waits for it until then.
    pub(crate) fn finish(&self, deadline: Instant) -> bool {
        let Ok(_entered) = self.device.enter() else { return false };
        loop {
            // SAFETY: the stream exists for as long as this does.
            match unsafe { sys::cuStreamQuery(self.handle) } {
                sys::CUresult::CUDA_SUCCESS => return true,
                sys::CUresult::CUDA_ERROR_NOT_READY if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_micros(50));
                }
                _ => return false,
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        // SAFETY: `new` created it; work still in it goes on to its end.
        unsafe {
            let _ = sys::cuStreamDestroy_v2(self.handle);
        }
    }
}
