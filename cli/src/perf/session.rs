//! A run: the header, the tables, the footer, the report.

use std::{
    io::{self, Write},
    path::Path,
};

use anyhow::{Context, Result, anyhow, ensure};
use half::{bf16, f16};
use peersum::{Algorithm, DType, Plan, ReduceOp};

use super::{
    chart::Chart,
    compare::Field,
    options::Config,
    outlook::{Outlook, missing_lines, plan_lines},
    report::{LIMITS_HEADER, Record, Report, TableRecord, average_busbw},
    table::{self, HALVES},
};
use crate::{
    measure::{
        barrier::Broken,
        candidate::{Home, Way},
        case::{Case, Mode, Placement},
        datum::Datum,
        geometry::Geometry,
        group::{Backend, Group},
        machine,
        rank::{Call, Rank, Schedule},
        run::{self, Job},
        team::{Running, Team},
    },
    output::Output,
    sizes::{Size, Step},
};

/// Turns of each candidate where there are several.
const ROUNDS: usize = 5;

/// What a run writes beside the table.
pub(crate) struct Files<'a> {
    pub(crate) report: Option<&'a Path>,
    pub(crate) plot: Option<&'a Path>,
}

/// A run on one backend.
pub(crate) struct Session<'a, G> {
    pub(crate) group: G,
    pub(crate) team: &'a Team,
    pub(crate) backend: Backend,
    /// Why the ranks are not GPUs, unless the host was asked for.
    pub(crate) instead_of_gpus: Option<String>,
    pub(crate) config: &'a Config,
    /// Timed in turns with what the library chooses.
    pub(crate) algorithms: Vec<Algorithm>,
    /// A table for each.
    pub(crate) modes: Vec<Mode>,
    /// Launches of the graph in graph mode.
    pub(crate) replays: usize,
    pub(crate) report: Report,
}

impl<G: Group> Session<'_, G> {
    /// Runs all of it. The table goes to standard output; `false` says that something was wrong. Of ranks that are
    /// processes, the first prints and writes, and all return the same.
    pub(crate) fn run(mut self, files: &Files<'_>) -> Result<bool> {
        let files = if self.team.tells() { files } else { &Files { report: None, plot: None } };
        let outlook = self.outlook()?;
        if let Some(fault) = self.config.fault {
            let world = self.group.devices().len();
            ensure!(fault.rank < world, "--inject-fault: there is no rank {} of {world}", fault.rank);
        }
        if let Some(file) = files.report {
            self.report.write_beside(file)?;
        }
        let chart = files.plot.map(|file| self.chart(file, &outlook)).transpose()?;
        let mut output = if self.team.tells() { Output::new(self.halves()) } else { Output::hidden() };
        output.print(|out| self.header(out, &outlook))?;
        for mode in self.modes.clone() {
            if let Err(error) = self.table(mode, &mut output) {
                // Of the terminal or the pipe: nobody reads on.
                if error.is::<io::Error>() {
                    return Err(error);
                }
                let message = format!("{error:#}");
                output.print(|out| writeln!(out, "# ERROR: {message}"))?;
                // The rank that has the reason says it.
                if self.team.tells() || !error.is::<Broken>() {
                    output.progress.suspend(|| eprintln!("peersum: error: {message}"));
                }
                self.report.errors.push(message);
                break;
            }
        }
        output.progress.finish_and_clear();
        output.print(|out| writeln!(out, "#\n# Collective test concluded: all_reduce\n#"))?;
        let passed = self.report.finish();
        if let Some(file) = files.report {
            self.report.write(file)?;
        }
        if let Some(chart) = chart {
            chart.draw(&self.report.results)?;
        }
        Ok(passed)
    }

    /// How every size will be done, and who can't be timed at it; what was forced and can't run is an error.
    fn outlook(&mut self) -> Result<Outlook> {
        let config = self.config;
        let mut outlook = Outlook::default();
        for (number, &dtype) in config.dtypes.iter().enumerate() {
            for count in config.sweep.counts(dtype.size()) {
                let bytes = count * dtype.size();
                let located = || format!("{bytes} B of {dtype}");
                let [out_of_place, in_place] = HALVES.map(|placement| self.field(placement, count, dtype));
                let fields = [out_of_place.with_context(located)?, in_place.with_context(located)?];
                let Some(plan) = fields[0].candidates[0].plan else { continue };
                if let Some(forced) = config.library.algorithm {
                    ensure!(
                        plan.algorithm == forced,
                        "{bytes} B of {dtype}: {forced} was forced, not {}",
                        plan.algorithm
                    );
                }
                if number == 0 {
                    outlook.plan(bytes, plan);
                    for (index, &algorithm) in self.algorithms.iter().enumerate() {
                        let why_not = |field: &Field| field.others[index].as_ref().err().cloned();
                        let reasons = fields.each_ref().map(why_not);
                        outlook.candidate(algorithm, bytes, reasons.each_ref().map(Option::as_deref));
                    }
                }
            }
        }
        Ok(outlook)
    }

    fn field(&mut self, placement: Placement, count: usize, dtype: DType) -> peersum::Result<Field> {
        let config = self.config;
        let (group, algorithms) = (&mut self.group, &self.algorithms);
        Field::new(group, algorithms, &config.library, config.home(), placement, (count, dtype))
    }

    /// The drawing, with what is known of it beforehand: where the choice changes.
    fn chart(&mut self, file: &Path, outlook: &Outlook) -> Result<Chart> {
        let dtype = self.config.dtypes[0];
        let lies = self.config.home().of(Placement::OutOfPlace);
        let borders = outlook.borders(dtype.size(), |bytes| {
            let plan = self.group.plan(Way::Chosen, lies, bytes / dtype.size(), dtype);
            plan.ok().flatten().map(|plan| plan.algorithm)
        });
        Chart::new(file, self.group.devices(), self.config, borders)
    }

    /// Halves of rows in all tables.
    fn halves(&self) -> u64 {
        let config = self.config;
        let counts: usize = config.dtypes.iter().map(|dtype| config.sweep.counts(dtype.size()).count()).sum();
        (self.modes.len() * config.cycles * config.ops.len() * counts * HALVES.len()) as u64
    }

    fn header(&self, out: &mut dyn Write, outlook: &Outlook) -> io::Result<()> {
        let config = self.config;
        let devices = self.group.devices();
        writeln!(out, "# peersum version {}", env!("CARGO_PKG_VERSION"))?;
        writeln!(out, "# Collective test starting: all_reduce")?;
        let step = match config.sweep.step {
            Step::Factor(factor) => format!("{factor}(factor)"),
            Step::Bytes(bytes) => format!("{bytes}(bytes)"),
        };
        writeln!(
            out,
            "# nRanks {} minBytes {} maxBytes {} step: {step} warmup iters: {} iters: {} validation: {} graph: {} \
             unalign: {}",
            devices.len(),
            config.sweep.min_bytes,
            config.sweep.max_bytes,
            config.warmup,
            config.iterations,
            config.checks,
            if self.modes.contains(&Mode::Graph) { self.replays } else { 0 },
            config.unalign,
        )?;
        writeln!(out, "#")?;
        let are = match self.team.running() {
            Running::Threads => "threads of one process, one for each rank",
            Running::Processes => "processes, one for each rank",
        };
        let backend = match (self.backend, devices.iter().all(|device| device.core.is_some())) {
            (Backend::Cuda, _) => format!("CUDA, {are}"),
            (Backend::Host, true) => format!("host, {are}, pinned to a core of its own"),
            (Backend::Host, false) => format!("host, {are}, not pinned: there are more ranks than cores"),
        };
        match &self.instead_of_gpus {
            None => writeln!(out, "# Backend: {backend}")?,
            Some(reason) => writeln!(out, "# Backend: {backend}. Not GPUs, because {reason}")?,
        }
        match config.checks {
            0 => writeln!(out, "# Check: off")?,
            _ => writeln!(out, "# Check: every rank's bits against the definition (f32, in rank order, rounded once)")?,
        }
        if config.checks > 0 && (self.algorithms.contains(&Algorithm::Nccl) || outlook.hands_over()) {
            writeln!(out, "# Check of NCCL, whose order is its own: inputs whose sums are exact in any order")?;
            if config.ops.contains(&ReduceOp::Average) && !devices.len().is_power_of_two() {
                writeln!(out, "# Not checked: NCCL's averages of {} ranks, by a rounded reciprocal", devices.len())?;
            }
        }
        self.versions(out)?;
        plan_lines(out, &outlook.plans)?;
        self.reasons(out, &outlook.plans)?;
        if !self.algorithms.is_empty() {
            let names: Vec<_> = self.algorithms.iter().map(|algorithm| algorithm.name()).collect();
            writeln!(out, "# Compared: {}, in {ROUNDS} rounds in turns, medians of the rounds", names.join(", "))?;
            writeln!(out, "# Ratio: time of the choice / time of the other, below 1 where the choice is faster")?;
            if self.algorithms.contains(&Algorithm::Nccl) {
                writeln!(out, "# NCCL: by itself, without the gate that the library has before its calls")?;
            }
        }
        missing_lines(out, &outlook.missing)?;
        writeln!(out, "#")?;
        writeln!(out, "# Using devices")?;
        for (rank, device) in devices.iter().enumerate() {
            let (kind, number, at) = match (&device.pci, device.core) {
                (Some(pci), _) => ("device", device.ordinal, pci.as_str()),
                (None, Some(core)) => ("core", core, "cpu"),
                (None, None) => ("thread", device.ordinal, "cpu"),
            };
            writeln!(
                out,
                "#  Rank {rank:2} Group  0 Pid {:6} on {:>10} {kind} {number:2} [{at}] {}",
                device.process_id,
                machine::hostname(),
                device.name,
            )?;
        }
        Ok(())
    }

    fn versions(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.backend == Backend::Host {
            return Ok(());
        }
        let nccl = match (self.group.nccl(), self.config.home()) {
            (Ok(version), Home::Plain) => format!("NCCL {version}"),
            (Ok(version), Home::Symmetric) => match self.group.nccl_window() {
                Ok(()) => format!("NCCL {version} (symmetric memory is its window)"),
                Err(reason) => format!("NCCL {version} (symmetric memory is no window of it: {reason})"),
            },
            (Err(_), _) => "no NCCL".to_owned(),
        };
        let (driver, api) = self.report.driver();
        let version = env!("CARGO_PKG_VERSION");
        writeln!(out, "# Versions: peersum {version}, {nccl}, driver {driver}, CUDA of the driver {api}")
    }

    /// Why the choices are as they are, where the library can tell: of the first size of each.
    fn reasons(&self, out: &mut dyn Write, plans: &[(usize, Plan)]) -> io::Result<()> {
        let lies = self.config.home().of(Placement::OutOfPlace);
        let dtype = self.config.dtypes[0];
        for alike in plans.chunk_by(|(_, a), (_, b)| a.algorithm == b.algorithm) {
            let (bytes, _) = alike[0];
            let Some(why) = self.group.explain(lies, bytes / dtype.size(), dtype) else { continue };
            for (number, line) in why.lines().enumerate() {
                let lead = if number == 0 { format!("# Why at {}: ", Size(bytes as u64)) } else { "#   ".to_owned() };
                writeln!(out, "{lead}{line}")?;
            }
        }
        Ok(())
    }

    /// One table: all rows in one mode.
    fn table(&mut self, mode: Mode, output: &mut Output) -> Result<()> {
        let first = self.report.results.len();
        let config = self.config;
        output.print(|out| {
            writeln!(out, "#")?;
            write!(out, "# Timing: {}; {} calls", mode.describe(), config.iterations)?;
            if mode == Mode::Graph {
                write!(out, " a graph, {} replays", self.schedule(mode).replays * self.rounds())?;
            }
            writeln!(out, "; {}", config.combine.describe())?;
            let names: Vec<_> = self.algorithms.iter().map(|algorithm| algorithm.name()).collect();
            table::header(out, config.per_iteration, &names)
        })?;
        for cycle in 0..config.cycles {
            if config.cycles > 1 {
                output.print(|out| writeln!(out, "# Cycle {} of {}", cycle + 1, config.cycles))?;
            }
            for &dtype in &config.dtypes {
                match dtype {
                    DType::F32 => self.rows::<f32>(mode, cycle, output)?,
                    DType::F16 => self.rows::<f16>(mode, cycle, output)?,
                    DType::BF16 => self.rows::<bf16>(mode, cycle, output)?,
                    other => return Err(anyhow!("this command does not know the type {other}")),
                }
            }
        }
        let records = &self.report.results[first..];
        let wrong_tests = (config.checks > 0).then(|| records.iter().map(Record::wrong_candidates).sum());
        let average = average_busbw(records);
        self.report.tables.push(TableRecord { timing: mode, average_busbw_gb_per_s: average, wrong_tests });
        output.print(|out| table::footer(out, wrong_tests, average))?;
        self.limits(first, output)
    }

    /// How near the rows from `first` on are to what they must take, if that is known.
    fn limits(&mut self, first: usize, output: &mut Output) -> Result<()> {
        let Some((parameters, assumed)) = &self.config.limits else { return Ok(()) };
        let ranks = self.group.devices().len() as u32;
        let rows = &mut self.report.results[first..];
        let lines: Vec<_> = rows.iter_mut().filter_map(|row| row.hold_against(parameters, ranks)).collect();
        let host = self.backend == Backend::Host;
        output.print(|out| {
            writeln!(out, "#\n# What a call must take, by launch, hops and bytes: {parameters}")?;
            if host {
                writeln!(
                    out,
                    "# The limits are of kernels on GPUs, and these ranks are on the CPU: ratios say little"
                )?;
            }
            assumed.iter().try_for_each(|assumed| writeln!(out, "# Not measured: {assumed}"))?;
            writeln!(out, "# {}", &LIMITS_HEADER[2..])?;
            lines.iter().try_for_each(|line| writeln!(out, "# {}", &line[2..]))
        })
    }

    /// Alone, a candidate has all its calls in one round.
    fn rounds(&self) -> usize {
        if self.algorithms.is_empty() { 1 } else { ROUNDS }
    }

    /// Of one round.
    fn schedule(&self, mode: Mode) -> Schedule {
        Schedule {
            iterations: self.config.iterations,
            warmup: self.config.warmup,
            replays: if mode == Mode::Graph { self.replays.div_ceil(self.rounds()) } else { 1 },
            per_iteration: self.config.per_iteration,
        }
    }

    /// The rows of one type.
    fn rows<T: Datum>(&mut self, mode: Mode, cycle: usize, output: &mut Output) -> Result<()> {
        let config = self.config;
        let counts: Vec<usize> = config.sweep.counts(size_of::<T>()).collect();
        let Some(&largest) = counts.iter().max() else { return Ok(()) };
        let fields: Vec<[Field; 2]> = counts
            .iter()
            .map(|&count| {
                let [out_of_place, in_place] = HALVES.map(|placement| self.field(placement, count, T::DTYPE));
                Ok([out_of_place?, in_place?])
            })
            .collect::<Result<_>>()?;
        let (rounds, schedule) = (self.rounds(), self.schedule(mode));
        let homes = [config.home()];
        let geometry = Geometry::new::<T>(largest, config.unalign);
        let mut ranks = self.group.ranks::<T>(&geometry, &homes)?;
        run::fill(&mut ranks, self.team, &geometry, &homes)?;
        for &op in &config.ops {
            for (&count, fields) in counts.iter().zip(&fields) {
                let case = Case { count, dtype: T::DTYPE, op };
                let (team, algorithms) = (self.team, &self.algorithms[..]);
                let row = Row { case, mode, cycle, rounds, team, fields, algorithms, schedule, geometry };
                row.run(&mut ranks, config, output, &mut self.report)?;
            }
        }
        Ok(())
    }
}

/// One row.
struct Row<'a> {
    case: Case,
    mode: Mode,
    cycle: usize,
    rounds: usize,
    team: &'a Team,
    /// Who is timed, in each half.
    fields: &'a [Field; 2],
    /// Who they are but for the first.
    algorithms: &'a [Algorithm],
    schedule: Schedule,
    geometry: Geometry,
}

impl Row<'_> {
    fn run<T: Datum, R: Rank<T>>(
        &self,
        ranks: &mut [R],
        config: &Config,
        output: &mut Output,
        report: &mut Report,
    ) -> Result<()> {
        let mut remarks = Vec::new();
        let mut line = Vec::new();
        table::row_start(&mut line, &self.case)?;
        for (placement, field) in HALVES.into_iter().zip(self.fields) {
            output.progress.set_message(format!(
                "{} {} {} {}",
                Size(self.case.bytes() as u64),
                self.case.dtype,
                self.case.op,
                placement.name()
            ));
            let call = Call { case: self.case, placement, mode: self.mode };
            let job = Job {
                call,
                schedule: self.schedule,
                rounds: self.rounds,
                geometry: self.geometry,
                checks: config.checks,
                checked_by_ranks: false,
                fault: config.fault,
            };
            let outcomes = run::measure(ranks, self.team, &job, &field.candidates)?;
            let of = |number: usize| outcomes[number].as_ref().map(|outcome| (outcome, &field.candidates[number]));
            let first = of(0).map_err(|reason| anyhow!("{reason}"))?;
            let mut record = Record::new(&call, &self.schedule, config.combine, (self.cycle, self.rounds), first);
            table::half(&mut line, &record.half(), config.per_iteration)?;
            for (algorithm, other) in self.algorithms.iter().zip(&field.others) {
                let other = other.clone().and_then(|number| {
                    of(number).map_err(|reason| {
                        remarks.push(format!("# Not compared: {algorithm}, {}: {reason}", placement.name()));
                        reason.clone()
                    })
                });
                table::other(&mut line, record.compare(algorithm.name(), config.combine, other).half().as_ref())?;
            }
            remarks.extend(record.complaints());
            report.results.push(record);
            output.progress.inc(1);
        }
        output.print(|out| {
            out.write_all(&line)?;
            writeln!(out)?;
            remarks.iter().try_for_each(|remark| writeln!(out, "{remark}"))
        })
    }
}
