//! One block's share of one call: the rounds of each algorithm.

use std::ops::Range;

use super::{
    group::Group,
    packets::Region,
    priors::MAX_RANKS,
    reduce::{self, Isa},
    segment::Segment,
    sync::Held,
    wait::Wait,
};
use crate::{
    Algorithm, Element, Phase, Plan, ReduceOp, Result,
    protocol::{
        call::Flag,
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
    pub(super) isa: Isa,
    pub(super) op: ReduceOp,
    pub(super) plan: Plan,
    /// The call's hash.
    pub(super) hash: u32,
    pub(super) input: *const u8,
    pub(super) output: *mut u8,
    pub(super) bytes: usize,
}

/// A round that has begun: its half may be written.
pub(super) struct Round {
    pub(super) epoch: u32,
    pub(super) half: u32,
    pub(super) phase: Phase,
    region: Region,
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
        for chunk in split::chunks(share, self.plan.chunk_bytes / PACK_BYTES) {
            // SAFETY: the caller's promises are handed on; the chunk is at most what the algorithm's slots hold.
            unsafe {
                match self.plan.algorithm {
                    Algorithm::OneShot => self.one_shot::<T>(chunk)?,
                    Algorithm::OneShotPull => self.one_shot_pull::<T>(chunk)?,
                    Algorithm::TwoShot => self.two_shot::<T>(chunk)?,
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

    /// # Safety
    ///
    /// As for [`Exchange::run`]; the chunk fits in a slot.
    unsafe fn one_shot<T: Element>(&self, chunk: Range<u64>) -> Result<()> {
        let bytes = self.bytes_of(&chunk);
        let round = self.begin(Region::Flags, Phase::Exchange);
        for peer in self.peers() {
            // SAFETY: the slot of this rank in a peer's segment is this rank's to write in a round that has begun, and
            // `bytes` lie in the input.
            unsafe { self.push(&round, peer, self.input, &bytes) }
        }
        self.exchange(&round)?;
        // SAFETY: after the exchange the slots hold every peer's chunk, and none writes them before this rank has begun
        // the round after the next.
        unsafe {
            self.reduce::<T>(&bytes, |peer, held| self.own().read(round.half, self.block, peer, 0, bytes.len(), held));
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
        // SAFETY: this rank alone writes its own segment when all pull, in a round that has begun; slots of a half lie
        // side by side.
        unsafe { self.stage(&round, self.input, &bytes) }
        self.exchange(&round)?;
        // SAFETY: after the exchange every peer's staging holds its chunk, and it is not written before this rank has
        // begun the round after the next.
        unsafe {
            self.reduce::<T>(&bytes, |peer, held| {
                self.group.segment(peer).read(round.half, self.block, 0, 0, bytes.len(), held)
            });
        }
        self.finish(round);
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Exchange::run`]; a part of the chunk fits in a slot.
    unsafe fn two_shot<T: Element>(&self, chunk: Range<u64>) -> Result<()> {
        let own = self.bytes_of(&self.part(&chunk, self.rank));

        let round = self.begin(Region::Flags, Phase::ReduceScatter);
        for peer in self.peers() {
            // SAFETY: as in `one_shot`.
            unsafe { self.push(&round, peer, self.input, &self.bytes_of(&self.part(&chunk, peer))) }
        }
        self.exchange(&round)?;
        // SAFETY: as in `one_shot`. In place, this overwrites this rank's own part alone, and every other part of the
        // input has been pushed.
        unsafe {
            self.reduce::<T>(&own, |peer, held| self.own().read(round.half, self.block, peer, 0, own.len(), held));
        }
        self.finish(round);

        let round = self.begin(Region::Flags, Phase::AllGather);
        for peer in self.peers() {
            // SAFETY: as in `one_shot`; the part of the output was just written.
            unsafe { self.push(&round, peer, self.output, &own) }
        }
        self.exchange(&round)?;
        for peer in self.peers() {
            let part = self.bytes_of(&self.part(&chunk, peer));
            // SAFETY: after the exchange the slot holds the peer's part, and stays; `part` lies in the output.
            unsafe { self.own().copy_out(round.half, self.block, peer, 0, self.output.add(part.start), part.len()) }
        }
        self.finish(round);
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Exchange::run`]; the chunk fits in the slots of a half.
    unsafe fn two_shot_pull<T: Element>(&self, chunk: Range<u64>) -> Result<()> {
        let whole = self.bytes_of(&chunk);
        let own = self.bytes_of(&self.part(&chunk, self.rank));

        let round = self.begin(Region::Flags, Phase::ReduceScatter);
        // SAFETY: as in `one_shot_pull`.
        unsafe { self.stage(&round, self.input, &whole) }
        self.exchange(&round)?;
        let start = (own.start - whole.start) as u64;
        // SAFETY: as in `one_shot_pull`. In place, this overwrites this rank's own part alone, and the whole input has
        // been staged.
        unsafe {
            self.reduce::<T>(&own, |peer, held| {
                self.group.segment(peer).read(round.half, self.block, 0, start, own.len(), held)
            });
        }
        self.finish(round);

        let round = self.begin(Region::Flags, Phase::AllGather);
        // SAFETY: as in `one_shot_pull`; the part of the output was just written.
        unsafe { self.stage(&round, self.output, &own) }
        self.exchange(&round)?;
        for peer in self.peers() {
            let part = self.bytes_of(&self.part(&chunk, peer));
            let to = self.output.wrapping_add(part.start);
            // SAFETY: after the exchange the peer's staging starts with its part, and stays; `part` lies in the output.
            unsafe { self.group.segment(peer).copy_out(round.half, self.block, 0, 0, to, part.len()) }
        }
        self.finish(round);
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

    /// Copies `bytes` of `buffer` to this rank's slot in a peer's segment.
    ///
    /// # Safety
    ///
    /// `bytes` lie in `buffer` and fit in a slot.
    unsafe fn push(&self, round: &Round, peer: u32, buffer: *const u8, bytes: &Range<usize>) {
        // SAFETY: `protocol`'s page proves that nobody reads the slot by now: this rank has begun the round.
        unsafe {
            let from = buffer.add(bytes.start);
            self.group.segment(peer).copy_in(round.half, self.block, self.rank, from, bytes.len());
        }
    }

    /// Copies `bytes` of `buffer` to the start of this rank's own staging.
    ///
    /// # Safety
    ///
    /// `bytes` lie in `buffer` and fit in the slots of a half.
    unsafe fn stage(&self, round: &Round, buffer: *const u8, bytes: &Range<usize>) {
        // SAFETY: as in `push`.
        unsafe { self.own().copy_in(round.half, self.block, 0, buffer.add(bytes.start), bytes.len()) }
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
        }
        let (group, rank, block, phase) = (self.group, self.rank, self.block, round.phase);
        Wait { group, rank, block, phase, region: round.region, flag }.for_all(self.peers(), &mut None)
    }

    /// Ends a round once all of it is read.
    pub(super) fn finish(&self, round: Round) {
        self.own().set_epoch(round.region, self.block, round.epoch);
    }

    /// Reduces `bytes` of all ranks to the output: this rank's from its input, which is in its cache, the others' from
    /// where `peer` says.
    ///
    /// # Safety
    ///
    /// `bytes` lie in input and output, and what `peer` gives is readable for as many, aligned to `T`.
    unsafe fn reduce<T: Element>(&self, bytes: &Range<usize>, peer: impl Fn(u32, &mut Held) -> *const u8) {
        let world = self.group.layout.world as usize;
        let mut held = Held::default();
        let mut sources = [std::ptr::null(); MAX_RANKS as usize];
        for rank in 0..self.group.layout.world {
            sources[rank as usize] =
                if rank == self.rank { self.input.wrapping_add(bytes.start) } else { peer(rank, &mut held) };
        }
        let to = self.output.wrapping_add(bytes.start);
        // SAFETY: the caller vouches for the ranges; input and output are the same or apart and segments are apart from
        // both; `isa` came from `Isa::widest`. Slots start on lines and parts on packs, so all is aligned.
        unsafe { reduce::reduce::<T>(self.isa, self.op, &sources[..world], to, bytes.len() / size_of::<T>()) }
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
