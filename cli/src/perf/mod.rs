//! `peersum perf`: how long all-reduce takes, and whether it is right.
//!
//! [`options`] says what is asked, [`backend`] where it runs, [`session`] goes through the rows, [`measure`] does one
//! half of a row on all ranks, over [`host`] or [`cuda`]; [`table`] and [`report`] tell.

mod backend;
mod bandwidth;
mod barrier;
mod case;
mod cores;
#[cfg(feature = "cuda")]
mod cuda;
mod datum;
mod geometry;
mod host;
mod inputs;
mod machine;
mod measure;
mod options;
mod report;
mod session;
mod sizes;
mod statistics;
mod table;
mod verify;

use std::process::ExitCode;

use anyhow::Result;

pub(crate) use options::Arguments;

use backend::{Backend, Chosen, Group};
use case::Mode;
use host::HostGroup;
use machine::Machine;
use options::Config;
use report::Report;
use session::Session;

/// Runs the subcommand. It fails with exit code 1 where an element was wrong or a call failed; an error is returned
/// where nothing could be measured.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let config = Config::new(arguments)?;
    let report_file = arguments.output_file.as_deref();
    let passed = match backend::choose(arguments, backend::gpus)? {
        Chosen::Host { world, instead_of_gpus } => {
            let group = HostGroup::new(world, &config.library)?;
            let machine = Machine::here(None, Vec::new());
            let report = Report::new(&config, Backend::Host, instead_of_gpus.clone(), group.devices(), machine);
            let session = Session {
                group,
                backend: Backend::Host,
                instead_of_gpus,
                config: &config,
                modes: vec![Mode::Blocking],
                replays: 1,
                report,
            };
            session.run(report_file)?
        }
        #[cfg(feature = "cuda")]
        Chosen::Cuda { devices } => {
            let modes = arguments.modes()?;
            let group = cuda::CudaGroup::new(&devices, &config.library)?;
            let machine = Machine::here(Some(cuda::driver_api()?), group.gpus()?);
            let report = Report::new(&config, Backend::Cuda, None, group.devices(), machine);
            let session = Session {
                group,
                backend: Backend::Cuda,
                instead_of_gpus: None,
                config: &config,
                modes: modes.modes,
                replays: modes.replays,
                report,
            };
            session.run(report_file)?
        }
        #[cfg(not(feature = "cuda"))]
        Chosen::Cuda { .. } => anyhow::bail!("this command was built without the feature `cuda`"),
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
