//! Typed tensors in symmetric memory, as cudarc has buffers.

use std::{mem::ManuallyDrop, sync::Arc};

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop, sys,
};

use super::cudarc::{Source, Target, bound, sealed};
use crate::{
    Element, Error, Result,
    cuda::{Communicator, SymmetricMemory},
};

/// A tensor in a rank's symmetric memory: peers read it where it is, in place or out of place, with no copy into staging.
/// From [`Communicator::symmetric_buffer`].
///
/// It is used as a `CudaSlice` is: [`Communicator::all_reduce`] takes it, and [`Buffers`](super::cudarc::Buffers) hold it for
/// graphs. Peers read it only while a call that was given it is under way in this rank's stream. So the borrow of the call,
/// and cudarc's events after it, keep it from being overwritten or freed while a peer may read it, as they do for
/// any buffer; dropping it waits for the device, as [`SymmetricMemory`] says.
///
/// ```no_run
/// # use peersum::{Options, ReduceOp, cuda::Communicator};
/// # use cudarc::driver::CudaContext;
/// for mut rank in Communicator::local(&[0, 1], &Options::default().symmetric_bytes(64 << 20))? {
///     std::thread::spawn(move || {
///         let stream = CudaContext::new(rank.device()).unwrap().new_stream().unwrap();
///         let mut tensor = rank.symmetric_buffer::<half::bf16>(1 << 20, &stream)?;
///         // ... what fills tensor.view_mut(), on the stream
///         rank.all_reduce_in_place(&mut tensor, ReduceOp::Sum, &stream)
///     });
/// }
/// # Ok::<(), peersum::Error>(())
/// ```
pub struct SymmetricBuffer<T> {
    /// Over the memory, which is not cudarc's to free.
    slice: ManuallyDrop<CudaSlice<T>>,
    _memory: SymmetricMemory,
}

impl Communicator {
    /// A tensor of `count` zeros in this rank's symmetric memory, cleared on `stream`.
    ///
    /// Every rank must make, and drop, the same ones in the same order; see [`Communicator::symmetric_memory`].
    ///
    /// # Errors
    ///
    /// [`Error::SymmetricMemoryFull`], [`Error::ForeignStream`], [`Error::TooLarge`].
    pub fn symmetric_buffer<T: Element>(&self, count: usize, stream: &Arc<CudaStream>) -> Result<SymmetricBuffer<T>> {
        self.belongs(stream)?;
        let bytes = count.checked_mul(size_of::<T>()).ok_or(Error::TooLarge { count, dtype: T::DTYPE })?;
        let memory = self.symmetric_memory(bytes)?;
        // SAFETY: the memory is of the stream's context, has room for the elements, and lives as long as the slice. Its
        // content is bits of whatever was there, which all element types allow, until the zeros come.
        let slice =
            bound(stream, "cuEventCreate", || Ok(unsafe { stream.upgrade_device_ptr::<T>(memory.address(), count) }))?;
        let mut buffer = SymmetricBuffer { slice: ManuallyDrop::new(slice), _memory: memory };
        if count > 0 {
            bound(stream, "cuMemsetD8Async", || {
                let (address, _writing) = buffer.slice.device_ptr_mut(stream);
                // SAFETY: the range is the slice, which the guard orders.
                unsafe { cudarc::driver::result::memset_d8_async(address, 0, bytes, stream.cu_stream()) }
            })?;
        }
        Ok(buffer)
    }
}

impl<T> SymmetricBuffer<T> {
    /// All of it, to read.
    pub fn view(&self) -> CudaView<'_, T> {
        self.slice.as_view()
    }

    /// All of it, to write.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_view_mut()
    }

    pub(super) fn slice(&self) -> &CudaSlice<T> {
        &self.slice
    }

    pub(super) fn slice_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.slice
    }
}

impl<T> Drop for SymmetricBuffer<T> {
    fn drop(&mut self) {
        // SAFETY: it is taken once, here. The address is the memory's, which is given back after this, when the device has
        // finished with it.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        slice.leak();
    }
}

impl<T> DeviceSlice<T> for SymmetricBuffer<T> {
    fn len(&self) -> usize {
        self.slice.len()
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.slice.stream()
    }
}

impl<T> DevicePtr<T> for SymmetricBuffer<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.slice.device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for SymmetricBuffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.slice.device_ptr_mut(stream)
    }
}

impl<T> sealed::Sealed for SymmetricBuffer<T> {}
impl<T> Source<T> for SymmetricBuffer<T> {}
impl<T> Target<T> for SymmetricBuffer<T> {}
