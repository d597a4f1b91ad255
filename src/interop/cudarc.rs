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

use std::{any::Any, marker::PhantomData, sync::Arc};

use cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, sys};

use crate::{
    Element, Error, ReduceOp, Result,
    cuda::{Communicator, Lifeline, Restored, check},
};

impl Communicator {
    /// Enqueues the all-reduce of `input` into `output` on `stream`.
    ///
    /// Both have the same number of elements, on this rank's device; any length and any offset into an allocation will
    /// do. It returns once the work is enqueued; the borrows end then, and cudarc's stream order keeps the buffers alive
    /// and unchanged for it (with cudarc's event tracking off, that is up to the caller's own stream order).
    ///
    /// # Errors
    ///
    /// Before anything is enqueued: [`Error::LengthMismatch`], [`Error::ForeignStream`], [`Error::UnreachableMemory`],
    /// those of the plan, and the group's failure.
    pub fn all_reduce<T: Element, I: DevicePtr<T>, O: DevicePtrMut<T>>(
        &mut self,
        input: &I,
        output: &mut O,
        op: ReduceOp,
        stream: &Arc<CudaStream>,
    ) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        self.belongs(stream)?;
        self.reaches("input", input.stream())?;
        self.reaches("output", output.stream())?;
        let count = input.len();
        let (from, _reading) = input.device_ptr(stream);
        let (to, _writing) = output.device_ptr_mut(stream);
        // SAFETY: cudarc's buffers are valid for their length, in this device's context, and the guards keep other
        // streams from writing the input or touching the output until this work is done, as `&` and `&mut` keep threads.
        unsafe { self.all_reduce_raw(from, to, count, T::DTYPE, op, stream.cu_stream().cast()) }
    }

    /// Enqueues the all-reduce of `buffer` in place on `stream`; see [`Communicator::all_reduce`].
    pub fn all_reduce_in_place<T: Element, B: DevicePtrMut<T>>(
        &mut self,
        buffer: &mut B,
        op: ReduceOp,
        stream: &Arc<CudaStream>,
    ) -> Result<()> {
        self.belongs(stream)?;
        self.reaches("buffer", buffer.stream())?;
        let count = buffer.len();
        let (address, _writing) = buffer.device_ptr_mut(stream);
        // SAFETY: as in `all_reduce`.
        unsafe { self.all_reduce_raw(address, address, count, T::DTYPE, op, stream.cu_stream().cast()) }
    }

    fn belongs(&self, stream: &CudaStream) -> Result<()> {
        if stream.context().cu_ctx() == self.context() {
            return Ok(());
        }
        Err(Error::ForeignStream { device: self.device() })
    }

    /// Whether a buffer that was allocated on `stream` is in this communicator's context.
    fn reaches(&self, what: &'static str, stream: &CudaStream) -> Result<()> {
        if stream.context().cu_ctx() == self.context() {
            return Ok(());
        }
        Err(Error::UnreachableMemory { what, allocated_on: stream.context().ordinal(), device: self.device() })
    }
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
/// let result = stream.clone_dtoh(graph.buffer(x)).unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct Buffers {
    held: Vec<Box<dyn Hold>>,
}

/// A buffer that a graph owns.
pub struct Held<T> {
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
    fn length(&self) -> usize;
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
    fn length(&self) -> usize {
        self.len()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
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
        Held { index: self.held.len() - 1, element: PhantomData }
    }

    /// Starts to capture what is enqueued on `stream`, these calls and any other.
    ///
    /// The capture is thread-local: other threads go on allocating and synchronising; this one must not.
    pub fn capture(mut self, stream: &Arc<CudaStream>) -> Result<Capture> {
        let mut addresses = Vec::with_capacity(self.held.len());
        for buffer in &mut self.held {
            if buffer.home().context().cu_ctx() != stream.context().cu_ctx() {
                let (allocated_on, device) = (buffer.home().context().ordinal(), stream.context().ordinal());
                return Err(Error::UnreachableMemory { what: "buffer", allocated_on, device });
            }
            // Events are for eager work: within a capture they would belong to the graph.
            buffer.with_address(stream, &mut |address| addresses.push(address));
        }
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        bound(stream, "cuStreamBeginCapture", || stream.begin_capture(mode))?;
        Ok(Capture { stream: stream.clone(), buffers: self, addresses, lifelines: Vec::new(), open: true })
    }
}

/// A capture under way. Dropping it throws the capture away.
pub struct Capture {
    stream: Arc<CudaStream>,
    buffers: Buffers,
    addresses: Vec<u64>,
    lifelines: Vec<Lifeline>,
    open: bool,
}

impl Capture {
    /// Captures the all-reduce of `input` into `output`; see [`Communicator::all_reduce`].
    pub fn all_reduce<T: Element>(
        &mut self,
        communicator: &mut Communicator,
        input: Held<T>,
        output: Held<T>,
        op: ReduceOp,
    ) -> Result<()> {
        communicator.belongs(&self.stream)?;
        let (count, outputs) = (self.buffers.held[input.index].length(), self.buffers.held[output.index].length());
        if count != outputs {
            return Err(Error::LengthMismatch { input: count, output: outputs });
        }
        let (from, to) = (self.addresses[input.index], self.addresses[output.index]);
        // SAFETY: the graph will own both buffers, which are in the stream's context, and the communicator's memory,
        // and gives access to them only between launches.
        unsafe { communicator.all_reduce_raw(from, to, count, T::DTYPE, op, self.stream.cu_stream().cast())? };
        self.lifelines.push(communicator.lifeline());
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

    /// The stream that is captured, for other work that is to go into the graph.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Ends the capture.
    pub fn finish(mut self) -> Result<Graph> {
        self.open = false;
        let stream = self.stream.clone();
        let graph = bound(&stream, "cuStreamEndCapture", || stream.end_capture(sys::CUgraphInstantiate_flags(0)))?;
        let graph = graph.ok_or_else(|| Error::System {
            call: "cuStreamEndCapture",
            reason: "the capture was invalidated by a call that can't be captured".into(),
        })?;
        bound(&stream, "cuGraphUpload", || graph.upload())?;
        let buffers = std::mem::take(&mut self.buffers);
        let lifelines = std::mem::take(&mut self.lifelines);
        Ok(Graph { graph, stream, buffers, _lifelines: lifelines })
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.open {
            let stream = self.stream.clone();
            // The capture may be invalid already; either way the stream is out of it now.
            let _ = bound(&stream, "cuStreamEndCapture", || stream.end_capture(sys::CUgraphInstantiate_flags(0)));
        }
    }
}

/// A CUDA graph, the buffers that its all-reduces use, and a hold on their group's memory.
pub struct Graph {
    graph: CudaGraph,
    stream: Arc<CudaStream>,
    buffers: Buffers,
    _lifelines: Vec<Lifeline>,
}

impl Graph {
    /// Enqueues the graph on the stream that it was captured on.
    ///
    /// Every rank must launch its graphs and make its eager calls in the same order.
    pub fn launch(&mut self) -> Result<()> {
        let (graph, stream) = (&self.graph, &self.stream);
        let mut launch = || bound(stream, "cuGraphLaunch", || graph.launch());
        launch_behind(&mut self.buffers.held, stream, &mut launch)
    }

    /// A buffer, to read.
    pub fn buffer<T: Element>(&self, held: Held<T>) -> &CudaSlice<T> {
        self.buffers.held[held.index].as_any().downcast_ref().expect("a handle of this graph's buffers")
    }

    /// A buffer, to write.
    pub fn buffer_mut<T: Element>(&mut self, held: Held<T>) -> &mut CudaSlice<T> {
        self.buffers.held[held.index].as_any_mut().downcast_mut().expect("a handle of this graph's buffers")
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
fn bound<R>(
    stream: &CudaStream,
    call: &'static str,
    then: impl FnOnce() -> std::result::Result<R, DriverError>,
) -> Result<R> {
    let ordinal = Some(stream.context().ordinal());
    let _restored = Restored::new(ordinal)?;
    then().map_err(|DriverError(status)| check(call, ordinal, status).expect_err("cudarc returns failures only"))
}
