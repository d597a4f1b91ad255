//! What a group of ranks may be asked to do differently.

use std::{path::PathBuf, time::Duration};

use crate::protocol::plan::{Algorithm, Forced};

/// How a call's kernel and the next kernel of its stream may overlap: programmatic dependent launch, on GPUs of compute
/// capability 9.0 and later.
///
/// The kernels of this library wait for the kernel before them before they touch anything, so among themselves, and
/// behind any other kernel, every choice is safe. The choice matters to a kernel of the caller's that follows a call and
/// is itself launched with the attribute: it must wait (`griddepcontrol.wait`, `cudaGridDependencySynchronize`) before it
/// reads the result, as CUDA asks of every such kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Overlap {
    /// None: the next kernel starts when the call has finished.
    Off,
    /// The next kernel is made ready while the call runs, and starts when its blocks have ended.
    Late,
    /// The next kernel's blocks come while the call runs and wait for its end, where there is place for both.
    #[default]
    Early,
}

/// Whether a group has NCCL beside it, for calls that it does faster. CUDA only.
///
/// NCCL is loaded at run time, and a communicator of it takes time to make and memory to keep. Where it is joined, which
/// calls go to it is for a table to say ([`TableFrom`]), or for [`Options::algorithm`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Nccl {
    /// No.
    Off,
    /// If the group's table hands calls over to it. Where it can't be joined then, the group goes on without. And
    /// if the ranks can't use each other's memory: then it takes all calls.
    #[default]
    Tabled,
    /// Wherever it can be joined.
    IfThere,
    /// Always: that it can't be joined is an error.
    Required,
}

/// Where a group looks for the table of what was measured on this machine (`peersum tune`). CUDA only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TableFrom {
    /// In the file that the variable `PEERSUM_TABLE` names, or in `peersum/table.toml` in the user's cache folder.
    #[default]
    Usual,
    /// In this file.
    File(PathBuf),
    /// Nowhere: the built-in priors choose.
    Nowhere,
}

/// By which stores a rank of the host backend hands its data to its peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HostStores {
    /// As the peer's distance asks for, which each rank times under way: cached where the two cores share a cache,
    /// non-temporal where they don't.
    #[default]
    Probed,
    /// Through the caches, always.
    Cached,
    /// Past the caches (non-temporal), always. As [`HostStores::Cached`] where the CPU has none: only x86 has.
    Streaming,
}

/// Options of a group of ranks. All ranks of a group must be given the same; joining checks it.
///
/// ```
/// use peersum::{Algorithm, Options};
/// use std::{path::PathBuf, time::Duration};
///
/// let options = Options::default()
///     .timeout(Duration::from_secs(5))
///     .staging_bytes(64 << 20)
///     .algorithm(Algorithm::TwoShot);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Options {
    /// How long a rank waits for a peer before it gives up with [`Error::PeerTimeout`](crate::Error::PeerTimeout).
    /// Default: 30 s.
    pub timeout: Duration,
    /// Bytes of staging per rank, both halves together. Longer messages go through it in chunks, inside the one call.
    /// `None`, the default, takes the backend's own: 32 MiB for CUDA, 4 MiB for the host. The host's
    /// packets have memory of their own beside it, about 260 KiB at most with up to 16 ranks.
    pub staging_bytes: Option<usize>,
    /// Bytes of symmetric memory per rank from which
    /// `Communicator::symmetric_memory` (CUDA) and
    /// [`Communicator::symmetric_buffer`](crate::host::Communicator::symmetric_buffer) (host) take: tensors there are reduced
    /// without a copy into staging. Default: 0.
    pub symmetric_bytes: usize,
    /// Runs every call by this algorithm instead of the plan's choice.
    pub algorithm: Option<Algorithm>,
    /// Runs every call with this many blocks (CTAs), or as many as the message has packs of 16 bytes if that is fewer.
    /// More than can be resident together is an error, never tried.
    ///
    /// On the host it is the number of threads of a rank, which share long messages: 1 to 32, 1 where not set.
    pub blocks: Option<u32>,
    /// Runs every call with this many threads per block: a multiple of 32, 32 to 512. CUDA only.
    pub threads: Option<u32>,
    /// How a call's kernel and the next may overlap. CUDA only.
    pub overlap: Overlap,
    /// Whether NCCL is joined. CUDA only.
    pub nccl: Nccl,
    /// NCCL's library, or the folder that it is in. `None`, the default, looks for it
    /// ([`Library::open`](crate::nccl::Library::open)).
    pub nccl_library: Option<PathBuf>,
    /// Where the table of choices is looked for. CUDA only.
    pub table: TableFrom,
    /// Never hands a call over to NCCL, whose bits depend on the size of the message and on the machine: this library's own
    /// algorithms all give the same. Default: false.
    pub deterministic: bool,
    /// Whether ranks test what they have mapped of each other before they return from the meeting: calls of every
    /// algorithm, whose results each rank checks and all agree on. A peer's memory that is not reached, or not all of it,
    /// is [`Error::SelfTestFailed`](crate::Error::SelfTestFailed) on all ranks, or on GPUs leaves all calls to NCCL
    /// where that can be had. On the host it takes some tens of milliseconds, and meanwhile as much memory again as
    /// [`Options::staging_bytes`], with which the time grows too; on GPUs some milliseconds, and 24 MiB. Default: true. No
    /// effect on threads of one process on the host, which share one mapping, or of which two share a GPU.
    pub self_test: bool,
    /// By which stores ranks hand over their data. Host only.
    pub host_stores: HostStores,
    /// The epoch before the first round. The protocol must not care; tests start it just below a wrap.
    pub first_epoch: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            timeout: Duration::from_secs(30),
            staging_bytes: None,
            symmetric_bytes: 0,
            algorithm: None,
            blocks: None,
            threads: None,
            overlap: Overlap::default(),
            nccl: Nccl::default(),
            nccl_library: None,
            table: TableFrom::default(),
            deterministic: false,
            self_test: true,
            host_stores: HostStores::default(),
            first_epoch: 0,
        }
    }
}

impl Options {
    pub(crate) fn forced(&self) -> Forced {
        Forced { algorithm: self.algorithm, blocks: self.blocks, threads: self.threads }
    }

    /// Sets [`Options::timeout`].
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets [`Options::staging_bytes`].
    #[must_use]
    pub fn staging_bytes(mut self, bytes: usize) -> Self {
        self.staging_bytes = Some(bytes);
        self
    }

    /// Sets [`Options::symmetric_bytes`].
    #[must_use]
    pub fn symmetric_bytes(mut self, bytes: usize) -> Self {
        self.symmetric_bytes = bytes;
        self
    }

    /// Sets [`Options::algorithm`].
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    /// Sets [`Options::blocks`].
    #[must_use]
    pub fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Sets [`Options::threads`].
    #[must_use]
    pub fn threads(mut self, threads: u32) -> Self {
        self.threads = Some(threads);
        self
    }

    /// Sets [`Options::overlap`].
    #[must_use]
    pub fn overlap(mut self, overlap: Overlap) -> Self {
        self.overlap = overlap;
        self
    }

    /// Sets [`Options::nccl`].
    #[must_use]
    pub fn nccl(mut self, nccl: Nccl) -> Self {
        self.nccl = nccl;
        self
    }

    /// Sets [`Options::nccl_library`].
    #[must_use]
    pub fn nccl_library(mut self, path: impl Into<PathBuf>) -> Self {
        self.nccl_library = Some(path.into());
        self
    }

    /// Sets [`Options::table`].
    #[must_use]
    pub fn table(mut self, from: TableFrom) -> Self {
        self.table = from;
        self
    }

    /// Sets [`Options::deterministic`].
    #[must_use]
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = deterministic;
        self
    }

    /// Sets [`Options::self_test`].
    #[must_use]
    pub fn self_test(mut self, self_test: bool) -> Self {
        self.self_test = self_test;
        self
    }

    /// Sets [`Options::host_stores`].
    #[must_use]
    pub fn host_stores(mut self, stores: HostStores) -> Self {
        self.host_stores = stores;
        self
    }

    /// Sets [`Options::first_epoch`].
    #[must_use]
    pub fn first_epoch(mut self, epoch: u32) -> Self {
        self.first_epoch = epoch;
        self
    }
}
