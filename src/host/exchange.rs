//! One block's share of one call: the rounds of each algorithm.

use std::ops::Range;

use super::{
    crowd::Crowd,
    distance::Distances,
    group::Group,
    packets::Region,
    priors::{MAX_RANKS, STREAMED_OUTPUT_BYTES},
    reduce::{self, Copying, Isa, Sources, Stores, Target},
    segment::{Place, Segment},
    sync::{Held, Instant},
    wait::Wait,
};
use crate::{
    Algorithm, Element, Phase, Plan, ReduceOp, Result,
    protocol::{
        call::Flag,
        layout::LINE_BYTES,
        split::{self, PACK_BYTES},
    },
};

/// What one rank's block does in one call.
///
/// `input` is readable and `output` writable for `bytes` bytes, both aligned to the element type, and they are the same
/// or apart. No other thread touches them.
pub(super) struct Exchange<'a> {
    pub(super) group: &'a Group,
    pub(super) rank: u32,
    pub(super) block: u32,
    pub(super) distances: &'a Distances,
    pub(super) crowd: &'a Crowd,
    pub(super) isa: Isa,
    pub(super) op: ReduceOp,
    pub(super) plan: Plan,
    /// The call's hash.
    pub(super) hash: u32,
    pub(super) input: *const u8,
    pub(super) output: *mut u8,
    pub(super) bytes: usize,
    /// Where input and output lie in every rank's segment, if the plan is direct.
    pub(super) offsets: [u64; 2],
}

// SAFETY: the addresses are the call's, whose caller vouches that no other thread touches what is there; its blocks
// touch shares that are apart. The rest is made to be shared.
unsafe impl Send for Exchange<'_> {}

/// A round that has begun: its half may be written.
pub(super) struct Round {
    pub(super) epoch: u32,
    pub(super) half: u32,
    pub(super) phase: Phase,
    region: Region,
}

impl Round {
    /// Where in `room` bytes of the round's half the `bytes` of this round go.
    ///
    /// Any place of the half will do, since nobody reads any of it by now. They take turns, so that a line is not
    /// written again before the caches nearest to the cores have let go of it: it costs some three times as much to
    /// get it out of another core's than from the cache that both share (docs/measurements.md).
    fn turn(&self, bytes: usize, room: u64) -> u64 {
        let stride = (bytes as u64).clamp(1, room).next_multiple_of(LINE_BYTES);
        u64::from(self.epoch >> 1) % (room / stride).max(1) * stride
    }
}

impl<'a> Exchange<'a> {
    /// Runs all rounds.
    ///
    /// # Safety
    ///
    /// The fields are as documented, `T` is the call's type, and no other thread runs this rank's block.
    pub(super) unsafe fn run<T: Element>(&self) -> Result<()> {
        if matches!(self.plan.algorithm, Algorithm::OneShotLl | Algorithm::TwoShotLl) {
            // SAFETY: the caller's promises are handed on.
            return unsafe { self.run_packets::<T>() };
        }
        let share = split::block_packs(self.bytes as u64, self.plan.blocks, self.block);
        if self.plan.algorithm.is_direct() {
            // SAFETY: the caller's promises are handed on.
            return unsafe { self.direct::<T>(&share) };
        }
        let mut chunks = split::chunks(share, self.plan.chunk_bytes / PACK_BYTES).peekable();
        while let Some(chunk) = chunks.next() {
            // SAFETY: the caller's promises are handed on; the chunk is at most what the algorithm's slots hold.
            unsafe {
                match self.plan.algorithm {
                    Algorithm::OneShot => self.one_shot::<T>(chunk)?,
                    Algorithm::OneShotPull => self.one_shot_pull::<T>(chunk)?,
                    Algorithm::TwoShot => self.two_shot::<T>(chunk, chunks.peek())?,
                    Algorithm::TwoShotPull => self.two_shot_pull::<T>(chunk)?,
                    Algorithm::OneShotLl
                    | Algorithm::TwoShotLl
                    | Algorithm::OneShotDirect
                    | Algorithm::TwoShotDirect
                    | Algorithm::Nccl => unreachable!("no group is made with these"),
                }
            }
        }
        Ok(())
    }

    /// Without staging: between two rounds that hand over nothing but the flags, which are an entry, after which all
    /// inputs are there and all outputs may be written, and an exit, after which they are their callers' again.
    ///
    /// Peers find input and output at the same offsets, which are in the call's hash. Every element of every rank's
    /// memory is written by one rank: its owner, or who reduces its part. In place, that rank is also the only one
    /// to read it.
    ///
    /// # Safety
    ///
    /// As for [`Exchange::run`], where input and output are this rank's pieces of the heap at the offsets.
    unsafe fn direct<T: Element>(&self, share: &Range<u64>) -> Result<()> {
        if !self.group.skips(Phase::Entry) {
            let entry = self.begin(Region::Flags, Phase::Entry);
            self.exchange(&entry)?;
            self.finish(entry);
        }
        let two_shot = self.plan.algorithm == Algorithm::TwoShotDirect;
        let bytes = self.bytes_of(&if two_shot { self.part(share, self.rank) } else { share.clone() });
        {
            let [from, to] = self.offsets.map(|offset| offset + bytes.start as u64);
            let world = self.group.layout.world;
            let mut held = Held::default();
            let mut sources = [std::ptr::null(); MAX_RANKS as usize];
            let nowhere = Target { to: std::ptr::null_mut(), stores: self.output_stores() };
            let (mut targets, mut number) = ([nowhere; MAX_RANKS as usize], 0);
            // This rank first, so that the loop comes to its lines' starts.
            for rank in [self.rank].into_iter().chain(self.peers()) {
                let segment = self.group.segment(rank);
                // SAFETY: after the entry every rank has lent its input to be read, and its output to be written by whoever
                // has the part, until it has acquired this rank's exit. `held` is dropped before that is released.
                unsafe {
                    if two_shot || rank == self.rank {
                        targets[number].to = segment.write_symmetric(to, bytes.len(), &mut held);
                        number += 1;
                    }
                    sources[rank as usize] = if from == to {
                        targets[number - 1].to.cast_const()
                    } else {
                        segment.read_symmetric(from, bytes.len(), &mut held)
                    };
                }
            }
            let count = bytes.len() / size_of::<T>();
            // SAFETY: as above; pieces are apart, start on lines, and parts on packs, and `isa` came from `Isa::widest`.
            unsafe { self.fold::<T>(&sources[..world as usize], &targets[..number], count) }
        }
        if !self.group.skips(Phase::Exit) {
            let exit = self.begin(Region::Flags, Phase::Exit);
            self.exchange(&exit)?;
            self.finish(exit);
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Exchange::run`]; the chunk fits in a slot.
    unsafe fn one_shot<T: Element>(&self, chunk: Range<u64>) -> Result<()> {
        let bytes = self.bytes_of(&chunk);
        let round = self.begin(Region::Flags, Phase::Exchange);
        let start = round.turn(bytes.len(), self.group.layout.slot_bytes);
        for peer in self.peers() {
            // SAFETY: the slot of this rank in a peer's segment is this rank's to write in a round that has begun, and
            // `bytes` lie in the input.
            unsafe { self.push(&round, peer, start, &bytes) }
        }
        self.exchange(&round)?;
        // SAFETY: after the exchange the slots hold every peer's chunk, and none writes them before this rank has begun
        // the round after the next.
        unsafe {
            let slot = |peer| (self.rank, self.place(&round, peer, start));
            self.reduce::<T>(&bytes, slot, |_| None);
        }
        self.finish(round);
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Exchange::run`]; the chunk fits in the slots of a half.
    unsafe fn one_shot_pull<T: Element>(&self, chunk: Range<u64>) -> Result<()> {
        let bytes = self.bytes_of(&chunk);
        let round = self.begin(Region::Flags, Phase::Exchange);
        let start = round.turn(bytes.len(), self.half_bytes());
        // SAFETY: this rank alone writes its own segment when all pull, in a round that has begun; slots of a half lie
        // side by side.
        unsafe { self.stage(&round, start, &bytes) }
        self.exchange(&round)?;
        // SAFETY: after the exchange every peer's staging holds its chunk, and it is not written before this rank has
        // begun the round after the next.
        unsafe { self.reduce::<T>(&bytes, |peer| (peer, self.place(&round, 0, start)), |_| None) }
        self.finish(round);
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Exchange::run`]; a part of the chunk fits in a slot.
    unsafe fn two_shot<T: Element>(&self, chunk: Range<u64>, next_chunk: Option<&Range<u64>>) -> Result<()> {
        let own = self.bytes_of(&self.part(&chunk, self.rank));
        // The longest, so that all parts start alike.
        let part = self.bytes_of(&self.part(&chunk, 0)).len();

        let scatter = self.begin(Region::Flags, Phase::ReduceScatter);
        let start = scatter.turn(part, self.group.layout.slot_bytes);
        for peer in self.peers() {
            // SAFETY: as in `one_shot`.
            unsafe { self.push(&scatter, peer, start, &self.bytes_of(&self.part(&chunk, peer))) }
        }
        self.exchange(&scatter)?;
        // With every peer's flag of the first round, the second may be written while the first is read.
        let gather = self.round_after(scatter.epoch, Region::Flags, Phase::AllGather);
        let next = gather.turn(part, self.group.layout.slot_bytes);
        // SAFETY: as in `one_shot`. In place, this overwrites this rank's own part alone, and every other part of the
        // input has been pushed.
        unsafe {
            let slot = |peer| (self.rank, self.place(&scatter, peer, start));
            self.reduce::<T>(&own, slot, |rank| {
                (rank != self.rank).then(|| (rank, self.place(&gather, self.rank, next)))
            });
        }
        self.finish(scatter);
        self.exchange(&gather)?;
        for peer in self.peers() {
            let part = self.bytes_of(&self.part(&chunk, peer));
            // What is pushed next, of an input that is in no cache.
            let ahead = match next_chunk {
                Some(chunk) => self.input.wrapping_add(self.bytes_of(&self.part(chunk, peer)).start),
                None => std::ptr::null(),
            };
            // SAFETY: after the exchange the slot holds the peer's part, and stays; `part` lies in the output.
            unsafe { self.fetch(self.rank, self.place(&gather, peer, next), &part, ahead) }
        }
        self.finish(gather);
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Exchange::run`]; the chunk fits in the slots of a half.
    unsafe fn two_shot_pull<T: Element>(&self, chunk: Range<u64>) -> Result<()> {
        let whole = self.bytes_of(&chunk);
        let own = self.bytes_of(&self.part(&chunk, self.rank));
        let part = self.bytes_of(&self.part(&chunk, 0)).len();

        let scatter = self.begin(Region::Flags, Phase::ReduceScatter);
        let start = scatter.turn(whole.len(), self.half_bytes());
        // All but this rank's own part, which it takes from its input.
        for bytes in [whole.start..own.start, own.end..whole.end] {
            // SAFETY: as in `one_shot_pull`.
            unsafe { self.stage(&scatter, start + (bytes.start - whole.start) as u64, &bytes) }
        }
        self.exchange(&scatter)?;
        let gather = self.round_after(scatter.epoch, Region::Flags, Phase::AllGather);
        let next = gather.turn(part, self.half_bytes());
        let in_chunk = (own.start - whole.start) as u64;
        // SAFETY: as in `one_shot_pull`, and as in `two_shot` for the second round. In place, this overwrites this
        // rank's own part alone, and the whole input has been staged.
        unsafe {
            let staged = |peer| (peer, self.place(&scatter, 0, start + in_chunk));
            self.reduce::<T>(&own, staged, |rank| (rank == self.rank).then(|| (rank, self.place(&gather, 0, next))));
        }
        self.finish(scatter);
        self.exchange(&gather)?;
        for peer in self.peers() {
            let part = self.bytes_of(&self.part(&chunk, peer));
            // SAFETY: after the exchange the peer's staging starts with its part, and stays; `part` lies in the output.
            unsafe { self.fetch(peer, self.place(&gather, 0, next), &part, std::ptr::null()) }
        }
        self.finish(gather);
        Ok(())
    }

    /// Begins the block's next round.
    pub(super) fn begin(&self, region: Region, phase: Phase) -> Round {
        self.round_after(self.own().epoch(region, self.block), region, phase)
    }

    /// The round that follows this epoch.
    pub(super) fn round_after(&self, epoch: u32, region: Region, phase: Phase) -> Round {
        let epoch = region.next(epoch);
        Round { epoch, half: self.group.slot_half(epoch), phase, region }
    }

    /// Copies `bytes` of the input to this rank's slot in a peer's segment.
    ///
    /// # Safety
    ///
    /// `bytes` lie in the input and fit in a slot from `start` on.
    unsafe fn push(&self, round: &Round, peer: u32, start: u64, bytes: &Range<usize>) {
        let (to, stores) = (self.place(round, self.rank, start), self.distances.stores(peer, bytes.len()));
        // SAFETY: `protocol`'s page proves that nobody reads the slot by now: this rank has begun the round.
        unsafe { self.copy_in(self.group.segment(peer), to, bytes, stores) }
    }

    /// Copies `bytes` of the input to this rank's own staging.
    ///
    /// # Safety
    ///
    /// `bytes` lie in the input and fit in the slots of a half from `start` on.
    unsafe fn stage(&self, round: &Round, start: u64, bytes: &Range<usize>) {
        let (to, stores) = (self.place(round, 0, start), self.distances.stores_for_all(self.peers(), bytes.len()));
        // SAFETY: as in `push`.
        unsafe { self.copy_in(self.own(), to, bytes, stores) }
    }

    /// Copies `bytes` of the input to a place in a segment, and times it now and then.
    ///
    /// # Safety
    ///
    /// They lie in the input and fit there, and nobody reads or writes the place meanwhile.
    unsafe fn copy_in(&self, segment: &Segment, to: Place, bytes: &Range<usize>, stores: Stores) {
        let begun = self.distances.is_own_due(bytes.len()).then(Instant::now);
        // SAFETY: the caller vouches for both; `isa` came from `Isa::widest`.
        unsafe { segment.copy_in(to, self.input.add(bytes.start), bytes.len(), self.isa.into(), stores) }
        if let Some(begun) = begun {
            self.distances.note_own(stores, bytes.len(), begun.elapsed());
        }
    }

    /// Copies `bytes` of the output from a place in a segment, and asks for as many from `ahead` on, unless that is null.
    ///
    /// # Safety
    ///
    /// They lie there, nobody writes them meanwhile, and they fit in the output.
    unsafe fn fetch(&self, segment: u32, from: Place, bytes: &Range<usize>, ahead: *const u8) {
        let to = Target { to: self.output.wrapping_add(bytes.start), stores: self.output_stores() };
        // SAFETY: the caller vouches for both.
        unsafe { self.group.segment(segment).copy_out(from, to, bytes.len(), Copying { isa: self.isa, ahead }) }
    }

    fn place(&self, round: &Round, source: u32, start: u64) -> Place {
        Place { half: round.half, block: self.block, source, start }
    }

    /// Bytes of all slots of a half.
    fn half_bytes(&self) -> u64 {
        self.group.layout.slot_bytes * u64::from(self.group.layout.world)
    }

    /// By which stores the output is written. One that is longer than a cache would only drive out what is in there, unless
    /// it takes the place of the input, whose lines have just been read.
    fn output_stores(&self) -> Stores {
        let in_place = self.input == self.output.cast_const();
        if self.bytes as u64 >= STREAMED_OUTPUT_BYTES && !in_place { Stores::Streaming } else { Stores::Cached }
    }

    /// Tells every peer that the round is written, and waits until all have told so.
    fn exchange(&self, round: &Round) -> Result<()> {
        let flag = Flag { epoch: round.epoch, hash: self.hash };
        let half = self.group.flag_half(round.epoch);
        for peer in self.peers() {
            if self.group.loses_flag(round.epoch, self.rank, peer) {
                continue;
            }
            self.group.segment(peer).store_flag(half, self.block, self.rank, flag, self.group.flag_order());
            self.group.segment(peer).wake(self.block);
        }
        self.wait(round, flag).for_all(self.peers(), &mut None)
    }

    pub(super) fn wait(&self, round: &Round, flag: Flag) -> Wait<'a> {
        let Exchange { group, rank, block, distances, crowd, .. } = *self;
        Wait { group, rank, block, phase: round.phase, region: round.region, flag, distances, crowd }
    }

    /// Ends a round once all of it is read.
    pub(super) fn finish(&self, round: Round) {
        self.own().set_epoch(round.region, self.block, round.epoch);
    }

    /// Reduces `bytes` of all ranks to the output and to every place that `also` names: this rank's from its input,
    /// which is in its cache, the others' from where `peer` says. Places are in the segment of a rank.
    ///
    /// # Safety
    ///
    /// `bytes` lie in input and output. Every place has as many; nobody writes those of `peer` meanwhile, and those of
    /// `also` are this thread's alone.
    unsafe fn reduce<T: Element>(
        &self,
        bytes: &Range<usize>,
        peer: impl Fn(u32) -> (u32, Place),
        also: impl Fn(u32) -> Option<(u32, Place)>,
    ) {
        let world = self.group.layout.world as usize;
        let mut held = Held::default();
        let mut sources = [std::ptr::null(); MAX_RANKS as usize];
        let output = Target { to: self.output.wrapping_add(bytes.start), stores: self.output_stores() };
        let mut targets = [output; 1 + MAX_RANKS as usize];
        let mut number = 1;
        for rank in 0..self.group.layout.world {
            // SAFETY: the caller vouches for the places, and `held` is dropped here.
            unsafe {
                sources[rank as usize] = if rank == self.rank {
                    self.input.wrapping_add(bytes.start)
                } else {
                    let (segment, place) = peer(rank);
                    self.group.segment(segment).read(place, bytes.len(), &mut held)
                };
            }
        }
        for rank in self.peers().chain([self.rank]) {
            if let Some((segment, place)) = also(rank) {
                let stores = if segment == self.rank {
                    self.distances.stores_for_all(self.peers(), bytes.len())
                } else {
                    self.distances.stores(segment, bytes.len())
                };
                // SAFETY: as above.
                let to = unsafe { self.group.segment(segment).write(place, bytes.len(), &mut held) };
                targets[number] = Target { to, stores };
                number += 1;
            }
        }
        let count = bytes.len() / size_of::<T>();
        // SAFETY: the caller vouches for the ranges; input and output are the same or apart and segments are apart from
        // both, as are the places from each other; `isa` came from `Isa::widest`. Slots start on lines and parts on
        // packs, so all is aligned.
        unsafe { self.fold::<T>(&sources[..world], &targets[..number], count) }
    }

    /// # Safety
    ///
    /// As for [`reduce::reduce`], with a source for each rank.
    pub(super) unsafe fn fold<T: Element>(&self, sources: &[*const u8], targets: &[Target], count: usize) {
        let sources = Sources { at: sources, own: self.rank as usize };
        // SAFETY: the caller's promises are handed on; `isa` came from `Isa::widest`.
        unsafe { reduce::reduce::<T>(self.isa, self.op, sources, targets, count) }
    }

    pub(super) fn own(&self) -> &'a Segment {
        self.group.segment(self.rank)
    }

    /// The other ranks, from the next one on, so that they don't all turn to the same one.
    pub(super) fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        (self.rank + 1..self.group.layout.world).chain(0..self.rank)
    }

    /// The packs, or packets, of a chunk that `rank` reduces.
    pub(super) fn part(&self, chunk: &Range<u64>, rank: u32) -> Range<u64> {
        let part = split::split(chunk.end - chunk.start, u64::from(self.group.layout.world), u64::from(rank));
        chunk.start + part.start..chunk.start + part.end
    }

    /// The bytes of some packs of the message, whose last may be partial.
    fn bytes_of(&self, packs: &Range<u64>) -> Range<usize> {
        let byte = |pack: u64| (pack * PACK_BYTES).min(self.bytes as u64) as usize;
        byte(packs.start)..byte(packs.end)
    }
}
