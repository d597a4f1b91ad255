//! NVLink, PCIe links and where things are.

use std::collections::{BTreeMap, BTreeSet};

use super::finding::{Finding, Outcome, Weight, list, pairs};
use crate::topology::{
    machine::{Function, Machine, Pair, generation},
    matrix::{self, Matrix, Relation},
};

/// What names of boards say that have NVLink on them, whatever is plugged on.
const NVLINK_BOARDS: [&str; 12] = [
    "SXM",
    "HBM3",
    "HBM2e SXM",
    "NVIDIA H200",
    "NVIDIA H20",
    "NVIDIA H800",
    "NVIDIA B200",
    "NVIDIA B300",
    "GB200",
    "GB300",
    "GH200",
    "A800-SXM",
];

pub(super) fn nvlink(machine: &Machine, outcome: &mut Outcome) {
    if machine.gpus.len() < 2 {
        return;
    }
    let silent: Vec<_> = (0..machine.gpus.len()).filter(|&gpu| machine.gpus[gpu].nvlinks.is_none()).collect();
    if !silent.is_empty() {
        let which = list(silent.iter().map(|gpu| format!("GPU{gpu}")));
        outcome.unknown(format!("NVLinks of {which}"), "NVML, which alone knows them, doesn't tell");
        return;
    }
    let board = machine.functions.values().filter(|function| function.is_nvswitch()).count();
    let named = |gpu: &usize| {
        let name = machine.gpus[*gpu].name.as_deref().unwrap_or("");
        NVLINK_BOARDS.iter().any(|board| name.contains(board)) && !name.contains("PCIe") && !name.contains("NVL")
    };
    let expected: Vec<_> = (0..machine.gpus.len()).filter(|gpu| board > 0 || named(gpu)).collect();
    let connected = |pair: &Pair| matrix::gpus(machine, *pair).linked();
    let apart: Vec<_> = machine
        .gpu_pairs()
        .filter(|(a, b)| expected.contains(a) && expected.contains(b))
        .filter(|pair| !connected(pair))
        .collect();
    if !apart.is_empty() {
        let mut evidence: Vec<_> = expected.iter().map(|&gpu| links_of(machine, gpu)).collect();
        if board > 0 {
            evidence.push(format!("{board} NVSwitches are in the PCI tree"));
        }
        outcome.found(Finding {
            id: "nvlink-missing",
            weight: Weight::Severe,
            title: format!("the board has NVLink, and {} are not connected by it", pairs(machine, &apart)),
            evidence,
            cost: "All-reduce goes over PCIe instead, ten times slower or worse.".into(),
            remedy: vec![
                "With NVSwitches the fabric manager must run, of the driver's very version: `systemctl status \
                 nvidia-fabricmanager`, and `nvidia-smi -q` should say Fabric State: Completed."
                    .into(),
                "`nvidia-smi nvlink -s` shows the links, `dmesg` their errors (Xid 74); a GPU reset or a restart \
                 brings up links that were trained badly."
                    .into(),
                "In a virtual machine, all GPUs of the partition must be passed through with their NVLinks.".into(),
            ],
        });
    }
    let degraded: Vec<_> = (0..machine.gpus.len())
        .filter(|&gpu| {
            let (active, all) =
                (machine.gpus[gpu].active().count(), machine.gpus[gpu].nvlinks.iter().flatten().count());
            active > 0 && active < all
        })
        .collect();
    if !degraded.is_empty() {
        outcome.found(Finding {
            id: "nvlink-degraded",
            // Cards with a bridge on one side of two have inactive links by design.
            weight: if degraded.iter().all(|gpu| expected.contains(gpu)) { Weight::Moderate } else { Weight::Note },
            title: format!("some NVLinks are down: {}", list(degraded.iter().map(|gpu| format!("GPU{gpu}")))),
            evidence: degraded.iter().map(|&gpu| links_of(machine, gpu)).collect(),
            cost: "The slowest GPU's links bound the whole group's bandwidth.".into(),
            remedy: vec![
                "`nvidia-smi nvlink -e` counts errors of each link; reset the GPU, reseat it or its bridge.".into(),
            ],
        });
    }
    let linked: Vec<_> = machine.gpu_pairs().filter(connected).collect();
    if apart.is_empty() && !linked.is_empty() && linked.len() < machine.gpu_pairs().count() {
        outcome.found(Finding {
            id: "nvlink-pairwise",
            weight: Weight::Note,
            title: format!("NVLink connects {} alone", pairs(machine, &linked)),
            evidence: vec!["the other pairs go over PCIe".into()],
            cost: "A group of more GPUs is as slow as its slowest pair.".into(),
            remedy: vec![
                "Put tensor-parallel groups on GPUs that are connected, and parallelise otherwise between them.".into(),
            ],
        });
    }
    if apart.is_empty() && degraded.is_empty() {
        outcome.fine(match linked.len() {
            0 => "NVLink: there is none, and the boards have none".to_owned(),
            count => {
                format!("NVLink: connects {count} of {} pairs of GPUs, all links are up", machine.gpu_pairs().count())
            }
        });
    }
}

fn links_of(machine: &Machine, gpu: usize) -> String {
    let of = &machine.gpus[gpu];
    let name = of.name.as_deref().unwrap_or("unknown model");
    format!("GPU{gpu} ({name}): {} of {} NVLinks are active", of.active().count(), of.nvlinks.iter().flatten().count())
}

/// PCIe links that carry less than both their ends could.
pub(super) fn pcie(machine: &Machine, outcome: &mut Outcome) {
    let mut looked = BTreeSet::new();
    let mut quiet = true;
    let gpus = (0..machine.gpus.len()).filter_map(|gpu| Some((format!("GPU{gpu}"), machine.gpus[gpu].address?)));
    let nics =
        machine.nics.iter().enumerate().filter(|(_, nic)| nic.rdma).map(|(nic, of)| (format!("NIC{nic}"), of.address));
    for (name, address) in gpus.chain(nics) {
        let Some(function) = machine.functions.get(&address) else {
            outcome.unknown(format!("the PCIe link of {name}"), "it is not in sysfs");
            quiet = false;
            continue;
        };
        let is_gpu = name.starts_with("GPU");
        if function.link.width.is_none() || function.link.width_max.is_none() {
            outcome.unknown(
                format!("the PCIe link of {name}"),
                "the system doesn't tell its width; virtual machines often don't",
            );
            quiet = false;
        }
        quiet &= !link(machine, &format!("{name} ({address})"), function, is_gpu, outcome);
        // Of a switch, the link above it: every other bridge, the first below the root port.
        for bridge in function.trail.iter().skip(1).step_by(2).filter(|bridge| looked.insert(**bridge)) {
            if let Some(function) = machine.functions.get(bridge) {
                quiet &= !link(machine, &format!("the switch {bridge} above {name}"), function, false, outcome);
            }
        }
    }
    if quiet && !machine.gpus.is_empty() {
        outcome.fine("PCIe: all links of GPUs and RDMA NICs have the width and the generation that both ends could");
    }
}

/// Whether there was something to say.
fn link(machine: &Machine, name: &str, function: &Function, is_gpu: bool, outcome: &mut Outcome) -> bool {
    let link = machine.link(function);
    let mut said = false;
    let mut say = |id, weight, title: String, evidence: String, cost: &str, remedy: &str| {
        said = true;
        let (evidence, remedy) = (vec![evidence], vec![remedy.to_owned()]);
        outcome.found(Finding { id, weight, title, evidence, cost: cost.into(), remedy });
    };
    if let (Some(now), Some(best)) = (link.width, link.width_max)
        && now < best
    {
        say(
            "pcie-width",
            Weight::Moderate,
            format!("the PCIe link of {name} has {now} lanes of {best}"),
            format!("current_link_width {now}, at best {best}"),
            "It carries that much less than it could.",
            "Reseat the card and its riser, look at bifurcation in the firmware, and clean the contacts.",
        );
    }
    if let (Some(own), Some(best)) = (function.link.width_max, link.width_max)
        && best < own
    {
        say(
            "pcie-slot",
            Weight::Note,
            format!("{name} could have {own} lanes, and its slot has {best}"),
            format!("max_link_width {own}, of the port above {best}"),
            "It carries that much less than it could.",
            "Move it to a slot with all lanes, if there is one.",
        );
    }
    if let (Some(now), Some(best)) = (link.speed, link.speed_max)
        && now < best
    {
        let shown =
            |speed| generation(speed).map_or(format!("{speed} GT/s"), |generation| format!("PCIe {generation}.0"));
        let idle = is_gpu && generation(now) == Some(1);
        say(
            "pcie-generation",
            if idle { Weight::Note } else { Weight::Moderate },
            format!("the PCIe link of {name} runs at {} of {}", shown(now), shown(best)),
            format!("current_link_speed {now} GT/s, at best {best} GT/s"),
            if idle {
                "Nothing, if the GPU is idle: many go down to 2.5 GT/s then."
            } else {
                "It carries that much less than it could."
            },
            if idle {
                "Look again while it works."
            } else {
                "Look for errors of the link in dmesg (AER), and at risers and retimers."
            },
        );
    }
    said
}

/// NUMA nodes of GPUs, and NICs beside them.
pub(super) fn places(machine: &Machine, outcome: &mut Outcome) {
    let mut nodes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    let mut lost = Vec::new();
    for gpu in 0..machine.gpus.len() {
        match machine.numa_of(gpu) {
            Some(node) => nodes.entry(node).or_default().push(gpu),
            None => lost.push(format!("GPU{gpu}")),
        }
    }
    if !lost.is_empty() {
        outcome.unknown(
            format!("the NUMA node of {}", list(lost.clone())),
            "the firmware doesn't say it (numa_node is -1)",
        );
    }
    if nodes.len() > 1 {
        let across = || machine.gpu_pairs().filter(|&(a, b)| machine.numa_of(a) != machine.numa_of(b));
        let by_sockets = across().any(|pair| matrix::gpus(machine, pair).unlinked());
        let by_nvlink = across().all(|pair| matrix::gpus(machine, pair).linked());
        let of = |(node, gpus): (&u32, &Vec<usize>)| {
            format!("node {node}: {}", list(gpus.iter().map(|gpu| format!("GPU{gpu}"))))
        };
        let mut remedy =
            vec!["Run each rank's process on its GPU's node: `numactl --cpunodebind=N --membind=N`.".into()];
        if by_sockets {
            remedy.insert(0, "Put each group on GPUs of one node, if it fits.".into());
        }
        let cost = match (by_sockets, by_nvlink) {
            (true, _) => "What goes between the nodes crosses the link between the sockets, which all pairs share.",
            (_, true) => {
                "Nothing between the GPUs, which NVLink connects; a process on the wrong node launches and copies \
                 slower."
            }
            _ => {
                "Unless NVLink connects the GPUs, which is unknown, what goes between the nodes crosses the sockets' \
                 link."
            }
        };
        outcome.found(Finding {
            id: "numa-spread",
            weight: if by_sockets { Weight::Moderate } else { Weight::Note },
            title: format!("the GPUs are at {} NUMA nodes", nodes.len()),
            evidence: nodes.iter().map(of).collect(),
            cost: cost.into(),
            remedy,
        });
    } else if lost.is_empty() && !machine.gpus.is_empty() {
        outcome.fine("NUMA: all GPUs are at one node");
    }
    nics(machine, outcome);
}

fn nics(machine: &Machine, outcome: &mut Outcome) {
    if machine.gpus.is_empty() || !machine.nics.iter().any(|nic| nic.rdma) {
        return;
    }
    let matrix = Matrix::of(machine);
    let nics: Vec<_> = (0..machine.nics.len()).filter(|&nic| machine.nics[nic].rdma).collect();
    let nearest = |gpu: usize| nics.iter().filter_map(|nic| matrix.cells[gpu][machine.gpus.len() + nic].pci).min();
    let mut far: BTreeMap<Relation, Vec<String>> = BTreeMap::new();
    for gpu in 0..machine.gpus.len() {
        match nearest(gpu) {
            Some(relation) if relation > Relation::Pxb => far.entry(relation).or_default().push(format!("GPU{gpu}")),
            Some(_) => (),
            None => outcome.unknown(format!("how far NICs are from GPU{gpu}"), "its place in the PCI tree is unknown"),
        }
    }
    if far.is_empty() {
        outcome.fine("NICs: every GPU has an RDMA NIC below its own switch");
        return;
    }
    let worst = far.keys().next_back().copied().unwrap_or(Relation::Sys);
    outcome.found(Finding {
        id: "nic-far",
        weight: if worst == Relation::Sys { Weight::Moderate } else { Weight::Note },
        title: format!("some GPUs have no RDMA NIC nearer than {worst}"),
        evidence: far.into_iter().map(|(relation, gpus)| format!("{}: nearest is {relation}", list(gpus))).collect(),
        cost:
            "NCCL has GPUDirect RDMA up to PXB by default: beyond, messages between nodes go through host memory, or \
               by another GPU's NIC."
                .into(),
        remedy: vec![
            "Move NICs below the GPUs' switches, or at least to their socket; try NCCL_NET_GDR_LEVEL=PHB, or SYS."
                .into(),
        ],
    });
}
