//! The side of every rank but rank 0 of a meeting of processes.

use std::{
    net::ToSocketAddrs,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    message::{Answer, Challenge, Hello, Message, PROTOCOL, Terms, Verdict},
    processes::{Me, Shared, namespace},
    secret::{self, Secret},
    socket::{self, Door, Line, Packets, Received, Stream},
};
use crate::{Error, Result};

/// How long rank 0 may take to say something to who has connected. It does so at once; a machine may be busy.
const TO_ANSWER: Duration = Duration::from_secs(5);
/// How long rank 0 may take to say who is missing.
const TO_SAY_WHO: Duration = Duration::from_millis(500);
/// Between attempts to find rank 0, at first and at last.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];

/// Where a rank looks for rank 0.
pub(super) enum Way {
    /// At one of these, the first first.
    Unix(Vec<(Door, Secret)>),
    /// At this host and port, which says where else to go.
    Tcp(String, u16, Secret),
}

/// A rank that is seated.
pub(super) struct Guest {
    me: Me,
    packets: Packets,
    round: u32,
}

/// What came of an attempt to be seated.
pub(super) enum Knock {
    Seated(Packets),
    Ticket {
        name: String,
        namespace: String,
    },
    /// Nobody is there.
    Nobody,
    /// Who is there is not rank 0 of the group, for this reason.
    Stranger(String),
    Refused(Verdict),
}

impl Guest {
    /// Finds rank 0, is seated, and waits until all are.
    pub(super) fn be_seated(me: Me, way: &Way, started: Instant, until: Instant) -> Result<Guest> {
        let packets = find(&me, way, started, until)?;
        let mut guest = Guest { me, packets, round: 0 };
        match guest.hear(started, until, &mut |message, _| matches!(message, Message::Started).then_some(()))? {
            true => Ok(guest),
            false => Err(guest.misunderstood()),
        }
    }

    /// Shares this with all ranks, and returns what they share.
    pub(super) fn gather(&mut self, bytes: Vec<u8>, descriptors: Vec<OwnedFd>, until: Instant) -> Result<Vec<Shared>> {
        let started = Instant::now();
        self.round += 1;
        let message = Message::share(self.round, self.me.rank, bytes.clone())?.to_bytes();
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        loop {
            match self.packets.send(&message, &borrowed) {
                Ok(true) => break,
                Ok(false) if Instant::now() < until => {
                    let _ = socket::wait(&[(self.packets.as_fd(), true)], until);
                }
                Ok(false) => return Err(self.give_up(started, vec![0])),
                // Rank 0 said why before it closed, or is gone.
                Err(_) => break,
            }
        }
        let mut shared: Vec<Option<Shared>> = (0..self.me.world).map(|_| None).collect();
        shared[self.me.rank] = Some(Shared { bytes, descriptors: Arc::new(descriptors) });
        let (own, world, expected) = (self.me.rank, self.me.world, self.round);
        let whole = self.hear(started, until, &mut |message, descriptors| {
            let Message::Share { round, rank, bytes } = message else { return None };
            let rank = rank as usize;
            if round != expected || rank >= world || rank == own || shared[rank].is_some() {
                return None;
            }
            shared[rank] = Some(Shared { bytes, descriptors: Arc::new(descriptors) });
            Some(())
        })?;
        if !whole {
            return Err(self.misunderstood());
        }
        Ok(shared.into_iter().flatten().collect())
    }

    /// Tells all others why this rank failed.
    pub(super) fn leave(self, error: &Error) {
        let _ = self.packets.send(&Message::leave(error).to_bytes(), &[]);
    }

    /// Hears as many messages as there are others in a round, or one, that all are seated, in round 0. `false` if
    /// `take` didn't know what to do with one.
    fn hear(
        &mut self,
        started: Instant,
        mut until: Instant,
        take: &mut dyn FnMut(Message, Vec<OwnedFd>) -> Option<()>,
    ) -> Result<bool> {
        let mut awaited = if self.round == 0 { 1 } else { self.me.world - 1 };
        let mut gave_up = false;
        while awaited > 0 {
            match self.packets.receive() {
                Received::Message(message, descriptors) => match Message::parse(&message) {
                    Some(Message::End(verdict)) => return Err(verdict.error(self.me.rank)),
                    Some(message) => match take(message, descriptors) {
                        Some(()) => awaited -= 1,
                        None => return Ok(false),
                    },
                    None => return Ok(false),
                },
                Received::Closed => return Err(Error::PeerGone { rank: self.me.rank, peer: 0 }),
                Received::Nothing if Instant::now() < until => {
                    socket::wait(&[(self.packets.as_fd(), false)], until)
                        .map_err(|errno| Error::System { call: "poll", reason: errno.to_string() })?;
                }
                // Rank 0 knows who is missing, if it isn't rank 0.
                Received::Nothing if !gave_up => {
                    gave_up = true;
                    let waited = started.elapsed().as_millis() as u64;
                    let _ = self.packets.send(&Message::GiveUp { round: self.round, waited }.to_bytes(), &[]);
                    until = Instant::now() + TO_SAY_WHO;
                }
                Received::Nothing => return Err(self.give_up(started, vec![0])),
            }
        }
        Ok(true)
    }

    fn give_up(&self, started: Instant, missing: Vec<usize>) -> Error {
        let error = Error::MeetingTimeout { rank: self.me.rank, missing, waited: started.elapsed() };
        let _ = self.packets.send(&Message::leave(&error).to_bytes(), &[]);
        error
    }

    fn misunderstood(&self) -> Error {
        let reason = "it said what no rank says at that point of a meeting".into();
        let error = Error::PeerFailed { peer: 0, reason };
        let _ = self.packets.send(&Message::leave(&error).to_bytes(), &[]);
        error
    }
}

/// Looks for rank 0 until it is found.
fn find(me: &Me, way: &Way, started: Instant, until: Instant) -> Result<Packets> {
    let mut strange = None;
    let mut pause = PAUSES[0];
    loop {
        let knocks = match way {
            Way::Unix(doors) => knock_at_all(me, doors, until)?,
            Way::Tcp(host, port, secret) => knock_by_tcp(me, host, *port, secret, until)?,
        };
        for (at, knock) in knocks {
            match knock {
                Knock::Seated(packets) => return Ok(packets),
                Knock::Refused(verdict) => return Err(verdict.error(me.rank)),
                Knock::Stranger(reason) => strange = Some((at, reason)),
                Knock::Nobody | Knock::Ticket { .. } => {}
            }
        }
        if Instant::now() >= until {
            return Err(match strange {
                Some((at, reason)) => Error::ForeignPeer { rank: me.rank, at, reason },
                None => Error::MeetingTimeout { rank: me.rank, missing: vec![0], waited: started.elapsed() },
            });
        }
        std::thread::sleep(pause.min(until.saturating_duration_since(Instant::now())));
        pause = (pause * 2).min(PAUSES[1]);
    }
}

fn knock_at_all(me: &Me, doors: &[(Door, Secret)], until: Instant) -> Result<Vec<(String, Knock)>> {
    let mut knocks = Vec::new();
    for (door, secret) in doors {
        let knock = knock(me, door, secret, until)?;
        let over = matches!(knock, Knock::Seated(_) | Knock::Refused(_));
        knocks.push((door.to_string(), knock));
        if over {
            break;
        }
    }
    Ok(knocks)
}

/// Says Hello at a Unix socket.
pub(super) fn knock(me: &Me, door: &Door, secret: &Secret, until: Instant) -> Result<Knock> {
    let mut packets = match Packets::connect(door) {
        Ok(Some(packets)) => packets,
        Ok(None) => return Ok(Knock::Nobody),
        Err(errno) => return Ok(Knock::Stranger(format!("it can't be connected to: {errno}"))),
    };
    if let Some(reason) = packets.stranger() {
        return Ok(Knock::Stranger(reason));
    }
    match greet(me, secret, &mut packets, until)? {
        Err(knock) => Ok(knock),
        Ok(Answer::Seated) => Ok(Knock::Seated(packets)),
        Ok(Answer::Refused(verdict)) => Ok(Knock::Refused(verdict)),
        Ok(Answer::Ticket { .. }) => Ok(Knock::Stranger("it sends elsewhere".into())),
    }
}

/// Says Hello at an address, and then where it sends.
fn knock_by_tcp(me: &Me, host: &str, port: u16, secret: &Secret, until: Instant) -> Result<Vec<(String, Knock)>> {
    let at = super::place::address(host, port);
    let addresses = (host, port).to_socket_addrs().map_err(|error| Error::MeetingPlace {
        rank: me.rank,
        at: at.clone(),
        reason: format!("the host's name leads nowhere: {error}"),
    })?;
    let mut knocks = Vec::new();
    for address in addresses {
        // Refused, unreachable, too late: rank 0 is not there, or not there yet.
        let Ok(mut stream) = Stream::connect(&address, until) else { continue };
        let knock = match greet(me, secret, &mut stream, until)? {
            Err(knock) => knock,
            Ok(Answer::Ticket { name, namespace }) => Knock::Ticket { name, namespace },
            Ok(Answer::Refused(verdict)) => Knock::Refused(verdict),
            Ok(Answer::Seated) => Knock::Stranger("it seats who came by TCP".into()),
        };
        if let Knock::Ticket { name, namespace } = knock {
            if namespace != self::namespace() {
                return Err(Error::MeetingPlace {
                    rank: me.rank,
                    at,
                    reason: "rank 0 is on this machine, but in another network namespace, most likely another \
                             container's: meet at a path that both see"
                        .into(),
                });
            }
            knocks.extend(knock_at_all(me, &[(Door::Abstract(name), secret.clone())], until)?);
        } else {
            knocks.push((at.clone(), knock));
        }
    }
    Ok(knocks)
}

/// Hears the challenge, says Hello, and hears the answer.
fn greet(me: &Me, secret: &Secret, line: &mut dyn Line, until: Instant) -> Result<std::result::Result<Answer, Knock>> {
    let until = until.min(Instant::now() + TO_ANSWER);
    let stranger = |reason: &str| Ok(Err(Knock::Stranger(reason.into())));
    let challenge = match line.hear_by(until) {
        Received::Message(message, _) => Challenge::parse(&message),
        Received::Nothing => return stranger("it doesn't speak"),
        Received::Closed => return stranger("it hung up"),
    };
    let Some(challenge) = challenge else { return stranger("it doesn't speak as a rank does") };
    let nonce = secret::random()?;
    let hello = Hello {
        protocol: PROTOCOL,
        rank: me.rank as u32,
        version: me.version.clone(),
        nonce,
        terms: Some(Terms { world: me.world as u32, boot: me.boot.clone() }),
    };
    if !line.say(&hello.to_bytes(secret, &challenge.nonce)) {
        return stranger("it hung up");
    }
    if challenge.protocol != PROTOCOL {
        // It has been told; its answer can't be read.
        let verdict =
            Verdict::Versions { version: challenge.version, peer: me.rank as u32, peer_version: me.version.clone() };
        return Ok(Err(Knock::Refused(verdict)));
    }
    match line.hear_by(until) {
        Received::Message(message, _) => match Answer::parse(&message, secret, &challenge.nonce, &nonce) {
            Some(answer) => Ok(Ok(answer)),
            None => stranger("it doesn't know the secret of this rank"),
        },
        Received::Nothing => stranger("it doesn't answer"),
        Received::Closed => stranger("it hung up on this rank, whose secret or group is another"),
    }
}
