//! What a pair of devices could move at most, by what is between them.

use serde::Serialize;

use super::links::Device;
use crate::topology::{
    machine::{Machine, generation, pcie_gb_per_s},
    matrix,
};

/// A rate, one way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Rate {
    pub(crate) gb_per_s: f64,
    /// What bounds it, such as `NV18`, `PCIe 5.0 x16`.
    pub(crate) by: String,
}

/// Where a device of CUDA's is among the machine's GPUs: by address, since CUDA numbers them in an order of its own.
pub(crate) fn place(machine: &Machine, pci: &str) -> Option<usize> {
    let address = pci.parse().ok()?;
    machine.gpus.iter().position(|gpu| gpu.address == Some(address))
}

/// Of a device with itself: all of its memory's bandwidth, reads and writes counted.
pub(crate) fn local(device: &Device) -> Option<Rate> {
    device.memory_gb_per_s.map(|gb_per_s| Rate { gb_per_s, by: "memory, reads and writes".into() })
}

/// Between two places of one machine; through the host's memory where P2P is off. None where it is unknown.
pub(crate) fn between(machine: &Machine, a: usize, b: usize, p2p: bool) -> Option<Rate> {
    if p2p && matrix::gpus(machine, (a, b)).linked() {
        let links = matrix::gpus(machine, (a, b)).nvlinks?;
        let each = machine.gpus[a].nvlink_rate()?.min(machine.gpus[b].nvlink_rate()?);
        return Some(Rate { gb_per_s: each * f64::from(links), by: format!("NV{links} x {each:.1} GB/s") });
    }
    let link = |gpu: usize| {
        // Links of idle GPUs slow down, so not what they are now.
        let link = machine.link(machine.function_of(gpu)?.1);
        let (speed, width) = (link.speed_max?, link.width_max?);
        Some((pcie_gb_per_s(speed, width), speed, width))
    };
    let ((a_rate, ..), (b_rate, ..)) = (link(a)?, link(b)?);
    let (gb_per_s, speed, width) = if a_rate <= b_rate { link(a)? } else { link(b)? };
    let generation = generation(speed).map_or(format!("{speed} GT/s"), |generation| format!("{generation}.0"));
    Some(Rate { gb_per_s, by: format!("PCIe {generation} x{width}") })
}
