//! Which backend runs.

use anyhow::{Result, bail, ensure};

use peersum::Meeting;

use super::options::{Arguments, BackendChoice, RanksAre};
use crate::measure::{group, team};

/// The backend of a run and why it is that one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Chosen {
    /// As many ranks, and why not GPUs, unless the host was asked for.
    Host { world: usize, instead_of_gpus: Option<String> },
    /// A rank for each of these devices, of those that are in this process.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Cuda { devices: Vec<usize> },
}

/// Where this process, which is one of several, has its place among them; `None` where ranks are threads.
pub(crate) fn launched(arguments: &Arguments) -> Result<Option<Meeting>> {
    match arguments.ranks_are {
        RanksAre::Auto => Ok(team::launched()),
        RanksAre::Threads => Ok(None),
        RanksAre::Processes => Ok(Some(Meeting::from_env()?)),
    }
}

/// Which rank this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// Among those on this machine.
    pub(crate) local_rank: usize,
}

impl Place {
    pub(crate) fn of(meeting: &Meeting) -> Self {
        let rank = meeting.rank();
        Place { rank, world: meeting.world_size(), local_rank: meeting.local_rank().unwrap_or(rank) }
    }
}

/// Chooses by the flags and by what is there. `place` is this process's if ranks are processes, and `gpus` says how many
/// there are, or why none can be used.
pub(crate) fn choose(
    arguments: &Arguments,
    place: Option<Place>,
    gpus: impl FnOnce() -> Result<usize, String>,
) -> Result<Chosen> {
    ensure!(arguments.ranks != Some(0), "-g 0: there must be at least one rank");
    if let (Some(place), Some(ranks @ 2..)) = (place, arguments.ranks) {
        let world = place.world;
        bail!("-g {ranks}: the launcher started {world} processes, each of which is one rank; leave it out");
    }
    let devices = |count| match place {
        None => group::devices(arguments.ranks, &arguments.devices, count),
        Some(Place { rank, world, local_rank }) => {
            group::device_of(rank, local_rank, world, &arguments.devices, count).map(|device| vec![device])
        }
    };
    let host_world = || place.map_or_else(|| host_world(arguments), |place| place.world);
    let cuda_only = arguments.cuda_only();
    match arguments.backend {
        BackendChoice::Host => {
            ensure!(cuda_only.is_empty(), "{}: the host backend has no such thing", cuda_only.join(", "));
            Ok(Chosen::Host { world: host_world(), instead_of_gpus: None })
        }
        BackendChoice::Cuda => match gpus() {
            Ok(count) => Ok(Chosen::Cuda { devices: devices(count)? }),
            Err(reason) => bail!("--backend cuda: {reason}"),
        },
        BackendChoice::Auto => match gpus() {
            Ok(count) => Ok(Chosen::Cuda { devices: devices(count)? }),
            Err(reason) if cuda_only.is_empty() => {
                Ok(Chosen::Host { world: host_world(), instead_of_gpus: Some(reason) })
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
        choose(&arguments, None, || gpus.map_err(str::to_owned)).map_err(|error| error.to_string())
    }

    fn as_rank(rank: usize, flags: &str, gpus: Result<usize, &str>) -> Result<Chosen, String> {
        let arguments = Perf::parse_from(["perf"].into_iter().chain(flags.split_whitespace())).arguments;
        let place = Place { rank, world: 4, local_rank: rank };
        choose(&arguments, Some(place), || gpus.map_err(str::to_owned)).map_err(|error| error.to_string())
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
    fn a_process_takes_its_own_device_and_the_launchers_number_of_ranks() {
        assert_eq!(as_rank(3, "", Ok(8)), cuda(&[3]));
        assert_eq!(as_rank(3, "-g 1", Ok(1)), cuda(&[0]));
        assert_eq!(as_rank(3, "", Ok(2)), cuda(&[1]));
        assert_eq!(as_rank(2, "--devices 7,6,5,4", Ok(8)), cuda(&[5]));
        assert!(as_rank(2, "--devices 7,6", Ok(8)).unwrap_err().contains("started 4 ranks"));
        assert!(as_rank(0, "-g 4", Ok(8)).unwrap_err().contains("-g 4"));
        assert!(as_rank(0, "", Ok(0)).is_err());
        let host = Chosen::Host { world: 4, instead_of_gpus: None };
        assert_eq!(as_rank(1, "--backend host", Ok(8)), Ok(host));
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
