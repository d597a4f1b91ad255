//! A rank's seat, wherever the others are.

use std::{os::fd::OwnedFd, sync::Arc};

use super::{Local, Wire, processes::Processes, secret::Secret};
use crate::{Error, Options, Result};

/// One rank's seat at a meeting. All ranks of a group run the same rounds.
#[allow(dead_code)] // those of threads are for backends whose threads meet
pub(crate) enum Seat {
    /// Among threads of this process.
    Threads(Local),
    /// Among processes of this machine.
    Processes(Box<Processes>),
}

impl From<Processes> for Seat {
    fn from(processes: Processes) -> Seat {
        Seat::Processes(Box::new(processes))
    }
}

impl Seat {
    pub(crate) fn rank(&self) -> usize {
        match self {
            Seat::Threads(local) => local.rank(),
            Seat::Processes(processes) => processes.rank(),
        }
    }

    pub(crate) fn world(&self) -> usize {
        match self {
            Seat::Threads(local) => local.world(),
            Seat::Processes(processes) => processes.world(),
        }
    }

    /// Lays `value` down and returns what every rank laid down, in rank order.
    pub(crate) fn all_gather<T: Wire + Clone + Send + Sync + 'static>(&mut self, value: T) -> Result<Vec<T>> {
        match self {
            Seat::Threads(local) => local.all_gather(value),
            Seat::Processes(processes) => {
                let all = processes.all_gather(value.to_bytes(), Vec::new())?;
                let values = all.iter().enumerate().map(|(peer, (bytes, _))| {
                    T::from_bytes(bytes).ok_or_else(|| Error::PeerFailed {
                        peer,
                        reason: "what it shared is not what is shared at that point of a meeting".into(),
                    })
                });
                values.collect()
            }
        }
    }

    /// Hands descriptors, at most 16, to all ranks and returns what every rank handed round, in rank order. Those that
    /// come are this process's own, and are closed on exec.
    pub(crate) fn all_gather_fds(&mut self, descriptors: Vec<OwnedFd>) -> Result<Vec<Vec<OwnedFd>>> {
        match self {
            Seat::Threads(local) => {
                let failed = |error: std::io::Error| Error::System { call: "dup", reason: error.to_string() };
                let all = local.all_gather(Arc::new(descriptors))?;
                let copies = all.iter().map(|each| each.iter().map(|one| one.try_clone().map_err(failed)).collect());
                copies.collect()
            }
            Seat::Processes(processes) => {
                let all = processes.all_gather(Vec::new(), descriptors)?;
                Ok(all.into_iter().map(|(_, descriptors)| descriptors).collect())
            }
        }
    }

    /// Makes sure that all ranks were given these options.
    pub(crate) fn agree(&mut self, options: &Options) -> Result<()> {
        // Words and not a hash of the standard library's, which need not be the same in two builds.
        let digest = *Secret::of(b"options", [format!("{options:?}").as_bytes()]).key();
        let rank = self.rank();
        match self.all_gather(digest)?.iter().position(|theirs| *theirs != digest) {
            Some(peer) => Err(Error::OptionsDiffer { rank, peer }),
            None => Ok(()),
        }
    }

    /// Tells the others why this rank leaves before the meeting is over.
    pub(crate) fn leave(self, reason: &Error) {
        match self {
            Seat::Threads(local) => local.leave(reason),
            Seat::Processes(processes) => processes.leave(reason),
        }
    }
}
