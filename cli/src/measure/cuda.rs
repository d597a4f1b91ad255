//! The ranks of the CUDA backend: a thread or a process, a stream and two buffers each.
//!
//! Ranks may share a device, and their kernels wait for each other. So nothing here allocates, frees or synchronizes a
//! device between the first launch of a call on one rank and its end on all: what a call needs is made before a
//! barrier, and what it leaves is freed after one.

use std::{borrow::Cow, ops::Range, sync::Arc, time::Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaStream, DriverError, result,
    sys::{self, CUdevice_attribute_enum as Attribute},
};
use peersum::{
    Choice, DType, Options, Plan, ReduceOp,
    cuda::{Communicator, SymmetricMemory, Verifier},
};

use super::{
    barrier::Barrier,
    candidate::{Candidate, Home, Way},
    case::{Mode, Placement},
    datum::Datum,
    geometry::Geometry,
    group::{Device, Group},
    machine::Gpu,
    rank::{Buffer, Call, Rank, Round, Schedule, Timing, of_rank},
    team::Peers,
};

/// All ranks of this process.
pub(crate) struct CudaGroup {
    communicators: Vec<Communicator>,
    /// By rank, each device's primary context.
    contexts: Vec<Arc<CudaContext>>,
    /// By rank. Made once: streams that are made and destroyed over and over come to share hardware queues, and ranks
    /// that share a device would wait for each other until the timeout.
    streams: Vec<Arc<CudaStream>>,
    /// By rank, like what follows: the kernels that check, and the two words that they work with.
    verifiers: Vec<Verifier>,
    words: Vec<Memory>,
    /// Of all ranks.
    devices: Vec<Device>,
    /// Each once.
    gpus: Vec<Gpu>,
}

impl CudaGroup {
    /// Threads, rank r on `devices[r]`. The caller has seen that the backend is available: cudarc panics without a driver.
    pub(crate) fn new(devices: &[usize], options: &Options) -> Result<Self> {
        let contexts = contexts(devices)?;
        let communicators = Communicator::local(devices, options)?;
        let devices = contexts.iter().map(device).collect::<Result<_>>()?;
        let gpus = contexts.iter().map(describe).collect::<Result<_>>()?;
        CudaGroup::of(communicators, contexts, devices, gpus)
    }

    /// This process's rank of a group of processes, on that device of those that it sees.
    pub(crate) fn join(peers: &Peers, ordinal: usize, options: &Options) -> Result<Self> {
        let contexts = contexts(&[ordinal])?;
        let here = (device(&contexts[0])?, describe(&contexts[0])?);
        // All have their contexts before any of them waits for the others' calls.
        let (devices, gpus) = peers.all_gather(&here)?.into_iter().unzip();
        let communicator = Communicator::meet(&peers.meeting("chosen"), ordinal, options)?;
        CudaGroup::of(vec![communicator], contexts, devices, gpus)
    }

    fn of(
        communicators: Vec<Communicator>,
        contexts: Vec<Arc<CudaContext>>,
        devices: Vec<Device>,
        mut gpus: Vec<Gpu>,
    ) -> Result<Self> {
        let streams = contexts
            .iter()
            // Does not wait for the null stream, nor the null stream for it.
            .map(|context| context.new_stream().map_err(failed("cuStreamCreate")))
            .collect::<Result<_>>()?;
        let verifiers = contexts.iter().map(|context| Verifier::new(context.ordinal())).collect::<Result<_, _>>()?;
        let words = contexts.iter().map(|context| Memory::new(context, Words::BYTES)).collect::<Result<_>>()?;
        gpus.sort_by(|one, other| one.uuid.cmp(&other.uuid));
        gpus.dedup_by(|one, other| one.uuid == other.uuid);
        gpus.sort_by_key(|gpu| gpu.ordinal);
        Ok(CudaGroup { communicators, contexts, streams, verifiers, words, devices, gpus })
    }

    /// What a measurement by this group holds for.
    pub(crate) fn machine(&self) -> Result<peersum::crossover::Machine> {
        Ok(self.communicators[0].machine()?)
    }

    /// The devices of all ranks, each once.
    pub(crate) fn gpus(&self) -> Vec<Gpu> {
        self.gpus.clone()
    }
}

/// Before the ranks wait for each other: to make a context can take longer than the timeout, which is about calls.
fn contexts(devices: &[usize]) -> Result<Vec<Arc<CudaContext>>> {
    // The events of this build are read by a function that older drivers lack, and cudarc panics over that.
    const OLDEST: i32 = 12080;
    let version = driver_version()?;
    ensure!(
        version >= OLDEST,
        "the driver supports CUDA {}, and events are timed by a function of {}: update the driver",
        version_name(version),
        version_name(OLDEST)
    );
    let context = |&device: &usize| {
        CudaContext::new(device).map_err(failed("cuDevicePrimaryCtxRetain")).with_context(|| format!("device {device}"))
    };
    devices.iter().map(context).collect()
}

/// What a rank of this process runs on.
fn device(context: &Arc<CudaContext>) -> Result<Device> {
    Ok(Device {
        ordinal: context.ordinal(),
        pci: Some(pci(context)?),
        core: None,
        name: name(context)?,
        process_id: std::process::id(),
    })
}

impl Group for CudaGroup {
    type Rank<'a, T: Datum> = CudaRank<'a>;

    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn plan(
        &mut self,
        way: Way,
        placement: peersum::Placement,
        count: usize,
        dtype: DType,
    ) -> peersum::Result<Option<Plan>> {
        if let Way::Empty { .. } = way {
            return Ok(None);
        }
        let communicator = &mut self.communicators[0];
        communicator.force(forced(way))?;
        let plan = communicator.plan_at(placement, count, dtype);
        communicator.force(None)?;
        plan
    }

    fn explain(&self, placement: peersum::Placement, count: usize, dtype: DType) -> Option<String> {
        let bytes = (count * dtype.size()) as u64;
        let explanation = self.communicators[0].explain_at(placement, bytes, dtype);
        explanation.ok().flatten().map(|explanation| explanation.to_string())
    }

    fn nccl(&self) -> Result<String, String> {
        self.communicators[0].nccl().map(|version| version.to_string()).map_err(str::to_owned)
    }

    fn nccl_window(&self) -> Result<(), String> {
        self.communicators[0].nccl_window().map_err(str::to_owned)
    }

    fn ranks<T: Datum>(&mut self, geometry: &Geometry, homes: &[Home]) -> Result<Vec<CudaRank<'_>>> {
        let bytes = geometry.len() * size_of::<T>();
        for gpu in self.contexts.iter().filter(|_| homes.contains(&Home::Plain)) {
            let own = device(gpu)?;
            let ranks = self.devices.iter().filter(|device| device.is_same(&own)).count();
            let (free, _) = gpu.mem_get_info().map_err(failed("cuMemGetInfo"))?;
            ensure!(
                2 * bytes * ranks <= free / 100 * 95,
                "the buffers of {ranks} ranks need {} bytes on device {}, and {free} are free: lower -e",
                2 * bytes * ranks,
                gpu.ordinal()
            );
        }
        self.communicators
            .iter_mut()
            .zip(self.contexts.iter().zip(&self.streams))
            .zip(self.verifiers.iter().zip(&self.words))
            .map(|((communicator, (context, stream)), (verifier, words))| {
                let mut buffers = Vec::new();
                for &home in homes {
                    let memory = || match home {
                        Home::Plain => Memory::new(context, bytes),
                        Home::Symmetric => Memory::symmetric(communicator, bytes),
                    };
                    buffers.push(Buffers { home, send: memory()?, receive: memory()? });
                }
                Ok(CudaRank {
                    communicator,
                    verifier,
                    words,
                    prepared: None,
                    stream: stream.clone(),
                    buffers,
                    taken: 0,
                    way: Way::Chosen,
                    by_nccl: false,
                    context: context.clone(),
                    geometry: *geometry,
                })
            })
            .collect()
    }
}

/// What the library's word for a way is.
fn forced(way: Way) -> Option<Choice> {
    match way {
        Way::Chosen | Way::Empty { .. } => None,
        Way::Forced(choice) => Some(choice),
        Way::NcclAlone => Some(Choice::NCCL),
    }
}

/// One rank. It is driven by one thread at a time.
pub(crate) struct CudaRank<'a> {
    communicator: &'a mut Communicator,
    verifier: &'a Verifier,
    words: &'a Memory,
    prepared: Option<Graph>,
    stream: Arc<CudaStream>,
    buffers: Vec<Buffers>,
    /// Which of the buffers the candidate has whose turn it is.
    taken: usize,
    /// What that candidate does.
    way: Way,
    by_nccl: bool,
    context: Arc<CudaContext>,
    geometry: Geometry,
}

/// A pair of them.
struct Buffers {
    home: Home,
    send: Memory,
    receive: Memory,
}

impl CudaRank<'_> {
    /// Enqueues one call at the place of the `number`th.
    fn enqueue(&mut self, call: &Call, number: usize) -> Result<()> {
        let stream = self.stream.cu_stream().cast();
        if let Way::Empty { blocks, threads } = self.way {
            // SAFETY: the stream is of the rank's device.
            return unsafe { self.verifier.empty(blocks, threads, stream) }.map_err(of_rank(self.communicator.rank()));
        }
        let case = &call.case;
        let start = (self.geometry.tensor(case.count, number).start * case.dtype.size()) as u64;
        let buffers = &self.buffers[self.taken];
        let output = buffers.receive.address + start;
        let input = match call.placement {
            Placement::OutOfPlace => buffers.send.address + start,
            Placement::InPlace => output,
        };
        // SAFETY: the geometry keeps tensors inside both buffers, which are as long as it says and are freed only with
        // this rank, by a function that waits for the device. Both are used on this stream alone. Graphs that captured
        // the call live in this rank or with the thread that drives it (`Rank::ready`), shorter than the communicator,
        // which the rank borrows; while one runs, nothing else is enqueued on the communicator.
        unsafe { self.communicator.all_reduce_raw(input, output, case.count, case.dtype, case.op, stream) }
            .map_err(of_rank(self.communicator.rank()))
    }

    /// Captures calls in a graph and uploads it, so that the first launch costs what the others do.
    fn capture(&mut self, call: &Call, calls: usize) -> Result<Graph> {
        // Thread-local: what other ranks' threads do meanwhile (allocate, say) does not end this capture.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(failed("cuStreamBeginCapture"))?;
        let enqueued = (0..calls).try_for_each(|number| self.enqueue(call, number));
        // Ends the capture also after an error, or the stream could not be used again.
        let ended = self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        enqueued?;
        let graph = ended.map_err(failed("cuGraphInstantiate"))?.context("the capture gave no graph")?;
        graph.upload().map_err(failed("cuGraphUpload"))?;
        self.synchronize()?;
        Ok(Graph(graph))
    }

    fn events(&self, count: usize) -> Result<Vec<CudaEvent>> {
        // The default flag, since cudarc's own default turns timing off.
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        (0..count).map(|_| self.context.new_event(flags).map_err(failed("cuEventCreate"))).collect()
    }

    fn record(&self, event: &CudaEvent) -> Result<()> {
        event.record(&self.stream).map_err(failed("cuEventRecord"))
    }

    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(failed("cuStreamSynchronize"))
    }

    /// Waits for the calls, and learns whether they came to their end.
    fn finish(&self) -> Result<()> {
        self.synchronize()?;
        self.communicator.check().map_err(of_rank(self.communicator.rank()))
    }

    /// The first replays are not timed, and the next ones are launched while they run: no sample has a launch in it,
    /// nor how much later another rank came.
    fn time_graph(&self, graph: &Graph, schedule: &Schedule, barrier: &Barrier<'_>) -> Result<Timing> {
        let warmups = schedule.warmup.div_ceil(schedule.iterations);
        let events = self.events(schedule.replays + 1)?;
        barrier.wait()?;
        let start = Instant::now();
        for _ in 0..warmups {
            graph.launch()?;
        }
        self.record(&events[0])?;
        for event in &events[1..] {
            graph.launch()?;
            self.record(event)?;
        }
        self.synchronize()?;
        let wall_us = start.elapsed().as_secs_f64() * 1e6;
        self.finish()?;
        // The events go when all ranks have finished.
        barrier.wait()?;
        let timed = schedule.replays as f64 / (warmups + schedule.replays) as f64;
        timing(&events, schedule, schedule.iterations, wall_us * timed)
    }

    fn time_queued(&mut self, call: &Call, schedule: &Schedule, barrier: &Barrier<'_>) -> Result<Timing> {
        // An event after each call costs time between the calls, so only on demand.
        let events = self.events(if schedule.per_iteration { schedule.calls() + 1 } else { 2 })?;
        barrier.wait()?;
        for number in 0..schedule.warmup {
            self.enqueue(call, number)?;
        }
        self.finish()?;
        barrier.wait()?;
        let start = Instant::now();
        self.record(&events[0])?;
        for number in 0..schedule.calls() {
            self.enqueue(call, number)?;
            if schedule.per_iteration {
                self.record(&events[number + 1])?;
            }
        }
        if !schedule.per_iteration {
            self.record(&events[1])?;
        }
        self.synchronize()?;
        let wall_us = start.elapsed().as_secs_f64() * 1e6;
        self.finish()?;
        barrier.wait()?;
        let mut timing = timing(&events, schedule, 1, wall_us)?;
        if !schedule.per_iteration {
            timing.samples_us.clear();
        }
        Ok(timing)
    }

    fn time_synchronized(&mut self, call: &Call, schedule: &Schedule, barrier: &Barrier<'_>) -> Result<Timing> {
        barrier.wait()?;
        for number in 0..schedule.warmup {
            self.enqueue(call, number)?;
            self.synchronize()?;
        }
        self.finish()?;
        let mut samples_us = Vec::with_capacity(schedule.calls());
        barrier.wait()?;
        let start = Instant::now();
        let mut last = start;
        for number in 0..schedule.calls() {
            self.enqueue(call, number)?;
            self.synchronize()?;
            let now = Instant::now();
            samples_us.push((now - last).as_secs_f64() * 1e6);
            last = now;
        }
        self.finish()?;
        let time_us = (last - start).as_secs_f64() * 1e6 / schedule.calls() as f64;
        Ok(Timing { time_us, wall_us: time_us, samples_us })
    }

    fn memory(&self, buffer: Buffer) -> &Memory {
        let buffers = &self.buffers[self.taken];
        match buffer {
            Buffer::Send => &buffers.send,
            Buffer::Receive => &buffers.receive,
        }
    }

    /// Writes the round to the words, and no wrong element yet; their addresses.
    fn set_words(&self, round: Round) -> Result<Words> {
        let words = Words { round: self.words.at(0, 8)?, wrong: self.words.at(8, 8)? };
        let exact = if round.exact { Verifier::EXACT } else { 0 };
        let values = [round.number | exact, 0];
        // SAFETY: the memory holds two words from the first address on; the values outlive the copy, which is waited
        // for.
        self.on_memory("cuMemcpyHtoDAsync", |stream| unsafe {
            result::memcpy_htod_async(words.round, &values, stream)
        })?;
        Ok(words)
    }

    /// Runs a memory operation of this rank's stream to its end.
    fn on_memory(
        &self,
        call: &'static str,
        operation: impl FnOnce(sys::CUstream) -> Result<(), DriverError>,
    ) -> Result<()> {
        self.context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
        operation(self.stream.cu_stream()).map_err(failed(call))?;
        self.synchronize()
    }
}

impl<T: Datum> Rank<T> for CudaRank<'_> {
    /// The graph of the calls, in graph mode.
    type Ready = Option<Graph>;

    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn take(&mut self, candidate: &Candidate) -> Result<()> {
        // What the last check left goes while no rank is in a call.
        self.prepared = None;
        let place = self.buffers.iter().position(|buffers| buffers.home == candidate.home);
        self.taken = place.context("the rank was made without buffers there")?;
        (self.way, self.by_nccl) = (candidate.way, candidate.is_nccl());
        self.communicator.gate_nccl(candidate.way != Way::NcclAlone);
        self.communicator.force(forced(candidate.way)).map_err(of_rank(self.communicator.rank()))
    }

    fn write(&mut self, buffer: Buffer, first: usize, values: &[T]) -> Result<()> {
        let to = self.memory(buffer).at(first * size_of::<T>(), size_of_val(values))?;
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: `at` has seen that the memory holds that many bytes from there; the values outlive the copy, which is
        // waited for.
        self.on_memory("cuMemcpyHtoDAsync", |stream| unsafe { result::memcpy_htod_async(to, values, stream) })
    }

    fn poison(&mut self, range: Range<usize>) -> Result<()> {
        let bytes = range.len() * size_of::<T>();
        let from = self.memory(Buffer::Receive).at(range.start * size_of::<T>(), bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        // The poison of every type has all bits set.
        // SAFETY: `at` has seen that the memory holds that many bytes from there.
        self.on_memory("cuMemsetD8Async", |stream| unsafe { result::memset_d8_async(from, 0xff, bytes, stream) })
    }

    fn read(&mut self, range: Range<usize>) -> Result<Cow<'_, [T]>> {
        let mut values = vec![T::POISON; range.len()];
        let from = self.memory(Buffer::Receive).at(range.start * size_of::<T>(), size_of_val(values.as_slice()))?;
        if !values.is_empty() {
            let to = values.as_mut_slice();
            // SAFETY: `at` has seen that the memory holds that many bytes from there, and every bit pattern is a `T`;
            // the values outlive the copy, which is waited for.
            self.on_memory("cuMemcpyDtoHAsync", |stream| unsafe { result::memcpy_dtoh_async(to, from, stream) })?;
        }
        Ok(Cow::Owned(values))
    }

    fn checks_itself(&self, bytes: usize, preferred: bool) -> bool {
        // Of all ranks: below it the host is done in a few milliseconds, and has inputs of two kinds.
        const HOST_BYTES: usize = 16 << 20;
        preferred || bytes.saturating_mul(self.communicator.world_size()) > HOST_BYTES
    }

    fn generate(&mut self, buffer: Buffer, tensor: Range<usize>, of: usize, round: Round) -> Result<()> {
        let to = self.memory(buffer).at(tensor.start * size_of::<T>(), tensor.len() * size_of::<T>())?;
        let words = self.set_words(round)?;
        let stream = self.stream.cu_stream().cast();
        // SAFETY: `at` has seen that the memory holds the tensor, whose type is the kernel's; the words are there; and
        // all of it stays until the stream has been waited for, which is now.
        unsafe { self.verifier.fill(to, tensor.len(), T::DTYPE, of as u32, words.round, stream) }
            .map_err(of_rank(self.communicator.rank()))?;
        self.synchronize()
    }

    fn count_wrong(&mut self, tensor: Range<usize>, op: ReduceOp, round: Round) -> Result<u64> {
        let from = self.memory(Buffer::Receive).at(tensor.start * size_of::<T>(), tensor.len() * size_of::<T>())?;
        let words = self.set_words(round)?;
        let (world, stream) = (self.communicator.world_size() as u32, self.stream.cu_stream().cast());
        // SAFETY: as in `generate`.
        unsafe { self.verifier.check(from, tensor.len(), T::DTYPE, world, op, words.round, words.wrong, stream) }
            .map_err(of_rank(self.communicator.rank()))?;
        let mut wrong = [0u64];
        // SAFETY: the memory holds the word; the value outlives the copy, which is waited for.
        self.on_memory("cuMemcpyDtoHAsync", |stream| unsafe {
            result::memcpy_dtoh_async(&mut wrong, words.wrong, stream)
        })?;
        Ok(wrong[0])
    }

    fn prepare(&mut self, call: &Call) -> Result<()> {
        self.prepared = None;
        if call.mode == Mode::Graph {
            self.prepared = Some(self.capture(call, 1)?);
        }
        Ok(())
    }

    fn call(&mut self, call: &Call) -> Result<()> {
        // The graph stays until the next call is prepared, or a candidate taken: then no rank is in this one.
        match &self.prepared {
            Some(graph) => graph.launch()?,
            None => self.enqueue(call, 0)?,
        }
        self.finish()
    }

    fn ready(&mut self, call: &Call, schedule: &Schedule) -> Result<Option<Graph>> {
        if self.by_nccl {
            // Its first call with tensors of this size makes connections, which is neither to be captured nor timed.
            self.enqueue(call, 0)?;
            self.finish()?;
        }
        (call.mode == Mode::Graph).then(|| self.capture(call, schedule.iterations)).transpose()
    }

    fn time(
        &mut self,
        ready: &Option<Graph>,
        call: &Call,
        schedule: &Schedule,
        barrier: &Barrier<'_>,
    ) -> Result<Timing> {
        match (call.mode, ready) {
            (Mode::Graph, Some(graph)) => self.time_graph(graph, schedule, barrier),
            (Mode::Graph, None) => bail!("a graph is replayed once it was captured"),
            (Mode::Queued, _) => self.time_queued(call, schedule, barrier),
            (Mode::Synchronized, _) => self.time_synchronized(call, schedule, barrier),
            (Mode::Blocking, _) => bail!("calls on a GPU do not block"),
        }
    }
}

/// Addresses of the words that the checking kernels work with.
struct Words {
    round: sys::CUdeviceptr,
    wrong: sys::CUdeviceptr,
}

impl Words {
    const BYTES: usize = 2 * size_of::<u64>();
}

/// A graph, launched on the stream that it was captured on.
pub(crate) struct Graph(CudaGraph);

// SAFETY: a graph may be used from any thread, but from one at a time. This one belongs to a rank, whose `&mut` the
// thread that uses it has; a `Graph` is not Sync.
unsafe impl Send for Graph {}

impl Graph {
    fn launch(&self) -> Result<()> {
        self.0.launch().map_err(failed("cuGraphLaunch"))
    }
}

/// Device memory, 256-byte aligned by the driver's contract.
struct Memory {
    address: sys::CUdeviceptr,
    bytes: usize,
    owner: Owner,
}

/// Who frees it.
enum Owner {
    Context(Arc<CudaContext>),
    Symmetric { _memory: SymmetricMemory },
}

impl Memory {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
        // SAFETY: the context is current, and the memory is freed once, by Drop. It is written before it is read:
        // `measure::fill` fills all of a buffer, `set_words` both words.
        let address = unsafe { result::malloc_sync(bytes) }
            .map_err(failed("cuMemAlloc"))
            .with_context(|| format!("{bytes} bytes on device {}", context.ordinal()))?;
        Ok(Memory { address, bytes, owner: Owner::Context(context.clone()) })
    }

    fn symmetric(communicator: &Communicator, bytes: usize) -> Result<Self> {
        let memory = communicator.symmetric_memory(bytes)?;
        Ok(Memory { address: memory.address(), bytes, owner: Owner::Symmetric { _memory: memory } })
    }

    /// The address of `bytes` bytes from an offset, if all of them are in this memory.
    fn at(&self, offset: usize, bytes: usize) -> Result<sys::CUdeviceptr> {
        let end = offset.checked_add(bytes).context("an offset overflows")?;
        ensure!(end <= self.bytes, "bytes {offset} to {end} are not in a buffer of {} bytes", self.bytes);
        Ok(self.address + offset as u64)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Owner::Context(context) = &self.owner else { return };
        // An error here is of the context and would have shown, or shows, at the next call on it.
        if context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `new`, freed nowhere else; the driver waits for work that uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Times between events, each over `calls_between` calls.
fn timing(events: &[CudaEvent], schedule: &Schedule, calls_between: usize, wall_us: f64) -> Result<Timing> {
    let between = |from: &CudaEvent, to: &CudaEvent| -> Result<f64> {
        Ok(f64::from(from.elapsed_ms(to).map_err(failed("cuEventElapsedTime"))?) * 1e3)
    };
    let (first, last) = (&events[0], &events[events.len() - 1]);
    let samples_us =
        events.windows(2).map(|pair| Ok(between(&pair[0], &pair[1])? / calls_between as f64)).collect::<Result<_>>()?;
    Ok(Timing {
        time_us: between(first, last)? / schedule.calls() as f64,
        wall_us: wall_us / schedule.calls() as f64,
        samples_us,
    })
}

/// The CUDA version that the driver supports.
pub(crate) fn driver_api() -> Result<String> {
    driver_version().map(version_name)
}

fn driver_version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: the function writes one int to where it is told.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("cuDriverGetVersion"))?;
    Ok(version)
}

/// 12.8 for 12080.
fn version_name(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn describe(context: &Arc<CudaContext>) -> Result<Gpu> {
    let (major, minor) = context.compute_capability().map_err(failed("cuDeviceGetAttribute"))?;
    let uuid = context.uuid().map_err(failed("cuDeviceGetUuid"))?;
    Ok(Gpu {
        ordinal: context.ordinal(),
        name: name(context)?,
        pci: pci(context)?,
        uuid: uuid_name(uuid.bytes.map(|byte| byte as u8)),
        compute_capability: format!("{major}.{minor}"),
        multiprocessors: attribute(context, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        memory_bytes: context.total_mem().map_err(failed("cuDeviceTotalMem"))? as u64,
    })
}

fn name(context: &CudaContext) -> Result<String> {
    context.name().map_err(failed("cuDeviceGetName"))
}

/// As nvidia-smi writes it, in lower case: 0000:1b:00.
fn pci(context: &CudaContext) -> Result<String> {
    Ok(format!(
        "{:04x}:{:02x}:{:02x}",
        attribute(context, Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        attribute(context, Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        attribute(context, Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
    ))
}

fn attribute(context: &CudaContext, attribute: Attribute) -> Result<i32> {
    context.attribute(attribute).map_err(failed("cuDeviceGetAttribute"))
}

/// As nvidia-smi writes it: GPU-8-4-4-4-12.
fn uuid_name(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// A driver's error, with the function that returned it and the driver's own words.
pub(crate) fn failed(call: &'static str) -> impl Fn(DriverError) -> anyhow::Error {
    move |error| {
        let words = error.error_string().map(|words| words.to_string_lossy().into_owned());
        anyhow!("{call} failed: {:?}{}", error.0, words.map(|words| format!(", {words}")).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_uuids_are_written_as_everywhere() {
        assert_eq!(version_name(12080), "12.8");
        assert_eq!(version_name(13010), "13.1");
        let bytes = std::array::from_fn(|index| index as u8);
        assert_eq!(uuid_name(bytes), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
