//! What NVML answers, as data: asked of the driver's library where there is one, or read from a fixture.

use nvml_wrapper::{
    Device, Nvml,
    enum_wrappers::device::{ComputeMode, P2pCapabilitiesIndex, P2pStatus, TopologyLevel},
    enums::device::SampleValue,
    error::NvmlError,
    structs::device::FieldId,
};
use serde::{Deserialize, Serialize};

/// More links than any GPU has (`NVML_NVLINK_MAX_LINKS`).
const MOST_LINKS: u32 = 18;
/// `NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON`: MB/s of a link, one way.
const LINK_SPEED: u32 = 90;

/// All answers. A question that NVML did not answer is `None`, or has its reason in `unanswered`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Answers {
    /// The version of the driver that the library belongs to.
    pub(crate) driver: Option<String>,
    /// The version of CUDA that it supports, as 1000 × major + 10 × minor.
    pub(crate) cuda: Option<i32>,
    /// By NVML's index.
    pub(crate) gpus: Vec<GpuAnswers>,
    /// Of each two GPUs, both ways.
    pub(crate) pairs: Vec<PairAnswers>,
    /// Questions that were refused.
    pub(crate) unanswered: Vec<String>,
}

/// Of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct GpuAnswers {
    pub(crate) bus_id: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) uuid: Option<String>,
    /// The number in `/dev/nvidia0`.
    pub(crate) minor: Option<u32>,
    pub(crate) compute_capability: Option<(u32, u32)>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) bar1_bytes: Option<u64>,
    pub(crate) pcie_generation: Option<u32>,
    pub(crate) pcie_width: Option<u32>,
    pub(crate) pcie_generation_max: Option<u32>,
    pub(crate) pcie_width_max: Option<u32>,
    pub(crate) mig: Option<bool>,
    pub(crate) compute_mode: Option<Mode>,
    /// Its NVLinks, active or not; empty if it has none, `None` if NVML didn't say.
    pub(crate) links: Option<Vec<LinkAnswers>>,
    /// MB/s of a link, one way.
    pub(crate) link_mb_per_s: Option<u32>,
}

/// Of one NVLink.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LinkAnswers {
    pub(crate) active: Option<bool>,
    pub(crate) remote_bus_id: Option<String>,
    pub(crate) remote: Option<Remote>,
}

/// What an NVLink leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Remote {
    Gpu,
    Switch,
    Cpu,
}

/// Who may use a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    Default,
    ExclusiveThread,
    ExclusiveProcess,
    Prohibited,
}

/// Of two GPUs, by index.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct PairAnswers {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) ancestor: Option<Ancestor>,
    pub(crate) read: Option<Status>,
    pub(crate) write: Option<Status>,
    pub(crate) nvlink: Option<Status>,
}

/// How far up two GPUs meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ancestor {
    Internal,
    Single,
    Multiple,
    HostBridge,
    Node,
    System,
}

/// Whether two GPUs may reach each other's memory, and why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    Ok,
    ChipsetNotSupported,
    GpuNotSupported,
    TopologyNotSupported,
    DisabledByRegkey,
    NotSupported,
    Unknown,
}

impl Status {
    /// What `nvidia-smi topo -p2p` prints, and what it means.
    pub(crate) fn meaning(self) -> &'static str {
        match self {
            Status::Ok => "OK",
            Status::ChipsetNotSupported => "CNS: the chipset doesn't support it",
            Status::GpuNotSupported => "GNS: the GPU, or its driver, doesn't support it",
            Status::TopologyNotSupported => "TNS: not between places of the PCI tree that are so far apart",
            Status::DisabledByRegkey => "DR: switched off by a registry key of the driver",
            Status::NotSupported => "NS: not supported",
            Status::Unknown => "U: unknown to the driver",
        }
    }
}

/// Asks NVML of this machine; an error says why there is none.
pub(crate) fn ask() -> Result<Answers, String> {
    let nvml = Nvml::init().map_err(|error| match error {
        NvmlError::LibloadingError(error) => {
            format!("NVML (libnvidia-ml.so.1, part of the driver) is not there: {error}")
        }
        error => format!("NVML is there and doesn't start: {error}"),
    })?;
    let count = nvml.device_count().map_err(|error| format!("NVML doesn't count its GPUs: {error}"))?;
    let mut answers = Answers {
        driver: nvml.sys_driver_version().ok(),
        cuda: nvml.sys_cuda_driver_version().ok(),
        ..Answers::default()
    };
    let mut devices = Vec::new();
    for index in 0..count {
        match nvml.device_by_index(index) {
            Ok(device) => {
                answers.gpus.push(of_gpu(&nvml, &device));
                devices.push(Some(device));
            }
            Err(error) => {
                answers.unanswered.push(format!("GPU {index}: {error}"));
                answers.gpus.push(GpuAnswers::default());
                devices.push(None);
            }
        }
    }
    for (from, a) in devices.iter().enumerate() {
        for (to, b) in devices.iter().enumerate().filter(|&(to, _)| to != from) {
            if let (Some(a), Some(b)) = (a, b) {
                answers.pairs.push(of_pair(&nvml, (from, a), (to, b)));
            }
        }
    }
    Ok(answers)
}

fn of_gpu(nvml: &Nvml, device: &Device<'_>) -> GpuAnswers {
    GpuAnswers {
        bus_id: device.pci_info().ok().map(|pci| pci.bus_id),
        name: device.name().ok(),
        uuid: device.uuid().ok(),
        minor: device.minor_number().ok(),
        compute_capability: device.cuda_compute_capability().ok().map(|cc| (cc.major as u32, cc.minor as u32)),
        memory_bytes: device.memory_info().ok().map(|memory| memory.total),
        bar1_bytes: device.bar1_memory_info().ok().map(|bar| bar.total),
        pcie_generation: device.current_pcie_link_gen().ok(),
        pcie_width: device.current_pcie_link_width().ok(),
        pcie_generation_max: device.max_pcie_link_gen().ok(),
        pcie_width_max: device.max_pcie_link_width().ok(),
        // A GPU that knows no MIG has it not switched on.
        mig: match device.mig_mode() {
            Ok(mode) => Some(mode.current != 0),
            Err(NvmlError::NotSupported) => Some(false),
            Err(_) => None,
        },
        compute_mode: device.compute_mode().ok().map(|mode| match mode {
            ComputeMode::Default => Mode::Default,
            ComputeMode::ExclusiveThread => Mode::ExclusiveThread,
            ComputeMode::Prohibited => Mode::Prohibited,
            ComputeMode::ExclusiveProcess => Mode::ExclusiveProcess,
        }),
        links: links(nvml, device),
        link_mb_per_s: link_speed(device),
    }
}

fn links(nvml: &Nvml, device: &Device<'_>) -> Option<Vec<LinkAnswers>> {
    let mut links = Vec::new();
    for index in 0..MOST_LINKS {
        let link = device.link_wrapper_for(index);
        let active = match link.is_active() {
            Ok(active) => Some(active),
            // Behind the last link, or there are none.
            Err(NvmlError::InvalidArg | NvmlError::NotSupported) => break,
            Err(_) if index == 0 => return None,
            Err(_) => None,
        };
        let remote_bus_id = link.remote_pci_info().ok().map(|pci| pci.bus_id);
        links.push(LinkAnswers { active, remote_bus_id, remote: remote(nvml, device, index) });
    }
    Some(links)
}

/// What the link leads to. The wrapper's own call (0.13) asks and drops the answer.
fn remote(nvml: &Nvml, device: &Device<'_>, link: u32) -> Option<Remote> {
    let call = nvml.lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref().ok()?;
    let mut kind = u32::MAX;
    // SAFETY: `device` is of this `nvml`, which is initialised; `kind` is a valid place for the answer.
    let status = unsafe { call(device.handle(), link, &mut kind) };
    match (status, kind) {
        (0, 0) => Some(Remote::Gpu),
        (0, 1) => Some(Remote::Cpu),
        (0, 2) => Some(Remote::Switch),
        _ => None,
    }
}

fn link_speed(device: &Device<'_>) -> Option<u32> {
    let samples = device.field_values_for(&[FieldId(LINK_SPEED)]).ok()?;
    let value = match samples.into_iter().next()?.ok()?.value.ok()? {
        SampleValue::U32(value) => value,
        SampleValue::U64(value) => value.try_into().ok()?,
        SampleValue::I64(value) => value.try_into().ok()?,
        SampleValue::F64(value) => value as u32,
    };
    (value > 0).then_some(value)
}

fn of_pair(nvml: &Nvml, (from, a): (usize, &Device<'_>), (to, b): (usize, &Device<'_>)) -> PairAnswers {
    let status = |index| {
        a.p2p_status(b, index).ok().map(|status| match status {
            P2pStatus::Ok => Status::Ok,
            P2pStatus::ChipsetNotSupported => Status::ChipsetNotSupported,
            P2pStatus::GpuNotSupported => Status::GpuNotSupported,
            P2pStatus::IohTopologyNotSupported => Status::TopologyNotSupported,
            P2pStatus::DisabledByRegkey => Status::DisabledByRegkey,
            P2pStatus::NotSupported => Status::NotSupported,
            P2pStatus::Unknown => Status::Unknown,
        })
    };
    // The call takes its second device by value.
    let other = nvml.device_by_index(to as u32).ok();
    let ancestor = other.and_then(|other| a.topology_common_ancestor(other).ok()).map(|level| match level {
        TopologyLevel::Internal => Ancestor::Internal,
        TopologyLevel::Single => Ancestor::Single,
        TopologyLevel::Multiple => Ancestor::Multiple,
        TopologyLevel::HostBridge => Ancestor::HostBridge,
        TopologyLevel::Node => Ancestor::Node,
        TopologyLevel::System => Ancestor::System,
    });
    PairAnswers {
        from,
        to,
        ancestor,
        read: status(P2pCapabilitiesIndex::Read),
        write: status(P2pCapabilitiesIndex::Write),
        nvlink: status(P2pCapabilitiesIndex::NvLink),
    }
}
