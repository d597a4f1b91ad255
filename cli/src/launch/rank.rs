//! One rank: a process, and all that it starts.

use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use rustix::process::{self, Pid, Signal, WaitId, WaitIdOptions};

use super::output;

/// How long the last of its output may take to come. What it started may hold its pipes open, out of reach.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// A rank that was started. Its process is the leader of a process group, and is not reaped before [`Rank::finish`], so
/// that the number of the group stays its own.
pub(super) struct Rank {
    number: usize,
    child: Child,
    id: Pid,
    ended: Option<Ended>,
    outputs: Vec<JoinHandle<()>>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Ended {
    Exited(i32),
    Killed(i32),
}

impl Ended {
    /// As a shell tells it.
    pub(super) fn code(self) -> u8 {
        match self {
            Ended::Exited(code) => code as u8,
            Ended::Killed(signal) => (128 + signal) as u8,
        }
    }
}

impl Rank {
    /// Starts the program. It reads nothing, and with `prefix` prints through this process. It is killed if this
    /// process ends before it.
    pub(super) fn start(
        number: usize,
        program: &[OsString],
        variables: &[(&str, String)],
        prefix: bool,
    ) -> Result<Rank> {
        let mut command = Command::new(&program[0]);
        command.args(&program[1..]).envs(variables.iter().map(|(name, value)| (name, value)));
        // A group of its own: the terminal's signals come once, from this process.
        command.process_group(0).stdin(Stdio::null());
        if prefix {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
        }
        let parent = process::getpid();
        // SAFETY: between fork and exec it makes two system calls and nothing else: no allocation, no lock.
        unsafe {
            command.pre_exec(move || {
                process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // The parent may have ended just before; its death would never be told.
                if process::getppid() != Some(parent) {
                    return Err(io::ErrorKind::NotFound.into());
                }
                Ok(())
            });
        }
        let mut child =
            command.spawn().with_context(|| format!("rank {number}: {} can't be run", program[0].display()))?;
        let id = Pid::from_child(&child);
        let prefix = format!("[{number}] ");
        let outputs = [
            child.stdout.take().map(|from| output::pass_on(from, io::stdout, prefix.clone())),
            child.stderr.take().map(|from| output::pass_on(from, io::stderr, prefix.clone())),
        ];
        Ok(Rank { number, child, id, ended: None, outputs: outputs.into_iter().flatten().collect() })
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    pub(super) fn id(&self) -> Pid {
        self.id
    }

    pub(super) fn runs(&self) -> bool {
        self.ended.is_none()
    }

    /// How it ended, once it has.
    pub(super) fn ended(&mut self) -> Ended {
        *self.ended.get_or_insert_with(|| {
            let status = process::waitid(WaitId::Pid(self.id), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            match status {
                Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => Ended::Exited(code),
                    (None, signal) => Ended::Killed(signal.unwrap_or(0)),
                },
                // There is no such child any more, which only a program's own trick could bring about.
                _ => Ended::Exited(1),
            }
        })
    }

    /// Signals its process group.
    pub(super) fn signal(&self, signal: Signal) {
        // It may have just ended.
        let _ = process::kill_process_group(self.id, signal);
    }

    /// Ends what is left of its group, and reaps it.
    pub(super) fn finish(mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
        let until = Instant::now() + LAST_OUTPUT;
        for output in self.outputs {
            while !output.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Waits until a child has ended, and leaves it to be reaped.
pub(super) fn wait_for(id: Pid) {
    let ended = || process::waitid(WaitId::Pid(id), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
    while matches!(ended(), Err(rustix::io::Errno::INTR)) {}
}
