//! What a measurement needs of a backend.

use anyhow::{Result, ensure};
use peersum::{DType, Placement, Plan};
use serde::{Deserialize, Serialize};

use super::{
    candidate::{Home, Way},
    datum::Datum,
    geometry::Geometry,
    rank::Rank,
};

/// Where ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Backend {
    Host,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Cuda,
}

/// What a rank runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    /// Ordinal of the GPU; on the host, of the thread.
    pub(crate) ordinal: usize,
    /// PCI address of the GPU.
    pub(crate) pci: Option<String>,
    /// The core that the rank's thread keeps to, if it keeps to one.
    pub(crate) core: Option<usize>,
    /// Name of the GPU, or of the CPU.
    pub(crate) name: String,
    /// The process that the rank is in.
    pub(crate) process_id: u32,
}

impl Device {
    /// Whether it is the same GPU; processes may count them in other ways.
    pub(crate) fn is_same(&self, other: &Device) -> bool {
        if self.pci.is_some() { self.pci == other.pci } else { self.ordinal == other.ordinal }
    }
}

/// The ranks of a run.
pub(crate) trait Group {
    /// A rank that has buffers of `T`.
    type Rank<'a, T: Datum>: Rank<T>
    where
        Self: 'a;

    /// What each rank runs on.
    fn devices(&self) -> &[Device];

    /// How a call of tensors that lie so would be done; `None` for no elements, or one rank. The error says why it
    /// can't be.
    fn plan(&mut self, way: Way, placement: Placement, count: usize, dtype: DType) -> peersum::Result<Option<Plan>>;

    /// Why the library chooses as it does, where it can tell.
    fn explain(&self, placement: Placement, count: usize, dtype: DType) -> Option<String>;

    /// The version of the NCCL that the ranks joined, or why they have none.
    fn nccl(&self) -> Result<String, String>;

    /// Whether symmetric memory is a window of that NCCL's, which has other kernels for it, or why not.
    fn nccl_window(&self) -> Result<(), String>;

    /// Gives every rank of this process its buffers, a pair in each of these places.
    fn ranks<T: Datum>(&mut self, geometry: &Geometry, homes: &[Home]) -> Result<Vec<Self::Rank<'_, T>>>;
}

/// A device for each rank: those that are named, or the first of `count`.
pub(crate) fn devices(ranks: Option<usize>, named: &[usize], count: usize) -> Result<Vec<usize>> {
    if named.is_empty() {
        let world = ranks.unwrap_or(count);
        ensure!(
            world <= count,
            "-g {world}: there {} {count} GPU{}; to let ranks share them, name one for each rank, as --devices {}",
            if count == 1 { "is" } else { "are" },
            if count == 1 { "" } else { "s" },
            (0..world).map(|rank| (rank % count).to_string()).collect::<Vec<_>>().join(",")
        );
        return Ok((0..world).collect());
    }
    if let Some(world) = ranks {
        let named = named.len();
        ensure!(world == named, "-g {world}, but --devices names {named}: give one of the two, or the same number");
    }
    Ok(named.to_vec())
}

/// The most ranks that are on one device.
pub(crate) fn sharing(devices: &[Device]) -> usize {
    let on = |device: &Device| devices.iter().filter(|other| other.is_same(device)).count();
    devices.iter().map(on).max().unwrap_or(1)
}

/// The device of a rank that is a process, one of several on `count` GPUs: the one that is named for it, or by its number
/// on this machine, in turns where there are more ranks than GPUs.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn device_of(rank: usize, local_rank: usize, world: usize, named: &[usize], count: usize) -> Result<usize> {
    if named.is_empty() {
        ensure!(count > 0, "this process sees no GPU");
        return Ok(local_rank % count);
    }
    let names = named.len();
    ensure!(names == world, "--devices names {names}, but the launcher started {world} ranks: name one for each");
    Ok(named[rank])
}

/// How many GPUs there are, or why none can be used.
#[cfg(feature = "cuda")]
pub(crate) fn gpus() -> Result<usize, String> {
    peersum::cuda::available().and_then(|()| peersum::cuda::device_count()).map_err(|error| error.to_string())
}

/// How many GPUs there are, or why none can be used.
#[cfg(not(feature = "cuda"))]
pub(crate) fn gpus() -> Result<usize, String> {
    Err("this command was built without the feature `cuda`".into())
}
