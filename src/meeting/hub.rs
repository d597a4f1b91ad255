//! Rank 0's side of a meeting of processes: it seats the others and passes on what each shares.
//!
//! One thread serves everybody, in rank 0's own calls. Who connects and is no rank of the group costs it a file
//! descriptor for a while, and no time.

use std::{
    collections::VecDeque,
    net::TcpListener,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::io::Errno;

use super::{
    message::{Answer, Challenge, Hello, Message, PROTOCOL, Verdict},
    processes::{Me, Shared},
    secret::{self, Secret},
    socket::{self, Line, Listener, Packets, Received, Stream},
};
use crate::{Error, Result};

/// How long a connection may take to say who it is. A rank does so at once; a machine may be busy.
const TO_GREET: Duration = Duration::from_secs(5);
/// Connections that have not said who they are. The oldest goes when there are more, and comes again if it is a rank.
const MOST_PENDING: usize = 256;
/// How long ranks that are not there yet are told that there will be no group: such as were started together come
/// together.
const TO_BE_TOLD: Duration = Duration::from_millis(300);
/// How long the system's own shortages are waited out.
const A_MOMENT: Duration = Duration::from_millis(1);

/// Where the ranks of a group are told to come, each with the secret that they prove to know there.
pub(super) enum Entrance {
    Unix(Listener, Secret),
    /// Who comes here by the secret is sent to that abstract name.
    Tcp(TcpListener, Secret, Ticket),
}

/// Where a guest of the TCP entrance has to go.
#[derive(Clone)]
pub(super) struct Ticket {
    pub(super) name: String,
    pub(super) namespace: String,
}

pub(super) struct Hub {
    me: Me,
    entrances: Vec<Entrance>,
    pending: VecDeque<Pending>,
    /// By rank, from rank 1 on.
    guests: Vec<Option<Guest>>,
    /// The round that rank 0 is in, or was in last.
    round: u32,
    /// Why there will be no group.
    verdict: Option<Verdict>,
    /// Ranks that have been told so as they came.
    refused: Vec<u32>,
}

/// A connection that has not said who it is.
struct Pending {
    channel: Channel,
    secret: Secret,
    nonce: [u8; secret::BYTES],
    until: Instant,
}

enum Channel {
    Unix(Packets),
    Tcp(Stream, Ticket),
}

/// A rank that is seated.
struct Guest {
    packets: Packets,
    /// What it has shared and was not yet passed on: of the round that rank 0 is in, and of the next.
    shares: VecDeque<Shared>,
    /// The round of its last share.
    round: u32,
    /// What it is to be told, when there is room.
    outbox: VecDeque<Arc<Outgoing>>,
    closed: bool,
}

struct Outgoing {
    message: Vec<u8>,
    descriptors: Arc<Vec<OwnedFd>>,
}

impl Hub {
    /// A hub that nobody has come to yet.
    pub(super) fn new(me: Me, entrances: Vec<Entrance>) -> Hub {
        let guests = (1..me.world).map(|_| None).collect();
        Hub { me, entrances, pending: VecDeque::new(), guests, round: 0, verdict: None, refused: Vec::new() }
    }

    /// Waits until all ranks are seated.
    pub(super) fn seat_all(&mut self, started: Instant, until: Instant) -> Result<()> {
        while self.guests.iter().any(Option::is_none) {
            let turn = self.turn(until).and_then(|()| {
                let missing = self.missing(|guest| guest.is_some());
                if Instant::now() >= until && !missing.is_empty() { Err(timed_out(missing, started)) } else { Ok(()) }
            });
            if let Err(verdict) = turn {
                self.tell_who_comes(&verdict);
                return Err(self.end(verdict));
            }
        }
        self.entrances.clear();
        self.pending.clear();
        let message = Arc::new(Outgoing { message: Message::Started.to_bytes(), descriptors: Arc::default() });
        self.guests.iter_mut().flatten().for_each(|guest| guest.outbox.push_back(message.clone()));
        self.flush().map_err(|verdict| self.end(verdict))
    }

    /// Shares this with all ranks, and returns what they share.
    pub(super) fn gather(&mut self, bytes: Vec<u8>, descriptors: Vec<OwnedFd>, until: Instant) -> Result<Vec<Shared>> {
        let started = Instant::now();
        if let Some(verdict) = self.verdict.clone() {
            return Err(verdict.error(0));
        }
        self.round += 1;
        let mut shared: Vec<Option<Shared>> = (0..self.me.world).map(|_| None).collect();
        shared[0] = Some(Shared { bytes, descriptors: Arc::new(descriptors) });
        let mut passed_on = false;
        loop {
            for (share, guest) in shared[1..].iter_mut().zip(&mut self.guests) {
                if let (None, Some(guest)) = (&share, guest) {
                    *share = guest.shares.pop_front();
                }
            }
            // All or nothing: a rank that is too late must not find that it has everything.
            if !passed_on && shared.iter().all(Option::is_some) {
                passed_on = true;
                for (rank, share) in shared.iter().enumerate() {
                    self.pass_on(rank, share.as_ref().unwrap_or_else(|| unreachable!("all have shared")))?;
                }
            }
            let turn = self.flush().and_then(|()| {
                let left = self.guests.iter().zip(&shared[1..]).position(|(guest, share)| {
                    let guest = guest.as_ref();
                    guest.is_none_or(|guest| guest.closed && (share.is_none() || !guest.outbox.is_empty()))
                });
                left.map_or(Ok(()), |index| Err(Verdict::Gone { peer: index as u32 + 1 }))
            });
            turn.map_err(|verdict| self.end(verdict))?;
            let told = |guest: &Option<Guest>| guest.as_ref().is_none_or(|guest| guest.outbox.is_empty());
            if passed_on && self.guests.iter().all(told) {
                return Ok(shared.into_iter().flatten().collect());
            }
            if Instant::now() >= until {
                let late = |&rank: &u32| match rank as usize {
                    0 => false,
                    rank => shared[rank].is_none() || !told(&self.guests[rank - 1]),
                };
                let missing = (0..self.me.world as u32).filter(late).collect();
                return Err(self.end(timed_out(missing, started)));
            }
            self.turn(until).map_err(|verdict| self.end(verdict))?;
        }
    }

    /// Tells all others why rank 0 failed.
    pub(super) fn leave(mut self, reason: String) {
        self.end(Verdict::Failed { peer: 0, reason });
    }

    /// Tells those ranks of a meeting that has ended who come a little later.
    fn tell_who_comes(&mut self, verdict: &Verdict) {
        let message = Message::End(verdict.clone()).to_bytes();
        let mut told = vec![false; self.guests.len()];
        let until = Instant::now() + TO_BE_TOLD;
        self.verdict = Some(verdict.clone());
        loop {
            for (guest, told) in self.guests.iter_mut().zip(&mut told) {
                if let Some(guest) = guest.take() {
                    let _ = guest.packets.send(&message, &[]);
                    *told = true;
                }
            }
            for &rank in &self.refused {
                if let Some(told) = told.get_mut((rank as usize).wrapping_sub(1)) {
                    *told = true;
                }
            }
            if told.iter().all(|&told| told) || Instant::now() >= until {
                return;
            }
            // Whatever else may be wrong by now is a consequence.
            let _ = self.turn(until);
        }
    }

    /// Ends the meeting for this reason. What rank 0 returns.
    fn end(&mut self, verdict: Verdict) -> Error {
        let message = Message::End(verdict.clone()).to_bytes();
        for guest in self.guests.iter_mut().flatten() {
            // A socket without room, or without its process, learns of it as it is closed.
            let _ = guest.packets.send(&message, &[]);
        }
        self.guests.clear();
        self.entrances.clear();
        self.pending.clear();
        self.verdict.get_or_insert(verdict).clone().error(0)
    }

    /// Queues what rank `of` shares in this round for all others.
    fn pass_on(&mut self, of: usize, share: &Shared) -> Result<()> {
        let message = Message::share(self.round, of, share.bytes.clone())?.to_bytes();
        let outgoing = Arc::new(Outgoing { message, descriptors: share.descriptors.clone() });
        let others = self.guests.iter_mut().enumerate().filter(|&(index, _)| index + 1 != of);
        others.filter_map(|(_, guest)| guest.as_mut()).for_each(|guest| guest.outbox.push_back(outgoing.clone()));
        Ok(())
    }

    /// Sends what there is room for.
    fn flush(&mut self) -> std::result::Result<(), Verdict> {
        for (index, guest) in self.guests.iter_mut().enumerate() {
            let Some(guest) = guest else { continue };
            while let Some(outgoing) = guest.outbox.front() {
                let descriptors: Vec<_> = outgoing.descriptors.iter().map(AsFd::as_fd).collect();
                match guest.packets.send(&outgoing.message, &descriptors) {
                    Ok(true) => drop(guest.outbox.pop_front()),
                    Ok(false) => break,
                    Err(Errno::PIPE | Errno::CONNRESET) => return Err(Verdict::Gone { peer: index as u32 + 1 }),
                    Err(errno) => {
                        let reason = format!("sendmsg to rank {} failed: {errno}", index + 1);
                        return Err(Verdict::Failed { peer: 0, reason });
                    }
                }
            }
        }
        Ok(())
    }

    fn missing(&self, is_there: impl Fn(&Option<Guest>) -> bool) -> Vec<u32> {
        (1..self.me.world).filter(|&rank| !is_there(&self.guests[rank - 1])).map(|rank| rank as u32).collect()
    }

    /// Waits for something to come, and takes it.
    fn turn(&mut self, until: Instant) -> std::result::Result<(), Verdict> {
        let mut asked: Vec<(BorrowedFd<'_>, bool)> = Vec::new();
        asked.extend(self.entrances.iter().map(|entrance| (entrance.as_fd(), false)));
        asked.extend(self.pending.iter().map(|pending| (pending.channel.as_fd(), false)));
        let (entrances, pending) = (self.entrances.len(), self.pending.len());
        let mut seated = Vec::new();
        for (index, guest) in self.guests.iter().enumerate() {
            if let Some(guest) = guest.as_ref().filter(|guest| !guest.closed) {
                asked.push((guest.packets.as_fd(), !guest.outbox.is_empty()));
                seated.push(index);
            }
        }
        let first_to_go = self.pending.front().map_or(until, |pending| pending.until.min(until));
        let failed = |errno: Errno| Verdict::Failed { peer: 0, reason: format!("poll failed: {errno}") };
        let ready = socket::wait(&asked, first_to_go).map_err(failed)?;
        let (ready_entrances, rest) = ready.split_at(entrances);
        let (ready_pending, ready_seated) = rest.split_at(pending);

        // Seated ranks first: whether one is gone matters to who asks for its seat.
        for (&index, _) in seated.iter().zip(ready_seated).filter(|&(_, &ready)| ready) {
            self.hear(index)?;
        }
        let now = Instant::now();
        let waiting = std::mem::take(&mut self.pending);
        for (mut pending, &ready) in waiting.into_iter().zip(ready_pending) {
            match if ready { pending.channel.line().hear() } else { Received::Nothing } {
                Received::Message(message, _) => self.greet(pending, &message)?,
                Received::Nothing if now < pending.until => self.pending.push_back(pending),
                Received::Nothing | Received::Closed => {}
            }
        }
        for index in (0..entrances).filter(|&index| ready_entrances[index]) {
            self.accept(index)?;
        }
        Ok(())
    }

    /// Takes the connections that wait at an entrance, and challenges each.
    fn accept(&mut self, index: usize) -> std::result::Result<(), Verdict> {
        // More come as fast as they are taken, if somebody wants so; the ranks' own turn must come too.
        for _ in 0..MOST_PENDING {
            let (channel, secret) = match &self.entrances[index] {
                Entrance::Unix(listener, secret) => match listener.accept() {
                    Ok(Some(packets)) if packets.stranger().is_some() => continue,
                    Ok(Some(packets)) => (Channel::Unix(packets), secret.clone()),
                    Ok(None) => return Ok(()),
                    Err(_) => {
                        self.out_of_descriptors();
                        return Ok(());
                    }
                },
                Entrance::Tcp(listener, secret, ticket) => match Stream::accept(listener) {
                    Ok(Some(stream)) => (Channel::Tcp(stream, ticket.clone()), secret.clone()),
                    Ok(None) => return Ok(()),
                    Err(_) => {
                        self.out_of_descriptors();
                        return Ok(());
                    }
                },
            };
            let failed = |error: Error| Verdict::Failed { peer: 0, reason: error.to_string() };
            let nonce = secret::random().map_err(failed)?;
            let mut pending = Pending { channel, secret, nonce, until: Instant::now() + TO_GREET };
            let challenge = Challenge { protocol: PROTOCOL, version: self.me.version.clone(), nonce };
            if pending.channel.line().say(&challenge.to_bytes()) {
                if self.pending.len() == MOST_PENDING {
                    self.pending.pop_front();
                }
                self.pending.push_back(pending);
            }
        }
        Ok(())
    }

    /// No connection can be accepted, most likely since this process has as many descriptors as it may.
    fn out_of_descriptors(&mut self) {
        self.pending.pop_front();
        std::thread::sleep(A_MOMENT);
    }

    /// Hears the first words of a connection. Whoever doesn't know the secret is just dropped.
    fn greet(&mut self, mut pending: Pending, message: &[u8]) -> std::result::Result<(), Verdict> {
        let Some(hello) = Hello::parse(message, &pending.secret, &pending.nonce) else {
            tracing::debug!("a connection to the meeting was dropped: it didn't greet as a rank of the group does");
            return Ok(());
        };
        let (answer, verdict) = match (self.judge(&hello), &pending.channel) {
            (Some(verdict), _) => (Answer::Refused(verdict.clone()), Some(verdict)),
            (None, Channel::Tcp(_, Ticket { name, namespace })) => {
                (Answer::Ticket { name: name.clone(), namespace: namespace.clone() }, None)
            }
            (None, Channel::Unix(_)) => (Answer::Seated, None),
        };
        let sent = pending.channel.line().say(&answer.to_bytes(&pending.secret, &pending.nonce, &hello.nonce));
        if let Some(verdict) = verdict {
            self.refused.push(hello.rank);
            // Once it has ended nothing more can be wrong with it.
            return if self.verdict.is_some() { Ok(()) } else { Err(verdict) };
        }
        if let (Channel::Unix(packets), true) = (pending.channel, sent) {
            self.guests[hello.rank as usize - 1] =
                Some(Guest { packets, shares: VecDeque::new(), round: 0, outbox: VecDeque::new(), closed: false });
        }
        Ok(())
    }

    /// What is wrong with a rank that knows the secret.
    fn judge(&self, hello: &Hello) -> Option<Verdict> {
        if self.verdict.is_some() {
            return self.verdict.clone();
        }
        let peer = hello.rank;
        let terms = match &hello.terms {
            Some(terms) if hello.version == self.me.version => terms,
            _ => {
                let (version, peer_version) = (self.me.version.clone(), hello.version.clone());
                return Some(Verdict::Versions { version, peer, peer_version });
            }
        };
        if terms.boot != self.me.boot {
            return Some(Verdict::Machines { peer });
        }
        if terms.world as usize != self.me.world || peer as usize >= self.me.world {
            let world = self.me.world as u32;
            return Some(Verdict::Worlds { world, peer, peer_world: terms.world });
        }
        let taken = peer == 0 || self.guests[peer as usize - 1].is_some();
        taken.then_some(Verdict::RankTaken { rank: peer })
    }

    /// Hears a seated rank.
    fn hear(&mut self, index: usize) -> std::result::Result<(), Verdict> {
        let peer = index as u32 + 1;
        let seating = !self.entrances.is_empty();
        let nobody_missing = self.guests.iter().all(Option::is_some);
        let Some(guest) = &mut self.guests[index] else { return Ok(()) };
        loop {
            let (message, descriptors) = match guest.packets.receive() {
                Received::Message(message, descriptors) => (message, descriptors),
                Received::Nothing => return Ok(()),
                Received::Closed if seating => return Err(Verdict::Gone { peer }),
                Received::Closed => {
                    guest.closed = true;
                    return Ok(());
                }
            };
            match Message::parse(&message) {
                Some(Message::Share { round, rank, bytes })
                    if rank == peer && round == guest.round + 1 && round <= self.round + 1 =>
                {
                    guest.round = round;
                    guest.shares.push_back(Shared { bytes, descriptors: Arc::new(descriptors) });
                }
                Some(Message::GiveUp { round: 0, waited }) if seating && !nobody_missing => {
                    let missing = self.missing(|guest| guest.is_some());
                    return Err(Verdict::Missing { ranks: missing, waited });
                }
                Some(Message::GiveUp { round, waited }) if round == self.round && !seating => {
                    let missing = (1..self.me.world)
                        .filter(|&rank| self.guests[rank - 1].as_ref().is_none_or(|guest| guest.round < self.round));
                    let missing: Vec<_> = missing.map(|rank| rank as u32).collect();
                    if !missing.is_empty() {
                        return Err(Verdict::Missing { ranks: missing, waited });
                    }
                    return Ok(());
                }
                // What it waited for has come meanwhile, or rank 0 itself is what it waits for.
                Some(Message::GiveUp { .. }) => {}
                Some(Message::Leave { reason }) => return Err(Verdict::Failed { peer, reason }),
                _ => {
                    let reason = "it said what no rank says at that point of a meeting".into();
                    return Err(Verdict::Failed { peer, reason });
                }
            }
        }
    }
}

fn timed_out(missing: Vec<u32>, started: Instant) -> Verdict {
    Verdict::Missing { ranks: missing, waited: started.elapsed().as_millis() as u64 }
}

impl AsFd for Entrance {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Entrance::Unix(listener, _) => listener.as_fd(),
            Entrance::Tcp(listener, ..) => listener.as_fd(),
        }
    }
}

impl Channel {
    fn line(&mut self) -> &mut dyn Line {
        match self {
            Channel::Unix(packets) => packets,
            Channel::Tcp(stream, _) => stream,
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Channel::Unix(packets) => packets.as_fd(),
            Channel::Tcp(stream, _) => stream.as_fd(),
        }
    }
}
