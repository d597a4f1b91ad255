//! Which backend runs.

use anyhow::{Result, bail, ensure};

use super::options::{Arguments, BackendChoice};
use crate::measure::group;

/// The backend of a run and why it is that one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Chosen {
    /// As many threads, and why not GPUs, unless the host was asked for.
    Host { world: usize, instead_of_gpus: Option<String> },
    /// A rank for each of these devices.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Cuda { devices: Vec<usize> },
}

/// Chooses by the flags and by what is there. `gpus` says how many there are, or why none can be used.
pub(crate) fn choose(arguments: &Arguments, gpus: impl FnOnce() -> Result<usize, String>) -> Result<Chosen> {
    ensure!(arguments.ranks != Some(0), "-g 0: there must be at least one rank");
    let cuda_only = arguments.cuda_only();
    match arguments.backend {
        BackendChoice::Host => {
            ensure!(cuda_only.is_empty(), "{}: the host backend has no such thing", cuda_only.join(", "));
            Ok(Chosen::Host { world: host_world(arguments), instead_of_gpus: None })
        }
        BackendChoice::Cuda => match gpus() {
            Ok(count) => Ok(Chosen::Cuda { devices: group::devices(arguments.ranks, &arguments.devices, count)? }),
            Err(reason) => bail!("--backend cuda: {reason}"),
        },
        BackendChoice::Auto => match gpus() {
            Ok(count) => Ok(Chosen::Cuda { devices: group::devices(arguments.ranks, &arguments.devices, count)? }),
            Err(reason) if cuda_only.is_empty() => {
                Ok(Chosen::Host { world: host_world(arguments), instead_of_gpus: Some(reason) })
            }
            Err(reason) => bail!("{} is for GPUs, and none can be used: {reason}", cuda_only.join(", ")),
        },
    }
}

fn host_world(arguments: &Arguments) -> usize {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    arguments.ranks.unwrap_or(cores.clamp(2, 8))
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

    fn with(flags: &str, gpus: Result<usize, &str>) -> Result<Chosen, String> {
        let arguments = Perf::parse_from(["perf"].into_iter().chain(flags.split_whitespace())).arguments;
        choose(&arguments, || gpus.map_err(str::to_owned)).map_err(|error| error.to_string())
    }

    fn cuda(devices: &[usize]) -> Result<Chosen, String> {
        Ok(Chosen::Cuda { devices: devices.to_vec() })
    }

    #[test]
    fn gpus_are_taken_where_there_are_any() {
        assert_eq!(with("", Ok(4)), cuda(&[0, 1, 2, 3]));
        assert_eq!(with("-g 2", Ok(4)), cuda(&[0, 1]));
        assert_eq!(with("--devices 0,0,1", Ok(2)), cuda(&[0, 0, 1]));
        assert_eq!(with("--devices 0,0 -g 2", Ok(2)), cuda(&[0, 0]));
    }

    #[test]
    fn more_ranks_than_gpus_must_be_said() {
        assert_eq!(
            with("-g 4", Ok(2)).unwrap_err(),
            "-g 4: there are 2 GPUs; to let ranks share them, name one for each rank, as --devices 0,1,0,1"
        );
        assert!(with("--devices 0,0 -g 3", Ok(2)).unwrap_err().contains("names 2"));
        assert!(with("-g 0", Ok(2)).is_err());
    }

    #[test]
    fn the_host_says_why_it_runs() {
        assert_eq!(
            with("-g 3", Err("no driver")),
            Ok(Chosen::Host { world: 3, instead_of_gpus: Some("no driver".into()) })
        );
        assert_eq!(with("-g 3 --backend host", Ok(8)), Ok(Chosen::Host { world: 3, instead_of_gpus: None }));
    }

    #[test]
    fn what_needs_a_gpu_does_not_run_on_the_host() {
        assert_eq!(with("--backend cuda", Err("no driver")).unwrap_err(), "--backend cuda: no driver");
        for flags in ["-G 5", "--devices 0", "--timing queued", "--threads 256", "--table none"] {
            assert!(with(flags, Err("no driver")).unwrap_err().contains("no driver"), "{flags}");
            assert!(with(&format!("{flags} --backend host"), Ok(1)).is_err(), "{flags}");
        }
        assert!(with("-G 0", Err("no driver")).is_ok());
    }
}
