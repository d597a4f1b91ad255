//! Which groups of GPUs are measured, and with what switched off.

use serde::Serialize;

use crate::{
    p2p::theory::{self, Rate},
    topology::{machine::Machine, matrix},
};

/// What is between the ranks of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Path {
    P2p,
    /// NCCL without P2P: through memory of the host's.
    HostMemory,
    /// NCCL without that either: through the network, which is the host's own.
    Network,
}

impl Path {
    /// What a run's environment has.
    pub(crate) fn variables(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Path::P2p => &[],
            Path::HostMemory => &[("NCCL_P2P_DISABLE", "1")],
            Path::Network => &[("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Path::P2p => "P2P on",
            Path::HostMemory => "P2P off",
            Path::Network => "P2P and host memory off",
        }
    }
}

/// A group of GPUs, and what is between them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Tier {
    pub(crate) name: String,
    /// CUDA's numbers.
    pub(crate) devices: Vec<usize>,
    /// Such as `NV18`; of several pairs, the worst.
    pub(crate) connection: Option<String>,
    pub(crate) path: Path,
    /// The least of its pairs.
    pub(crate) theory: Option<Rate>,
}

impl Tier {
    /// Whether any device has several of the ranks.
    pub(super) fn shares_devices(&self) -> bool {
        (1..self.devices.len()).any(|rank| self.devices[..rank].contains(&self.devices[rank]))
    }

    /// Whether one device has all of the ranks, so that nothing goes over a link whatever is switched off.
    pub(super) fn is_one_device(&self) -> bool {
        self.devices.windows(2).all(|pair| pair[0] == pair[1])
    }
}

/// A device: CUDA's number, and its place among the machine's GPUs where that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) place: Option<usize>,
}

/// What is measured: a pair in one NUMA node, one across nodes, the one that is farthest apart, or all pairs; then the
/// whole group; then without P2P. Groups that are alike stand once.
pub(crate) fn tiers(machine: Option<&Machine>, devices: &[Device], all_pairs: bool) -> Vec<Tier> {
    let count = devices.len();
    let pairs: Vec<_> = (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b))).collect();
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    let mut add = |name: String, mut places: Vec<usize>| {
        places.sort_unstable();
        if !groups.iter().any(|(_, known)| *known == places) {
            groups.push((name, places));
        }
    };
    let shared = |&(a, b): &(usize, usize)| devices[a].ordinal == devices[b].ordinal;
    if all_pairs {
        pairs.iter().for_each(|&(a, b)| add(format!("pair {a}-{b}"), vec![a, b]));
    } else {
        let nodes = |&(a, b): &(usize, usize)| {
            let machine = machine?;
            Some((machine.numa_of(devices[a].place?)?, machine.numa_of(devices[b].place?)?))
        };
        // By rate, and by distance in the PCI tree where that is the same, as below a switch of NVLink's.
        let distance = |&(a, b): &(usize, usize)| {
            let connection = matrix::gpus(machine?, (devices[a].place?, devices[b].place?));
            Some((rate(machine, devices, a, b, Path::P2p).map(|rate| -rate.gb_per_s as i64), connection.pci))
        };
        let mut known: Vec<_> = pairs.iter().filter(|pair| !shared(pair)).copied().collect();
        known.sort_by_key(distance);
        let near = known.iter().find(|pair| nodes(pair).is_some_and(|(a, b)| a == b));
        let across = known.iter().find(|pair| nodes(pair).is_some_and(|(a, b)| a != b));
        let far = known.last();
        for (name, pair) in
            [("pair in one NUMA node", near), ("pair across NUMA nodes", across), ("farthest pair", far)]
        {
            if let Some(&(a, b)) = pair {
                add(name.into(), vec![a, b]);
            }
        }
        if let Some(&(a, b)) = pairs.iter().find(|pair| shared(pair)).filter(|_| known.is_empty()) {
            add("two ranks on one device".into(), vec![a, b]);
        }
    }
    if count > 1 {
        let name = if count == 2 { "both" } else { "all" };
        add(format!("{name} {count}"), (0..count).collect());
    }
    let first = groups.first().cloned();
    let last = groups.last().cloned();
    let mut tiers: Vec<Tier> =
        groups.iter().map(|(name, places)| tier(machine, devices, name, places, Path::P2p)).collect();
    for path in [Path::HostMemory, Path::Network] {
        // The whole group as well as a pair: they share the host's memory.
        let mut groups: Vec<_> = first.iter().chain(&last).collect();
        groups.dedup();
        if path == Path::Network {
            groups.truncate(1);
        }
        tiers.extend(groups.into_iter().map(|(name, places)| tier(machine, devices, name, places, path)));
    }
    tiers
}

fn tier(machine: Option<&Machine>, devices: &[Device], name: &str, places: &[usize], path: Path) -> Tier {
    let pairs = places.iter().enumerate().flat_map(|(index, &a)| places[index + 1..].iter().map(move |&b| (a, b)));
    let pairs: Vec<_> = pairs.collect();
    let rates: Option<Vec<_>> = pairs.iter().map(|&(a, b)| rate(machine, devices, a, b, path)).collect();
    let theory = rates.and_then(|rates| rates.into_iter().min_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s)));
    let connection = pairs
        .iter()
        .filter(|&&(a, b)| devices[a].ordinal != devices[b].ordinal)
        .filter_map(|&(a, b)| {
            let connection = matrix::gpus(machine?, (devices[a].place?, devices[b].place?));
            // Those without NVLink are worse, then those with fewer, then by distance.
            Some(((std::cmp::Reverse(connection.nvlinks), connection.pci), connection.to_string()))
        })
        .max()
        .map(|(_, name)| name);
    Tier {
        name: match path {
            Path::P2p => name.to_owned(),
            off => format!("{name}, {}", off.name()),
        },
        devices: places.iter().map(|&place| devices[place].ordinal).collect(),
        connection,
        path,
        theory,
    }
}

fn rate(machine: Option<&Machine>, devices: &[Device], a: usize, b: usize, path: Path) -> Option<Rate> {
    if devices[a].ordinal == devices[b].ordinal || path == Path::Network {
        return None;
    }
    theory::between(machine?, devices[a].place?, devices[b].place?, path == Path::P2p)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{
        fixtures::{self, BRIDGES4, EPYC2X2, H200X8},
        read,
        source::Folder,
    };

    fn names(fixture: &str, count: usize) -> Vec<(String, Vec<usize>, Option<f64>)> {
        let folder = fixtures::unpack(fixture);
        let machine = read::read(&Folder::new(folder.path()).unwrap());
        let devices: Vec<_> = (0..count).map(|ordinal| Device { ordinal, place: Some(ordinal) }).collect();
        let tiers = tiers(Some(&machine), &devices, false);
        tiers.into_iter().map(|tier| (tier.name, tier.devices, tier.theory.map(|rate| rate.gb_per_s.round()))).collect()
    }

    #[test]
    fn a_pair_of_each_kind_then_all_then_without_p2p() {
        let all: Vec<_> = (0..8).collect();
        assert_eq!(
            names(H200X8, 8),
            [
                ("pair in one NUMA node".into(), vec![0, 1], Some(450.0)),
                ("pair across NUMA nodes".into(), vec![0, 4], Some(450.0)),
                ("farthest pair".into(), vec![3, 7], Some(450.0)),
                ("all 8".into(), all.clone(), Some(450.0)),
                ("pair in one NUMA node, P2P off".into(), vec![0, 1], Some(63.0)),
                ("all 8, P2P off".into(), all, Some(63.0)),
                ("pair in one NUMA node, P2P and host memory off".into(), vec![0, 1], None),
            ]
        );
    }

    #[test]
    fn pairs_with_a_bridge_go_before_those_without() {
        let names = names(BRIDGES4, 4);
        assert_eq!((names[0].0.as_str(), &names[0].1), ("pair in one NUMA node", &vec![0, 1]));
        assert_eq!(names[0].2, Some(300.0));
        let all = names.iter().find(|(name, ..)| name == "all 4").unwrap();
        // The slowest pair bounds the group.
        assert!(all.2.unwrap() < 64.0, "{names:?}");
    }

    #[test]
    fn two_sockets_have_a_pair_in_one_and_a_pair_across() {
        let names = names(EPYC2X2, 4);
        assert_eq!(names[0].1, [0, 1]);
        assert_eq!((names[1].0.as_str(), names[1].1.len()), ("pair across NUMA nodes", 2));
    }

    #[test]
    fn one_device_twice_is_a_rehearsal_and_one_device_is_nothing() {
        let device = Device { ordinal: 0, place: None };
        let two = tiers(None, &[device, device], false);
        assert_eq!(two[0].name, "two ranks on one device");
        assert!(two.iter().all(|tier| tier.theory.is_none() && tier.devices == [0, 0]));
        assert!(tiers(None, &[device], false).is_empty());
    }

    #[test]
    fn all_pairs_are_there_when_they_are_asked_for() {
        let devices: Vec<_> = (0..3).map(|ordinal| Device { ordinal, place: None }).collect();
        let names: Vec<_> = tiers(None, &devices, true).into_iter().map(|tier| tier.name).collect();
        assert_eq!(names[..4], ["pair 0-1", "pair 0-2", "pair 1-2", "all 3"]);
    }
}
