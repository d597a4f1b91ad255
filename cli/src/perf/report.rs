//! The JSON report. Its fields name their units; a figure that has no meaning is null.
//!
//! Readers check `schema_version`: it grows when a field changes its meaning or goes, not when one is added.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use peersum::{Overlap, Plan};
use serde::Serialize;

use super::{
    backend::{Backend, Device},
    bandwidth,
    case::{Mode, Placement},
    machine::Machine,
    measure::{Call, Outcome, Schedule},
    options::Config,
    sizes::Step,
    statistics::{Combine, Spread},
    table::Half,
    verify::FirstWrong,
};

const SCHEMA: &str = "peersum-perf";
const SCHEMA_VERSION: u32 = 1;

/// The file.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    schema: &'static str,
    schema_version: u32,
    peersum_version: &'static str,
    command: Vec<String>,
    started_unix_s: u64,
    finished_unix_s: Option<u64>,
    machine: Machine,
    config: ConfigRecord,
    pub(crate) results: Vec<Record>,
    pub(crate) tables: Vec<TableRecord>,
    /// Whether all was measured and, if it was checked, right.
    passed: bool,
    /// Why the run ended early.
    pub(crate) errors: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
struct ConfigRecord {
    collective: &'static str,
    backend: Backend,
    /// Why the ranks are not GPUs, unless the host was asked for.
    instead_of_gpus: Option<String>,
    world_size: usize,
    process_id: u32,
    ranks: Vec<RankRecord>,
    min_bytes: u64,
    max_bytes: u64,
    step_factor: Option<u64>,
    step_bytes: Option<u64>,
    iterations: usize,
    warmup_iterations: usize,
    run_cycles: usize,
    check_iterations: usize,
    unalign_elements: usize,
    combine: Combine,
    timeout_s: f64,
    staging_bytes: Option<usize>,
    forced_algorithm: Option<&'static str>,
    forced_blocks: Option<u32>,
    forced_threads: Option<u32>,
    /// Null where calls are no kernels.
    overlap: Option<&'static str>,
}

#[derive(Clone, Debug, Serialize)]
struct RankRecord {
    rank: usize,
    #[serde(flatten)]
    device: Device,
}

/// One size, type, reduction, placement and mode.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Record {
    /// Which of the cycles over all rows, from 0.
    cycle: usize,
    bytes: usize,
    count: usize,
    dtype: String,
    op: String,
    placement: Placement,
    timing: Mode,
    /// Calls in a row, captured in one graph where there is one.
    iterations: usize,
    /// Launches of the graph, or 1.
    replays: usize,
    /// Total over calls, combined over the ranks.
    time_us: f64,
    /// The same by the host's clock.
    wall_time_us: f64,
    rank_time_us: Vec<f64>,
    algbw_gb_per_s: f64,
    busbw_gb_per_s: Option<f64>,
    /// Of one call, or in graph mode of one replay's calls on average; null where only the total was timed.
    spread: Option<Spread>,
    wrong_elements: Option<u64>,
    first_wrong: Option<FirstWrong>,
    plan: Option<PlanRecord>,
}

#[derive(Clone, Debug, Serialize)]
struct PlanRecord {
    algorithm: &'static str,
    blocks: u32,
    threads: u32,
    chunk_bytes: u64,
}

/// What stands under a table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TableRecord {
    pub(crate) timing: Mode,
    pub(crate) average_busbw_gb_per_s: Option<f64>,
    /// Records with a wrong element; null where nothing was checked.
    pub(crate) wrong_tests: Option<usize>,
}

impl Report {
    pub(crate) fn new(
        config: &Config,
        backend: Backend,
        instead_of_gpus: Option<String>,
        devices: &[Device],
        machine: Machine,
    ) -> Self {
        let (step_factor, step_bytes) = match config.sweep.step {
            Step::Factor(factor) => (Some(factor), None),
            Step::Bytes(bytes) => (None, Some(bytes)),
        };
        Report {
            schema: SCHEMA,
            schema_version: SCHEMA_VERSION,
            peersum_version: env!("CARGO_PKG_VERSION"),
            command: std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect(),
            started_unix_s: unix_time(),
            finished_unix_s: None,
            machine,
            config: ConfigRecord {
                collective: "all_reduce",
                backend,
                instead_of_gpus,
                world_size: devices.len(),
                process_id: std::process::id(),
                ranks: devices.iter().cloned().enumerate().map(|(rank, device)| RankRecord { rank, device }).collect(),
                min_bytes: config.sweep.min_bytes,
                max_bytes: config.sweep.max_bytes,
                step_factor,
                step_bytes,
                iterations: config.iterations,
                warmup_iterations: config.warmup,
                run_cycles: config.cycles,
                check_iterations: config.checks,
                unalign_elements: config.unalign,
                combine: config.combine,
                timeout_s: config.library.timeout.as_secs_f64(),
                staging_bytes: config.library.staging_bytes,
                forced_algorithm: config.library.algorithm.map(|algorithm| algorithm.name()),
                forced_blocks: config.library.blocks,
                forced_threads: config.library.threads,
                overlap: (backend == Backend::Cuda).then(|| overlap_name(config.library.overlap)),
            },
            results: Vec::new(),
            tables: Vec::new(),
            passed: false,
            errors: Vec::new(),
        }
    }

    /// Closes the report: no error, and no wrong element, is a pass.
    pub(crate) fn finish(&mut self) -> bool {
        self.finished_unix_s = Some(unix_time());
        self.passed =
            self.errors.is_empty() && self.results.iter().all(|record| record.wrong_elements.unwrap_or(0) == 0);
        self.passed
    }

    /// Writes the file as far as it is, so that a place that can't be written to shows before anything is measured.
    ///
    /// It is written beside and then renamed: a reader sees the old report or the new one, whole.
    pub(crate) fn write_beside(&self, path: &Path) -> Result<PathBuf> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        let mut beside = path.as_os_str().to_owned();
        beside.push(".partial");
        fs::write(&beside, text).with_context(|| format!("can't write {}", path.display()))?;
        Ok(beside.into())
    }

    /// Replaces the file.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let beside = self.write_beside(path)?;
        fs::rename(beside, path).with_context(|| format!("can't write {}", path.display()))
    }
}

impl Record {
    pub(crate) fn new(
        call: &Call,
        schedule: &Schedule,
        combine: Combine,
        outcome: &Outcome,
        plan: Option<Plan>,
        cycle: usize,
    ) -> Self {
        let case = &call.case;
        let timings = &outcome.timings;
        let world = timings.len();
        let time_us = combine.of(timings.iter().map(|timing| timing.time_us));
        let algbw = bandwidth::algorithm(case.bytes(), time_us);
        let samples = combine.samples(timings);
        Record {
            cycle,
            bytes: case.bytes(),
            count: case.count,
            dtype: case.dtype.to_string(),
            op: case.op.to_string(),
            placement: call.placement,
            timing: call.mode,
            iterations: schedule.iterations,
            replays: schedule.replays,
            time_us,
            wall_time_us: combine.of(timings.iter().map(|timing| timing.wall_us)),
            rank_time_us: timings.iter().map(|timing| timing.time_us).collect(),
            algbw_gb_per_s: algbw,
            busbw_gb_per_s: (world > 1).then(|| algbw * bandwidth::bus_factor(world)),
            spread: Spread::of(&samples),
            wrong_elements: outcome.wrong.as_ref().map(|wrong| wrong.elements),
            first_wrong: outcome.wrong.as_ref().and_then(|wrong| wrong.first.clone()),
            plan: plan.map(|plan| PlanRecord {
                algorithm: plan.algorithm.name(),
                blocks: plan.blocks,
                threads: plan.threads,
                chunk_bytes: plan.chunk_bytes,
            }),
        }
    }

    /// The figures that the table shows.
    pub(crate) fn half(&self) -> Half {
        Half {
            time_us: self.time_us,
            algbw: self.algbw_gb_per_s,
            busbw: self.busbw_gb_per_s,
            wrong: self.wrong_elements,
            spread: self.spread,
        }
    }

    /// The line that tells what is wrong, if something is.
    pub(crate) fn complaint(&self) -> Option<String> {
        let (wrong, first) = (self.wrong_elements?, self.first_wrong.as_ref()?);
        Some(format!(
            "# WRONG: {} B {} {} {}: {wrong} element{}; the first on {first}",
            self.bytes,
            self.dtype,
            self.op,
            self.placement.name(),
            if wrong == 1 { "" } else { "s" },
        ))
    }
}

fn overlap_name(overlap: Overlap) -> &'static str {
    match overlap {
        Overlap::Off => "off",
        Overlap::Late => "late",
        Overlap::Early => "early",
        other => unreachable!("the command offers no {other:?}"),
    }
}

/// The mean of all busbw's; `None` where there is none.
pub(crate) fn average_busbw(records: &[Record]) -> Option<f64> {
    let busbw: Vec<f64> = records.iter().filter_map(|record| record.busbw_gb_per_s).collect();
    (!busbw.is_empty()).then(|| busbw.iter().sum::<f64>() / busbw.len() as f64)
}

fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use peersum::{DType, ReduceOp};

    use super::*;
    use crate::perf::{case::Case, machine::Gpu, measure::Timing, options::Arguments, verify::Wrong};

    #[derive(Parser)]
    struct Perf {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn record(world: usize, wrong: Option<Wrong>) -> Record {
        let call = Call {
            case: Case { count: 1 << 18, dtype: DType::F32, op: ReduceOp::Sum },
            placement: Placement::InPlace,
            mode: Mode::Graph,
        };
        let schedule = Schedule { iterations: 4, warmup: 1, replays: 3, per_iteration: false };
        let timing = |us: f64| Timing { time_us: us, wall_us: us + 1.0, samples_us: vec![us, us + 2.0] };
        let timings = (0..world).map(|rank| timing(10.0 - rank as f64)).collect();
        Record::new(&call, &schedule, Combine::Max, &Outcome { timings, wrong }, None, 2)
    }

    fn report() -> Report {
        let config = Config::new(&Perf::parse_from(["perf"]).arguments).unwrap();
        let name = "GPU \"A\", 80 GB\n\\ \u{1}é".to_owned();
        let gpu = Gpu {
            ordinal: 0,
            name: name.clone(),
            pci: "0000:1b:00".into(),
            uuid: "GPU-0".into(),
            compute_capability: "9.0".into(),
            multiprocessors: 132,
            memory_bytes: 1 << 37,
        };
        let device = Device { ordinal: 0, pci: Some("0000:1b:00".into()), core: None, name };
        Report::new(&config, Backend::Cuda, None, &[device], Machine::here(None, vec![gpu]))
    }

    #[test]
    fn names_with_quotes_commas_and_control_characters_come_back_as_they_were() {
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report()).unwrap()).unwrap();
        for name in [&json["machine"]["gpus"][0]["name"], &json["config"]["ranks"][0]["name"]] {
            assert_eq!(name, "GPU \"A\", 80 GB\n\\ \u{1}é");
        }
        assert_eq!((&json["schema"], &json["schema_version"]), (&"peersum-perf".into(), &1.into()));
        assert_eq!(json["config"]["overlap"], "early");
    }

    #[test]
    fn figures_without_a_meaning_are_null() {
        let mut record = record(1, None);
        record.algbw_gb_per_s = f64::NAN;
        let json = serde_json::to_value(record).unwrap();
        for field in ["algbw_gb_per_s", "busbw_gb_per_s", "wrong_elements", "first_wrong", "plan"] {
            assert!(json[field].is_null(), "{field}");
        }
    }

    #[test]
    fn the_slowest_rank_s_time_makes_the_bandwidth() {
        let json = serde_json::to_value(record(2, Some(Wrong::default()))).unwrap();
        assert_eq!(json["time_us"], 10.0);
        assert_eq!(json["rank_time_us"], serde_json::json!([10.0, 9.0]));
        assert_eq!(json["algbw_gb_per_s"], 104.8576);
        assert_eq!(json["busbw_gb_per_s"], 104.8576);
        assert_eq!((&json["placement"], &json["timing"]), (&"in_place".into(), &"graph".into()));
        assert_eq!(json["cycle"], 2);
        // Of the slowest rank, like the time.
        assert_eq!((&json["spread"]["samples"], &json["spread"]["max_us"]), (&2.into(), &12.0.into()));
    }

    #[test]
    fn a_wrong_element_or_an_error_is_no_pass() {
        let mut right = report();
        right.results.push(record(2, Some(Wrong::default())));
        assert!(right.finish());
        let mut wrong = right.clone();
        wrong.results.push(record(2, Some(Wrong { elements: 1, first: None })));
        assert!(!wrong.finish());
        right.errors.push("rank 1 did not come".into());
        assert!(!right.finish());
    }

    #[test]
    fn the_average_is_over_all_records_that_have_one() {
        assert_eq!(average_busbw(&[]), None);
        assert_eq!(average_busbw(&[record(1, None)]), None);
        assert_eq!(average_busbw(&[record(2, None), record(1, None)]), Some(104.8576));
    }
}
