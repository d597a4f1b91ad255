//! A run: the header, the tables, the footer, the report.

use std::{
    io::{self, Write},
    path::Path,
};

use anyhow::{Context, Result, anyhow, ensure};
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use peersum::{Algorithm, DType, Plan};

use super::{
    backend::{Backend, Group},
    case::{Case, Mode},
    datum::Datum,
    geometry::Geometry,
    machine,
    measure::{self, Call, Job, Rank, Schedule},
    options::Config,
    report::{Record, Report, TableRecord, average_busbw},
    sizes::{Size, Step},
    table::{self, HALVES},
};

/// A run on one backend.
pub(crate) struct Session<'a, G> {
    pub(crate) group: G,
    pub(crate) backend: Backend,
    /// Why the ranks are not GPUs, unless the host was asked for.
    pub(crate) instead_of_gpus: Option<String>,
    pub(crate) config: &'a Config,
    /// A table for each.
    pub(crate) modes: Vec<Mode>,
    /// Launches of the graph in graph mode.
    pub(crate) replays: usize,
    pub(crate) report: Report,
}

impl<G: Group> Session<'_, G> {
    /// Runs all of it. The table goes to standard output; `false` says that something was wrong.
    pub(crate) fn run(mut self, report_file: Option<&Path>) -> Result<bool> {
        let plans = self.plans()?;
        if let Some(fault) = self.config.fault {
            let world = self.group.devices().len();
            ensure!(fault.rank < world, "--inject-fault: there is no rank {} of {world}", fault.rank);
        }
        if let Some(file) = report_file {
            self.report.write_beside(file)?;
        }
        let mut output = Output::new(self.halves());
        output.print(|out| self.header(out, &plans))?;
        for mode in self.modes.clone() {
            if let Err(error) = self.table(mode, &mut output) {
                // Of the terminal or the pipe: nobody reads on.
                if error.is::<io::Error>() {
                    return Err(error);
                }
                let message = format!("{error:#}");
                output.print(|out| writeln!(out, "# ERROR: {message}"))?;
                output.progress.suspend(|| eprintln!("peersum: error: {message}"));
                self.report.errors.push(message);
                break;
            }
        }
        output.progress.finish_and_clear();
        output.print(|out| writeln!(out, "#\n# Collective test concluded: all_reduce\n#"))?;
        let passed = self.report.finish();
        if let Some(file) = report_file {
            self.report.write(file)?;
        }
        Ok(passed)
    }

    /// The plan of every size, in the order of the first type's; what was forced and can't run is an error.
    fn plans(&self) -> Result<Vec<(usize, Plan)>> {
        let mut plans = Vec::new();
        for (number, &dtype) in self.config.dtypes.iter().enumerate() {
            for count in self.config.sweep.counts(dtype.size()) {
                let bytes = count * dtype.size();
                let plan = self.group.plan(count, dtype).with_context(|| format!("{bytes} B of {dtype}"))?;
                let Some(plan) = plan else { continue };
                if let Some(forced) = self.config.library.algorithm {
                    ensure!(
                        plan.algorithm == forced,
                        "{bytes} B of {dtype}: {forced} was forced, not {}",
                        plan.algorithm
                    );
                }
                if number == 0 {
                    plans.push((bytes, plan));
                }
            }
        }
        Ok(plans)
    }

    /// Halves of rows in all tables.
    fn halves(&self) -> u64 {
        let config = self.config;
        let counts: usize = config.dtypes.iter().map(|dtype| config.sweep.counts(dtype.size()).count()).sum();
        (self.modes.len() * config.cycles * config.ops.len() * counts * HALVES.len()) as u64
    }

    fn header(&self, out: &mut dyn Write, plans: &[(usize, Plan)]) -> io::Result<()> {
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
        let threads = match (self.backend, devices.iter().all(|device| device.core.is_some())) {
            (Backend::Cuda, _) => "CUDA, one process, a thread for each rank",
            (Backend::Host, true) => "host, a thread for each rank, pinned to a core of its own",
            (Backend::Host, false) => "host, a thread for each rank, not pinned: there are more ranks than cores",
        };
        match &self.instead_of_gpus {
            None => writeln!(out, "# Backend: {threads}")?,
            Some(reason) => writeln!(out, "# Backend: {threads}. Not GPUs, because {reason}")?,
        }
        match config.checks {
            0 => writeln!(out, "# Check: off")?,
            _ => writeln!(out, "# Check: every rank's bits against the definition (f32, in rank order, rounded once)")?,
        }
        plan_lines(out, plans)?;
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
                std::process::id(),
                machine::hostname(),
                device.name,
            )?;
        }
        Ok(())
    }

    /// One table: all rows in one mode.
    fn table(&mut self, mode: Mode, output: &mut Output) -> Result<()> {
        let first = self.report.results.len();
        let config = self.config;
        let replays = if mode == Mode::Graph { self.replays } else { 1 };
        output.print(|out| {
            writeln!(out, "#")?;
            write!(out, "# Timing: {}; {} calls", mode.describe(), config.iterations)?;
            if mode == Mode::Graph {
                write!(out, " a graph, {replays} replays")?;
            }
            writeln!(out, "; {}", config.combine.describe())?;
            table::header(out, config.per_iteration)
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
        let wrong_tests =
            (config.checks > 0).then(|| records.iter().filter(|record| record.complaint().is_some()).count());
        let average = average_busbw(records);
        self.report.tables.push(TableRecord { timing: mode, average_busbw_gb_per_s: average, wrong_tests });
        output.print(|out| table::footer(out, wrong_tests, average))
    }

    /// The rows of one type.
    fn rows<T: Datum>(&mut self, mode: Mode, cycle: usize, output: &mut Output) -> Result<()> {
        let config = self.config;
        let counts: Vec<usize> = config.sweep.counts(size_of::<T>()).collect();
        let Some(&largest) = counts.iter().max() else { return Ok(()) };
        let plans: Vec<Option<Plan>> =
            counts.iter().map(|&count| self.group.plan(count, T::DTYPE)).collect::<Result<_, _>>()?;
        let geometry = Geometry::new::<T>(largest, config.unalign);
        let mut ranks = self.group.ranks::<T>(&geometry)?;
        measure::fill(&mut ranks, &geometry)?;
        let schedule = Schedule {
            iterations: config.iterations,
            warmup: config.warmup,
            replays: if mode == Mode::Graph { self.replays } else { 1 },
            per_iteration: config.per_iteration,
        };
        for &op in &config.ops {
            for (&count, &plan) in counts.iter().zip(&plans) {
                let row = Row { case: Case { count, dtype: T::DTYPE, op }, mode, cycle, plan, schedule, geometry };
                row.run(&mut ranks, config, output, &mut self.report)?;
            }
        }
        Ok(())
    }
}

/// One row.
struct Row {
    case: Case,
    mode: Mode,
    cycle: usize,
    plan: Option<Plan>,
    schedule: Schedule,
    geometry: Geometry,
}

impl Row {
    fn run<T: Datum, R: Rank<T>>(
        &self,
        ranks: &mut [R],
        config: &Config,
        output: &mut Output,
        report: &mut Report,
    ) -> Result<()> {
        let mut complaints = Vec::new();
        let mut line = Vec::new();
        table::row_start(&mut line, &self.case)?;
        for placement in HALVES {
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
                geometry: self.geometry,
                checks: config.checks,
                fault: config.fault,
            };
            let outcome = measure::measure(ranks, &job)?;
            let record = Record::new(&call, &self.schedule, config.combine, &outcome, self.plan, self.cycle);
            table::half(&mut line, &record.half(), config.per_iteration)?;
            complaints.extend(record.complaint());
            report.results.push(record);
            output.progress.inc(1);
        }
        output.print(|out| {
            out.write_all(&line)?;
            writeln!(out)?;
            complaints.iter().try_for_each(|complaint| writeln!(out, "{complaint}"))
        })
    }
}

/// Says how sizes are done: one line for each run of sizes that are done alike.
fn plan_lines(out: &mut dyn Write, plans: &[(usize, Plan)]) -> io::Result<()> {
    let describe = |plan: &Plan| (plan.algorithm, plan.blocks, plan.threads);
    for alike in plans.chunk_by(|(_, a), (_, b)| describe(a) == describe(b)) {
        let [(first, plan), ..] = alike else { continue };
        let (last, _) = alike[alike.len() - 1];
        let (algorithm, blocks, threads): (Algorithm, u32, u32) = describe(plan);
        let sizes = match Size(*first as u64) {
            first if first == Size(last as u64) => first.to_string(),
            first => format!("{first} to {}", Size(last as u64)),
        };
        writeln!(out, "# Plan: {sizes}: {algorithm}, blocks: {blocks}, threads of a block: {threads}")?;
    }
    Ok(())
}

/// Standard output, and the progress bar on standard error where that is a terminal.
struct Output {
    progress: ProgressBar,
}

impl Output {
    fn new(steps: u64) -> Self {
        // Indicatif draws nothing where standard error is no terminal.
        let progress = ProgressBar::new(steps);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
            progress.set_style(style);
        }
        Output { progress }
    }

    /// Prints above the bar.
    fn print(&self, write: impl FnOnce(&mut io::StdoutLock<'static>) -> io::Result<()>) -> Result<()> {
        self.progress.suspend(|| {
            let mut out = io::stdout().lock();
            write(&mut out)?;
            Ok(out.flush()?)
        })
    }
}
