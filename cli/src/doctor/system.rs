//! What programs are given: devices, limits, drivers, and the modes of GPUs.

use super::finding::{Finding, Outcome, Weight, list};
use crate::topology::{machine::Machine, matrix, nvml::Mode, source::Source};

/// Less of `/dev/shm` than this is not enough for NCCL's host memory transport between 8 ranks, which takes some tens
/// of MiB for each pair; containers have 64 MiB by default.
const ENOUGH_SHM: u64 = 1 << 30;

/// The oldest driver that serves the kernels (CUDA 12).
const OLDEST_DRIVER: u32 = 525;

pub(super) fn container(source: &dyn Source, machine: &Machine, outcome: &mut Outcome) {
    let before = (outcome.findings.len(), outcome.unknown.len());
    let contained = ["/.dockerenv", "/run/.containerenv"].iter().any(|mark| source.is_there(mark));
    let inside = if contained { "this is a container" } else { "this doesn't look like a container" };
    shm(source, inside, outcome);
    memlock(source, machine, inside, outcome);
    devices(source, machine, inside, outcome);
    if before == (outcome.findings.len(), outcome.unknown.len()) {
        outcome.fine("limits: /dev/shm, locked memory and devices are as they should be");
    }
}

fn shm(source: &dyn Source, inside: &str, outcome: &mut Outcome) {
    let Ok(mounts) = source.text("/proc/self/mounts") else {
        return outcome.unknown("/dev/shm", "/proc/self/mounts can't be read");
    };
    // The last mount of a place is the one that is seen.
    let mount = mounts
        .lines()
        .rev()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .find(|words| words.get(1) == Some(&"/dev/shm"));
    let mut say = |weight, title: String, evidence: String| {
        outcome.found(Finding {
            id: "shm-small",
            weight,
            title,
            evidence: vec![evidence, inside.into()],
            cost: "NCCL's host memory transport, and data loaders, fail with a bus error or `No space left on device`."
                .into(),
            remedy: vec![
                "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm."
                    .into(),
            ],
        });
    };
    let Some(mount) = mount else {
        if !source.is_there("/dev/shm") {
            say(Weight::Severe, "there is no /dev/shm".into(), "nothing is mounted at /dev/shm".into());
        }
        return;
    };
    let size = mount.get(3).and_then(|options| options.split(',').find_map(|option| option.strip_prefix("size=")));
    // Without the option it is half of the memory.
    if let Some((text, size)) = size.and_then(|text| Some((text, bytes(text)?))).filter(|&(_, size)| size < ENOUGH_SHM)
    {
        say(Weight::Moderate, format!("/dev/shm has {} MiB", size >> 20), format!("it is mounted with size={text}"));
    }
}

/// `65536k`, as mount options have it.
fn bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.chars().last()? {
        'k' | 'K' => (&text[..text.len() - 1], 10),
        'm' | 'M' => (&text[..text.len() - 1], 20),
        'g' | 'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn memlock(source: &dyn Source, machine: &Machine, inside: &str, outcome: &mut Outcome) {
    let Ok(limits) = source.text("/proc/self/limits") else {
        return outcome.unknown("the limit of locked memory", "/proc/self/limits can't be read");
    };
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max locked memory")?.split_whitespace().next());
    let Some(limit) = limit else {
        return outcome.unknown("the limit of locked memory", "/proc/self/limits doesn't have it");
    };
    let rdma = machine.nics.iter().any(|nic| nic.rdma);
    if limit != "unlimited" && !machine.gpus.is_empty() {
        outcome.found(Finding {
            id: "memlock",
            weight: if rdma { Weight::Moderate } else { Weight::Note },
            title: format!("only {limit} bytes of memory may be locked"),
            evidence: vec![format!("Max locked memory is {limit} in /proc/self/limits"), inside.into()],
            cost: "RDMA registers memory by locking it: ibv_reg_mr fails, and NCCL goes by TCP or not at all.".into(),
            remedy: vec![
                "docker run --ulimit memlock=-1; else `* - memlock unlimited` in /etc/security/limits.conf.".into(),
            ],
        });
    }
}

fn devices(source: &dyn Source, machine: &Machine, inside: &str, outcome: &mut Outcome) {
    let in_tree = machine.functions.values().filter(|function| function.is_gpu()).count();
    let served =
        machine.gpus.iter().filter(|gpu| gpu.uuid.is_some() || gpu.minor.is_some() || gpu.name.is_some()).count();
    let module = machine.driver.module.is_some();
    if in_tree > 0 && served == 0 {
        outcome.found(Finding {
            id: "no-driver",
            weight: Weight::Severe,
            title: format!("{in_tree} GPU{} here, and NVML serves none", if in_tree == 1 { " is" } else { "s are" }),
            evidence: vec![
                if module { "the kernel's module is loaded" } else { "the kernel's module is not loaded" }.into(),
                inside.into(),
            ],
            cost: "CUDA can't use them.".into(),
            remedy: vec![
                if module {
                    "Give the container the GPUs and the driver's libraries: docker run --gpus all, with NVIDIA's \
                     container toolkit."
                } else {
                    "Install NVIDIA's driver, and look in dmesg why it doesn't load."
                }
                .into(),
            ],
        });
        return;
    }
    if served > 0 && served < in_tree {
        outcome.found(Finding {
            id: "gpus-hidden",
            weight: Weight::Note,
            title: format!("{served} of the machine's {in_tree} GPUs can be used here"),
            evidence: vec![format!("sysfs has {in_tree}, NVML {served}"), inside.into()],
            cost: "Ranks can't be on the others.".into(),
            remedy: vec![
                "In a container: --gpus all. Else look at `nvidia-smi` and dmesg (Xid 79: fallen off the bus).".into(),
            ],
        });
    }
    let mut missing = Vec::new();
    if served > 0 {
        let minors = machine.gpus.iter().filter_map(|gpu| gpu.minor).map(|minor| format!("/dev/nvidia{minor}"));
        let wanted = minors.chain(["/dev/nvidiactl".to_owned(), "/dev/nvidia-uvm".to_owned()]);
        missing = wanted.filter(|device| !source.is_there(device)).collect();
    }
    if !missing.is_empty() {
        outcome.found(Finding {
            id: "devices-missing",
            weight: Weight::Severe,
            title: format!("{} {} missing", list(missing.clone()), if missing.len() == 1 { "is" } else { "are" }),
            evidence: vec![inside.into()],
            cost: "CUDA doesn't start, or not on these GPUs.".into(),
            remedy: vec!["In a container: --gpus all. Else `nvidia-modprobe -u -c=0` makes them.".into()],
        });
    }
    let rdma = machine.nics.iter().any(|nic| nic.rdma);
    if rdma && !machine.gpus.is_empty() && !source.is_there("/dev/infiniband") {
        outcome.found(Finding {
            id: "rdma-devices-missing",
            weight: Weight::Moderate,
            title: "there are RDMA NICs, and no /dev/infiniband".into(),
            evidence: vec![inside.into()],
            cost: "NCCL goes by TCP between nodes.".into(),
            remedy: vec!["docker run --device=/dev/infiniband; else load ib_uverbs.".into()],
        });
    }
}

pub(super) fn software(source: &dyn Source, machine: &Machine, outcome: &mut Outcome) {
    let before = outcome.findings.len();
    let driver = &machine.driver;
    if let (Some(module), Some(library)) = (&driver.module, &driver.library)
        && module != library
    {
        outcome.found(Finding {
            id: "driver-mismatch",
            weight: Weight::Severe,
            title: "the driver's module and its libraries are of different versions".into(),
            evidence: vec![format!("module {module}, libraries {library}")],
            cost: "NVML and CUDA fail with `Driver/library version mismatch`, at the latest in the next process."
                .into(),
            remedy: vec!["Restart, or unload and load nvidia's modules; in a container, start it anew.".into()],
        });
    }
    let version = driver.library.as_ref().or(driver.module.as_ref());
    match version.and_then(|version| version.split('.').next()?.parse::<u32>().ok()) {
        Some(major) if major < OLDEST_DRIVER => outcome.found(Finding {
            id: "driver-old",
            weight: Weight::Severe,
            title: format!("the driver is too old: {major}, where CUDA 12 needs {OLDEST_DRIVER} or later"),
            evidence: vec![format!("driver {}", version.map_or("", String::as_str))],
            cost: "Kernels of CUDA 12 don't run, peersum's neither.".into(),
            remedy: vec!["Install a newer driver.".into()],
        }),
        Some(_) => (),
        None if machine.gpus.is_empty() => (),
        None => outcome.unknown("the driver's version", "neither NVML nor /sys/module/nvidia/version has it"),
    }
    let rdma = machine.nics.iter().any(|nic| nic.rdma);
    if rdma && driver.module.is_some() && !source.is_there("/sys/module/nvidia_peermem") {
        outcome.found(Finding {
            id: "no-peermem",
            weight: Weight::Note,
            title: "nvidia_peermem is not loaded".into(),
            evidence: vec!["there is no /sys/module/nvidia_peermem".into()],
            cost: "NICs can't read GPUs' memory, unless by DMA-BUF (the driver's open modules, Linux 5.12 or later)."
                .into(),
            remedy: vec!["`modprobe nvidia_peermem`; NCCL_DEBUG=INFO says GDRDMA where it works.".into()],
        });
    }
    if before == outcome.findings.len() && version.is_some() {
        outcome.fine(format!("driver: {}, module and libraries fit", version.map_or("", String::as_str)));
    }
}

/// MIG, MPS, compute mode, and BARs.
pub(super) fn modes(source: &dyn Source, machine: &Machine, outcome: &mut Outcome) {
    if machine.gpus.is_empty() {
        return;
    }
    let before = outcome.findings.len();
    let named = |which: &dyn Fn(usize) -> bool| {
        let gpus: Vec<_> = (0..machine.gpus.len()).filter(|&gpu| which(gpu)).map(|gpu| format!("GPU{gpu}")).collect();
        (!gpus.is_empty()).then(|| list(gpus))
    };
    let mut say = |id, weight, title: String, evidence: String, cost: &str, remedy: &str| {
        let (evidence, remedy) = (vec![evidence], vec![remedy.to_owned()]);
        outcome.found(Finding { id, weight, title, evidence, cost: cost.into(), remedy });
    };
    if let Some(gpus) = named(&|gpu| machine.gpus[gpu].mig == Some(true)) {
        say(
            "mig",
            Weight::Severe,
            format!("MIG is on: {gpus}"),
            "NVML's MIG mode is enabled".into(),
            "Instances have no P2P and no IPC, a process sees one at most, and NCCL refuses two ranks on one GPU.",
            "`sudo nvidia-smi -i GPU -mig 0`, when nobody uses its instances.",
        );
    }
    if let Some(gpus) = named(&|gpu| machine.gpus[gpu].compute_mode == Some(Mode::Prohibited)) {
        say(
            "compute-prohibited",
            Weight::Severe,
            format!("compute mode Prohibited: {gpus}"),
            "NVML's compute mode".into(),
            "No process can use CUDA there.",
            "`sudo nvidia-smi -i GPU -c DEFAULT`.",
        );
    }
    let exclusive =
        |gpu: usize| matches!(machine.gpus[gpu].compute_mode, Some(Mode::ExclusiveProcess | Mode::ExclusiveThread));
    let mps = source.variable("CUDA_MPS_PIPE_DIRECTORY").is_some() || source.is_there("/tmp/nvidia-mps");
    if let Some(gpus) = named(&exclusive) {
        say(
            "compute-exclusive",
            if mps { Weight::Note } else { Weight::Moderate },
            format!("compute mode Exclusive: {gpus}"),
            format!("NVML's compute mode; MPS {}", if mps { "is set up" } else { "is not set up" }),
            "Two processes can't be on one GPU, so a rank fails where another process, such as a monitor, has it.",
            "`sudo nvidia-smi -i GPU -c DEFAULT`, unless MPS is meant to be in front of it.",
        );
    } else if mps {
        say(
            "mps",
            Weight::Note,
            "MPS is set up".into(),
            "CUDA_MPS_PIPE_DIRECTORY is set, or /tmp/nvidia-mps is there".into(),
            "Processes share the GPU's resources, and one that fails takes the others along; kernels that wait for \
             each other must fit at once.",
            "Stop it (`echo quit | nvidia-cuda-mps-control`) for measurements.",
        );
    }
    let small = |gpu: usize| {
        let of = &machine.gpus[gpu];
        let memory = of.memory_bytes.filter(|&bytes| bytes > 0);
        memory.zip(of.bar1_bytes).is_some_and(|(memory, bar)| bar < memory / 2)
    };
    let by_pcie = machine.gpu_pairs().any(|pair| matrix::gpus(machine, pair).unlinked());
    if let Some(gpus) = named(&small).filter(|_| by_pcie) {
        let sizes = machine.gpus.iter().filter_map(|gpu| gpu.bar1_bytes).min().unwrap_or(0);
        say(
            "bar-small",
            Weight::Moderate,
            format!("BAR1 is smaller than the memory: {gpus}"),
            format!("the smallest has {} MiB", sizes >> 20),
            "P2P over PCIe reaches a peer's memory through BAR1: what is beyond it can't be mapped, and drivers refuse \
             P2P then.",
            "Switch on Above 4G Decoding and Resizable BAR in the firmware; on cards whose BAR is locked there is no \
             remedy.",
        );
    }
    let unknown =
        (0..machine.gpus.len()).filter(|&gpu| machine.gpus[gpu].mig.is_none() && machine.gpus[gpu].name.is_some());
    let unknown: Vec<_> = unknown.map(|gpu| format!("GPU{gpu}")).collect();
    if !unknown.is_empty() {
        outcome.unknown(format!("whether MIG is on: {}", list(unknown)), "NVML doesn't say");
    } else if before == outcome.findings.len() {
        outcome.fine("modes: no MIG, no MPS, no exclusive compute mode, no small BAR");
    }
}
