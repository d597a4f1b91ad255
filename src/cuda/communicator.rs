//! A rank's handle.

use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use cudarc::driver::{CudaStream, sys};

use super::{
    driver::{self, Device, check},
    memory::{Record, Segment},
    module::{Kernels, resident_index},
    priors,
    symmetric::{Heap, SymmetricMemory},
};
use crate::{
    Algorithm, DType, Error, Options, Overlap, Phase, Placement, Plan, ReduceOp, Result,
    meeting::Local,
    protocol::{
        bindings,
        call::Call,
        layout::Layout,
        plan::{Choice, Priors, plan},
        split::PACK_BYTES,
    },
};

const DEFAULT_STAGING_BYTES: usize = 32 << 20;
/// How long a check waits for the record of a rank that is in another call. Its kernel looks up every some hundred
/// microseconds, so it is there, or as good as never.
const PATIENCE_WITH_PEER: Duration = Duration::from_millis(50);

/// One rank of a group of GPUs.
///
/// A call enqueues one kernel on the caller's stream and returns: it doesn't allocate, synchronise or record an event.
/// Every rank must make the same calls in the same order, each on one stream at a time. When a peer fails, the kernel
/// gives up after [`Options::timeout`], and the error comes from the next call or from [`Communicator::check`]: check after
/// synchronising the stream, before the output is used, which then holds some of the result at most.
///
/// # Memory
///
/// A rank takes on its device: 8 KiB of control, 32 KiB of flags per rank of the group, the staging
/// ([`Options::staging_bytes`], 32 MiB unless set otherwise, whatever the number of ranks; half of it for packets), and the
/// symmetric memory ([`Options::symmetric_bytes`], none unless set otherwise), all rounded up to 2 MiB. That is 34 MiB for 1 to 8 ranks by default; [`Communicator::memory_bytes`] tells.
///
/// # Dropping
///
/// The group's memory is freed when its last communicator goes (or the last graph of
/// [`interop::cudarc::Graph`](crate::interop::cudarc::Graph)), after work that was enqueued in the devices' contexts has
/// finished. That is waited for, at most for the timeout and a second; if work is still there then, the memory is not
/// freed, and a warning is logged.
pub struct Communicator {
    rank: u32,
    kernels: Kernels,
    /// Blocks that a rank may have resident, where [`resident_index`] says: the least of all ranks.
    resident: Vec<u32>,
    options: Options,
    priors: Priors,
    forced: Option<Choice>,
    /// Whether the device has programmatic dependent launch.
    dependent_launch: bool,
    /// Where the last call went, if its grid was too large for the next to come early.
    last_large: Option<Place>,
    last_stream: Arc<Mutex<Option<Arc<CudaStream>>>>,
    heap: Arc<Heap>,
    group: Arc<Group>,
}

/// What all communicators of a group hold.
pub(crate) struct Group {
    /// How the group ended, for all ranks alike, once one has found out.
    failure: OnceLock<Error>,
    /// The regions of every segment, one behind the other: for flags and their slots, and for LL packets.
    regions: [Layout; 2],
    segments: Vec<Arc<Segment>>,
    records: Vec<Arc<Record>>,
    devices: Vec<Arc<Device>>,
}

impl Group {
    fn check(&self) -> Result<()> {
        if self.records.iter().any(|record| record.has_given_up() || record.abort_requested()) {
            return Err(self.failure.get_or_init(|| self.cause()).clone());
        }
        Ok(())
    }

    /// What ended the group: the first cause, not what it did to the others. Only once something has.
    #[cold]
    fn cause(&self) -> Error {
        // A rank writes its record before it tells the others, so where one was seen, the record of its cause is there.
        let records: Vec<_> = self.records.iter().map(|record| record.read()).collect();
        let mut aborted = None;
        for record in records.iter().flatten() {
            match self.error_of(record) {
                error @ Error::Aborted { .. } => aborted = aborted.or(Some(error)),
                cause => return cause,
            }
        }
        if self.records.iter().any(|record| record.abort_requested()) {
            return Error::Aborted { by: None };
        }
        aborted.unwrap_or(Error::Aborted { by: None })
    }

    fn error_of(&self, record: &bindings::peersum_record) -> Error {
        let peers = self.records.get(record.peer as usize);
        let peers = match record.reason {
            // The peer finds that out too, or that this rank did, and gives up.
            bindings::PEERSUM_GAVE_UP_MISMATCH => peers.and_then(|peers| peers.read_within(PATIENCE_WITH_PEER)),
            _ => None,
        };
        error_of(record, peers.as_ref())
    }
}

/// How a kernel overlaps with those before and after it in its stream.
struct Neighbours {
    /// It is made ready while the previous kernel runs.
    behind_previous: bool,
    /// It lets the next one's blocks come while it runs.
    early: bool,
    /// Where it goes, if the grid is too large for that.
    large: Option<Place>,
}

/// A stream, or the capture that is under way on it: the first call of one doesn't follow the last call of the other, and
/// a capture may be thrown away.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    stream: usize,
    captured: bool,
}

/// What graphs keep of a rank: its group's memory, and the stream that it used last.
#[derive(Clone)]
pub(crate) struct Lifeline {
    group: Arc<Group>,
    last_stream: Arc<Mutex<Option<Arc<CudaStream>>>>,
}

impl Lifeline {
    /// The failure of the group, if there is one.
    pub(crate) fn check(&self) -> Result<()> {
        self.group.check()
    }

    /// The stream of the rank's last call by the safe layer.
    pub(crate) fn last_stream(&self) -> MutexGuard<'_, Option<Arc<CudaStream>>> {
        self.last_stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether both are the same rank's.
    pub(crate) fn is(&self, other: &Lifeline) -> bool {
        Arc::ptr_eq(&self.last_stream, &other.last_stream)
    }
}

/// Aborts a group from any thread.
#[derive(Clone)]
pub struct AbortHandle {
    group: Arc<Group>,
}

impl AbortHandle {
    /// Ends every rank's wait, now and later: kernels that wait leave within a millisecond or so, their output unfinished,
    /// and every call and check of the group returns [`Error::Aborted`]. Only writes a word of host memory:
    /// it returns at once, and works whatever the devices are busy with.
    pub fn abort(&self) {
        self.group.records.iter().for_each(|record| record.request_abort());
    }
}

impl Communicator {
    /// The communicators of ranks that live in this process, rank r on `devices[r]`. A device may stand several times.
    ///
    /// All devices must be able to map each other's memory. Blocks until every rank is ready, at most for the timeout.
    pub fn local(devices: &[usize], options: &Options) -> Result<Vec<Communicator>> {
        let world = devices.len();
        if world == 0 || world > bindings::PEERSUM_MAX_RANKS as usize {
            let most = bindings::PEERSUM_MAX_RANKS as usize;
            return Err(Error::UnsupportedWorld { world, backend: "the CUDA backend", most });
        }
        super::available()?;
        let seats = Local::group(world, options.timeout);
        let joined: Vec<Result<Communicator>> = std::thread::scope(|scope| {
            let joins: Vec<_> = seats
                .into_iter()
                .zip(devices)
                .map(|(mut seat, &device)| {
                    scope.spawn(move || {
                        let joined = Communicator::join(&mut seat, device, options);
                        if let Err(error) = &joined {
                            seat.leave(error);
                        }
                        joined
                    })
                })
                .collect();
            joins.into_iter().map(|join| join.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        // The first cause, not what it did to the others.
        let mut communicators = Vec::with_capacity(world);
        let mut consequence = None;
        for result in joined {
            match result {
                Ok(communicator) => communicators.push(communicator),
                Err(error @ (Error::PeerFailed { .. } | Error::MeetingTimeout { .. })) => {
                    consequence.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        consequence.map_or(Ok(communicators), Err)
    }

    fn join(seat: &mut Local, device: usize, options: &Options) -> Result<Communicator> {
        validate(options)?;
        let (rank, world) = (seat.rank(), seat.world() as u32);
        for (peer, theirs) in seat.all_gather(options.clone())?.iter().enumerate() {
            if theirs != options {
                return Err(Error::OptionsDiffer { rank, peer });
            }
        }
        let device = Device::open(device)?;
        let devices = seat.all_gather(device.clone())?;
        for peer in &devices {
            if peer.ordinal != device.ordinal && !device.can_access(peer)? {
                return Err(Error::NoPeerAccess { from: device.ordinal, to: peer.ordinal });
            }
        }
        let sharing = devices.iter().filter(|peer| peer.ordinal == device.ordinal).count() as u32;
        if sharing > 8 && std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
            tracing::warn!(sharing, "ranks share a device: set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts");
        }

        let patience = patience(options);
        let kernels = Kernels::load(&device, world)?;
        let resident = seat
            .all_gather(kernels.resident(&device, sharing)?)?
            .into_iter()
            .reduce(|left, right| left.into_iter().zip(right).map(|(left, right)| left.min(right)).collect());
        let resident = resident.unwrap_or_default();

        let staging = options.staging_bytes.unwrap_or(DEFAULT_STAGING_BYTES);
        let region = Layout::new(world, bindings::PEERSUM_MAX_BLOCKS, staging / 2)?;
        let regions = [region; 2];
        let regions_bytes: u64 = regions.iter().map(Layout::segment_bytes).sum();
        let heap_start = regions_bytes.next_multiple_of(bindings::PEERSUM_LINE_BYTES as u64 * 2);
        let bytes = heap_start.saturating_add(options.symmetric_bytes as u64);
        // Cleared before any peer knows of it, so that no peer's flag can be wiped.
        let segment = Segment::new(distinct(&device, &devices), bytes, patience)?;
        segment.clear([0, regions[0].segment_bytes()], options.first_epoch)?;
        let heap = segment.address() + heap_start..segment.address() + bytes;
        let segments = seat.all_gather(Arc::new(segment))?;
        let records = seat.all_gather(Arc::new(Record::new(device.clone(), patience)?))?;
        let group = Arc::new(Group { failure: OnceLock::new(), regions, segments, records, devices });
        Ok(Communicator {
            rank: rank as u32,
            kernels,
            resident,
            options: options.clone(),
            priors: priors::choose,
            forced: None,
            dependent_launch: device
                .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
                >= 9,
            last_large: None,
            last_stream: Arc::default(),
            heap: Arc::new(Heap::new(heap)),
            group,
        })
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.regions[0].world as usize
    }

    /// The ordinal of this rank's device.
    pub fn device(&self) -> usize {
        self.own_device().ordinal
    }

    fn own_device(&self) -> &Device {
        &self.group.devices[self.rank as usize]
    }

    /// Bytes of device memory that this rank takes.
    pub fn memory_bytes(&self) -> usize {
        self.group.segments[self.rank as usize].bytes()
    }

    /// A piece of this rank's symmetric memory, of [`Options::symmetric_bytes`], its content undefined. Tensors in it are
    /// reduced where they are, without a copy into staging, where the plan chooses so: the peers read them, and with input
    /// and output there write them. To whoever enqueues work that makes no difference: a call ends in its stream when no
    /// peer reads or writes the tensors any more.
    ///
    /// Peers look for a rank's tensors at the offset that their own have. So every rank must allocate, and free, the same
    /// sizes in the same order; offsets that differ in a call are [`Error::Mismatch`].
    pub fn symmetric_memory(&self, bytes: usize) -> Result<SymmetricMemory> {
        let device = &self.group.devices[self.rank as usize];
        SymmetricMemory::new(bytes, &self.heap, device, patience(&self.options), &self.group).ok_or_else(|| {
            Error::SymmetricMemoryFull {
                rank: self.rank(),
                wanted: bytes,
                free: self.heap.free() as usize,
                total: self.heap.total() as usize,
            }
        })
    }

    /// How a message of `count` elements, of tensors anywhere, would be reduced: `None` where there is nothing to exchange.
    pub fn plan(&self, count: usize, dtype: DType) -> Result<Option<Plan>> {
        self.plan_at(Placement::Anywhere, count, dtype)
    }

    /// The same, of tensors that lie so.
    pub fn plan_at(&self, placement: Placement, count: usize, dtype: DType) -> Result<Option<Plan>> {
        let bytes = bytes_of(count, dtype)?;
        if bytes == 0 || self.world_size() == 1 {
            return Ok(None);
        }
        let resident = |algorithm, threads| self.resident_blocks(algorithm, threads);
        let mut options = self.options.clone();
        if let Some(forced) = self.forced {
            options = options.algorithm(forced.algorithm).blocks(forced.blocks).threads(forced.threads);
        }
        plan(bytes, placement, &self.group.regions[0], &options, self.priors, &resident).map(Some)
    }

    /// Where tensors of `bytes` bytes at these addresses lie.
    fn placement(&self, input: u64, output: u64, bytes: u64) -> Placement {
        match (self.heap.holds(input, bytes), self.heap.holds(output, bytes)) {
            (true, true) if input == output => Placement::SymmetricInPlace,
            (true, true) => Placement::Symmetric,
            (true, false) => Placement::SymmetricInput,
            (false, _) => Placement::Anywhere,
        }
    }

    /// Runs every following call as `choice` says, until it is `None`: for measuring candidates. Every rank must set the
    /// same between the same calls, or they will be told that their calls differ.
    pub fn force(&mut self, choice: Option<Choice>) -> Result<()> {
        if let Some(choice) = choice {
            validate(&self.options.clone().blocks(choice.blocks).threads(choice.threads))?;
        }
        self.forced = choice;
        Ok(())
    }

    /// The failure of the group, if there is one: of this rank or of any other. The first that any rank's check finds stays,
    /// for all of them. Doesn't synchronise: what a kernel that still runs will find is not known yet. Waits for nothing but,
    /// once for a group whose ranks differ, up to 50 ms until the other of two ranks has left its call too.
    pub fn check(&self) -> Result<()> {
        self.group.check()
    }

    /// Aborts the group; see [`AbortHandle::abort`].
    pub fn abort(&self) {
        self.abort_handle().abort();
    }

    /// A handle that aborts the group from any thread, also while this rank is busy.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle { group: self.group.clone() }
    }

    /// The last finished epoch of every block, of rounds by flags and then of rounds by packets. Waits for work that was enqueued in the context; for tests.
    pub fn epochs(&self) -> Result<Vec<u32>> {
        let device = self.own_device();
        let blocks = bindings::PEERSUM_MAX_BLOCKS as usize;
        let mut epochs = vec![0u32; 2 * blocks];
        let address = self.group.segments[self.rank as usize].address();
        let offset = std::mem::offset_of!(bindings::peersum_control, epochs) as u64;
        let _entered = device.enter()?;
        // SAFETY: waits for the context that is current.
        check("cuCtxSynchronize", Some(device.ordinal), unsafe { sys::cuCtxSynchronize() })?;
        for (epochs, region) in epochs.chunks_mut(blocks).zip([0, self.group.regions[0].segment_bytes()]) {
            // SAFETY: the epochs lie in the segment, and the slice has room for a region's.
            let status = unsafe {
                sys::cuMemcpyDtoH_v2(epochs.as_mut_ptr().cast(), address + region + offset, size_of_val(epochs))
            };
            check("cuMemcpyDtoH", Some(device.ordinal), status)?;
        }
        Ok(epochs)
    }

    /// Makes this the last finished epoch of every block, of rounds by packets: for tests that leave out most of a lap.
    /// All ranks must do it between the same calls. Waits for work that was enqueued in the context.
    #[doc(hidden)]
    pub fn skip_to_packet_epoch(&self, epoch: u32) -> Result<()> {
        let device = self.own_device();
        let region = self.group.segments[self.rank as usize].address() + self.group.regions[0].segment_bytes();
        let epochs = region + std::mem::offset_of!(bindings::peersum_control, epochs) as u64;
        let blocks = bindings::PEERSUM_MAX_BLOCKS as usize;
        let wait = || {
            // SAFETY: waits for the context that is current.
            check("cuCtxSynchronize", Some(device.ordinal), unsafe { sys::cuCtxSynchronize() })
        };
        let _entered = device.enter()?;
        wait()?;
        // SAFETY: a region starts with its control, so the range lies in the segment, where no kernel of this rank is
        // any more.
        check("cuMemsetD32", Some(device.ordinal), unsafe { sys::cuMemsetD32_v2(epochs, epoch, blocks) })?;
        wait()
    }

    /// Where `writer`'s flag of a half lies in this rank's memory, in the region of packets or in that of flags: for tests
    /// that lose one.
    #[doc(hidden)]
    pub fn flag_address(&self, packets: bool, half: u32, block: u32, writer: u32) -> u64 {
        let [flags, _] = &self.group.regions; // both are alike
        let region = if packets { flags.segment_bytes() } else { 0 };
        self.group.segments[self.rank as usize].address() + region + flags.flag(half, block, writer)
    }

    /// Enqueues the all-reduce of `count` elements of `dtype` at `input` into `output` on `stream`.
    ///
    /// The addresses are of memory that this rank's device can read and write: its own, or host memory that is pinned
    /// and mapped. The same address twice reduces in place; ranges that overlap otherwise are an error. Any alignment
    /// that `dtype` allows will do, the fastest is 16 bytes. The ranks' addresses and alignments may differ.
    ///
    /// `stream` is a `CUstream` (or `cudaStream_t`) of the device's primary context; null is its default stream.
    ///
    /// With `count` 0 nothing is enqueued. In a group of one rank the call copies.
    ///
    /// # Errors
    ///
    /// Those of the arguments and the plan, before anything is enqueued, and the group's failure, as
    /// [`Communicator::check`] gives it.
    ///
    /// # Safety
    ///
    /// * Both ranges must be valid, on this rank's device, until the work that this call enqueues has finished; and if
    ///   the stream is being captured, whenever a graph with it is launched.
    /// * Nothing else may write the input, or touch the output, meanwhile.
    /// * Two kernels of one rank must not run at the same time: a call on another stream than the last one's must be
    ///   ordered behind it, by an event for example. That goes for a call of
    ///   [`interop::cudarc`](crate::interop::cudarc) behind this one too, which orders itself behind calls of its own
    ///   alone.
    /// * A graph that captured this call must not run after the last communicator of the group is dropped, and not at
    ///   the same time as another call of this communicator.
    pub unsafe fn all_reduce_raw(
        &mut self,
        input: u64,
        output: u64,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: *mut c_void,
    ) -> Result<()> {
        self.check()?;
        let bytes = bytes_of(count, dtype)?;
        if bytes == 0 {
            return Ok(());
        }
        validate_addresses(input, output, count, bytes, dtype)?;
        let device = &*self.group.devices[self.rank as usize];
        let stream = driver::stream_handle(stream);
        let _entered = device.enter()?;
        let mut context = ptr::null_mut();
        // SAFETY: the caller gives a live stream, or null, which means the context that was just made current.
        let status = unsafe { sys::cuStreamGetCtx(stream, &mut context) };
        if status != sys::CUresult::CUDA_SUCCESS || context != device.context() {
            return Err(Error::ForeignStream { device: device.ordinal });
        }
        let Some(plan) = self.plan_at(self.placement(input, output, bytes), count, dtype)? else {
            if input != output {
                // SAFETY: the caller vouches for both ranges.
                let status = unsafe { sys::cuMemcpyDtoDAsync_v2(output, input, bytes as usize, stream) };
                check("cuMemcpyDtoDAsync", Some(device.ordinal), status)?;
            }
            return Ok(());
        };
        let overlap = self.overlap(plan, stream);
        let mut call = self.call(input, output, count as u64, bytes, dtype, op, plan);
        call.early = u32::from(overlap.early);
        let mut arguments = [ptr::from_mut(&mut call).cast::<c_void>()];
        // SAFETY: an attribute is plain data, for which all zeros is a value.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: plan.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: plan.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: stream,
            attrs: &mut attribute,
            numAttrs: u32::from(overlap.behind_previous),
        };
        let function = self.kernels.function(plan.algorithm, dtype, op);
        // SAFETY: the kernel takes one peersum_call by value, which the driver copies now. What it points to is the
        // group's, which outlives the work (`Segment` waits for it), or the caller's, who vouches for it. The grid is
        // resident together with all other ranks' of the device, by `plan`, and with the next one's, by `overlap`.
        let status = unsafe { sys::cuLaunchKernelEx(&config, function, arguments.as_mut_ptr(), ptr::null_mut()) };
        check("cuLaunchKernel", Some(device.ordinal), status)?;
        self.last_large = overlap.large;
        Ok(())
    }

    /// How this call's kernel may overlap with its neighbours in the stream so that all blocks that wait for peers, of
    /// all ranks of the device, stay resident together.
    ///
    /// The next kernel's blocks may come early only where this grid and the next take at most half of a rank's place
    /// each. A larger grid keeps the next from coming until its own blocks end, and itself comes before the last kernel
    /// has ended only where that was as large: then it takes the place of blocks that have ended.
    fn overlap(&self, plan: Plan, stream: sys::CUstream) -> Neighbours {
        let small = 2 * plan.blocks <= self.resident_blocks(plan.algorithm, plan.threads);
        let on = self.dependent_launch && self.options.overlap != Overlap::Off;
        let large = if small { None } else { place(stream) };
        Neighbours {
            behind_previous: on && (small || large.is_some() && self.last_large == large),
            early: on && small && self.options.overlap == Overlap::Early,
            large,
        }
    }

    fn resident_blocks(&self, algorithm: Algorithm, threads: u32) -> u32 {
        self.resident.get(resident_index(algorithm, threads)).copied().unwrap_or(0)
    }

    #[allow(clippy::too_many_arguments)] // the fields of one struct
    fn call(
        &self,
        input: u64,
        output: u64,
        count: u64,
        bytes: u64,
        dtype: DType,
        op: ReduceOp,
        plan: Plan,
    ) -> bindings::peersum_call {
        let group = &self.group;
        let mut segments = [0; bindings::PEERSUM_MAX_RANKS as usize];
        for (address, segment) in segments.iter_mut().zip(&group.segments) {
            *address = segment.address();
        }
        let layout = &group.regions[0]; // both are alike
        let own = segments[self.rank as usize];
        let offsets = offsets(plan.algorithm, input.wrapping_sub(own), output.wrapping_sub(own));
        let (units, blocks) = (bytes.div_ceil(plan.algorithm.unit_bytes()), u64::from(plan.blocks));
        bindings::peersum_call {
            segments,
            input,
            output,
            count,
            packet_region: group.regions[0].segment_bytes(),
            slot_bytes: layout.slot_bytes,
            block_units: units / blocks,
            chunk_units: plan.chunk_bytes / plan.algorithm.unit_bytes(),
            timeout_ns: u64::try_from(self.options.timeout.as_nanos()).unwrap_or(u64::MAX),
            record: group.records[self.rank as usize].device_address(),
            rank: self.rank,
            world: layout.world,
            max_blocks: layout.max_blocks,
            op: op.code(),
            hash: Call { bytes, dtype, op, plan, offsets }.hash(),
            vector_input: u32::from(input.is_multiple_of(PACK_BYTES)),
            vector_output: u32::from(output.is_multiple_of(PACK_BYTES)),
            longer_blocks: (units % blocks) as u32,
            early: 0,
            dtype: dtype.code() as u16,
            algorithm: plan.algorithm.code() as u16,
        }
    }

    pub(crate) fn lifeline(&self) -> Lifeline {
        Lifeline { group: self.group.clone(), last_stream: self.last_stream.clone() }
    }

    pub(crate) fn context(&self) -> sys::CUcontext {
        self.own_device().context()
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let devices: Vec<usize> = self.group.devices.iter().map(|device| device.ordinal).collect();
        f.debug_struct("Communicator").field("rank", &self.rank).field("devices", &devices).finish_non_exhaustive()
    }
}

/// `None` where the driver won't say.
fn place(stream: sys::CUstream) -> Option<Place> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the caller of the raw call gives a live stream; `status` is a valid place for the answer.
    let asked = unsafe { sys::cuStreamIsCapturing(stream, &mut status) };
    (asked == sys::CUresult::CUDA_SUCCESS).then_some(Place {
        stream: stream as usize,
        captured: status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
    })
}

/// The device and those of its peers, each once, its own first.
fn distinct(own: &Arc<Device>, devices: &[Arc<Device>]) -> Vec<Arc<Device>> {
    let mut distinct = vec![own.clone()];
    for device in devices {
        if distinct.iter().all(|known| known.ordinal != device.ordinal) {
            distinct.push(device.clone());
        }
    }
    distinct
}

/// How long the end of memory may wait for kernels that use it, which may wait for their peers for the timeout.
fn patience(options: &Options) -> Duration {
    options.timeout.saturating_add(Duration::from_secs(1))
}

fn validate(options: &Options) -> Result<()> {
    let invalid = |option, value: String, reason: String| Err(Error::InvalidOption { option, value, reason });
    if let Some(threads) = options.threads {
        let most = bindings::PEERSUM_MAX_THREADS;
        if threads == 0 || threads % 32 != 0 || threads > most {
            return invalid("threads", threads.to_string(), format!("it must be a multiple of 32, from 32 to {most}"));
        }
    }
    if let Some(blocks) = options.blocks {
        let most = bindings::PEERSUM_MAX_BLOCKS;
        if blocks == 0 || blocks > most {
            return invalid("blocks", blocks.to_string(), format!("it must be from 1 to {most}"));
        }
    }
    Ok(())
}

fn bytes_of(count: usize, dtype: DType) -> Result<u64> {
    let bytes = count.checked_mul(dtype.size()).filter(|&bytes| isize::try_from(bytes).is_ok());
    bytes.map(|bytes| bytes as u64).ok_or(Error::TooLarge { count, dtype })
}

fn validate_addresses(input: u64, output: u64, count: usize, bytes: u64, dtype: DType) -> Result<()> {
    for (what, address) in [("input", input), ("output", output)] {
        if address == 0 {
            return Err(Error::NullPointer { what, count });
        }
        if address % dtype.size() as u64 != 0 {
            return Err(Error::Misaligned { what, address, dtype, need: dtype.size() });
        }
        if address.checked_add(bytes).is_none() {
            return Err(Error::TooLarge { count, dtype });
        }
    }
    if input != output && input < output + bytes && output < input + bytes {
        return Err(Error::Overlap);
    }
    Ok(())
}

/// What a rank's record says; of a mismatch, together with its peer's.
fn error_of(record: &bindings::peersum_record, peers: Option<&bindings::peersum_record>) -> Error {
    let phase = match record.phase {
        bindings::PEERSUM_PHASE_REDUCE_SCATTER => Phase::ReduceScatter,
        bindings::PEERSUM_PHASE_ALL_GATHER => Phase::AllGather,
        bindings::PEERSUM_PHASE_ENTRY => Phase::Entry,
        bindings::PEERSUM_PHASE_EXIT => Phase::Exit,
        _ => Phase::Exchange,
    };
    let (rank, peer) = (record.rank as usize, record.peer as usize);
    let (block, epoch) = (record.block, record.epoch);
    match record.reason {
        bindings::PEERSUM_GAVE_UP_TIMEOUT => {
            Error::PeerTimeout { rank, peer, block, epoch, phase, waited: Duration::from_nanos(record.waited_ns) }
        }
        bindings::PEERSUM_GAVE_UP_MISMATCH => {
            let (call, peer_call) = (call_of(record), peers.map(call_of));
            if peer_call.is_some_and(|peer_call| peer_call.hash() == call.hash()) {
                // The peer had given up this same call, and its next ones left their flags as they went through undone.
                return Error::Aborted { by: Some(peer) };
            }
            let (call, peer_call) = (Box::new(call), peer_call.map(Box::new));
            Error::Mismatch { rank, call, peer, peer_call, block, epoch }
        }
        _ if record.abort == bindings::PEERSUM_ABORT_BY_HOST => Error::Aborted { by: None },
        _ => Error::Aborted { by: Some(record.abort.saturating_sub(1) as usize) },
    }
}

/// Where peers look for a call's tensors, of where they lie from the start of their segment, if they look at all.
fn offsets(algorithm: Algorithm, input: u64, output: u64) -> [u64; 2] {
    match algorithm {
        Algorithm::OneShotDirect => [input, 0],
        Algorithm::TwoShotDirect => [input, output],
        _ => [0, 0],
    }
}

/// The call that a rank gave up.
fn call_of(record: &bindings::peersum_record) -> Call {
    // Codes that this library's own kernels copied from what `Communicator::call` gave them.
    let dtype = DType::ALL[record.dtype as usize];
    let op = ReduceOp::ALL[record.op as usize];
    let algorithm = Algorithm::ALL[record.algorithm as usize];
    let chunk_bytes = record.chunk_units * algorithm.unit_bytes();
    let plan = Plan { algorithm, blocks: record.blocks, threads: record.threads, chunk_bytes };
    let offsets = offsets(algorithm, record.input, record.output);
    Call { bytes: record.count * dtype.size() as u64, dtype, op, plan, offsets }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_anything_is_enqueued() {
        let check = |input, output, count: usize, dtype: DType| {
            validate_addresses(input, output, count, bytes_of(count, dtype).unwrap(), dtype)
        };
        assert_eq!(check(256, 256, 100, DType::F32), Ok(()));
        assert_eq!(check(256, 656, 100, DType::F32), Ok(()));
        assert_eq!(check(256, 652, 100, DType::F32), Err(Error::Overlap));
        assert_eq!(check(652, 256, 100, DType::F32), Err(Error::Overlap));
        assert_eq!(check(258, 512, 1, DType::BF16), Ok(()));
        assert!(matches!(check(258, 512, 1, DType::F32), Err(Error::Misaligned { what: "input", need: 4, .. })));
        assert!(matches!(check(256, 511, 1, DType::F16), Err(Error::Misaligned { what: "output", need: 2, .. })));
        assert!(matches!(check(0, 256, 1, DType::F16), Err(Error::NullPointer { what: "input", count: 1 })));
        assert!(matches!(check(u64::MAX - 3, 256, 4, DType::F32), Err(Error::TooLarge { .. })));
    }

    #[test]
    fn records_of_different_calls_are_a_mismatch_and_of_one_call_are_not() {
        let record = |rank, peer, reason, count| bindings::peersum_record {
            abort_requested: 0,
            state: 1,
            reason,
            rank,
            peer,
            block: 3,
            phase: bindings::PEERSUM_PHASE_EXCHANGE,
            epoch: 7,
            abort: 1,
            dtype: DType::F16.code(),
            op: ReduceOp::Max.code(),
            algorithm: Algorithm::OneShotLl.code(),
            blocks: 4,
            threads: 128,
            count,
            chunk_units: 10,
            input: 256,
            output: 512,
            expected: 0,
            observed: 0,
            waited_ns: 0,
        };
        let plan = Plan { algorithm: Algorithm::OneShotLl, blocks: 4, threads: 128, chunk_bytes: 120 };
        let offsets = [0; 2];
        let call = |count: u64| Call { bytes: count * 2, dtype: DType::F16, op: ReduceOp::Max, plan, offsets };
        let noticed = record(2, 0, bindings::PEERSUM_GAVE_UP_MISMATCH, 100);
        let mismatch = |peer_call: Option<Call>| {
            let (call, peer_call) = (Box::new(call(100)), peer_call.map(Box::new));
            Error::Mismatch { rank: 2, call, peer: 0, peer_call, block: 3, epoch: 7 }
        };
        let aborted = |count| record(0, 2, bindings::PEERSUM_GAVE_UP_ABORTED, count);
        assert_eq!(error_of(&noticed, Some(&aborted(99))), mismatch(Some(call(99))));
        assert_eq!(error_of(&noticed, None), mismatch(None));
        assert_eq!(error_of(&noticed, Some(&aborted(100))), Error::Aborted { by: Some(0) });
    }

    /// Field case A42 (flashinfer-ai/flashinfer#1223): sizes that wrap.
    #[test]
    fn bytes_do_not_wrap() {
        assert_eq!(bytes_of(0, DType::F32), Ok(0));
        assert_eq!(bytes_of((1 << 31) - 1, DType::F16), Ok((1 << 32) - 2));
        assert_eq!(bytes_of(1 << 31, DType::F32), Ok(1 << 33));
        for count in [usize::MAX, usize::MAX / 2, usize::MAX / 4 + 1] {
            assert_eq!(bytes_of(count, DType::F32), Err(Error::TooLarge { count, dtype: DType::F32 }), "{count}");
        }
    }
}
