//! The kernels of a device: loaded once a device, every function of a world before the first call.

use std::{
    collections::HashMap,
    ffi::{CString, c_int},
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::sys;

use super::{
    driver::{Device, check},
    images,
};
use crate::{Algorithm, DType, Error, ReduceOp, Result, protocol::bindings};

/// Kernels share reductions of a kind; the op is an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Sum,
    Extreme,
}

impl Kind {
    const ALL: [Kind; 2] = [Kind::Sum, Kind::Extreme];

    fn of(op: ReduceOp) -> Kind {
        match op {
            ReduceOp::Sum | ReduceOp::Average => Kind::Sum,
            ReduceOp::Max | ReduceOp::Min => Kind::Extreme,
        }
    }
}

fn kernel_name(algorithm: Algorithm, dtype: DType, kind: Kind, world: u32) -> String {
    let algorithm = algorithm.name().replace('-', "_");
    let kind = match kind {
        Kind::Sum => "sum",
        Kind::Extreme => "extreme",
    };
    format!("peersum_{algorithm}_{dtype}_{kind}_{world}")
}

/// The images of the kernels, loaded into a device's context, for the rest of the process: loading takes longer than
/// everything else that a group needs, and unloading would have to wait for whatever runs.
pub(crate) struct Module {
    device: Arc<Device>,
    handles: Vec<sys::CUmodule>,
}

// SAFETY: module handles may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; nothing changes them until the drop.
unsafe impl Sync for Module {}

impl Module {
    /// The module of the device.
    pub(crate) fn get(device: &Arc<Device>) -> Result<Arc<Module>> {
        static LOADED: Mutex<Option<HashMap<usize, Arc<Module>>>> = Mutex::new(None);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_with(HashMap::new);
        if let Some(module) = loaded.get(&device.ordinal) {
            return Ok(module.clone());
        }
        let images = images();
        if images.is_empty() {
            return Err(Error::KernelsNotBuilt { reason: super::missing_kernels().into() });
        }
        let mut module = Module { device: device.clone(), handles: Vec::new() };
        let _entered = device.enter()?;
        for image in images {
            let mut handle = ptr::null_mut();
            // SAFETY: the image is a whole fatbin that lives for ever, and the context is current.
            let status = unsafe { sys::cuModuleLoadData(&mut handle, image.as_ptr().cast()) };
            check("cuModuleLoadData", Some(device.ordinal), status)?;
            module.handles.push(handle);
        }
        let module = Arc::new(module);
        loaded.insert(device.ordinal, module.clone());
        Ok(module)
    }

    pub(crate) fn function(&self, name: &str) -> Result<sys::CUfunction> {
        let c_name = CString::new(name).expect("kernel names hold no zero byte");
        let mut function = ptr::null_mut();
        let mut status = sys::CUresult::CUDA_ERROR_NOT_FOUND;
        for &handle in &self.handles {
            // SAFETY: the module is loaded, the name ends in a zero byte.
            status = unsafe { sys::cuModuleGetFunction(&mut function, handle, c_name.as_ptr()) };
            if status != sys::CUresult::CUDA_ERROR_NOT_FOUND {
                break;
            }
        }
        check("cuModuleGetFunction", Some(self.device.ordinal), status)?;
        self.device.load_function(function)?;
        Ok(function)
    }
}

/// The kernels of one world size on one device.
pub(crate) struct Kernels {
    /// By algorithm, type and kind; empty for a world of one, which needs none.
    functions: Vec<sys::CUfunction>,
    /// The gate before NCCL, likewise.
    gate: Option<sys::CUfunction>,
    _module: Arc<Module>,
}

// SAFETY: function handles may be used from any thread, for as long as the module is loaded, which is held.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    pub(crate) fn load(device: &Arc<Device>, world: u32) -> Result<Kernels> {
        let module = Module::get(device)?;
        let _entered = device.enter()?;
        let mut functions = Vec::new();
        if world > 1 {
            for algorithm in Algorithm::ALL {
                for dtype in DType::ALL {
                    for kind in Kind::ALL {
                        functions.push(module.function(&kernel_name(algorithm, dtype, kind, world))?);
                    }
                }
            }
        }
        let gate = (world > 1).then(|| module.function(&format!("peersum_gate_{world}"))).transpose()?;
        Ok(Kernels { functions, gate, _module: module })
    }

    /// What this library launches for a call by that algorithm, in a world of several.
    pub(crate) fn function(&self, algorithm: Algorithm, dtype: DType, op: ReduceOp) -> sys::CUfunction {
        if algorithm == Algorithm::Nccl {
            return self.gate.expect("a world of one has no calls");
        }
        let index = algorithm.code() as usize * DType::ALL.len() + dtype.code() as usize;
        self.functions[index * Kind::ALL.len() + Kind::of(op) as usize]
    }

    /// How many blocks of any of an algorithm's kernels each of `sharing` ranks may have resident on the device, by
    /// algorithm and threads of a block; [`resident_index`] says where.
    ///
    /// A rank that has the device to itself may fill it: whatever is ahead of its kernel ends. Ranks that share it may not.
    /// Blocks that wait stay where they were put, and what a rank enqueues ahead of its call may need a multiprocessor
    /// without any, be it for its registers, its shared memory or how it divides the L1 cache. So blocks of ranks that
    /// share count as one multiprocessor each, however many would fit: then one rank's part is free of the others' blocks.
    pub(crate) fn resident(&self, device: &Device, sharing: u32) -> Result<Vec<u32>> {
        let processors = device.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let _entered = device.enter()?;
        let of_algorithm = DType::ALL.len() * Kind::ALL.len();
        let mut resident = Vec::new();
        for functions in self.functions.chunks(of_algorithm) {
            for threads in (WARP..=bindings::PEERSUM_MAX_THREADS).step_by(WARP as usize) {
                let mut least = u32::MAX;
                for &function in functions {
                    let mut blocks = 0;
                    // SAFETY: the function is loaded, the context current, `blocks` a valid place for the answer.
                    let status = unsafe {
                        sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, threads as c_int, 0)
                    };
                    check("cuOccupancyMaxActiveBlocksPerMultiprocessor", Some(device.ordinal), status)?;
                    let blocks = if sharing > 1 { blocks.min(1) } else { blocks };
                    least = least.min((blocks * processors).max(0) as u32 / sharing);
                }
                resident.push(least);
            }
        }
        Ok(resident)
    }
}

const WARP: u32 = 32;

/// Where in [`Kernels::resident`]'s answer an algorithm with so many threads stands.
pub(crate) fn resident_index(algorithm: Algorithm, threads: u32) -> usize {
    (algorithm.code() * (bindings::PEERSUM_MAX_THREADS / WARP) + threads / WARP) as usize - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_loading_is_the_order_of_codes() {
        for (index, algorithm) in Algorithm::ALL.into_iter().enumerate() {
            assert_eq!(algorithm.code() as usize, index);
        }
        for (index, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype.code() as usize, index);
        }
        assert_eq!(kernel_name(Algorithm::OneShotPull, DType::BF16, Kind::Sum, 8), "peersum_one_shot_pull_bf16_sum_8");
    }
}
