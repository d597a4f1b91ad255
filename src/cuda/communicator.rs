//! A rank's handle.

mod join;
mod self_test;

use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cudarc::driver::{CudaStream, sys};

use super::{
    driver::{self, Device, check},
    group::{Group, offsets},
    handover::{Handover, Joined},
    machine::machine,
    module::{Kernels, resident_index},
    priors,
    symmetric::SymmetricMemory,
};
use crate::{
    Algorithm, DType, Error, Options, Overlap, Placement, Plan, ReduceOp, Result,
    crossover::{Explanation, Facts, Machine, Question, Source, Taken},
    heap::Heap,
    meeting::{self, Local, Meeting, Seat},
    nccl::{self, AllReduce, Version},
    protocol::{
        bindings,
        call::Call,
        plan::{Choice, Forced, plan},
        split::PACK_BYTES,
    },
};

pub use self_test::Lie;

/// One rank of a group of GPUs.
///
/// A call enqueues one kernel on the caller's stream and returns: it doesn't allocate, synchronise or record an event.
/// Every rank must make the same calls in the same order, each on one stream at a time. When a peer fails, the kernel
/// gives up after [`Options::timeout`], and the error comes from the next call or from [`Communicator::check`]: check after
/// synchronising the stream, before the output is used, which then holds some of the result at most.
///
/// A call that goes to NCCL ([`Options::nccl`]) enqueues a kernel of the library's, at which the ranks meet, and NCCL's. What is
/// said of failures goes for it too.
///
/// # Memory
///
/// A rank takes on its device: 8 KiB of control, 32 KiB of flags per rank of the group, the staging
/// ([`Options::staging_bytes`], 32 MiB unless set otherwise, whatever the number of ranks; half of it for packets), and the
/// symmetric memory ([`Options::symmetric_bytes`], none unless set otherwise), all rounded up to 2 MiB. That is 34 MiB for 1
/// to 8 ranks by default; [`Communicator::memory_bytes`] tells. NCCL takes its own where it is joined, and 256 MiB while the
/// group is made.
///
/// # Dropping
///
/// The group's memory is freed when its last communicator goes (or the last graph of
/// [`interop::cudarc::Graph`](crate::interop::cudarc::Graph)), after work that was enqueued in the devices' contexts has
/// finished. That is waited for, at most for the timeout and a second; if work is still there then, the memory is not
/// freed, and a warning is logged. Where NCCL was joined, it goes when NCCL is done with its communicators, which a thread waits
/// for: graphs that have calls of NCCL's keep them. A process that ends waits for those threads, 3 s at most.
pub struct Communicator {
    rank: u32,
    kernels: Kernels,
    /// Blocks that a rank may have resident, where [`resident_index`] says: the least of all ranks.
    resident: Vec<u32>,
    options: Options,
    /// Where choices come from: the same on every rank.
    source: Source,
    forced: Forced,
    /// Whether the device has programmatic dependent launch.
    dependent_launch: bool,
    /// Where the last call went, if its grid was too large for the next to come early.
    last_large: Option<Place>,
    last_stream: Arc<Mutex<Option<Arc<CudaStream>>>>,
    heap: Arc<Heap>,
    /// NCCL, or why calls can't be handed over to it.
    handover: Joined,
    gated: bool,
    /// Why the ranks can't reach each other's memory, if so: all calls go to NCCL then, without a gate.
    fallback: Option<Error>,
    group: Arc<Group>,
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

/// What graphs keep of a rank: its group's memory, the stream that it used last, and NCCL, whose destruction waits for graphs.
#[derive(Clone)]
pub(crate) struct Lifeline {
    rank: usize,
    group: Arc<Group>,
    _handover: Option<Arc<Handover>>,
    last_stream: Arc<Mutex<Option<Arc<CudaStream>>>>,
}

impl Lifeline {
    /// The failure of the group, if there is one, or why no call can be made.
    pub(crate) fn check(&self) -> Result<()> {
        self.group.ending.check_for_call(self.rank)
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
        self.group.ending.request_abort();
    }
}

impl Communicator {
    /// The communicators of ranks that live in this process, rank r on `devices[r]`. A device may stand several times.
    ///
    /// Blocks until every rank is ready, at most for the timeout. Ranks on several devices have a
    /// [self-test](Options::self_test) first. Where their devices can't reach each other's memory, all calls go to NCCL.
    ///
    /// # Errors
    ///
    /// [`Error::Unmapped`] and [`Error::SelfTestFailed`] as for [`Communicator::meet`].
    pub fn local(devices: &[usize], options: &Options) -> Result<Vec<Communicator>> {
        Communicator::of_threads(devices, options, &vec![None; devices.len()])
    }

    /// The same, with communicators of NCCL that the caller has anyway, rank r's at `nccl[r]`: calls that a table hands over
    /// to NCCL go there. They must be of these ranks, in this order, on these devices.
    ///
    /// A communicator that fails a call, or whose group ends, is aborted ([`AllReduce::abort`]).
    pub fn local_with_nccl(
        devices: &[usize],
        options: &Options,
        nccl: Vec<Arc<dyn AllReduce>>,
    ) -> Result<Vec<Communicator>> {
        if nccl.len() != devices.len() {
            let reason = format!("{} communicators were given for {} ranks", nccl.len(), devices.len());
            return Err(Error::NcclUnavailable { reason });
        }
        Communicator::of_threads(devices, options, &nccl.into_iter().map(Some).collect::<Vec<_>>())
    }

    fn of_threads(
        devices: &[usize],
        options: &Options,
        lent: &[Option<Arc<dyn AllReduce>>],
    ) -> Result<Vec<Communicator>> {
        let world = devices.len();
        check_world(world)?;
        super::available()?;
        // NCCL's communicators of groups before this one, in whose ranks' way they would be.
        nccl::wait_for_ends();
        let seats = Local::group(world, options.timeout).into_iter().map(Seat::Threads);
        let joined: Vec<Result<Communicator>> = std::thread::scope(|scope| {
            let joins: Vec<_> = seats
                .zip(devices.iter().zip(lent))
                .map(|(mut seat, (&device, lent))| {
                    scope.spawn(move || {
                        let joined = Communicator::join(&mut seat, device, options, lent.clone(), None);
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

    /// This process's rank of the group that its launcher started: [`Meeting::from_env`] says how that is known. It takes the
    /// device whose ordinal is its rank on this machine, or the one device that this process sees.
    ///
    /// # Errors
    ///
    /// [`Error::Environment`] names the variable that is missing or wrong. Else as for [`Communicator::meet`].
    pub fn from_env(options: &Options) -> Result<Communicator> {
        let meeting = Meeting::from_env()?;
        let device = match super::device_count()? {
            1 => 0,
            _ => meeting.local_rank().unwrap_or(meeting.rank()),
        };
        Communicator::meet(&meeting, device, options)
    }

    /// This process's rank of the group that meets there, on this device. Blocks until all ranks have come and can reach
    /// each other's memory, which a [self-test](Options::self_test) shows: for [`Meeting::timeout`] at most until all have come, and from then on for [`Options::timeout`].
    ///
    /// The ordinal is this process's own; ranks know devices by their UUIDs, and each must see all of them. Ranks that share a
    /// device should run under MPS: without it their kernels take turns, which is right, and slow.
    ///
    /// # Errors
    ///
    /// * [`Error::MeetingTimeout`] names the ranks that did not come, [`Error::PeerGone`] one whose process ended, and
    ///   [`Error::PeerFailed`] one that failed.
    /// * [`Error::MeetingPlace`], [`Error::ForeignPeer`], [`Error::RankTaken`], [`Error::WorldsDiffer`],
    ///   [`Error::VersionsDiffer`], [`Error::OptionsDiffer`], [`Error::SeveralMachines`]: these ranks can't meet, or be a
    ///   group.
    /// * [`Error::HiddenDevice`]: a rank does not see another's device.
    /// * [`Error::Unmapped`] and [`Error::SelfTestFailed`]: one rank's memory does not reach another, and NCCL, which then
    ///   takes all calls ([`Communicator::fallback`]), can't be joined, or must not be ([`Options::nccl`],
    ///   [`Options::deterministic`], [`Options::algorithm`]). All return the same, and can meet again.
    pub fn meet(meeting: &Meeting, device: usize, options: &Options) -> Result<Communicator> {
        check_world(meeting.world_size())?;
        super::available()?;
        Communicator::join_processes(meeting.open(options.timeout)?, device, options)
    }

    /// As [`Communicator::meet`], by an all-gather that the ranks have already, such as their engine's. It is called once: it
    /// takes some hundred bytes of this rank, and gives those of all ranks, in rank order. They hold a secret for this once, so
    /// they are for the ranks alone. Everything else goes over sockets of this machine.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::meet`]. What the all-gather fails with becomes an [`Error::MeetingPlace`].
    pub fn meet_through<E: std::fmt::Display>(
        rank: usize,
        world: usize,
        device: usize,
        all_gather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, E>,
        options: &Options,
    ) -> Result<Communicator> {
        check_world(world)?;
        super::available()?;
        let all_gather = |card: &[u8]| all_gather(card).map_err(|error| error.to_string());
        let seat = meeting::meet_through(rank, world, all_gather, options.timeout)?;
        Communicator::join_processes(seat, device, options)
    }

    /// As [`Communicator::meet`], with a fault: for tests of who finds it.
    #[doc(hidden)]
    pub fn meet_lying(
        meeting: &Meeting,
        device: usize,
        options: &Options,
        about: usize,
        lie: Lie,
    ) -> Result<Communicator> {
        let seat = meeting.open(options.timeout)?;
        Communicator::join_lying(seat, device, options, Some((about, lie)))
    }

    fn join_processes(seat: Seat, device: usize, options: &Options) -> Result<Communicator> {
        Communicator::join_lying(seat, device, options, None)
    }

    fn join_lying(mut seat: Seat, device: usize, options: &Options, lie: Option<(usize, Lie)>) -> Result<Communicator> {
        let joined = Communicator::join(&mut seat, device, options, None, lie);
        if let Err(error) = &joined {
            seat.leave(error);
        }
        joined
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
        self.group.own().bytes()
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
        let decision = self.source.choose(&self.question(placement, bytes, dtype), priors::choose);
        let choice = match &self.fallback {
            None if decision.nccl && self.handover.is_ok() => Choice::NCCL,
            None => decision.own,
            Some(error) => match self.forced.algorithm {
                None | Some(Algorithm::Nccl) => Choice::NCCL,
                Some(algorithm) => {
                    return Err(Error::AlgorithmUnavailable { algorithm, reason: error.to_string() });
                }
            },
        };
        let plan = plan(bytes, placement, &self.group.regions[0], self.forced, choice, &resident)?;
        if plan.algorithm == Algorithm::Nccl
            && let Err(reason) = &self.handover
        {
            return Err(Error::AlgorithmUnavailable { algorithm: plan.algorithm, reason: reason.clone() });
        }
        Ok(Some(plan))
    }

    /// Why a message of `bytes` bytes of `dtype`, of tensors anywhere, would be reduced as [`Communicator::plan`] says: from
    /// which table, or why from none; what it should take; and why not by NCCL. `None` where there is nothing to exchange.
    pub fn explain(&self, bytes: u64, dtype: DType) -> Result<Option<Explanation>> {
        self.explain_at(Placement::Anywhere, bytes, dtype)
    }

    /// The same, of tensors that lie so.
    pub fn explain_at(&self, placement: Placement, bytes: u64, dtype: DType) -> Result<Option<Explanation>> {
        let count = bytes.div_ceil(dtype.size() as u64) as usize;
        let Some(plan) = self.plan_at(placement, count, dtype)? else { return Ok(None) };
        let facts = Facts {
            taken: if plan.algorithm == Algorithm::Nccl { Taken::Nccl } else { Taken::Own(plan) },
            forced: self.forced.algorithm.is_some(),
            nccl_missing: self.handover.as_ref().err().map(String::as_str),
            fallback: self.fallback.as_ref(),
        };
        Ok(Some(self.source.explain(&self.question(placement, bytes, dtype), &facts, priors::choose)))
    }

    fn question(&self, placement: Placement, bytes: u64, dtype: DType) -> Question {
        let world = self.group.regions[0].world;
        Question { bytes, dtype, world, placement, deterministic: self.options.deterministic }
    }

    /// Whether calls of NCCL have the gate before them, as they have from the start. Without it they are NCCL's alone, to be
    /// measured: ranks that differ then wait in NCCL.
    #[doc(hidden)]
    pub fn gate_nccl(&mut self, gate: bool) {
        self.gated = gate && self.fallback.is_none();
    }

    /// Why all calls go to NCCL, if they do since the ranks can't use each other's memory: what joining would have failed
    /// with if NCCL could not have been joined. The same on every rank.
    pub fn fallback(&self) -> Option<&Error> {
        self.fallback.as_ref()
    }

    /// The version of the NCCL that is joined, or why none is.
    pub fn nccl(&self) -> std::result::Result<Version, &str> {
        self.handover.as_ref().map(|handover| handover.nccl().version()).map_err(String::as_str)
    }

    /// Whether symmetric memory is a window of the joined NCCL's, whose kernels for it are faster, or why not.
    pub fn nccl_window(&self) -> std::result::Result<(), &str> {
        self.handover.as_ref().map_err(String::as_str).and_then(|handover| handover.window())
    }

    /// What a measurement by this group is made on, and holds for.
    pub fn machine(&self) -> Result<Machine> {
        machine(&self.group.devices, self.nccl().ok().map(|version| version.to_string()))
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
        let forced = choice.map_or(self.options.forced(), |Choice { algorithm, blocks, threads }| Forced {
            algorithm: Some(algorithm),
            blocks: Some(blocks),
            threads: Some(threads),
        });
        validate(forced)?;
        self.forced = forced;
        Ok(())
    }

    /// The failure of the group, if there is one: of this rank or of any other. The first that any rank's check finds stays,
    /// for all of them. Doesn't synchronise: what a kernel that still runs will find is not known yet. Waits for nothing but,
    /// once for a group whose ranks differ, up to 50 ms until the other of two ranks has left its call too.
    pub fn check(&self) -> Result<()> {
        self.group.ending.check()
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
        let address = self.group.own().address();
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

    /// Where `writer`'s flag of a half lies in this rank's memory, in the region of packets or in that of flags: for tests
    /// that lose one.
    #[doc(hidden)]
    pub fn flag_address(&self, packets: bool, half: u32, block: u32, writer: u32) -> u64 {
        let [flags, _] = &self.group.regions; // both are alike
        let region = if packets { flags.segment_bytes() } else { 0 };
        self.group.own().address() + region + flags.flag(half, block, writer)
    }

    /// Where this process has the memory of `peer` that lies where this rank's has `address`: for tests of what kernels see there.
    #[doc(hidden)]
    pub fn peer_address(&self, peer: usize, address: u64) -> u64 {
        let theirs = self.group.segments[peer].as_ref().expect("a group whose ranks reach each other");
        theirs.address() + (address - self.group.own().address())
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
        self.group.ending.check_for_call(self.rank())?;
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
        let neighbours = self.neighbours(plan, stream);
        let mut call = self.call(input, output, count as u64, bytes, dtype, op, plan);
        call.early = u32::from(neighbours.early);
        let function = self.kernels.function(plan.algorithm, dtype, op);
        if self.gated || plan.algorithm != Algorithm::Nccl {
            // SAFETY: the kernel takes a `peersum_call`. What it points to is the group's, which outlives the work (`Segment`
            // waits for it), or the caller's, who vouches for it. The grid is resident together with all other ranks' of the
            // device, by `plan`, and with the next one's, by `neighbours`.
            unsafe { launch(function, plan, &mut call, stream, neighbours.behind_previous, device)? };
        }
        self.last_large = neighbours.large;
        if plan.algorithm == Algorithm::Nccl
            && let Ok(handover) = &self.handover
        {
            // SAFETY: the caller vouches for tensors and stream; behind the gate every rank makes this same call.
            let handed = unsafe { handover.nccl().all_reduce(input, output, count, dtype, op, stream.cast()) };
            if let Err(error) = handed {
                // The peers pass the gate, and would wait in NCCL for this rank.
                self.group.ending.fail(error);
                return self.check();
            }
        }
        Ok(())
    }

    /// How this call's kernel may overlap with its neighbours in the stream so that all blocks that wait for peers, of
    /// all ranks of the device, stay resident together.
    ///
    /// The next kernel's blocks may come early only where this grid and the next take at most half of a rank's place
    /// each. A larger grid keeps the next from coming until its own blocks end, and itself comes before the last kernel
    /// has ended only where that was as large: then it takes the place of blocks that have ended.
    ///
    /// The gate before NCCL is small, but the next kernel, NCCL's, has nothing that keeps it from coming too early.
    fn neighbours(&self, plan: Plan, stream: sys::CUstream) -> Neighbours {
        let gate = plan.algorithm == Algorithm::Nccl;
        let small = gate || 2 * plan.blocks <= self.resident_blocks(plan.algorithm, plan.threads);
        let on = self.dependent_launch && self.options.overlap != Overlap::Off;
        let large = if small { None } else { place(stream) };
        Neighbours {
            behind_previous: on && (small || large.is_some() && self.last_large == large),
            early: on && small && !gate && self.options.overlap == Overlap::Early,
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
            *address = segment.as_ref().map_or(0, |segment| segment.address());
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
            record: group.ending.record(self.rank).device_address(),
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
        Lifeline {
            rank: self.rank(),
            group: self.group.clone(),
            _handover: self.handover.as_ref().ok().cloned(),
            last_stream: self.last_stream.clone(),
        }
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

fn check_world(world: usize) -> Result<()> {
    let most = bindings::PEERSUM_MAX_RANKS as usize;
    match (1..=most).contains(&world) {
        true => Ok(()),
        false => Err(Error::UnsupportedWorld { world, backend: "the CUDA backend", most }),
    }
}

/// Launches the kernel of a call.
///
/// # Safety
/// The function takes one `peersum_call` by value, and what `call` points to is valid until the work is done. The stream is of
/// the device, whose context is current. With `behind_previous` the grid may be resident beside the previous kernel's.
unsafe fn launch(
    function: sys::CUfunction,
    plan: Plan,
    call: &mut bindings::peersum_call,
    stream: sys::CUstream,
    behind_previous: bool,
    device: &Device,
) -> Result<()> {
    let mut arguments = [ptr::from_mut(call).cast::<c_void>()];
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
        numAttrs: u32::from(behind_previous),
    };
    // SAFETY: the driver copies the argument now; the caller vouches for the rest.
    let status = unsafe { sys::cuLaunchKernelEx(&config, function, arguments.as_mut_ptr(), ptr::null_mut()) };
    check("cuLaunchKernelEx", Some(device.ordinal), status)
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

/// How long the end of memory may wait for kernels that use it, which may wait for their peers for the timeout.
fn patience(options: &Options) -> Duration {
    options.timeout.saturating_add(Duration::from_secs(1))
}

fn validate(forced: Forced) -> Result<()> {
    let invalid = |option, value: String, reason: String| Err(Error::InvalidOption { option, value, reason });
    if let Some(threads) = forced.threads {
        let most = bindings::PEERSUM_MAX_THREADS;
        if threads == 0 || threads % 32 != 0 || threads > most {
            return invalid("threads", threads.to_string(), format!("it must be a multiple of 32, from 32 to {most}"));
        }
    }
    if let Some(blocks) = forced.blocks {
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
