//! `peersum perf`: how long all-reduce takes, and whether it is right.
//!
//! [`options`] says what is asked, [`choose`] where it runs, [`compare`] who is timed beside the library's choice,
//! [`outlook`] what is known beforehand. [`session`] goes through the rows, of which [`measure`](crate::measure) does a
//! half at a time; [`table`], [`report`] and [`chart`] tell.

mod chart;
mod choose;
mod compare;
mod options;
mod outlook;
mod report;
mod session;
mod table;

use std::process::ExitCode;

use anyhow::Result;

pub(crate) use options::Arguments;

#[cfg(feature = "cuda")]
use crate::measure::cuda::{self, CudaGroup};
use crate::measure::{
    case::Mode,
    group::{self, Backend, Group},
    host::HostGroup,
    machine::Machine,
    team::Team,
};
use choose::{Chosen, Place};
use options::Config;
use report::{Ranks, Report};
use session::Session;

/// Runs the subcommand. It fails with exit code 1 where an element was wrong or a call failed; an error is returned
/// where nothing could be measured. Where ranks are processes, all of them come to the same.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let config = Config::new(arguments)?;
    let launched = choose::launched(arguments)?;
    let chosen = choose::choose(arguments, launched.as_ref().map(Place::of), group::gpus)?;
    let team = Team::join(launched.as_ref())?;
    let files = session::Files { report: arguments.output_file.as_deref(), plot: arguments.plot.as_deref() };
    let passed = match chosen {
        Chosen::Host { world, instead_of_gpus } => {
            let algorithms = config.compared.algorithms(Backend::Host, config.home());
            let group = match &team {
                Team::Threads => HostGroup::new(world, &config.library, &algorithms)?,
                Team::Processes(peers) => HostGroup::join(peers, &config.library, &algorithms)?,
            };
            let machine = Machine::here(None, Vec::new());
            let ranks = Ranks { backend: Backend::Host, running: team.running(), devices: group.devices() };
            let report = Report::new(&config, &ranks, instead_of_gpus.clone(), machine, group.nccl());
            let session = Session {
                group,
                team: &team,
                backend: Backend::Host,
                instead_of_gpus,
                config: &config,
                algorithms,
                modes: vec![Mode::Blocking],
                replays: 1,
                report,
            };
            session.run(&files)?
        }
        #[cfg(feature = "cuda")]
        Chosen::Cuda { devices } => {
            let modes = arguments.modes()?;
            let group = match &team {
                Team::Threads => CudaGroup::new(&devices, &config.library)?,
                Team::Processes(peers) => CudaGroup::join(peers, devices[0], &config.library)?,
            };
            let machine = Machine::here(Some(cuda::driver_api()?), group.gpus());
            let ranks = Ranks { backend: Backend::Cuda, running: team.running(), devices: group.devices() };
            let report = Report::new(&config, &ranks, None, machine, group.nccl());
            let session = Session {
                group,
                team: &team,
                backend: Backend::Cuda,
                instead_of_gpus: None,
                config: &config,
                algorithms: config.compared.algorithms(Backend::Cuda, config.home()),
                modes: modes.modes,
                replays: modes.replays,
                report,
            };
            session.run(&files)?
        }
        #[cfg(not(feature = "cuda"))]
        Chosen::Cuda { .. } => anyhow::bail!("this command was built without the feature `cuda`"),
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
