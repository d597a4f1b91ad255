//! What machine a group runs on: the key of what was measured there.

use std::sync::Arc;

use cudarc::driver::sys;

use super::driver::{Device, Driver, check};
use crate::{Result, crossover::Machine};

/// The machine of ranks on these devices, which have NCCL of that version beside them.
pub(crate) fn machine(devices: &[Arc<Device>], nccl: Option<String>) -> Result<Machine> {
    let mut names: Vec<_> = devices.iter().map(|device| device.name()).collect();
    names.dedup();
    let links = devices.iter().map(|from| devices.iter().map(|to| link(from, to)).collect()).collect::<Result<_>>()?;
    Ok(Machine {
        gpu: names.join(" + "),
        world: devices.len() as u32,
        links,
        driver: driver()?,
        nccl,
        peersum: env!("CARGO_PKG_VERSION").into(),
        kernels: super::kernels_digest().into(),
    })
}

/// How `from` reaches the memory of `to`: as a letter of [`Machine::links`].
fn link(from: &Device, to: &Device) -> Result<char> {
    if from.ordinal == to.ordinal {
        return Ok('=');
    }
    if !from.can_access(to)? {
        return Ok('x');
    }
    let mut atomics = 0;
    let attribute = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    // SAFETY: both devices exist and are two; `atomics` is a valid place for the answer.
    let status = unsafe { sys::cuDeviceGetP2PAttribute(&mut atomics, attribute, from.handle, to.handle) };
    check("cuDeviceGetP2PAttribute", Some(from.ordinal), status)?;
    Ok(if atomics != 0 { 'N' } else { 'P' })
}

/// The version of the driver's module where the system tells it, else the CUDA that it supports.
fn driver() -> Result<String> {
    if let Ok(version) = std::fs::read_to_string("/sys/module/nvidia/version") {
        return Ok(version.trim().into());
    }
    let version = Driver::get()?.cuda_version()?;
    Ok(format!("CUDA {}.{}", version / 1000, version % 1000 / 10))
}
