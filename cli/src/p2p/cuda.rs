//! Measures pairs of GPUs.

use std::time::Instant;

use anyhow::{Result, ensure};

use super::links::{Cell, Compared, CopyLatency, Device, Engine, Links, Route, Way};
use crate::{
    measure::statistics::median,
    probe::{
        bench::{Ball, Bench},
        gpu::{Kernel, Memory, PATIENCE, Pinned, Rank, Value},
    },
};

/// Copies that follow each other in a measurement of bandwidth.
const COPIES: usize = 5;
/// And such measurements, of which the median counts.
const SAMPLES: usize = 3;
/// In a measurement of latency.
const SMALL_COPIES: usize = 100;
const SMALL_BYTES: usize = 16;
/// Through memory of the host's a kernel moves pieces of this size, of which two are on their way.
const PIECE: usize = 4 << 20;

const THREADS: u32 = 512;

/// GPUs, and two buffers on each.
pub(super) struct Cuda {
    bench: Bench,
    buffers: Vec<Buffers>,
    gate: Pinned,
    staging: Pinned,
    bytes: usize,
    seed: u64,
    /// Nothing is held back before what is timed.
    unheld: std::cell::Cell<bool>,
}

struct Buffers {
    from: Memory,
    to: Memory,
    /// What kernels say.
    result: Memory,
}

impl Cuda {
    pub(super) fn new(ranks: Vec<Rank>, bytes: usize) -> Result<Cuda> {
        ensure!(bytes >= 16 && bytes.is_multiple_of(16), "{bytes} bytes: it must be a multiple of 16");
        let buffers = ranks.iter().map(|rank| {
            let (from, to, result) = (rank.memory(bytes)?, rank.memory(bytes)?, rank.memory(64)?);
            rank.set(&from, 0)?;
            Ok(Buffers { from, to, result })
        });
        let buffers = buffers.collect::<Result<_>>()?;
        let (gate, staging) = (Pinned::new(&ranks[0], 64)?, Pinned::new(&ranks[0], 2 * 2 * PIECE)?);
        Ok(Cuda { bench: Bench::new(ranks)?, buffers, gate, staging, bytes, seed: 0, unheld: false.into() })
    }

    fn blocks(&self, rank: usize) -> u32 {
        2 * self.bench.ranks[rank].device.description.multiprocessors
    }

    /// What follows on the rank's stream begins when the gate is opened.
    fn hold(&self, rank: usize) -> Result<()> {
        if self.unheld.get() {
            return Ok(());
        }
        self.gate.set(0);
        let values = [Value::Long(self.gate.address()), Value::Long(PATIENCE.as_nanos() as u64)];
        // SAFETY: these are the kernel's parameters; the gate lives as long as this.
        unsafe { self.bench.ranks[rank].launch(Kernel::Hold, 1, 1, &values) }
    }

    /// Lets what was held since then begin. Where enqueuing waited for the end of the hold, nothing is held from here on:
    /// a driver that moves pieces through the host may wait for what is ahead.
    fn open(&self, since: Instant) {
        self.gate.set(1);
        if since.elapsed() > PATIENCE / 2 {
            self.unheld.set(true);
        }
    }

    /// Enqueues a move of all of `from`'s bytes to `to`, on the stream of who drives.
    fn enqueue(&self, route: Route, from: usize, to: usize) -> Result<()> {
        let driver = if route.way == Way::Read { to } else { from };
        let (source, target) = (&self.buffers[from].from, &self.buffers[to].to);
        match route.engine {
            // SAFETY: the buffers live as long as this, and all streams are waited for before it ends.
            Engine::CopyEngine => unsafe { self.bench.ranks[driver].copy(target, source, self.bytes) },
            Engine::Kernel => self.kernel(driver, target.address, source.address, self.bytes),
        }
    }

    fn kernel(&self, driver: usize, to: u64, from: u64, bytes: usize) -> Result<()> {
        let values = [Value::Long(to), Value::Long(from), Value::Long(bytes as u64 / 16)];
        // SAFETY: these are the kernel's parameters; both addresses have that many bytes, which the device reaches, as
        // the caller has seen to; the buffers live as long as this.
        unsafe { self.bench.ranks[driver].launch(Kernel::Copy, self.blocks(driver), THREADS, &values) }
    }

    /// Enqueues the same through memory of the host's: one kernel writes there, another reads from there, two pieces at a
    /// time. `half` tells two directions' pieces apart.
    fn through_host(&self, from: usize, to: usize, half: usize) -> Result<()> {
        let (source, target) = (self.buffers[from].from.address, self.buffers[to].to.address);
        let mut read = Vec::new();
        for (number, offset) in (0..self.bytes).step_by(PIECE).enumerate() {
            let bytes = PIECE.min(self.bytes - offset);
            let piece = self.staging.address() + ((2 * half + number % 2) * PIECE) as u64;
            if number >= 2 {
                self.bench.ranks[from].wait(&read[number - 2])?;
            }
            self.kernel(from, piece, source + offset as u64, bytes)?;
            let written = self.bench.ranks[from].event()?;
            self.bench.ranks[from].record(&written)?;
            self.bench.ranks[to].wait(&written)?;
            self.kernel(to, target + offset as u64, piece, bytes)?;
            let done = self.bench.ranks[to].event()?;
            self.bench.ranks[to].record(&done)?;
            read.push(done);
        }
        // The next move begins with the same two pieces.
        read.iter().rev().take(2).try_for_each(|done| self.bench.ranks[from].wait(done))
    }

    fn by_host(route: Route) -> bool {
        route.engine == Engine::Kernel && !route.p2p
    }

    fn synchronize(&self, ranks: &[usize]) -> Result<()> {
        ranks.iter().try_for_each(|&rank| self.bench.ranks[rank].synchronize())
    }

    /// Microseconds of the moves, `copies` times each, all at once. The first one's device has the clock.
    fn time(&self, route: Route, moves: &[(usize, usize)], copies: usize) -> Result<f64> {
        let streams = |&(from, to): &(usize, usize)| match route {
            route if Self::by_host(route) => vec![from, to],
            Route { way: Way::Read, .. } => vec![to],
            _ => vec![from],
        };
        let mut involved: Vec<_> = moves.iter().flat_map(streams).collect();
        let clock = involved[0];
        involved.sort_unstable();
        involved.dedup();
        let (start, end) = (self.bench.ranks[clock].event()?, self.bench.ranks[clock].event()?);
        let began = Instant::now();
        let enqueued = (|| {
            self.hold(clock)?;
            self.bench.ranks[clock].record(&start)?;
            for &rank in involved.iter().filter(|&&rank| rank != clock) {
                self.bench.ranks[rank].wait(&start)?;
            }
            for _ in 0..copies {
                for (half, &(from, to)) in moves.iter().enumerate() {
                    if Self::by_host(route) {
                        self.through_host(from, to, half)?
                    } else {
                        self.enqueue(route, from, to)?
                    }
                }
            }
            for &rank in involved.iter().filter(|&&rank| rank != clock) {
                let done = self.bench.ranks[rank].event()?;
                self.bench.ranks[rank].record(&done)?;
                self.bench.ranks[clock].wait(&done)?;
            }
            self.bench.ranks[clock].record(&end)
        })();
        self.open(began);
        let finished = self.synchronize(&involved);
        enqueued.and(finished)?;
        self.bench.ranks[clock].between(&start, &end)
    }

    fn bandwidth(&self, route: Route, moves: &[(usize, usize)]) -> Result<f64> {
        // Many pieces: a held stream takes only so much work.
        let copies = if Self::by_host(route) { 1 } else { COPIES };
        // Without a look at how long it takes: what is first, such as a mapping that is made, is not timed.
        self.time(route, moves, 1)?;
        let times = (0..SAMPLES).map(|_| self.time(route, moves, copies)).collect::<Result<Vec<_>>>()?;
        Ok((moves.len() * copies * self.bytes) as f64 / (median(times) * 1e3))
    }

    fn latency(&self, from: usize, to: usize) -> Result<CopyLatency> {
        let rank = &self.bench.ranks[from];
        let mut samples = Vec::new();
        for _ in 0..=SAMPLES {
            let (start, end) = (rank.event()?, rank.event()?);
            let (mut host_us, held) = (0.0, Instant::now());
            let enqueued = (|| {
                self.hold(from)?;
                rank.record(&start)?;
                let began = Instant::now();
                for _ in 0..SMALL_COPIES {
                    // SAFETY: as in `enqueue`.
                    unsafe { rank.copy(&self.buffers[to].to, &self.buffers[from].from, SMALL_BYTES) }?;
                }
                host_us = began.elapsed().as_secs_f64() * 1e6;
                rank.record(&end)
            })();
            self.open(held);
            let finished = rank.synchronize();
            enqueued.and(finished)?;
            let copies = SMALL_COPIES as f64;
            samples.push((rank.between(&start, &end)? / copies, host_us / copies));
        }
        // The first is the warm-up.
        let of = |part: fn(&(f64, f64)) -> f64| median(samples[1..].iter().map(part));
        Ok(CopyLatency { gpu_us: of(|sample| sample.0), host_us: of(|sample| sample.1) })
    }

    fn check(&mut self, route: Route, from: usize, to: usize) -> Result<Compared> {
        // What an earlier move left is of another seed.
        self.seed += 1;
        let words = (self.bytes / 8) as u64;
        let (source, target) = (&self.buffers[from], &self.buffers[to]);
        let fill = [Value::Long(source.from.address), Value::Long(words), Value::Long(self.seed)];
        // SAFETY: these are the kernel's parameters, of the rank's own memory.
        unsafe { self.bench.ranks[from].launch(Kernel::Fill, self.blocks(from), THREADS, &fill) }?;
        self.bench.ranks[to].set(&target.to, 0)?;
        // Both counts begin where nothing was found.
        self.bench.ranks[to].set(&target.result, 0)?;
        self.synchronize(&[from, to])?;
        if Self::by_host(route) { self.through_host(from, to, 0) } else { self.enqueue(route, from, to) }?;
        self.synchronize(&[from, to])?;
        let check = [
            Value::Long(target.to.address),
            Value::Long(words),
            Value::Long(self.seed),
            Value::Long(target.result.address),
        ];
        // SAFETY: as above.
        unsafe { self.bench.ranks[to].launch(Kernel::Check, self.blocks(to), THREADS, &check) }?;
        let [wrong, first] = self.bench.ranks[to].read(&target.result)?;
        Ok(Compared { words, wrong, first_wrong: (wrong > 0).then_some(words - first) })
    }
}

/// All causes, for a cell.
fn cell<T>(result: Result<T>) -> Cell<T> {
    result.map_err(|error| format!("{error:#}"))
}

impl Links for Cuda {
    fn devices(&self) -> Vec<Device> {
        let of = |rank: &Rank| {
            let description = &rank.device.description;
            Device {
                ordinal: description.ordinal,
                name: description.name.clone(),
                pci: description.pci.clone(),
                memory_gb_per_s: description.memory_gb_per_s,
            }
        };
        self.bench.ranks.iter().map(of).collect()
    }

    fn same_device(&self, a: usize, b: usize) -> bool {
        self.bench.ranks[a].same_device(&self.bench.ranks[b])
    }

    fn reaches(&mut self, from: usize, to: usize) -> Result<(), String> {
        match self.bench.ranks[from].device.can_reach(&self.bench.ranks[to].device) {
            Ok(true) => Ok(()),
            Ok(false) => Err("the driver grants no P2P".into()),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    fn let_reach(&mut self, on: bool) -> Cell<()> {
        self.unheld.set(false);
        for from in &self.bench.ranks {
            for to in self.bench.ranks.iter().filter(|to| !from.same_device(to)) {
                if cell(from.device.can_reach(&to.device))? {
                    cell(from.device.reach(&to.device, on))?;
                }
            }
        }
        Ok(())
    }

    fn one_way(&mut self, route: Route, from: usize, to: usize) -> Cell<f64> {
        cell(self.bandwidth(route, &[(from, to)]))
    }

    fn both_ways(&mut self, route: Route, a: usize, b: usize) -> Cell<f64> {
        cell(self.bandwidth(route, &[(a, b), (b, a)]))
    }

    fn copy_latency(&mut self, from: usize, to: usize) -> Cell<CopyLatency> {
        cell(self.latency(from, to))
    }

    fn store_latency(&mut self, from: usize, to: usize) -> Cell<f64> {
        cell(self.bench.push(Ball::Flag, from, to))
    }

    fn load_latency(&mut self, from: usize, to: usize) -> Cell<f64> {
        cell(self.bench.load(from, to))
    }

    fn compare(&mut self, route: Route, from: usize, to: usize) -> Cell<Compared> {
        cell(self.check(route, from, to))
    }
}
