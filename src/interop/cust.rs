//! [cust](https://docs.rs/cust): its streams and `DeviceBuffer`s, over the raw call.
//!
//! cust's `Context::new` holds a device's primary context, which is the one that a communicator is made in.
//!
//! ```no_run
//! use cust::{memory::{CopyDestination, DeviceBuffer}, stream::{Stream, StreamFlags}};
//! use peersum::{Options, ReduceOp, cuda::Communicator};
//!
//! # fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let _context = cust::quick_init()?;
//! let mut rank = Communicator::local(&[0], &Options::default())?.remove(0);
//! let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
//! let mut tensor = DeviceBuffer::from_slice(&[1.5f32; 1000])?;
//! // SAFETY: the stream is synchronised before the buffer goes.
//! unsafe { rank.all_reduce_in_place_cust(&mut tensor, ReduceOp::Sum, &stream)? };
//! stream.synchronize()?;
//! rank.check()?;
//! # Ok(())
//! # }
//! ```

use cust::{
    memory::{DeviceBuffer, DeviceCopy},
    stream::Stream,
};

use crate::{Element, Error, ReduceOp, Result, cuda::Communicator};

impl Communicator {
    /// Enqueues the all-reduce of `input` into `output` on `stream`; as [`Communicator::all_reduce_raw`], with the
    /// lengths checked.
    ///
    /// # Safety
    ///
    /// cust's buffers know nothing of streams: neither may be dropped or written, nor the output read, before the work
    /// that this call enqueues has finished. What [`Communicator::all_reduce_raw`] says of graphs holds here too.
    pub unsafe fn all_reduce_cust<T: Element + DeviceCopy>(
        &mut self,
        input: &DeviceBuffer<T>,
        output: &mut DeviceBuffer<T>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        let (from, to) = (input.as_device_ptr().as_raw(), output.as_device_ptr().as_raw());
        // SAFETY: the buffers are valid for their length now, and the caller keeps them so.
        unsafe { self.all_reduce_raw(from, to, input.len(), T::DTYPE, op, stream.as_inner().cast()) }
    }

    /// Enqueues the all-reduce of `buffer` in place on `stream`.
    ///
    /// # Safety
    ///
    /// As for [`Communicator::all_reduce_cust`].
    pub unsafe fn all_reduce_in_place_cust<T: Element + DeviceCopy>(
        &mut self,
        buffer: &mut DeviceBuffer<T>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let address = buffer.as_device_ptr().as_raw();
        // SAFETY: the buffer is valid for its length now, and the caller keeps it so.
        unsafe { self.all_reduce_raw(address, address, buffer.len(), T::DTYPE, op, stream.as_inner().cast()) }
    }
}
