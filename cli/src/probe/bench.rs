//! Hops between ranks, each measured by a kernel of one thread.

use anyhow::{Result, ensure};

use super::gpu::{Kernel, Memory, PATIENCE, Pinned, Rank, Targets, Value};
use crate::measure::statistics::median;

/// Measurements, of which the median counts.
const SAMPLES: usize = 5;
/// Loads, stores, rounds of each.
const HOPS: u32 = 1000;
/// The words that loads go through are so far apart that no two share a line.
const STRIDE_WORDS: u64 = 32;
const CHAIN_WORDS: u64 = 64;
const WORDS_BYTES: usize = (CHAIN_WORDS * STRIDE_WORDS) as usize * size_of::<u64>();

/// Of the empty kernel.
const LAUNCHES: u32 = 200;
const REPLAYS: u32 = 10;

/// Of what a rank sends to each other one, and how often in a row.
const SENT_BYTES: usize = 16 << 20;
const SENT: usize = 10;
const THREADS: u32 = 512;

/// Ranks, with a few words on each.
pub(crate) struct Bench {
    pub(crate) ranks: Vec<Rank>,
    /// Flags, or a chain, that peers reach.
    words: Vec<Memory>,
    /// What kernels say.
    results: Vec<Memory>,
}

/// Which ping-pong.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ball {
    /// A word of 4 bytes.
    Flag,
    /// A packet of 16.
    Packet,
}

/// Of a store, in µs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fence {
    pub(crate) store_us: f64,
    /// With a fence behind each.
    pub(crate) fenced_us: f64,
}

impl Bench {
    pub(crate) fn new(ranks: Vec<Rank>) -> Result<Bench> {
        let words = ranks.iter().map(|rank| rank.memory(WORDS_BYTES)).collect::<Result<_>>()?;
        let results = ranks.iter().map(|rank| rank.memory(64)).collect::<Result<_>>()?;
        Ok(Bench { ranks, words, results })
    }

    /// Has the ranks reach each other, or says which can't.
    pub(crate) fn connect(&self) -> Result<()> {
        for (from, rank) in self.ranks.iter().enumerate() {
            for (to, peer) in self.ranks.iter().enumerate().filter(|(_, peer)| !rank.same_device(peer)) {
                ensure!(
                    rank.device.can_reach(&peer.device)?,
                    "rank {from} (device {}) can't reach the memory of rank {to} (device {}): `peersum doctor` may know why",
                    rank.device.description.ordinal,
                    peer.device.description.ordinal
                );
                rank.device.reach(&peer.device, true)?;
            }
        }
        Ok(())
    }

    /// µs from a store in the peer's memory until its poll sees it.
    pub(crate) fn push(&self, ball: Ball, from: usize, to: usize) -> Result<f64> {
        let kernel = match ball {
            Ball::Flag => Kernel::PingFlag,
            Ball::Packet => Kernel::PingPacket,
        };
        self.samples(|| {
            for rank in [from, to] {
                self.ranks[rank].set(&self.words[rank], 0)?;
            }
            for (first, mine, theirs) in [(0, to, from), (1, from, to)] {
                let values = [
                    Value::Long(self.words[mine].address),
                    Value::Long(self.words[theirs].address),
                    Value::Word(HOPS),
                    Value::Word(first),
                    Value::Long(PATIENCE.as_nanos() as u64),
                    Value::Long(self.results[mine].address),
                ];
                // SAFETY: these are the kernel's parameters. Both devices reach the words, as the caller has seen to; all
                // of it lives as long as this, and both streams are waited for.
                unsafe { self.ranks[mine].launch(kernel, 1, 1, &values) }?;
            }
            let read = self.ranks[from].read(&self.results[from]);
            self.ranks[to].synchronize()?;
            let [nanoseconds, rounds] = read?;
            ensure!(rounds == u64::from(HOPS) + 1, "the peer was not seen: {rounds} of {HOPS} rounds in {PATIENCE:?}");
            Ok(nanoseconds as f64 / 2e3)
        })
    }

    /// µs of a load from the peer's memory, there and back.
    pub(crate) fn load(&self, from: usize, to: usize) -> Result<f64> {
        let chain = [Value::Long(self.words[to].address), Value::Long(CHAIN_WORDS), Value::Long(STRIDE_WORDS)];
        // SAFETY: these are the kernel's parameters; the memory has that many words that far apart.
        unsafe { self.ranks[to].launch(Kernel::Chain, 1, CHAIN_WORDS as u32, &chain) }?;
        self.ranks[to].synchronize()?;
        self.samples(|| {
            let values =
                [Value::Long(self.words[to].address), Value::Word(HOPS), Value::Long(self.results[from].address)];
            // SAFETY: as above; the chain's words are places in it.
            unsafe { self.ranks[from].launch(Kernel::Chase, 1, 1, &values) }?;
            let [nanoseconds] = self.ranks[from].read(&self.results[from])?;
            Ok(nanoseconds as f64 / 1e3)
        })
    }

    /// µs of a store in the peer's memory, alone and with a fence behind it.
    pub(crate) fn fence(&self, from: usize, to: usize) -> Result<Fence> {
        let of = |fence: u32| {
            self.samples(|| {
                let values = [
                    Value::Long(self.words[to].address),
                    Value::Word(HOPS),
                    Value::Word(fence),
                    Value::Long(self.results[from].address),
                ];
                // SAFETY: these are the kernel's parameters; it stores in the first 16 lines of the words.
                unsafe { self.ranks[from].launch(Kernel::Fence, 1, 1, &values) }?;
                let [nanoseconds] = self.ranks[from].read(&self.results[from])?;
                Ok(nanoseconds as f64 / 1e3)
            })
        };
        Ok(Fence { store_us: of(0)?, fenced_us: of(1)? })
    }

    /// µs of an atomic addition in the peer's memory, there and back.
    pub(crate) fn atomic(&self, from: usize, to: usize) -> Result<f64> {
        self.samples(|| {
            self.ranks[to].set(&self.words[to], 0)?;
            let values =
                [Value::Long(self.words[to].address), Value::Word(HOPS), Value::Long(self.results[from].address)];
            // SAFETY: these are the kernel's parameters; the sum stays far below 2^31, so it is the first word that is added to.
            unsafe { self.ranks[from].launch(Kernel::Atomic, 1, 1, &values) }?;
            let [nanoseconds, sum] = self.ranks[from].read(&self.results[from])?;
            ensure!(sum == u64::from(2 * HOPS - 1), "{} additions to a peer's memory came to {}", 2 * HOPS, sum + 1);
            Ok(nanoseconds as f64 / 1e3)
        })
    }

    /// µs of an empty kernel in a graph.
    pub(crate) fn empty(&self, rank: usize, blocks: u32, threads: u32) -> Result<f64> {
        let samples = (0..SAMPLES).map(|_| self.ranks[rank].empty_in_graph(blocks, threads, LAUNCHES, REPLAYS));
        Ok(median(samples.collect::<Result<Vec<_>>>()?))
    }

    /// GB/s that each rank sends, while all send to all others.
    pub(crate) fn send(&self) -> Result<Vec<f64>> {
        let count = self.ranks.len();
        let sources = self.ranks.iter().map(|rank| rank.memory(SENT_BYTES)).collect::<Result<Vec<_>>>()?;
        let inboxes =
            self.ranks.iter().map(|rank| rank.memory((count - 1) * SENT_BYTES)).collect::<Result<Vec<_>>>()?;
        for (rank, source) in self.ranks.iter().zip(&sources) {
            rank.set(source, 0)?;
        }
        let gate = Pinned::new(&self.ranks[0], 64)?;
        let once = || -> Result<Vec<f64>> {
            gate.set(0);
            let mut events = Vec::new();
            let enqueued = self.ranks.iter().enumerate().try_for_each(|(from, rank)| {
                let hold = [Value::Long(gate.address()), Value::Long(PATIENCE.as_nanos() as u64)];
                // SAFETY: these are the kernel's parameters; the gate is kept until all streams were waited for.
                unsafe { rank.launch(Kernel::Hold, 1, 1, &hold) }?;
                // The next one first, so that not all begin with the same.
                let place = |step: usize| {
                    let to = (from + step) % count;
                    // Each sender has a part of the inbox.
                    inboxes[to].address + ((count - 1 - step) * SENT_BYTES) as u64
                };
                let targets: Vec<_> = (1..count).map(place).collect();
                let share = self.ranks.iter().filter(|other| rank.same_device(other)).count() as u32;
                let blocks = (2 * rank.device.description.multiprocessors / share).max(1);
                let (start, end) = (rank.event()?, rank.event()?);
                rank.record(&start)?;
                for _ in 0..SENT {
                    let values = [
                        Value::Targets(Box::new(Targets::new(&targets)?)),
                        Value::Long(sources[from].address),
                        Value::Long(SENT_BYTES as u64 / 16),
                    ];
                    // SAFETY: these are the kernel's parameters; each target is a part of an inbox, as long as the source,
                    // which the device reaches.
                    unsafe { rank.launch(Kernel::Spread, blocks, THREADS, &values) }?;
                }
                rank.record(&end)?;
                events.push((start, end));
                anyhow::Ok(())
            });
            gate.set(1);
            let finished = self.ranks.iter().try_for_each(Rank::synchronize);
            enqueued.and(finished)?;
            let sent = ((count - 1) * SENT * SENT_BYTES) as f64;
            self.ranks
                .iter()
                .zip(&events)
                .map(|(rank, (start, end))| Ok(sent / (rank.between(start, end)? * 1e3)))
                .collect()
        };
        once()?;
        let samples = (0..SAMPLES).map(|_| once()).collect::<Result<Vec<_>>>()?;
        Ok((0..count).map(|rank| median(samples.iter().map(|sample| sample[rank]))).collect())
    }

    /// The median of what is measured, which is for all hops, for one.
    fn samples(&self, mut measure: impl FnMut() -> Result<f64>) -> Result<f64> {
        let samples = (0..SAMPLES).map(|_| measure()).collect::<Result<Vec<_>>>()?;
        Ok(median(samples) / f64::from(HOPS))
    }
}
