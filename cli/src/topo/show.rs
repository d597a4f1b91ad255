//! What `peersum topo` prints.

use std::io::{self, Write};

use super::Seen;
use crate::topology::{
    machine::{Link, Machine, NvLinkTo, generation, pcie_gb_per_s},
    matrix::{Matrix, Relation},
    visible::Visible,
};

pub(super) fn show(out: &mut dyn Write, seen: &Seen) -> io::Result<()> {
    writeln!(out, "# Read from: {}", seen.sources.join(", "))?;
    if seen.matrix.gpus().next().is_none() {
        writeln!(out, "# No GPU of NVIDIA's is here")?;
    }
    writeln!(out)?;
    if !seen.matrix.devices.is_empty() {
        matrix(out, &seen.matrix)?;
        legend(out, &seen.matrix)?;
    }
    if let Some(machine) = &seen.machine {
        gpus(out, machine, &seen.matrix)?;
        if let Some(visible) = seen.visible.as_ref().filter(|visible| !visible.is_plain(machine)) {
            cuda(out, visible, &seen.matrix)?;
        }
    }
    if !seen.unseen.is_empty() {
        writeln!(out, "\nNot seen:\n")?;
        seen.unseen.iter().try_for_each(|unseen| writeln!(out, "  {unseen}"))?;
    }
    Ok(())
}

fn matrix(out: &mut dyn Write, matrix: &Matrix) -> io::Result<()> {
    let label = |index: usize| matrix.devices[index].label.as_str();
    let width = (0..matrix.devices.len()).map(|index| label(index).len()).max().unwrap_or(0).max(4) + 2;
    let affinity = |index: usize| matrix.devices[index].cpus.clone().unwrap_or_default();
    let longest = (0..matrix.devices.len()).map(|index| affinity(index).len()).max().unwrap_or(0).max(12) + 2;
    write!(out, "{:width$}", "")?;
    (0..matrix.devices.len()).try_for_each(|index| write!(out, "{:width$}", label(index)))?;
    writeln!(out, "{:longest$}NUMA Affinity", "CPU Affinity")?;
    for (index, row) in matrix.cells.iter().enumerate() {
        write!(out, "{:width$}", label(index))?;
        for (column, cell) in row.iter().enumerate() {
            let cell = if column == index { "X".into() } else { cell.to_string() };
            write!(out, "{cell:width$}")?;
        }
        let numa = matrix.devices[index].numa.map_or("N/A".into(), |numa| numa.to_string());
        writeln!(out, "{:longest$}{numa}", affinity(index))?;
    }
    Ok(())
}

fn legend(out: &mut dyn Write, matrix: &Matrix) -> io::Result<()> {
    writeln!(out, "\nLegend:\n\n  X    = Self")?;
    Relation::ALL
        .iter()
        .rev()
        .try_for_each(|relation| writeln!(out, "  {:4} = {}", relation.name(), relation.meaning()))?;
    writeln!(out, "  NV#  = Connection traversing a bonded set of # NVLinks\n  ?    = Unknown")?;
    let mut nics = matrix.devices.iter().filter(|device| !device.gpu).peekable();
    if nics.peek().is_some() {
        writeln!(out, "\nNIC Legend:\n")?;
        nics.try_for_each(|nic| writeln!(out, "  {}: {}", nic.label, nic.name.as_deref().unwrap_or("no driver")))?;
    }
    Ok(())
}

fn gpus(out: &mut dyn Write, machine: &Machine, matrix: &Matrix) -> io::Result<()> {
    if machine.gpus.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nGPUs:\n")?;
    for (index, gpu) in machine.gpus.iter().enumerate() {
        let address = gpu.address.map_or("no known address".into(), |address| address.to_string());
        writeln!(out, "  GPU{index}: {}, {address}", gpu.name.as_deref().unwrap_or("unknown model"))?;
        let link = machine.function_of(index).map(|(_, function)| machine.link(function)).unwrap_or_default();
        writeln!(out, "    PCIe: {}", pcie(link))?;
        writeln!(out, "    NVLink: {}", nvlink(machine, index))?;
        writeln!(out, "    Nearest NIC: {}", nearest(matrix, index))?;
    }
    Ok(())
}

/// CUDA's devices in their order, each beside the GPU that it is, and how they are connected.
fn cuda(out: &mut dyn Write, visible: &Visible, matrix: &Matrix) -> io::Result<()> {
    writeln!(out, "\nCUDA's devices (from {}):\n", visible.from)?;
    for (ordinal, device) in visible.devices.iter().enumerate() {
        let gpu = device.gpu.map_or("an unknown GPU".into(), |gpu| format!("GPU{gpu}"));
        let mig = if device.mig { ", an instance of MIG: no P2P, no IPC" } else { "" };
        writeln!(
            out,
            "  device {ordinal}: {gpu}{}{mig}",
            device.uuid.as_ref().map_or(String::new(), |uuid| format!(", {uuid}"))
        )?;
    }
    if visible.devices.is_empty() {
        writeln!(out, "  none")?;
    }
    if let Some(note) = &visible.note {
        writeln!(out, "  {note}")?;
    }
    let places: Option<Vec<_>> = visible.devices.iter().map(|device| device.gpu.filter(|_| !device.mig)).collect();
    let Some(places) = places.filter(|places| places.len() > 1) else { return Ok(()) };
    let mut selected = matrix.select(&places);
    for (ordinal, device) in selected.devices.iter_mut().enumerate() {
        device.label = format!("{ordinal}=GPU{}", places[ordinal]);
    }
    writeln!(out)?;
    self::matrix(out, &selected)
}

/// `5.0 x16 now, 5.0 x16 at best: 48 GB/s one way`.
fn pcie(link: Link) -> String {
    let shown = |speed: Option<f64>, width: Option<u32>| {
        let generation = speed.and_then(generation).map_or("generation unknown".into(), |number| format!("{number}.0"));
        format!("{generation} {}", width.map_or("width unknown".into(), |width| format!("x{width}")))
    };
    let (now, best) = (shown(link.speed, link.width), shown(link.speed_max, link.width_max));
    match (link.speed_max, link.width_max) {
        (Some(speed), Some(width)) => {
            format!("{now} now, {best} at best: {:.0} GB/s one way", pcie_gb_per_s(speed, width))
        }
        _ => format!("{now} now, {best} at best"),
    }
}

fn nvlink(machine: &Machine, index: usize) -> String {
    let gpu = &machine.gpus[index];
    let Some(links) = &gpu.nvlinks else { return "unknown".into() };
    let generation = gpu.nvlink_generation();
    if links.is_empty() {
        return match generation {
            // Such a GPU may have them, and a virtual machine that was given it without them shows none.
            Some((_, most, _)) => format!("none is shown; GPUs of its kind have up to {most}"),
            None => "none".into(),
        };
    }
    let active = gpu.active().count();
    let rate = gpu.nvlink_rate();
    let mut text = generation.map_or(String::new(), |(generation, ..)| format!("generation {generation}, "));
    text += &format!("{active} of {} links active", links.len());
    if let Some(rate) = rate.filter(|_| active > 0) {
        text += &format!(", {rate:.1} GB/s each, {:.0} GB/s one way", rate * active as f64);
    }
    let mut to = Vec::new();
    if gpu.active().any(|link| link.to == Some(NvLinkTo::Switch)) {
        to.push("through a switch".to_owned());
    }
    for (peer, other) in machine.gpus.iter().enumerate() {
        let count = gpu.active().filter(|link| matches!(link.to, Some(NvLinkTo::Gpu(at)) if Some(at) == other.address));
        match count.count() {
            0 => (),
            count => to.push(format!("{count} to GPU{peer}")),
        }
    }
    let lost = gpu.active().filter(|link| link.to.is_none()).count();
    if lost > 0 {
        to.push(format!("{lost} to an unknown end"));
    }
    if !to.is_empty() {
        text += &format!(": {}", to.join(", "));
    }
    text
}

/// The NICs that are least far from the GPU.
fn nearest(matrix: &Matrix, gpu: usize) -> String {
    let nics = || (0..matrix.devices.len()).filter(|&index| !matrix.devices[index].gpu);
    let Some(least) = nics().filter_map(|nic| matrix.cells[gpu][nic].pci).min() else { return "none known".into() };
    let nearest: Vec<_> = nics()
        .filter(|&nic| matrix.cells[gpu][nic].pci == Some(least))
        .map(|nic| match &matrix.devices[nic].name {
            Some(name) => format!("{} ({name})", matrix.devices[nic].label),
            None => matrix.devices[nic].label.clone(),
        })
        .collect();
    format!("{}, {least}", nearest.join(", "))
}
