//! The self-test of a group that has just met: calls of every algorithm through its mappings, before anybody gets it.
//! [`self_test`](crate::self_test) has what they carry, and why.

use std::{
    ffi::c_void,
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::sys;

use super::{Communicator, bytes_of, patience};
use crate::{
    Algorithm, DType, Error, Options, Plan, ReduceOp, Result,
    cuda::{
        driver::{Device, check},
        memory::{Scratch, Stream},
        module::Module,
    },
    meeting::Seat,
    protocol::{bindings, plan::Choice},
    self_test::{Digits, ODD, Parts, Report, Stop, Trial, verdict},
};

const THREADS: u32 = 256;
/// Of the kernels that fill and check.
const BLOCKS: u32 = 64;
/// The most memory that the tensors of a call get. It takes calls of this size to use all of the usual staging.
const MOST_BYTES: usize = 24 << 20;
const F32: usize = size_of::<f32>();

/// What a test has a rank lie about, so that the others find out.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Its device can't access the peer's.
    NoAccess,
    /// Its driver refuses the peer's memory.
    Refused,
    /// It maps memory of its own in place of the peer's.
    Mirror,
    /// One line in a thousand of what it sends is of another time.
    StaleLines,
}

/// Where a call's tensors lie.
#[derive(Clone, Copy, Debug)]
enum Tensors {
    /// In plain memory, in place.
    Plain,
    /// At this offset of the heap, in place.
    Heap(u64),
    /// From this offset of the heap to plain memory.
    FromHeap(u64),
}

/// Runs the test; every rank of the meeting does, and all return the same: what is wrong, if something is.
///
/// If nothing is, the segments are as new: each rank clears its own once all have told that their last call is over, so no
/// store to it is still to come, and none begins a call before all have cleared theirs.
///
/// # Errors
/// Those of the meeting, and of the rank's own device.
pub(super) fn run(
    communicator: &mut Communicator,
    options: &Options,
    seat: &mut Seat,
    stale: bool,
) -> Result<Option<Error>> {
    let mut bench = Bench::new(communicator, patience(options))?;
    // What the ranks have room for; else their calls would differ.
    let most = seat.all_gather(bench.tensor.bytes())?.into_iter().min().unwrap_or(0) / F32;
    let trials = trials(communicator, most)?;
    let report = bench.run(communicator, &trials, options, stale)?;
    let reports = seat.all_gather(report)?;
    let trials: Vec<_> = trials.into_iter().map(|(trial, _)| trial).collect();
    if let Some(error) = verdict(&trials, &reports) {
        return Ok(Some(error));
    }
    let group = &communicator.group;
    group.own().clear([0, group.regions[0].segment_bytes()], options.first_epoch)?;
    communicator.force(None)?;
    communicator.last_large = None;
    seat.all_gather(())?;
    Ok(None)
}

/// Every algorithm that goes through staging, with one element, some, and so many that each line of both halves of the
/// slots is used; and those that read tensors where they are, over all of the heap.
fn trials(communicator: &mut Communicator, most: usize) -> Result<Vec<(Trial, Tensors)>> {
    let mut trials = Vec::new();
    let mut add = |communicator: &mut Communicator, algorithm: Algorithm, count: usize, tensors| {
        let blocks = communicator.resident_blocks(algorithm, THREADS).min(bindings::PEERSUM_MAX_BLOCKS);
        if blocks == 0 || count == 0 {
            return Ok(()); // it can't be called here
        }
        communicator.force(Some(Choice { algorithm, blocks, threads: THREADS }))?;
        let [input, output] = communicator.tensors(tensors, 0);
        let placement = communicator.placement(input, output, bytes_of(count, DType::F32)?);
        let Some(plan) = communicator.plan_at(placement, count, DType::F32)? else { return Ok(()) };
        let parts = if algorithm == Algorithm::TwoShotLl { Parts::Alike } else { Parts::Even };
        trials.push((Trial { plan, count, unit_bytes: algorithm.unit_bytes(), parts }, tensors));
        Ok::<_, Error>(())
    };
    for algorithm in Algorithm::STAGED {
        let blocks = communicator.resident_blocks(algorithm, THREADS).min(bindings::PEERSUM_MAX_BLOCKS) as usize;
        let chunk = algorithm.chunk_capacity(&communicator.group.regions[0]).unwrap_or(0) as usize;
        for count in [1, 1000, 2 * blocks * chunk / F32 + ODD] {
            add(communicator, algorithm, count.min(most), Tensors::Plain)?;
        }
    }
    let heap = communicator.heap.total();
    let piece = (most * F32) as u64;
    let mut offset = 0;
    while offset < heap {
        let count = (heap - offset).min(piece) as usize / F32;
        add(communicator, Algorithm::OneShotDirect, count, Tensors::FromHeap(offset))?;
        add(communicator, Algorithm::TwoShotDirect, count, Tensors::Heap(offset))?;
        offset += piece.max(F32 as u64);
    }
    Ok(trials)
}

impl Communicator {
    /// Input and output of a call whose plain memory is there.
    fn tensors(&self, tensors: Tensors, plain: u64) -> [u64; 2] {
        let heap = self.heap.start();
        match tensors {
            Tensors::Plain => [plain; 2],
            Tensors::Heap(offset) => [heap + offset; 2],
            Tensors::FromHeap(offset) => [heap + offset, plain],
        }
    }
}

/// What a rank needs for it.
struct Bench {
    device: Arc<Device>,
    stream: Stream,
    tensor: Scratch,
    wrong: Scratch,
    fill: sys::CUfunction,
    check: sys::CUfunction,
    patience: Duration,
}

impl Bench {
    fn new(communicator: &Communicator, patience: Duration) -> Result<Bench> {
        let device = communicator.group.devices[communicator.rank()].clone();
        let module = Module::get(&device)?; // which stays loaded
        let (fill, check) = {
            let _entered = device.enter()?;
            (module.function("peersum_trial_fill")?, module.function("peersum_trial_check")?)
        };
        let (tensor, wrong) = (Scratch::new(device.clone(), MOST_BYTES)?, Scratch::new(device.clone(), F32)?);
        Ok(Bench { stream: Stream::new(device.clone())?, device, tensor, wrong, fill, check, patience })
    }

    fn run(
        &mut self,
        communicator: &mut Communicator,
        trials: &[(Trial, Tensors)],
        options: &Options,
        stale: bool,
    ) -> Result<Report> {
        let digits = Digits::new(communicator.rank(), communicator.world_size());
        let mut report = Report::default();
        for (number, &(trial, tensors)) in trials.iter().enumerate() {
            let [input, output] = communicator.tensors(tensors, self.tensor.address());
            let Plan { algorithm, blocks, threads, .. } = trial.plan;
            communicator.force(Some(Choice { algorithm, blocks, threads }))?;
            let number_word = number as u32;
            self.launch(self.fill, input, trial.count, number_word, communicator.rank)?;
            if stale {
                self.spoil(input, trial.count)?;
            }
            // SAFETY: the tensors have room for the call, are this rank's own, and outlive the work, which is waited for, or
            // the drop of the memory waits for it. The stream is the device's, and the rank has no other.
            let called = unsafe {
                let stream = self.stream.handle().cast();
                communicator.all_reduce_raw(input, output, trial.count, DType::F32, ReduceOp::Sum, stream)
            };
            self.launch(self.check, output, trial.count, number_word, communicator.world_size() as u32)?;
            let ended = self.stream.finish(Instant::now() + self.patience);
            let failed = called.and_then(|()| communicator.check()).err();
            if failed.is_some() || !ended {
                report.stopped = Some(stop(communicator, number, options, failed.as_ref()));
                break;
            }
            // One that is found wrong ends nothing: the others need this rank's flags to find out for themselves.
            let mut wrong = [0f32];
            self.fetch(&mut wrong, self.wrong.address())?;
            if wrong[0].to_bits() != 0 {
                let mut sums = vec![0f32; trial.count];
                self.fetch(&mut sums, output)?;
                if report.direct.is_none() {
                    trial.examine(&digits, number, &sums, &mut report);
                }
                self.clear_wrong()?;
            }
        }
        Ok(report)
    }

    /// One of the two kernels: they take alike, but that only the check counts wrong elements.
    fn launch(
        &self,
        function: sys::CUfunction,
        tensor: u64,
        count: usize,
        mut call: u32,
        mut rank_or_world: u32,
    ) -> Result<()> {
        let (mut tensor, mut count, mut wrong) = (tensor, count as u64, self.wrong.address());
        let mut arguments: [*mut c_void; 5] = [
            ptr::from_mut(&mut tensor).cast(),
            ptr::from_mut(&mut count).cast(),
            ptr::from_mut(&mut call).cast(),
            ptr::from_mut(&mut rank_or_world).cast(),
            ptr::from_mut(&mut wrong).cast(),
        ];
        let _entered = self.device.enter()?;
        // SAFETY: these are the kernels' parameters, of which the driver reads as many as the kernel has, now. The tensor has
        // so many elements and, like the word, lives until the work is done; the stream is ours.
        let status = unsafe {
            let (arguments, extra) = (arguments.as_mut_ptr(), ptr::null_mut());
            sys::cuLaunchKernel(function, BLOCKS, 1, 1, THREADS, 1, 1, 0, self.stream.handle(), arguments, extra)
        };
        check("cuLaunchKernel", Some(self.device.ordinal), status)
    }

    /// Copies numbers to the host, where `into` ends up whole.
    fn fetch(&self, into: &mut [f32], from: u64) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: `from` has as many bytes as the slice, in the two memories of this rank or its heap, and any bytes are
        // numbers. The stream is waited for below, before the slice can go.
        let status = unsafe {
            sys::cuMemcpyDtoHAsync_v2(into.as_mut_ptr().cast(), from, size_of_val(into), self.stream.handle())
        };
        check("cuMemcpyDtoHAsync", Some(self.device.ordinal), status)?;
        // SAFETY: the stream is ours. What it still has are copies, and a fill at most.
        check("cuStreamSynchronize", Some(self.device.ordinal), unsafe {
            sys::cuStreamSynchronize(self.stream.handle())
        })
    }

    fn clear_wrong(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        // SAFETY: the word is ours, and so is the stream.
        let status = unsafe { sys::cuMemsetD32Async(self.wrong.address(), 0, 1, self.stream.handle()) };
        check("cuMemsetD32Async", Some(self.device.ordinal), status)
    }

    /// Leaves zeros in one line of a thousand, as something that did not arrive would.
    fn spoil(&self, tensor: u64, count: usize) -> Result<()> {
        const LINE: usize = 64;
        const PITCH: usize = 1000 * LINE;
        let lines = (count * F32).saturating_sub(LINE).div_ceil(PITCH);
        if lines == 0 {
            return Ok(());
        }
        let _entered = self.device.enter()?;
        // SAFETY: the lines lie in the tensor, since the last begins a line before its end at least; the stream is ours.
        let status = unsafe { sys::cuMemsetD2D8Async(tensor, PITCH, 0, LINE, lines, self.stream.handle()) };
        check("cuMemsetD2D8Async", Some(self.device.ordinal), status)
    }
}

/// What is to be told of a call that failed.
#[cold]
fn stop(communicator: &Communicator, call: usize, options: &Options, error: Option<&Error>) -> Stop {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    // The error is what ended the group. What this rank waited for itself may be another thing, and nearer to the cause.
    let record = communicator.group.ending.record(rank as u32).read();
    let text = || error.map_or_else(|| "it did not come to its end".into(), Error::to_string);
    match (error, record) {
        (Some(&Error::PeerGone { rank, peer }), _) => {
            Stop { call, rounds: 0, peer: Some(peer), gone: Some(rank), reason: text() }
        }
        (_, Some(record)) if (record.peer as usize) < world && record.peer as usize != rank => {
            let reason = match record.reason {
                bindings::PEERSUM_GAVE_UP_TIMEOUT => format!("nothing came within {:?}", options.timeout),
                bindings::PEERSUM_GAVE_UP_MISMATCH => "a flag of another call came".into(),
                _ => text(),
            };
            let rounds = record.epoch.wrapping_sub(options.first_epoch);
            Stop { call, rounds, peer: Some(record.peer as usize), gone: None, reason }
        }
        _ => Stop { call, rounds: 0, peer: None, gone: None, reason: text() },
    }
}
