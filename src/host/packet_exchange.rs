//! One block's share of one call by LL packets. `packets` has the proof.

use std::{mem::MaybeUninit, ops::Range};

use super::{
    exchange::{Exchange, Round},
    packets::{PAYLOAD_BYTES, Region},
    priors::MAX_RANKS,
    reduce::{Stores, Target},
    sync::{AtomicU64, Instant, Ordering, fence},
    wait::Wait,
};
use crate::{
    Algorithm, Element, Phase, Result,
    protocol::{call::Flag, split},
};

/// Bytes of all ranks together that are unpacked and reduced at once: they stay in the nearest cache. The stacks of the
/// models are small.
const SCRATCH_BYTES: usize = if cfg!(any(loom, shuttle)) { 512 } else { 8 << 10 };
/// Where each rank's part of them starts.
const SCRATCH_ALIGN: usize = 64;
/// The most bytes of a rank at once. The models want many pieces from few packets.
const PIECE_BYTES: usize = if cfg!(any(loom, shuttle)) { PAYLOAD_BYTES as usize } else { SCRATCH_BYTES };

/// What packets are unpacked to.
#[repr(align(64))]
struct Scratch(MaybeUninit<[u8; SCRATCH_BYTES]>);

/// A rank's wait for the packets of a round, with one deadline for all of them.
struct Arrivals<'a> {
    wait: Wait<'a>,
    started: Option<Instant>,
}

impl<'a> Exchange<'a> {
    /// Runs all rounds of a call by packets.
    ///
    /// # Safety
    ///
    /// As for [`Exchange::run`].
    pub(super) unsafe fn run_packets<T: Element>(&self) -> Result<()> {
        let packets = (self.bytes as u64).div_ceil(PAYLOAD_BYTES);
        let share = split::split(packets, self.plan.blocks.into(), self.block.into());
        for chunk in split::chunks(share, self.plan.chunk_bytes / PAYLOAD_BYTES) {
            // SAFETY: the caller's promises are handed on; the chunk is at most what the algorithm's slots hold.
            unsafe {
                match self.plan.algorithm {
                    Algorithm::OneShotLl => self.one_shot_ll::<T>(chunk)?,
                    _ => self.two_shot_ll::<T>(chunk)?,
                }
            }
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Exchange::run`]; the chunk fits in a slot.
    unsafe fn one_shot_ll<T: Element>(&self, chunk: Range<u64>) -> Result<()> {
        let bytes = self.payload(&chunk);
        let round = self.begin(Region::Packets, Phase::Exchange);
        for peer in self.peers() {
            self.announce(&round, peer);
            // SAFETY: the bytes lie in the input and fit in a slot.
            unsafe { self.send(&round, peer, 0, self.input, &bytes) }
        }
        #[cfg(any(loom, shuttle))]
        self.forget_to_conclude(&round, &chunk);
        let mut arrivals = self.arrivals(&round)?;
        // SAFETY: the bytes lie in input and output, and every peer sends as many.
        unsafe { self.reduce_arriving::<T>(&round, &mut arrivals, &bytes, |_| {})? }
        self.conclude(round);
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Exchange::run`]; a part of the chunk fits in a slot.
    unsafe fn two_shot_ll<T: Element>(&self, chunk: Range<u64>) -> Result<()> {
        let own = self.payload(&self.part(&chunk, self.rank));
        let scatter = self.begin(Region::Packets, Phase::ReduceScatter);
        for peer in self.peers() {
            self.announce(&scatter, peer);
            // SAFETY: the part lies in the input and fits in a slot.
            unsafe { self.send(&scatter, peer, 0, self.input, &self.payload(&self.part(&chunk, peer))) }
        }
        let gather = self.round_after(scatter.epoch, Region::Packets, Phase::AllGather);
        #[cfg(any(loom, shuttle))]
        if self.group.fault == super::group::Fault::EarlySecondRound {
            self.peers().for_each(|peer| self.announce(&gather, peer));
        }
        let mut arrivals = self.arrivals(&scatter)?;
        // With every peer's header the second round may begin, while packets of the first are still under way.
        for peer in self.peers() {
            self.announce(&gather, peer);
        }
        // SAFETY: the part lies in input and output, and every peer sends as much of it. In place, this overwrites this
        // rank's own part alone, and every other part of the input has been sent.
        unsafe {
            self.reduce_arriving::<T>(&scatter, &mut arrivals, &own, |piece| {
                // What has been read of the first round comes before what tells so.
                fence(Ordering::Release);
                for peer in self.peers() {
                    self.send(&gather, peer, piece.start - own.start, self.output, &piece);
                }
            })?;
        }
        let mut arrivals = self.arrivals(&gather)?;
        for peer in self.peers() {
            let part = self.payload(&self.part(&chunk, peer));
            // SAFETY: the part lies in the output.
            unsafe { self.receive(&gather, &mut arrivals, peer, 0, self.output.add(part.start), part.len())? }
        }
        self.conclude(gather);
        Ok(())
    }

    /// Tells a peer which call the round belongs to: the first that is stored of a round.
    fn announce(&self, round: &Round, peer: u32) {
        let segment = self.group.segment(peer);
        if self.group.sweeps(round.epoch) {
            let slot = segment.packets(round.half, self.block, self.rank);
            slot.iter().for_each(|packet| packet.store(0, Ordering::Relaxed));
        }
        let flag = Flag { epoch: round.epoch, hash: self.hash };
        let header = segment.signal(Region::Packets, round.half, self.block, self.rank);
        header.store(flag.word(), Ordering::Release);
        segment.wake(self.block);
    }

    /// Waits until every peer has announced the round.
    fn arrivals(&self, round: &Round) -> Result<Arrivals<'a>> {
        let flag = Flag { epoch: round.epoch, hash: self.hash };
        let mut arrivals = Arrivals { wait: self.wait(round, flag), started: None };
        arrivals.wait.for_all(self.peers(), &mut arrivals.started)?;
        Ok(arrivals)
    }

    /// Stores `bytes` of `buffer` as packets into this rank's slot at a peer, from byte `start` of its payload on.
    ///
    /// # Safety
    ///
    /// `bytes` lie in `buffer` and fit in the slot; `start` is a multiple of a packet's payload.
    unsafe fn send(&self, round: &Round, peer: u32, start: usize, buffer: *const u8, bytes: &Range<usize>) {
        let slot = self.group.segment(peer).packets(round.half, self.block, self.rank);
        let slot = &slot[start / PAYLOAD_BYTES as usize..];
        let (whole, rest) = (bytes.len() / PAYLOAD_BYTES as usize, bytes.len() % PAYLOAD_BYTES as usize);
        let (filled, left) = slot.split_at(whole);
        // SAFETY: the caller vouches for the bytes.
        let from = unsafe { buffer.add(bytes.start) };
        for (index, packet) in filled.iter().enumerate() {
            // SAFETY: this packet's payload lies in the bytes.
            let payload = unsafe { from.cast::<u32>().add(index).read_unaligned() };
            self.store(packet, payload, round.epoch);
        }
        if rest > 0 {
            let mut payload = [0u8; PAYLOAD_BYTES as usize];
            // SAFETY: what is left of the bytes is less than a payload.
            unsafe { payload.as_mut_ptr().copy_from_nonoverlapping(from.add(whole * PAYLOAD_BYTES as usize), rest) }
            self.store(&left[0], u32::from_ne_bytes(payload), round.epoch);
        }
    }

    #[inline(always)]
    fn store(&self, packet: &AtomicU64, payload: u32, epoch: u32) {
        #[cfg(any(loom, shuttle))]
        if self.group.fault == super::group::Fault::EpochAhead {
            let before = packet.load(Ordering::Relaxed);
            packet.store(before >> 32 << 32 | u64::from(epoch), Ordering::Relaxed);
        }
        packet.store(u64::from(payload) << 32 | u64::from(epoch), Ordering::Relaxed);
    }

    /// Waits for packets of a peer, from byte `start` of its slot's payload on, and unpacks `bytes` bytes of them.
    ///
    /// # Safety
    ///
    /// `to` is writable for `bytes` bytes; `start` is a multiple of a packet's payload.
    #[inline]
    unsafe fn receive(
        &self,
        round: &Round,
        arrivals: &mut Arrivals<'_>,
        peer: u32,
        start: usize,
        to: *mut u8,
        bytes: usize,
    ) -> Result<()> {
        let slot = self.own().packets(round.half, self.block, peer);
        let slot = &slot[start / PAYLOAD_BYTES as usize..];
        let (whole, rest) = (bytes / PAYLOAD_BYTES as usize, bytes % PAYLOAD_BYTES as usize);
        let mut come = 0;
        loop {
            // SAFETY: the caller vouches for `to`.
            come += unsafe { unpack(&slot[come..whole], round.epoch, to.cast::<u32>().add(come)) };
            if come == whole {
                break;
            }
            arrivals.until(peer, &slot[come], round.epoch)?;
        }
        if rest > 0 {
            arrivals.until(peer, &slot[whole], round.epoch)?;
            let payload = ((slot[whole].load(Ordering::Relaxed) >> 32) as u32).to_ne_bytes();
            // SAFETY: the caller vouches for `to`, and less than a payload is left of it.
            unsafe { to.add(whole * PAYLOAD_BYTES as usize).copy_from_nonoverlapping(payload.as_ptr(), rest) }
        }
        Ok(())
    }

    /// Reduces `bytes` of all ranks to the output piece by piece, as the peers' packets come. Calls `done` with each
    /// piece that is written.
    ///
    /// # Safety
    ///
    /// `bytes` lie in input and output, and every peer sends as many in this round, from the start of its slot on.
    unsafe fn reduce_arriving<T: Element>(
        &self,
        round: &Round,
        arrivals: &mut Arrivals<'_>,
        bytes: &Range<usize>,
        mut done: impl FnMut(Range<usize>),
    ) -> Result<()> {
        let world = self.group.layout.world as usize;
        let most = (SCRATCH_BYTES / world / SCRATCH_ALIGN * SCRATCH_ALIGN).min(PIECE_BYTES);
        let mut scratch = Scratch(MaybeUninit::uninit());
        let scratch = scratch.0.as_mut_ptr().cast::<u8>();
        let mut sources = [std::ptr::null(); MAX_RANKS as usize];
        for start in bytes.clone().step_by(most) {
            let piece = start..(start + most).min(bytes.end);
            for peer in self.peers() {
                // SAFETY: the scratch has `most` bytes for each rank.
                unsafe {
                    let to = scratch.add(peer as usize * most);
                    self.receive(round, arrivals, peer, start - bytes.start, to, piece.len())?;
                    sources[peer as usize] = to.cast_const();
                }
            }
            // SAFETY: the caller vouches for the range; input and output are the same or apart and the scratch is apart
            // from both, with room for as much and just written; `isa` came from `Isa::widest`. Pieces start on
            // packets, so all is aligned.
            unsafe {
                sources[self.rank as usize] = self.input.add(start);
                let count = piece.len() / size_of::<T>();
                let output = Target { to: self.output.add(start), stores: Stores::Cached };
                self.fold::<T>(&sources[..world], &[output], count);
            }
            done(piece);
        }
        Ok(())
    }

    /// Ends a chunk: all that was waited for is read.
    fn conclude(&self, round: Round) {
        fence(Ordering::Acquire);
        self.finish(round);
    }

    /// The bytes of some packets of the message, whose last may be partial.
    fn payload(&self, packets: &Range<u64>) -> Range<usize> {
        let byte = |packet: u64| (packet * PAYLOAD_BYTES).min(self.bytes as u64) as usize;
        byte(packets.start)..byte(packets.end)
    }

    /// A fault: stores the next chunk of a one-shot before this one is read.
    #[cfg(any(loom, shuttle))]
    fn forget_to_conclude(&self, round: &Round, chunk: &Range<u64>) {
        let next = chunk.end..chunk.end + (chunk.end - chunk.start);
        let bytes = self.payload(&next);
        if self.group.fault != super::group::Fault::NoConclude || bytes.is_empty() {
            return;
        }
        let round = self.round_after(round.epoch, Region::Packets, Phase::Exchange);
        for peer in self.peers() {
            self.announce(&round, peer);
            // SAFETY: as in `one_shot_ll`, of the next chunk.
            unsafe { self.send(&round, peer, 0, self.input, &bytes) }
        }
    }
}

impl Arrivals<'_> {
    #[inline]
    fn until(&mut self, peer: u32, packet: &AtomicU64, epoch: u32) -> Result<()> {
        self.wait.until(peer, &mut self.started, || Ok(packet.load(Ordering::Relaxed) as u32 == epoch))
    }
}

/// Unpacks the packets that have come, up to the first that has not. Returns how many.
///
/// # Safety
///
/// `to` is writable for as many payloads as there are packets.
#[inline(always)]
unsafe fn unpack(packets: &[AtomicU64], epoch: u32, to: *mut u32) -> usize {
    for (index, packet) in packets.iter().enumerate() {
        let word = packet.load(Ordering::Relaxed);
        if word as u32 != epoch {
            return index;
        }
        // SAFETY: the caller vouches for the place.
        unsafe { to.add(index).write_unaligned((word >> 32) as u32) }
    }
    packets.len()
}
