//! The ranks of the host backend: threads or processes, and buffers in ordinary memory.

use std::{borrow::Cow, ops::Range, time::Instant};

use anyhow::{Context, Result, ensure};
use peersum::{Algorithm, DType, Error, Options, Plan, host::Communicator};

use super::{
    barrier::Barrier,
    candidate::{Candidate, Home, Way},
    case::Placement,
    cores,
    datum::Datum,
    geometry::{ALIGN_BYTES, Geometry},
    group::{Device, Group},
    machine,
    rank::{Buffer, Call, Rank, Schedule, Timing, of_rank},
    team::Peers,
};

/// All ranks of this process.
pub(crate) struct HostGroup {
    /// By rank: the one whose calls go as the library chooses, and one for each algorithm that can be forced, each of a
    /// group of its own.
    communicators: Vec<Vec<(Option<Algorithm>, Communicator)>>,
    /// Why others can't.
    refused: Vec<(Algorithm, Error)>,
    /// Of all ranks.
    devices: Vec<Device>,
}

impl HostGroup {
    /// A group of threads in which these algorithms, as far as they can run here, can be forced.
    pub(crate) fn new(world: usize, options: &Options, algorithms: &[Algorithm]) -> Result<Self> {
        let cores = cores::for_ranks(world);
        let devices = (0..world).map(|rank| device(rank, cores.as_ref().map(|cores| cores[rank])));
        HostGroup::of(devices.collect(), options, algorithms, |options, _| Communicator::local(world, options))
    }

    /// This process's rank of such a group of processes.
    pub(crate) fn join(peers: &Peers, options: &Options, algorithms: &[Algorithm]) -> Result<Self> {
        let core = cores::for_process(peers.rank(), peers.world());
        let devices = peers.all_gather(&device(peers.rank(), core))?;
        HostGroup::of(devices, options, algorithms, |options, name| {
            Ok(vec![Communicator::meet(&peers.meeting(name), options)?])
        })
    }

    fn of(
        devices: Vec<Device>,
        options: &Options,
        algorithms: &[Algorithm],
        make: impl Fn(&Options, &str) -> peersum::Result<Vec<Communicator>>,
    ) -> Result<Self> {
        let chosen = make(options, "chosen")?;
        let mut communicators: Vec<_> = chosen.into_iter().map(|communicator| vec![(None, communicator)]).collect();
        let mut refused = Vec::new();
        for &algorithm in algorithms {
            match make(&options.clone().algorithm(algorithm), algorithm.name()) {
                Ok(forced) => communicators
                    .iter_mut()
                    .zip(forced)
                    .for_each(|(of_rank, communicator)| of_rank.push((Some(algorithm), communicator))),
                Err(error @ Error::AlgorithmUnavailable { .. }) => refused.push((algorithm, error)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(HostGroup { communicators, refused, devices })
    }
}

/// What a rank of this process runs on.
fn device(rank: usize, core: Option<usize>) -> Device {
    Device { ordinal: rank, pci: None, core, name: machine::cpu_model(), process_id: std::process::id() }
}

/// Which communicator of a rank does calls this way.
fn index(communicators: &[(Option<Algorithm>, Communicator)], way: Way) -> Option<usize> {
    let wanted = match way {
        Way::Chosen => None,
        Way::Forced(choice) => Some(choice.algorithm),
        Way::Empty { .. } | Way::NcclAlone => return None,
    };
    communicators.iter().position(|(algorithm, _)| *algorithm == wanted)
}

impl Group for HostGroup {
    type Rank<'a, T: Datum> = HostRank<'a, T>;

    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn plan(
        &mut self,
        way: Way,
        _placement: peersum::Placement,
        count: usize,
        dtype: DType,
    ) -> peersum::Result<Option<Plan>> {
        let of_rank = &self.communicators[0];
        match (index(of_rank, way), way) {
            (Some(index), _) => of_rank[index].1.plan(count, dtype),
            (None, Way::Forced(choice)) => {
                let refused = self.refused.iter().find(|(algorithm, _)| *algorithm == choice.algorithm);
                Err(refused.map_or_else(
                    || Error::AlgorithmUnavailable {
                        algorithm: choice.algorithm,
                        reason: "the group was made without it".into(),
                    },
                    |(_, error)| error.clone(),
                ))
            }
            (None, Way::Chosen | Way::Empty { .. } | Way::NcclAlone) => Ok(None),
        }
    }

    fn explain(&self, _placement: peersum::Placement, _count: usize, _dtype: DType) -> Option<String> {
        None
    }

    fn nccl(&self) -> Result<String, String> {
        Err("NCCL is for GPUs".into())
    }

    fn nccl_window(&self) -> Result<(), String> {
        self.nccl().map(drop)
    }

    fn ranks<T: Datum>(&mut self, geometry: &Geometry, _homes: &[Home]) -> Result<Vec<HostRank<'_, T>>> {
        // Two buffers a rank, and while they are checked the inputs of each and, in each process, the right output.
        let (world, here) = (self.devices.len(), self.communicators.len());
        let bytes = (3 * world + world / here) * geometry.len() * size_of::<T>();
        if let Some(available) = machine::available_memory() {
            ensure!(
                bytes as u64 <= available / 10 * 9,
                "the buffers of {world} ranks need {bytes} bytes, and {available} are available: lower -e, or -g",
            );
        }
        Ok(self
            .communicators
            .iter_mut()
            .map(|communicators| {
                let core = self.devices[communicators[0].1.rank()].core;
                HostRank::new(communicators, core, geometry)
            })
            .collect())
    }
}

/// One rank.
pub(crate) struct HostRank<'a, T> {
    communicators: &'a mut [(Option<Algorithm>, Communicator)],
    /// Whose turn it is.
    taken: usize,
    core: Option<usize>,
    send: Aligned<T>,
    receive: Aligned<T>,
    geometry: Geometry,
}

impl<'a, T: Datum> HostRank<'a, T> {
    fn new(
        communicators: &'a mut [(Option<Algorithm>, Communicator)],
        core: Option<usize>,
        geometry: &Geometry,
    ) -> Self {
        HostRank {
            communicators,
            taken: 0,
            core,
            send: Aligned::new(geometry.len()),
            receive: Aligned::new(geometry.len()),
            geometry: *geometry,
        }
    }

    /// One call at the place of the `number`th.
    fn all_reduce(&mut self, call: &Call, number: usize) -> Result<()> {
        let tensor = self.geometry.tensor(call.case.count, number);
        let output = &mut self.receive.elements()[tensor.clone()];
        let communicator = &mut self.communicators[self.taken].1;
        match call.placement {
            Placement::OutOfPlace => communicator.all_reduce(&self.send.elements()[tensor], output, call.case.op),
            Placement::InPlace => communicator.all_reduce_in_place(output, call.case.op),
        }
        .map_err(of_rank(communicator.rank()))
    }
}

impl<T: Datum> Rank<T> for HostRank<'_, T> {
    type Ready = ();

    fn rank(&self) -> usize {
        self.communicators[0].1.rank()
    }

    fn take(&mut self, candidate: &Candidate) -> Result<()> {
        self.taken = index(self.communicators, candidate.way).context("the group was made without this candidate")?;
        Ok(())
    }

    fn settle(&self) {
        if let Some(core) = self.core {
            cores::keep_to(core);
        }
    }

    fn write(&mut self, buffer: Buffer, first: usize, values: &[T]) -> Result<()> {
        let elements = match buffer {
            Buffer::Send => self.send.elements(),
            Buffer::Receive => self.receive.elements(),
        };
        elements[first..first + values.len()].copy_from_slice(values);
        Ok(())
    }

    fn poison(&mut self, range: Range<usize>) -> Result<()> {
        self.receive.elements()[range].fill(T::POISON);
        Ok(())
    }

    fn read(&mut self, range: Range<usize>) -> Result<Cow<'_, [T]>> {
        Ok(Cow::Borrowed(&self.receive.elements()[range]))
    }

    fn prepare(&mut self, _call: &Call) -> Result<()> {
        Ok(())
    }

    fn call(&mut self, call: &Call) -> Result<()> {
        self.all_reduce(call, 0)
    }

    fn ready(&mut self, _call: &Call, _schedule: &Schedule) -> Result<()> {
        Ok(())
    }

    fn time(&mut self, (): &(), call: &Call, schedule: &Schedule, barrier: &Barrier<'_>) -> Result<Timing> {
        barrier.wait()?;
        for number in 0..schedule.warmup {
            self.all_reduce(call, number)?;
        }
        let mut samples_us = Vec::with_capacity(schedule.calls());
        barrier.wait()?;
        let start = Instant::now();
        let mut last = start;
        for number in 0..schedule.calls() {
            self.all_reduce(call, number)?;
            let now = Instant::now();
            samples_us.push((now - last).as_secs_f64() * 1e6);
            last = now;
        }
        let time_us = (last - start).as_secs_f64() * 1e6 / schedule.calls() as f64;
        Ok(Timing { time_us, wall_us: time_us, samples_us })
    }
}

/// A buffer that starts at a multiple of [`ALIGN_BYTES`], as memory of a GPU does.
struct Aligned<T> {
    memory: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Datum> Aligned<T> {
    fn new(len: usize) -> Self {
        let slack = ALIGN_BYTES / size_of::<T>();
        let memory = vec![T::POISON; len + slack];
        let start = memory.as_ptr().align_offset(ALIGN_BYTES);
        // The offset may be unknowable, by its contract; what follows is then unaligned, but right.
        Aligned { memory, start: if start <= slack { start } else { 0 }, len }
    }

    fn elements(&mut self) -> &mut [T] {
        &mut self.memory[self.start..self.start + self.len]
    }
}
