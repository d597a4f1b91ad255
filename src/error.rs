//! The one error type.

use std::{fmt, time::Duration};

use crate::{Algorithm, Call, DType};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The part of a call that a rank was in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// The exchange of a one-shot.
    Exchange,
    /// Before tensors are read where they are.
    Entry,
    /// After that, before they are the caller's again.
    Exit,
    /// Before NCCL is called.
    Gate,
    /// The first half of a two-shot.
    ReduceScatter,
    /// The second half of a two-shot.
    AllGather,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Exchange => "exchange",
            Phase::Entry => "entry",
            Phase::Exit => "exit",
            Phase::Gate => "gate",
            Phase::ReduceScatter => "reduce-scatter",
            Phase::AllGather => "all-gather",
        })
    }
}

/// Why a call was not done, and what to do about it.
///
/// Errors found before anything was started ([`Error::is_recoverable`]) leave the communicator as it was: the next
/// good call works. After [`Error::PeerTimeout`], [`Error::PeerGone`], [`Error::PeerLeft`], [`Error::Mismatch`]
/// or [`Error::Aborted`] every rank of the group returns that error from then on; make a new group.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No CUDA driver, or one that doesn't answer.
    #[error("CUDA is not available: {reason}")]
    CudaUnavailable {
        /// What was tried and what came back.
        reason: String,
    },

    /// The crate was built without its kernels, for one where no nvcc was found.
    #[error("this build of peersum has no CUDA kernels: {reason}")]
    KernelsNotBuilt {
        /// What build.rs says: what it looked for, and what to install.
        reason: String,
    },

    /// No NCCL that serves, or ranks that can't use it together.
    #[error("NCCL is not available: {reason}")]
    NcclUnavailable {
        /// What was tried and what came back, or which rank can't use it and why.
        reason: String,
    },

    /// The GPU is older than the kernels.
    #[error(
        "device {device} ({name}) has compute capability {major}.{minor}; peersum needs 8.0 or later. Leave it out"
    )]
    UnsupportedDevice {
        /// Its ordinal.
        device: usize,
        /// Its name.
        name: String,
        /// Compute capability, before the dot.
        major: u32,
        /// Compute capability, after the dot.
        minor: u32,
    },

    /// There is no such device.
    #[error("device {device} does not exist: this process sees {count} (CUDA_VISIBLE_DEVICES decides which)")]
    NoSuchDevice {
        /// The ordinal that was asked for.
        device: usize,
        /// How many there are.
        count: usize,
    },

    /// A rank's device can't be seen by another rank's process.
    #[error(
        "the device of rank {rank}, {uuid}, is hidden from this process: CUDA_VISIBLE_DEVICES must show every process all \
         devices of the group, in any order"
    )]
    HiddenDevice {
        /// The rank whose device it is.
        rank: usize,
        /// The device's identity.
        uuid: String,
    },

    /// A rank can't map the memory of another.
    #[error("rank {rank} can't map the memory of rank {peer}: {reason}")]
    Unmapped {
        /// The rank that can't.
        rank: usize,
        /// The rank whose memory it is.
        peer: usize,
        /// What the driver or the system says.
        reason: String,
    },

    /// The self-test of a new group found that what a rank sends does not reach another as it should.
    #[error(
        "the self-test failed: what rank {peer} sends does not reach rank {rank} as it should ({reason}). No rank uses \
         this memory: meet again, or look for what is wrong with the machine"
    )]
    SelfTestFailed {
        /// The rank that it should reach, which found it wrong by its own loads.
        rank: usize,
        /// The rank that it comes from.
        peer: usize,
        /// Which call, and what was found in place of what.
        reason: String,
    },

    /// The backend doesn't serve this many ranks.
    #[error("{backend} serves 1 to {most} ranks, not {world}")]
    UnsupportedWorld {
        /// The number of ranks asked for.
        world: usize,
        /// Which backend.
        backend: &'static str,
        /// The most it serves.
        most: usize,
    },

    /// An option has a value that can't be.
    #[error("option {option} = {value}: {reason}")]
    InvalidOption {
        /// Its name.
        option: &'static str,
        /// The value.
        value: String,
        /// What is wrong with it, and what would do.
        reason: String,
    },

    /// The symmetric memory has no room.
    #[error(
        "rank {rank} has no {wanted} bytes of symmetric memory in one piece: {free} of {total} are free. Give the group \
         more by Options::symmetric_bytes, or drop buffers"
    )]
    SymmetricMemoryFull {
        /// The rank that asked.
        rank: usize,
        /// The bytes it asked for.
        wanted: usize,
        /// The bytes that are free, perhaps in pieces.
        free: usize,
        /// All bytes of the rank's symmetric memory.
        total: usize,
    },

    /// Ranks of one group were given different options.
    #[error("rank {peer} joined with other options than rank {rank}: give all ranks of a group the same")]
    OptionsDiffer {
        /// The rank that returns this error.
        rank: usize,
        /// The first rank that differs from it.
        peer: usize,
    },

    /// Not all ranks came to the meeting in time.
    #[error("rank {rank} waited {waited:?} for ranks {missing:?} to join the group: start them, or raise the timeout")]
    MeetingTimeout {
        /// The rank that returns this error.
        rank: usize,
        /// The ranks that did not come.
        missing: Vec<usize>,
        /// How long it waited.
        waited: Duration,
    },

    /// A rank failed while the group was being made.
    #[error("rank {peer} failed to join the group: {reason}")]
    PeerFailed {
        /// The rank that failed.
        peer: usize,
        /// Its own error.
        reason: String,
    },

    /// A variable of the environment that says which rank this process is makes no sense, or is missing.
    #[error("environment variable {variable}: {reason}")]
    Environment {
        /// Its name.
        variable: &'static str,
        /// What is wrong with it, and what would do.
        reason: String,
    },

    /// The ranks can't meet where they were told to.
    #[error("rank {rank} can't meet the others at {at}: {reason}")]
    MeetingPlace {
        /// The rank that returns this error.
        rank: usize,
        /// The address, the path, or what the place was made of.
        at: String,
        /// What is wrong with it, and what would do.
        reason: String,
    },

    /// What answered at the meeting's place is no rank of this group.
    #[error("rank {rank} found a stranger at {at}, not rank 0 of its group: {reason}")]
    ForeignPeer {
        /// The rank that returns this error.
        rank: usize,
        /// The address, the path, or what the place was made of.
        at: String,
        /// How it is known.
        reason: String,
    },

    /// Two processes came as the same rank.
    #[error(
        "two processes came to the meeting as rank {rank}: give each its own, and groups that meet at the same time \
         names of their own"
    )]
    RankTaken {
        /// The rank.
        rank: usize,
    },

    /// Ranks of one group were told different numbers of ranks.
    #[error("rank {rank} was told that the group has {world} ranks, rank {peer} {peer_world}: tell all the same")]
    WorldsDiffer {
        /// One of the two.
        rank: usize,
        /// The number of ranks it was told.
        world: usize,
        /// The other.
        peer: usize,
        /// The number of ranks that one was told.
        peer_world: usize,
    },

    /// Ranks of one group run different versions of this library.
    #[error("rank {rank} runs peersum {version}, rank {peer} {peer_version}: they must run the same")]
    VersionsDiffer {
        /// One of the two.
        rank: usize,
        /// Its version.
        version: String,
        /// The other.
        peer: usize,
        /// That one's version.
        peer_version: String,
    },

    /// Ranks of one group are on different machines.
    #[error("the ranks of the group are on more than one machine, and peersum works within one: {reason}")]
    SeveralMachines {
        /// Which ranks, or how it is known.
        reason: String,
    },

    /// Input and output are of different lengths.
    #[error("input has {input} elements and output {output}: they must have the same number")]
    LengthMismatch {
        /// Elements of the input.
        input: usize,
        /// Elements of the output.
        output: usize,
    },

    /// Input and output share memory without being the same.
    #[error(
        "input and output overlap without being the same buffer: pass the same address twice to reduce in place, or \
         disjoint ones"
    )]
    Overlap,

    /// A null pointer with a length that is not 0.
    #[error("{what} is null, with {count} elements")]
    NullPointer {
        /// Input or output.
        what: &'static str,
        /// Elements of the call.
        count: usize,
    },

    /// A pointer is not aligned to its element type.
    #[error("{what} at {address:#x} is not aligned to {dtype}, which needs {need} bytes")]
    Misaligned {
        /// Input or output.
        what: &'static str,
        /// The address.
        address: u64,
        /// The element type.
        dtype: DType,
        /// The alignment that it needs.
        need: usize,
    },

    /// The message does not fit in the address space.
    #[error("{count} elements of {dtype} are more bytes than memory can be addressed by")]
    TooLarge {
        /// Elements of the call.
        count: usize,
        /// The element type.
        dtype: DType,
    },

    /// Memory that the device can't reach.
    #[error(
        "{what} was allocated on device {allocated_on}, or in another context there, and the communicator is device \
         {device}'s: allocate it in that device's primary context"
    )]
    UnreachableMemory {
        /// Which buffer.
        what: &'static str,
        /// The device it was allocated on.
        allocated_on: usize,
        /// The communicator's device.
        device: usize,
    },

    /// A buffer that cudarc does not keep in order with the stream.
    #[error(
        "{what} was made through another CudaContext object than the stream's, and cudarc does not order the two: make \
         both from one `CudaContext`"
    )]
    UntrackedBuffer {
        /// Which buffer.
        what: &'static str,
    },

    /// A handle of other buffers.
    #[error("the handle is of other `Buffers` than these, or of another type: use the one that `hold` returned")]
    ForeignHandle,

    /// The stream is being captured.
    #[error(
        "the stream of device {device} is being captured, and a graph would outlive what this call borrows: capture by \
         `Buffers::capture`, or use the raw call"
    )]
    Capturing {
        /// The stream's device.
        device: usize,
    },

    /// A capture can't become a graph.
    #[error(
        "{call} failed on a stream that is being captured, after {captured} all-reduces of the capture: {reason}. Nothing \
         was launched, and the communicator is as it was: capture again on every rank, and launch no other rank's graph \
         of this capture"
    )]
    CaptureFailed {
        /// The driver's function that said so.
        call: &'static str,
        /// How many all-reduces had been captured when it was found.
        captured: usize,
        /// What is wrong with the capture.
        reason: String,
    },

    /// The stream belongs to another device or context than the communicator.
    #[error("the stream does not belong to device {device}'s primary context, which the communicator was made in")]
    ForeignStream {
        /// The communicator's device.
        device: usize,
    },

    /// A forced choice can't run.
    #[error("{algorithm} can't run this call: {reason}")]
    AlgorithmUnavailable {
        /// The algorithm.
        algorithm: Algorithm,
        /// Why.
        reason: String,
    },

    /// A peer did not come before the deadline.
    #[error(
        "rank {rank} waited {waited:?} for rank {peer} (block {block}, epoch {epoch}, {phase}) and gave up: rank \
         {peer} died, was not called, or other work on its device kept it out. Make a new group"
    )]
    PeerTimeout {
        /// The rank that waited.
        rank: usize,
        /// The rank that did not come.
        peer: usize,
        /// The block of the call.
        block: u32,
        /// The epoch it waited for.
        epoch: u32,
        /// The part of the call.
        phase: Phase,
        /// How long it waited.
        waited: Duration,
    },

    /// The process of a peer is gone: it ended, or was killed, without leaving the group.
    #[error("rank {rank} waited for rank {peer}, whose process is gone: see why it ended, and make a new group")]
    PeerGone {
        /// The rank that waited.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
    },

    /// A peer has left the group: it dropped its communicator.
    #[error(
        "rank {rank} waited for rank {peer}, which has dropped its communicator: make the same calls on every rank, in \
         a new group"
    )]
    PeerLeft {
        /// The rank that waited.
        rank: usize,
        /// The rank that left.
        peer: usize,
    },

    /// Two ranks are in different calls: of another length, type or reduction, or done in another way. Every rank of the
    /// group gets the same two ranks and their calls, also those whose own call is neither.
    #[error(
        "rank {rank} called {call}, rank {peer} {} (block {block}, epoch {epoch}): make the same calls in the same order \
         on every rank, in a new group",
        peer_call.as_ref().map_or("another that it did not tell".into(), |call| call.to_string())
    )]
    Mismatch {
        /// The rank that noticed.
        rank: usize,
        /// The call of `rank`.
        call: Box<Call>,
        /// The first rank that it found in another call.
        peer: usize,
        /// The call of `peer`. `None` if it did not say in time which one that was; GPUs only.
        peer_call: Option<Box<Call>>,
        /// The block of the call.
        block: u32,
        /// The epoch.
        epoch: u32,
    },

    /// The group was aborted.
    #[error("the group was aborted by {}: make a new group", by.map_or("the caller".into(), |rank| format!("rank {rank}")))]
    Aborted {
        /// The rank that gave up first, or `None` where the caller asked.
        by: Option<usize>,
    },

    /// A driver call failed.
    #[error("{call} failed{}: {name} ({code}), {description}", device.map_or(String::new(), |device| format!(" on device {device}")))]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The device's ordinal, where it was about one.
        device: Option<usize>,
        /// The driver's number for it.
        code: u32,
        /// The driver's name for it.
        name: String,
        /// The driver's words for it.
        description: String,
    },

    /// A call of NCCL's failed, or work that NCCL does by itself.
    #[error("{call} failed on rank {rank}: {name} ({code}), {description}{}", hint.map_or(String::new(), |hint| format!(". {hint}")))]
    Nccl {
        /// NCCL's function.
        call: &'static str,
        /// The rank whose call it was.
        rank: usize,
        /// NCCL's number for it.
        code: i32,
        /// NCCL's name for it.
        name: String,
        /// NCCL's words for it, and the last error that it has noted, which may be another rank's of this process.
        description: String,
        /// What may help, where that is known.
        hint: Option<&'static str>,
    },

    /// A call of NCCL's did not come to an end.
    #[error(
        "{call} of rank {rank} was not over after {waited:?}: another rank did not make the call, or can't be reached. \
         Make a new group; NCCL_DEBUG=WARN prints what NCCL waits for"
    )]
    NcclTimeout {
        /// NCCL's function.
        call: &'static str,
        /// The rank whose call it was.
        rank: usize,
        /// How long it was waited for.
        waited: Duration,
    },

    /// Memory can't be registered with NCCL, or be no longer registered, by the caller's mistake.
    #[error("rank {rank} can't register this memory with NCCL: {reason}")]
    NcclRegistration {
        /// The rank.
        rank: usize,
        /// What is wrong with the memory.
        reason: String,
    },

    /// A system call failed.
    #[error("{call} failed: {reason}")]
    System {
        /// What was called, for what.
        call: &'static str,
        /// The system's words.
        reason: String,
    },
}

impl Error {
    /// Why ranks that don't reach each other have no group, where NCCL could not take its place either.
    #[cfg(all(feature = "cuda", not(any(loom, shuttle))))]
    pub(crate) fn without_nccl(mut self, why: &str) -> Error {
        if let Error::Unmapped { reason, .. } | Error::SelfTestFailed { reason, .. } = &mut self {
            reason.push_str(&format!("; nor can NCCL take the calls: {why}"));
        }
        self
    }

    /// Whether the communicator can be used as before: true for everything found before anything was started.
    pub fn is_recoverable(&self) -> bool {
        !matches!(
            self,
            Error::PeerTimeout { .. }
                | Error::PeerGone { .. }
                | Error::PeerLeft { .. }
                | Error::Mismatch { .. }
                | Error::Aborted { .. }
                | Error::PeerFailed { .. }
                | Error::MeetingTimeout { .. }
                | Error::ForeignPeer { .. }
                | Error::RankTaken { .. }
                | Error::WorldsDiffer { .. }
                | Error::VersionsDiffer { .. }
                | Error::SelfTestFailed { .. }
                | Error::Driver { .. }
                | Error::Nccl { .. }
                | Error::NcclTimeout { .. }
                | Error::System { .. }
        )
    }
}
