//! Inputs that the device makes, and a check of results that the device does: for tests, and for whoever wants to know
//! that every element is right at sizes where the host would take too long.

use std::{ffi::c_void, ptr, sync::Arc};

use cudarc::driver::sys;

use super::{
    driver::{self, Device, check},
    module::Module,
};
use crate::{DType, ReduceOp, Result};

/// The kernels that fill and check, on one device. See `kernels/verify.cu` for what the data are.
///
/// All calls enqueue only, and may be captured.
pub struct Verifier {
    device: Arc<Device>,
    fills: Vec<sys::CUfunction>,
    checks: Vec<sys::CUfunction>,
    advance: sys::CUfunction,
    empty: sys::CUfunction,
    /// Writes and reads, of words and of packets.
    whole: [[sys::CUfunction; 2]; 2],
    _module: Arc<Module>,
}

// SAFETY: function handles may be used from any thread, for as long as the module is loaded, which is held.
unsafe impl Send for Verifier {}
// SAFETY: as above.
unsafe impl Sync for Verifier {}

const BLOCKS: u32 = 64;
const THREADS: u32 = 256;

impl Verifier {
    /// In the word that holds the round: makes the inputs integers from −16 to 15, so that every sum of 8 ranks is exact in
    /// any order, also where it is rounded to the type after each addition.
    pub const EXACT: u64 = 1 << 63;

    /// On the device with this ordinal, in its primary context.
    pub fn new(device: usize) -> Result<Verifier> {
        let device = Device::open(device)?;
        let module = Module::get(&device)?;
        let entered = device.enter()?;
        let of_types = |what: &str| -> Result<Vec<_>> {
            DType::ALL.iter().map(|dtype| module.function(&format!("peersum_{what}_{dtype}"))).collect()
        };
        let (fills, checks) = (of_types("fill")?, of_types("check")?);
        let (advance, empty) = (module.function("peersum_advance")?, module.function("peersum_empty")?);
        let whole = [
            [module.function("peersum_write_words")?, module.function("peersum_read_words")?],
            [module.function("peersum_write_packets")?, module.function("peersum_read_packets")?],
        ];
        drop(entered);
        Ok(Verifier { device, fills, checks, advance, empty, whole, _module: module })
    }

    /// Writes rank `rank`'s input of the round that the u64 at `round` holds.
    ///
    /// # Safety
    /// The addresses are of `count` elements and of a u64 on this device, valid until the work is done, as for
    /// [`Communicator::all_reduce_raw`](super::Communicator::all_reduce_raw); so is the stream.
    pub unsafe fn fill(
        &self,
        tensor: u64,
        count: usize,
        dtype: DType,
        rank: u32,
        round: u64,
        stream: *mut c_void,
    ) -> Result<()> {
        let (mut tensor, mut count, mut rank, mut round) = (tensor, count as u64, rank, round);
        let arguments = &mut [
            ptr::from_mut(&mut tensor).cast(),
            ptr::from_mut(&mut count).cast(),
            ptr::from_mut(&mut rank).cast(),
            ptr::from_mut(&mut round).cast(),
        ];
        // SAFETY: these are the kernel's parameters; the caller vouches for what they point to.
        unsafe { self.launch(self.fills[dtype.code() as usize], BLOCKS, THREADS, arguments, stream) }
    }

    /// Adds to the u64 at `wrong` how many elements of `tensor` are not what the reduction of that round's inputs gives.
    ///
    /// # Safety
    /// As for [`Verifier::fill`], with `wrong` a u64 too.
    #[allow(clippy::too_many_arguments)] // what a kernel takes
    pub unsafe fn check(
        &self,
        tensor: u64,
        count: usize,
        dtype: DType,
        world: u32,
        op: ReduceOp,
        round: u64,
        wrong: u64,
        stream: *mut c_void,
    ) -> Result<()> {
        let (mut tensor, mut count, mut world, mut op) = (tensor, count as u64, world, op.code());
        let (mut round, mut wrong) = (round, wrong);
        let arguments = &mut [
            ptr::from_mut(&mut tensor).cast(),
            ptr::from_mut(&mut count).cast(),
            ptr::from_mut(&mut world).cast(),
            ptr::from_mut(&mut op).cast(),
            ptr::from_mut(&mut round).cast(),
            ptr::from_mut(&mut wrong).cast(),
        ];
        // SAFETY: as in `fill`.
        unsafe { self.launch(self.checks[dtype.code() as usize], BLOCKS, THREADS, arguments, stream) }
    }

    /// A kernel that does nothing: what any kernel of this grid costs.
    ///
    /// # Safety
    /// The stream is one of this device.
    pub unsafe fn empty(&self, blocks: u32, threads: u32, stream: *mut c_void) -> Result<()> {
        // SAFETY: the kernel has no parameters.
        unsafe { self.launch(self.empty, blocks, threads, &mut [], stream) }
    }

    /// Stores to each of the places at `places` its bits of rounds 1 to `rounds`, one after another: packets of 16 bytes, or
    /// words of 8. There are `blocks` times 256 of them, one after another.
    ///
    /// # Safety
    /// As for [`Verifier::fill`], with `places` reached by this device.
    pub unsafe fn write_whole(
        &self,
        packets: bool,
        blocks: u32,
        places: u64,
        rounds: u32,
        stream: *mut c_void,
    ) -> Result<()> {
        let (mut places, mut rounds) = (places, rounds);
        let arguments = &mut [ptr::from_mut(&mut places).cast(), ptr::from_mut(&mut rounds).cast()];
        // SAFETY: as in `fill`.
        unsafe { self.launch(self.whole[usize::from(packets)][0], blocks, THREADS, arguments, stream) }
    }

    /// Loads those places until each has its last round, or for that long, and adds to the three u64 at `counts`: loads, rounds
    /// that a load found for the first time, and loads that found bits of two rounds.
    ///
    /// # Safety
    /// As for [`Verifier::write_whole`].
    #[allow(clippy::too_many_arguments)] // what a kernel takes
    pub unsafe fn read_whole(
        &self,
        packets: bool,
        blocks: u32,
        places: u64,
        rounds: u32,
        patience: std::time::Duration,
        counts: u64,
        stream: *mut c_void,
    ) -> Result<()> {
        let (mut places, mut rounds, mut counts) = (places, rounds, counts);
        let mut patience = patience.as_nanos() as u64;
        let arguments = &mut [
            ptr::from_mut(&mut places).cast(),
            ptr::from_mut(&mut rounds).cast(),
            ptr::from_mut(&mut patience).cast(),
            ptr::from_mut(&mut counts).cast(),
        ];
        // SAFETY: as in `fill`.
        unsafe { self.launch(self.whole[usize::from(packets)][1], blocks, THREADS, arguments, stream) }
    }

    /// Adds one to the u64 at `round`.
    ///
    /// # Safety
    /// As for [`Verifier::fill`].
    pub unsafe fn advance(&self, round: u64, stream: *mut c_void) -> Result<()> {
        let mut round = round;
        // SAFETY: as in `fill`.
        unsafe { self.launch(self.advance, 1, 1, &mut [ptr::from_mut(&mut round).cast()], stream) }
    }

    /// # Safety
    /// The arguments are the kernel's parameters and hold what it may be given.
    unsafe fn launch(
        &self,
        function: sys::CUfunction,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
        stream: *mut c_void,
    ) -> Result<()> {
        let stream = driver::stream_handle(stream);
        let _entered = self.device.enter()?;
        // SAFETY: the caller vouches for the arguments, and the driver copies them now.
        let status = unsafe {
            let (parameters, extra) = (arguments.as_mut_ptr(), ptr::null_mut());
            sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, extra)
        };
        check("cuLaunchKernel", Some(self.device.ordinal), status)
    }
}
