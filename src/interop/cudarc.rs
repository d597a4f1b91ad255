//! [cudarc](https://docs.rs/cudarc): its streams, its buffers, and CUDA graphs that own what they use.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use peersum::{Options, ReduceOp, cuda::Communicator};
//!
//! // Four ranks on the first two GPUs; a thread each in practice.
//! for mut rank in Communicator::local(&[0, 0, 1, 1], &Options::default())? {
//!     std::thread::spawn(move || {
//!         let stream = CudaContext::new(rank.device())?.new_stream()?;
//!         let mut tensor = stream.clone_htod(&vec![1.5f32; 4096])?;
//!         rank.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &stream).unwrap();
//!         assert_eq!(stream.clone_dtoh(&tensor)?, vec![6.0f32; 4096]); // waits for the stream
//!         rank.check().unwrap();
//!         Ok::<(), cudarc::driver::DriverError>(())
//!     });
//! }
//! # Ok::<(), peersum::Error>(())
//! ```

use std::{
    any::Any,
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::{
    CudaGraph, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, DriverError, sys,
};

use super::symmetric::SymmetricBuffer;
use crate::{
    Element, Error, ReduceOp, Result,
    cuda::{Communicator, Lifeline, Restored, check},
};

pub(super) mod sealed {
    pub trait Sealed {}
    impl<T> Sealed for cudarc::driver::CudaSlice<T> {}
    impl<T> Sealed for cudarc::driver::CudaView<'_, T> {}
    impl<T> Sealed for cudarc::driver::CudaViewMut<'_, T> {}
}

/// A buffer of cudarc's to read from: a slice or a view. Sealed, since `DevicePtr` alone is a safe trait that may return any
/// address.
pub trait Source<T>: DevicePtr<T> + sealed::Sealed {}
impl<T> Source<T> for CudaSlice<T> {}
impl<T> Source<T> for CudaView<'_, T> {}
impl<T> Source<T> for CudaViewMut<'_, T> {}

/// A buffer of cudarc's to write to: a slice or a mutable view. Sealed, as [`Source`] is.
pub trait Target<T>: DevicePtrMut<T> + sealed::Sealed {}
impl<T> Target<T> for CudaSlice<T> {}
impl<T> Target<T> for CudaViewMut<'_, T> {}

impl Communicator {
    /// Enqueues the all-reduce of `input` into `output` on `stream`.
    ///
    /// Both have the same number of elements, on this rank's device; any length and any offset into an allocation will
    /// do. It returns once the work is enqueued; the borrows end then, and cudarc's events keep other streams' work on
    /// the buffers, and their release, in order with it (with cudarc's event tracking off, that is up to the caller).
    ///
    /// Calls may go to different streams: where the stream changes, the new one is made to wait for the last one, by an
    /// event. To capture a call, use [`Buffers::capture`].
    ///
    /// # Errors
    ///
    /// Before anything is enqueued: [`Error::LengthMismatch`], [`Error::ForeignStream`], [`Error::UnreachableMemory`],
    /// [`Error::UntrackedBuffer`], [`Error::Capturing`], those of the plan, and the group's failure.
    pub fn all_reduce<T: Element, I: Source<T>, O: Target<T>>(
        &mut self,
        input: &I,
        output: &mut O,
        op: ReduceOp,
        stream: &Arc<CudaStream>,
    ) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        let _restored = self.eager(stream)?;
        self.reaches("input", input.stream(), stream)?;
        self.reaches("output", output.stream(), stream)?;
        let count = input.len();
        let (from, _reading) = input.device_ptr(stream);
        let (to, _writing) = output.device_ptr_mut(stream);
        self.stays_eager(stream)?;
        // SAFETY: cudarc's buffers are valid for their length, in this device's context, and the guards keep other
        // streams from writing the input or touching the output until this work is done, as `&` and `&mut` keep threads.
        // The stream is not being captured, and follows the last one that this rank used.
        unsafe { self.all_reduce_raw(from, to, count, T::DTYPE, op, stream.cu_stream().cast()) }
    }

    /// Enqueues the all-reduce of `buffer` in place on `stream`; see [`Communicator::all_reduce`].
    pub fn all_reduce_in_place<T: Element, B: Target<T>>(
        &mut self,
        buffer: &mut B,
        op: ReduceOp,
        stream: &Arc<CudaStream>,
    ) -> Result<()> {
        let _restored = self.eager(stream)?;
        self.reaches("buffer", buffer.stream(), stream)?;
        let count = buffer.len();
        let (address, _writing) = buffer.device_ptr_mut(stream);
        self.stays_eager(stream)?;
        // SAFETY: as in `all_reduce`.
        unsafe { self.all_reduce_raw(address, address, count, T::DTYPE, op, stream.cu_stream().cast()) }
    }

    /// Whether an eager call may go to this stream; if so, orders it behind the last stream that the rank used. The guard
    /// must outlive all of cudarc's calls, which change the current context.
    fn eager(&self, stream: &Arc<CudaStream>) -> Result<Restored> {
        self.belongs(stream)?;
        let restored = Restored::new(Some(self.device()))?;
        if is_capturing(stream)? {
            return Err(Error::Capturing { device: self.device() });
        }
        follow(&self.lifeline(), stream)?;
        Ok(restored)
    }

    /// A buffer that a capture of another stream has used takes the stream that waits for it into that capture.
    fn stays_eager(&self, stream: &Arc<CudaStream>) -> Result<()> {
        if stream.context().is_managing_stream_synchronization() && is_capturing(stream)? {
            return Err(Error::Capturing { device: self.device() });
        }
        Ok(())
    }

    pub(super) fn belongs(&self, stream: &CudaStream) -> Result<()> {
        if stream.context().cu_ctx() == self.context() {
            return Ok(());
        }
        Err(Error::ForeignStream { device: self.device() })
    }

    /// Whether a buffer that was allocated on `home` may be used on `stream`.
    fn reaches(&self, what: &'static str, home: &Arc<CudaStream>, stream: &Arc<CudaStream>) -> Result<()> {
        if home.context().cu_ctx() != self.context() {
            let allocated_on = home.context().ordinal();
            return Err(Error::UnreachableMemory { what, allocated_on, device: self.device() });
        }
        tracked(what, home, stream)
    }
}

/// cudarc orders streams by events only where the context object of the buffer knows of several.
fn tracked(what: &'static str, home: &Arc<CudaStream>, stream: &Arc<CudaStream>) -> Result<()> {
    let one_object = Arc::ptr_eq(home.context(), stream.context());
    if one_object || home.cu_stream() == stream.cu_stream() || home.context().is_managing_stream_synchronization() {
        return Ok(());
    }
    Err(Error::UntrackedBuffer { what })
}

fn is_capturing(stream: &CudaStream) -> Result<bool> {
    let status = bound(stream, "cuStreamIsCapturing", || stream.capture_status())?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Makes `stream` wait for the last stream that the rank used, if that is another: two kernels of one rank must not run at
/// the same time.
fn follow(rank: &Lifeline, stream: &Arc<CudaStream>) -> Result<()> {
    let mut last = rank.last_stream();
    if let Some(last) = last.as_ref().filter(|last| last.cu_stream() != stream.cu_stream()) {
        // An event of a stream that is being captured would take `stream` into that capture.
        if is_capturing(last)? {
            return Err(Error::Capturing { device: last.context().ordinal() });
        }
        bound(stream, "cuStreamWaitEvent", || stream.join(last))?;
    }
    *last = Some(stream.clone());
    Ok(())
}

/// Buffers that a graph will use, and own: what is captured are addresses, so the memory must live as long as the graph.
///
/// Buffers go in before the capture starts; one that is made during the capture can't be used in it, which cudarc would
/// allow, and which leaves a graph with addresses that were freed.
///
/// ```no_run
/// # use peersum::{ReduceOp, cuda::Communicator, interop::cudarc::Buffers};
/// # use std::sync::Arc;
/// # fn example(
/// #     communicator: &mut Communicator,
/// #     stream: Arc<cudarc::driver::CudaStream>,
/// #     tensor: cudarc::driver::CudaSlice<half::bf16>,
/// # ) -> peersum::Result<()> {
/// let mut buffers = Buffers::new();
/// let x = buffers.hold(tensor);
/// let mut capture = buffers.capture(&stream)?;
/// for _layer in 0..32 {
///     capture.all_reduce_in_place(communicator, x, ReduceOp::Sum)?;
/// }
/// let mut graph = capture.finish()?;
/// graph.launch()?; // as often as you like, between eager calls
/// let result = stream.clone_dtoh(&graph.buffer(x)).unwrap();
/// # Ok(())
/// # }
/// ```
pub struct Buffers {
    /// Tells handles of these buffers from those of others.
    id: u64,
    held: Vec<Box<dyn Hold>>,
}

impl Default for Buffers {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Buffers { id: NEXT.fetch_add(1, Ordering::Relaxed), held: Vec::new() }
    }
}

/// A buffer that a graph owns.
pub struct Held<T> {
    owner: u64,
    index: usize,
    element: PhantomData<fn(T)>,
}

impl<T> Clone for Held<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Held<T> {}

/// A `CudaSlice` of any element type.
trait Hold: Any {
    /// Its address, ordered behind other streams' work on it, for work on `stream` that is enqueued within `then`.
    fn with_address(&mut self, stream: &CudaStream, then: &mut dyn FnMut(u64));
    fn home(&self) -> &Arc<CudaStream>;
    /// The `CudaSlice`.
    fn as_any(&self) -> &dyn Any;
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

impl<T: Element> Hold for CudaSlice<T> {
    fn with_address(&mut self, stream: &CudaStream, then: &mut dyn FnMut(u64)) {
        let (address, _writing) = self.device_ptr_mut(stream);
        then(address);
    }
    fn home(&self) -> &Arc<CudaStream> {
        self.stream()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl<T: Element> Hold for SymmetricBuffer<T> {
    fn with_address(&mut self, stream: &CudaStream, then: &mut dyn FnMut(u64)) {
        self.slice_mut().with_address(stream, then);
    }
    fn home(&self) -> &Arc<CudaStream> {
        self.stream()
    }
    fn as_any(&self) -> &dyn Any {
        self.slice()
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self.slice_mut()
    }
}

impl Buffers {
    /// None yet.
    pub fn new() -> Buffers {
        Buffers::default()
    }

    /// Takes a buffer in.
    pub fn hold<T: Element>(&mut self, buffer: CudaSlice<T>) -> Held<T> {
        self.held.push(Box::new(buffer));
        Held { owner: self.id, index: self.held.len() - 1, element: PhantomData }
    }

    /// Takes a buffer of symmetric memory in.
    pub fn hold_symmetric<T: Element>(&mut self, buffer: SymmetricBuffer<T>) -> Held<T> {
        self.held.push(Box::new(buffer));
        Held { owner: self.id, index: self.held.len() - 1, element: PhantomData }
    }

    fn get<T: Element>(&self, held: Held<T>) -> Result<&CudaSlice<T>> {
        let slice = self.held.get(held.index).filter(|_| held.owner == self.id);
        slice.and_then(|slice| slice.as_any().downcast_ref()).ok_or(Error::ForeignHandle)
    }

    fn get_mut<T: Element>(&mut self, held: Held<T>) -> Result<&mut CudaSlice<T>> {
        let slice = self.held.get_mut(held.index).filter(|_| held.owner == self.id);
        slice.and_then(|slice| slice.as_any_mut().downcast_mut()).ok_or(Error::ForeignHandle)
    }

    /// Starts to capture what is enqueued on `stream`, these calls and any other.
    ///
    /// The capture is thread-local: other threads go on allocating and synchronising; this one must not, or the capture
    /// ends in [`Error::CaptureFailed`].
    pub fn capture(mut self, stream: &Arc<CudaStream>) -> Result<Capture> {
        let _restored = Restored::new(Some(stream.context().ordinal()))?;
        let mut addresses = Vec::with_capacity(self.held.len());
        for buffer in &mut self.held {
            if buffer.home().context().cu_ctx() != stream.context().cu_ctx() {
                let (allocated_on, device) = (buffer.home().context().ordinal(), stream.context().ordinal());
                return Err(Error::UnreachableMemory { what: "buffer", allocated_on, device });
            }
            tracked("buffer", buffer.home(), stream)?;
            // Events are for eager work: within a capture they would belong to the graph.
            buffer.with_address(stream, &mut |address| addresses.push(address));
        }
        stream.context().check_err().map_err(|error| driver_error(stream, "an earlier call of cudarc's", error))?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        bound(stream, "cuStreamBeginCapture", || stream.begin_capture(mode))
            .map_err(|error| capture_failed(error, 0))?;
        Ok(Capture { stream: stream.clone(), buffers: self, addresses, lifelines: Vec::new(), captured: 0, open: true })
    }
}

/// What the driver says of captures, as an error that tells that only the capture is lost.
fn capture_failed(error: Error, captured: usize) -> Error {
    const ABOUT_CAPTURES: [sys::CUresult; 10] = [
        sys::CUresult::CUDA_ERROR_ILLEGAL_STATE,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        sys::CUresult::CUDA_ERROR_CAPTURED_EVENT,
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    ];
    match error {
        Error::Driver { call, code, name, description, .. }
            if ABOUT_CAPTURES.iter().any(|&status| status as u32 == code) =>
        {
            let reason = if code == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED as u32 {
                INVALIDATED.into()
            } else {
                format!("{name} ({code}), {description}")
            };
            Error::CaptureFailed { call, captured, reason }
        }
        other => other,
    }
}

const INVALIDATED: &str = "since the last of them, a call that can't be captured, such as a synchronisation or an \
                           allocation, has invalidated the capture, and returned an error of its own";

/// A capture under way. Dropping it throws the capture away: it takes nothing of a peer's, and nothing was launched.
///
/// A peer that launches its graph of this capture all the same waits for this rank until the timeout, and its error names
/// it; if none does, the group goes on as if there had been no capture.
pub struct Capture {
    stream: Arc<CudaStream>,
    buffers: Buffers,
    addresses: Vec<u64>,
    lifelines: Vec<Lifeline>,
    /// All-reduces so far.
    captured: usize,
    open: bool,
}

impl Capture {
    /// Captures the all-reduce of `input` into `output`; see [`Communicator::all_reduce`].
    ///
    /// # Errors
    ///
    /// As there, but for what is about streams; and [`Error::CaptureFailed`] if other calls have made the capture
    /// impossible since the last one.
    pub fn all_reduce<T: Element>(
        &mut self,
        communicator: &mut Communicator,
        input: Held<T>,
        output: Held<T>,
        op: ReduceOp,
    ) -> Result<()> {
        communicator.belongs(&self.stream)?;
        self.goes_on()?;
        let (count, outputs) = (self.buffers.get(input)?.len(), self.buffers.get(output)?.len());
        if count != outputs {
            return Err(Error::LengthMismatch { input: count, output: outputs });
        }
        let (from, to) = (self.addresses[input.index], self.addresses[output.index]);
        // SAFETY: the graph will own both buffers, which are in the stream's context, and the communicator's memory,
        // and gives access to them only between launches.
        let captured =
            unsafe { communicator.all_reduce_raw(from, to, count, T::DTYPE, op, self.stream.cu_stream().cast()) };
        captured.map_err(|error| capture_failed(error, self.captured))?;
        self.captured += 1;
        let lifeline = communicator.lifeline();
        if !self.lifelines.iter().any(|held| held.is(&lifeline)) {
            self.lifelines.push(lifeline);
        }
        Ok(())
    }

    /// Captures the all-reduce of `buffer` in place; see [`Communicator::all_reduce`].
    pub fn all_reduce_in_place<T: Element>(
        &mut self,
        communicator: &mut Communicator,
        buffer: Held<T>,
        op: ReduceOp,
    ) -> Result<()> {
        self.all_reduce(communicator, buffer, buffer, op)
    }

    /// Whether the stream is still in this capture, and the capture still good.
    fn goes_on(&self) -> Result<()> {
        let reason = match bound(&self.stream, "cuStreamIsCapturing", || self.stream.capture_status())? {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => return Ok(()),
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED => INVALIDATED,
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => "somebody else has ended the capture",
        };
        Err(Error::CaptureFailed { call: "cuStreamIsCapturing", captured: self.captured, reason: reason.into() })
    }

    /// The stream that is captured, for other work that is to go into the graph.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Ends the capture.
    ///
    /// # Errors
    ///
    /// [`Error::CaptureFailed`] if there is no graph, and those of the driver.
    pub fn finish(mut self) -> Result<Graph> {
        self.goes_on()?;
        self.open = false;
        let stream = self.stream.clone();
        let graph = bound(&stream, "cuStreamEndCapture", || stream.end_capture(sys::CUgraphInstantiate_flags(0)));
        let graph = graph.map_err(|error| capture_failed(error, self.captured))?.ok_or_else(|| {
            Error::CaptureFailed { call: "cuStreamEndCapture", captured: self.captured, reason: INVALIDATED.into() }
        })?;
        bound(&stream, "cuGraphUpload", || graph.upload())?;
        let emptied = Buffers { id: self.buffers.id, held: Vec::new() };
        let buffers = std::mem::replace(&mut self.buffers, emptied);
        let lifelines = std::mem::take(&mut self.lifelines);
        Ok(Graph { graph, stream, buffers, lifelines })
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.open {
            let Ok(_restored) = Restored::new(Some(self.stream.context().ordinal())) else { return };
            let mut graph = std::ptr::null_mut();
            // SAFETY: the stream and its context live, and `graph` is a valid place for the answer: a graph that nobody else
            // has, or null where the capture was invalid. Either way the stream is out of it then.
            unsafe {
                let _ = sys::cuCtxSetCurrent(self.stream.context().cu_ctx());
                let _ = sys::cuStreamEndCapture(self.stream.cu_stream(), &mut graph);
                if !graph.is_null() {
                    let _ = sys::cuGraphDestroy(graph);
                }
            }
        }
    }
}

/// A CUDA graph, the buffers that its all-reduces use, and a hold on their group's memory.
pub struct Graph {
    graph: CudaGraph,
    stream: Arc<CudaStream>,
    buffers: Buffers,
    lifelines: Vec<Lifeline>,
}

impl Graph {
    /// Enqueues the graph on the stream that it was captured on.
    ///
    /// Every rank must launch its graphs and make its eager calls in the same order. As with eager calls, the stream is
    /// made to wait for the last one that the ranks used, if that is another, and the group's failure is an error.
    pub fn launch(&mut self) -> Result<()> {
        let (graph, stream) = (&self.graph, &self.stream);
        let _restored = Restored::new(Some(stream.context().ordinal()))?;
        if is_capturing(stream)? {
            return Err(Error::Capturing { device: stream.context().ordinal() });
        }
        for rank in &self.lifelines {
            rank.check()?;
            follow(rank, stream)?;
        }
        let mut launch = || bound(stream, "cuGraphLaunch", || graph.launch());
        launch_behind(&mut self.buffers.held, stream, &mut launch)
    }

    /// A buffer, to read.
    ///
    /// # Panics
    /// If the handle is of other buffers than this graph's.
    pub fn buffer<T: Element>(&self, held: Held<T>) -> CudaView<'_, T> {
        self.buffers.get(held).unwrap_or_else(|error| panic!("{error}")).as_view()
    }

    /// A buffer, to write. The buffer itself stays the graph's.
    ///
    /// # Panics
    /// If the handle is of other buffers than this graph's.
    pub fn buffer_mut<T: Element>(&mut self, held: Held<T>) -> CudaViewMut<'_, T> {
        let slice = self.buffers.get_mut(held).unwrap_or_else(|error| panic!("{error}"));
        slice.as_view_mut()
    }
}

/// Calls `launch` ordered behind what other streams do to the buffers, and them behind it.
fn launch_behind(
    buffers: &mut [Box<dyn Hold>],
    stream: &CudaStream,
    launch: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let Some((first, rest)) = buffers.split_first_mut() else { return launch() };
    let mut result = Ok(());
    first.with_address(stream, &mut |_| result = launch_behind(rest, stream, launch));
    result
}

/// Runs a call of cudarc's, which makes the stream's context current, and restores the one that was.
pub(super) fn bound<R>(
    stream: &CudaStream,
    call: &'static str,
    then: impl FnOnce() -> std::result::Result<R, DriverError>,
) -> Result<R> {
    let ordinal = Some(stream.context().ordinal());
    let _restored = Restored::new(ordinal)?;
    then().map_err(|error| driver_error(stream, call, error))
}

fn driver_error(stream: &CudaStream, call: &'static str, DriverError(status): DriverError) -> Error {
    check(call, Some(stream.context().ordinal()), status).expect_err("cudarc returns failures only")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_that_fails_leaves_the_communicator_usable_and_a_fault_does_not() {
        let failed = |status: sys::CUresult| {
            let (name, description) = ("NAME".to_owned(), "words".to_owned());
            let error = Error::Driver { call: "cuCall", device: Some(0), code: status as u32, name, description };
            capture_failed(error, 7)
        };
        for status in [
            sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            sys::CUresult::CUDA_ERROR_ILLEGAL_STATE,
        ] {
            let error = failed(status);
            assert!(matches!(error, Error::CaptureFailed { call: "cuCall", captured: 7, .. }), "{error}");
            assert!(error.is_recoverable());
        }
        let fault = failed(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert!(matches!(fault, Error::Driver { .. }) && !fault.is_recoverable());
    }
}
