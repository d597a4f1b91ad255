//! `peersum tune`: measures every algorithm on the machine at hand, and decides which one is for which message.
//!
//! [`options`] says what is asked. [`lineup`] has who is measured, [`session`] measures them size by size and keeps
//! what is finished in [`kept`], so that an interrupted run goes on. [`fit`] decides, [`verdict`] makes the table's
//! entry and what is printed, and [`csv`] and [`chart`] show the evidence.

mod chart;
mod csv;
mod date;
mod fit;
mod kept;
mod lineup;
mod options;
mod session;
mod verdict;

use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};

pub(crate) use options::Arguments;

use crate::{
    measure::{
        cuda::CudaGroup,
        group::{self, Group},
        team,
    },
    output::Output,
};
use options::Config;
use session::Session;
use verdict::Destination;

/// Runs the subcommand. It fails with exit code 1 where an element was wrong; an error is returned where nothing could
/// be tuned.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let config = Config::new(arguments)?;
    if let Some(meeting) = team::launched() {
        bail!(
            "a launcher started {} of this, and one is for all GPUs: start it by itself, and its table serves ranks that are \
             processes too",
            meeting.world_size()
        );
    }
    let gpus = group::gpus().map_err(|reason| anyhow!("nothing can be tuned here: {reason}"))?;
    let devices = config.devices(gpus)?;
    // What can't be written to is to show before anything is measured.
    let table = Destination::open(config.output.as_deref())?;
    let group = CudaGroup::new(&devices, &config.library())?;
    let machine = group.machine()?;
    let names = group.devices().iter().map(|device| device.name.clone()).collect();
    let session = Session::new(group, &config, machine, names, table.path())?;
    let output = Output::new(session.steps());
    let right = session.run(&table, &output)?;
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
