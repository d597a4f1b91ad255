//! The flags of `peersum perf`, and what they come to.

use std::{path::PathBuf, time::Duration};

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use peersum::{Algorithm, DType, Nccl, Options, Overlap, ReduceOp, TableFrom};

use super::compare::{Compared, Rival};
use crate::{
    bandwidth,
    dtypes::{TypeChoice, dtypes, once_each},
    measure::{candidate::Home, case::Mode, run::Fault, statistics::Combine},
    model::hops::Parameters,
    sizes::{Size, Step, Sweep},
};

/// What `peersum perf` is told.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = bandwidth::EXPLANATION)]
pub(crate) struct Arguments {
    /// First size: bytes, or with a suffix K, M, G (powers of 1024) [default: 1K]
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", help_heading = "Sizes")]
    min_bytes: Option<Size>,

    /// Last size [default: 64M]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", help_heading = "Sizes")]
    max_bytes: Option<Size>,

    /// Each size is this many times the one before; 1 turns to --stepbytes [default: 4]
    #[arg(short = 'f', long = "stepfactor", value_name = "N", help_heading = "Sizes")]
    step_factor: Option<u64>,

    /// Each size is this much more than the one before [default with -f 1: 1M]
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", help_heading = "Sizes")]
    step_bytes: Option<Size>,

    /// Element type: float (f32), half (f16), bfloat16 (bf16) or all; several with commas
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", default_value = "float", value_delimiter = ',')]
    datatype: Vec<TypeChoice>,

    /// Reduction: sum, avg, max, min or all; several with commas
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum", value_delimiter = ',')]
    op: Vec<OpChoice>,

    /// Timed calls per size; in graph mode, calls in the graph
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20, help_heading = "Timing")]
    iterations: usize,

    /// Calls before the timed ones; in graph mode rounded up to whole replays
    #[arg(short = 'w', long = "warmup_iters", value_name = "N", default_value_t = 5, help_heading = "Timing")]
    warmup: usize,

    /// Goes through all rows this many times: shows what drifts as the machine warms up
    #[arg(short = 'N', long = "run_cycles", value_name = "N", default_value_t = 1, help_heading = "Timing")]
    cycles: usize,

    /// Replays of the graph; 0 measures eager calls. CUDA only [default: 10]
    #[arg(short = 'G', long = "cudagraph", value_name = "N", help_heading = "Timing")]
    replays: Option<usize>,

    /// How calls are issued; several with commas give a table each. CUDA only [default: graph, or queued with -G 0]
    #[arg(long, value_name = "MODE", value_delimiter = ',', help_heading = "Timing")]
    timing: Vec<Mode>,

    /// The ranks' times combined to one, by number or name: rank0, mean, min, max
    #[arg(short = 'a', long = "average", value_name = "RULE", default_value = "3", help_heading = "Timing")]
    combine: Combine,

    /// 1 adds columns for the single calls (graph mode: replays): fastest, slowest, 99th percentile, deviation
    #[arg(
        short = 'I', long = "per_iter_timing", value_name = "0|1", default_value_t = 0,
        value_parser = clap::value_parser!(u8).range(0..=1), help_heading = "Timing"
    )]
    per_iteration: u8,

    /// Checks per size and placement; each does two calls, of exact integers and of values of many magnitudes, and
    /// compares all ranks' bits with the definition. Where GPUs have more than 16 MiB in all, each is one call whose
    /// elements they make and compare themselves. 0 turns checking off
    #[arg(short = 'c', long = "check", value_name = "N", default_value_t = 1)]
    checks: usize,

    /// Shifts the buffers by this many elements from their alignment of 256 bytes
    #[arg(short = 'u', long = "unalign", value_name = "K", default_value_t = 0)]
    unalign: usize,

    /// Times these too, in turns with what the library chooses, and prints them beside it: nccl, the name of an
    /// algorithm (see --algorithm), or all; several with commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "Comparison")]
    compare: Vec<Rival>,

    /// Draws time and bus bandwidth over the size to a file, of all that was timed out of place, and where the choice
    /// changes
    #[arg(long, value_name = "FILE.svg", help_heading = "Comparison")]
    pub(crate) plot: Option<PathBuf>,

    /// Prints under each table how near each row is to what `peersum probe` found that it must take: its report
    #[arg(long, value_name = "FILE", help_heading = "Comparison")]
    pub(crate) limits: Option<PathBuf>,

    /// Writes all figures to a file, as JSON; an older file of that name is replaced
    #[arg(short = 'J', long = "output_file", value_name = "FILE.json")]
    pub(crate) output_file: Option<PathBuf>,

    /// Ranks [default: all GPUs; on the host one per core, 2 to 8]. Of processes, each is one
    #[arg(short = 'g', long = "ngpus", value_name = "N", help_heading = "Ranks")]
    pub(crate) ranks: Option<usize>,

    /// Devices of the ranks, as 0,1,2; a device may stand several times
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Ranks")]
    pub(crate) devices: Vec<usize>,

    /// Where ranks are: GPUs, the CPU, or GPUs if there are any
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Ranks")]
    pub(crate) backend: BackendChoice,

    /// What ranks are: threads of this process, or processes, of which a launcher has started this as one (`peersum launch`,
    /// torchrun, mpirun, srun); or processes if it has started several
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Ranks")]
    pub(crate) ranks_are: RanksAre,

    /// Seconds that a rank waits for its peers before the run fails, saying for whom [default: 10, with NCCL 30]
    #[arg(short = 'T', long = "timeout", value_name = "S", help_heading = "Library")]
    timeout: Option<f64>,

    /// Where the buffers lie: 0 anywhere, 2 in symmetric memory, which peers read where it is (CUDA only; nccl-tests'
    /// 1, local registration, has no meaning here)
    #[arg(
        short = 'R',
        long = "local_register",
        value_name = "0/2",
        default_value = "0",
        value_parser = ["0", "2"],
        help_heading = "Library"
    )]
    local_register: String,
    #[arg(long, value_name = "NAME", help = algorithm_help(), help_heading = "Library")]
    algorithm: Option<Algorithm>,

    /// Runs every call with this many blocks
    #[arg(long, value_name = "N", help_heading = "Library", value_parser = clap::value_parser!(u32).range(1..))]
    blocks: Option<u32>,

    /// Runs every call with this many threads per block. CUDA only
    #[arg(long, value_name = "N", help_heading = "Library", value_parser = clap::value_parser!(u32).range(1..))]
    threads: Option<u32>,

    /// How far a call's kernel may overlap with the next one's (programmatic dependent launch). CUDA only [default:
    /// early]
    #[arg(long, value_name = "HOW", help_heading = "Library")]
    overlap: Option<OverlapChoice>,

    /// Staging per rank; longer messages go through it in chunks [default: the backend's own]
    #[arg(long, value_name = "SIZE", help_heading = "Library")]
    staging: Option<Size>,

    /// NCCL's library, or the folder that it is in. CUDA only [default: where the system finds it]
    #[arg(long, value_name = "PATH", help_heading = "Library")]
    nccl_library: Option<PathBuf>,

    /// The table of choices that `peersum tune` wrote, or none for the built-in ones. CUDA only [default: the user's]
    #[arg(long, value_name = "FILE|none", help_heading = "Library")]
    table: Option<PathBuf>,

    /// Never hands a call over to NCCL, whose bits depend on the size of the message. CUDA only
    #[arg(long, help_heading = "Library")]
    deterministic: bool,

    /// Flips a bit in the output of a rank, out of place, at one size: to see that the check sees it
    #[arg(long, value_name = "RANK:BYTES", hide = true, value_parser = parse_fault)]
    inject_fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    Auto,
    Host,
    Cuda,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RanksAre {
    Auto,
    Threads,
    Processes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OpChoice {
    Sum,
    #[value(alias = "average")]
    Avg,
    Max,
    Min,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OverlapChoice {
    /// The next kernel's blocks come while a call runs, and wait for its end
    Early,
    /// The next kernel is made ready while a call runs, and starts at its end
    Late,
    /// The next kernel starts when the call has finished
    Off,
}

/// How long ranks wait where nothing is said: a rank that stays away is to show soon, and none here has other work.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The same where NCCL is to be joined, which takes some seconds.
const TIMEOUT_OF_NCCL: Duration = Duration::from_secs(30);

/// A run, checked as far as it can be without knowing the backend.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) sweep: Sweep,
    pub(crate) dtypes: Vec<DType>,
    pub(crate) ops: Vec<ReduceOp>,
    pub(crate) iterations: usize,
    pub(crate) warmup: usize,
    pub(crate) cycles: usize,
    pub(crate) combine: Combine,
    pub(crate) per_iteration: bool,
    pub(crate) checks: usize,
    pub(crate) unalign: usize,
    pub(crate) fault: Option<Fault>,
    pub(crate) compared: Compared,
    /// What calls must take, and which of it was assumed.
    pub(crate) limits: Option<(Parameters, Vec<&'static str>)>,
    pub(crate) library: Options,
}

impl Config {
    pub(crate) fn new(arguments: &Arguments) -> Result<Self> {
        ensure!(arguments.iterations > 0, "-n 0 measures nothing: time at least one call");
        ensure!(arguments.cycles > 0, "-N 0: a run without end has no report; give the number of cycles");
        if let Some(file) = &arguments.output_file {
            ensure!(
                file.extension().is_some_and(|extension| extension == "json"),
                "-J {}: the file's name must end in .json, the one format there is",
                file.display()
            );
        }
        let config = Config {
            sweep: arguments.sweep()?,
            dtypes: dtypes(&arguments.datatype),
            ops: arguments.ops(),
            iterations: arguments.iterations,
            warmup: arguments.warmup,
            cycles: arguments.cycles,
            combine: arguments.combine,
            per_iteration: arguments.per_iteration == 1,
            checks: arguments.checks,
            unalign: arguments.unalign,
            fault: arguments.inject_fault,
            compared: Compared::new(&arguments.compare),
            limits: arguments.limits.as_deref().map(Parameters::read).transpose()?,
            library: arguments.library()?,
        };
        if let Some(file) = &arguments.plot {
            ensure!(
                file.extension().is_some_and(|extension| extension == "svg"),
                "--plot {}: the file's name must end in .svg, the one format there is",
                file.display()
            );
            ensure!(
                config.dtypes.len() == 1 && config.ops.len() == 1 && arguments.timing.len() < 2,
                "--plot draws one type, one reduction and one timing: give one of each with -d, -o and --timing"
            );
        }
        Ok(config)
    }

    /// The memory that tensors lie in.
    pub(crate) fn home(&self) -> Home {
        if self.library.symmetric_bytes > 0 { Home::Symmetric } else { Home::Plain }
    }
}

/// The modes of a run on CUDA, and the replays of its graphs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Modes {
    pub(crate) modes: Vec<Mode>,
    pub(crate) replays: usize,
}

impl Arguments {
    /// The flags that have a meaning on CUDA alone, as far as they are given.
    pub(crate) fn cuda_only(&self) -> Vec<&'static str> {
        let given = [
            (!self.devices.is_empty(), "--devices"),
            (self.replays.is_some_and(|replays| replays > 0), "--cudagraph"),
            (!self.timing.is_empty(), "--timing"),
            (self.threads.is_some(), "--threads"),
            (self.overlap.is_some(), "--overlap"),
            (self.local_register == "2", "-R 2"),
            (self.nccl_library.is_some(), "--nccl-library"),
            (self.table.is_some(), "--table"),
            (self.deterministic, "--deterministic"),
        ];
        given.into_iter().filter_map(|(given, flag)| given.then_some(flag)).collect()
    }

    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn modes(&self) -> Result<Modes> {
        let graphs = self.timing.contains(&Mode::Graph);
        match (self.replays, graphs) {
            (Some(0), true) => bail!("--timing graph with -G 0: a graph must be replayed at least once"),
            (Some(1..), false) if !self.timing.is_empty() => {
                bail!("-G counts the replays of a graph, but --timing has no graph")
            }
            _ => {}
        }
        let default = if self.replays == Some(0) { Mode::Queued } else { Mode::Graph };
        let modes = if self.timing.is_empty() { vec![default] } else { self.timing.clone() };
        Ok(Modes { modes, replays: self.replays.unwrap_or(10).max(1) })
    }

    fn sweep(&self) -> Result<Sweep> {
        const DEFAULT_MIN: u64 = 1 << 10;
        const DEFAULT_MAX: u64 = 64 << 20;
        let (min_bytes, max_bytes) = match (self.min_bytes, self.max_bytes) {
            (Some(min), Some(max)) => (min.0, max.0),
            (Some(min), None) => (min.0, DEFAULT_MAX.max(min.0)),
            (None, Some(max)) => (DEFAULT_MIN.min(max.0), max.0),
            (None, None) => (DEFAULT_MIN, DEFAULT_MAX),
        };
        ensure!(
            min_bytes <= max_bytes,
            "the first size (-b {}) is greater than the last (-e {})",
            Size(min_bytes),
            Size(max_bytes)
        );
        let step = match (self.step_factor, self.step_bytes) {
            (None, None) => Step::Factor(4),
            (Some(0), _) => bail!("-f 0: a factor of 2 or more multiplies, 1 turns to --stepbytes"),
            (Some(1) | None, bytes) => Step::Bytes(bytes.map_or(1 << 20, |bytes| bytes.0)),
            (Some(factor), None) => Step::Factor(factor),
            (Some(_), Some(_)) => bail!("-f and -i are both given: sizes can be multiplied or added to, not both"),
        };
        ensure!(step != Step::Bytes(0), "-i 0: the sizes would never reach the last one");
        ensure!(
            min_bytes > 0 || matches!(step, Step::Bytes(_)),
            "-b 0: no factor leads from 0 to the next size; give a step with -i, or start at 1"
        );
        Ok(Sweep { min_bytes, max_bytes, step })
    }

    fn ops(&self) -> Vec<ReduceOp> {
        let mut ops = Vec::new();
        for choice in &self.op {
            match choice {
                OpChoice::Sum => ops.push(ReduceOp::Sum),
                OpChoice::Avg => ops.push(ReduceOp::Average),
                OpChoice::Max => ops.push(ReduceOp::Max),
                OpChoice::Min => ops.push(ReduceOp::Min),
                OpChoice::All => ops.extend(ReduceOp::ALL),
            }
        }
        once_each(ops)
    }

    fn library(&self) -> Result<Options> {
        let nccl = match self.algorithm {
            Some(Algorithm::Nccl) => Nccl::Required,
            _ if Compared::new(&self.compare).with_nccl() => Nccl::IfThere,
            _ => Nccl::default(),
        };
        let timeout = if nccl == Nccl::default() { TIMEOUT } else { TIMEOUT_OF_NCCL };
        let mut options = Options::default().timeout(timeout).nccl(nccl);
        if let Some(seconds) = self.timeout {
            let timeout = Duration::try_from_secs_f64(seconds).ok().filter(|timeout| !timeout.is_zero());
            let Some(timeout) = timeout else { bail!("-T {seconds}: a timeout is a positive number of seconds") };
            options = options.timeout(timeout);
        }
        if let Some(Size(bytes)) = self.staging {
            options = options.staging_bytes(bytes as usize);
        }
        if let Some(overlap) = self.overlap {
            options = options.overlap(match overlap {
                OverlapChoice::Early => Overlap::Early,
                OverlapChoice::Late => Overlap::Late,
                OverlapChoice::Off => Overlap::Off,
            });
        }
        if self.local_register == "2" {
            // Two buffers of the largest size, with what stands around their tensors.
            let around = (4 << 10) + self.unalign as u64 * 4;
            let bytes = self.sweep()?.max_bytes.saturating_add(around).saturating_mul(2);
            options = options.symmetric_bytes(usize::try_from(bytes)?);
        }
        options.nccl_library = self.nccl_library.clone();
        options.table = match &self.table {
            None => TableFrom::default(),
            Some(none) if none.as_os_str() == "none" => TableFrom::Nowhere,
            Some(file) => TableFrom::File(file.clone()),
        };
        options.deterministic = self.deterministic;
        options.algorithm = self.algorithm;
        options.blocks = self.blocks;
        options.threads = self.threads;
        Ok(options)
    }
}

/// Names them all, so that no list has to follow the library's.
fn algorithm_help() -> String {
    let names = |on_the_host| {
        let chosen = |algorithm: &Algorithm| peersum::host::ALGORITHMS.contains(algorithm) == on_the_host;
        let names: Vec<_> = Algorithm::ALL.into_iter().filter(chosen).map(Algorithm::name).collect();
        names.join(", ")
    };
    format!("Runs every call by this algorithm: {}; on GPUs only: {}, {}", names(true), names(false), Algorithm::Nccl)
}

fn parse_fault(text: &str) -> Result<Fault, String> {
    let parse = || {
        let (rank, bytes) = text.split_once(':')?;
        Some(Fault { rank: rank.parse().ok()?, bytes: bytes.parse().ok()? })
    };
    parse().ok_or_else(|| format!("'{text}' is not RANK:BYTES"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Perf {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(flags: &str) -> Result<Arguments> {
        Ok(Perf::try_parse_from(["perf"].into_iter().chain(flags.split_whitespace()))?.arguments)
    }

    fn config(flags: &str) -> Result<Config> {
        Config::new(&parse(flags)?)
    }

    fn error(flags: &str) -> String {
        config(flags).unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_are_the_decode_case() {
        let config = config("").unwrap();
        assert_eq!(config.sweep, Sweep { min_bytes: 1024, max_bytes: 64 << 20, step: Step::Factor(4) });
        assert_eq!((config.iterations, config.checks, config.combine), (20, 1, Combine::Max));
        assert_eq!((config.dtypes, config.ops), (vec![DType::F32], vec![ReduceOp::Sum]));
        assert_eq!((config.library, config.cycles), (Options::default().timeout(TIMEOUT), 1));
    }

    #[test]
    fn nccl_tests_flags_mean_what_they_mean_there() {
        let config = config("-b 8 -e 128M -f 2 -n 100 -w 10 -c 0 -d half -o max -a 1 -u 3 -I 1 -T 5 -N 3").unwrap();
        assert_eq!(config.sweep, Sweep { min_bytes: 8, max_bytes: 128 << 20, step: Step::Factor(2) });
        assert_eq!((config.iterations, config.warmup, config.checks, config.unalign), (100, 10, 0, 3));
        assert_eq!((config.dtypes, config.ops), (vec![DType::F16], vec![ReduceOp::Max]));
        assert_eq!((config.combine, config.per_iteration), (Combine::Mean, true));
        assert_eq!((config.library.timeout, config.cycles), (Duration::from_secs(5), 3));
    }

    #[test]
    fn one_end_given_moves_the_default_of_the_other() {
        let ends = |flags| config(flags).map(|config| (config.sweep.min_bytes, config.sweep.max_bytes)).unwrap();
        assert_eq!(ends("-b 1G"), (1 << 30, 1 << 30));
        assert_eq!(ends("-e 512"), (512, 512));
        assert_eq!(ends("-b 2K"), (2048, 64 << 20));
    }

    #[test]
    fn steps_are_added_or_multiplied() {
        let step = |flags| config(flags).map(|config| config.sweep.step).unwrap();
        assert_eq!(step("-i 4K"), Step::Bytes(4096));
        assert_eq!(step("-f 1"), Step::Bytes(1 << 20));
        assert_eq!(step("-f 1 -i 2M"), Step::Bytes(2 << 20));
        assert!(error("-f 2 -i 4K").contains("not both"));
        assert!(error("-f 0").contains("-f 0"));
        assert!(error("-i 0").contains("never"));
        assert!(error("-b 0").contains("-b 0"));
        assert!(config("-b 0 -i 4K").is_ok());
    }

    #[test]
    fn what_can_not_be_is_said() {
        assert_eq!(error("-b 2M -e 1M"), "the first size (-b 2M) is greater than the last (-e 1M)");
        assert!(error("-n 0").contains("-n 0"));
        assert!(error("-N 0").contains("-N 0"));
        assert!(error("-T 0").contains("positive"));
        assert!(error("-T nan").contains("positive"));
        assert!(error("-J out.txt").contains(".json"));
        assert!(error("-o prod").contains("possible values: sum, avg, max, min, all"));
        assert!(error("-d double").contains("possible values: float, half, bfloat16, all"));
        assert!(error("--algorithm ring").contains("there are one-shot, two-shot"));
        assert!(error("-a 4").contains("possible values: 0, 1, 2, 3"));
        assert!(error("-e 8T").contains("'T'"));
        assert!(error("--compare ring").contains("there are one-shot, two-shot"));
        assert!(error("--plot out.png").contains(".svg"));
        for flags in ["-d all", "-o sum,max", "--timing graph,queued"] {
            assert!(error(&format!("--plot out.svg {flags}")).contains("draws one type"), "{flags}");
        }
    }

    #[test]
    fn nccl_is_joined_where_it_is_named() {
        let library = |flags| config(flags).unwrap().library;
        assert_eq!(library("").nccl, Nccl::default());
        assert_eq!(library("--compare one-shot").nccl, Nccl::default());
        assert_eq!(library("--compare one-shot,nccl").nccl, Nccl::IfThere);
        assert_eq!(library("--compare all").nccl, Nccl::IfThere);
        assert_eq!(library("--algorithm nccl --compare all").nccl, Nccl::Required);
        assert_eq!(library("--nccl-library /a/b").nccl_library, Some("/a/b".into()));
    }

    #[test]
    fn the_table_is_the_users_a_file_or_none() {
        let library = |flags| config(flags).unwrap().library;
        assert_eq!((library("").table, library("").deterministic), (TableFrom::Usual, false));
        assert_eq!(library("--table none").table, TableFrom::Nowhere);
        assert_eq!(library("--table a.toml --deterministic").table, TableFrom::File("a.toml".into()));
        assert!(library("--deterministic").deterministic);
        assert_eq!(
            parse("--table none --deterministic --nccl-library x").unwrap().cuda_only(),
            ["--nccl-library", "--table", "--deterministic"]
        );
    }

    #[test]
    fn symmetric_memory_has_room_for_both_buffers() {
        assert_eq!(config("-e 1M").unwrap().library.symmetric_bytes, 0);
        assert_eq!(config("-e 1M -R 0").unwrap().library.symmetric_bytes, 0);
        let bytes = config("-e 1M -R 2").unwrap().library.symmetric_bytes;
        assert!((2 << 20..3 << 20).contains(&bytes), "{bytes}");
        assert!(config("-e 1M -R 2 --unalign 64").unwrap().library.symmetric_bytes >= bytes + 2 * 64 * 4);
        assert_eq!(parse("-R 2").unwrap().cuda_only(), ["-R 2"]);
        assert!(error("-R 1").contains("possible values: 0, 2"));
    }

    #[test]
    fn lists_have_no_doubles() {
        let config = config("-d f16,all -o min,all").unwrap();
        assert_eq!(config.dtypes, [DType::F16, DType::F32, DType::BF16]);
        assert_eq!(config.ops, [ReduceOp::Min, ReduceOp::Sum, ReduceOp::Average, ReduceOp::Max]);
    }

    #[test]
    fn the_mode_is_graph_unless_said_otherwise() {
        let modes = |flags| parse(flags).unwrap().modes();
        assert_eq!(modes("").unwrap(), Modes { modes: vec![Mode::Graph], replays: 10 });
        assert_eq!(modes("-G 3").unwrap(), Modes { modes: vec![Mode::Graph], replays: 3 });
        assert_eq!(modes("-G 0").unwrap().modes, [Mode::Queued]);
        assert_eq!(
            modes("--timing synchronized,queued,graph").unwrap().modes,
            [Mode::Synchronized, Mode::Queued, Mode::Graph]
        );
        assert!(modes("--timing graph -G 0").is_err());
        assert!(modes("--timing queued -G 5").is_err());
    }

    #[test]
    fn calls_overlap_as_far_as_is_said() {
        let overlap = |flags| config(flags).unwrap().library.overlap;
        assert_eq!(overlap(""), Overlap::default());
        // What --help says.
        assert_eq!(overlap(""), Overlap::Early);
        for (flags, want) in
            [("--overlap early", Overlap::Early), ("--overlap late", Overlap::Late), ("--overlap off", Overlap::Off)]
        {
            assert_eq!(overlap(flags), want);
            assert_eq!(parse(flags).unwrap().cuda_only(), ["--overlap"]);
        }
        assert!(error("--overlap on").contains("possible values: early, late, off"));
    }

    #[test]
    fn help_names_every_algorithm() {
        let help = <Perf as clap::CommandFactory>::command().render_long_help().to_string();
        // Lines are broken wherever they are full.
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let words: Vec<_> = help.split([' ', ',', ';']).collect();
        assert!(Algorithm::ALL.iter().all(|algorithm| words.contains(&algorithm.name())), "{help}");
        assert!(help.contains("two-shot-ll; on GPUs only: one-shot-direct"), "{help}");
        assert!(help.contains("two-shot-direct, nccl"), "{help}");
    }

    #[test]
    fn help_says_what_busbw_is_not() {
        let help = <Perf as clap::CommandFactory>::command().render_long_help().to_string();
        assert!(help.contains("2(n-1)/n") && help.contains("not measured traffic"), "{help}");
        assert!(!help.contains("inject"));
    }
}
