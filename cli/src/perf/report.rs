//! The JSON report. Its fields name their units; a figure that has no meaning is null.
//!
//! Readers check `schema_version`: it grows when a field changes its meaning or goes, not when one is added.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use peersum::{Algorithm, Overlap};
use serde::Serialize;

use super::{
    options::Config,
    table::{Half, OtherHalf},
};
use crate::{
    bandwidth,
    measure::{
        candidate::{Candidate, Home},
        case::{Mode, Placement},
        group::{Backend, Device},
        machine::Machine,
        rank::{Call, Schedule},
        run::Outcome,
        statistics::{Combine, Spread},
        team::Running,
        verify::FirstWrong,
    },
    model::hops::{Nearness, Parameters},
    sizes::Step,
};

const SCHEMA: &str = "peersum-perf";
const SCHEMA_VERSION: u32 = 1;
/// Over the lines of [`Record::hold_against`].
pub(crate) const LIMITS_HEADER: &str = "        size      type   redop     placement  time (us)        algorithm  its limit   ratio   \
                                         fastest by it   limit  ratio   bound";
/// What the library's choice is called beside others.
pub(crate) const CHOSEN: &str = "peersum";

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
    /// Whether they are threads of one process, or processes.
    ranks_are: Running,
    /// The one that tells.
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
    /// The memory that tensors lie in.
    memory: Home,
    deterministic: bool,
    /// The version of the NCCL that was joined; null where none was.
    nccl: Option<String>,
    /// Why none was.
    nccl_missing: Option<String>,
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
    /// Turns that each candidate had; the figures of the call itself are of the library's choice.
    rounds: usize,
    #[serde(flatten)]
    figures: Figures,
    /// Of those that were timed in turns with it.
    compared: Vec<OtherRecord>,
    /// How near it is to what it must take, where that is known (`--limits`).
    limit: Option<Nearness>,
}

/// What a candidate came to.
#[derive(Clone, Debug, Serialize)]
struct Figures {
    /// Total over calls, combined over the ranks; over several rounds, the median of these.
    time_us: f64,
    /// The same by the host's clock.
    wall_time_us: f64,
    rank_time_us: Vec<f64>,
    algbw_gb_per_s: f64,
    busbw_gb_per_s: Option<f64>,
    /// Of one call, or in graph mode of one replay's calls on average; null where only the total was timed.
    spread: Option<Spread>,
    samples_us: Vec<f64>,
    wrong_elements: Option<u64>,
    first_wrong: Option<FirstWrong>,
    plan: Option<PlanRecord>,
}

/// Another candidate.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct OtherRecord {
    name: &'static str,
    /// Why it was not timed; its figures are not there then.
    unavailable: Option<String>,
    /// Time of the library's choice over the time of this.
    ratio: Option<f64>,
    #[serde(flatten)]
    figures: Option<Figures>,
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

/// What ranks are.
pub(crate) struct Ranks<'a> {
    pub(crate) backend: Backend,
    pub(crate) running: Running,
    pub(crate) devices: &'a [Device],
}

impl Report {
    pub(crate) fn new(
        config: &Config,
        ranks: &Ranks<'_>,
        instead_of_gpus: Option<String>,
        machine: Machine,
        nccl: Result<String, String>,
    ) -> Self {
        let Ranks { backend, running, devices } = *ranks;
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
                ranks_are: running,
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
                memory: config.home(),
                deterministic: config.library.deterministic,
                nccl: nccl.as_ref().ok().cloned(),
                nccl_missing: nccl.err(),
            },
            results: Vec::new(),
            tables: Vec::new(),
            passed: false,
            errors: Vec::new(),
        }
    }

    /// The versions of the driver and of its CUDA.
    pub(crate) fn driver(&self) -> (&str, &str) {
        let machine = &self.machine;
        (machine.nvidia_driver.as_deref().unwrap_or("unknown"), machine.cuda_driver_api.as_deref().unwrap_or("unknown"))
    }

    /// Closes the report: no error, and no wrong element, is a pass.
    pub(crate) fn finish(&mut self) -> bool {
        self.finished_unix_s = Some(unix_time());
        self.passed = self.errors.is_empty() && self.results.iter().all(|record| record.wrong_candidates() == 0);
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

impl Figures {
    fn new(bytes: usize, combine: Combine, outcome: &Outcome, candidate: &Candidate) -> Self {
        let timings = &outcome.timings;
        let world = timings.len();
        let time_us = combine.of(timings.iter().map(|timing| timing.time_us));
        let algbw = bandwidth::algorithm(bytes, time_us);
        let samples_us = combine.samples(timings);
        Figures {
            time_us,
            wall_time_us: combine.of(timings.iter().map(|timing| timing.wall_us)),
            rank_time_us: timings.iter().map(|timing| timing.time_us).collect(),
            algbw_gb_per_s: algbw,
            busbw_gb_per_s: (world > 1).then(|| algbw * bandwidth::bus_factor(world)),
            spread: Spread::of(&samples_us),
            samples_us,
            wrong_elements: outcome.wrong.as_ref().map(|wrong| wrong.elements),
            first_wrong: outcome.wrong.as_ref().and_then(|wrong| wrong.first.clone()),
            plan: candidate.plan.map(|plan| PlanRecord {
                algorithm: plan.algorithm.name(),
                blocks: plan.blocks,
                threads: plan.threads,
                chunk_bytes: plan.chunk_bytes,
            }),
        }
    }

    /// What is wrong, if something is.
    fn complaint(&self) -> Option<String> {
        let (wrong, first) = (self.wrong_elements?, self.first_wrong.as_ref()?);
        Some(format!("{wrong} element{}; the first on {first}", if wrong == 1 { "" } else { "s" }))
    }

    fn is_wrong(&self) -> bool {
        self.wrong_elements.unwrap_or(0) > 0
    }
}

impl Record {
    pub(crate) fn new(
        call: &Call,
        schedule: &Schedule,
        combine: Combine,
        (cycle, rounds): (usize, usize),
        (outcome, candidate): (&Outcome, &Candidate),
    ) -> Self {
        let case = &call.case;
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
            rounds,
            figures: Figures::new(case.bytes(), combine, outcome, candidate),
            compared: Vec::new(),
            limit: None,
        }
    }

    /// Holds it against what a call between so many ranks must take, and returns the line that says so.
    pub(crate) fn hold_against(&mut self, parameters: &Parameters, ranks: u32) -> Option<String> {
        let name = self.figures.plan.as_ref()?.algorithm;
        let algorithm = Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name);
        let near = parameters.nearness(ranks, algorithm, self.bytes as u64, self.figures.time_us)?;
        self.limit = Some(near);
        let or_dash = |figure: Option<f64>| figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.2}"));
        Some(format!(
            "{:>12}  {:>8}  {:>6}  {:>12}  {:>9.2}  {:>15}  {:>9}  {:>6}  {:>15}  {:>9.2}  {:>6.2}  {:>6}",
            self.bytes,
            self.dtype,
            self.op,
            self.placement.name(),
            self.figures.time_us,
            name,
            or_dash(near.own_us),
            or_dash(near.over_own),
            near.best,
            near.limit_us,
            near.over_limit,
            near.bound,
        ))
    }

    /// Adds another candidate: what came of it, or why nothing did.
    pub(crate) fn compare(
        &mut self,
        name: &'static str,
        combine: Combine,
        other: Result<(&Outcome, &Candidate), String>,
    ) -> &OtherRecord {
        let record = match other {
            Ok((outcome, candidate)) => {
                let figures = Figures::new(self.bytes, combine, outcome, candidate);
                let ratio = self.figures.time_us / figures.time_us;
                OtherRecord { name, unavailable: None, ratio: Some(ratio), figures: Some(figures) }
            }
            Err(reason) => OtherRecord { name, unavailable: Some(reason), ratio: None, figures: None },
        };
        self.compared.push(record);
        &self.compared[self.compared.len() - 1]
    }

    /// The figures that the table shows.
    pub(crate) fn half(&self) -> Half {
        Half {
            time_us: self.figures.time_us,
            algbw: self.figures.algbw_gb_per_s,
            busbw: self.figures.busbw_gb_per_s,
            wrong: self.figures.wrong_elements,
            spread: self.figures.spread,
        }
    }

    /// Where the record has its place in a drawing: bytes, and by name the times of all that were timed.
    pub(crate) fn point(&self) -> (Placement, u64, Vec<(&'static str, f64)>) {
        let others = self.compared.iter().filter_map(|other| Some((other.name, other.figures.as_ref()?.time_us)));
        let times = std::iter::once((CHOSEN, self.figures.time_us)).chain(others).collect();
        (self.placement, self.bytes as u64, times)
    }

    /// The lines that tell what is wrong, if something is.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let others = self.compared.iter().filter_map(|other| Some((other.name, other.figures.as_ref()?.complaint()?)));
        let own = self.figures.complaint().map(|complaint| ("", complaint));
        own.into_iter()
            .chain(others)
            .map(|(name, complaint)| {
                let by = if name.is_empty() { String::new() } else { format!(" by {name}") };
                let placement = self.placement.name();
                format!("# WRONG: {} B {} {} {placement}{by}: {complaint}", self.bytes, self.dtype, self.op)
            })
            .collect()
    }

    /// Candidates with a wrong element.
    pub(crate) fn wrong_candidates(&self) -> usize {
        let others = self.compared.iter().filter_map(|other| other.figures.as_ref());
        others.chain([&self.figures]).filter(|figures| figures.is_wrong()).count()
    }
}

impl OtherRecord {
    /// The figures that the table shows; `None` where there are none.
    pub(crate) fn half(&self) -> Option<OtherHalf> {
        let figures = self.figures.as_ref()?;
        Some(OtherHalf {
            time_us: figures.time_us,
            busbw: figures.busbw_gb_per_s,
            wrong: figures.wrong_elements,
            ratio: self.ratio?,
        })
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
    let busbw: Vec<f64> = records.iter().filter_map(|record| record.figures.busbw_gb_per_s).collect();
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
    use crate::{
        measure::{candidate::Way, case::Case, machine::Gpu, rank::Timing, verify::Wrong},
        perf::options::Arguments,
    };

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
        Record::new(&call, &schedule, Combine::Max, (2, 1), (&Outcome { timings, wrong }, &CANDIDATE))
    }

    const CANDIDATE: Candidate = Candidate { way: Way::Chosen, home: Home::Plain, plan: None };

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
        let device = Device { ordinal: 0, pci: Some("0000:1b:00".into()), core: None, name, process_id: 1234 };
        let ranks = Ranks { backend: Backend::Cuda, running: Running::Processes, devices: &[device] };
        Report::new(&config, &ranks, None, Machine::here(None, vec![gpu]), Ok("2.30".into()))
    }

    /// Field case A68 (microsoft/superbenchmark#675): a name with a comma and a quote.
    #[test]
    fn names_with_quotes_commas_and_control_characters_come_back_as_they_were() {
        let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&report()).unwrap()).unwrap();
        for name in [&json["machine"]["gpus"][0]["name"], &json["config"]["ranks"][0]["name"]] {
            assert_eq!(name, "GPU \"A\", 80 GB\n\\ \u{1}é");
        }
        assert_eq!((&json["schema"], &json["schema_version"]), (&"peersum-perf".into(), &1.into()));
        assert_eq!(json["config"]["overlap"], "early");
        assert_eq!(json["config"]["ranks_are"], "processes");
        assert_eq!(json["config"]["ranks"][0]["process_id"], 1234);
    }

    #[test]
    fn figures_without_a_meaning_are_null() {
        let mut record = record(1, None);
        record.figures.algbw_gb_per_s = f64::NAN;
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

    /// Field case A68 (NVIDIA/nccl-tests#120): what is not available is a reason, and no figure.
    #[test]
    fn others_have_the_same_figures_a_ratio_or_a_reason() {
        let mut record = record(2, Some(Wrong::default()));
        let timing = Timing { time_us: 20.0, wall_us: 21.0, samples_us: vec![19.0, 20.0, 22.0] };
        let outcome = Outcome { timings: vec![timing; 2], wrong: Some(Wrong::default()) };
        assert_eq!(record.compare("two-shot", Combine::Max, Ok((&outcome, &CANDIDATE))).half().unwrap().ratio, 0.5);
        assert!(record.compare("nccl", Combine::Max, Err("it is not there".into())).half().is_none());
        let json = serde_json::to_value(&record).unwrap();
        let [two_shot, nccl] = [&json["compared"][0], &json["compared"][1]];
        assert_eq!((&two_shot["name"], &two_shot["ratio"]), (&"two-shot".into(), &0.5.into()));
        assert_eq!((&two_shot["time_us"], &two_shot["wrong_elements"]), (&20.0.into(), &0.into()));
        assert_eq!(two_shot["samples_us"], serde_json::json!([19.0, 20.0, 22.0]));
        assert_eq!((&two_shot["spread"]["p50_us"], &two_shot["spread"]["p95_us"]), (&20.0.into(), &22.0.into()));
        assert!(two_shot["unavailable"].is_null());
        assert_eq!((&nccl["unavailable"], &nccl["ratio"]), (&"it is not there".into(), &serde_json::Value::Null));
        assert!(nccl.get("time_us").is_none());
        assert_eq!(record.point().2, [("peersum", 10.0), ("two-shot", 20.0)]);
    }

    #[test]
    fn another_candidate_s_wrong_element_is_no_pass_either() {
        let mut report = report();
        let mut record = record(2, Some(Wrong::default()));
        let outcome = Outcome { wrong: Some(Wrong { elements: 3, first: None }), ..Outcome::default() };
        record.compare("nccl", Combine::Max, Ok((&outcome, &CANDIDATE)));
        assert_eq!(record.wrong_candidates(), 1);
        report.results.push(record);
        assert!(!report.finish());
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
