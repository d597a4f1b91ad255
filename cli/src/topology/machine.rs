//! The model of a machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Serialize, Serializer};

use super::{
    acs::Acs,
    address::Address,
    nvml::{Mode, PairAnswers, Remote, Status},
};

/// NVIDIA, as a PCI vendor.
pub(crate) const NVIDIA: u16 = 0x10de;

/// A machine, as far as it could be seen.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Machine {
    /// Where this is from, such as `sysfs`, `NVML 580.95.05`.
    pub(crate) sources: Vec<String>,
    /// What could not be seen, and why.
    pub(crate) unseen: Vec<String>,
    pub(crate) cpu: Cpu,
    /// NUMA nodes by number.
    pub(crate) nodes: BTreeMap<u32, Node>,
    /// All functions of the PCI tree.
    pub(crate) functions: BTreeMap<Address, Function>,
    /// In NVML's order, or by address.
    pub(crate) gpus: Vec<Gpu>,
    /// RDMA devices first.
    pub(crate) nics: Vec<Nic>,
    /// What NVML says of two GPUs, by their places in `gpus`.
    #[serde(serialize_with = "values")]
    pub(crate) pairs: BTreeMap<Pair, PairAnswers>,
    pub(crate) iommu: Iommu,
    pub(crate) driver: Driver,
    /// A switch is one bridge in the trails, as in NCCL's files, and host bridges are not told apart.
    pub(crate) collapsed: bool,
}

/// Two numbers are no key in JSON; the answers have them too.
fn values<S: Serializer>(pairs: &BTreeMap<Pair, PairAnswers>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(pairs.values())
}

/// Two places in [`Machine::gpus`].
pub(crate) type Pair = (usize, usize);

/// The processors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Cpu {
    /// As NCCL's files have it: `x86_64`, `arm64`, `ppc64`.
    pub(crate) architecture: Option<String>,
    pub(crate) vendor: Option<String>,
    pub(crate) family: Option<u32>,
    pub(crate) model: Option<u32>,
}

impl Cpu {
    /// Whether it is an x86 of AMD's.
    pub(crate) fn is_amd(&self) -> bool {
        self.vendor.as_deref() == Some("AuthenticAMD")
    }
}

/// A NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Node {
    /// A list such as `0-15,32-47`; empty if the node has memory alone.
    pub(crate) cpus: Option<String>,
}

/// A function of the PCI tree.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Function {
    /// 24 bits: class, subclass, interface.
    pub(crate) class: u32,
    pub(crate) vendor: u16,
    pub(crate) device: u16,
    pub(crate) subsystem_vendor: u16,
    pub(crate) subsystem_device: u16,
    pub(crate) link: Link,
    pub(crate) numa: Option<u32>,
    pub(crate) cpus: Option<String>,
    pub(crate) iommu_group: Option<u32>,
    /// The host bridge, such as `pci0000:3a`.
    pub(crate) root: String,
    /// The bridges above it, the root port first.
    pub(crate) trail: Vec<Address>,
    /// Of bridges alone.
    pub(crate) acs: Option<Acs>,
    /// The sizes of its memory regions, by their numbers.
    pub(crate) bars: Vec<u64>,
}

impl Function {
    pub(crate) fn is_bridge(&self) -> bool {
        self.class >> 8 == 0x0604
    }

    /// A 3D controller or a VGA controller of NVIDIA's.
    pub(crate) fn is_gpu(&self) -> bool {
        self.vendor == NVIDIA && matches!(self.class >> 8, 0x0300 | 0x0302)
    }

    pub(crate) fn is_nvswitch(&self) -> bool {
        self.vendor == NVIDIA && self.class >> 8 == 0x0680
    }

    pub(crate) fn is_nic(&self) -> bool {
        self.class >> 16 == 0x02
    }
}

/// A PCIe link, from the device up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Link {
    /// GT/s a lane.
    pub(crate) speed: Option<f64>,
    pub(crate) width: Option<u32>,
    /// What the device could.
    pub(crate) speed_max: Option<f64>,
    pub(crate) width_max: Option<u32>,
}

/// The generation of PCIe that has this speed.
pub(crate) fn generation(speed: f64) -> Option<u32> {
    SPEEDS.iter().position(|&(known, _)| known == speed).map(|index| index as u32 + 1)
}

/// The speed of a generation of PCIe, in GT/s.
pub(crate) fn speed(generation: u32) -> Option<f64> {
    SPEEDS.get((generation as usize).checked_sub(1)?).map(|&(speed, _)| speed)
}

/// By generation: GT/s, and which part of them its encoding leaves (8b/10b, 128b/130b, and flits of 256 bytes with 236
/// of data).
const SPEEDS: [(f64, f64); 6] =
    [(2.5, 0.8), (5.0, 0.8), (8.0, 128.0 / 130.0), (16.0, 128.0 / 130.0), (32.0, 128.0 / 130.0), (64.0, 236.0 / 256.0)];

/// GB/s of a PCIe link one way: the rate of its lanes less their encoding, which nothing exceeds. The heads of packets
/// take some 10 % of it; NCCL reckons with three quarters.
pub(crate) fn pcie_gb_per_s(speed: f64, width: u32) -> f64 {
    let encoding = generation(speed).map_or(0.8, |generation| SPEEDS[generation as usize - 1].1);
    speed * encoding * f64::from(width) / 8.0
}

/// A GPU.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Gpu {
    pub(crate) address: Option<Address>,
    pub(crate) name: Option<String>,
    pub(crate) uuid: Option<String>,
    pub(crate) minor: Option<u32>,
    pub(crate) compute_capability: Option<(u32, u32)>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) bar1_bytes: Option<u64>,
    pub(crate) mig: Option<bool>,
    pub(crate) compute_mode: Option<Mode>,
    /// Empty if it has none; `None` if unknown.
    pub(crate) nvlinks: Option<Vec<NvLink>>,
    /// GB/s of an NVLink one way, as NVML says it: see [`Gpu::nvlink_rate`].
    pub(crate) nvlink_gb_per_s: Option<f64>,
}

impl Gpu {
    /// The generation of its NVLinks, and what GPUs of that generation have: links, and GB/s of each one way.
    pub(crate) fn nvlink_generation(&self) -> Option<(u32, u32, f64)> {
        match self.compute_capability? {
            (6, 0) => Some((1, 4, 20.0)),
            (7, 0) => Some((2, 6, 25.0)),
            (8, 0) => Some((3, 12, 25.0)),
            // GeForce and workstation cards with a bridge.
            (8, 6) => Some((3, 4, 14.0625)),
            (9, 0) => Some((4, 18, 25.0)),
            (10, _) => Some((5, 18, 50.0)),
            _ => None,
        }
    }

    /// GB/s of data that one of its NVLinks carries one way. NVML tells the rate of the lanes, of which error correction
    /// takes 6 % from generation 4 on.
    pub(crate) fn nvlink_rate(&self) -> Option<f64> {
        let of_generation = self.nvlink_generation().map(|(.., rate)| rate);
        match (self.nvlink_gb_per_s, of_generation) {
            (Some(told), Some(data)) => Some(told.min(data)),
            (told, data) => told.or(data),
        }
    }

    /// The active links.
    pub(crate) fn active(&self) -> impl Iterator<Item = &NvLink> {
        self.nvlinks.iter().flatten().filter(|link| link.active == Some(true))
    }
}

/// An NVLink of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct NvLink {
    pub(crate) active: Option<bool>,
    pub(crate) to: Option<NvLinkTo>,
}

/// Where an NVLink leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NvLinkTo {
    Gpu(Address),
    Switch,
    Cpu,
}

impl NvLinkTo {
    pub(crate) fn new(remote: Option<Remote>, address: Option<Address>) -> Option<Self> {
        match (remote, address) {
            (Some(Remote::Switch), _) => Some(NvLinkTo::Switch),
            (Some(Remote::Cpu), _) => Some(NvLinkTo::Cpu),
            (Some(Remote::Gpu), Some(address)) => Some(NvLinkTo::Gpu(address)),
            _ => None,
        }
    }
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Nic {
    pub(crate) address: Address,
    /// The RDMA device's name, such as `mlx5_0`, or the interface's.
    pub(crate) name: Option<String>,
    pub(crate) rdma: bool,
    /// Mb/s.
    pub(crate) speed: Option<u32>,
}

/// The IOMMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Iommu {
    /// There are no groups.
    Off,
    /// On, and devices' addresses go through as they are.
    Passthrough,
    /// On, and devices' addresses are translated.
    Translating,
    #[default]
    Unknown,
}

impl fmt::Display for Iommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Iommu::Off => "off",
            Iommu::Passthrough => "on, passing addresses through",
            Iommu::Translating => "on, translating addresses",
            Iommu::Unknown => "unknown",
        })
    }
}

/// The two halves of NVIDIA's driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Driver {
    /// The version of the kernel's module.
    pub(crate) module: Option<String>,
    /// The version of the libraries.
    pub(crate) library: Option<String>,
    /// The CUDA that the libraries support, as 1000 × major + 10 × minor.
    pub(crate) cuda: Option<i32>,
}

impl Machine {
    /// The GPU's place in the PCI tree, if it has one there.
    pub(crate) fn function_of(&self, gpu: usize) -> Option<(Address, &Function)> {
        let address = self.gpus.get(gpu)?.address?;
        Some((address, self.functions.get(&address)?))
    }

    /// The node that a function is at; the only one of a machine that has one.
    pub(crate) fn numa(&self, function: &Function) -> Option<u32> {
        let only = || self.nodes.keys().next().copied().filter(|_| self.nodes.len() == 1);
        function.numa.or_else(only)
    }

    /// The GPU's node.
    pub(crate) fn numa_of(&self, gpu: usize) -> Option<u32> {
        self.numa(self.function_of(gpu)?.1)
    }

    /// All pairs of GPUs, the lower place first.
    pub(crate) fn gpu_pairs(&self) -> impl Iterator<Item = Pair> + use<> {
        let count = self.gpus.len();
        (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)))
    }

    /// The link as it is now and what both its ends could, which is less than what the device could where the slot is a
    /// smaller one.
    pub(crate) fn link(&self, function: &Function) -> Link {
        let port = function.trail.last().and_then(|port| self.functions.get(port));
        let least = |of: fn(&Link) -> Option<f64>| {
            let device = of(&function.link)?;
            Some(port.and_then(|port| of(&port.link)).map_or(device, |port| device.min(port)))
        };
        Link {
            speed_max: least(|link| link.speed_max),
            width_max: least(|link| link.width_max.map(f64::from)).map(|width| width as u32),
            ..function.link
        }
    }

    /// Why the pair has no P2P, if NVML says that it has none, in any direction.
    pub(crate) fn p2p_refused(&self, (a, b): Pair) -> Option<Status> {
        let answers = [(a, b), (b, a)].map(|pair| self.pairs.get(&pair));
        let all = answers.into_iter().flatten().flat_map(|pair| [pair.read, pair.write]);
        all.flatten().find(|&status| status != Status::Ok)
    }

    /// Whether NVML says that the pair has P2P in both directions.
    pub(crate) fn p2p_granted(&self, (a, b): Pair) -> bool {
        [(a, b), (b, a)].iter().all(|pair| {
            let answers = self.pairs.get(pair);
            answers.is_some_and(|pair| pair.read == Some(Status::Ok) && pair.write == Some(Status::Ok))
        })
    }

    /// The bridges between two functions, without the one at which they meet: each port at which ACS could send the
    /// traffic elsewhere.
    pub(crate) fn bridges_between(&self, a: &Function, b: &Function) -> BTreeSet<Address> {
        let shared = shared(a, b);
        a.trail[shared..].iter().chain(&b.trail[shared..]).copied().collect()
    }
}

/// How many bridges two functions share.
pub(crate) fn shared(a: &Function, b: &Function) -> usize {
    if a.root != b.root {
        return 0;
    }
    a.trail.iter().zip(&b.trail).take_while(|(a, b)| a == b).count()
}
