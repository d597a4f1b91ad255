//! The topology as a graph: NUMA nodes with their host bridges, switches, GPUs and NICs, and the NVLinks between GPUs.
//!
//! Drawn from the matrix, so that any of its sources will do; where there is a machine, with the rates of its links.

use std::collections::BTreeMap;

use super::{
    Picture,
    svg::{Anchor, Svg},
};
use crate::topology::{
    machine::{Machine, generation},
    matrix::{Matrix, Relation},
};

const SLOT: f64 = 104.0;
const BOX: (f64, f64) = (92.0, 46.0);
const MARGIN: f64 = 24.0;
const TOP: f64 = 64.0;
/// Between nodes.
const GAP: f64 = 24.0;

/// Where each level begins, from the head of a node.
const BRIDGE: f64 = 34.0;
const SWITCH: f64 = 82.0;
const DEVICE: f64 = 146.0;
const BOTTOM: f64 = DEVICE + BOX.1 + 18.0;

pub(crate) fn graph(matrix: &Matrix, machine: Option<&Machine>) -> Picture {
    let order = order(matrix);
    let title = "How GPUs and NICs are connected";
    let mut nodes: Vec<(Option<u32>, Vec<usize>)> = Vec::new();
    for &device in &order {
        let node = node(matrix, device);
        match nodes.last_mut().filter(|(last, _)| *last == node) {
            Some((_, devices)) => devices.push(device),
            None => nodes.push((node, vec![device])),
        }
    }
    let slots: f64 = order.len() as f64 * SLOT;
    let width = (2.0 * MARGIN + slots + GAP * (nodes.len().max(1) - 1) as f64 + 16.0 * nodes.len() as f64).max(640.0);
    let links = Links::of(matrix);
    let depth = links.depth();
    let height = TOP + BOTTOM + depth + 100.0;
    let mut svg = Svg::new(width, height);
    svg.text("ink", (MARGIN, 32.0), Anchor::Start, 19.0, title);
    let mut places = BTreeMap::new();
    let mut x = MARGIN;
    for (node, devices) in &nodes {
        let across = devices.len() as f64 * SLOT + 16.0;
        svg.rectangle("box", (x, TOP), (across, BOTTOM), 1.0);
        let name = node.map_or("NUMA node unknown".into(), |node| format!("NUMA node {node}"));
        svg.text("soft", (x + 10.0, TOP + 20.0), Anchor::Start, 13.0, &name);
        for (index, &device) in devices.iter().enumerate() {
            places.insert(device, x + 8.0 + (index as f64 + 0.5) * SLOT);
        }
        pci(&mut svg, matrix, devices, &places);
        for &device in devices {
            draw_device(&mut svg, matrix, machine, device, places[&device]);
        }
        x += across + GAP;
    }
    links.draw(&mut svg, &places, TOP + DEVICE + BOX.1, TOP + BOTTOM);
    legend(&mut svg, height - 62.0, &links, order.iter().any(|&device| !matrix.devices[device].gpu));
    Picture { title: title.into(), svg: svg.finish(title) }
}

/// The device's node; where that isn't said, as of NICs in `nvidia-smi topo -m`, that of whatever is nearest in one.
fn node(matrix: &Matrix, device: usize) -> Option<u32> {
    let nearest = || {
        let others = (0..matrix.devices.len()).filter(|&other| other != device);
        let placed = others.filter_map(|other| Some((matrix.cells[device][other].pci?, matrix.devices[other].numa?)));
        placed.filter(|(relation, _)| *relation < Relation::Sys).min().map(|(_, node)| node)
    };
    matrix.devices[device].numa.or_else(nearest)
}

/// Devices by node, and beside those that are near.
fn order(matrix: &Matrix) -> Vec<usize> {
    let count = matrix.devices.len();
    let group =
        |device: usize, most: Relation| (0..count).find(|&other| near(matrix, device, other, most)).unwrap_or(device);
    let mut order: Vec<_> = (0..count).collect();
    order.sort_by_key(|&device| {
        let node = node(matrix, device).unwrap_or(u32::MAX);
        (node, group(device, Relation::Phb), group(device, Relation::Pxb), device)
    });
    order
}

/// Whether two devices are known to be as near as that.
fn near(matrix: &Matrix, a: usize, b: usize, most: Relation) -> bool {
    a == b || matrix.cells[a][b].pci.is_some_and(|relation| relation <= most)
}

/// Host bridges and switches, by which devices are near each other.
fn pci(svg: &mut Svg, matrix: &Matrix, devices: &[usize], places: &BTreeMap<usize, f64>) {
    let groups = |most: Relation| {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for &device in devices {
            match groups.last_mut().filter(|group| near(matrix, group[0], device, most)) {
                Some(group) => group.push(device),
                None => groups.push(vec![device]),
            }
        }
        groups
    };
    let bar = |svg: &mut Svg, group: &[usize], y: f64, name: &str| {
        let (first, last) = (places[&group[0]], places[&group[group.len() - 1]]);
        let (left, right) = (first - BOX.0 / 2.0, last + BOX.0 / 2.0);
        svg.rectangle("part", (left, TOP + y), (right - left, 24.0), 1.0);
        // A name must fit in a slot.
        let size = if right - left < 100.0 && name.len() > 14 { 9.5 } else { 12.0 };
        svg.text("ink", ((left + right) / 2.0, TOP + y + 16.0), Anchor::Middle, size, name);
    };
    let switched: Vec<_> = groups(Relation::Pxb).into_iter().filter(|group| group.len() > 1).collect();
    for group in groups(Relation::Phb) {
        for &device in &group {
            let at = places[&device];
            let below = switched.iter().any(|group| group.contains(&device));
            if !below {
                svg.line("pcie", (at, TOP + BRIDGE + 24.0), (at, TOP + DEVICE));
            }
        }
        // The matrix of nvidia-smi doesn't say where GPUs are in the PCI tree that NVLink connects.
        let known =
            (0..matrix.devices.len()).all(|other| other == group[0] || matrix.cells[group[0]][other].pci.is_some());
        let name = match (group.len(), known) {
            (2.., _) => "host bridge",
            (_, true) => "root port",
            (_, false) => "PCIe, place unknown",
        };
        bar(svg, &group, BRIDGE, name);
    }
    for group in switched {
        let middle = (places[&group[0]] + places[&group[group.len() - 1]]) / 2.0;
        svg.line("pcie", (middle, TOP + BRIDGE + 24.0), (middle, TOP + SWITCH));
        group.iter().for_each(|device| {
            svg.line("pcie", (places[device], TOP + SWITCH + 24.0), (places[device], TOP + DEVICE));
        });
        let alike = group.windows(2).all(|pair| near(matrix, pair[0], pair[1], Relation::Pix));
        bar(svg, &group, SWITCH, if alike { "PCIe switch" } else { "PCIe switches" });
    }
}

fn draw_device(svg: &mut Svg, matrix: &Matrix, machine: Option<&Machine>, device: usize, x: f64) {
    let of = &matrix.devices[device];
    let (left, top) = (x - BOX.0 / 2.0, TOP + DEVICE);
    svg.rectangle(if of.gpu { "gpu" } else { "nic" }, (left, top), BOX, 1.0);
    svg.text("ink", (x, top + 19.0), Anchor::Middle, 14.0, &of.label);
    let name =
        of.name.clone().or_else(|| machine?.gpus.get(device).filter(|_| of.gpu)?.name.clone()).unwrap_or_default();
    svg.text("soft", (x, top + 36.0), Anchor::Middle, 10.5, &shortened(name.trim_start_matches("NVIDIA "), 13));
    let link = machine.filter(|_| of.gpu).and_then(|machine| {
        let link = machine.link(machine.function_of(device)?.1);
        Some(format!("{}.0 x{}", generation(link.speed_max?)?, link.width_max?))
    });
    if let Some(link) = link {
        svg.text("soft", (x + 5.0, top - 8.0), Anchor::Start, 10.5, &link);
    }
}

/// Whole words, as far as they fit.
fn shortened(text: &str, most: usize) -> String {
    let Some((end, _)) = text.char_indices().nth(most) else { return text.to_owned() };
    // The sign takes the place of a character.
    let cut = text[..end].char_indices().next_back().map_or(0, |(last, _)| last);
    let words = if text[cut..].starts_with(' ') { cut } else { text[..cut].rfind(' ').unwrap_or(cut) };
    format!("{}…", &text[..words])
}

/// What connects GPUs.
struct Links {
    /// All to all, with so many links of each GPU.
    fabric: Option<(Vec<usize>, u32)>,
    /// Pairs, with how many links.
    pairs: Vec<(usize, usize, u32)>,
    /// Pairs of which it is unknown.
    unknown: Vec<(usize, usize)>,
}

impl Links {
    fn of(matrix: &Matrix) -> Links {
        let gpus: Vec<_> = matrix.gpus().collect();
        let all = || gpus.iter().enumerate().flat_map(|(index, &a)| gpus[index + 1..].iter().map(move |&b| (a, b)));
        let count = |(a, b): (usize, usize)| matrix.cells[a][b].nvlinks;
        let linked: Vec<_> = all()
            .filter_map(|pair| count(pair).filter(|&links| links > 0).map(|links| (pair.0, pair.1, links)))
            .collect();
        let unknown: Vec<_> = all().filter(|&pair| count(pair).is_none()).collect();
        let complete = gpus.len() > 2 && linked.len() == gpus.len() * (gpus.len() - 1) / 2;
        match complete {
            true => {
                let links = linked.iter().map(|(.., links)| *links).min().unwrap_or(0);
                Links { fabric: Some((gpus, links)), pairs: Vec::new(), unknown }
            }
            false => Links { fabric: None, pairs: linked, unknown },
        }
    }

    fn depth(&self) -> f64 {
        if self.fabric.is_some() {
            70.0
        } else if self.pairs.is_empty() && self.unknown.is_empty() {
            0.0
        } else {
            110.0
        }
    }

    fn draw(&self, svg: &mut Svg, places: &BTreeMap<usize, f64>, from: f64, below: f64) {
        if let Some((gpus, links)) = &self.fabric {
            let of = |gpu: &usize| places[gpu];
            let left = gpus.iter().map(of).fold(f64::INFINITY, f64::min);
            let right = gpus.iter().map(of).fold(0.0, f64::max);
            let top = below + 30.0;
            for gpu in gpus {
                svg.line("nvlink", (places[gpu], from), (places[gpu], top));
                svg.text("soft", (places[gpu] + 6.0, top - 8.0), Anchor::Start, 11.0, &format!("NV{links}"));
            }
            svg.rectangle("fabric", (left - BOX.0 / 2.0, top), (right - left + BOX.0, 26.0), 1.0);
            svg.text("onfabric", ((left + right) / 2.0, top + 17.0), Anchor::Middle, 13.0, "NVLink, all to all");
            return;
        }
        for &(a, b, links) in &self.pairs {
            let (x1, x2) = (places[&a], places[&b]);
            let depth = bend(x1, x2);
            svg.arc("nvlink", (x1, from), x2, depth);
            svg.text("ink", ((x1 + x2) / 2.0, from + depth + 16.0), Anchor::Middle, 12.0, &format!("NV{links}"));
        }
        // One for each neighbour, or there would be a tangle.
        for &(a, b) in self.unknown.iter().filter(|(a, b)| b - a == 1) {
            let (x1, x2) = (places[&a], places[&b]);
            svg.arc("unknown", (x1, from), x2, bend(x1, x2));
            svg.text("soft", ((x1 + x2) / 2.0, from + bend(x1, x2) + 14.0), Anchor::Middle, 12.0, "?");
        }
    }
}

fn bend(x1: f64, x2: f64) -> f64 {
    (30.0 + (x2 - x1).abs() / 12.0).min(90.0)
}

fn legend(svg: &mut Svg, y: f64, links: &Links, nics: bool) {
    let mut x = MARGIN;
    let mut entry = |svg: &mut Svg, draw: &dyn Fn(&mut Svg, f64), text: &str| {
        draw(svg, x);
        svg.text("ink", (x + 44.0, y + 5.0), Anchor::Start, 13.0, text);
        x += 62.0 + 7.4 * text.chars().count() as f64;
    };
    let line = |class: &'static str| move |svg: &mut Svg, x: f64| svg.line(class, (x, y), (x + 36.0, y));
    let square =
        |class: &'static str| move |svg: &mut Svg, x: f64| svg.rectangle(class, (x, y - 9.0), (36.0, 18.0), 1.0);
    entry(svg, &square("gpu"), "GPU");
    if nics {
        entry(svg, &square("nic"), "NIC");
    }
    entry(svg, &line("pcie"), "PCIe: generation, lanes");
    if links.fabric.is_some() || !links.pairs.is_empty() {
        entry(svg, &line("nvlink"), "NVLink: NV# is how many");
    }
    if !links.unknown.is_empty() {
        entry(svg, &line("unknown"), "whether there is NVLink is unknown");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_between_words_and_fit() {
        assert_eq!(shortened("RTX PRO 6000 Blackwell Server Edition", 13), "RTX PRO 6000…");
        assert_eq!(shortened("H100 80GB HBM3", 13), "H100 80GB…");
        assert_eq!(
            (shortened("A100 80GB PCI", 13), shortened("Überlangername", 13)),
            ("A100 80GB PCI".into(), "Überlangerna…".into())
        );
    }
}
