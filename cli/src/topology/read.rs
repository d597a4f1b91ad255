//! Makes the model of what a source has. Needs no root, no driver and no NVML.

use std::{collections::BTreeMap, str::FromStr};

use super::{
    acs::Acs,
    address::Address,
    machine::{self, Cpu, Driver, Function, Gpu, Iommu, Link, Machine, Nic, Node, NvLink, NvLinkTo},
    nvml::{Answers, GpuAnswers, Remote},
    source::Source,
};

const DEVICES: &str = "/sys/bus/pci/devices";
const NODES: &str = "/sys/devices/system/node";
const GROUPS: &str = "/sys/kernel/iommu_groups";

/// Reads all there is to see.
pub(crate) fn read(source: &dyn Source) -> Machine {
    let mut machine = Machine { cpu: cpu(source), nodes: nodes(source), ..Machine::default() };
    functions(source, &mut machine);
    machine.iommu = iommu(source, &mut machine.unseen);
    machine.driver.module = source.text("/sys/module/nvidia/version").ok().filter(|version| !version.is_empty());
    match source.nvml() {
        Ok(answers) => add(&mut machine, answers),
        Err(reason) => machine.unseen.push(format!(
            "{reason}. So NVLinks, and what the driver says of P2P, are unknown; the rest is from sysfs"
        )),
    }
    add_unlisted_gpus(&mut machine);
    machine.nics = nics(source, &machine);
    machine
}

fn cpu(source: &dyn Source) -> Cpu {
    let text = source.text("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(field, _)| field.trim() == name).map(|(_, value)| value.trim().to_owned())
    };
    let vendor = field("vendor_id");
    let architecture = match () {
        () if vendor.is_some() => Some("x86_64"),
        () if field("CPU implementer").is_some() => Some("arm64"),
        () if field("cpu").is_some_and(|name| name.starts_with("POWER")) => Some("ppc64"),
        () => None,
    };
    let number = |name| field(name).and_then(|value| value.parse().ok());
    Cpu { architecture: architecture.map(Into::into), vendor, family: number("cpu family"), model: number("model") }
}

fn nodes(source: &dyn Source) -> BTreeMap<u32, Node> {
    let names = source.names(NODES).unwrap_or_default();
    let numbers = names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok());
    numbers.map(|number| (number, Node { cpus: source.text(&format!("{NODES}/node{number}/cpulist")).ok() })).collect()
}

fn functions(source: &dyn Source, machine: &mut Machine) {
    let names = match source.names(DEVICES) {
        Ok(names) => names,
        Err(error) => {
            machine.unseen.push(format!("the PCI tree: {DEVICES} can't be read: {error}"));
            return;
        }
    };
    machine.sources.push("sysfs".into());
    for name in names {
        let read = name
            .parse::<Address>()
            .map_err(anyhow::Error::msg)
            .and_then(|address| Ok((address, function(source, address, &format!("{DEVICES}/{name}"))?)));
        match read {
            Ok((address, function)) => drop(machine.functions.insert(address, function)),
            Err(error) => machine.unseen.push(format!("PCI function {name}: {error}")),
        }
    }
}

fn function(source: &dyn Source, address: Address, folder: &str) -> anyhow::Result<Function> {
    let text = |name: &str| source.text(&format!("{folder}/{name}")).ok();
    let hex = |name: &str| {
        let text = text(name).ok_or_else(|| anyhow::anyhow!("{folder}/{name} can't be read"))?;
        u32::from_str_radix(text.trim_start_matches("0x"), 16)
            .map_err(|_| anyhow::anyhow!("{folder}/{name} has '{text}', which is no hexadecimal number"))
    };
    let resolved = source.resolved(folder)?;
    let (root, trail) = trail(&resolved, address);
    let group = source.resolved(&format!("{folder}/iommu_group")).ok();
    let mut function = Function {
        class: hex("class")?,
        vendor: hex("vendor")? as u16,
        device: hex("device")? as u16,
        subsystem_vendor: hex("subsystem_vendor").unwrap_or(0) as u16,
        subsystem_device: hex("subsystem_device").unwrap_or(0) as u16,
        link: Link {
            speed: text("current_link_speed").and_then(|text| gt_per_s(&text)),
            width: text("current_link_width").and_then(|text| lanes(&text)),
            speed_max: text("max_link_speed").and_then(|text| gt_per_s(&text)),
            width_max: text("max_link_width").and_then(|text| lanes(&text)),
        },
        // -1 where the firmware didn't say.
        numa: text("numa_node").and_then(|text| text.parse().ok()),
        cpus: text("local_cpulist").filter(|cpus| !cpus.is_empty()),
        iommu_group: group.and_then(|group| group.rsplit('/').next()?.parse().ok()),
        root,
        trail,
        acs: None,
        bars: text("resource").map(|text| bars(&text)).unwrap_or_default(),
    };
    if function.is_bridge() {
        function.acs = Some(match source.bytes(&format!("{folder}/config")) {
            Ok(config) => Acs::of_config(&config),
            Err(error) => Acs::Unknown(format!("its configuration space can't be read: {error}")),
        });
    }
    Ok(function)
}

/// The host bridge and the bridges in the path of a function in `/sys/devices`.
fn trail(resolved: &str, address: Address) -> (String, Vec<Address>) {
    let mut root = String::new();
    let mut trail = Vec::new();
    for part in resolved.split('/') {
        match part.parse::<Address>() {
            Ok(bridge) if bridge != address => trail.push(bridge),
            Ok(_) => (),
            Err(_) if root.is_empty() && part.starts_with("pci") && part.contains(':') => root = part.into(),
            Err(_) => (),
        }
    }
    (root, trail)
}

/// `32.0 GT/s PCIe`, and `2.5 GT/s` of older kernels; `Unknown` is none.
pub(crate) fn gt_per_s(text: &str) -> Option<f64> {
    let (number, unit) = text.split_once(' ')?;
    let speed = number.parse::<f64>().ok().filter(|speed| speed.is_finite() && *speed > 0.0)?;
    unit.starts_with("GT/s").then_some(speed)
}

/// A number of lanes; 0 and 255 stand for none.
pub(crate) fn lanes(text: &str) -> Option<u32> {
    text.parse().ok().filter(|lanes| (1..=32).contains(lanes))
}

/// The sizes of the first six regions of a `resource` file.
fn bars(text: &str) -> Vec<u64> {
    let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let size = |line: &str| {
        let mut words = line.split_whitespace().map(hex);
        let (start, end) = (words.next()??, words.next()??);
        Some(if end > start { end - start + 1 } else { 0 })
    };
    text.lines().take(6).map(|line| size(line).unwrap_or(0)).collect()
}

fn iommu(source: &dyn Source, unseen: &mut Vec<String>) -> Iommu {
    let groups = match source.names(GROUPS) {
        Ok(groups) => groups,
        Err(error) => {
            unseen.push(format!("the IOMMU: {GROUPS} can't be read: {error}"));
            return Iommu::Unknown;
        }
    };
    if groups.is_empty() {
        return Iommu::Off;
    }
    let types: Vec<_> = groups.iter().map(|group| source.text(&format!("{GROUPS}/{group}/type"))).collect();
    if types.iter().flatten().any(|kind| kind.starts_with("DMA")) {
        return Iommu::Translating;
    }
    if types.iter().all(|kind| kind.as_deref().is_ok_and(|kind| kind == "identity")) {
        return Iommu::Passthrough;
    }
    let command = source.text("/proc/cmdline").unwrap_or_default();
    if command.split_whitespace().any(|word| matches!(word, "iommu=pt" | "iommu.passthrough=1")) {
        return Iommu::Passthrough;
    }
    unseen.push("the IOMMU: it is on, and its groups don't say whether it translates".into());
    Iommu::Unknown
}

fn add(machine: &mut Machine, answers: Answers) {
    machine.sources.push(match &answers.driver {
        Some(version) => format!("NVML {version}"),
        None => "NVML".into(),
    });
    machine.driver = Driver { library: answers.driver, cuda: answers.cuda, module: machine.driver.module.take() };
    machine.unseen.extend(answers.unanswered.into_iter().map(|question| format!("NVML, {question}")));
    let address = |text: &Option<String>| text.as_deref().and_then(|text| text.parse::<Address>().ok());
    let gpus: Vec<Option<Address>> = answers.gpus.iter().map(|gpu| address(&gpu.bus_id)).collect();
    for (index, gpu) in answers.gpus.into_iter().enumerate() {
        if gpus[index].is_none() {
            machine.unseen.push(format!("where GPU {index} is: NVML doesn't tell its PCI address"));
        }
        if let Some(address) = gpus[index] {
            // Without sysfs its place in the tree is unknown: a function without a host bridge.
            let unplaced = || Function { class: 0x03_0200, vendor: machine::NVIDIA, ..Function::default() };
            let function = machine.functions.entry(address).or_insert_with(unplaced);
            // sysfs has both for GPUs too; where it hasn't, as in some virtual machines, NVML has.
            let link = &mut function.link;
            link.speed = link.speed.or_else(|| machine::speed(gpu.pcie_generation?));
            link.width = link.width.or(gpu.pcie_width.filter(|&width| width > 0));
            link.speed_max = link.speed_max.or_else(|| machine::speed(gpu.pcie_generation_max?));
            link.width_max = link.width_max.or(gpu.pcie_width_max.filter(|&width| width > 0));
        }
        let links = gpu.links.as_ref().map(|links| {
            let to = |remote: Option<Remote>, text: &Option<String>| {
                let at = address(text);
                let is_switch =
                    || machine.functions.get(&at?).is_some_and(Function::is_nvswitch).then_some(Remote::Switch);
                let is_gpu = || gpus.contains(&Some(at?)).then_some(Remote::Gpu);
                NvLinkTo::new(remote.or_else(is_switch).or_else(is_gpu), at)
            };
            let link = |link: &super::nvml::LinkAnswers| NvLink {
                active: link.active,
                to: to(link.remote, &link.remote_bus_id),
            };
            links.iter().map(link).collect::<Vec<_>>()
        });
        if links.is_none() {
            machine.unseen.push(format!("the NVLinks of GPU {index}: NVML doesn't tell"));
        }
        machine.gpus.push(gpu_of(gpu, gpus[index], links));
    }
    machine.pairs = answers.pairs.into_iter().map(|pair| ((pair.from, pair.to), pair)).collect();
}

fn gpu_of(gpu: GpuAnswers, address: Option<Address>, nvlinks: Option<Vec<NvLink>>) -> Gpu {
    Gpu {
        address,
        name: gpu.name,
        uuid: gpu.uuid,
        minor: gpu.minor,
        compute_capability: gpu.compute_capability,
        memory_bytes: gpu.memory_bytes,
        bar1_bytes: gpu.bar1_bytes,
        mig: gpu.mig,
        compute_mode: gpu.compute_mode,
        nvlinks,
        nvlink_gb_per_s: gpu.link_mb_per_s.map(|speed| f64::from(speed) / 1000.0),
    }
}

/// GPUs that sysfs has and NVML hasn't. Where NVML serves some, as in a container that has been given some, the others
/// are no concern of this process.
fn add_unlisted_gpus(machine: &mut Machine) {
    let listed: Vec<_> = machine.gpus.iter().filter_map(|gpu| gpu.address).collect();
    let unlisted =
        machine.functions.iter().filter(|(address, function)| function.is_gpu() && !listed.contains(address));
    for (&address, function) in unlisted {
        if !listed.is_empty() {
            machine.unseen.push(format!("GPU {address}: sysfs has it and NVML hasn't, so it is left out"));
            continue;
        }
        // Memory is behind region 1 on all of NVIDIA's.
        let bar1_bytes = function.bars.get(1).copied().filter(|&size| size > 0);
        machine.gpus.push(Gpu { address: Some(address), bar1_bytes, ..Gpu::default() });
    }
}

fn nics(source: &dyn Source, machine: &Machine) -> Vec<Nic> {
    let devices = |class: &str| -> BTreeMap<Address, String> {
        let names = source.names(&format!("/sys/class/{class}")).unwrap_or_default();
        let place = |name: String| {
            let resolved = source.resolved(&format!("/sys/class/{class}/{name}/device")).ok()?;
            // Behind virtio the device is one below the PCI function.
            Some((resolved.rsplit('/').find_map(|part| Address::from_str(part).ok())?, name))
        };
        names.into_iter().filter_map(place).collect()
    };
    let (rdma, interfaces) = (devices("infiniband"), devices("net"));
    let speed = |address: &Address| {
        let infiniband = |name: &String| {
            // Such as `400 Gb/sec (4X NDR)`.
            let text = source.text(&format!("/sys/class/infiniband/{name}/ports/1/rate")).ok()?;
            text.split(' ').next()?.parse::<f64>().ok().map(|gb| (gb * 1000.0) as u32)
        };
        let interface = |name: &String| source.text(&format!("/sys/class/net/{name}/speed")).ok()?.parse::<u32>().ok();
        let speed = rdma.get(address).and_then(infiniband);
        speed.or_else(|| interfaces.get(address).and_then(interface)).filter(|&speed| speed > 0)
    };
    let of_functions = machine.functions.iter().filter(|(_, function)| function.is_nic());
    let mut nics: Vec<_> = of_functions
        .map(|(&address, _)| Nic {
            address,
            name: rdma.get(&address).or_else(|| interfaces.get(&address)).cloned(),
            rdma: rdma.contains_key(&address),
            speed: speed(&address),
        })
        .collect();
    nics.sort_by_key(|nic| (!nic.rdma, nic.address));
    nics
}
