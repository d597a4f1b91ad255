//! The command `peersum`.

mod perf;
#[cfg(feature = "cuda")]
mod tune;

use std::{io, process::ExitCode};

use clap::{Parser, Subcommand};

/// All-reduce across the GPUs, or the CPU cores, of one machine.
#[derive(Parser)]
#[command(name = "peersum", version, max_term_width = 110)]
struct Command {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Measures all-reduce and checks every result, as nccl-tests' all_reduce_perf does
    Perf(Box<perf::Arguments>),
}

/// The exit code of a command that could not run: a wrong option, or a backend that is not there.
const CANNOT_RUN: u8 = 2;

fn main() -> ExitCode {
    give_each_rank_a_connection();
    let outcome = match Command::parse().action {
        Action::Perf(arguments) => perf::run(&arguments),
    };
    outcome.unwrap_or_else(|error| {
        let nobody_reads =
            error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe);
        if !nobody_reads {
            eprintln!("peersum: error: {error:#}");
        }
        ExitCode::from(CANNOT_RUN)
    })
}

/// Sets `CUDA_DEVICE_MAX_CONNECTIONS` to 32 where the user has not set it.
///
/// Ranks that share a device wait for each other, so their streams must not share a hardware queue; CUDA reads the
/// variable once, when it starts, and its default is 8.
fn give_each_rank_a_connection() {
    const NAME: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(NAME).is_none() {
        // SAFETY: this is the first thing that main does: no other thread exists that could read the environment.
        unsafe { std::env::set_var(NAME, "32") };
    }
}
