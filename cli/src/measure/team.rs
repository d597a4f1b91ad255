//! Whether the ranks of a run are threads of this process, or processes of which this is one.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use peersum::{Error, Meeting, Options, ReduceOp, host::Communicator};
use serde::{Serialize, de::DeserializeOwned};

use super::barrier::Broken;

/// How ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Running {
    Threads,
    Processes,
}

/// The ranks of a run.
#[derive(Debug)]
pub(crate) enum Team {
    /// All of them are threads of this process.
    Threads,
    /// Each is a process, and one is this.
    Processes(Box<Peers>),
}

impl Team {
    /// Joins the others, where a launcher has started this process as one of several.
    pub(crate) fn join(launched: Option<&Meeting>) -> Result<Team> {
        let peers = launched.map(Peers::join).transpose()?;
        Ok(peers.map_or(Team::Threads, |peers| Team::Processes(Box::new(peers))))
    }

    pub(crate) fn running(&self) -> Running {
        match self {
            Team::Threads => Running::Threads,
            Team::Processes(_) => Running::Processes,
        }
    }

    /// The number of all ranks, of which so many are in this process.
    pub(crate) fn world(&self, here: usize) -> usize {
        match self {
            Team::Threads => here,
            Team::Processes(peers) => peers.world(),
        }
    }

    /// Whether this process tells what all have found.
    pub(crate) fn tells(&self) -> bool {
        match self {
            Team::Threads => true,
            Team::Processes(peers) => peers.rank() == 0,
        }
    }

    /// What all ranks have, in rank order, of what those of this process have.
    pub(crate) fn all_of<T: Serialize + DeserializeOwned>(&self, here: Vec<T>) -> Result<Vec<T>> {
        match self {
            Team::Threads => Ok(here),
            Team::Processes(peers) => Ok(peers.all_gather(&here)?.into_iter().flatten().collect()),
        }
    }
}

/// Where a launcher has started this process as one rank of several, which rank that is. What makes no sense is nothing
/// that a launcher says.
pub(crate) fn launched() -> Option<Meeting> {
    Meeting::from_env().ok().filter(|meeting| meeting.world_size() > 1)
}

/// How long a rank may be behind the others, in what is no call: they may take turns on few cores while they check. One
/// that has ended is noticed at once.
const PATIENCE: Duration = Duration::from_secs(600);
/// What ranks tell each other is short, but for the times of many calls, which go in chunks.
const STAGING_BYTES: usize = 256 << 10;

/// The other processes. They talk through a group of the library's own, on the host, beside the one that is measured.
pub(crate) struct Peers {
    job: Meeting,
    rank: usize,
    world: usize,
    channel: Mutex<Communicator>,
}

impl Peers {
    fn join(job: &Meeting) -> Result<Peers> {
        let options = Options::default().timeout(PATIENCE).staging_bytes(STAGING_BYTES);
        let channel = Communicator::meet(&named(job, "control"), &options)
            .context("the ranks that a launcher started can't meet; --ranks-are threads goes without it")?;
        Ok(Peers { job: job.clone(), rank: channel.rank(), world: channel.world_size(), channel: channel.into() })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn world(&self) -> usize {
        self.world
    }

    /// Where these processes meet for a group of that name.
    pub(crate) fn meeting(&self, name: &str) -> Meeting {
        named(&self.job, name)
    }

    /// Waits for all.
    pub(super) fn wait(&self) -> Result<()> {
        self.sum(&mut [0.0])
    }

    /// What each rank has, in rank order.
    pub(crate) fn all_gather<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let text = serde_json::to_vec(value)?;
        ensure!(u32::try_from(text.len()).is_ok(), "a rank has {} bytes to tell", text.len());
        let lengths = self.all_gather_words(&[text.len() as u16, (text.len() >> 16) as u16])?;
        let lengths: Vec<_> = lengths.iter().map(|words| usize::from(words[0]) | usize::from(words[1]) << 16).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let byte = |index: usize| text.get(index).copied().unwrap_or(0);
        let words = (0..longest.div_ceil(2)).map(|word| u16::from_le_bytes([byte(2 * word), byte(2 * word + 1)]));
        let words = self.all_gather_words(&words.collect::<Vec<_>>())?;
        let values = words.iter().zip(lengths).map(|(words, length)| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).take(length).collect();
            serde_json::from_slice(&bytes).context("another rank tells what this one doesn't understand")
        });
        values.collect()
    }

    /// As many words of each rank. A word is a float here, whose sum with zeros is exact.
    fn all_gather_words(&self, words: &[u16]) -> Result<Vec<Vec<u16>>> {
        let mut all = vec![0f32; self.world * words.len()];
        for (float, &word) in all[self.rank * words.len()..].iter_mut().zip(words) {
            *float = word.into();
        }
        self.sum(&mut all)?;
        let of = |rank: usize| all[rank * words.len()..][..words.len()].iter().map(|&float| float as u16).collect();
        Ok((0..self.world).map(of).collect())
    }

    fn sum(&self, floats: &mut [f32]) -> Result<()> {
        let mut channel = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        channel.all_reduce_in_place(floats, ReduceOp::Sum).map_err(|error| match error {
            // It says why itself.
            Error::Aborted { .. } | Error::PeerLeft { .. } => Broken.into(),
            error => error.into(),
        })
    }

    /// Ends all waits of all ranks, now and later.
    pub(super) fn give_up(&self) {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner).abort();
    }
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers").field("rank", &self.rank).field("world", &self.world).finish_non_exhaustive()
    }
}

/// The job's ranks as a group of that name, apart from what else they may be: the user may have named the job's.
fn named(job: &Meeting, name: &str) -> Meeting {
    let users = std::env::var("PEERSUM_GROUP").unwrap_or_default();
    job.clone().group(format!("{users} peersum perf {name}"))
}
