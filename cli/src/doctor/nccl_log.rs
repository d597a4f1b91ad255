//! Reads what NCCL prints with `NCCL_DEBUG=INFO`: by what each channel goes, and what that says.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{
    finding::{Finding, Outcome, Weight, list},
    private,
    settings::Settings,
};
use crate::topology::{
    address::Address,
    machine::Machine,
    nccl::{self, Decision, Level},
};

/// By what a channel goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Transport {
    P2p,
    /// By P2P through a third GPU.
    P2pIndirect,
    Shm,
    /// Through a NIC that reads GPUs' memory.
    NetGpuDirect,
    /// Through a NIC, by way of host memory.
    Net,
    /// By TCP.
    NetSocket,
    /// Through the switch's own network of a collective (SHARP).
    Collnet,
}

impl Transport {
    pub(super) fn name(self) -> &'static str {
        match self {
            Transport::P2p => "P2P",
            Transport::P2pIndirect => "P2P through a third GPU",
            Transport::Shm => "SHM",
            Transport::NetGpuDirect => "NET with GPUDirect RDMA",
            Transport::Net => "NET through host memory",
            Transport::NetSocket => "NET by TCP",
            Transport::Collnet => "COLLNET",
        }
    }

    /// Of what stands behind `via`.
    fn parse(via: &str) -> Option<Self> {
        let mut parts = via.split('/');
        let kind = parts.next()?;
        Some(match kind {
            "P2P" if via.contains("indirect") => Transport::P2pIndirect,
            "P2P" => Transport::P2p,
            "SHM" => Transport::Shm,
            "NET" if parts.next()? == "Socket" => Transport::NetSocket,
            "NET" if via.contains("GDRDMA") => Transport::NetGpuDirect,
            "NET" => Transport::Net,
            "COLLNET" | "CollNet" => Transport::Collnet,
            _ => return None,
        })
    }
}

/// A rank of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Rank {
    /// Of the hosts in the log, the how-manieth: names are left out.
    host: Option<usize>,
    /// Domain 0, as NCCL prints it.
    address: Option<Address>,
}

/// Two ranks.
type Ranks = (u32, u32);

/// What a log says.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    pub(super) version: Option<String>,
    /// Channels of each pair, as the sender has them.
    pub(super) channels: BTreeMap<Ranks, BTreeMap<Transport, BTreeSet<String>>>,
    ranks: BTreeMap<u32, Rank>,
    pub(super) hosts: usize,
    /// Whether switches sum; `None` if it isn't said.
    pub(super) nvls: Option<bool>,
    /// Channels by which switches sum.
    pub(super) nvls_channels: Option<u32>,
    warnings: Vec<String>,
    /// Variables that NCCL says were set.
    variables: Vec<(String, String)>,
    /// Lines about channels that were not understood, such as cut ones.
    pub(super) odd: usize,
}

/// The JSON of a log.
#[derive(Debug, Serialize)]
pub(super) struct Transports<'a> {
    nccl_version: Option<&'a str>,
    hosts: usize,
    nvls_available: Option<bool>,
    nvls_channels: Option<u32>,
    pairs: Vec<OfPair>,
}

/// How many channels go from a rank to another, and by what.
#[derive(Debug, Serialize)]
struct OfPair {
    from_rank: u32,
    to_rank: u32,
    channels: BTreeMap<Transport, usize>,
}

/// More warnings than these are not shown.
const WARNINGS: usize = 5;

impl Log {
    pub(super) fn parse(text: &str) -> Self {
        let mut log = Log::default();
        let mut hosts: Vec<String> = Vec::new();
        for line in text.lines() {
            let Some((head, said)) = ["NCCL INFO ", "NCCL WARN "].iter().find_map(|mark| line.split_once(mark)) else {
                if let Some((_, version)) = line.split_once("NCCL version ") {
                    log.version = Some(version.split_whitespace().next().unwrap_or_default().into());
                }
                continue;
            };
            let host = head.split_once(':').map(|(host, _)| host.trim_start());
            let host = host.map(|host| match hosts.iter().position(|known| known == host) {
                Some(index) => index,
                None => {
                    hosts.push(host.to_owned());
                    hosts.len() - 1
                }
            });
            if line.contains("NCCL WARN ") {
                log.warnings.push(said.trim().to_owned());
            } else {
                log.info(said.trim(), host);
            }
        }
        // Once all hosts are known: one may warn of another that has said nothing yet.
        log.warnings.iter_mut().for_each(|warning| *warning = private::of_warning(warning, &hosts));
        log.hosts = hosts.len();
        log
    }

    /// By what its channels go.
    pub(super) fn transports(&self) -> Transports<'_> {
        let pair = |(&(from_rank, to_rank), by): (&Ranks, &BTreeMap<Transport, BTreeSet<String>>)| OfPair {
            from_rank,
            to_rank,
            channels: by.iter().map(|(&transport, channels)| (transport, channels.len())).collect(),
        };
        Transports {
            nccl_version: self.version.as_deref(),
            hosts: self.hosts,
            nvls_available: self.nvls,
            nvls_channels: self.nvls_channels,
            pairs: self.channels.iter().map(pair).collect(),
        }
    }

    fn info(&mut self, said: &str, host: Option<usize>) {
        if let Some(rest) = said.strip_prefix("Channel ").filter(|rest| rest.contains("->") || rest.contains(" via ")) {
            if self.channel(rest, host).is_none() {
                self.odd += 1;
            }
        } else if let Some((name, value)) = said.split_once(" set by environment to ") {
            let value = value.split_whitespace().next().unwrap_or_default().trim_end_matches('.');
            self.variables.push((name.rsplit(' ').next().unwrap_or_default().into(), value.into()));
        } else if let Some((_, version)) = said.split_once("NCCL version ") {
            self.version = Some(version.split_whitespace().next().unwrap_or_default().into());
        } else if let Some((before, _)) = said.split_once(" nvls channels") {
            self.nvls_channels = before.rsplit([' ', ',']).next().and_then(|count| count.parse().ok());
        } else if said.starts_with("NVLS multicast support is") {
            self.nvls = Some(!said.contains("not available"));
        } else if let (Some(rank), Some(bus)) = (after(said, "rank"), after(said, "busId"))
            && let (Ok(rank), Some(address)) = (rank.parse(), address_of(bus))
        {
            let known: &mut Rank = self.ranks.entry(rank).or_default();
            (known.address, known.host) = (Some(address), host.or(known.host));
        }
    }

    /// `00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA`
    fn channel(&mut self, rest: &str, host: Option<usize>) -> Option<()> {
        let (channel, rest) = rest.split_once(" : ")?;
        let (ends, via) = rest.split_once(" via ")?;
        let (from, to) = ends.split_once(" -> ")?;
        let (to, direction) = to.split_once(' ').unwrap_or((to, ""));
        let rank = |end: &str| {
            let (rank, device) = end.split_once('[')?;
            Some((rank.trim().parse::<u32>().ok()?, device.strip_suffix(']')?.to_owned()))
        };
        let (from, to) = (rank(from)?, rank(to.trim())?);
        let transport = Transport::parse(via.trim())?;
        // The line is the sender's, unless it says that it receives.
        let speaker = if direction.contains("receive") { &to } else { &from };
        self.ranks.entry(speaker.0).or_default().host = host;
        for (rank, device) in [&from, &to] {
            // Versions before 2.17 have the bus here, later ones the number of the device.
            let known = self.ranks.entry(*rank).or_default();
            known.address = known.address.or_else(|| address_of(device).filter(|_| device.len() >= 4));
        }
        let channels = self.channels.entry((from.0, to.0)).or_default();
        channels.entry(transport).or_default().insert(channel.to_owned());
        Some(())
    }

    /// Where a rank's GPU is in this machine.
    fn gpu(&self, machine: &Machine, rank: u32) -> Option<usize> {
        let address = self.ranks.get(&rank)?.address?;
        machine.gpus.iter().position(|gpu| gpu.address == Some(address))
    }

    fn same_host(&self, (a, b): Ranks) -> bool {
        let host = |rank| self.ranks.get(&rank).and_then(|rank| rank.host);
        host(a).is_some() && host(a) == host(b)
    }

    /// Pairs of ranks that have such a channel, each once.
    fn pairs(&self, transport: Transport) -> Vec<Ranks> {
        let mut pairs: Vec<_> =
            self.channels.iter().filter(|(_, by)| by.contains_key(&transport)).map(|(pair, _)| *pair).collect();
        pairs.iter_mut().for_each(|pair| *pair = (pair.0.min(pair.1), pair.0.max(pair.1)));
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }
}

/// The word behind a word.
fn after<'a>(said: &'a str, word: &str) -> Option<&'a str> {
    let mut words = said.split_whitespace();
    words.find(|found| *found == word)?;
    words.next()
}

/// `1b000` as NCCL prints addresses: domain, bus, device and function in 20, 8, 8 and 4 bits.
fn address_of(bus: &str) -> Option<Address> {
    let number = u64::from_str_radix(bus, 16).ok()?;
    let domain = u32::try_from(number >> 20).ok()?;
    let (bus, device, function) = ((number >> 12) as u8, (number >> 4) as u8, number as u8 & 0xf);
    (device < 32 && function < 8).then_some(Address { domain, bus, device, function })
}

pub(super) fn check(log: &Log, machine: &Machine, level: Level, outcome: &mut Outcome) {
    if log.channels.is_empty() {
        outcome.unknown(
            "which transports NCCL took",
            "the log has no line about a channel: run with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,GRAPH,P2P,NET",
        );
    } else if log.odd > 0 {
        outcome.unknown(
            format!("{} lines of the log about channels", log.odd),
            "they are cut off, or of another version of NCCL",
        );
    }
    newer_than_driver(log, machine, outcome);
    let mut settings = Settings::default();
    for (name, value) in &log.variables {
        settings.add(name.clone(), value.clone(), "the run that the log is of");
    }
    let mut of_run = Outcome::default();
    super::settings::check(&settings, false, &mut of_run);
    // That none is worth a word is no news: a log doesn't have all variables.
    outcome.findings.append(&mut of_run.findings);
    shm(log, machine, level, &settings, outcome);
    net(log, outcome);
    let indirect = log.pairs(Transport::P2pIndirect);
    if !indirect.is_empty() {
        outcome.found(Finding {
            id: "log-p2p-indirect",
            weight: Weight::Moderate,
            title: format!("P2P goes through a third GPU between {}", ranks(&indirect)),
            evidence: evidence(log, &indirect),
            cost: "The third GPU's links carry it twice.".into(),
            remedy: vec!["Put ranks that are neighbours in the ring on GPUs that are connected.".into()],
        });
    }
    let none = log.nvls == Some(false) || log.nvls_channels == Some(0);
    if none && machine.gpus.iter().any(|gpu| gpu.compute_capability.is_some_and(|cc| cc >= (9, 0))) {
        outcome.found(Finding {
            id: "log-no-nvls",
            weight: Weight::Note,
            title: "NCCL has no NVLS".into(),
            evidence: vec![match log.nvls {
                Some(false) => "NVLS multicast support is not available".into(),
                _ => "0 nvls channels".into(),
            }],
            cost: "NVLink switches don't sum: large all-reduces take longer.".into(),
            remedy: vec!["It needs NVSwitches, a running fabric manager, and in a container /dev/nvidia-caps.".into()],
        });
    }
    if !log.warnings.is_empty() {
        let different: BTreeSet<_> = log.warnings.iter().cloned().collect();
        outcome.found(Finding {
            id: "log-warnings",
            weight: Weight::Moderate,
            title: format!("NCCL warns {} times", log.warnings.len()),
            evidence: different.into_iter().take(WARNINGS).collect(),
            cost: "NCCL warns of what fails, and seldom of less.".into(),
            remedy: vec!["Begin with the first warning in the log: the later ones often follow from it.".into()],
        });
    }
}

/// NCCL that was built for a CUDA which the driver doesn't have, as `2.28.3+cuda13.0` says. Within a major version it
/// runs.
fn newer_than_driver(log: &Log, machine: &Machine, outcome: &mut Outcome) {
    let built = log.version.as_deref().and_then(|version| {
        let (major, minor) = version.split_once("+cuda")?.1.split_once('.')?;
        Some((major.parse::<i32>().ok()?, minor.parse::<i32>().ok()?))
    });
    let (Some((major, minor)), Some(driver)) = (built, machine.driver.cuda.filter(|&cuda| cuda > 0)) else { return };
    if major <= driver / 1000 {
        return;
    }
    outcome.found(Finding {
        id: "nccl-newer-than-driver",
        weight: Weight::Severe,
        title: format!(
            "NCCL is built for CUDA {major}.{minor}, and the driver has {}.{}",
            driver / 1000,
            driver % 1000 / 10
        ),
        evidence: vec![format!("NCCL {}", log.version.as_deref().unwrap_or_default())],
        cost: "Its kernels don't load, unless the compatibility package of that CUDA is there (cuda-compat).".into(),
        remedy: vec!["Update the driver, or take NCCL built for the driver's CUDA.".into()],
    });
}

fn shm(log: &Log, machine: &Machine, level: Level, settings: &Settings, outcome: &mut Outcome) {
    // The run's own settings, where the log tells them.
    let level = match (settings.get("NCCL_P2P_DISABLE"), settings.get("NCCL_P2P_LEVEL")) {
        (None, None) => level,
        (disable, named) => nccl::level(machine, disable, named),
    };
    let mut by_cause: BTreeMap<String, (Weight, Vec<Ranks>, String)> = BTreeMap::new();
    for pair in log.pairs(Transport::Shm) {
        let gpus = log.gpu(machine, pair.0).zip(log.gpu(machine, pair.1)).filter(|(a, b)| a != b);
        let (cause, weight, remedy) = match gpus.map(|pair| nccl::decide(machine, pair, level)) {
            Some(Decision::P2p) => (
                "SHM where P2P was possible: the driver grants P2P, and the path is within the level".to_owned(),
                Weight::Severe,
                "Ranks in containers of their own need one /dev/shm and one IPC namespace (--ipc=host) for P2P; look \
                 in the log for `P2P is disabled`.",
            ),
            Some(Decision::TooFar(path)) => (
                format!("SHM by NCCL's rule: the path is {path}, beyond {}, from {}", level.path, level.from),
                Weight::Severe,
                "Set NCCL_P2P_LEVEL to the path, and compare. NCCL never reads ACS: it is no cause of this.",
            ),
            Some(Decision::Refused(status)) => (
                format!("SHM since the driver grants no P2P: {}", status.meaning()),
                Weight::Severe,
                "See p2p-refused.",
            ),
            Some(Decision::Unknown) | None => (
                "SHM, and whether P2P was possible is unknown: the log's GPUs are not matched with this machine's"
                    .to_owned(),
                Weight::Moderate,
                "Run `peersum doctor --nccl-log` on the machine of the log, or with --root on a copy of its /sys.",
            ),
        };
        by_cause.entry(cause).or_insert((weight, Vec::new(), remedy.to_owned())).1.push(pair);
    }
    for (cause, (weight, pairs, remedy)) in by_cause {
        let mut lines = evidence(log, &pairs);
        lines.insert(0, cause.clone());
        outcome.found(Finding {
            id: "log-shm",
            weight,
            title: format!("NCCL goes through host memory (SHM) between {}", ranks(&pairs)),
            evidence: lines,
            cost: "Two PCIe transfers for one, and both compete for the memory of the host.".into(),
            remedy: vec![remedy],
        });
    }
}

fn net(log: &Log, outcome: &mut Outcome) {
    let mut say = |id, weight, title: String, pairs: &[Ranks], cost: &str, remedy: &str| {
        let (evidence, remedy) = (evidence(log, pairs), vec![remedy.to_owned()]);
        outcome.found(Finding { id, weight, title, evidence, cost: cost.into(), remedy });
    };
    let all = [Transport::NetSocket, Transport::Net, Transport::NetGpuDirect].map(|transport| log.pairs(transport));
    let within: BTreeSet<_> = all.iter().flatten().copied().filter(|&pair| log.same_host(pair)).collect();
    let within: Vec<_> = within.into_iter().collect();
    if !within.is_empty() {
        say(
            "log-net-within-host",
            Weight::Severe,
            format!("ranks of one host talk by the network: {}", ranks(&within)),
            &within,
            "The network is slower than P2P and than host memory.",
            "Look for NCCL_SHM_DISABLE and NCCL_P2P_DISABLE; containers of one host need one /dev/shm, and the same \
             host id.",
        );
    }
    if !all[0].is_empty() {
        say(
            "log-tcp",
            Weight::Severe,
            format!("NCCL talks by TCP between {}", ranks(&all[0])),
            &all[0],
            "A socket carries a few GB/s, and takes the processor's time.",
            "Look why NET/IB was not taken: `NET/IB : No device found`, NCCL_IB_DISABLE, /dev/infiniband, NCCL_IB_HCA.",
        );
    }
    if !all[1].is_empty() {
        say(
            "log-no-gdrdma",
            Weight::Moderate,
            format!("the NICs don't read GPUs' memory between {}", ranks(&all[1])),
            &all[1],
            "Messages between nodes go through host memory.",
            "Load nvidia_peermem, or have DMA-BUF; NICs beyond PXB need NCCL_NET_GDR_LEVEL.",
        );
    }
}

fn ranks(pairs: &[Ranks]) -> String {
    format!("ranks {}", list(pairs.iter().map(|(a, b)| format!("{a}-{b}"))))
}

/// How many channels the first few of these pairs have, and by what.
fn evidence(log: &Log, pairs: &[Ranks]) -> Vec<String> {
    let lines = pairs.iter().flat_map(|&(a, b)| [(a, b), (b, a)]).filter_map(|pair| {
        let by = log.channels.get(&pair)?;
        let by: Vec<_> =
            by.iter().map(|(transport, channels)| format!("{} by {}", channels.len(), transport.name())).collect();
        Some(format!("rank {} to {}: channels: {}", pair.0, pair.1, by.join(", ")))
    });
    lines.take(4).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::topology::{
        fixtures::{self, EPYC8, H200X8, PCIE4},
        read,
        source::Folder,
    };

    /// Lines as NCCL prints them, between two GPUs of a machine.
    fn log(buses: [&str; 2], via: &str) -> String {
        let mut text = String::from("box:100:100 [0] NCCL INFO NCCL version 2.27.3+cuda12.9\n");
        for (rank, bus) in buses.iter().enumerate() {
            text += &format!(
                "box:{0}:20{0} [{0}] NCCL INFO ncclCommInitRank comm 0x55 rank {0} nranks 2 cudaDev {0} nvmlDev {0} \
                 busId {bus} \
                 commId 0xab - Init START\n",
                rank
            );
        }
        for (from, to) in [(0, 1), (1, 0)] {
            for channel in 0..2 {
                text += &format!(
                    "box:{from}:20{from} [{from}] NCCL INFO Channel {channel:02}/0 : {from}[{from}] -> {to}[{to}] via \
                     {via}\n"
                );
            }
        }
        text
    }

    fn findings(fixture: &str, text: &str) -> Outcome {
        let folder = fixtures::unpack(fixture);
        let machine = read::read(&Folder::new(folder.path()).unwrap());
        let mut outcome = Outcome::default();
        check(&Log::parse(text), &machine, nccl::level(&machine, None, None), &mut outcome);
        outcome
    }

    #[test]
    fn nccl_of_a_later_cuda_than_the_driver_s_is_said() {
        let p2p = log(["19000", "1a000"], "P2P/CUMEM");
        assert_eq!(findings(&PCIE4.replace("nvml 580.95.05 13000", "nvml 550.54.14 12040"), &p2p), Outcome::default());
        let later = findings(
            &PCIE4.replace("nvml 580.95.05 13000", "nvml 550.54.14 12040"),
            &p2p.replace("2.27.3+cuda12.9", "2.28.3+cuda13.0"),
        );
        assert_eq!(later.findings[0].title, "NCCL is built for CUDA 13.0, and the driver has 12.4");
    }

    #[test]
    fn shm_where_p2p_was_possible_is_said() {
        let outcome = findings(PCIE4, &log(["19000", "1a000"], "SHM/direct/direct"));
        assert_eq!(outcome.findings.len(), 1, "{outcome:?}");
        let finding = &outcome.findings[0];
        assert_eq!((finding.id, finding.weight), ("log-shm", Weight::Severe));
        assert!(finding.evidence[0].contains("SHM where P2P was possible"), "{finding:?}");
        assert_eq!(finding.evidence[1], "rank 0 to 1: channels: 2 by SHM");
    }

    #[test]
    fn shm_by_nccl_s_own_rule_is_told_from_it() {
        let outcome = findings(EPYC8, &log(["1000", "21000"], "SHM/direct/direct"));
        assert!(outcome.findings[0].evidence[0].contains("by NCCL's rule: the path is PHB, beyond PXB"), "{outcome:?}");
        let elsewhere = findings(PCIE4, &log(["77000", "78000"], "SHM/direct/direct"));
        assert!(elsewhere.findings[0].evidence[0].contains("unknown"), "{elsewhere:?}");
        assert_eq!(elsewhere.findings[0].weight, Weight::Moderate);
    }

    #[test]
    fn p2p_is_nothing_to_say() {
        for via in ["P2P/CUMEM/read", "P2P/IPC", "P2P/direct pointer/read"] {
            let outcome = findings(H200X8, &log(["18000", "3b000"], via));
            assert_eq!(outcome, Outcome::default(), "{via}");
        }
        assert_eq!(Log::parse(&log(["18000", "3b000"], "P2P/IPC")).version.as_deref(), Some("2.27.3+cuda12.9"));
    }

    #[test]
    fn networks_are_told_apart() {
        let line =
            |host: &str, ends: &str, via: &str| format!("{host}:1:2 [0] NCCL INFO Channel 00/0 : {ends} via {via}\n");
        let ids = |text: &str| findings(H200X8, text).findings.iter().map(|finding| finding.id).collect::<Vec<_>>();
        let two = |via: &str| line("a", "0[0] -> 8[0] [send]", via) + &line("b", "0[0] -> 8[0] [receive]", via);
        assert_eq!(ids(&two("NET/IB/0/GDRDMA")), Vec::<&str>::new());
        assert_eq!(ids(&two("NET/AWS Libfabric/0/GDRDMA/Shared")), Vec::<&str>::new());
        assert_eq!(ids(&two("NET/IB/0")), ["log-no-gdrdma"]);
        assert_eq!(ids(&two("NET/Socket/0")), ["log-tcp"]);
        let one = line("a", "0[0] -> 1[1] [send]", "NET/IB/0/GDRDMA")
            + &line("a", "0[0] -> 1[1] [receive]", "NET/IB/0/GDRDMA");
        assert_eq!(ids(&one), ["log-net-within-host"]);
        assert_eq!(ids(&line("a", "0[0] -> 1[1]", "P2P/indirect/2[2]")), ["log-p2p-indirect"]);
    }

    #[test]
    fn variables_and_warnings_of_the_run_are_found_and_hosts_are_left_out() {
        let text = log(["19000", "1a000"], "SHM/direct/direct")
            + "box:1:2 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1.\n"
            + "box:1:2 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to box<1234> failed\n"
            + "box:1:2 [0] misc/socket.cc:484 NCCL WARN Connect to 10.1.2.3<1234> failed\n";
        let outcome = findings(PCIE4, &text);
        let ids: Vec<_> = outcome.findings.iter().map(|finding| finding.id).collect();
        assert_eq!(ids, ["variable", "log-shm", "log-warnings"]);
        assert!(outcome.findings[1].evidence[0].contains("beyond LOC, from NCCL_P2P_DISABLE"), "{outcome:?}");
        let shown = format!("{outcome:?}");
        assert!(!shown.contains("box") && !shown.contains("10.1.2.3"), "{shown}");
        assert!(shown.contains("Connect to host0<1234> failed") && shown.contains("(address)<1234>"), "{shown}");
    }

    #[test]
    fn whether_switches_sum_is_read() {
        let line = |nvls: &str| {
            let said = format!(
                "box:1:2 [0] NCCL INFO 24 coll channels, 0 collnet channels, {nvls} nvls channels, 32 p2p channels\n"
            );
            log(["18000", "3b000"], "P2P/CUMEM") + &said
        };
        assert_eq!(Log::parse(&line("16")).nvls_channels, Some(16));
        assert_eq!(findings(H200X8, &line("16")), Outcome::default());
        assert_eq!(findings(H200X8, &line("0")).findings[0].id, "log-no-nvls");
        let not = "box:1:2 [0] NCCL INFO NVLS multicast support is not available on dev 0\n";
        assert_eq!(findings(H200X8, &(line("0") + not)).findings[0].id, "log-no-nvls");
        // Cards without switches have none.
        assert_eq!(findings(PCIE4, &log(["19000", "1a000"], "P2P/IPC")), Outcome::default());
    }

    #[test]
    fn a_log_that_says_nothing_is_unknown_and_not_fine() {
        for text in ["", "hello\n", "box:1:2 [0] NCCL INFO Bootstrap : Using eth0\n"] {
            let outcome = findings(PCIE4, text);
            assert!(outcome.unknown[0].why.contains("NCCL_DEBUG=INFO"), "{text}");
            assert_eq!(outcome.exit_code(), 2);
        }
        let cut =
            findings(PCIE4, &(log(["19000", "1a000"], "P2P/IPC") + "box:1:2 [0] NCCL INFO Channel 07/0 : 0[0] -> 1["));
        assert_eq!((cut.findings.len(), cut.unknown.len()), (0, 1), "{cut:?}");
    }

    proptest! {
        #[test]
        fn no_log_breaks_it(text in "(box:1:2 \\[0\\] |NCCL (INFO|WARN) |Channel |[0-9]{1,3}/0 : |[0-9]\\[[0-9a-f]{1,6}\\]| -> | via |SHM|P2P/IPC|NET/IB/0|busId |rank |[0-9a-f]{0,20}|\n|\\PC){0,60}") {
            let mut outcome = Outcome::default();
            let machine = Machine::default();
            check(&Log::parse(&text), &machine, nccl::level(&machine, None, None), &mut outcome);
        }
    }
}
