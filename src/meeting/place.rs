//! Where the ranks of a group meet, and by what they know each other.

use std::{
    fmt,
    net::{SocketAddr, TcpListener, ToSocketAddrs},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::io::Errno;

use super::{
    environment::{self, Job},
    guest::{Knock, Way, knock},
    hub::{Entrance, Ticket},
    message::{Challenge, PROTOCOL, Verdict},
    processes::{Me, Processes, namespace, soon},
    seat::Seat,
    secret::{self, Secret},
    socket::{Door, Line, Listener, Received, Stream},
    wire::Wire,
};
use crate::{Error, Result};

/// How long ranks wait for each other to come, where the caller doesn't say.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long rank 0 waits for a place that is in use, most likely by what is about to end.
const TO_BE_FREE: Duration = Duration::from_secs(1);

/// How a rank that is a process finds the others of its group: where they meet, which rank it is, and by what secret
/// ranks know each other.
///
/// All ranks are on one machine, and of one user. Rank 0 hosts the meeting; the others may come before it. Nothing
/// stays behind where they met, however a process ends; a [path](Meeting::at_path) alone may be left by one that is
/// killed while ranks meet.
///
/// Groups that meet at the same time never mix if they differ in their place, their secret, their
/// [name](Meeting::group) or the [ranks](Meeting::among) in them.
///
/// ```no_run
/// use peersum::{Meeting, Options, host::Communicator};
///
/// // The job's 8 ranks are two tensor-parallel groups of 4.
/// let job = Meeting::from_env()?;
/// let first = job.rank() / 4 * 4;
/// let group = job.among(&[first, first + 1, first + 2, first + 3])?;
/// let rank = Communicator::meet(&group, &Options::default())?;
/// # Ok::<(), peersum::Error>(())
/// ```
#[derive(Clone)]
pub struct Meeting {
    rank: usize,
    world: usize,
    local_rank: Option<usize>,
    place: Place,
    group: String,
    members: Option<Vec<usize>>,
    secret: Option<Secret>,
    timeout: Duration,
}

#[derive(Clone)]
enum Place {
    /// Wherever the job's secret leads. `elsewhere`: why all ranks of the job can't meet.
    Job {
        job: Job,
        elsewhere: Option<String>,
    },
    Address(String),
    Path(PathBuf),
}

impl Meeting {
    /// As the launcher of this process tells by the environment: `peersum launch` (`PEERSUM_RANK`,
    /// `PEERSUM_WORLD_SIZE`), torchrun (`RANK`, `WORLD_SIZE`), Open MPI (`OMPI_COMM_WORLD_*`), MPICH and Intel MPI
    /// (`PMI_RANK`, `PMI_SIZE`) or Slurm (`SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`); the first of these that is there.
    ///
    /// No port is used, not even `MASTER_PORT`: ranks meet at an abstract Unix socket whose name follows from the job.
    /// The secret is `PEERSUM_SECRET`, which `peersum launch` sets anew for each job. Without it there are two: one of
    /// what processes of this user alone can see of the ranks' common parent, and one of the variables that name the
    /// job. The latter can be guessed: that lets nobody else's process in, but may keep the group out. MPICH has no
    /// variable that names the job, so ranks that it starts through scripts, which have no common parent, need
    /// `PEERSUM_SECRET`.
    ///
    /// # Errors
    ///
    /// [`Error::Environment`] names the variable that is missing, or makes no sense.
    pub fn from_env() -> Result<Meeting> {
        let told = environment::read(&|name| {
            // What is no text is no number either, and its error shows it.
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })?;
        let place = Place::Job { job: told.job, elsewhere: told.elsewhere };
        let meeting = Meeting::new(place, told.rank, told.world);
        Ok(Meeting { local_rank: told.local_rank, group: told.group, secret: told.secret, ..meeting })
    }

    /// At a TCP port: `host:port`, where the host is a name, an IPv4 address, or an IPv6 address in brackets. Rank 0
    /// listens there, and there alone, while ranks meet; a name must lead to this machine.
    ///
    /// Anybody can connect to a port, so this needs a [secret](Meeting::secret). Who proves to have it is sent on to a
    /// Unix socket. Groups that are given the same port take turns at it.
    pub fn at_address(address: impl Into<String>, rank: usize, world: usize) -> Meeting {
        Meeting::new(Place::Address(address.into()), rank, world)
    }

    /// At a Unix socket of this path, of any length. Ranks in containers can meet where both see the path. Rank 0 makes
    /// the file, and removes it once all have come; one that a killed process left is replaced. A group that has a
    /// name, or some of the ranks, makes its own beside it.
    pub fn at_path(path: impl Into<PathBuf>, rank: usize, world: usize) -> Meeting {
        Meeting::new(Place::Path(path.into()), rank, world)
    }

    fn new(place: Place, rank: usize, world: usize) -> Meeting {
        let group = String::new();
        Meeting { rank, world, local_rank: None, place, group, members: None, secret: None, timeout: TIMEOUT }
    }

    /// Sets the name of the group: the same on its ranks, and another than those of groups that meet at the same place.
    #[must_use]
    pub fn group(mut self, name: impl Into<String>) -> Self {
        self.group = name.into();
        self
    }

    /// Makes it a meeting of these ranks alone, in this order, which is the same on all of them: the first is rank 0 of
    /// the group. Groups of other ranks have nothing to do with it, whatever their names.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] if this rank is not among them, or one is twice or doesn't exist.
    pub fn among(mut self, ranks: &[usize]) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidOption { option: "among", value: format!("{ranks:?}"), reason };
        for (index, &rank) in ranks.iter().enumerate() {
            if rank >= self.world {
                return Err(invalid(format!("there is no rank {rank} among {}", self.world)));
            }
            if ranks[..index].contains(&rank) {
                return Err(invalid(format!("rank {rank} is in it twice")));
            }
        }
        let position = ranks.iter().position(|&rank| rank == self.rank);
        let own = position.ok_or_else(|| invalid(format!("this is rank {}, which is not in it", self.rank)))?;
        let before = self.members.take();
        let member = |rank: usize| before.as_ref().map_or(rank, |before| before[rank]);
        self.members = Some(ranks.iter().map(|&rank| member(rank)).collect());
        (self.rank, self.world) = (own, ranks.len());
        Ok(self)
    }

    /// Sets the secret by which ranks know each other: anything that is hard to guess, new for each job, the same on
    /// all ranks. Over [`Meeting::from_env`] it comes before the environment's.
    #[must_use]
    pub fn secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.secret = Some(Secret::given(secret.as_ref()));
        self
    }

    /// Sets how long ranks wait for each other to come. Default: 60 s. Once all have come, [`Options::timeout`] counts.
    ///
    /// [`Options::timeout`]: crate::Options::timeout
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// This rank in the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks of the group.
    pub fn world_size(&self) -> usize {
        self.world
    }

    /// This rank among those of the job on this machine, where the launcher told: which device to take.
    pub fn local_rank(&self) -> Option<usize> {
        self.local_rank
    }

    /// Waits for all ranks of the group. From then on no rank waits longer than `patience` for another.
    pub(crate) fn open(&self, patience: Duration) -> Result<Seat> {
        let Meeting { rank, world, .. } = *self;
        if rank >= world {
            let reason = format!("the group has {world} ranks, which count from 0");
            return Err(Error::InvalidOption { option: "rank", value: rank.to_string(), reason });
        }
        let me = Me::here(rank, world);
        let until = soon(self.timeout);
        self.open_as(me, until, patience).map(Seat::from)
    }

    pub(super) fn open_as(&self, me: Me, until: Instant, patience: Duration) -> Result<Processes> {
        let rank = me.rank;
        match &self.place {
            Place::Job { job, elsewhere } => {
                if let (Some(reason), None) = (elsewhere, &self.members) {
                    return Err(Error::SeveralMachines { reason: reason.clone() });
                }
                let secrets = job.secrets(self.secret.as_ref(), environment::parent());
                let secrets: Vec<_> = secrets.iter().map(|secret| self.of_group(secret)).collect();
                if secrets.is_empty() && me.world > 1 {
                    return Err(Job::unknown());
                }
                let doors = secrets.into_iter().map(|secret| (Door::Abstract(secret.name()), secret));
                let doors: Vec<_> = doors.collect();
                let entrances = || host_any(&me, &doors, until);
                Processes::meet(me.clone(), entrances, || Ok(Way::Unix(doors.clone())), until, patience)
            }
            Place::Path(path) => {
                let secret = self.secret.clone().unwrap_or_else(|| Secret::of(b"path", []));
                let door = (Door::Path(self.path_of_group(path)), self.of_group(&secret));
                let entrances = || host_any(&me, std::slice::from_ref(&door), until);
                Processes::meet(me.clone(), entrances, || Ok(Way::Unix(vec![door.clone()])), until, patience)
            }
            Place::Address(address) => {
                let Some((host, port)) = host_and_port(address) else {
                    let reason = "that is no host:port, as 127.0.0.1:2950, [::1]:2950 or localhost:2950".into();
                    return Err(Error::MeetingPlace { rank, at: address.clone(), reason });
                };
                let Some(secret) = &self.secret else {
                    let reason = "anybody can connect to a port: give all ranks the same secret".into();
                    return Err(Error::MeetingPlace { rank, at: address.clone(), reason });
                };
                let secret = self.of_group(secret);
                let entrances = || host_tcp(&me, host, port, &secret, until);
                let way = || Ok(Way::Tcp(host.to_owned(), port, secret.clone()));
                Processes::meet(me.clone(), entrances, way, until, patience)
            }
        }
    }

    /// Where this group meets, of all that are given that path.
    fn path_of_group(&self, path: &Path) -> PathBuf {
        if self.group.is_empty() && self.members.is_none() {
            return path.into();
        }
        let name = self.of_group(&Secret::of(b"path", [])).name();
        let mut path = path.as_os_str().to_owned();
        path.push(name.strip_prefix("peersum").unwrap_or(&name));
        path.into()
    }

    /// The secret of this group, of all that go by that one.
    fn of_group(&self, secret: &Secret) -> Secret {
        let members: Vec<u32> = self.members.iter().flatten().map(|&rank| rank as u32).collect();
        secret.derive(b"group", [self.group.as_bytes(), &members.to_bytes()])
    }
}

impl fmt::Debug for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place: &dyn fmt::Debug = match &self.place {
            Place::Job { .. } => &"the job's",
            Place::Address(address) => address,
            Place::Path(path) => path,
        };
        f.debug_struct("Meeting")
            .field("rank", &self.rank)
            .field("world_size", &self.world)
            .field("place", place)
            .field("group", &self.group)
            .field("among", &self.members)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// Meets by an all-gather that the caller has already: it is called once, with some bytes of this rank, and gives those
/// of all ranks, in rank order. What is told by it is where and by what secret to meet, for this once.
pub(crate) fn meet_through(
    rank: usize,
    world: usize,
    all_gather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, String>,
    patience: Duration,
) -> Result<Seat> {
    if rank >= world {
        let reason = format!("the group has {world} ranks, which count from 0");
        return Err(Error::InvalidOption { option: "rank", value: rank.to_string(), reason });
    }
    let me = Me::here(rank, world);
    let at = || "where their all-gather leads".to_owned();
    let secret = Secret::random()?;
    // Rank 0 takes part even if it can't host, or the others would wait for it.
    let hosted = (rank == 0 && world > 1).then(|| Listener::bind(&Door::Abstract(secret.name())));
    let card = Card {
        protocol: PROTOCOL,
        rank: rank as u32,
        world: world as u32,
        version: me.version.clone(),
        boot: me.boot.clone(),
        namespace: namespace(),
        key: matches!(hosted, Some(Ok(_))).then_some(*secret.key()),
    };
    let cards = all_gather(&card.to_bytes());
    let listener = hosted.transpose().map_err(|errno| Error::MeetingPlace {
        rank,
        at: at(),
        reason: format!("no Unix socket can be bound: {errno}"),
    })?;
    let cards = cards.map_err(|reason| Error::MeetingPlace { rank, at: at(), reason })?;
    let secret = match judge(&me, &card, &cards)? {
        Some(key) => Secret::from_key(key),
        None => secret,
    };
    let until = soon(patience);
    let entrances = || Ok(listener.into_iter().map(|listener| Entrance::Unix(listener, secret.clone())).collect());
    let way = || Ok(Way::Unix(vec![(Door::Abstract(secret.name()), secret.clone())]));
    Processes::meet(me, entrances, way, until, patience).map(Seat::from)
}

/// What a rank tells by the caller's all-gather.
#[derive(Clone, Debug, PartialEq)]
struct Card {
    protocol: u16,
    rank: u32,
    world: u32,
    version: String,
    boot: String,
    namespace: String,
    /// Rank 0's alone: the secret for this once.
    key: Option<[u8; secret::BYTES]>,
}

impl Wire for Card {
    fn put(&self, out: &mut Vec<u8>) {
        self.protocol.put(out);
        self.version.put(out);
        self.rank.put(out);
        self.world.put(out);
        self.boot.put(out);
        self.namespace.put(out);
        self.key.put(out);
    }

    fn take(from: &mut &[u8]) -> Option<Card> {
        let (protocol, version) = (u16::take(from)?, String::take(from)?);
        let (rank, world) = (u32::take(from)?, u32::take(from)?);
        let (boot, namespace) = (String::take(from)?, String::take(from)?);
        Some(Card { protocol, rank, world, version, boot, namespace, key: Wire::take(from)? })
    }
}

/// Whether the ranks of these cards can be a group. Every rank finds the same. Returns rank 0's key, if there is more
/// than one rank.
fn judge(me: &Me, own: &Card, cards: &[Vec<u8>]) -> Result<Option<[u8; secret::BYTES]>> {
    let wrong = |reason: String| Error::MeetingPlace {
        rank: me.rank,
        at: "where their all-gather leads".into(),
        reason: format!("{reason}: it must give the bytes of all ranks, as they are, in rank order"),
    };
    if cards.len() != me.world {
        return Err(wrong(format!("it gave the bytes of {} ranks of {}", cards.len(), me.world)));
    }
    let mut key = None;
    for (peer, bytes) in cards.iter().enumerate() {
        // A version that tells something else tells its number all the same.
        let mut from = &bytes[..];
        let known = u16::take(&mut from).zip(String::take(&mut from));
        if let Some((protocol, version)) = known
            && (protocol, &version) != (own.protocol, &own.version)
        {
            let (own_version, peer_version) = (own.version.clone(), version);
            return Err(Verdict::Versions { version: own_version, peer: peer as u32, peer_version }.error(me.rank));
        }
        let card =
            Card::from_bytes(bytes).ok_or_else(|| wrong(format!("what it gave as rank {peer}'s is nobody's")))?;
        if card.world != own.world {
            let (peer_world, peer) = (card.world as usize, card.rank as usize);
            return Err(Error::WorldsDiffer { rank: me.rank, world: me.world, peer, peer_world });
        }
        if card.boot != own.boot {
            let reason = format!("rank {peer} is on another than rank {}", me.rank);
            return Err(Error::SeveralMachines { reason });
        }
        if card.rank as usize != peer {
            return Err(wrong(format!("what it gave as rank {peer}'s is rank {}'s", card.rank)));
        }
        if peer == me.rank && card != *own {
            return Err(Error::RankTaken { rank: peer });
        }
        if card.namespace != own.namespace {
            return Err(Error::MeetingPlace {
                rank: me.rank,
                at: "an abstract Unix socket".into(),
                reason: format!(
                    "rank {peer} is in another network namespace, most likely another container's: meet at a path that \
                     both see"
                ),
            });
        }
        if peer == 0 {
            key = card.key;
        }
    }
    if me.world > 1 && key.is_none() {
        return Err(Error::PeerFailed { peer: 0, reason: "it can't bind a Unix socket".into() });
    }
    Ok(key)
}

/// Hosts at those of the doors that it can, and at one at least.
fn host_any(me: &Me, doors: &[(Door, Secret)], until: Instant) -> Result<Vec<Entrance>> {
    let mut entrances = Vec::new();
    let mut failure = None;
    for (door, secret) in doors {
        match host(me, door, secret, until) {
            Ok(listener) => entrances.push(Entrance::Unix(listener, secret.clone())),
            Err(error @ Error::RankTaken { .. }) => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "one of the places to meet at is not to be had");
                failure.get_or_insert(error);
            }
        }
    }
    match failure {
        Some(error) if entrances.is_empty() => Err(error),
        _ => Ok(entrances),
    }
}

/// Hosts at a door. If somebody does so already, finds out who.
fn host(me: &Me, door: &Door, secret: &Secret, until: Instant) -> Result<Listener> {
    let until = until.min(soon(TO_BE_FREE));
    let place = |reason: String| Error::MeetingPlace { rank: me.rank, at: door.to_string(), reason };
    loop {
        match Listener::bind(door) {
            Ok(listener) => return Ok(listener),
            Err(Errno::ADDRINUSE) => {}
            Err(errno) => return Err(place(format!("no socket can be bound there: {errno}"))),
        }
        let reason = match knock(me, door, secret, until)? {
            Knock::Refused(verdict) => return Err(verdict.error(me.rank)),
            Knock::Stranger(reason) => reason,
            Knock::Nobody => match door {
                Door::Path(path) => {
                    remove_stale(path).map_err(&place)?;
                    "a file that was left there came back".into()
                }
                Door::Abstract(_) => "it comes and goes".into(),
            },
            Knock::Seated(_) | Knock::Ticket { .. } => "it takes rank 0 for another".into(),
        };
        if Instant::now() >= until {
            return Err(place(format!("it is in use, and {reason}")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Removes a socket that nobody listens on any more.
fn remove_stale(path: &Path) -> Result<(), String> {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::symlink_metadata(path) {
        Ok(file) if file.file_type().is_socket() => {
            std::fs::remove_file(path).map_err(|error| format!("the stale socket there can't be removed: {error}"))
        }
        Ok(_) => Err("there is a file that is no socket".into()),
        Err(_) => Ok(()),
    }
}

/// Hosts at a port of this machine.
fn host_tcp(me: &Me, host: &str, port: u16, secret: &Secret, until: Instant) -> Result<Vec<Entrance>> {
    let until_free = until.min(soon(TO_BE_FREE));
    let place = |reason: String| Error::MeetingPlace { rank: me.rank, at: address(host, port), reason };
    let addresses: Vec<_> = (host, port)
        .to_socket_addrs()
        .map_err(|error| place(format!("the host's name leads nowhere: {error}")))?
        .collect();
    let name = secret::name(&secret::random()?);
    let door = Door::Abstract(name.clone());
    let listener = Listener::bind(&door).map_err(|errno| place(format!("no Unix socket can be bound: {errno}")))?;
    let mut entrances = vec![Entrance::Unix(listener, secret.clone())];
    let ticket = Ticket { name, namespace: namespace() };
    let mut failure = None;
    for address in addresses {
        let listener = loop {
            match TcpListener::bind(address) {
                Err(error)
                    if error.kind() == std::io::ErrorKind::AddrInUse
                        && Instant::now() < if is_a_meeting(&address) { until } else { until_free } =>
                {
                    std::thread::sleep(Duration::from_millis(20));
                }
                bound => break bound,
            }
        };
        let listener = listener.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        match listener {
            Ok(listener) => entrances.push(Entrance::Tcp(listener, secret.clone(), ticket.clone())),
            // A name may lead to addresses of which this machine has one.
            Err(error) => drop(failure.get_or_insert(error)),
        }
    }
    match failure {
        Some(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            Err(place("the port is in use: take another, or end what listens there".into()))
        }
        Some(error) if entrances.len() == 1 => {
            Err(place(format!("rank 0 must be able to listen there, on its own machine: {error}")))
        }
        _ => Ok(entrances),
    }
}

/// Whether other ranks meet there, who will be done.
fn is_a_meeting(address: &SocketAddr) -> bool {
    let until = soon(Duration::from_millis(100));
    let heard = Stream::connect(address, until).map(|mut stream| stream.hear_by(until));
    matches!(heard, Ok(Received::Message(message, _)) if Challenge::parse(&message).is_some())
}

/// As [`Meeting::at_address`] takes it.
pub(super) fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn host_and_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(host) => host.strip_suffix(']')?,
        None => Some(host).filter(|host| !host.contains(':'))?,
    };
    let port = port.parse().ok().filter(|&port| port != 0)?;
    (!host.is_empty()).then_some((host, port))
}

#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    let me = Me { rank: 0, world: 1, version: "1.2.3".into(), boot: "boot".into() };
    let (version, boot) = (me.version.clone(), me.boot.clone());
    let own = Card { protocol: PROTOCOL, rank: 0, world: 1, version, boot, namespace: String::new(), key: None };
    let _ = judge(&me, &own, &[bytes.to_vec()]);
    host_and_port(&String::from_utf8_lossy(bytes));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_are_read() {
        assert_eq!(host_and_port("127.0.0.1:2950"), Some(("127.0.0.1", 2950)));
        assert_eq!(host_and_port("[::1]:2950"), Some(("::1", 2950)));
        assert_eq!(host_and_port("localhost:1"), Some(("localhost", 1)));
        for wrong in ["", ":", "host", "host:", ":1", "host:0", "host:65536", "::1:2950", "[::1:2950", "host:x", "[]:1"]
        {
            assert_eq!(host_and_port(wrong), None, "{wrong}");
        }
        assert_eq!(address("::1", 2), "[::1]:2");
    }

    #[test]
    fn ranks_of_a_group_are_counted_in_it() {
        let job = |rank| Meeting::at_path("/nowhere", rank, 8);
        let group = job(6).among(&[4, 6]).unwrap();
        assert_eq!((group.rank(), group.world_size()), (1, 2));
        // Of these ranks the second, which the job has as rank 6.
        let alone = group.among(&[1]).unwrap();
        assert_eq!((alone.rank(), alone.world_size(), alone.members), (0, 1, Some(vec![6])));
        for (ranks, words) in
            [(&[0, 1][..], "not in it"), (&[6, 6], "twice"), (&[6, 8], "no rank 8"), (&[], "not in it")]
        {
            let error = job(6).among(ranks).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(!format!("{:?}", job(0).secret("open sesame")).contains("sesame"));
    }

    #[test]
    fn groups_have_secrets_of_their_own() {
        let secret = Secret::given(b"secret");
        let job = || Meeting::at_path("/nowhere", 0, 4);
        let groups = [job(), job().group("a"), job().among(&[0, 1]).unwrap(), job().among(&[0, 2]).unwrap()];
        for (index, group) in groups.iter().enumerate() {
            for other in &groups[..index] {
                assert_ne!(group.of_group(&secret), other.of_group(&secret));
            }
        }
    }

    fn card(rank: u32) -> Card {
        let key = (rank == 0).then_some([7; secret::BYTES]);
        let (version, boot, namespace) = ("1.2.3".to_owned(), "boot".to_owned(), "net".to_owned());
        Card { protocol: PROTOCOL, rank, world: 2, version, boot, namespace, key }
    }

    fn judged(cards: [Card; 2]) -> Result<Option<[u8; secret::BYTES]>> {
        let me = Me { rank: 0, world: 2, version: "1.2.3".into(), boot: "boot".into() };
        judge(&me, &card(0), &cards.map(|card| card.to_bytes()))
    }

    #[test]
    fn cards_of_a_group_that_can_not_be_are_told_apart() {
        assert_eq!(judged([card(0), card(1)]).unwrap(), Some([7; secret::BYTES]));
        let error = judged([card(0), Card { world: 3, ..card(1) }]).unwrap_err();
        assert_eq!(error, Error::WorldsDiffer { rank: 0, world: 2, peer: 1, peer_world: 3 });
        let error = judged([card(0), Card { version: "1.2.4".into(), ..card(1) }]).unwrap_err();
        assert!(matches!(error, Error::VersionsDiffer { peer: 1, .. }), "{error}");
        let error = judged([card(0), Card { boot: "other".into(), ..card(1) }]).unwrap_err();
        assert!(matches!(error, Error::SeveralMachines { .. }), "{error}");
        for cards in [[card(0), card(0)], [card(1), card(0)]] {
            let error = judged(cards).unwrap_err();
            assert!(matches!(error, Error::MeetingPlace { .. }), "{error}");
        }
        let error = judged([card(0), Card { namespace: "other".into(), ..card(1) }]).unwrap_err();
        assert!(error.to_string().contains("container"), "{error}");
        let error = judged([Card { key: Some([8; secret::BYTES]), ..card(0) }, card(1)]).unwrap_err();
        assert_eq!(error, Error::RankTaken { rank: 0 });
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_card_or_none(bytes: Vec<u8>, address: String) {
            prop_assert!(Card::from_bytes(&bytes).is_none_or(|card| card.to_bytes() == bytes));
            let me = Me { rank: 0, world: 1, version: "1.2.3".into(), boot: "boot".into() };
            prop_assert!(judge(&me, &card(0), &[bytes]).is_err());
            host_and_port(&address);
        }
    }
}
