//! NCCL's topology files: what `NCCL_TOPO_DUMP_FILE` writes and `NCCL_TOPO_FILE` reads.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail, ensure};
use roxmltree::{Document, Node as Element, ParsingOptions};

use super::{
    address::Address,
    machine::{Function, Gpu, Machine, Nic, Node, NvLink, NvLinkTo},
    read::{gt_per_s, lanes},
};

/// Far more than NCCL reads itself.
const MOST_ELEMENTS: u32 = 100_000;
/// Bridges above a device; NCCL's own files have three or four.
const DEEPEST: usize = 32;
/// Links that one GPU may have.
const MOST_LINKS: u32 = 64;
/// What NCCL's parser has room for.
const LONGEST_VALUE: usize = 255;

/// Reads a file.
pub(crate) fn parse(text: &str) -> Result<Machine> {
    let options = ParsingOptions { nodes_limit: MOST_ELEMENTS, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).context("this is no whole XML")?;
    let system = document.root_element();
    ensure!(system.has_tag_name("system"), "the first element is <{}>, not <system>", system.tag_name().name());
    let version = system.attribute("version");
    ensure!(version == Some("1"), "<system> has version {}: NCCL's files have 1", version.unwrap_or("none"));
    let mut machine = Machine { sources: vec!["NCCL's topology file".into()], collapsed: true, ..Machine::default() };
    let mut host = None;
    for cpu in children(system, "cpu") {
        let hash = cpu.attribute("host_hash");
        ensure!(*host.get_or_insert(hash) == hash, "the file is of several hosts: topologies of one are read here");
        let numa = number(cpu, "numaid")?.with_context(|| format!("{} has no numaid", place(cpu)))?;
        let numa = u32::try_from(numa).ok();
        let known = &mut machine.cpu;
        known.architecture = known.architecture.take().or(cpu.attribute("arch").map(Into::into));
        known.vendor = known.vendor.take().or(cpu.attribute("vendor").map(Into::into));
        known.family = known.family.or(number(cpu, "familyid")?.map(|number| number as u32));
        known.model = known.model.or(number(cpu, "modelid")?.map(|number| number as u32));
        if let Some(numa) = numa {
            let cpus = cpu.attribute("affinity").and_then(list_of_mask);
            ensure!(machine.nodes.insert(numa, Node { cpus }).is_none(), "there are two <cpu numaid=\"{numa}\">");
        }
        let root = format!("cpu{}", numa.map_or("?".into(), |numa| numa.to_string()));
        for pci in children(cpu, "pci") {
            function(pci, &Above { root: &root, numa, trail: &[] }, &mut machine)?;
        }
    }
    // By dev, where all have one.
    if machine.gpus.iter().all(|gpu| gpu.minor.is_some()) {
        machine.gpus.sort_by_key(|gpu| gpu.minor);
        let doubled = machine.gpus.windows(2).find(|pair| pair[0].minor == pair[1].minor);
        if let Some(pair) = doubled {
            bail!("two GPUs have dev=\"{}\"", pair[0].minor.unwrap_or_default());
        }
    }
    machine.nics.sort_by_key(|nic| (!nic.rdma, nic.address));
    machine
        .unseen
        .push("PHB and NODE are not told apart: NCCL's files have no host bridges, and both are PHB to it".into());
    Ok(machine)
}

/// What a `<pci>` is in.
struct Above<'a> {
    root: &'a str,
    numa: Option<u32>,
    trail: &'a [Address],
}

fn function(pci: Element<'_, '_>, above: &Above<'_>, machine: &mut Machine) -> Result<()> {
    ensure!(above.trail.len() < DEEPEST, "{}: more than {DEEPEST} bridges above each other", place(pci));
    let address = pci.attribute("busid").with_context(|| format!("{} has no busid", place(pci)))?;
    let address = address.parse::<Address>().map_err(anyhow::Error::msg).with_context(|| place(pci))?;
    let hex = |name| pci.attribute(name).and_then(|text| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok());
    let mut function = Function {
        class: hex("class").with_context(|| format!("{address} has no class"))?,
        vendor: hex("vendor").unwrap_or(0) as u16,
        device: hex("device").unwrap_or(0) as u16,
        subsystem_vendor: hex("subsystem_vendor").unwrap_or(0) as u16,
        subsystem_device: hex("subsystem_device").unwrap_or(0) as u16,
        numa: above.numa,
        root: above.root.into(),
        trail: above.trail.to_vec(),
        ..Function::default()
    };
    // Least of both ends, at their best.
    function.link.speed_max = pci.attribute("link_speed").and_then(gt_per_s);
    function.link.width_max = pci.attribute("link_width").and_then(lanes);
    for gpu in children(pci, "gpu") {
        machine.gpus.push(of_gpu(gpu, address)?);
    }
    for net in children(pci, "nic").flat_map(|nic| children(nic, "net").take(1)) {
        let speed = number(net, "speed")?.map(|speed| speed as u32);
        let rdma = net.attribute("guid").is_some_and(|guid| guid.trim_start_matches("0x") != "0");
        machine.nics.push(Nic { address, name: net.attribute("name").map(Into::into), rdma, speed });
    }
    let is_device = children(pci, "gpu").chain(children(pci, "nic")).next().is_some();
    let is_bridge = children(pci, "pci").next().is_some();
    ensure!(!(is_device && is_bridge), "{address} is a device, and has others below it");
    let trail: Vec<_> = above.trail.iter().copied().chain([address]).collect();
    ensure!(machine.functions.insert(address, function).is_none(), "{address} stands there twice");
    for below in children(pci, "pci") {
        self::function(below, &Above { trail: &trail, ..*above }, machine)?;
    }
    Ok(())
}

fn of_gpu(gpu: Element<'_, '_>, address: Address) -> Result<Gpu> {
    let sm = number(gpu, "sm")?.filter(|&sm| sm > 0).map(|sm| sm as u32);
    let mut links = Vec::new();
    for link in children(gpu, "nvlink") {
        let count = number(link, "count")?.with_context(|| format!("{} has no count", place(link)))?;
        ensure!((0..=i64::from(MOST_LINKS)).contains(&count), "{}: {count} links", place(link));
        let target = link.attribute("target").and_then(|target| target.parse::<Address>().ok());
        let class =
            link.attribute("tclass").and_then(|class| u32::from_str_radix(class.trim_start_matches("0x"), 16).ok());
        let to = match class {
            Some(0x06_8000) => Some(NvLinkTo::Switch),
            Some(0x06_8001) => Some(NvLinkTo::Cpu),
            Some(class) if class >> 16 == 0x03 => target.map(NvLinkTo::Gpu),
            _ => None,
        };
        links.extend((0..count).map(|_| NvLink { active: Some(true), to }));
    }
    Ok(Gpu {
        address: Some(address),
        minor: number(gpu, "dev")?.and_then(|dev| dev.try_into().ok()),
        compute_capability: sm.map(|sm| (sm / 10, sm % 10)),
        nvlinks: Some(links),
        ..Gpu::default()
    })
}

fn children<'a, 'input>(of: Element<'a, 'input>, name: &'static str) -> impl Iterator<Item = Element<'a, 'input>> {
    of.children().filter(move |child| child.has_tag_name(name))
}

/// The attribute's number, if there is one; it must be one.
fn number(of: Element<'_, '_>, name: &str) -> Result<Option<i64>> {
    let Some(text) = of.attribute(name) else { return Ok(None) };
    let value = text.parse().with_context(|| format!("{}: {name}=\"{text}\" is no number", place(of)))?;
    Ok(Some(value))
}

fn place(element: Element<'_, '_>) -> String {
    let at = element.document().text_pos_at(element.range().start);
    format!("line {}, <{}>", at.row, element.tag_name().name())
}

/// Writes a file that NCCL reads. What is unknown is left out, and NCCL finds it out itself.
pub(crate) fn write(machine: &Machine) -> String {
    let mut out = String::from("<system version=\"1\">\n");
    let mut nodes: Vec<Option<u32>> = machine.nodes.keys().copied().map(Some).collect();
    let devices = devices(machine);
    if nodes.is_empty() || devices.iter().any(|&address| numa(machine, address).is_none()) {
        nodes.push(None);
    }
    for node in nodes {
        let here: Vec<_> = devices.iter().copied().filter(|&address| numa(machine, address) == node).collect();
        let cpus = node.and_then(|node| machine.nodes.get(&node)?.cpus.as_deref());
        let mut attributes = vec![("numaid", node.map_or("-1".into(), |node| node.to_string()))];
        attributes.extend(cpus.and_then(mask_of_list).map(|mask| ("affinity", mask)));
        attributes.extend(machine.cpu.architecture.clone().map(|architecture| ("arch", architecture)));
        attributes.extend(machine.cpu.vendor.clone().map(|vendor| ("vendor", vendor)));
        attributes.extend(machine.cpu.family.map(|family| ("familyid", family.to_string())));
        attributes.extend(machine.cpu.model.map(|model| ("modelid", model.to_string())));
        open(&mut out, 1, "cpu", &attributes, true);
        tree(&mut out, machine, &here, 0);
        let _ = writeln!(out, "  </cpu>");
    }
    out.push_str("</system>\n");
    out
}

fn devices(machine: &Machine) -> Vec<Address> {
    let gpus = machine.gpus.iter().filter_map(|gpu| gpu.address);
    let nics = machine.nics.iter().map(|nic| nic.address);
    let mut devices: Vec<_> = gpus.chain(nics).filter(|address| machine.functions.contains_key(address)).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

fn numa(machine: &Machine, address: Address) -> Option<u32> {
    machine.functions.get(&address).and_then(|function| machine.numa(function))
}

/// The bridges above a device as NCCL has them: every other one, from the device up, which of a switch is the upstream
/// port; the root port is left out.
fn bridges(machine: &Machine, address: Address) -> Vec<Address> {
    let Some(function) = machine.functions.get(&address) else { return Vec::new() };
    if machine.collapsed {
        return function.trail.clone();
    }
    let mut bridges: Vec<_> = function.trail.iter().rev().skip(1).step_by(2).copied().collect();
    bridges.reverse();
    bridges
}

/// Writes the devices, and the bridges that are `depth` steps down to them.
fn tree(out: &mut String, machine: &Machine, devices: &[Address], depth: usize) {
    let mut rest = devices.to_vec();
    while let Some(&first) = rest.first() {
        let bridge = bridges(machine, first).get(depth).copied();
        let indent = depth + 2;
        let Some(bridge) = bridge else {
            device(out, machine, first, indent);
            rest.remove(0);
            continue;
        };
        let (below, others) = rest.iter().partition(|&&device| bridges(machine, device).get(depth) == Some(&bridge));
        rest = others;
        open(out, indent, "pci", &pci(machine, bridge), true);
        tree(out, machine, &below, depth + 1);
        let _ = writeln!(out, "{:indent$}</pci>", "", indent = indent * 2);
    }
}

fn device(out: &mut String, machine: &Machine, address: Address, indent: usize) {
    open(out, indent, "pci", &pci(machine, address), true);
    for (index, gpu) in machine.gpus.iter().enumerate().filter(|(_, gpu)| gpu.address == Some(address)) {
        let mut attributes = vec![("dev", index.to_string())];
        attributes.extend(gpu.compute_capability.map(|(major, minor)| ("sm", (major * 10 + minor).to_string())));
        attributes.push(("rank", index.to_string()));
        let links = nvlinks(machine, gpu);
        open(out, indent + 1, "gpu", &attributes, !links.is_empty());
        for (target, count, class) in &links {
            let attributes = [("target", target.clone()), ("count", count.to_string()), ("tclass", (*class).into())];
            open(out, indent + 2, "nvlink", &attributes, false);
        }
        if !links.is_empty() {
            let _ = writeln!(out, "{:indent$}</gpu>", "", indent = (indent + 1) * 2);
        }
    }
    for (index, nic) in machine.nics.iter().enumerate().filter(|(_, nic)| nic.address == address) {
        let mut attributes = Vec::new();
        attributes.extend(nic.name.clone().map(|name| ("name", name)));
        attributes.push(("dev", index.to_string()));
        attributes.extend(nic.speed.map(|speed| ("speed", speed.to_string())));
        if nic.rdma {
            // Which one it is NCCL finds out; that it is one tells it from an Ethernet interface.
            attributes.push(("guid", format!("0x{:x}", index + 1)));
        }
        let (outer, inner) = ((indent + 1) * 2, indent + 2);
        let _ = writeln!(out, "{:outer$}<nic>", "");
        open(out, inner, "net", &attributes, false);
        let _ = writeln!(out, "{:outer$}</nic>", "");
    }
    let _ = writeln!(out, "{:indent$}</pci>", "", indent = indent * 2);
}

fn pci(machine: &Machine, address: Address) -> Vec<(&'static str, String)> {
    let mut attributes = vec![("busid", address.to_string())];
    let Some(function) = machine.functions.get(&address) else {
        attributes.push(("class", "0x060400".into()));
        return attributes;
    };
    attributes.push(("class", format!("{:#08x}", function.class)));
    for (name, value) in [
        ("vendor", function.vendor),
        ("device", function.device),
        ("subsystem_vendor", function.subsystem_vendor),
        ("subsystem_device", function.subsystem_device),
    ] {
        attributes.push((name, format!("{value:#06x}")));
    }
    let link = machine.link(function);
    attributes.extend(link.speed_max.map(|speed| ("link_speed", format!("{speed:.1} GT/s PCIe"))));
    attributes.extend(link.width_max.map(|width| ("link_width", width.to_string())));
    attributes
}

/// Where the GPU's active NVLinks lead: address, how many, class. A switch that has no address here gets that of the
/// first in the PCI tree, or one that no device has.
fn nvlinks(machine: &Machine, gpu: &Gpu) -> Vec<(String, usize, &'static str)> {
    let switch = machine.functions.iter().find(|(_, function)| function.is_nvswitch());
    let switch = switch.map_or("ffff:ff:1f.7".into(), |(address, _)| address.to_string());
    let mut links: Vec<(String, usize, &'static str)> = Vec::new();
    for link in gpu.active() {
        let (target, class) = match link.to {
            Some(NvLinkTo::Gpu(address)) => (address.to_string(), "0x030200"),
            Some(NvLinkTo::Switch) => (switch.clone(), "0x068000"),
            Some(NvLinkTo::Cpu) | None => continue,
        };
        match links.iter_mut().find(|(known, ..)| *known == target) {
            Some((_, count, _)) => *count += 1,
            None => links.push((target, 1, class)),
        }
    }
    links
}

fn open(out: &mut String, indent: usize, name: &str, attributes: &[(&str, String)], has_children: bool) {
    let _ = write!(out, "{:indent$}<{name}", "", indent = indent * 2);
    for (name, value) in attributes {
        let value: String = value.chars().filter(|c| !c.is_control()).take(LONGEST_VALUE).collect();
        let value = value.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;");
        let _ = write!(out, " {name}=\"{value}\"");
    }
    out.push_str(if has_children { ">\n" } else { "/>\n" });
}

/// More than any machine has.
const MOST_CPUS: usize = 16_384;

/// `0-3,8` as `0000010f`: groups of 32 bits, the highest first.
fn mask_of_list(list: &str) -> Option<String> {
    let mut words: Vec<u32> = vec![0];
    for range in list.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if first > last || last >= MOST_CPUS {
            return None;
        }
        words.resize(words.len().max(last / 32 + 1), 0);
        (first..=last).for_each(|cpu| words[cpu / 32] |= 1 << (cpu % 32));
    }
    let words: Vec<_> = words.iter().rev().map(|word| format!("{word:08x}")).collect();
    Some(words.join(","))
}

/// The other way round.
fn list_of_mask(mask: &str) -> Option<String> {
    let words: Vec<_> = mask.split(',').rev().map(|word| u32::from_str_radix(word, 16).ok()).collect::<Option<_>>()?;
    if words.len() > MOST_CPUS / 32 {
        return None;
    }
    let is_set = |cpu: usize| words.get(cpu / 32).is_some_and(|word| word >> (cpu % 32) & 1 != 0);
    let mut ranges = Vec::new();
    let mut cpu = 0;
    while cpu < words.len() * 32 {
        let first = cpu;
        while is_set(cpu) {
            cpu += 1;
        }
        match cpu - first {
            0 => cpu += 1,
            1 => ranges.push(first.to_string()),
            _ => ranges.push(format!("{first}-{}", cpu - 1)),
        }
    }
    Some(ranges.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_lists_are_each_other_s_inverse() {
        for (list, mask) in [("0-3,8", "0000010f"), ("0-31,64", "00000001,00000000,ffffffff"), ("", "00000000")] {
            assert_eq!(mask_of_list(list).as_deref(), Some(mask));
            assert_eq!(list_of_mask(mask).as_deref(), Some(list));
        }
        assert_eq!(mask_of_list("0-99999999"), None);
        assert_eq!(list_of_mask("xyz"), None);
    }
}
