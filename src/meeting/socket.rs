//! Unix sockets that carry whole messages, with descriptors beside them, and TCP where the place is an address.
//!
//! Nothing here waits for anybody but [`wait`].

use std::{
    io::{ErrorKind, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{self, PollFd, PollFlags, Timespec},
    fs::{self, Mode, OFlags},
    io::Errno,
    net::{
        self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
    },
    process,
};

use super::message::{MOST_BYTES, MOST_OF_A_STRANGER};

/// The most descriptors beside one message.
pub(super) const MOST_DESCRIPTORS: usize = 16;
/// Connections that the system keeps for a listener until they are accepted; it may allow fewer.
const BACKLOG: i32 = 4096;

/// Where a Unix socket is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Door {
    /// In the abstract namespace, which leaves nothing behind, of a network namespace.
    Abstract(String),
    /// In the file system.
    Path(PathBuf),
}

impl std::fmt::Display for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Door::Abstract(name) => write!(f, "the abstract Unix socket {name}"),
            Door::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

impl Door {
    /// Calls `with` with the address. Paths may be of any length: the folder of a long one is opened first.
    fn with_address<R>(&self, with: impl FnOnce(&SocketAddrUnix) -> Result<R, Errno>) -> Result<R, Errno> {
        match self {
            Door::Abstract(name) => with(&SocketAddrUnix::new_abstract_name(name.as_bytes())?),
            Door::Path(path) => match SocketAddrUnix::new(path.as_path()) {
                Err(Errno::NAMETOOLONG) => {
                    let name = path.file_name().ok_or(Errno::INVAL)?;
                    let folder = path.parent().unwrap_or(Path::new("."));
                    let folder = fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
                    let number = std::os::fd::AsRawFd::as_raw_fd(&folder);
                    with(&SocketAddrUnix::new(Path::new(&format!("/proc/self/fd/{number}")).join(name))?)
                }
                address => with(&address?),
            },
        }
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// A Unix socket that others connect to. Where it is a file, that goes with it.
pub(super) struct Listener {
    socket: OwnedFd,
    file: Option<PathBuf>,
}

impl Listener {
    pub(super) fn bind(door: &Door) -> Result<Listener, Errno> {
        let socket = socket()?;
        door.with_address(|address| net::bind(&socket, address))?;
        let file = match door {
            Door::Abstract(_) => None,
            Door::Path(path) => Some(path.clone()),
        };
        let listener = Listener { socket, file };
        if let Some(file) = &listener.file {
            // Others are turned away by their credentials too.
            fs::chmod(file, Mode::RUSR | Mode::WUSR)?;
        }
        net::listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// The next connection, whoever's it is; `None` if there is none left.
    pub(super) fn accept(&self) -> Result<Option<Packets>, Errno> {
        loop {
            match net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Ok(Some(Packets(socket))),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // Nothing can be done about a file that others removed.
            let _ = fs::unlink(file);
        }
    }
}

/// A connection on which greetings are exchanged.
pub(super) trait Line: AsFd {
    /// Messages here are so short that a new connection takes them whole. `false` if this one doesn't.
    fn say(&mut self, message: &[u8]) -> bool;

    /// What the other side said, who is not yet known.
    fn hear(&mut self) -> Received;

    /// As [`Line::hear`], waiting for it until then.
    fn hear_by(&mut self, until: Instant) -> Received {
        loop {
            match self.hear() {
                Received::Nothing if Instant::now() < until => {
                    if wait(&[(self.as_fd(), false)], until).is_err() {
                        return Received::Nothing;
                    }
                }
                received => return received,
            }
        }
    }
}

/// A connection that carries whole messages.
pub(super) struct Packets(OwnedFd);

/// What came.
pub(super) enum Received {
    Message(Vec<u8>, Vec<OwnedFd>),
    /// Nothing yet.
    Nothing,
    /// The other side is closed, or said what nobody may say.
    Closed,
}

impl Packets {
    /// `None` where nobody listens, or more have come than the system lets wait.
    pub(super) fn connect(door: &Door) -> Result<Option<Packets>, Errno> {
        let socket = socket()?;
        match door.with_address(|address| net::connect(&socket, address)) {
            Ok(()) => Ok(Some(Packets(socket))),
            // PROTOTYPE is another kind of socket.
            Err(Errno::CONNREFUSED | Errno::NOENT | Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Whose process the other side was when it connected or listened, if it is not one of this user.
    pub(super) fn stranger(&self) -> Option<String> {
        match sockopt::socket_peercred(&self.0) {
            Ok(peer) if peer.uid == process::geteuid() => None,
            Ok(peer) => Some(format!("it is of user id {}", peer.uid.as_raw())),
            Err(errno) => Some(format!("the system doesn't say whose it is: {errno}")),
        }
    }

    /// `Ok(false)` if there is no room now.
    pub(super) fn send(&self, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<bool, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if descriptors.len() > MOST_DESCRIPTORS {
            return Err(Errno::INVAL);
        }
        if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::INVAL);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match net::sendmsg(&self.0, &[IoSlice::new(message)], &mut beside, flags) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            // More descriptors are under way than the limit of open ones allows, until some arrive; no wait ends by that.
            Err(Errno::NOBUFS | Errno::TOOMANYREFS) => {
                std::thread::sleep(Duration::from_millis(1));
                Ok(false)
            }
            Err(errno) => Err(errno),
        }
    }

    /// A message of a seated rank, with what came beside it.
    pub(super) fn receive(&self) -> Received {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        self.receive_within(MOST_BYTES, RecvAncillaryBuffer::new(&mut space))
    }

    fn receive_within(&self, most: usize, mut beside: RecvAncillaryBuffer<'_>) -> Received {
        let mut message = vec![0; most];
        // Of a peer that closed with messages unread, its end is told once as a reset, ahead of what it had sent.
        for _ in 0..2 {
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let came = net::recvmsg(&self.0, &mut [IoSliceMut::new(&mut message)], &mut beside, flags);
            let came = match came {
                Err(Errno::CONNRESET) => continue,
                Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
                Err(_) => return Received::Closed,
                Ok(came) => came,
            };
            let mut descriptors = Vec::new();
            for beside in beside.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = beside {
                    descriptors.extend(fds);
                }
            }
            if came.flags.contains(ReturnFlags::CTRUNC) {
                tracing::warn!("descriptors got lost, most likely since this process has as many open as it may");
            }
            // No message is empty, so nothing is the end.
            if came.bytes == 0 || came.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
                return Received::Closed;
            }
            message.truncate(came.bytes);
            return Received::Message(message, descriptors);
        }
        Received::Closed
    }
}

impl Line for Packets {
    fn say(&mut self, message: &[u8]) -> bool {
        matches!(self.send(message, &[]), Ok(true))
    }

    /// Descriptors beside the message are never taken up.
    fn hear(&mut self) -> Received {
        self.receive_within(MOST_OF_A_STRANGER, RecvAncillaryBuffer::default())
    }
}

impl AsFd for Packets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A TCP connection, on which a message stands behind its length.
pub(super) struct Stream {
    stream: TcpStream,
    came: Vec<u8>,
}

impl Stream {
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Stream> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Stream { stream, came: Vec::new() })
    }

    /// Accepts the next connection; `None` if there is none left.
    pub(super) fn accept(listener: &TcpListener) -> std::io::Result<Option<Stream>> {
        loop {
            match listener.accept() {
                Ok((stream, _)) => return Stream::new(stream).map(Some),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) fn connect(address: &SocketAddr, until: Instant) -> std::io::Result<Stream> {
        let left = until.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(1), A_CONNECT);
        Stream::new(TcpStream::connect_timeout(address, left)?)
    }
}

impl Line for Stream {
    fn say(&mut self, message: &[u8]) -> bool {
        let mut framed = (message.len() as u32).to_le_bytes().to_vec();
        framed.extend(message);
        matches!(self.stream.write(&framed), Ok(written) if written == framed.len())
    }

    fn hear(&mut self) -> Received {
        let mut piece = [0; MOST_OF_A_STRANGER];
        loop {
            match unframed(&self.came) {
                Frame::Whole(message) => {
                    let message = message.to_vec();
                    self.came.drain(..size_of::<u32>() + message.len());
                    return Received::Message(message, Vec::new());
                }
                Frame::TooLong => return Received::Closed,
                Frame::Partial => {}
            }
            match self.stream.read(&mut piece) {
                Ok(0) => return Received::Closed,
                Ok(count) => self.came.extend(&piece[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Received::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Received::Closed,
            }
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The longest that one attempt to connect may take.
const A_CONNECT: Duration = Duration::from_secs(5);

#[derive(Debug, PartialEq)]
enum Frame<'a> {
    Whole(&'a [u8]),
    Partial,
    TooLong,
}

/// The first message of a stream. Its length is judged before there is more than that of it.
fn unframed(came: &[u8]) -> Frame<'_> {
    let Some((length, rest)) = came.split_first_chunk() else { return Frame::Partial };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MOST_OF_A_STRANGER {
        return Frame::TooLong;
    }
    rest.get(..length).map_or(Frame::Partial, Frame::Whole)
}

/// Waits until one of these can be read or written as asked, or is closed, at most until then. Returns which.
pub(super) fn wait(sockets: &[(BorrowedFd<'_>, bool)], until: Instant) -> Result<Vec<bool>, Errno> {
    let mut asked: Vec<_> = sockets
        .iter()
        .map(|&(socket, to_write)| {
            let write = if to_write { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::from_borrowed_fd(socket, PollFlags::IN | write)
        })
        .collect();
    let left = until.saturating_duration_since(Instant::now());
    // Times that are no Timespec are as good as for ever.
    let left = Timespec::try_from(left).ok();
    match event::poll(&mut asked, left.as_ref()) {
        Ok(_) => Ok(asked.iter().map(|asked| !asked.revents().is_empty()).collect()),
        Err(Errno::INTR) => Ok(vec![false; sockets.len()]),
        Err(errno) => Err(errno),
    }
}

#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    unframed(bytes);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::secret, *};

    fn pair() -> (Packets, Packets) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (Packets(one), Packets(other))
    }

    fn message(received: Received) -> (Vec<u8>, Vec<OwnedFd>) {
        let Received::Message(bytes, descriptors) = received else { panic!("no message") };
        (bytes, descriptors)
    }

    #[test]
    fn messages_come_whole_with_their_descriptors() {
        let (one, other) = pair();
        let files = [std::fs::File::open("/dev/null").unwrap(), std::fs::File::open("/dev/zero").unwrap()];
        let descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        assert!(one.send(b"first", &descriptors).unwrap());
        assert!(one.send(&[7; MOST_BYTES], &[]).unwrap());
        let (bytes, descriptors) = message(other.receive());
        assert_eq!((&bytes[..], descriptors.len()), (&b"first"[..], 2));
        let mut zero = [1];
        std::fs::File::from(descriptors.into_iter().nth(1).unwrap()).read_exact(&mut zero).unwrap();
        assert_eq!(zero, [0]);
        assert_eq!(message(other.receive()).0, [7; MOST_BYTES]);
        assert!(matches!(other.receive(), Received::Nothing));
        drop(one);
        assert!(matches!(other.receive(), Received::Closed));
    }

    #[test]
    fn what_is_too_long_or_brings_too_much_is_the_end() {
        let (one, mut other) = pair();
        one.send(&[7; MOST_OF_A_STRANGER + 1], &[]).unwrap();
        assert!(matches!(other.hear(), Received::Closed));
        let file = std::fs::File::open("/dev/null").unwrap();
        one.send(b"hello", &[file.as_fd()]).unwrap();
        assert!(matches!(other.hear(), Received::Closed), "with a descriptor");
        one.send(b"", &[]).unwrap();
        assert!(matches!(other.receive(), Received::Closed), "empty");
        assert!(one.send(b"x", &[file.as_fd(); MOST_DESCRIPTORS + 1]).is_err());
    }

    #[test]
    fn what_was_sent_before_a_close_still_comes() {
        let (one, other) = pair();
        other.send(b"unread", &[]).unwrap();
        one.send(b"last words", &[]).unwrap();
        drop(one);
        assert_eq!(message(other.receive()).0, b"last words");
        assert!(matches!(other.receive(), Received::Closed));
    }

    #[test]
    fn a_path_may_be_longer_than_an_address() {
        let folder = std::env::temp_dir().join(secret::name(&secret::random().unwrap())).join("n".repeat(200));
        std::fs::create_dir_all(&folder).unwrap();
        let door = Door::Path(folder.join("socket"));
        let listener = Listener::bind(&door).unwrap();
        assert!(matches!(listener.accept(), Ok(None)));
        assert!(Packets::connect(&door).unwrap().is_some());
        assert!(listener.accept().unwrap().is_some());
        drop(listener);
        assert!(std::fs::read_dir(&folder).unwrap().next().is_none(), "the socket's file goes with it");
        assert!(Packets::connect(&door).unwrap().is_none());
        std::fs::remove_dir_all(folder.parent().unwrap()).unwrap();
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_or_none(bytes: Vec<u8>, length in 0u32..40) {
            for bytes in [bytes.clone(), [&length.to_le_bytes()[..], &bytes].concat()] {
                if let Frame::Whole(message) = unframed(&bytes) {
                    prop_assert!(message.len() <= MOST_OF_A_STRANGER);
                    prop_assert_eq!(&bytes[4..][..message.len()], message);
                }
            }
        }
    }

    #[test]
    fn a_frame_is_judged_by_its_length_alone() {
        assert_eq!(unframed(&[2, 0, 0, 0, 8, 9, 1]), Frame::Whole(&[8, 9]));
        assert_eq!(unframed(&[2, 0, 0, 0, 8]), Frame::Partial);
        assert_eq!(unframed(&[2, 0, 0]), Frame::Partial);
        assert_eq!(unframed(&(MOST_OF_A_STRANGER as u32 + 1).to_le_bytes()), Frame::TooLong);
    }
}
