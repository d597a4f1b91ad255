//! The CUDA backend: ranks are GPUs of one machine, or share one.
//!
//! Peers' memory is mapped, and one kernel a call stores, signals, polls and reduces. A call only enqueues that kernel
//! on the caller's stream, so it can be captured in a CUDA graph and replayed between eager calls.
//!
//! # Ranks that share a device
//!
//! A device may stand several times in the list that [`Communicator::local`] takes, for tests. All ranks' blocks must then
//! run at the same time. The plan bounds them by what is resident together, counting the ranks. But each rank's stream
//! also needs a hardware queue of its own: where two streams share one, and one rank has enqueued its next call, the
//! other's kernel waits behind that, and both wait for each other until the timeout. So set
//! `CUDA_DEVICE_MAX_CONNECTIONS=32` before CUDA starts (there are 8 queues otherwise), and make the ranks' streams once,
//! one after the other: streams that are made and destroyed over and over come to share queues, seen with 3 ranks and 32
//! queues. Copies have fewer queues: a copy that waits for one rank's call holds up the other ranks' copies, so the ranks'
//! threads must meet before they enqueue copies, or copy by kernels. Other work on the device that fills it makes calls slower, not wrong.
//!
//! # Threads of one process
//!
//! `cuMemAlloc`, `cuMemFree` and other calls that synchronise a device wait for the kernels on it, and these wait for
//! their peers. A thread must not make one between the launch of one rank and that of another whose work it is also to
//! enqueue. The library itself allocates and frees only when communicators are made and dropped.

mod communicator;
mod driver;
mod group;
mod handover;
mod machine;
mod memory;
mod module;
mod peers;
mod priors;
mod symmetric;
mod verify;

#[doc(hidden)]
pub use communicator::Lie;
pub(crate) use communicator::Lifeline;
pub use communicator::{AbortHandle, Communicator};
pub(crate) use driver::{Restored, check};
pub use symmetric::SymmetricMemory;
#[doc(hidden)]
pub use verify::Verifier;

mod kernels {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

/// The compiled kernels, as fatbins: none where the crate was built without nvcc.
#[doc(hidden)]
pub fn images() -> &'static [&'static [u8]] {
    kernels::IMAGES
}

/// The kernels that `peersum p2p` and `peersum probe` measure links with, as a fatbin; the library uses none of them.
#[doc(hidden)]
pub fn probe_image() -> crate::Result<&'static [u8]> {
    kernels::PROBE.ok_or_else(|| crate::Error::KernelsNotBuilt { reason: missing_kernels().into() })
}

/// Tells these kernels from those of other versions.
pub(crate) fn kernels_digest() -> &'static str {
    kernels::DIGEST
}

fn missing_kernels() -> &'static str {
    kernels::REASON
}

/// Whether the backend can be used: a driver, kernels in this build, and a device. The error says what is missing.
pub fn available() -> crate::Result<()> {
    if device_count()? == 0 {
        return Err(crate::Error::CudaUnavailable {
            reason: "the driver shows no device (CUDA_VISIBLE_DEVICES can hide them)".into(),
        });
    }
    if images().is_empty() {
        return Err(crate::Error::KernelsNotBuilt { reason: missing_kernels().into() });
    }
    Ok(())
}

/// How many devices this process sees.
pub fn device_count() -> crate::Result<usize> {
    driver::Driver::get()?.device_count()
}
