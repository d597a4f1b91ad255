//! How each two devices are connected, in the terms of `nvidia-smi topo -m`.

use std::fmt;

use serde::{Serialize, Serializer};

use super::{
    machine::{self, Function, Machine, NvLinkTo, Pair},
    nvml::{Ancestor, Status},
};

/// How far apart two devices are in the PCI tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Relation {
    /// At most one bridge, or one switch.
    Pix,
    /// Several, and no host bridge.
    Pxb,
    /// A host bridge.
    Phb,
    /// Several host bridges of one NUMA node.
    Node,
    /// Several NUMA nodes.
    Sys,
}

impl Relation {
    pub(crate) const ALL: [Relation; 5] = [Relation::Pix, Relation::Pxb, Relation::Phb, Relation::Node, Relation::Sys];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Relation::Pix => "PIX",
            Relation::Pxb => "PXB",
            Relation::Phb => "PHB",
            Relation::Node => "NODE",
            Relation::Sys => "SYS",
        }
    }

    /// As in the legend of `nvidia-smi topo -m`.
    pub(crate) fn meaning(self) -> &'static str {
        match self {
            Relation::Pix => "Connection traversing at most a single PCIe bridge",
            Relation::Pxb => "Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)",
            Relation::Phb => "Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)",
            Relation::Node => {
                "Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node"
            }
            Relation::Sys => {
                "Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)"
            }
        }
    }
}

impl fmt::Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Relation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// How two devices are connected. What is unknown is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Connection {
    /// NVLinks between them, directly or through switches.
    pub(crate) nvlinks: Option<u32>,
    pub(crate) pci: Option<Relation>,
}

impl Connection {
    /// Known to be connected by NVLink.
    pub(crate) fn linked(self) -> bool {
        self.nvlinks.is_some_and(|links| links > 0)
    }

    /// Known not to be.
    pub(crate) fn unlinked(self) -> bool {
        self.nvlinks == Some(0)
    }
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.nvlinks, self.pci) {
            (Some(links), _) if links > 0 => write!(f, "NV{links}"),
            (_, Some(relation)) => f.write_str(relation.name()),
            _ => f.write_str("?"),
        }
    }
}

/// The matrix.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Matrix {
    /// GPUs, then NICs.
    pub(crate) devices: Vec<Device>,
    /// By row and column; of a device with itself there is no meaning.
    pub(crate) cells: Vec<Vec<Connection>>,
}

/// A row of the matrix.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Device {
    /// `GPU0`, `NIC0`.
    pub(crate) label: String,
    pub(crate) name: Option<String>,
    pub(crate) gpu: bool,
    pub(crate) cpus: Option<String>,
    pub(crate) numa: Option<u32>,
}

impl Matrix {
    /// Of all GPUs and NICs of a machine.
    pub(crate) fn of(machine: &Machine) -> Self {
        let gpus = (0..machine.gpus.len()).map(Place::Gpu);
        let nics = (0..machine.nics.len()).map(Place::Nic);
        let places: Vec<_> = gpus.chain(nics).collect();
        Matrix {
            devices: places.iter().map(|place| place.device(machine)).collect(),
            cells: places.iter().map(|a| places.iter().map(|b| connection(machine, *a, *b)).collect()).collect(),
        }
    }

    /// The same of these devices alone, in this order.
    pub(crate) fn select(&self, devices: &[usize]) -> Matrix {
        Matrix {
            devices: devices.iter().map(|&device| self.devices[device].clone()).collect(),
            cells: devices.iter().map(|&a| devices.iter().map(|&b| self.cells[a][b]).collect()).collect(),
        }
    }

    /// The places of the GPUs.
    pub(crate) fn gpus(&self) -> impl Iterator<Item = usize> {
        (0..self.devices.len()).filter(|&index| self.devices[index].gpu)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Gpu(usize),
    Nic(usize),
}

impl Place {
    fn function(self, machine: &Machine) -> Option<&Function> {
        match self {
            Place::Gpu(index) => Some(machine.function_of(index)?.1),
            Place::Nic(index) => machine.functions.get(&machine.nics[index].address),
        }
    }

    fn device(self, machine: &Machine) -> Device {
        let function = self.function(machine);
        let numa = function.and_then(|function| machine.numa(function));
        let of_node = || machine.nodes.get(&numa?)?.cpus.clone();
        let (label, name, gpu) = match self {
            Place::Gpu(index) => (format!("GPU{index}"), machine.gpus[index].name.clone(), true),
            Place::Nic(index) => (format!("NIC{index}"), machine.nics[index].name.clone(), false),
        };
        Device { label, name, gpu, cpus: function.and_then(|function| function.cpus.clone()).or_else(of_node), numa }
    }
}

fn connection(machine: &Machine, a: Place, b: Place) -> Connection {
    let pci = || pci(machine, a.function(machine)?, b.function(machine)?);
    match (a, b) {
        _ if a == b => Connection::default(),
        (Place::Gpu(a), Place::Gpu(b)) => gpus(machine, (a, b)),
        _ => Connection { nvlinks: Some(0), pci: pci() },
    }
}

/// Of two GPUs.
pub(crate) fn gpus(machine: &Machine, (a, b): Pair) -> Connection {
    let by_sysfs = || pci(machine, machine.function_of(a)?.1, machine.function_of(b)?.1);
    let ancestor = machine.pairs.get(&(a, b)).and_then(|pair| pair.ancestor);
    let by_nvml = ancestor.map(|ancestor| match ancestor {
        Ancestor::Internal | Ancestor::Single => Relation::Pix,
        Ancestor::Multiple => Relation::Pxb,
        Ancestor::HostBridge => Relation::Phb,
        Ancestor::Node => Relation::Node,
        Ancestor::System => Relation::Sys,
    });
    Connection { nvlinks: nvlinks(machine, (a, b)), pci: by_nvml.or_else(by_sysfs) }
}

/// The active NVLinks between two GPUs. Active links of a GPU say nothing of a peer: each must be known to lead to it,
/// or to a switch that both have links to.
fn nvlinks(machine: &Machine, (a, b): Pair) -> Option<u32> {
    let status = [(a, b), (b, a)].map(|pair| machine.pairs.get(&pair).and_then(|pair| pair.nvlink));
    // A switch without its fabric manager has active links that carry nothing.
    if status.iter().flatten().any(|&status| !matches!(status, Status::Ok | Status::Unknown)) {
        return Some(0);
    }
    let count = |from: usize, to: usize| {
        let gpu = &machine.gpus[from];
        gpu.nvlinks.as_ref()?;
        let there = machine.gpus[to].address;
        let leads = |wanted: fn(NvLinkTo, Option<super::address::Address>) -> bool| {
            gpu.active().filter(|link| link.to.is_some_and(|to| wanted(to, there))).count() as u32
        };
        let direct = leads(|to, there| matches!((to, there), (NvLinkTo::Gpu(at), Some(there)) if at == there));
        let switch = leads(|to, _| to == NvLinkTo::Switch);
        let lost = gpu.nvlinks.iter().flatten().any(|link| match link.active {
            Some(active) => active && link.to.is_none(),
            None => true,
        });
        Some((direct, switch, lost))
    };
    let ((direct, switch, lost), (back, switch_back, lost_back)) = (count(a, b)?, count(b, a)?);
    match (direct, switch.min(switch_back)) {
        (0, 0) if back > 0 || lost || lost_back => None,
        (0, links) => Some(links),
        // The two ends disagree.
        _ if direct != back => None,
        (links, _) => Some(links),
    }
}

/// Of two functions, by where they hang in the PCI tree.
pub(crate) fn pci(machine: &Machine, a: &Function, b: &Function) -> Option<Relation> {
    if a.root.is_empty() || b.root.is_empty() {
        return None;
    }
    let shared = machine::shared(a, b);
    if shared > 0 {
        // Below the bridge at which they meet: a port of one switch each, which is the switch's own in NCCL's files.
        let most = if machine.collapsed { 0 } else { 1 };
        let near = [a, b].iter().all(|function| function.trail.len() - shared <= most);
        return Some(if near { Relation::Pix } else { Relation::Pxb });
    }
    if a.root == b.root {
        return Some(Relation::Phb);
    }
    match (machine.numa(a)?, machine.numa(b)?) {
        (a, b) if a == b => Some(Relation::Node),
        _ => Some(Relation::Sys),
    }
}
