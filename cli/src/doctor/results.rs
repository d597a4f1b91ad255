//! What results of nccl-tests or of `peersum perf` say: wrong elements, short messages that take too long, long ones
//! that stay below the links, and nodes that don't add up.

use super::finding::{Finding, Outcome, Weight};
use crate::{
    model::runs::{Point, Run},
    sizes::Size,
    topology::{
        machine::{Machine, pcie_gb_per_s},
        matrix,
    },
};

/// Messages of at most this size are bound by launch and hops alone.
const SHORT: u64 = 8 << 10;
/// From this size on they are bound by links.
const LONG: u64 = 16 << 20;

/// Less than this part of the link's rate is too little: NCCL reaches 70 to 80 % of NVLink and of PCIe.
const ENOUGH: f64 = 0.5;
/// Short messages that take more times what they should are too slow.
const TOO_SLOW: f64 = 2.0;
/// Bandwidth that falls to less of its best as messages grow.
const FALLEN: f64 = 0.7;
/// µs of a call of NCCL's, apart from its steps: measured, 23 between 8 ranks of an NVLink node.
const CALL_US: f64 = 20.0;
/// µs of a step of its ring by NVLink, by PCIe or host memory, and between nodes.
const STEP_US: [f64; 3] = [0.7, 3.0, 15.0];
/// GB/s that TCP comes to, at most.
const TCP_GB_PER_S: f64 = 5.0;

/// What the ranks of a run could send, in one direction.
#[derive(Clone, Debug, PartialEq)]
struct Link {
    gb_per_s: f64,
    what: String,
    nvlink: bool,
}

/// Looks at each run.
pub(super) fn check(runs: &[Run], machine: &Machine, given: Option<f64>, outcome: &mut Outcome) {
    for run in runs {
        let before = (outcome.findings.len(), outcome.unknown.len());
        wrong(run, outcome);
        if run.skipped > 0 {
            outcome.unknown(
                format!("{} lines of the results ({})", run.skipped, run.title()),
                "they have no whole measurement",
            );
        }
        let nodes = run.nodes.unwrap_or(1);
        let link = given.map(|gb_per_s| Link { gb_per_s, what: "given by --link".into(), nvlink: false });
        let link = link.or_else(|| link_of(machine, run));
        short(run, link.as_ref(), outcome);
        falls(run, outcome);
        if nodes > 1 {
            between_nodes(run, runs, machine, outcome);
        } else {
            long(run, link.as_ref(), outcome);
        }
        if before == (outcome.findings.len(), outcome.unknown.len()) {
            outcome.fine(format!("results: {}: {}", run.title(), figures(run)));
        }
    }
}

/// Shortest and longest, in a line.
pub(super) fn figures(run: &Run) -> String {
    let first = run.points.first().map(|point| format!("{} {:.2} us", Size(point.bytes), point.us));
    let last = best(run).map(|(point, bus)| format!("at best {bus:.1} GB/s at {}", Size(point.bytes)));
    [first, last].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn best(run: &Run) -> Option<(Point, f64)> {
    let points = run.points.iter().filter_map(|point| Some((*point, run.bus(point)?)));
    points.max_by(|a, b| a.1.total_cmp(&b.1))
}

fn wrong(run: &Run, outcome: &mut Outcome) {
    let wrong: Vec<_> = run.points.iter().filter(|point| point.wrong.is_some_and(|wrong| wrong > 0)).collect();
    let Some(first) = wrong.first() else { return };
    outcome.found(Finding {
        id: "results-wrong",
        weight: Weight::Severe,
        title: format!("results are wrong at {} of {} sizes", wrong.len(), run.points.len()),
        evidence: vec![
            run.title(),
            format!("the first: {}, {} wrong elements", Size(first.bytes), first.wrong.unwrap_or(0)),
        ],
        cost: "What was summed is not what was sent. No time or bandwidth of such a run means anything.".into(),
        remedy: vec![
            "`peersum p2p` shows the pairs whose data don't arrive. Then look at the IOMMU, ACS and P2P findings here."
                .into(),
            "Run again with P2P off (NCCL_P2P_DISABLE=1): if that is right, it is P2P that is not.".into(),
        ],
    });
}

/// What this machine's GPUs could send, if the run can be of it.
fn link_of(machine: &Machine, run: &Run) -> Option<Link> {
    let ranks = run.ranks? as usize;
    let nodes = run.nodes.unwrap_or(1).max(1) as usize;
    let of_node = ranks.div_ceil(nodes);
    let named = |gpu: &str| machine.gpus.iter().any(|here| here.name.as_deref().is_some_and(|name| name == gpu));
    if of_node < 2 || of_node > machine.gpus.len() || run.gpu.as_deref().is_some_and(|gpu| !named(gpu)) {
        return None;
    }
    // Which GPUs they were isn't said where not all were; those that are connected best speak for it.
    let rates = machine.gpu_pairs().map(|pair| pair_rate(machine, pair)).collect::<Option<Vec<_>>>()?;
    let by_rate = |a: &&Link, b: &&Link| a.gb_per_s.total_cmp(&b.gb_per_s);
    let all = of_node == machine.gpus.len();
    let link = if all { rates.iter().min_by(by_rate) } else { rates.iter().max_by(by_rate) };
    link.cloned()
}

/// Of a pair, one way.
fn pair_rate(machine: &Machine, (a, b): (usize, usize)) -> Option<Link> {
    let connection = matrix::gpus(machine, (a, b));
    if connection.linked() {
        let links = connection.nvlinks?;
        let each = machine.gpus[a].nvlink_rate()?.min(machine.gpus[b].nvlink_rate()?);
        let gb_per_s = each * f64::from(links);
        return Some(Link { gb_per_s, what: format!("{links} NVLinks of {each:.1} GB/s"), nvlink: true });
    }
    let pcie = |gpu: usize| {
        let link = machine.link(machine.function_of(gpu)?.1);
        Some(pcie_gb_per_s(link.speed_max?, link.width_max?))
    };
    let gb_per_s = pcie(a)?.min(pcie(b)?);
    Some(Link { gb_per_s, what: "the PCIe link".into(), nvlink: false })
}

fn short(run: &Run, link: Option<&Link>, outcome: &mut Outcome) {
    let Some(ranks) = run.ranks.filter(|&ranks| ranks > 1) else {
        return outcome
            .unknown("whether short messages take too long", "the results don't say how many ranks there were");
    };
    let Some(point) = run.points.iter().filter(|point| point.bytes <= SHORT).min_by(|a, b| a.us.total_cmp(&b.us))
    else {
        return;
    };
    let nodes = run.nodes.unwrap_or(1).max(1);
    let step = STEP_US[usize::from(!link.is_some_and(|link| link.nvlink))];
    let of_node = f64::from(ranks.div_ceil(nodes));
    let should = CALL_US + 2.0 * (of_node - 1.0) * step + 2.0 * f64::from(nodes).log2() * STEP_US[2];
    if point.us <= TOO_SLOW * should {
        return;
    }
    outcome.found(Finding {
        id: "results-short-slow",
        weight: Weight::Moderate,
        title: format!("short messages take {:.0} us", point.us),
        evidence: vec![
            run.title(),
            format!(
                "{}: {:.2} us, where some {should:.0} us are usual (a call {CALL_US:.0}, and {:.0} steps)",
                Size(point.bytes),
                point.us,
                2.0 * (of_node - 1.0) + 2.0 * f64::from(nodes).log2()
            ),
        ],
        cost: "Decoding of language models reduces messages of this size, hundreds of times a token.".into(),
        remedy: vec![
            "Launch: replay calls from a CUDA graph; unset CUDA_LAUNCH_BLOCKING; keep each rank's process on its GPU's \
             node, on cores that no other rank has."
                .into(),
            "Protocol: unset NCCL_PROTO and NCCL_ALGO, and compare NCCL_PROTO=LL with the rest; `NCCL_DEBUG=INFO` says \
             whether channels go by P2P."
                .into(),
            "`peersum perf --compare nccl -b 1K -e 256K` shows what this machine can do.".into(),
        ],
    });
}

fn long(run: &Run, link: Option<&Link>, outcome: &mut Outcome) {
    let long: Vec<_> = run
        .points
        .iter()
        .filter(|point| point.bytes >= LONG)
        .filter_map(|point| Some((point, run.bus(point)?)))
        .collect();
    let Some((point, bus)) = long.iter().max_by(|a, b| a.1.total_cmp(&b.1)) else { return };
    let Some(link) = link else {
        return outcome.unknown(
            format!("how near {bus:.1} GB/s at {} is to the links ({})", Size(point.bytes), run.title()),
            "the results are of other GPUs than this machine's, or its links are not known: give --link GB/s, one way",
        );
    };
    if *bus >= ENOUGH * link.gb_per_s {
        return;
    }
    let percent = 100.0 * bus / link.gb_per_s;
    let mut remedy = vec![
        "Topology: `peersum topo` and `peersum p2p` show which pairs are slow; a ring is as slow as its slowest."
            .to_owned(),
        "ACS and P2P: the findings here on acs-redirect, nccl-p2p-level and p2p-refused; `NCCL_DEBUG=INFO` and \
         --nccl-log say whether channels go through host memory."
            .into(),
        "Affinity: each rank's process on its GPU's NUMA node; NCCL_MAX_NCHANNELS and NCCL_MAX_CTAS unset.".into(),
    ];
    if link.nvlink && *bus < 64.0 {
        remedy.insert(0, "It is what PCIe or host memory carry, so it seems not to go by NVLink at all.".into());
    }
    outcome.found(Finding {
        id: "results-long-slow",
        weight: Weight::Severe,
        title: format!("long messages reach {percent:.0} % of the link"),
        evidence: vec![
            run.title(),
            format!(
                "{}: {bus:.1} GB/s of bus bandwidth, of {:.0} GB/s one way ({})",
                Size(point.bytes),
                link.gb_per_s,
                link.what
            ),
        ],
        cost: "Training and prefill are bound by it.".into(),
        remedy,
    });
}

/// Bandwidth that falls again as messages grow.
fn falls(run: &Run, outcome: &mut Outcome) {
    let Some((peak, most)) = best(run) else { return };
    let last = run.points.last().and_then(|point| Some((point, run.bus(point)?)));
    let Some((last, bus)) = last.filter(|(point, bus)| point.bytes >= LONG && *bus < FALLEN * most) else { return };
    outcome.found(Finding {
        id: "results-fall",
        weight: Weight::Moderate,
        title: format!("bandwidth falls from {most:.1} to {bus:.1} GB/s as messages grow"),
        evidence: vec![
            run.title(),
            format!("{}: {most:.1} GB/s; {}: {bus:.1} GB/s", Size(peak.bytes), Size(last.bytes)),
        ],
        cost: "Links don't slow down with size: something else begins to.".into(),
        remedy: vec![
            "Look for clocks that drop (`nvidia-smi -q -d PERFORMANCE`), for other work on the GPUs or the network, \
             and for congestion of switches (ECN, PFC counters)."
                .into(),
            "An algorithm that is forced (NCCL_ALGO, a tuner) and wrong for long messages does the same.".into(),
        ],
    });
}

fn between_nodes(run: &Run, runs: &[Run], machine: &Machine, outcome: &mut Outcome) {
    let Some((point, bus)) = best(run).filter(|(point, _)| point.bytes >= LONG) else { return };
    let nodes = run.nodes.unwrap_or(1);
    let nics: Vec<f64> = machine
        .nics
        .iter()
        .filter(|nic| nic.rdma)
        .filter_map(|nic| nic.speed)
        .map(|mbit| f64::from(mbit) / 8e3)
        .collect();
    let (rail, rails): (f64, f64) = (nics.iter().copied().fold(0.0, f64::max), nics.iter().sum());
    let mut evidence = vec![run.title(), format!("{}: {bus:.1} GB/s of bus bandwidth", Size(point.bytes))];
    // The same collective within a node.
    let within = runs.iter().filter(|other| other.nodes == Some(1) && other.collective == run.collective);
    let within = within.filter_map(best).max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((_, one)) = within {
        evidence.push(format!("within a node {one:.1} GB/s, so {nodes} nodes have {:.0} % of that", 100.0 * bus / one));
    }
    if !nics.is_empty() {
        evidence.push(format!("this machine has {} RDMA NICs, {rails:.0} GB/s in all", nics.len()));
    }
    let mut say = |id, weight, title: String, cost: &str, remedy: &[&str]| {
        let remedy = remedy.iter().map(|line| (*line).to_owned()).collect();
        outcome.found(Finding { id, weight, title, evidence: evidence.clone(), cost: cost.into(), remedy });
    };
    // Where a NIC carries little more itself, it may be the NIC.
    if bus < TCP_GB_PER_S && (nics.is_empty() || rail > 2.0 * TCP_GB_PER_S) {
        say(
            "results-nodes-tcp",
            Weight::Severe,
            format!("{nodes} nodes come to {bus:.1} GB/s, which is what TCP carries"),
            "All nodes wait for the slowest link, and the processors copy what the NICs could.",
            &[
                "Look in NCCL_DEBUG=INFO for `NET/Socket`, and why NET/IB was not taken: /dev/infiniband in the \
                 container, NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_SOCKET_IFNAME.",
                "Without GPUDirect RDMA (no `GDRDMA` in the log) load nvidia_peermem, or have DMA-BUF.",
            ],
        );
    } else if nics.len() > 1 && bus < 1.1 * rail {
        say(
            "results-nodes-one-rail",
            Weight::Severe,
            format!("{nodes} nodes come to {bus:.1} GB/s, which is one NIC's of {}", nics.len()),
            "The other rails are idle.",
            &[
                "NCCL_IB_HCA must name all NICs; each GPU needs a NIC below its own switch (see nic-far); in a \
                 container all of /dev/infiniband must be there.",
                "Rails must reach each other: NCCL_CROSS_NIC, and the same order of NICs on all nodes.",
            ],
        );
    } else if !nics.is_empty() && bus < ENOUGH * rails {
        say(
            "results-nodes-slow",
            Weight::Moderate,
            format!("{nodes} nodes come to {:.0} % of their NICs", 100.0 * bus / rails),
            "The network bounds all that goes between nodes.",
            &[
                "Test the network alone (`ib_write_bw` between two nodes, each NIC), and look at its counters of \
                 errors and congestion.",
                "Look whether NICs read GPUs' memory (`GDRDMA` in NCCL_DEBUG=INFO), and at NCCL_IB_QPS_PER_CONNECTION.",
            ],
        );
    } else if nics.is_empty() {
        outcome.unknown(
            format!("how near {bus:.1} GB/s between {nodes} nodes is to their NICs"),
            "this machine shows no RDMA NIC with a speed",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{
        fixtures::{self, EPYC8, H200X8, LAPTOP, PCIE4},
        read,
        source::Folder,
    };

    /// A run of a model: so many µs, and so many GB/s of bus bandwidth.
    fn run(ranks: u32, nodes: u32, us: f64, bus: f64) -> Run {
        let mut run = Run {
            tool: "nccl-tests 2.19.6".into(),
            collective: Some("all_reduce".into()),
            ranks: Some(ranks),
            nodes: Some(nodes),
            ..Run::default()
        };
        let factor = run.bus_factor().unwrap_or(1.0);
        run.points = (3..30)
            .map(|shift| {
                let bytes = 1u64 << shift;
                Point { bytes, us: us + factor * bytes as f64 / (bus * 1e3), bus_gb_per_s: None, wrong: Some(0) }
            })
            .collect();
        run
    }

    fn examined(fixture: &str, runs: &[Run]) -> Outcome {
        let folder = fixtures::unpack(fixture);
        let machine = read::read(&Folder::new(folder.path()).unwrap());
        let mut outcome = Outcome::default();
        check(runs, &machine, None, &mut outcome);
        outcome
    }

    fn ids(outcome: &Outcome) -> Vec<&'static str> {
        outcome.findings.iter().map(|finding| finding.id).collect()
    }

    #[test]
    fn what_the_links_can_is_fine() {
        let outcome = examined(H200X8, &[run(8, 1, 30.0, 350.0)]);
        assert_eq!((ids(&outcome), outcome.exit_code()), (vec![], 0), "{outcome:#?}");
        assert!(outcome.fine[0].contains("8 30.00 us") && outcome.fine[0].contains("GB/s at 512M"), "{outcome:#?}");
        assert_eq!(ids(&examined(PCIE4, &[run(4, 1, 20.0, 19.0)])), Vec::<&str>::new());
    }

    #[test]
    fn short_messages_that_take_long_are_named_with_size_and_figure() {
        let outcome = examined(H200X8, &[run(8, 1, 152.0, 350.0)]);
        assert_eq!(ids(&outcome), ["results-short-slow"]);
        assert!(
            outcome.findings[0].evidence[1].starts_with("8: 152.00 us, where some 30 us are usual"),
            "{outcome:#?}"
        );
        // By PCIe more is usual.
        assert_eq!(ids(&examined(EPYC8, &[run(8, 1, 80.0, 40.0)])), Vec::<&str>::new());
    }

    #[test]
    fn long_messages_below_the_link_are_named_with_size_and_figure() {
        let outcome = examined(H200X8, &[run(8, 1, 30.0, 24.0)]);
        assert_eq!(ids(&outcome), ["results-long-slow"]);
        let finding = format!("{:?}", outcome.findings[0]);
        assert!(finding.contains("512M: 24.0 GB/s of bus bandwidth, of 450 GB/s one way (18 NVLinks"), "{finding}");
        assert!(finding.contains("not to go by NVLink at all"), "{finding}");
        // What host memory carries where P2P over PCIe 5.0 could be.
        assert_eq!(ids(&examined(EPYC8, &[run(8, 1, 80.0, 25.0)])), ["results-long-slow"]);
        let outcome = examined(PCIE4, &[run(4, 1, 20.0, 6.0)]);
        assert_eq!(ids(&outcome), ["results-long-slow"]);
        assert!(!format!("{outcome:?}").contains("not to go by NVLink"));
    }

    #[test]
    fn links_that_are_not_known_are_unknown_and_can_be_given() {
        let outcome = examined(LAPTOP, &[run(8, 1, 30.0, 24.0)]);
        assert_eq!((ids(&outcome), outcome.exit_code()), (vec![], 2));
        assert!(outcome.unknown[0].why.contains("--link"));
        // Another GPU than this machine's.
        let other = Run { gpu: Some("NVIDIA B200".into()), ..run(8, 1, 30.0, 24.0) };
        assert_eq!(examined(H200X8, std::slice::from_ref(&other)).exit_code(), 2);
        let mut given = Outcome::default();
        check(&[other], &Machine::default(), Some(900.0), &mut given);
        assert_eq!(ids(&given), ["results-long-slow"]);
    }

    #[test]
    fn wrong_elements_go_before_all() {
        let mut bad = run(8, 1, 30.0, 350.0);
        bad.points[3].wrong = Some(7);
        let outcome = examined(H200X8, &[bad]);
        assert_eq!((ids(&outcome), outcome.findings[0].weight), (vec!["results-wrong"], Weight::Severe));
        assert!(outcome.findings[0].evidence[1].contains("the first: 64, 7 wrong elements"));
    }

    #[test]
    fn bandwidth_that_falls_as_messages_grow_is_named() {
        let mut falling = run(8, 1, 30.0, 350.0);
        let last = falling.points.len() - 1;
        falling.points[last].us *= 2.0;
        assert_eq!(ids(&examined(H200X8, &[falling])), ["results-fall"]);
    }

    #[test]
    fn nodes_that_do_not_add_up_have_a_cause() {
        let one = run(8, 1, 30.0, 350.0);
        let two = |bus| [one.clone(), run(16, 2, 60.0, bus)];
        let tcp = examined(H200X8, &two(3.0));
        assert_eq!(ids(&tcp), ["results-nodes-tcp"]);
        assert!(tcp.findings[0].evidence[2].contains("2 nodes have 1 % of that"), "{tcp:#?}");
        assert_eq!(ids(&examined(H200X8, &two(48.0))), ["results-nodes-one-rail"]);
        assert_eq!(ids(&examined(H200X8, &two(120.0))), ["results-nodes-slow"]);
        assert_eq!(ids(&examined(H200X8, &two(300.0))), Vec::<&str>::new());
        // Where no NIC is known, TCP's figure alone can be told.
        assert_eq!(ids(&examined(LAPTOP, &two(3.0))), ["results-nodes-tcp"]);
        assert_eq!(examined(LAPTOP, &two(48.0)).exit_code(), 2);
    }
}
