//! With devices that are made up.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    links::{Cell, Compared, CopyLatency, Device, Engine, Links, Route, Way},
    measured,
    report::{Report, Verdict},
};

/// Devices that each have memory, and mappings between them that may lie.
#[derive(Default)]
struct Fake {
    count: usize,
    /// Places that are of one device.
    one_device: bool,
    no_p2p: Vec<(usize, usize)>,
    /// Writes of the first to the second land in a mirror that the first alone sees.
    mirrored: Vec<(usize, usize)>,
    /// Of reads, this word is an old one.
    stale: Option<(usize, usize)>,
    broken: Vec<(usize, usize)>,
    on: bool,
    memory: Vec<[u64; 8]>,
    mirrors: BTreeMap<(usize, usize), [u64; 8]>,
    round: u64,
}

impl Fake {
    fn new(count: usize) -> Fake {
        Fake { count, memory: vec![[0; 8]; count], ..Fake::default() }
    }

    fn report(mut self) -> Report {
        measured(&mut self, 64, None)
    }
}

impl Links for Fake {
    fn devices(&self) -> Vec<Device> {
        let device = |ordinal| Device {
            ordinal,
            name: "Fake, \"quoted\"".into(),
            pci: format!("0000:{ordinal:02x}:00.0"),
            memory_gb_per_s: Some(1000.0),
        };
        (0..self.count).map(|place| device(if self.one_device { 0 } else { place })).collect()
    }

    fn same_device(&self, a: usize, b: usize) -> bool {
        a == b || self.one_device
    }

    fn reaches(&mut self, from: usize, to: usize) -> Result<(), String> {
        if self.no_p2p.contains(&(from, to)) { Err("the driver grants no P2P".into()) } else { Ok(()) }
    }

    fn let_reach(&mut self, on: bool) -> Cell<()> {
        self.on = on;
        Ok(())
    }

    fn one_way(&mut self, route: Route, from: usize, to: usize) -> Cell<f64> {
        assert_eq!(route.p2p, self.on);
        if self.broken.contains(&(from, to)) {
            return Err("cuLaunchKernel failed".into());
        }
        // Faster than all that is right.
        Ok(if route.p2p { 900.0 } else { 20.0 })
    }

    fn both_ways(&mut self, route: Route, _: usize, _: usize) -> Cell<f64> {
        Ok(if route.p2p { 1800.0 } else { 25.0 })
    }

    fn copy_latency(&mut self, _: usize, _: usize) -> Cell<CopyLatency> {
        Ok(CopyLatency { gpu_us: 2.0, host_us: 3.0 })
    }

    fn store_latency(&mut self, _: usize, _: usize) -> Cell<f64> {
        Ok(0.7)
    }

    fn load_latency(&mut self, _: usize, _: usize) -> Cell<f64> {
        Ok(1.3)
    }

    fn compare(&mut self, route: Route, from: usize, to: usize) -> Cell<Compared> {
        self.round += 1;
        let sent = [self.round; 8];
        let writes = route.p2p && route.way == Way::Write && route.engine == Engine::Kernel;
        if writes && self.mirrored.contains(&(from, to)) {
            self.mirrors.insert((from, to), sent);
            // What a check by the writer would see.
            assert_eq!(self.mirrors[&(from, to)], sent);
        } else {
            self.memory[to] = sent;
        }
        if route.way == Way::Read && self.stale == Some((from, to)) {
            self.memory[to][3] = 0;
        }
        let wrong: Vec<_> = (0..8).filter(|&word| self.memory[to][word] != sent[word]).collect();
        Ok(Compared { words: 8, wrong: wrong.len() as u64, first_wrong: wrong.first().map(|&word| word as u64) })
    }
}

fn text(report: &Report) -> String {
    let mut out = Vec::new();
    report.print(&mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn json(report: &Report) -> Value {
    serde_json::from_str(&serde_json::to_string(report).unwrap()).unwrap()
}

/// Field cases A11 (NVIDIA/nccl#2335) and A70 (NVIDIA/nvbandwidth#45): what a peer wrote is looked at by the owner, and
/// no bandwidth makes it good.
#[test]
fn writes_that_land_in_a_mirror_are_bad_however_fast() {
    let report = Fake { mirrored: vec![(0, 1)], ..Fake::new(2) }.report();
    assert_eq!((report.verdicts[0][1], report.verdicts[1][0]), (Some(Verdict::Bad), Some(Verdict::Good)));
    assert!(report.any_bad());
    let text = text(&report);
    assert!(text.contains("  0 -> 1, kernel, P2P writes: 8 of 8 words are wrong, the first at 0"), "{text}");
    // The verdict stands above the figures.
    assert!(text.find("BAD").unwrap() < text.find("900.00").unwrap());
    assert_eq!(json(&report)["verdicts"][0][1], "bad");
}

#[test]
fn one_stale_word_is_enough() {
    let report = Fake { stale: Some((1, 0)), ..Fake::new(2) }.report();
    assert_eq!((report.verdicts[1][0], report.verdicts[0][1]), (Some(Verdict::Bad), Some(Verdict::Good)));
    assert!(text(&report).contains("1 -> 0, copy engine, P2P reads: 1 of 8 words are wrong, the first at 3"));
}

/// Field case A70 (NVIDIA/nvbandwidth#45): a pair that is left out says why, and the others are measured.
#[test]
fn a_pair_without_p2p_has_its_reason_and_the_others_their_figures() {
    let report = Fake { no_p2p: vec![(0, 2), (2, 0)], ..Fake::new(3) }.report();
    assert_eq!(report.verdicts[0][2], Some(Verdict::NoP2p));
    assert_eq!(report.verdicts[0][1], Some(Verdict::Good));
    assert!(!report.any_bad() && !report.any_failed());
    let text = text(&report);
    assert!(text.contains("[1] the driver grants no P2P") && !text.contains("[2]"), "{text}");
    let json = json(&report);
    let straight = &json["one_way"][0]["cells"];
    assert_eq!(straight[0][2]["error"], "the driver grants no P2P");
    assert_eq!(straight[0][1]["value"], 900.0);
    // Through the host they have one.
    let through = json["one_way"].as_array().unwrap().iter().find(|matrix| matrix["route"]["p2p"] == false).unwrap();
    assert_eq!(through["cells"][0][2]["value"], 20.0);
}

#[test]
fn an_error_is_shown_where_its_figure_would_be() {
    let report = Fake { broken: vec![(1, 0)], ..Fake::new(2) }.report();
    assert!(report.any_failed() && !report.any_bad());
    let text = text(&report);
    assert!(text.contains("err[1]") && text.contains("[1] cuLaunchKernel failed") && text.contains("900.00"), "{text}");
}

#[test]
fn one_gpu_has_a_matrix_of_one_cell() {
    let report = Fake::new(1).report();
    let text = text(&report);
    assert!(text.contains("One GPU: there is no pair"), "{text}");
    // Reads and writes.
    assert!(text.contains("1800.00") && !text.contains("err"), "{text}");
    assert_eq!(json(&report)["theory"][0][0]["gb_per_s"], 1000.0);
}

#[test]
fn two_streams_of_one_device_are_a_pair_and_said_to_be_none() {
    let report = Fake { one_device: true, ..Fake::new(2) }.report();
    let text = text(&report);
    assert!(text.contains("All places are of one GPU") && text.contains("same"), "{text}");
    assert!(!text.contains("P2P off"), "{text}");
    assert_eq!(report.verdicts[0][1], Some(Verdict::Good));
    let json = json(&report);
    // Within one device there is no way through the host.
    let through = json["one_way"].as_array().unwrap().iter().find(|matrix| matrix["route"]["p2p"] == false).unwrap();
    assert_eq!(through["cells"][0][1], Value::Null);
    assert_eq!(json["theory"][0][1]["gb_per_s"], 500.0);
}

/// Field case A68 (NVIDIA/nccl-tests#120): what a program reads has a schema, units in its names, and quotes that hold.
#[test]
fn the_report_is_json_with_a_schema() {
    let json = json(&Fake::new(2).report());
    assert_eq!((&json["schema"], &json["schema_version"]), (&"peersum-p2p".into(), &1.into()));
    assert_eq!(json["devices"][0]["name"], "Fake, \"quoted\"");
    assert_eq!(json["copy_latency"][0]["cells"][0][1]["value"]["gpu_us"], 2.0);
    assert_eq!(json["efficiency_percent"][0][1], Value::Null);
    // And is what the page draws.
    assert!(!crate::page::matrices(&json.to_string()).unwrap().is_empty());
}
