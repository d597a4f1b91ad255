//! How a rank learns, at once and with no one's help, that the process of another is gone.
//!
//! Each rank keeps one end of a pair of sockets, and every other has the other end. The system closes the first with
//! the process, however it ends. Who leaves in order says so by one byte, which nobody takes out, so that all see it.

use std::{mem::MaybeUninit, os::fd::OwnedFd, time::Instant};

use rustix::{
    event::{self, PollFd, PollFlags, Timespec},
    io::Errno,
    net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType},
    process::{self, PidfdFlags},
};

use super::Seat;
use crate::{Error, Result};

/// The lifelines of a group, of which this rank holds its own and sees the others'.
///
/// Dropping them tells the others that this rank has left.
#[derive(Debug)]
pub(crate) struct Lifelines {
    own: OwnedFd,
    /// By rank; none for this one.
    peers: Vec<Option<Peer>>,
}

#[derive(Debug)]
struct Peer {
    line: OwnedFd,
    /// Of its process, where the system has such descriptors. A child that it forked keeps its line open, not this.
    process: Option<OwnedFd>,
}

/// What is known of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// Its process runs, or is stopped.
    Here,
    /// It left in order.
    Left,
    /// Its process is gone.
    Gone,
}

impl Lifelines {
    /// Hands them round. All ranks do so in the same round of the meeting.
    pub(crate) fn hand_round(seat: &mut Seat) -> Result<Lifelines> {
        let failed = |errno: Errno| Error::System { call: "socketpair for a lifeline", reason: errno.to_string() };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (own, line) = net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
        // Old systems, and those that filter calls, do without.
        let process = process::pidfd_open(process::getpid(), PidfdFlags::empty()).ok();
        let rank = seat.rank();
        let all = seat.all_gather_fds([line].into_iter().chain(process).collect())?;
        let peers = all.into_iter().enumerate().map(|(peer, descriptors)| {
            if peer == rank {
                return Ok(None);
            }
            let mut descriptors = descriptors.into_iter();
            let line = descriptors.next();
            let line = line.ok_or(Error::PeerFailed { peer, reason: "it handed round no lifeline".into() })?;
            Ok(Some(Peer { line, process: descriptors.next() }))
        });
        Ok(Lifelines { own, peers: peers.collect::<Result<_>>()? })
    }

    /// How many peers it sees.
    #[allow(dead_code)]
    pub(crate) fn peers(&self) -> usize {
        self.peers.iter().flatten().count()
    }

    /// Looks at a peer. Takes less than a microsecond.
    pub(crate) fn look(&self, peer: usize) -> Life {
        let Some(Peer { line, process }) = self.peers.get(peer).and_then(Option::as_ref) else { return Life::Here };
        let mut byte = [MaybeUninit::<u8>::uninit()];
        match net::recv(line, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Life::Gone,
            Ok(_) => Life::Left,
            Err(Errno::AGAIN | Errno::INTR) => match process {
                Some(process) if has_ended(process) => Life::Gone,
                _ => Life::Here,
            },
            Err(_) => Life::Gone,
        }
    }

    /// Waits until then for a peer that is not here any more, and is not among those known.
    #[allow(dead_code)]
    pub(crate) fn wait(&self, known: &[usize], until: Instant) -> Option<(usize, Life)> {
        loop {
            let mut asked = Vec::new();
            for (_, peer) in self.peers.iter().enumerate().filter(|(rank, _)| !known.contains(rank)) {
                let Some(Peer { line, process }) = peer else { continue };
                asked.push(PollFd::new(line, PollFlags::IN));
                asked.extend(process.as_ref().map(|process| PollFd::new(process, PollFlags::IN)));
            }
            let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
            let polled = event::poll(&mut asked, left.as_ref());
            let found = (0..self.peers.len()).filter(|peer| !known.contains(peer)).find_map(|peer| {
                let life = self.look(peer);
                (life != Life::Here).then_some((peer, life))
            });
            if found.is_some() || polled == Ok(0) || Instant::now() >= until {
                return found;
            }
        }
    }
}

#[cfg(test)]
impl Lifelines {
    /// Ends this rank's line as the system does with its process, without a word.
    pub(super) fn cut(&self) {
        net::shutdown(&self.own, net::Shutdown::Both).unwrap();
    }
}

impl Drop for Lifelines {
    fn drop(&mut self) {
        // Nobody may be there to read it.
        let _ = net::send(&self.own, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(process, PollFlags::IN)];
    matches!(event::poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}
