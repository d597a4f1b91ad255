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
};
use choose::Chosen;
use options::Config;
use report::Report;
use session::Session;

/// Runs the subcommand. It fails with exit code 1 where an element was wrong or a call failed; an error is returned
/// where nothing could be measured.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let config = Config::new(arguments)?;
    let files = session::Files { report: arguments.output_file.as_deref(), plot: arguments.plot.as_deref() };
    let passed = match choose::choose(arguments, group::gpus)? {
        Chosen::Host { world, instead_of_gpus } => {
            let algorithms = config.compared.algorithms(Backend::Host, config.home());
            let group = HostGroup::new(world, &config.library, &algorithms)?;
            let machine = Machine::here(None, Vec::new());
            let report =
                Report::new(&config, Backend::Host, instead_of_gpus.clone(), group.devices(), machine, group.nccl());
            let session = Session {
                group,
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
            let group = CudaGroup::new(&devices, &config.library)?;
            let machine = Machine::here(Some(cuda::driver_api()?), group.gpus()?);
            let report = Report::new(&config, Backend::Cuda, None, group.devices(), machine, group.nccl());
            let session = Session {
                group,
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
