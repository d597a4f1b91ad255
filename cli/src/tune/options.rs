//! The flags of `peersum tune`, and what they come to.

use std::{path::PathBuf, time::Duration};

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use peersum::{DType, Nccl, Options, Placement, TableFrom};

use crate::{
    dtypes::{TypeChoice, dtypes, once_each},
    measure::{candidate::Home, geometry::Geometry, group},
    sizes::{Size, Step, Sweep},
};

/// What `peersum tune` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Ranks [default: all GPUs]
    #[arg(short = 'g', long = "ngpus", value_name = "N", help_heading = "Ranks")]
    ranks: Option<usize>,

    /// Devices of the ranks, as 0,1,2; a device may stand several times
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Ranks")]
    devices: Vec<usize>,

    /// Element type: float (f32), half (f16), bfloat16 (bf16) or all; several with commas. Types that were not measured
    /// go by one of the same size, or any
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", default_value = "bfloat16", value_delimiter = ',')]
    datatype: Vec<TypeChoice>,

    /// First size: bytes, or with a suffix K, M, G (powers of 1024)
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "1K", help_heading = "Sizes")]
    min_bytes: Size,

    /// Last size
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "512M", help_heading = "Sizes")]
    max_bytes: Size,

    /// Each size is this many times the one before [default: 2; with --quick 4]
    #[arg(short = 'f', long = "stepfactor", value_name = "N", help_heading = "Sizes")]
    step_factor: Option<u64>,

    /// Where tensors lie: each has a curve of its own; several with commas
    #[arg(
        long,
        value_name = "WHERE",
        value_delimiter = ',',
        default_value = "anywhere,symmetric,symmetric-in-place",
        value_enum
    )]
    placement: Vec<Lies>,

    /// Measures fewer sizes, grids and rounds: in seconds, and rougher
    #[arg(long)]
    quick: bool,

    /// The table; entries for other machines stay [default: the file that PEERSUM_TABLE names, or peersum/table.toml in
    /// the user's cache folder]
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    output: Option<PathBuf>,

    /// Writes all that was measured to a file, as CSV
    #[arg(long, value_name = "FILE.csv", help_heading = "Output")]
    samples: Option<PathBuf>,

    /// Draws the curves to a file
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    plot: Option<PathBuf>,

    /// Forgets what an interrupted run has measured
    #[arg(long)]
    restart: bool,

    /// NCCL's library, or the folder that it is in [default: where the system finds it]
    #[arg(long, value_name = "PATH", help_heading = "NCCL")]
    nccl_library: Option<PathBuf>,

    /// Does not measure NCCL: no call will be handed over to it
    #[arg(long, conflicts_with = "nccl_library", help_heading = "NCCL")]
    no_nccl: bool,

    /// Seconds that a rank waits for its peers before the run fails, saying for whom
    #[arg(short = 'T', long = "timeout", value_name = "S", default_value_t = 30.0)]
    timeout: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Lies {
    /// Anywhere
    Anywhere,
    /// Input and output in symmetric memory, apart
    Symmetric,
    /// The input is the output too, in symmetric memory
    SymmetricInPlace,
}

/// A run, checked as far as it can be without knowing the machine.
#[derive(Clone, Debug)]
pub(super) struct Config {
    ranks: Option<usize>,
    devices: Vec<usize>,
    pub(super) dtypes: Vec<DType>,
    pub(super) sweep: Sweep,
    pub(super) placements: Vec<Placement>,
    pub(super) quick: bool,
    pub(super) output: Option<PathBuf>,
    pub(super) samples: Option<PathBuf>,
    pub(super) plot: Option<PathBuf>,
    pub(super) restart: bool,
    nccl_library: Option<PathBuf>,
    pub(super) with_nccl: bool,
    timeout: Duration,
}

impl Config {
    pub(super) fn new(arguments: &Arguments) -> Result<Self> {
        ensure!(arguments.ranks != Some(0), "-g 0: there must be at least one rank");
        for (flag, file, extension) in [("--samples", &arguments.samples, "csv"), ("--plot", &arguments.plot, "svg")] {
            if let Some(file) = file {
                ensure!(
                    file.extension().is_some_and(|found| found == extension),
                    "{flag} {}: the file's name must end in .{extension}, the one format there is",
                    file.display()
                );
            }
        }
        let (Size(min_bytes), Size(max_bytes)) = (arguments.min_bytes, arguments.max_bytes);
        ensure!(min_bytes > 0, "-b 0: no factor leads from 0 to the next size");
        ensure!(
            min_bytes <= max_bytes,
            "the first size (-b {}) is greater than the last (-e {})",
            Size(min_bytes),
            Size(max_bytes)
        );
        let factor = arguments.step_factor.unwrap_or(if arguments.quick { 4 } else { 2 });
        ensure!(factor > 1, "-f {factor}: sizes grow by a factor of 2 or more");
        let timeout = Duration::try_from_secs_f64(arguments.timeout).ok().filter(|timeout| !timeout.is_zero());
        let Some(timeout) = timeout else {
            bail!("-T {}: a timeout is a positive number of seconds", arguments.timeout)
        };
        let placements = arguments.placement.iter().map(|lies| match lies {
            Lies::Anywhere => Placement::Anywhere,
            Lies::Symmetric => Placement::Symmetric,
            Lies::SymmetricInPlace => Placement::SymmetricInPlace,
        });
        Ok(Config {
            ranks: arguments.ranks,
            devices: arguments.devices.clone(),
            dtypes: dtypes(&arguments.datatype),
            sweep: Sweep { min_bytes, max_bytes, step: Step::Factor(factor) },
            placements: once_each(placements),
            quick: arguments.quick,
            output: arguments.output.clone(),
            samples: arguments.samples.clone(),
            plot: arguments.plot.clone(),
            restart: arguments.restart,
            nccl_library: arguments.nccl_library.clone(),
            with_nccl: !arguments.no_nccl,
            timeout,
        })
    }

    /// A device for each rank, of which there must be several.
    pub(super) fn devices(&self, gpus: usize) -> Result<Vec<usize>> {
        let devices = group::devices(self.ranks, &self.devices, gpus)?;
        ensure!(
            devices.len() > 1,
            "one rank has nobody to exchange with: tune for as many as there will be, with -g, or with --devices where \
             they share GPUs, as --devices 0,0"
        );
        Ok(devices)
    }

    /// The memory that tensors are taken from.
    pub(super) fn homes(&self) -> Vec<Home> {
        once_each(self.placements.iter().map(|&placement| match placement {
            Placement::Anywhere => Home::Plain,
            _ => Home::Symmetric,
        }))
    }

    pub(super) fn library(&self) -> Options {
        let mut options = Options::default().timeout(self.timeout).table(TableFrom::Nowhere);
        options.nccl = if self.with_nccl { Nccl::IfThere } else { Nccl::Off };
        options.nccl_library = self.nccl_library.clone();
        if self.homes().contains(&Home::Symmetric) {
            // Two buffers of the largest size.
            let count = (self.sweep.max_bytes as usize).div_ceil(size_of::<f32>());
            let buffer = Geometry::new::<f32>(count, 0).len() * size_of::<f32>();
            options = options.symmetric_bytes(2 * buffer.next_multiple_of(4096));
        }
        options
    }

    /// What makes a run another one, so that what was measured in one is of no use in the other.
    pub(super) fn key(&self) -> String {
        let Config { dtypes, sweep, placements, quick, with_nccl, .. } = self;
        format!("{dtypes:?} {sweep:?} {placements:?} quick: {quick}, nccl: {with_nccl}")
    }
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Tune {
        #[command(flatten)]
        arguments: Arguments,
    }

    pub(in crate::tune) fn config(flags: &str) -> Result<Config> {
        Config::new(&Tune::try_parse_from(["tune"].into_iter().chain(flags.split_whitespace()))?.arguments)
    }

    #[test]
    fn the_defaults_are_all_placements_from_1k_to_64m() {
        let config = config("").unwrap();
        assert_eq!(config.sweep, Sweep { min_bytes: 1 << 10, max_bytes: 512 << 20, step: Step::Factor(2) });
        assert_eq!(config.placements, [Placement::Anywhere, Placement::Symmetric, Placement::SymmetricInPlace]);
        assert_eq!((config.dtypes.as_slice(), config.homes().len()), (&[DType::BF16][..], 2));
        assert!(super::tests::config("--quick").unwrap().sweep.step == Step::Factor(4));
    }

    #[test]
    fn a_group_is_tuned_without_a_table_and_with_nccl_if_it_is_there() {
        let library = |flags| config(flags).unwrap().library();
        assert_eq!((library("").table, library("").nccl), (TableFrom::Nowhere, Nccl::IfThere));
        assert_eq!(library("--no-nccl").nccl, Nccl::Off);
        assert_eq!(library("--nccl-library /a").nccl_library, Some("/a".into()));
        assert!(library("").symmetric_bytes > 128 << 20);
        assert_eq!(library("--placement anywhere").symmetric_bytes, 0);
    }

    #[test]
    fn what_can_not_be_is_said() {
        let error = |flags| format!("{:#}", config(flags).unwrap_err());
        for (flags, says) in [
            ("-b 2M -e 1M", "greater than the last"),
            ("-b 0", "-b 0"),
            ("-f 1", "-f 1"),
            ("-g 0", "-g 0"),
            ("-T 0", "positive"),
            ("--samples a.txt", ".csv"),
            ("--plot a.png", ".svg"),
            ("--no-nccl --nccl-library /a", "cannot be used with"),
            ("--placement nowhere", "symmetric-in-place"),
        ] {
            assert!(error(flags).contains(says), "{flags}: {}", error(flags));
        }
        let one = config("").unwrap().devices(1).unwrap_err().to_string();
        assert!(one.contains("--devices 0,0"), "{one}");
        assert_eq!(config("--devices 0,0,0").unwrap().devices(1).unwrap(), [0, 0, 0]);
    }

    #[test]
    fn other_options_make_another_run() {
        let key = |flags| config(flags).unwrap().key();
        assert_eq!(key(""), key("--output other.toml --samples a.csv"));
        for flags in ["-d f32", "-e 1M", "--quick", "--no-nccl", "--placement anywhere"] {
            assert_ne!(key(flags), key(""), "{flags}");
        }
    }
}
