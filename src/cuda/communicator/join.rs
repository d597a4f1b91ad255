//! How a rank becomes one of a group.

use std::{ops::Range, sync::Arc, time::Duration};

use cudarc::driver::sys;

use super::{Communicator, Lie, patience, self_test, validate};
use crate::{
    Algorithm, Error, Nccl, Options, Result, TableFrom,
    crossover::{Reason, Source, agree},
    cuda::{
        driver::Device,
        group::{Ending, Group},
        handover::{self, Handover, WINDOW_BYTES},
        machine::machine,
        memory::Segment,
        module::Kernels,
        peers::{self, Vigil},
    },
    heap::Heap,
    meeting::Seat,
    nccl::{AllReduce, Library},
    protocol::{bindings, layout::Layout},
};

const DEFAULT_STAGING_BYTES: usize = 32 << 20;

/// What a rank knows of its group before it is one.
struct Place {
    device: Arc<Device>,
    devices: Vec<Arc<Device>>,
    /// How many ranks share the device.
    sharing: u32,
    regions: [Layout; 2],
    /// Of a segment, where its heap begins and ends.
    heap: Range<u64>,
    patience: Duration,
    first_epoch: u32,
}

impl Communicator {
    /// What all ranks of a meeting do. `lie` is for tests.
    pub(super) fn join(
        seat: &mut Seat,
        device: usize,
        options: &Options,
        lent: Option<Arc<dyn AllReduce>>,
        lie: Option<(usize, Lie)>,
    ) -> Result<Communicator> {
        validate(options.forced())?;
        if options.algorithm == Some(Algorithm::Nccl) && (options.deterministic || options.nccl == Nccl::Off) {
            return Err(Error::InvalidOption {
                option: "algorithm",
                value: Algorithm::Nccl.to_string(),
                reason: "the same options exclude NCCL (deterministic, or Nccl::Off)".into(),
            });
        }
        let world = seat.world() as u32;
        seat.agree(options)?;
        let place = Place::find(seat, device, options)?;
        let kernels = Kernels::load(&place.device, world)?;
        let resident = seat
            .all_gather(kernels.resident(&place.device, place.sharing)?)?
            .into_iter()
            .reduce(|left, right| left.into_iter().zip(right).map(|(left, right)| left.min(right)).collect());
        let resident = resident.unwrap_or_default();

        let tested = options.self_test && world > 1 && (place.is_one_a_device() || matches!(seat, Seat::Processes(_)));
        let (mut communicator, unreached) = match place.connect(seat, lie)? {
            Err(error) => (Communicator::of(&place, place.apart(seat)?, kernels, resident, options)?, Some(error)),
            Ok(group) => {
                let mut communicator = Communicator::of(&place, group, kernels, resident, options)?;
                let stale = matches!(lie, Some((_, Lie::StaleLines)));
                let failed = if tested { self_test::run(&mut communicator, options, seat, stale)? } else { None };
                if failed.is_some() {
                    // The records say how it ended, and a peer may still store to the segments.
                    communicator.renew(&place, place.apart(seat)?);
                }
                (communicator, failed)
            }
        };
        let (source, library) = choices(seat, options, &communicator.group, lent.as_deref())?;
        communicator.source = source;
        match unreached {
            None => communicator.hand_over(seat, &place, options, library, lent)?,
            Some(error) => communicator.fall_back(seat, &place, options, library, lent, error)?,
        }
        Ok(communicator)
    }

    fn of(
        place: &Place,
        group: Group,
        kernels: Kernels,
        resident: Vec<u32>,
        options: &Options,
    ) -> Result<Communicator> {
        let major = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        Ok(Communicator {
            rank: group.rank,
            kernels,
            resident,
            options: options.clone(),
            source: Source::Priors(Reason::Other("the group is being made".into())),
            forced: options.forced(),
            dependent_launch: place.device.attribute(major)? >= 9,
            last_large: None,
            last_stream: Arc::default(),
            heap: Arc::new(Heap::new(place.heap_of(&group))),
            handover: Err("the group is being made".into()),
            gated: true,
            fallback: None,
            group: Arc::new(group),
        })
    }

    /// Goes on with another group.
    fn renew(&mut self, place: &Place, group: Group) {
        self.forced = self.options.forced();
        self.last_large = None;
        self.heap = Arc::new(Heap::new(place.heap_of(&group)));
        self.group = Arc::new(group);
    }

    /// Joins NCCL, if the group wants it.
    fn hand_over(
        &mut self,
        seat: &mut Seat,
        place: &Place,
        options: &Options,
        library: Option<Result<Arc<Library>>>,
        lent: Option<Arc<dyn AllReduce>>,
    ) -> Result<()> {
        self.handover = match handover::unwanted(options, &self.source) {
            _ if self.world_size() == 1 => Err("a rank alone has nothing to hand over".into()),
            Some(reason) => Err(reason),
            None => {
                let library = library.unwrap_or_else(|| Library::open(options.nccl_library.as_deref()));
                Handover::join(self.handover_seat(seat, place), options, &library, lent)?
            }
        };
        Ok(())
    }

    /// Leaves all calls to NCCL, or returns why the ranks can't do without it.
    fn fall_back(
        &mut self,
        seat: &mut Seat,
        place: &Place,
        options: &Options,
        library: Option<Result<Arc<Library>>>,
        lent: Option<Arc<dyn AllReduce>>,
        error: Error,
    ) -> Result<()> {
        let excluded = match options {
            Options { nccl: Nccl::Off, .. } => Some("the options turn it off (Options::nccl)"),
            Options { deterministic: true, .. } => Some("the options ask for the same bits (Options::deterministic)"),
            Options { algorithm: Some(algorithm), .. } if *algorithm != Algorithm::Nccl => {
                Some("the options force another algorithm (Options::algorithm)")
            }
            _ => None,
        };
        if let Some(reason) = excluded {
            return Err(error.without_nccl(reason));
        }
        let library = library.unwrap_or_else(|| Library::open(options.nccl_library.as_deref()));
        match Handover::join(self.handover_seat(seat, place), options, &library, lent) {
            Ok(Ok(handover)) => self.handover = Ok(handover),
            Ok(Err(reason)) | Err(Error::NcclUnavailable { reason }) => return Err(error.without_nccl(&reason)),
            Err(other) => return Err(other),
        }
        tracing::warn!(rank = self.rank, reason = %error, "all calls go to NCCL: the ranks can't use each other's memory");
        self.gated = false;
        self.fallback = Some(error);
        Ok(())
    }

    fn handover_seat<'a>(&'a self, seat: &'a mut Seat, place: &'a Place) -> handover::Seat<'a> {
        let heap = self.heap.start()..self.heap.start() + self.heap.total();
        handover::Seat { meeting: seat, device: &place.device, sharing: place.sharing, group: &self.group, heap }
    }
}

impl Place {
    fn find(seat: &mut Seat, device: usize, options: &Options) -> Result<Place> {
        let (rank, world) = (seat.rank(), seat.world() as u32);
        let device = Device::open(device)?;
        let devices = peers::devices(seat, &device)?;
        let sharing = devices.iter().filter(|peer| peer.ordinal == device.ordinal).count() as u32;
        match seat {
            Seat::Threads(_) if sharing > 8 && std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() => {
                tracing::warn!(sharing, "ranks share a device: set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts");
            }
            Seat::Processes(_) if sharing > 1 && !has_mps() => {
                tracing::warn!(
                    rank,
                    sharing,
                    "ranks share a device without MPS: their kernels take turns, and calls take as long as that lasts"
                );
            }
            _ => {}
        }
        let staging = options.staging_bytes.unwrap_or(DEFAULT_STAGING_BYTES);
        let region = Layout::new(world, bindings::PEERSUM_MAX_BLOCKS, staging / 2)?;
        let regions = [region; 2];
        let regions_bytes: u64 = regions.iter().map(Layout::segment_bytes).sum();
        let heap_start = regions_bytes.next_multiple_of(WINDOW_BYTES);
        let heap = heap_start..heap_start.saturating_add(options.symmetric_bytes as u64);
        let (patience, first_epoch) = (patience(options), options.first_epoch);
        Ok(Place { device, devices, sharing, regions, heap, patience, first_epoch })
    }

    /// Whether no two ranks share a device. Threads that do have nothing to test, or streams that come in each other's way, since
    /// a test makes its own.
    fn is_one_a_device(&self) -> bool {
        let mut ordinals: Vec<_> = self.devices.iter().map(|device| device.ordinal).collect();
        ordinals.sort_unstable();
        ordinals.windows(2).all(|pair| pair[0] != pair[1])
    }

    /// Maps the memory of all ranks. If one can't, all return why: the first of them by rank.
    fn connect(&self, seat: &mut Seat, lie: Option<(usize, Lie)>) -> Result<Result<Group>> {
        let rank = seat.rank();
        let lie = |peer: usize| lie.filter(|&(about, _)| about == peer).map(|(_, lie)| lie);
        let mut unreached = None;
        for (peer, device) in self.devices.iter().enumerate() {
            let other = device.ordinal != self.device.ordinal;
            if (other && !self.device.can_access(device)?) || lie(peer) == Some(Lie::NoAccess) {
                let reason = format!(
                    "device {} has no peer access to device {} (`peersum doctor` says why)",
                    self.device.ordinal, device.ordinal
                );
                unreached.get_or_insert((peer, reason));
            }
        }
        if let Some(error) = agree_unreached(seat, unreached)? {
            return Ok(Err(error));
        }
        let own = self.segment(distinct(&self.device, &self.devices))?;
        let mirror = |peer| match lie(peer) {
            Some(Lie::Mirror) => self.segment(vec![self.device.clone()]).map(Some),
            Some(Lie::Refused) => Err(Error::System { call: "mapping it", reason: "invalid resource handle".into() }),
            _ => Ok(None),
        };
        let mut segments = Vec::new();
        let mut unreached = None;
        for (peer, mapped) in peers::segments(seat, own, &self.device, self.patience)?.into_iter().enumerate() {
            match mapped.and_then(|mapped| Ok(mirror(peer)?.map_or(mapped, Arc::new))) {
                Ok(segment) => segments.push(Some(segment)),
                Err(error) => {
                    unreached.get_or_insert((peer, error.to_string()));
                }
            }
        }
        if let Some(error) = agree_unreached(seat, unreached)? {
            return Ok(Err(error));
        }
        self.group(seat, rank, segments).map(Ok)
    }

    /// The group of ranks that don't reach each other's memory.
    fn apart(&self, seat: &mut Seat) -> Result<Group> {
        let rank = seat.rank();
        let mut own = Some(Arc::new(self.segment(vec![self.device.clone()])?));
        let segments = (0..seat.world()).map(|peer| if peer == rank { own.take() } else { None }).collect();
        self.group(seat, rank, segments)
    }

    fn group(&self, seat: &mut Seat, rank: usize, segments: Vec<Option<Arc<Segment>>>) -> Result<Group> {
        let records = peers::records(seat, &self.device, self.patience)?;
        let ending = Arc::new(Ending::new(records));
        let vigil = Vigil::keep(seat, &ending)?;
        let devices = self.devices.clone();
        Ok(Group { rank: rank as u32, ending, regions: self.regions, segments, devices, _vigil: vigil })
    }

    /// A segment of this rank's, cleared before any peer knows of it, so that no peer's flag can be wiped.
    fn segment(&self, devices: Vec<Arc<Device>>) -> Result<Segment> {
        let segment = Segment::new(devices, self.heap.end, self.patience)?;
        segment.clear([0, self.regions[0].segment_bytes()], self.first_epoch)?;
        Ok(segment)
    }

    /// Where the heap of this rank is.
    fn heap_of(&self, group: &Group) -> Range<u64> {
        let start = group.own().address();
        start + self.heap.start..start + self.heap.end
    }
}

/// What is to be told of the first rank that can't reach another, and of whom: the same on every rank.
fn agree_unreached(seat: &mut Seat, unreached: Option<(usize, String)>) -> Result<Option<Error>> {
    let all = seat.all_gather(unreached)?.into_iter().enumerate();
    let first = all.filter_map(|(rank, unreached)| Some((rank, unreached?))).next();
    Ok(first.map(|(rank, (peer, reason))| Error::Unmapped { rank, peer, reason }))
}

/// Whether processes that share a device run at the same time there: whether MPS has its control daemon where CUDA looks.
fn has_mps() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map_or("/tmp/nvidia-mps".into(), std::path::PathBuf::from);
    folder.join("control").exists()
}

/// Where the group's choices come from, the same on every rank; and NCCL's library, if its version had to be asked for that.
fn choices(
    seat: &mut Seat,
    options: &Options,
    group: &Group,
    lent: Option<&dyn AllReduce>,
) -> Result<(Source, Option<Result<Arc<Library>>>)> {
    let named = match &options.table {
        TableFrom::Nowhere => {
            return Ok((Source::Priors(Reason::Other("no table was asked for (Options::table)".into())), None));
        }
        TableFrom::File(path) => Some(path.as_path()),
        TableFrom::Usual => None,
    };
    let load =
        |nccl| Ok::<_, Error>(Source::load(&machine(&group.devices, nccl)?, named, |name| std::env::var_os(name)));
    let mut source = load(lent.map(|nccl| nccl.version().to_string()))?;
    let mut library = None;
    // A table may hold but for NCCL, which takes time to load: whoever doesn't need it goes without.
    if options.nccl != Nccl::Off
        && lent.is_none()
        && let Source::Table(tuned) = &source
        && tuned.entry().hands_over()
    {
        let opened = Library::open(options.nccl_library.as_deref());
        source = load(opened.as_ref().ok().map(|library| library.version().to_string()))?;
        library = Some(opened);
    }
    let rank = seat.rank();
    if let Some(reason) = source.reason().filter(|reason| reason.is_warning()) {
        tracing::warn!(rank, %reason, "choosing by priors");
    }
    let agreed = agree(seat, source)?;
    if let Some(warning) = agreed.warning {
        tracing::warn!(rank, "{warning}");
    }
    Ok((agreed.source, library))
}

/// The device and those of its peers, each once, its own first.
fn distinct(own: &Arc<Device>, devices: &[Arc<Device>]) -> Vec<Arc<Device>> {
    let mut distinct = vec![own.clone()];
    for device in devices {
        if distinct.iter().all(|known| known.ordinal != device.ordinal) {
            distinct.push(device.clone());
        }
    }
    distinct
}
