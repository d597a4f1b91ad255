//! Ranks that are processes of one machine.
//!
//! Rank 0 is the hub of a star of Unix sockets: one connection a rank, whatever the number of ranks, and one place that
//! knows who has come. What a rank shares goes through it, descriptors too, since the system passes on those that it
//! has received. The star is for the meeting alone. That a process is gone is seen by all without a hub, by its
//! [lifeline](super::lifeline).

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    guest::{Guest, Way},
    hub::{Entrance, Hub},
    message::reason,
};
use crate::{Error, Result};

/// What a rank is to the others.
#[derive(Clone, Debug)]
pub(super) struct Me {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) version: String,
    /// Which boot of which machine.
    pub(super) boot: String,
}

impl Me {
    pub(super) fn here(rank: usize, world: usize) -> Me {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Me { rank, world, version: env!("CARGO_PKG_VERSION").into(), boot: boot.trim().into() }
    }
}

/// The network namespace of this process, within which abstract names are seen.
pub(super) fn namespace() -> String {
    let link = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    link.to_string_lossy().into_owned()
}

/// What a rank shares in one round.
pub(super) struct Shared {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Arc<Vec<OwnedFd>>,
}

/// One rank's seat at a meeting of processes.
pub(crate) struct Processes {
    me: Me,
    role: Role,
    patience: Duration,
}

enum Role {
    Hub(Hub),
    Guest(Guest),
}

impl Processes {
    /// Waits until then for all ranks, where `entrances` lead to rank 0 and `way` leads the others there. From then on
    /// no rank waits longer than `patience` for another.
    pub(super) fn meet(
        me: Me,
        entrances: impl FnOnce() -> Result<Vec<Entrance>>,
        way: impl FnOnce() -> Result<Way>,
        until: Instant,
        patience: Duration,
    ) -> Result<Processes> {
        let started = Instant::now();
        let role = if me.rank == 0 {
            let mut hub = Hub::new(me.clone(), if me.world > 1 { entrances()? } else { Vec::new() });
            hub.seat_all(started, until)?;
            Role::Hub(hub)
        } else {
            Role::Guest(Guest::be_seated(me.clone(), &way()?, started, until)?)
        };
        Ok(Processes { me, role, patience })
    }

    pub(crate) fn rank(&self) -> usize {
        self.me.rank
    }

    pub(crate) fn world(&self) -> usize {
        self.me.world
    }

    /// Shares bytes and descriptors, and returns what every rank shares, in rank order.
    pub(crate) fn all_gather(
        &mut self,
        bytes: Vec<u8>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Vec<(Vec<u8>, Vec<OwnedFd>)>> {
        // Times beyond the clock's end are as good as the last one.
        let until = soon(self.patience);
        let shared = match &mut self.role {
            Role::Hub(hub) => hub.gather(bytes, descriptors, until)?,
            Role::Guest(guest) => guest.gather(bytes, descriptors, until)?,
        };
        let opened = shared.into_iter().map(|Shared { bytes, descriptors }| {
            let descriptors = Arc::try_unwrap(descriptors).unwrap_or_else(|_| unreachable!("all of it has been sent"));
            (bytes, descriptors)
        });
        Ok(opened.collect())
    }

    /// Tells the others why this rank leaves before the meeting is over.
    pub(crate) fn leave(self, error: &Error) {
        match self.role {
            Role::Hub(hub) => hub.leave(reason(error)),
            Role::Guest(guest) => guest.leave(error),
        }
    }
}

/// So long from now, or as late as the clock goes.
pub(super) fn soon(wait: Duration) -> Instant {
    const AS_GOOD_AS_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(wait).unwrap_or(now + AS_GOOD_AS_EVER)
}
