//! What a rank holds.

#[cfg(not(any(loom, shuttle)))]
use std::os::fd::OwnedFd;
use std::{
    fmt,
    sync::{Arc, Weak},
};

use super::{
    crowd::Crowd,
    distance::Distances,
    exchange::Exchange,
    group::Group,
    packets::{Packets, Region},
    priors::{self, MAX_BLOCKS, MAX_RANKS, STAGING_BYTES},
    reduce::Isa,
    symmetric::SymmetricBuffer,
};
#[cfg(not(any(loom, shuttle)))]
use super::{pool::Pool, segment::Segment, self_test};
#[cfg(not(any(loom, shuttle)))]
use crate::meeting::{self, Meeting, Seat};
use crate::{
    DType, Element, Error, Options, Placement, Plan, ReduceOp, Result,
    heap::Heap,
    protocol::{self, call::Call, layout::Layout, plan::Forced},
};

/// One rank of a group whose ranks are threads of a process, or processes of a machine.
///
/// A call reduces slices in the caller's memory and returns when the output is written; the input may be reused at
/// once. Every rank must make the same calls in the same order: the same length, type and reduction. Where they don't,
/// or where one stays away for longer than [`Options::timeout`], every rank returns the same error, now and from then
/// on; a [`Error::Mismatch`] says which rank called what.
///
/// A message of any length goes through staging in chunks, so a group's memory does not grow with the messages. Ranks
/// may outnumber the cores. The slices may lie anywhere: only speed depends on their alignment.
///
/// Dropping a communicator waits for nobody. Peers that still wait for this rank run into their deadline, if ranks are
/// threads; [`Communicator::abort`] before the drop tells them at once. If they are processes, whoever waits for one
/// that has dropped its communicator, or is gone, is told within milliseconds.
pub struct Communicator {
    rank: u32,
    group: Arc<Group>,
    options: Options,
    isa: Isa,
    /// Of each block.
    distances: Box<[Distances]>,
    /// Of each block.
    crowds: Box<[Crowd]>,
    heap: Arc<Heap>,
    /// The threads of all blocks but the first.
    #[cfg(not(any(loom, shuttle)))]
    pool: Pool,
}

impl Communicator {
    /// The communicators of a group of `world` ranks, in rank order: hand one to each thread.
    ///
    /// Serves 1 to 128 ranks. [`Options::staging_bytes`] is 4 MiB a rank where not set, and packets add some 260 KiB
    /// at most (300 KiB with 128 ranks); the memory is reserved here, as is [`Options::symmetric_bytes`].
    ///
    /// [`Options::blocks`] is the number of threads of a rank, 1 where not set and 32 at most: the one that calls, and
    /// others of the communicator's own, which share long messages with it, each talking to its like of the other
    /// ranks. They sleep between calls that don't follow each other within some microseconds, and end when the
    /// communicator is dropped. They run wherever the thread that calls this may. [`Options::threads`] has no
    /// effect.
    ///
    /// There is no [self-test](Options::self_test): all ranks use one and the same mapping, so there is none of a
    /// peer's memory that could lead elsewhere.
    ///
    /// # Errors
    ///
    /// * [`Error::UnsupportedWorld`] for 0 ranks, or for more than 128.
    /// * [`Error::InvalidOption`] if the staging is too small or too large for so many ranks.
    /// * [`Error::AlgorithmUnavailable`] if the options force one that is not in [`ALGORITHMS`](super::ALGORITHMS).
    /// * [`Error::System`] if the system has no memory for the segments.
    pub fn local(world: usize, options: &Options) -> Result<Vec<Communicator>> {
        Communicator::of_group(Group::new(layout(world, options)?, options)?, options)
    }

    /// This process's rank of the group that its launcher started: [`Meeting::from_env`] says how that is known.
    ///
    /// # Errors
    ///
    /// [`Error::Environment`] names the variable that is missing or wrong. Else as for [`Communicator::meet`].
    #[cfg(not(any(loom, shuttle)))]
    pub fn from_env(options: &Options) -> Result<Communicator> {
        Communicator::meet(&Meeting::from_env()?, options)
    }

    /// This process's rank of the group that meets there. Blocks until all ranks have come and can reach each other's
    /// memory, which a [self-test](Options::self_test) shows: for [`Meeting::timeout`] at most until all have come, and
    /// from then on for [`Options::timeout`] wherever they wait for each other.
    ///
    /// The group is as one of [`Communicator::local`]. Its memory is that of each process alone, and of those that it
    /// is handed to; nothing of it has a name, and the system frees it with the last of them.
    ///
    /// # Errors
    ///
    /// * [`Error::MeetingTimeout`] names the ranks that did not come, [`Error::PeerGone`] one whose process ended, and
    ///   [`Error::PeerFailed`] one that failed.
    /// * [`Error::MeetingPlace`], [`Error::ForeignPeer`]: the place to meet at is not to be had.
    /// * [`Error::RankTaken`], [`Error::WorldsDiffer`], [`Error::VersionsDiffer`], [`Error::OptionsDiffer`],
    ///   [`Error::SeveralMachines`]: these ranks can't be a group. All that have come are told.
    /// * [`Error::Unmapped`] and [`Error::SelfTestFailed`]: one rank's memory does not reach another. All return the
    ///   same, and can meet again.
    /// * As for [`Communicator::local`].
    #[cfg(not(any(loom, shuttle)))]
    pub fn meet(meeting: &Meeting, options: &Options) -> Result<Communicator> {
        layout(meeting.world_size(), &Options::default())?;
        Communicator::join(meeting.open(options.timeout)?, options)
    }

    /// As [`Communicator::meet`], by an all-gather that the ranks have already, such as their engine's. It is called
    /// once: it takes some hundred bytes of this rank, and gives those of all ranks, in rank order. They hold a secret
    /// for this once, so they are for the ranks alone. Everything else goes over sockets of this machine.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::meet`]. What the all-gather fails with becomes an [`Error::MeetingPlace`].
    #[cfg(not(any(loom, shuttle)))]
    pub fn meet_through<E: fmt::Display>(
        rank: usize,
        world: usize,
        all_gather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>, E>,
        options: &Options,
    ) -> Result<Communicator> {
        layout(world, &Options::default())?;
        let all_gather = |card: &[u8]| all_gather(card).map_err(|error| error.to_string());
        Communicator::join(meeting::meet_through(rank, world, all_gather, options.timeout)?, options)
    }

    #[cfg(not(any(loom, shuttle)))]
    fn join(seat: Seat, options: &Options) -> Result<Communicator> {
        Communicator::join_by(seat, options, |layout, _, file| Segment::open(layout, options.symmetric_bytes, file))
    }

    /// As [`Communicator::meet`] once a seat is taken, where `open` maps a peer's segment.
    #[cfg(not(any(loom, shuttle)))]
    pub(super) fn join_by(
        mut seat: Seat,
        options: &Options,
        open: impl Fn(&Layout, usize, &OwnedFd) -> Result<Segment>,
    ) -> Result<Communicator> {
        let mut join = || {
            seat.agree(options)?;
            let layout = layout(seat.world(), options)?;
            let group = Group::join(layout, options, &mut seat, |peer, file| open(&layout, peer, file))?;
            let mut communicator = Communicator::new(seat.rank() as u32, Arc::new(group), options)?;
            if options.self_test && seat.world() > 1 {
                // Until it has passed, under options of its own.
                communicator.options = Options::default();
                self_test::run(&mut communicator, options, &mut seat)?;
                communicator.options = options.clone();
            }
            Ok(communicator)
        };
        let joined = join();
        if let Err(error) = &joined {
            seat.leave(error);
        }
        joined
    }

    /// As [`Communicator::local`], with a fault in the protocol that a model should find, or a test survive.
    #[cfg(any(test, loom, shuttle))]
    #[cfg_attr(not(test), allow(dead_code))]
    pub(super) fn faulty(world: usize, options: &Options, fault: super::group::Fault) -> Result<Vec<Communicator>> {
        let mut group = Group::new(layout(world, options)?, options)?;
        group.fault = fault;
        Communicator::of_group(group, options)
    }

    /// Takes this algorithm from now on. All ranks must, before the same call.
    #[cfg(any(test, not(any(loom, shuttle))))]
    pub(super) fn force(&mut self, algorithm: crate::Algorithm) {
        self.options.algorithm = Some(algorithm);
    }

    /// Writes a buffer as its owner does between calls, or looks at it; a model is told.
    #[cfg(all(test, any(loom, shuttle)))]
    pub(super) fn touch<R>(
        &self,
        buffer: &mut SymmetricBuffer<f32>,
        writes: bool,
        touch: impl FnOnce(&mut [f32]) -> R,
    ) -> R {
        let (segment, bytes) = (self.group.segment(self.rank), buffer.len() * size_of::<f32>());
        let mut held = super::sync::Held::default();
        if let Some(offset) = buffer.offset(&self.group, self.rank) {
            // SAFETY: the buffer is this rank's alone, and `held` lives as long as the touch.
            unsafe {
                if writes {
                    segment.write_symmetric(offset, bytes, &mut held);
                } else {
                    segment.read_symmetric(offset, bytes, &mut held);
                }
            }
        }
        let result = touch(buffer);
        drop(held);
        result
    }

    /// If the last round by packets was of epoch `from`, goes on behind epoch `to`, which must be of the same half.
    #[cfg(all(test, loom))]
    pub(super) fn skip_packet_epochs(&mut self, from: u32, to: u32) {
        let segment = self.group.segment(self.rank);
        if segment.epoch(Region::Packets, 0) == from {
            segment.set_epoch(Region::Packets, 0, to);
        }
    }

    fn of_group(group: Group, options: &Options) -> Result<Vec<Communicator>> {
        let world = group.layout.world;
        let group = Arc::new(group);
        (0..world).map(|rank| Communicator::new(rank, group.clone(), options)).collect()
    }

    fn new(rank: u32, group: Arc<Group>, options: &Options) -> Result<Communicator> {
        let Layout { world, max_blocks, .. } = group.layout;
        Ok(Communicator {
            rank,
            isa: Isa::widest(),
            crowds: (0..max_blocks).map(|_| Crowd::new()).collect(),
            distances: (0..max_blocks).map(|_| Distances::new(world, options.host_stores)).collect(),
            heap: Arc::new(Heap::new(group.heap.clone())),
            #[cfg(not(any(loom, shuttle)))]
            pool: Pool::new(max_blocks - 1, rank)?,
            options: options.clone(),
            group,
        })
    }

    #[cfg(not(any(loom, shuttle)))]
    pub(super) fn group(&self) -> &Group {
        &self.group
    }

    /// This rank, from 0 on.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.layout.world as usize
    }

    /// Reduces `buffer` over all ranks, element by element, and leaves the result in every rank's `buffer`.
    ///
    /// A length of 0 does nothing and waits for nobody; a group of one rank leaves the buffer as it is.
    ///
    /// # Errors
    ///
    /// * [`Error::PeerTimeout`], [`Error::PeerGone`], [`Error::PeerLeft`], [`Error::Mismatch`] and [`Error::Aborted`]
    ///   end the group. The buffer then holds some of the input and some of the result.
    /// * [`Error::AlgorithmUnavailable`] if forced [`Options`] can't run on the host; nothing was started.
    pub fn all_reduce_in_place<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        let address = buffer.as_mut_ptr();
        let plan = self.plan(buffer.len(), T::DTYPE)?;
        // SAFETY: the slice is this call's alone, and input and output are the same.
        unsafe { self.all_reduce_at(address, address, buffer.len(), op, plan, [0; 2]) }
    }

    /// Reduces `input` over all ranks, element by element, to every rank's `output`.
    ///
    /// A length of 0 does nothing and waits for nobody; a group of one rank copies.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`] if the two have different lengths; nothing was started. Else as for
    /// [`Communicator::all_reduce_in_place`].
    pub fn all_reduce<T: Element>(&mut self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        let plan = self.plan(input.len(), T::DTYPE)?;
        // SAFETY: the output is this call's alone, so the two are apart, and nobody writes the input.
        unsafe { self.all_reduce_at(input.as_ptr(), output.as_mut_ptr(), input.len(), op, plan, [0; 2]) }
    }

    /// A tensor of `count` zeros in this rank's symmetric memory, of which [`Options::symmetric_bytes`] says how much
    /// there is.
    ///
    /// Every rank must make, and drop, the same ones in the same order: then all lie at the same places, and ranks know
    /// where their peers' are with no word between them. Where they don't, a call with them is an
    /// [`Error::Mismatch`].
    ///
    /// # Errors
    ///
    /// [`Error::SymmetricMemoryFull`], [`Error::TooLarge`].
    pub fn symmetric_buffer<T: Element>(&self, count: usize) -> Result<SymmetricBuffer<T>> {
        let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let bytes = bytes.ok_or(Error::TooLarge { count, dtype: T::DTYPE })?;
        SymmetricBuffer::new(count, bytes, self.rank, &self.heap, &self.group).ok_or_else(|| {
            Error::SymmetricMemoryFull {
                rank: self.rank(),
                wanted: bytes,
                free: self.heap.free() as usize,
                total: self.heap.total() as usize,
            }
        })
    }

    /// As [`Communicator::all_reduce_in_place`], of a tensor in symmetric memory: each rank reduces its part of all
    /// ranks' tensors where they are, and writes it to all of them.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::all_reduce_in_place`], and [`Error::AlgorithmUnavailable`] if the buffer is not of this
    /// communicator's memory. When a call that was started fails, the buffer holds zeros, in other memory: see
    /// [`SymmetricBuffer`].
    pub fn all_reduce_symmetric_in_place<T: Element>(
        &mut self,
        buffer: &mut SymmetricBuffer<T>,
        op: ReduceOp,
    ) -> Result<()> {
        let offset = self.offset_of(buffer)?;
        let plan = self.plan_at(Placement::SymmetricInPlace, buffer.len(), T::DTYPE)?;
        self.check()?;
        let (address, count) = (buffer.address().cast_mut(), buffer.len());
        // SAFETY: the buffer is this call's alone, but for what peers do in the same call; if they may still after it,
        // the buffer leaves its memory.
        let result = unsafe { self.all_reduce_at(address, address, count, op, plan, [offset; 2]) };
        if result.is_err() {
            buffer.leave();
        }
        result
    }

    /// As [`Communicator::all_reduce`], of tensors in symmetric memory: each rank reads all ranks' inputs where they
    /// are, and of long messages only its part of them, which it writes to all ranks' outputs.
    ///
    /// # Errors
    ///
    /// [`Error::LengthMismatch`], as for [`Communicator::all_reduce`]; else as for
    /// [`Communicator::all_reduce_symmetric_in_place`], where the output then holds the zeros.
    pub fn all_reduce_symmetric<T: Element>(
        &mut self,
        input: &SymmetricBuffer<T>,
        output: &mut SymmetricBuffer<T>,
        op: ReduceOp,
    ) -> Result<()> {
        if input.len() != output.len() {
            return Err(Error::LengthMismatch { input: input.len(), output: output.len() });
        }
        let offsets = [self.offset_of(input)?, self.offset_of(output)?];
        let plan = self.plan_at(Placement::Symmetric, input.len(), T::DTYPE)?;
        self.check()?;
        let (from, to, count) = (input.address(), output.address().cast_mut(), input.len());
        // SAFETY: as in `all_reduce_symmetric_in_place`, and as in `all_reduce`.
        let result = unsafe { self.all_reduce_at(from, to, count, op, plan, offsets) };
        if result.is_err() {
            input.stay_lent();
            output.leave();
        }
        result
    }

    fn offset_of<T: Element>(&self, buffer: &SymmetricBuffer<T>) -> Result<u64> {
        buffer.offset(&self.group, self.rank).ok_or_else(|| Error::AlgorithmUnavailable {
            algorithm: crate::Algorithm::TwoShotDirect,
            reason: "the buffer is not in this communicator's symmetric memory".into(),
        })
    }

    /// How a call with `count` elements of this type is done. `None` if there is nothing to exchange: no elements, or a
    /// group of one rank.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] and [`Error::AlgorithmUnavailable`], as the call itself would return.
    pub fn plan(&self, count: usize, dtype: DType) -> Result<Option<Plan>> {
        self.plan_at(Placement::Anywhere, count, dtype)
    }

    /// The same, of tensors that lie so.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::plan`].
    pub fn plan_at(&self, placement: Placement, count: usize, dtype: DType) -> Result<Option<Plan>> {
        let bytes = count.checked_mul(dtype.size()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let bytes = bytes.ok_or(Error::TooLarge { count, dtype })? as u64;
        let Layout { world, max_blocks, .. } = self.group.layout;
        if bytes == 0 || world == 1 {
            return Ok(None);
        }
        let plan = protocol::plan::plan(
            bytes,
            placement,
            &self.group.layout,
            // How many threads a call takes is for its length to say.
            Forced { blocks: None, threads: None, ..self.options.forced() },
            priors::choose(bytes, world, placement, max_blocks),
            &|_, _| u32::MAX,
        )?;
        let chunk_bytes = match Packets::new(&self.group.layout).chunk_bytes(plan.algorithm) {
            Some(of_packets) => of_packets,
            None => plan.chunk_bytes,
        };
        Ok(Some(Plan { threads: 1, chunk_bytes, ..plan }))
    }

    /// The failure that ended the group, if one did.
    ///
    /// # Errors
    ///
    /// [`Error::PeerTimeout`], [`Error::PeerGone`], [`Error::PeerLeft`], [`Error::Mismatch`] or [`Error::Aborted`], the
    /// same on every rank.
    pub fn check(&self) -> Result<()> {
        self.group.check(self.rank)
    }

    /// Ends the group: every rank's wait, now and later, returns [`Error::Aborted`].
    pub fn abort(&self) {
        self.group.abort();
    }

    /// A handle that ends the group from another thread, while this rank is in a call.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle { group: Arc::downgrade(&self.group) }
    }

    /// The last finished epoch of every block, of rounds by flags and then of rounds by packets. Between calls, they
    /// are the same on all ranks that made the same calls.
    pub fn epochs(&self) -> Vec<u32> {
        let segment = self.group.segment(self.rank);
        let blocks = 0..self.group.layout.max_blocks;
        [Region::Flags, Region::Packets]
            .into_iter()
            .flat_map(|region| blocks.clone().map(move |block| segment.epoch(region, block)))
            .collect()
    }

    /// Bytes of this rank's segment: control, flags, staging and packets, rounded to pages.
    pub fn memory_bytes(&self) -> usize {
        self.group.segment(self.rank).bytes()
    }

    /// # Safety
    ///
    /// `input` is readable and `output` writable for `count` elements, both aligned to `T`, with no other thread there;
    /// they are the same or apart. The plan is for so many, and if it is direct they lie at these offsets of this
    /// rank's segment, where peers may touch them in this call, and if it fails after it.
    unsafe fn all_reduce_at<T: Element>(
        &mut self,
        input: *const T,
        output: *mut T,
        count: usize,
        op: ReduceOp,
        plan: Option<Plan>,
        offsets: [u64; 2],
    ) -> Result<()> {
        self.check()?;
        let Some(plan) = plan else {
            if input != output {
                // SAFETY: the caller vouches for both, which are apart.
                unsafe { output.copy_from_nonoverlapping(input, count) };
            }
            return Ok(());
        };
        let bytes = count * size_of::<T>();
        let offsets = if plan.algorithm.is_direct() { offsets } else { [0; 2] };
        let call = Call { bytes: bytes as u64, dtype: T::DTYPE, op, plan, offsets };
        self.group.segment(self.rank).set_call(&call);
        let exchange = |block: u32| Exchange {
            group: &self.group,
            rank: self.rank,
            block,
            distances: &self.distances[block as usize],
            crowd: &self.crowds[block as usize],
            isa: self.isa,
            op,
            plan,
            hash: call.hash(),
            input: input.cast(),
            output: output.cast(),
            bytes,
            offsets,
        };
        #[cfg(not(any(loom, shuttle)))]
        if plan.blocks > 1 {
            let other = |block| -> Box<dyn FnOnce() -> Result<()> + Send + '_> {
                let exchange = exchange(block);
                // SAFETY: as below, for a block of its own.
                Box::new(move || unsafe { { exchange }.run::<T>() })
            };
            let first = exchange(0);
            // SAFETY: as below.
            return self.pool.run(plan.blocks, other, || unsafe { first.run::<T>() });
        }
        // SAFETY: the caller vouches for the buffers; `&mut self` is this rank's only communicator, so no other thread
        // runs its blocks.
        unsafe { exchange(0).run::<T>() }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank)
            .field("world_size", &self.group.layout.world)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// Ends a group from any thread; see [`Communicator::abort_handle`].
///
/// It does not keep the group's memory: once all communicators are gone, there is nothing left to end.
#[derive(Clone)]
pub struct AbortHandle {
    group: Weak<Group>,
}

impl AbortHandle {
    /// Ends the group, as [`Communicator::abort`] does.
    pub fn abort(&self) {
        if let Some(group) = self.group.upgrade() {
            group.abort();
        }
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AbortHandle").finish_non_exhaustive()
    }
}

fn layout(world: usize, options: &Options) -> Result<Layout> {
    let unsupported = || Error::UnsupportedWorld { world, backend: "the host backend", most: MAX_RANKS as usize };
    let ranks = u32::try_from(world).ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks)).ok_or_else(unsupported)?;
    if let Some(algorithm) = options.algorithm.filter(|algorithm| !super::ALGORITHMS.contains(algorithm)) {
        let reason = match algorithm.is_direct() {
            true if options.symmetric_bytes > 0 => None,
            true => Some("it needs tensors in symmetric memory (`Options::symmetric_bytes`)"),
            false => Some("it runs on GPUs only; `host::ALGORITHMS` lists what the host has"),
        };
        if let Some(reason) = reason {
            return Err(Error::AlgorithmUnavailable { algorithm, reason: reason.into() });
        }
    }
    let blocks = options.blocks.unwrap_or(1);
    if !(1..=MAX_BLOCKS).contains(&blocks) {
        return Err(Error::InvalidOption {
            option: "blocks",
            value: blocks.to_string(),
            reason: format!("a rank of the host has 1 to {MAX_BLOCKS} threads"),
        });
    }
    Layout::new(ranks, blocks, options.staging_bytes.unwrap_or(STAGING_BYTES))
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use std::{thread, time::Duration};

    use super::{super::group::Fault, *};
    use crate::Algorithm;

    /// Field case A17 (vllm-project/vllm#43616): ranks that do the same call in different ways. Here the algorithm is
    /// all that can differ, and no caller can make it.
    #[test]
    fn different_algorithms_are_a_mismatch_that_names_both() {
        for world in [2, 4, 8] {
            for (usual, odd) in [
                (Algorithm::OneShot, Algorithm::TwoShot),
                (Algorithm::TwoShotPull, Algorithm::TwoShot),
                (Algorithm::OneShotPull, Algorithm::OneShot),
            ] {
                let ranks = Communicator::local(world, &Options::default()).unwrap();
                let each = |mut rank: Communicator| {
                    rank.force(if rank.rank() == 1 { odd } else { usual });
                    let error = rank.all_reduce_in_place(&mut [1.0f32; 500], ReduceOp::Sum).unwrap_err();
                    assert_eq!(rank.check(), Err(error.clone()));
                    error
                };
                let errors: Vec<_> = thread::scope(|scope| {
                    let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || each(rank))).collect();
                    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
                });
                let Error::Mismatch { rank, call, peer, peer_call: Some(peer_call), .. } = &errors[0] else {
                    panic!("{}", errors[0])
                };
                let of = |rank| if rank == 1 { odd } else { usual };
                assert_eq!((call.plan.algorithm, peer_call.plan.algorithm), (of(*rank), of(*peer)), "{}", errors[0]);
                assert_ne!(of(*rank), of(*peer));
                assert_eq!((call.count(), peer_call.count()), (500, 500));
                assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
            }
        }
    }

    /// Field case A21 (sgl-project/sglang#30209): an arrival that gets lost.
    #[test]
    fn a_lost_flag_ends_the_group_by_the_deadline() {
        const WORLD: usize = 3;
        let timeout = Duration::from_millis(150);
        let by_flags = super::super::ALGORITHMS.into_iter().filter(|algorithm| algorithm.packet_rounds() == 0);
        for algorithm in by_flags {
            let options = Options::default().timeout(timeout).algorithm(algorithm);
            for epoch in 1..=algorithm.rounds() {
                let last = epoch == algorithm.rounds();
                let fault = Fault::LostFlag { epoch, writer: 1, reader: 0 };
                let each = |mut rank: Communicator| {
                    let mut buffer = [1.0f32; 500];
                    let result = rank.all_reduce_in_place(&mut buffer, ReduceOp::Sum);
                    // Who is not told by its own wait got all it needs, and what it has is right.
                    assert_eq!(result.is_ok(), last && rank.rank() != 0, "{result:?}");
                    assert!(result.is_err() || buffer == [WORLD as f32; 500]);
                    let next = rank.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap_err();
                    assert_eq!(rank.check(), Err(next.clone()));
                    assert!(result.is_ok() || result == Err(next.clone()));
                    next
                };
                let started = std::time::Instant::now();
                let errors: Vec<_> = thread::scope(|scope| {
                    let ranks = Communicator::faulty(WORLD, &options, fault).unwrap();
                    let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || each(rank))).collect();
                    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
                });
                assert!(started.elapsed() < timeout + Duration::from_secs(5));
                assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
                let Error::PeerTimeout { rank, peer, .. } = errors[0] else { panic!("{}", errors[0]) };
                // Where others wait for rank 0 in turn, one of them may be the first to give up.
                assert!((rank, peer) == (0, 1) || peer == 0, "{}", errors[0]);
            }
        }
    }

    /// Rounds by flags and by packets have regions of their own, where nobody waits for a rank that goes by the other.
    #[test]
    fn ranks_that_go_by_different_regions_are_told_before_the_deadline() {
        let pairs = [
            (Algorithm::OneShotLl, Algorithm::OneShot),
            (Algorithm::TwoShotPull, Algorithm::TwoShotLl),
            (Algorithm::OneShotLl, Algorithm::TwoShotLl),
        ];
        for (algorithm, other) in pairs {
            let started = std::time::Instant::now();
            let options = Options::default().timeout(Duration::from_secs(60));
            let ranks = Communicator::local(3, &options).unwrap();
            let errors: Vec<_> = thread::scope(|scope| {
                let threads = ranks.into_iter().map(|mut rank| {
                    scope.spawn(move || {
                        for algorithm in [algorithm, other] {
                            rank.force(algorithm);
                            rank.all_reduce_in_place(&mut [1.0f32; 100], ReduceOp::Sum).unwrap();
                        }
                        rank.force(if rank.rank() == 1 { other } else { algorithm });
                        rank.all_reduce_in_place(&mut [1.0f32; 100], ReduceOp::Sum).unwrap_err()
                    })
                });
                threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let Error::Mismatch { rank, peer, .. } = errors[0] else {
                panic!("{algorithm} and {other}: {}", errors[0])
            };
            assert!((rank == 1) != (peer == 1), "{algorithm} and {other}: {}", errors[0]);
            assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
            assert!(started.elapsed().as_secs() < 30, "{algorithm} and {other}");
        }
    }

    /// Field case A05 (lightseekorg/tokenspeed#351): algorithms that shared a counter drifted apart when they
    /// alternated.
    #[test]
    fn algorithms_may_alternate_and_the_epochs_stay_equal() {
        for (world, calls) in [(2, 10_000), (4, 2_000)] {
            let options = Options::default().staging_bytes(world * 2 * 256);
            let rank = |mut communicator: Communicator| {
                for call in 0..calls {
                    // Every algorithm follows every other, in strict alternation first.
                    let all = super::super::ALGORITHMS.len();
                    let index = if call < calls / 2 { call % 2 } else { (call / all + call * (call / 16 % all)) % all };
                    communicator.force(super::super::ALGORITHMS[index]);
                    let count = 1 + call % 300;
                    let value = |rank: usize, index: usize| ((call + rank * 3 + index) % 64) as f32;
                    let mut buffer: Vec<_> = (0..count).map(|index| value(communicator.rank(), index)).collect();
                    communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
                    for (index, &sum) in buffer.iter().enumerate() {
                        assert_eq!(sum, (0..world).map(|rank| value(rank, index)).sum::<f32>(), "call {call}, {index}");
                    }
                }
                communicator.epochs()
            };
            let epochs: Vec<_> = std::thread::scope(|scope| {
                let ranks = Communicator::local(world, &options).unwrap();
                let threads: Vec<_> = ranks.into_iter().map(|each| scope.spawn(move || rank(each))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(epochs.iter().all(|epoch| *epoch == epochs[0]), "{epochs:?}");
            assert!(epochs[0].iter().sum::<u32>() > calls as u32);
        }
    }
}
