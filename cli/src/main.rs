//! The command `peersum`.

mod bandwidth;
mod doctor;
mod dtypes;
mod launch;
mod measure;
mod model;
mod output;
#[cfg(feature = "cuda")]
mod p2p;
mod page;
#[cfg(feature = "cuda")]
mod paths;
mod perf;
mod plot;
#[cfg(feature = "cuda")]
mod probe;
mod sizes;
mod topo;
mod topology;
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
    ///
    /// Without flags it runs on all GPUs, or, where there is none, on threads of the CPU, from 1 KiB to 64 MiB: the
    /// sizes that decoding and prefill of language models reduce.
    Perf(Box<perf::Arguments>),
    /// Measures every algorithm, and NCCL, on this machine, and writes which is for which message
    ///
    /// Calls are replayed from CUDA graphs, and every candidate is checked: one with one wrong element is refused.
    /// Groups that are made afterwards find the table and choose by it. What is measured is kept beside the table, so a
    /// run that was interrupted goes on where it was when it is started again.
    #[cfg(feature = "cuda")]
    Tune(Box<tune::Arguments>),
    /// Runs a program as several ranks on this machine
    ///
    /// Each rank finds the others by its environment: PEERSUM_RANK, PEERSUM_WORLD_SIZE, PEERSUM_LOCAL_RANK, and
    /// PEERSUM_SECRET, which is new for each job, so that nobody else can join it. The exit code is that of the first
    /// rank that failed, or 128 and the signal that ended it; 0 if none failed. Signals are passed on to the ranks.
    /// Nothing of them is left when this ends; if it is killed, they are too.
    Launch(launch::Arguments),
    /// Shows how the GPUs and NICs of this machine are connected, as `nvidia-smi topo -m` does, and more
    ///
    /// Reads sysfs, and NVML where there is one; needs no root and no driver, and says what it could not see. Reads the
    /// text of `nvidia-smi topo -m` and NCCL's topology files too, and writes the latter.
    Topo(topo::Arguments),
    /// Measures bandwidth and latency between each two GPUs, as p2pBandwidthLatencyTest does, and whether data arrive
    ///
    /// By copy engine and by kernel, one way and both ways, with P2P and without, beside what the links could carry. The
    /// device that owns the memory compares what arrived there with its own loads; a pair on which it differs is BAD,
    /// however fast it is. What fails is shown where its figure would be. The exit code is 0 if all was measured, 1 if data
    /// differed or something failed, 2 if nothing could be measured.
    #[cfg(feature = "cuda")]
    P2p(p2p::Arguments),
    /// Measures each path between GPUs, from the nearest pair to host memory, and puts them in order
    ///
    /// A pair in one NUMA node, one across nodes, the pair that is farthest apart, all GPUs; then NCCL with P2P switched off.
    /// Each is a run of `peersum perf` in a process of its own, by NCCL and by this library's kernels. At the end stands
    /// what each path carries, what its links could, and how many times slower it is than the one above. The exit code is 0
    /// if all was measured and right, 1 if something failed or was wrong, 2 if nothing could be measured.
    #[cfg(feature = "cuda")]
    Paths(paths::Arguments),
    /// Measures what the model of hops is made of: launch, store, load, fence, atomic, and what a GPU sends
    ///
    /// Writes them as JSON or TOML for `peersum model --parameters`, which then says what each algorithm must take at least.
    #[cfg(feature = "cuda")]
    Probe(probe::Arguments),
    /// Looks for what makes all-reduce slow on this machine, or impossible, and says what to do
    ///
    /// Findings are in order of weight, each with what was seen, what it costs, and the remedy. Nothing is changed. The exit
    /// code is 0 if all is well, 1 if anything was found, 2 if nothing was found and something could not be looked at.
    Doctor(doctor::Arguments),
    /// Draws a machine, and what was measured on it, on a page that opens without a network
    ///
    /// The topology as a graph, matrices of `peersum p2p` as heat maps, and time and bus bandwidth over the size, with the
    /// model's curve and where one algorithm hands over to another. Follows the reader's light or dark. Needs no GPU.
    Page(page::Arguments),
    /// Says what all-reduce should take, by a model, and how far measurements are from that
    ///
    /// By default this library's algorithms, by the hops on their critical path: time = T0 + hops + bytes / B. With --alpha
    /// and --beta the α–β costs of common algorithms, in a node and between nodes. Needs no GPU.
    Model(model::Arguments),
}

/// The exit code of a command that could not run: a wrong option, or a backend that is not there.
const CANNOT_RUN: u8 = 2;

fn main() -> ExitCode {
    let_ranks_share_devices();
    let outcome = match Command::parse().action {
        Action::Perf(arguments) => perf::run(&arguments),
        #[cfg(feature = "cuda")]
        Action::Tune(arguments) => tune::run(&arguments),
        Action::Launch(arguments) => launch::run(&arguments),
        Action::Topo(arguments) => topo::run(&arguments),
        #[cfg(feature = "cuda")]
        Action::P2p(arguments) => p2p::run(&arguments),
        #[cfg(feature = "cuda")]
        Action::Paths(arguments) => paths::run(&arguments),
        #[cfg(feature = "cuda")]
        Action::Probe(arguments) => probe::run(&arguments),
        Action::Doctor(arguments) => doctor::run(&arguments),
        Action::Page(arguments) => page::run(&arguments),
        Action::Model(arguments) => model::run(&arguments),
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

/// Sets what lets ranks share a device, where the user has not set it.
///
/// They wait for each other, so their streams must not share a hardware queue; CUDA reads the number of queues once,
/// when it starts, and its default is 8. NCCL refuses such ranks unless it is told; where each has its own device, it
/// makes no difference.
fn let_ranks_share_devices() {
    for (name, value) in [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("NCCL_MULTI_RANK_GPU_ENABLE", "1")] {
        if std::env::var_os(name).is_none() {
            // SAFETY: this is the first thing that main does: no other thread exists that could read the environment.
            unsafe { std::env::set_var(name, value) };
        }
    }
}
