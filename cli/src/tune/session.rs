//! Measures all sizes.

use std::{
    io::{self, Write},
    path::Path,
};

use anyhow::{Result, bail};
use half::{bf16, f16};
use peersum::{DType, ReduceOp, crossover::Machine};

use super::{
    chart, csv,
    kept::{Kept, Measured, SizeRecord},
    lineup::{Lineup, finalists},
    options::Config,
    verdict::{Destination, Verdict},
};
use crate::{
    measure::{
        candidate::{Candidate, Home, Way},
        case::{Case, Mode, Placement},
        datum::Datum,
        geometry::Geometry,
        group::Group,
        rank::{Call, Rank, Schedule},
        run::{self, Job},
        team::Team,
    },
    output::Output,
    sizes::Size,
};

/// Candidates whose graphs exist at the same time while all of them are looked at.
const BATCH: usize = 32;
/// Messages of this size and more are called less often.
const LONG_BYTES: usize = 4 << 20;
/// And those of more than this seldom.
const LONGEST_BYTES: usize = 64 << 20;

/// How often candidates are called.
#[derive(Clone, Copy, Debug)]
struct Effort {
    /// Calls of a graph.
    calls: usize,
    /// Replays of a graph in a round.
    replays: usize,
    rounds: usize,
}

impl Effort {
    /// One look at each of all grids.
    fn first(bytes: usize, quick: bool) -> Effort {
        let calls = match (bytes >= LONG_BYTES, quick) {
            _ if bytes > LONGEST_BYTES => 2,
            (true, _) => 5,
            (false, true) => 30,
            (false, false) => 50,
        };
        Effort { calls, replays: 2, rounds: 1 }
    }

    /// The rounds that decide.
    fn last(bytes: usize, quick: bool) -> Effort {
        let calls = match (bytes >= LONG_BYTES, quick) {
            _ if bytes > LONGEST_BYTES => 3,
            (true, _) => 10,
            (false, true) => 50,
            (false, false) => 100,
        };
        Effort { calls, replays: if quick { 1 } else { 2 }, rounds: if quick { 3 } else { 7 } }
    }

    /// A replay that is not timed comes before those that are: they are launched while it runs.
    fn schedule(self, mode: Mode) -> Schedule {
        let replays = if mode == Mode::Graph { self.replays } else { 1 };
        Schedule { iterations: self.calls, warmup: self.calls, replays, per_iteration: false }
    }
}

/// A run.
pub(super) struct Session<'a, G> {
    group: G,
    config: &'a Config,
    machine: Machine,
    /// Of the ranks' devices.
    devices: Vec<String>,
    kept: Kept,
    /// Calls are replayed from graphs where there are graphs.
    mode: Mode,
}

impl<'a, G: Group> Session<'a, G> {
    pub(super) fn new(
        group: G,
        config: &'a Config,
        machine: Machine,
        devices: Vec<String>,
        table: &Path,
    ) -> Result<Self> {
        let kept = Kept::open(table, format!("{machine:?} {}", config.key()), config.restart)?;
        Ok(Session { group, config, machine, devices, kept, mode: Mode::Graph })
    }

    /// The sizes of all types.
    pub(super) fn steps(&self) -> u64 {
        self.config.dtypes.iter().map(|dtype| self.counts(dtype.size()).len() as u64).sum()
    }

    /// The numbers of elements to reduce.
    fn counts(&self, element_bytes: usize) -> Vec<usize> {
        self.config.sweep.counts(element_bytes).filter(|&count| count > 0).collect()
    }

    /// Measures what is not kept yet, and writes the table. `false` says that something was wrong.
    pub(super) fn run(mut self, table: &Destination, output: &Output) -> Result<bool> {
        let config = self.config;
        output.print(|out| self.header(out))?;
        let empty = if config.samples.is_some() { self.empty()? } else { Vec::new() };
        for &dtype in &config.dtypes {
            match dtype {
                DType::F32 => self.sizes::<f32>(output)?,
                DType::F16 => self.sizes::<f16>(output)?,
                DType::BF16 => self.sizes::<bf16>(output)?,
                other => bail!("this command does not know the type {other}"),
            }
        }
        output.progress.finish_and_clear();
        if let Some(file) = &config.samples {
            csv::write(file, self.devices.len(), &empty, self.kept.sizes())?;
        }
        let verdict = Verdict::new(&self.kept, config, self.machine.clone())?;
        table.write(verdict.entry.clone())?;
        if let Some(file) = &config.plot {
            chart::figure(&verdict.entry, self.devices.len(), &self.devices).write(file)?;
        }
        output.print(|out| {
            verdict.tell(out)?;
            writeln!(out, "# The table is in {}", table.path().display())
        })?;
        // The last: until here all of it could be done again.
        self.kept.remove()?;
        Ok(verdict.is_right())
    }

    fn header(&self, out: &mut dyn Write) -> io::Result<()> {
        let Machine { gpu, world, links, driver, peersum, kernels, .. } = &self.machine;
        writeln!(out, "# peersum tune, version {peersum}, kernels {kernels}, driver {driver}")?;
        writeln!(out, "# {world} ranks, threads of one process, on {gpu}, links {}", links.join(" "))?;
        match self.group.nccl() {
            _ if !self.config.with_nccl => writeln!(out, "# NCCL: not measured, as was asked")?,
            Ok(version) => {
                writeln!(out, "# NCCL: {version}")?;
                if let (true, Err(reason)) = (self.symmetric(), self.group.nccl_window()) {
                    writeln!(out, "# NCCL has no window of symmetric memory: {reason}")?;
                }
            }
            Err(reason) => writeln!(out, "# NCCL: not measured: {reason}")?,
        }
        let kept = self.kept.sizes().len();
        if kept > 0 {
            writeln!(out, "# {kept} sizes are kept from a run that was interrupted ({})", self.kept.path().display())?;
        }
        Ok(())
    }

    fn symmetric(&self) -> bool {
        self.config.homes().contains(&Home::Symmetric)
    }

    /// What an empty kernel costs in a graph, on two grids: T0.
    fn empty(&mut self) -> Result<Vec<Measured>> {
        let effort = Effort::last(0, self.config.quick);
        let geometry = Geometry::new::<f32>(1, 0);
        let homes = [Home::Plain];
        let mut ranks = self.group.ranks::<f32>(&geometry, &homes)?;
        let candidates = [128, 512].map(|threads| {
            let way = Way::Empty { blocks: 16, threads };
            Candidate { way, home: Home::Plain, plan: None }
        });
        let call = Call {
            case: Case { count: 1, dtype: DType::F32, op: ReduceOp::Sum },
            placement: Placement::OutOfPlace,
            mode: self.mode,
        };
        let (measured, _) = measure::<f32, _>(&mut ranks, &candidates, &call, geometry, effort, 0)?;
        Ok(measured.into_iter().flatten().collect())
    }

    /// All sizes of a type that are not kept yet.
    fn sizes<T: Datum>(&mut self, output: &Output) -> Result<()> {
        let config = self.config;
        let counts = self.counts(size_of::<T>());
        let Some(&largest) = counts.iter().max() else { return Ok(()) };
        let bytes = |count: usize| count * size_of::<T>();
        let (kept, todo): (Vec<_>, Vec<_>) =
            counts.into_iter().partition(|&count| self.kept.has(T::DTYPE, bytes(count) as u64));
        output.progress.inc(kept.len() as u64);
        if todo.is_empty() {
            return Ok(());
        }
        let lineups: Vec<(usize, Lineup)> = todo
            .into_iter()
            .map(|count| {
                let size = (count, T::DTYPE);
                (count, Lineup::new(&mut self.group, &config.placements, config.with_nccl, config.quick, size))
            })
            .collect();
        let geometry = Geometry::new::<T>(largest, 0);
        let homes = config.homes();
        let mut ranks = self.group.ranks::<T>(&geometry, &homes)?;
        run::fill(&mut ranks, &Team::Threads, &geometry, &homes)?;
        for (count, lineup) in lineups {
            let mut size = SizeRecord {
                dtype: T::DTYPE.to_string(),
                bytes: bytes(count) as u64,
                measured: Vec::new(),
                missing: lineup.missing.iter().map(|(name, reason)| (name.to_string(), reason.clone())).collect(),
            };
            let halves = [(Placement::OutOfPlace, &lineup.out_of_place), (Placement::InPlace, &lineup.in_place)];
            for (placement, candidates) in halves {
                let case = Case { count, dtype: T::DTYPE, op: ReduceOp::Sum };
                let call = Call { case, placement, mode: self.mode };
                let show = |rounds: &str, candidates: usize| {
                    let (bytes, placement) = (Size(size.bytes), placement.name());
                    output.progress.set_message(format!("{bytes} {} {placement}, {candidates} {rounds}", T::DTYPE));
                };
                show("candidates", candidates.len());
                let (measured, missing) =
                    contest::<T, _>(&mut ranks, candidates, &call, geometry, config.quick, |last| {
                        show("finalists", last);
                    })?;
                size.measured.extend(measured);
                size.missing.extend(missing);
            }
            self.kept.add(size)?;
            output.progress.inc(1);
        }
        Ok(())
    }
}

/// What was measured, and who could not be, and why.
type Contest = (Vec<Measured>, Vec<(String, String)>);

/// Looks at every candidate once, and checks it; then measures the best of each algorithm in rounds.
fn contest<T: Datum, R: Rank<T>>(
    ranks: &mut [R],
    candidates: &[Candidate],
    call: &Call,
    geometry: Geometry,
    quick: bool,
    to_the_last: impl Fn(usize),
) -> Result<Contest> {
    let bytes = call.case.bytes();
    let (mut entrants, mut measured, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for batch in candidates.chunks(BATCH) {
        let (looks, refused) = measure::<T, _>(ranks, batch, call, geometry, Effort::first(bytes, quick), 1)?;
        for (candidate, look) in batch.iter().zip(looks) {
            let Some(look) = look else { continue };
            entrants.push(*candidate);
            measured.push(look);
        }
        missing.extend(refused);
    }
    let last = finalists(&measured);
    to_the_last(last.len());
    let candidates: Vec<Candidate> = last.iter().map(|&index| entrants[index]).collect();
    let (decided, refused) = measure::<T, _>(ranks, &candidates, call, geometry, Effort::last(bytes, quick), 0)?;
    for (index, decided) in last.into_iter().zip(decided) {
        if let Some(decided) = decided {
            measured[index] = decided;
        }
    }
    missing.extend(refused);
    Ok((measured, missing))
}

/// By candidate what it gave, if it could be measured; and who could not.
#[allow(clippy::type_complexity)] // two lists
fn measure<T: Datum, R: Rank<T>>(
    ranks: &mut [R],
    candidates: &[Candidate],
    call: &Call,
    geometry: Geometry,
    effort: Effort,
    checks: usize,
) -> Result<(Vec<Option<Measured>>, Vec<(String, String)>)> {
    let schedule = effort.schedule(call.mode);
    let job =
        Job { call: *call, schedule, rounds: effort.rounds, geometry, checks, checked_by_ranks: true, fault: None };
    let in_place = call.placement == Placement::InPlace;
    let mut missing = Vec::new();
    let outcomes = run::measure(ranks, &Team::Threads, &job, candidates)?;
    let measured = candidates
        .iter()
        .zip(outcomes)
        .map(|(candidate, outcome)| match outcome {
            Ok(outcome) => Measured::new(candidate, in_place, (effort.calls, effort.rounds), &outcome),
            Err(reason) => {
                let algorithm = match candidate.way {
                    Way::Forced(choice) => choice.algorithm.name(),
                    Way::Chosen | Way::NcclAlone | Way::Empty { .. } => super::kept::EMPTY,
                };
                missing.push((algorithm.to_owned(), reason));
                None
            }
        })
        .collect();
    Ok((measured, missing))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use peersum::{Algorithm, Options, crossover::Table, host};

    use super::*;
    use crate::{measure::host::HostGroup, tune::options::tests::config};

    fn machine() -> Machine {
        Machine {
            gpu: "no GPU".into(),
            world: 2,
            links: vec!["=N".into(), "N=".into()],
            driver: "1.2".into(),
            nccl: None,
            peersum: "0.1.0".into(),
            kernels: "none".into(),
        }
    }

    fn tune(flags: &str, table: &Path, algorithms: &[Algorithm]) -> Result<bool> {
        let config = config(flags)?;
        let group = HostGroup::new(2, &Options::default(), algorithms)?;
        let destination = Destination::open(Some(table))?;
        let session = Session::new(group, &config, machine(), vec!["a CPU".into(); 2], table)?;
        Session { mode: Mode::Blocking, ..session }.run(&destination, &Output::hidden())
    }

    #[test]
    fn a_run_writes_a_table_that_can_be_read_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let (table, samples, plot) = (file("table.toml"), file("samples.csv"), file("plot.svg"));
        let flags = format!("--quick -b 1K -e 4K --samples {} --plot {}", samples.display(), plot.display());
        assert!(tune(&flags, &table, &host::ALGORITHMS).unwrap());
        let entries = Table::read(&table).unwrap().entries;
        assert_eq!((entries.len(), &entries[0].machine), (1, &machine()));
        assert_eq!(entries[0].curves.len(), 3);
        for curve in &entries[0].curves {
            assert_eq!((curve.points.len(), curve.points[1].bytes), (2, 4096));
            assert_eq!(curve.points[0].own.len(), host::ALGORITHMS.len());
        }
        let samples = fs::read_to_string(samples).unwrap();
        assert!(samples.lines().count() > 2 * host::ALGORITHMS.len(), "{samples}");
        assert!(fs::read_to_string(plot).unwrap().contains("one-shot-pull"));
        assert!(!file("table.toml.partial").exists());
    }

    #[test]
    fn sizes_that_are_kept_are_not_measured_again() {
        let folder = tempfile::tempdir().unwrap();
        let table = folder.path().join("table.toml");
        let flags = "--quick -b 1K -e 16K --placement anywhere";
        // What an interrupted run left: one size of three, which says that nothing takes no time at all.
        let key = format!("{:?} {}", machine(), config(flags).unwrap().key());
        let mut kept = Kept::open(&table, key, false).unwrap();
        let left = Measured {
            algorithm: "one-shot-ll".into(),
            blocks: 1,
            threads: 32,
            home: Home::Plain,
            in_place: false,
            calls: 1,
            rounds: 1,
            samples_us: vec![0.001],
            wrong: 0,
        };
        let record = SizeRecord { dtype: "bf16".into(), bytes: 4096, measured: vec![left], missing: Vec::new() };
        kept.add(record).unwrap();
        assert!(tune(flags, &table, &host::ALGORITHMS).unwrap());
        let curve = &Table::read(&table).unwrap().entries[0].curves[0];
        let own: Vec<_> = curve.points.iter().map(|point| point.own.len()).collect();
        assert_eq!(own, [host::ALGORITHMS.len(), 1, host::ALGORITHMS.len()]);
    }

    #[test]
    fn the_entries_of_other_machines_stay() {
        let folder = tempfile::tempdir().unwrap();
        let table = folder.path().join("table.toml");
        let flags = "--quick -b 1K -e 1K --placement anywhere";
        assert!(tune(flags, &table, &host::ALGORITHMS).unwrap());
        let mut other = Table::read(&table).unwrap();
        other.entries[0].machine.gpu = "another GPU".into();
        other.write(&table).unwrap();
        assert!(tune(flags, &table, &host::ALGORITHMS).unwrap());
        assert_eq!(Table::read(&table).unwrap().entries.len(), 2);
    }

    #[test]
    fn where_nothing_can_be_measured_there_is_no_table() {
        let folder = tempfile::tempdir().unwrap();
        let table = folder.path().join("table.toml");
        let error = tune("--quick -b 1K -e 1K", &table, &[]).unwrap_err();
        assert!(format!("{error:#}").contains("nothing"), "{error:#}");
        assert!(!table.exists());
    }
}
