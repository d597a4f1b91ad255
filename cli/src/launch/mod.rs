//! `peersum launch`: a program as several ranks on this machine.
//!
//! [`rank`] starts and ends a process, [`output`] passes on what it prints. The ranks are told who they are by
//! variables that `peersum::Meeting::from_env` reads.

mod output;
mod rank;

use std::{
    ffi::OsString,
    process::ExitCode,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use rustix::process::Signal;
use signal_hook::{consts::signal, iterator::Signals};

use rank::{Ended, Rank};

/// What is run, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Ranks
    #[arg(short = 'n', long = "ranks", value_name = "N")]
    ranks: usize,

    /// Name of the group (PEERSUM_GROUP), to keep it apart from other groups of its ranks
    #[arg(long, value_name = "NAME")]
    group: Option<String>,

    /// Lets the ranks print as they are, without their number before each line
    #[arg(long)]
    no_prefix: bool,

    /// Once a rank has failed, or a signal came: seconds in which the others may end by themselves, and again seconds
    /// after they were asked to (SIGTERM) until they are killed
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    grace: f64,

    /// The program, and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// What the launcher waits for.
enum Event {
    Ended(usize),
    Signal(Signal),
}

/// Runs the subcommand. An error is returned where no rank could be started.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    ensure!(arguments.ranks > 0, "-n 0: there must be at least one rank");
    let grace = Duration::try_from_secs_f64(arguments.grace)
        .with_context(|| format!("--grace {}: not a time to wait", arguments.grace))?;
    let (send, events) = mpsc::channel();
    // Before there is a rank that a signal would leave alone.
    pass_on_signals(send.clone())?;
    let mut job = Job::start(arguments, &send)?;
    let code = job.wait(&events, grace);
    job.clean_up();
    Ok(ExitCode::from(code))
}

/// Sends every signal that is meant for the job.
fn pass_on_signals(events: Sender<Event>) -> Result<()> {
    let for_ranks =
        [signal::SIGINT, signal::SIGTERM, signal::SIGHUP, signal::SIGQUIT, signal::SIGUSR1, signal::SIGUSR2];
    let mut signals = Signals::new(for_ranks).context("signals can't be caught")?;
    thread::spawn(move || {
        for number in signals.forever() {
            if let Some(signal) = Signal::from_named_raw(number)
                && events.send(Event::Signal(signal)).is_err()
            {
                return;
            }
        }
    });
    Ok(())
}

/// The ranks that were started.
struct Job {
    ranks: Vec<Rank>,
}

/// How far the launcher has gone with ranks that don't end.
#[derive(Clone, Copy, PartialEq)]
enum Asked {
    Nothing,
    /// Something is wrong; they may see so themselves.
    ToNotice,
    ToEnd,
    Killed,
}

impl Job {
    fn start(arguments: &Arguments, events: &Sender<Event>) -> Result<Job> {
        let secret = secret()?;
        let mut job = Job { ranks: Vec::new() };
        for number in 0..arguments.ranks {
            let mut variables = vec![
                ("PEERSUM_RANK", number.to_string()),
                ("PEERSUM_LOCAL_RANK", number.to_string()),
                ("PEERSUM_WORLD_SIZE", arguments.ranks.to_string()),
                ("PEERSUM_SECRET", secret.clone()),
            ];
            variables.extend(arguments.group.clone().map(|group| ("PEERSUM_GROUP", group)));
            match Rank::start(number, &arguments.program, &variables, !arguments.no_prefix) {
                Ok(rank) => job.ranks.push(rank),
                Err(error) => {
                    job.clean_up();
                    return Err(error);
                }
            }
        }
        for rank in &job.ranks {
            let (events, number, id) = (events.clone(), rank.number(), rank.id());
            thread::spawn(move || {
                rank::wait_for(id);
                // Nobody listens once all have ended.
                let _ = events.send(Event::Ended(number));
            });
        }
        Ok(job)
    }

    /// Waits until all ranks have ended. Returns the exit code of the first that failed.
    fn wait(&mut self, events: &Receiver<Event>, grace: Duration) -> u8 {
        let mut running = self.ranks.len();
        let mut failed = None;
        let mut asked = Asked::Nothing;
        let mut next: Option<Instant> = None;
        while running > 0 {
            let event = match next {
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(next) => events.recv_timeout(next.saturating_duration_since(Instant::now())),
            };
            match event {
                Ok(Event::Ended(number)) => {
                    running -= 1;
                    let ended = self.ranks[number].ended();
                    if ended.code() != 0 && failed.is_none() {
                        failed = Some(ended.code());
                        if asked == Asked::Nothing && running > 0 {
                            tell(format_args!("rank {number} {ended}; the others have {grace:?} to end too"));
                            asked = Asked::ToNotice;
                            next = Instant::now().checked_add(grace);
                        }
                    }
                }
                Ok(Event::Signal(signal)) => {
                    let ends = !matches!(signal, Signal::USR1 | Signal::USR2);
                    if ends && matches!(asked, Asked::ToEnd | Asked::Killed) {
                        // Who asks twice doesn't want to wait.
                        self.signal(Signal::KILL);
                        asked = Asked::Killed;
                    } else {
                        self.signal(signal);
                        if ends {
                            asked = Asked::ToEnd;
                            next = Instant::now().checked_add(grace);
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) if asked == Asked::ToNotice => {
                    self.signal(Signal::TERM);
                    asked = Asked::ToEnd;
                    next = Instant::now().checked_add(grace);
                }
                Err(RecvTimeoutError::Timeout) => {
                    let left: Vec<_> = self.ranks.iter().filter(|rank| rank.runs()).map(Rank::number).collect();
                    tell(format_args!("ranks {left:?} don't end, and are killed"));
                    self.signal(Signal::KILL);
                    asked = Asked::Killed;
                    next = None;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        failed.unwrap_or(0)
    }

    /// Sends a signal to all ranks that run, and to what they started.
    fn signal(&self, signal: Signal) {
        self.ranks.iter().filter(|rank| rank.runs()).for_each(|rank| rank.signal(signal));
    }

    /// Ends what the ranks left behind, and passes on the last of what they printed.
    fn clean_up(&mut self) {
        self.ranks.drain(..).for_each(Rank::finish);
    }
}

/// Something that nobody guesses.
fn secret() -> Result<String> {
    let mut bytes = [0u8; 32];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(32) => Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect()),
        Ok(count) => bail!("getrandom gave {count} bytes"),
        Err(errno) => Err(errno).context("getrandom"),
    }
}

fn tell(message: std::fmt::Arguments<'_>) {
    use std::io::Write;
    // Where nobody reads, nobody misses it.
    let _ = writeln!(std::io::stderr().lock(), "peersum launch: {message}");
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Exited(code) => write!(f, "ended with exit code {code}"),
            Ended::Killed(signal) => write!(f, "was ended by signal {signal}"),
        }
    }
}
