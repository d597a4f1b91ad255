//! P2P over PCIe: whether the driver grants it, whether NCCL takes it, and what redirects it.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    finding::{Finding, Outcome, Weight, list, pairs},
    settings::Settings,
};
use crate::topology::{
    acs::Acs,
    address::Address,
    machine::{Function, Iommu, Machine, Pair},
    matrix::{self, Relation},
    nccl::{self, Decision, Path},
    nvml::Status,
};

/// What is to be known of ACS on the way between GPUs, and between GPUs and NICs beside them.
#[derive(Clone, Debug, Default)]
pub(super) struct Redirected {
    /// Bridges that send peers' traffic up, with what their control says.
    pub(super) bridges: BTreeMap<Address, String>,
    /// Bridges that could not be read.
    pub(super) unreadable: BTreeMap<Address, String>,
    /// Pairs of which one is somewhere unknown in the PCI tree, as they are called.
    unplaced: Vec<String>,
    /// Pairs of GPUs that have such a bridge between them.
    pairs: Vec<Pair>,
    /// GPU and NIC, as they are called.
    nics: Vec<String>,
}

impl Redirected {
    pub(super) fn of(machine: &Machine) -> Self {
        let mut redirected = Redirected::default();
        for pair in machine.gpu_pairs().filter(|&pair| !matrix::gpus(machine, pair).linked()) {
            let placed = |gpu| machine.function_of(gpu).map(|(_, function)| function).filter(|of| !of.root.is_empty());
            match (placed(pair.0), placed(pair.1)) {
                (Some(a), Some(b)) if redirected.look(machine, a, b) => redirected.pairs.push(pair),
                (Some(_), Some(_)) => (),
                _ => redirected.unplaced.push(format!("GPU{}-GPU{}", pair.0, pair.1)),
            }
        }
        for gpu in 0..machine.gpus.len() {
            for (index, nic) in machine.nics.iter().enumerate().filter(|(_, nic)| nic.rdma) {
                let (Some((_, a)), Some(b)) = (machine.function_of(gpu), machine.functions.get(&nic.address)) else {
                    continue;
                };
                let near = matrix::pci(machine, a, b).is_some_and(|relation| relation <= Relation::Pxb);
                if near && redirected.look(machine, a, b) {
                    redirected.nics.push(format!("GPU{gpu}-NIC{index}"));
                }
            }
        }
        redirected
    }

    /// Whether any bridge between them redirects.
    fn look(&mut self, machine: &Machine, a: &Function, b: &Function) -> bool {
        let mut any = false;
        for address in machine.bridges_between(a, b) {
            match machine.functions.get(&address).and_then(|bridge| bridge.acs.as_ref()) {
                Some(Acs::Control(control)) if control.redirects() => {
                    self.bridges.insert(address, control.to_string());
                    any = true;
                }
                Some(Acs::Unknown(why)) => drop(self.unreadable.insert(address, why.clone())),
                Some(Acs::Control(_) | Acs::Absent) => (),
                None => drop(self.unreadable.insert(address, "the bridge is not in sysfs".into())),
            }
        }
        any
    }
}

pub(super) fn check(machine: &Machine, settings: &Settings, outcome: &mut Outcome) {
    if machine.gpus.len() < 2 && !machine.nics.iter().any(|nic| nic.rdma) {
        return;
    }
    let redirected = Redirected::of(machine);
    if machine.gpus.len() > 1 {
        refused(machine, outcome);
        level(machine, settings, &redirected, outcome);
    }
    acs(machine, &redirected, outcome);
    iommu(machine, outcome);
}

/// Pairs that NVML says have no P2P.
fn refused(machine: &Machine, outcome: &mut Outcome) {
    let mut by_status: BTreeMap<&str, (Status, Vec<Pair>)> = BTreeMap::new();
    let mut silent = Vec::new();
    for pair in machine.gpu_pairs() {
        match machine.p2p_refused(pair) {
            Some(status) => by_status.entry(status.meaning()).or_insert((status, Vec::new())).1.push(pair),
            None if !machine.p2p_granted(pair) => silent.push(pair),
            None => (),
        }
    }
    if by_status.is_empty() && silent.is_empty() {
        outcome.fine("P2P: the driver grants it to all pairs of GPUs");
    }
    if !silent.is_empty() {
        let why = "NVML doesn't say whether the driver grants it; `nvidia-smi topo -p2p r` does";
        outcome.unknown(format!("P2P of {}", pairs(machine, &silent)), why);
    }
    for (meaning, (status, refused)) in by_status {
        let remedy = match status {
            Status::ChipsetNotSupported | Status::TopologyNotSupported => {
                "Put the cards below one PCIe switch, or at root ports of one socket."
            }
            Status::GpuNotSupported => {
                "GeForce drivers grant none: take data-centre or workstation cards, or ranks that go through host \
                 memory."
            }
            Status::DisabledByRegkey => {
                "Look for NVreg_RegistryDwords in /etc/modprobe.d and on the kernel's command line."
            }
            _ => "In a virtual machine, ask for GPUs of one P2P clique; with MIG on, switch it off.",
        };
        outcome.found(Finding {
            id: "p2p-refused",
            weight: Weight::Severe,
            title: format!("the driver grants no P2P between {}", pairs(machine, &refused)),
            evidence: vec![format!("NVML's P2P status: {meaning}")],
            cost: "GPUs can't reach each other's memory: everything is copied through host memory, and peersum's GPU \
                   backend can't have such ranks."
                .into(),
            remedy: vec![remedy.into()],
        });
    }
}

/// NCCL's own rule, which gives up P2P beyond a level whatever ACS says.
fn level(machine: &Machine, settings: &Settings, redirected: &Redirected, outcome: &mut Outcome) {
    let level = nccl::level(machine, settings.get("NCCL_P2P_DISABLE"), settings.get("NCCL_P2P_LEVEL"));
    let mut by_path: BTreeMap<Path, Vec<Pair>> = BTreeMap::new();
    for pair in machine.gpu_pairs() {
        if let Decision::TooFar(path) = nccl::decide(machine, pair, level) {
            by_path.entry(path).or_default().push(pair);
        }
    }
    let Some(&longest) = by_path.keys().next_back() else {
        let unknown: Vec<_> =
            machine.gpu_pairs().filter(|&pair| Path::of(matrix::gpus(machine, pair)).is_none()).collect();
        if unknown.is_empty() {
            outcome.fine("NCCL: no pair of GPUs is farther apart than NCCL has P2P over");
        } else {
            outcome.unknown(
                format!("whether NCCL has P2P between {}", pairs(machine, &unknown)),
                "how they are connected is not known in full (see `peersum topo`)",
            );
        }
        return;
    };
    let mut evidence: Vec<_> = by_path
        .iter()
        .map(|(path, far)| {
            format!("{}: the path is {path}, beyond {}, from {}", pairs(machine, far), level.path, level.from)
        })
        .collect();
    let mut remedy = vec![format!(
        "Set NCCL_P2P_LEVEL={longest} for a run, and compare: `NCCL_DEBUG=INFO` should then say `via P2P`, and \
         bandwidth should rise. Check the data too: P2P over a path that the chipset doesn't serve well can be wrong."
    )];
    if level.from.starts_with("NCCL_") {
        remedy.insert(0, format!("Unset {}: it is what sets the level here.", level.from));
    }
    if redirected.pairs.is_empty() && redirected.unreadable.is_empty() && redirected.unplaced.is_empty() {
        evidence.push("ACS is not the cause: no bridge between them redirects, and NCCL never reads ACS".into());
    } else if !redirected.pairs.is_empty() {
        evidence.push(
            "two causes: ACS redirects between these GPUs too, which is a finding of its own; NCCL never reads ACS"
                .into(),
        );
        remedy.push(
            "Clearing ACS alone changes nothing for NCCL, and the level alone leaves the detour: do both.".into(),
        );
    } else {
        evidence.push(
            "whether ACS redirects too is unknown; NCCL never reads ACS, and gives up P2P here either way".into(),
        );
    }
    let far: Vec<_> = by_path.into_values().flatten().collect();
    outcome.found(Finding {
        id: "nccl-p2p-level",
        weight: Weight::Severe,
        title: format!("NCCL gives up P2P between {}", pairs(machine, &far)),
        evidence,
        cost: "NCCL then goes through host memory (SHM): two PCIe transfers for one, and a third of the bandwidth or \
               less."
            .into(),
        remedy,
    });
}

fn acs(machine: &Machine, redirected: &Redirected, outcome: &mut Outcome) {
    if !redirected.bridges.is_empty() {
        let within = redirected
            .pairs
            .iter()
            .any(|&pair| matrix::gpus(machine, pair).pci.is_some_and(|relation| relation <= Relation::Pxb));
        let mut of: Vec<String> = Vec::new();
        if !redirected.pairs.is_empty() {
            of.push(pairs(machine, &redirected.pairs));
        }
        if !redirected.nics.is_empty() {
            of.push(list(redirected.nics.iter().cloned()));
        }
        let mut evidence: Vec<_> =
            redirected.bridges.iter().map(|(address, control)| format!("{address} ACSCtl: {control}")).collect();
        evidence.push(format!("IOMMU: {}", machine.iommu));
        evidence.extend(groups(machine));
        outcome.found(Finding {
            id: "acs-redirect",
            weight: if within { Weight::Severe } else { Weight::Moderate },
            title: format!(
                "ACS redirects P2P at {} PCIe bridge{}, between {}",
                redirected.bridges.len(),
                if redirected.bridges.len() == 1 { "" } else { "s" },
                of.join("; ")
            ),
            evidence,
            cost:
                "Requests between peers go up to the root complex and down again, or into the IOMMU: bandwidth falls \
                   to a half or less, and where the IOMMU translates, copies can hang or be wrong."
                    .into(),
            remedy: vec![
                "`peersum doctor --write-acs-fix DIR` writes a script that clears the redirection at these bridges \
                 alone, and a systemd unit that runs it at each start; read them before you use them."
                    .into(),
                "Or switch off ACS, or IOMMU/VT-d, in the firmware, or start Linux with \
                 pci=disable_acs_redir=<bridges>."
                    .into(),
                "Not where virtual machines have devices of this machine: ACS isolates them from each other. There, \
                 ATS and Direct Translated P2P let peers through."
                    .into(),
            ],
        });
    }
    if !redirected.unreadable.is_empty() {
        let bridges: BTreeSet<_> = redirected.unreadable.keys().map(ToString::to_string).collect();
        let why = redirected.unreadable.values().next().cloned().unwrap_or_default();
        outcome.unknown(
            format!("ACS of the bridges {}", list(bridges)),
            format!("{why}. It may be on: run `sudo peersum doctor`, or look at ACSCtl in `sudo lspci -vvv`"),
        );
    }
    if !redirected.unplaced.is_empty() {
        let why = "their places in the PCI tree, and so the bridges between them, are not in sysfs";
        outcome.unknown(format!("ACS between {}", list(redirected.unplaced.iter().cloned())), why);
    } else if redirected.unreadable.is_empty() && redirected.bridges.is_empty() {
        outcome.fine("ACS: no bridge between GPUs, or between a GPU and the NICs beside it, redirects");
    }
}

/// What groups of the IOMMU say, and what they don't.
fn groups(machine: &Machine) -> Option<String> {
    let groups: Vec<_> =
        (0..machine.gpus.len()).map(|gpu| machine.function_of(gpu)?.1.iommu_group).collect::<Option<_>>()?;
    let different: BTreeSet<u32> = groups.iter().copied().collect();
    (groups.len() > 1).then(|| {
        format!(
            "IOMMU groups of the GPUs: {} of {} GPUs; groups of their own are normal at root ports of their own, and \
             prove no redirection",
            different.len(),
            groups.len()
        )
    })
}

fn iommu(machine: &Machine, outcome: &mut Outcome) {
    match machine.iommu {
        Iommu::Translating => {
            let by_pcie = machine.gpu_pairs().any(|pair| matrix::gpus(machine, pair).unlinked());
            outcome.found(Finding {
                id: "iommu-translating",
                weight: if by_pcie { Weight::Moderate } else { Weight::Note },
                title: "the IOMMU translates addresses".into(),
                evidence: vec!["groups in /sys/kernel/iommu_groups are of type DMA".into()],
                cost: "P2P over PCIe is suspect: what goes to the root complex is looked up in the IOMMU, which is \
                       slow, and on some machines loses or misdirects it. By NVLink it is not concerned."
                    .into(),
                remedy: vec!["Start Linux with iommu=pt, or switch the IOMMU off in the firmware.".into()],
            });
        }
        Iommu::Unknown => {
            outcome.unknown("the IOMMU", "whether it translates addresses can't be seen in /sys/kernel/iommu_groups")
        }
        mode => outcome.fine(format!("IOMMU: {mode}")),
    }
}
