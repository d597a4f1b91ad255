//! One half of a row: all ranks time a call, then check it.

use std::{borrow::Cow, ops::Range, sync::RwLock, thread};

use anyhow::{Result, anyhow, bail};
use peersum::ReduceOp;

use super::{
    barrier::{Barrier, Broken},
    case::{Case, Mode, Placement},
    datum::Datum,
    geometry::Geometry,
    inputs::{self, Inputs, Pattern},
    verify::{Check, Expected, Kind, Wrong},
};

/// Which of a rank's two buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Buffer {
    Send,
    Receive,
}

/// A rank of either backend, with its two buffers of `T`. Each is driven by a thread of its own.
///
/// All but `time` and `call` are done when they return, and no call of any rank runs meanwhile.
pub(crate) trait Rank<T: Datum>: Send {
    fn rank(&self) -> usize;

    /// Comes first on every thread that drives the rank.
    fn settle(&self) {}

    /// Overwrites the elements of a buffer from `first` on.
    fn write(&mut self, buffer: Buffer, first: usize, values: &[T]) -> Result<()>;

    /// Sets a part of the receive buffer to [`Datum::POISON`].
    fn poison(&mut self, range: Range<usize>) -> Result<()>;

    /// A part of the receive buffer.
    fn read(&mut self, range: Range<usize>) -> Result<Cow<'_, [T]>>;

    /// Whether calls with so many bytes a rank are checked where the ranks' memory is, by [`Rank::generate`] and
    /// [`Rank::count_wrong`]: the same on every rank.
    fn checks_itself(&self, _bytes: usize) -> bool {
        false
    }

    /// Writes what rank `of` has in a tensor in that round, a function of both and of the element's index in the tensor.
    fn generate(&mut self, _buffer: Buffer, _tensor: Range<usize>, _of: usize, _round: u64) -> Result<()> {
        bail!("the inputs of this backend are the command's own")
    }

    /// How many elements of a tensor in the receive buffer differ from what the reduction of that round gives.
    fn count_wrong(&mut self, _tensor: Range<usize>, _op: ReduceOp, _round: u64) -> Result<u64> {
        bail!("the outputs of this backend are checked by the command")
    }

    /// Makes one call ready that is issued as the mode does. The call itself is [`Rank::call`].
    fn prepare(&mut self, call: &Call) -> Result<()>;

    /// Does the call that was prepared; all ranks come here together. Returns when the output is written.
    fn call(&mut self, call: &Call) -> Result<()>;

    /// Warms up and times. Waits at the barrier before what is timed starts.
    fn time(&mut self, call: &Call, schedule: &Schedule, barrier: &Barrier) -> Result<Timing>;
}

/// What is called, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) case: Case,
    pub(crate) placement: Placement,
    pub(crate) mode: Mode,
}

/// How often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    /// Calls in a row; in one graph, where there is one.
    pub(crate) iterations: usize,
    /// Calls before the timed ones.
    pub(crate) warmup: usize,
    /// Launches of the graph; 1 where there is none.
    pub(crate) replays: usize,
    /// Whether each of the queued calls gets an event of its own.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) per_iteration: bool,
}

impl Schedule {
    /// Calls that are timed: what the total is divided by.
    pub(crate) fn calls(&self) -> usize {
        self.iterations * self.replays
    }
}

/// One rank's times of one call, in microseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timing {
    /// By the mode's clock: the total over the calls.
    pub(crate) time_us: f64,
    /// By the host's clock, from the first launch to the end of the last call: the total over the calls.
    pub(crate) wall_us: f64,
    /// Of each replay (over the calls in it), or of each call; none where they were not timed one by one.
    pub(crate) samples_us: Vec<f64>,
}

/// One bit flipped in the output of one rank, out of place, at one size: shows that the check sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) rank: usize,
    pub(crate) bytes: usize,
}

/// What a half of a row is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) call: Call,
    pub(crate) schedule: Schedule,
    pub(crate) geometry: Geometry,
    pub(crate) checks: usize,
    pub(crate) fault: Option<Fault>,
}

/// What came of it.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// By rank.
    pub(crate) timings: Vec<Timing>,
    /// `None` where nothing was checked.
    pub(crate) wrong: Option<Wrong>,
}

/// The seed of what stands in the send buffers while calls are timed.
const TIMED_SEED: u64 = 99;

/// Fills the buffers, once: what the timed calls reduce is looked at in one tensor alone, see [`prepare_timed`].
pub(crate) fn fill<T: Datum, R: Rank<T>>(ranks: &mut [R], geometry: &Geometry) -> Result<()> {
    let inputs = Inputs::<T>::new(Pattern::Exact, TIMED_SEED, ranks.len());
    on_all(ranks, |rank, _| {
        let values = inputs.of_rank(rank.rank(), 0..geometry.len());
        rank.write(Buffer::Send, 0, &values)?;
        rank.write(Buffer::Receive, 0, &values)
    })?;
    Ok(())
}

/// Times and checks.
pub(crate) fn measure<T: Datum, R: Rank<T>>(ranks: &mut [R], job: &Job) -> Result<Outcome> {
    let expected = Parts::new(ranks.len());
    let outcomes = on_all(ranks, |rank, barrier| {
        if job.checks > 0 && job.call.placement == Placement::OutOfPlace {
            prepare_timed(rank, job, expected.world())?;
        }
        let timing = rank.time(&job.call, &job.schedule, barrier)?;
        barrier.wait()?;
        let wrong = match job.checks {
            0 => Wrong::default(),
            _ if rank.checks_itself(job.call.case.bytes()) => check_itself(rank, job, expected.world(), barrier)?,
            _ => check_all(rank, job, &expected, barrier)?,
        };
        Ok((timing, wrong))
    })?;
    let mut wrong = Wrong::default();
    let mut timings = Vec::new();
    for (timing, of_rank) in outcomes {
        timings.push(timing);
        wrong.add(of_rank);
    }
    Ok(Outcome { timings, wrong: (job.checks > 0).then_some(wrong) })
}

/// Runs a part on every rank, each on its own thread. Of the errors, it returns one that is a cause.
fn on_all<T: Datum, R: Rank<T>, O: Send>(
    ranks: &mut [R],
    part: impl Fn(&mut R, &Barrier) -> Result<O> + Sync,
) -> Result<Vec<O>> {
    let barrier = Barrier::new(ranks.len());
    let (barrier, part) = (&barrier, &part);
    let results: Vec<Result<O>> = thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter_mut()
            .map(|rank| {
                scope.spawn(move || {
                    barrier.hold(|| {
                        rank.settle();
                        part(rank, barrier)
                    })
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let mut outputs = Vec::new();
    let mut broken = None;
    for result in results {
        match result {
            Ok(output) => outputs.push(output),
            Err(error) if error.is::<Broken>() => broken = Some(error),
            Err(error) => return Err(error),
        }
    }
    broken.map_or(Ok(outputs), Err)
}

/// Where the last of the timed calls has its tensor.
fn last_tensor(job: &Job) -> Range<usize> {
    job.geometry.tensor(job.call.case.count, job.schedule.iterations - 1)
}

/// Writes the input of the last timed call, which the check knows: the checks before may have overwritten it.
fn prepare_timed<T: Datum, R: Rank<T>>(rank: &mut R, job: &Job, world: usize) -> Result<()> {
    let (tensor, number) = (last_tensor(job), rank.rank());
    if rank.checks_itself(job.call.case.bytes()) {
        return rank.generate(Buffer::Send, tensor, number, TIMED_SEED);
    }
    let inputs = Inputs::<T>::new(Pattern::Exact, TIMED_SEED, world);
    rank.write(Buffer::Send, tensor.start, &inputs.of_rank(number, tensor))
}

fn check_all<T: Datum, R: Rank<T>>(rank: &mut R, job: &Job, expected: &Parts<T>, barrier: &Barrier) -> Result<Wrong> {
    let mut wrong = Wrong::default();
    // In place, the timed calls have reduced their own outputs again and again.
    if job.call.placement == Placement::OutOfPlace {
        wrong.add(check_timed(rank, job, expected, barrier)?);
    }
    for iteration in 0..job.checks {
        for pattern in Pattern::ALL {
            wrong.add(check_fresh(rank, job, pattern, iteration, expected, barrier)?);
        }
    }
    Ok(wrong)
}

/// Looks at the output of the last timed call. The calls before it left the same bits there if they were right, but a
/// call that reads a peer's data of the call before, or is overtaken by the next, shows here and nowhere else.
fn check_timed<T: Datum, R: Rank<T>>(rank: &mut R, job: &Job, expected: &Parts<T>, barrier: &Barrier) -> Result<Wrong> {
    let case = &job.call.case;
    let tensor = last_tensor(job);
    let inputs = Inputs::<T>::new(Pattern::Exact, TIMED_SEED, expected.world());
    expected.compute(rank.rank(), case.count, |part| {
        inputs.reduced(case.op, part.start + tensor.start..part.end + tensor.start)
    });
    barrier.wait()?;
    let check = Check { rank: rank.rank(), kind: Kind::Timed };
    let output = rank.read(tensor)?;
    let wrong = expected.with(|expected| check.window(&output, 0, expected));
    barrier.wait()?;
    Ok(wrong)
}

/// Fresh inputs, poisoned outputs, one call.
fn check_fresh<T: Datum, R: Rank<T>>(
    rank: &mut R,
    job: &Job,
    pattern: Pattern,
    iteration: usize,
    expected: &Parts<T>,
    barrier: &Barrier,
) -> Result<Wrong> {
    let case = &job.call.case;
    let tensor = job.geometry.tensor(case.count, 0);
    let window = job.geometry.window(&tensor);
    // A seed that no other check of this size has, in or out of place.
    let seed = 1000 + 2 * iteration as u64 + u64::from(job.call.placement == Placement::InPlace);
    let inputs = Inputs::<T>::new(pattern, seed, expected.world());
    let buffer = match job.call.placement {
        Placement::OutOfPlace => Buffer::Send,
        Placement::InPlace => Buffer::Receive,
    };
    rank.poison(window.clone())?;
    rank.write(buffer, tensor.start, &inputs.of_rank(rank.rank(), 0..case.count))?;
    rank.prepare(&job.call)?;
    expected.compute(rank.rank(), case.count, |part| inputs.reduced(case.op, part));
    barrier.wait()?;
    rank.call(&job.call)?;
    barrier.wait()?;
    let number = rank.rank();
    let mut output = rank.read(window)?;
    let first_of_all = iteration == 0 && pattern == Pattern::Exact && job.call.placement == Placement::OutOfPlace;
    if first_of_all && job.fault == Some(Fault { rank: number, bytes: case.bytes() }) {
        flip_a_bit(&mut output.to_mut()[tensor.clone()]);
    }
    let check = Check { rank: number, kind: Kind::Fresh(pattern) };
    let wrong = expected.with(|expected| check.window(&output, tensor.start, expected));
    barrier.wait()?;
    Ok(wrong)
}

/// The same checks of a call whose elements are too many for the host: the ranks make their inputs where they are and
/// count what is wrong there. The host looks at the guards, and at one element if any is wrong.
fn check_itself<T: Datum, R: Rank<T>>(rank: &mut R, job: &Job, world: usize, barrier: &Barrier) -> Result<Wrong> {
    let (case, number) = (&job.call.case, rank.rank());
    let mut wrong = Wrong::default();
    if job.call.placement == Placement::OutOfPlace {
        let check = Check { rank: number, kind: Kind::Timed };
        wrong.add(count_and_find(rank, check, last_tensor(job), case.op, TIMED_SEED, world)?);
    }
    let tensor = job.geometry.tensor(case.count, 0);
    let window = job.geometry.window(&tensor);
    let buffer = match job.call.placement {
        Placement::OutOfPlace => Buffer::Send,
        Placement::InPlace => Buffer::Receive,
    };
    for iteration in 0..job.checks {
        // A round that no other check of this size has, in or out of place.
        let round = 1000 + 2 * iteration as u64 + u64::from(job.call.placement == Placement::InPlace);
        rank.poison(window.clone())?;
        rank.generate(buffer, tensor.clone(), number, round)?;
        rank.prepare(&job.call)?;
        barrier.wait()?;
        rank.call(&job.call)?;
        // What follows waits for the device, on which other ranks' kernels may still wait for a peer.
        barrier.wait()?;
        let out_of_place = job.call.placement == Placement::OutOfPlace;
        if iteration == 0 && out_of_place && job.fault == Some(Fault { rank: number, bytes: case.bytes() }) {
            let middle = tensor.start + case.count / 2;
            let mut element = rank.read(middle..middle + 1)?.into_owned();
            flip_a_bit(&mut element);
            rank.write(Buffer::Receive, middle, &element)?;
        }
        let check = Check { rank: number, kind: Kind::Generated };
        wrong.add(check.guard(&rank.read(window.start..tensor.start)?, -(tensor.start as i64)));
        wrong.add(count_and_find(rank, check, tensor.clone(), case.op, round, world)?);
        wrong.add(check.guard(&rank.read(tensor.end..window.end)?, case.count as i64));
    }
    Ok(wrong)
}

/// Counts the wrong elements of an output, and finds the first. If there is one, the output is lost.
fn count_and_find<T: Datum, R: Rank<T>>(
    rank: &mut R,
    check: Check,
    output: Range<usize>,
    op: ReduceOp,
    round: u64,
    world: usize,
) -> Result<Wrong> {
    let elements = rank.count_wrong(output.clone(), op, round)?;
    if elements == 0 {
        return Ok(Wrong::default());
    }
    // Of the first `right` elements none is wrong, of the first `spoilt` at least one.
    let (mut right, mut spoilt) = (0, output.len());
    while spoilt - right > 1 {
        let middle = right + (spoilt - right) / 2;
        match rank.count_wrong(output.start..output.start + middle, op, round)? {
            0 => right = middle,
            _ => spoilt = middle,
        }
    }
    let at = output.start + right;
    let got = rank.read(at..at + 1)?[0];
    // What each rank had there is known to the generator alone.
    let mut values = Vec::with_capacity(world);
    for of in 0..world {
        rank.generate(Buffer::Receive, output.start..at + 1, of, round)?;
        values.push(rank.read(at..at + 1)?[0].to_f32());
    }
    let want = T::from_f32(inputs::reduce(op, values.into_iter(), world));
    Ok(check.found(elements, right as i64, want, got))
}

/// Negates the middle element, whose sign is its highest bit; a zero becomes −0, which no check takes for 0.
fn flip_a_bit<T: Datum>(output: &mut [T]) {
    let middle = output.len() / 2;
    if let Some(element) = output.get_mut(middle) {
        *element = T::from_f32(-element.to_f32());
    }
}

/// The right output, computed in as many parts as there are ranks and read by all of them.
struct Parts<T> {
    parts: Vec<RwLock<Vec<T>>>,
}

impl<T: Datum> Parts<T> {
    fn new(world: usize) -> Self {
        Parts { parts: (0..world).map(|_| RwLock::default()).collect() }
    }

    fn world(&self) -> usize {
        self.parts.len()
    }

    /// Computes a rank's part. All parts are there after a barrier, and until the next one nobody may call this.
    fn compute(&self, rank: usize, count: usize, part: impl FnOnce(Range<usize>) -> Vec<T>) {
        let share = count.div_ceil(self.world());
        let start = (rank * share).min(count);
        let values = part(start..(start + share).min(count));
        *self.parts[rank].write().unwrap_or_else(|poison| poison.into_inner()) = values;
    }

    fn with<O>(&self, read: impl FnOnce(&Expected<'_, T>) -> O) -> O {
        let guards: Vec<_> =
            self.parts.iter().map(|part| part.read().unwrap_or_else(|poison| poison.into_inner())).collect();
        let parts: Vec<&[T]> = guards.iter().map(|guard| guard.as_slice()).collect();
        read(&Expected { parts: &parts })
    }
}

/// A library's error, with the rank that had it, unless the error itself names ranks.
pub(crate) fn of_rank(rank: usize) -> impl Fn(peersum::Error) -> anyhow::Error {
    move |error| {
        let message = error.to_string();
        if message.starts_with("rank ") { anyhow!(message) } else { anyhow!("rank {rank}: {message}") }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;
    use peersum::{DType, ReduceOp};

    use super::*;

    /// What a rank does wrong.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Flaw {
        None,
        /// Does not write the output of a call that is checked.
        NoOutput,
        /// Writes the element after the output of a call that is checked.
        WritesBeyond,
        /// Spoils the last of the timed calls, and no other.
        LastTimed,
        /// Fails before it comes to the barrier.
        Fails,
        /// Spoils two elements of a call that is checked, this one first.
        Spoils(usize),
    }

    /// A rank that copies: right in a group of one.
    struct Copier {
        rank: usize,
        flaw: Flaw,
        checks_itself: bool,
        geometry: Geometry,
        send: Vec<f32>,
        receive: Vec<f32>,
    }

    impl Copier {
        fn copy(&mut self, call: &Call, number: usize) -> Range<usize> {
            let tensor = self.geometry.tensor(call.case.count, number);
            if call.placement == Placement::OutOfPlace {
                self.receive[tensor.clone()].copy_from_slice(&self.send[tensor.clone()]);
            }
            tensor
        }
    }

    impl Rank<f32> for Copier {
        fn rank(&self) -> usize {
            self.rank
        }

        fn write(&mut self, buffer: Buffer, first: usize, values: &[f32]) -> Result<()> {
            let buffer = if buffer == Buffer::Send { &mut self.send } else { &mut self.receive };
            buffer[first..first + values.len()].copy_from_slice(values);
            Ok(())
        }

        fn poison(&mut self, range: Range<usize>) -> Result<()> {
            self.receive[range].fill(f32::POISON);
            Ok(())
        }

        fn read(&mut self, range: Range<usize>) -> Result<Cow<'_, [f32]>> {
            Ok(Cow::Borrowed(&self.receive[range]))
        }

        fn checks_itself(&self, _bytes: usize) -> bool {
            self.checks_itself
        }

        fn generate(&mut self, buffer: Buffer, tensor: Range<usize>, of: usize, round: u64) -> Result<()> {
            let values: Vec<_> = (0..tensor.len()).map(|index| generated(of, round, index)).collect();
            self.write(buffer, tensor.start, &values)
        }

        fn count_wrong(&mut self, tensor: Range<usize>, _op: ReduceOp, round: u64) -> Result<u64> {
            let output = self.receive[tensor].iter().enumerate();
            Ok(output.filter(|&(index, &got)| got.bits() != generated(self.rank, round, index).bits()).count() as u64)
        }

        fn prepare(&mut self, _call: &Call) -> Result<()> {
            Ok(())
        }

        fn call(&mut self, call: &Call) -> Result<()> {
            if self.flaw == Flaw::NoOutput {
                return Ok(());
            }
            let tensor = self.copy(call, 0);
            match self.flaw {
                Flaw::WritesBeyond => self.receive[tensor.end] = 1.0,
                Flaw::Spoils(first) => {
                    self.receive[tensor.start + first] = -7.0;
                    self.receive[tensor.end - 1] = f32::NAN;
                }
                _ => {}
            }
            Ok(())
        }

        fn time(&mut self, call: &Call, schedule: &Schedule, barrier: &Barrier) -> Result<Timing> {
            if self.flaw == Flaw::Fails {
                bail!("rank {} has a reason", self.rank);
            }
            barrier.wait()?;
            for number in 0..schedule.calls() {
                let tensor = self.copy(call, number);
                if self.flaw == Flaw::LastTimed && number + 1 == schedule.calls() {
                    self.receive[tensor.end - 1] = f32::POISON;
                }
            }
            Ok(Timing::default())
        }
    }

    const COUNT: usize = 100;

    fn generated(rank: usize, round: u64, index: usize) -> f32 {
        (rank as f32 + 1.0) * (round as f32 + 2.0) + index as f32
    }

    fn run(flaws: &[Flaw], placement: Placement, checks: usize, fault: Option<Fault>) -> Result<Outcome> {
        run_checked(flaws, placement, checks, fault, false)
    }

    fn run_checked(
        flaws: &[Flaw],
        placement: Placement,
        checks: usize,
        fault: Option<Fault>,
        checks_itself: bool,
    ) -> Result<Outcome> {
        let geometry = Geometry::new::<f32>(1000, 1);
        let mut ranks: Vec<_> = flaws
            .iter()
            .enumerate()
            .map(|(rank, &flaw)| Copier {
                rank,
                flaw,
                checks_itself,
                geometry,
                send: vec![0.0; geometry.len()],
                receive: vec![0.0; geometry.len()],
            })
            .collect();
        fill(&mut ranks, &geometry)?;
        let case = Case { count: COUNT, dtype: DType::F32, op: ReduceOp::Sum };
        let job = Job {
            call: Call { case, placement, mode: Mode::Blocking },
            schedule: Schedule { iterations: 11, warmup: 0, replays: 1, per_iteration: false },
            geometry,
            checks,
            fault,
        };
        // Twice: what a check leaves must not disturb the next.
        measure(&mut ranks, &job)?;
        measure(&mut ranks, &job)
    }

    fn wrong(flaw: Flaw, placement: Placement, checks: usize) -> u64 {
        run(&[flaw], placement, checks, None).unwrap().wrong.unwrap().elements
    }

    #[test]
    fn a_right_rank_has_no_wrong_element() {
        assert_eq!(wrong(Flaw::None, Placement::OutOfPlace, 3), 0);
        assert_eq!(wrong(Flaw::None, Placement::InPlace, 3), 0);
    }

    #[test]
    fn an_output_that_is_not_written_is_wrong_in_every_element() {
        // Two patterns a check.
        assert_eq!(wrong(Flaw::NoOutput, Placement::OutOfPlace, 1), 2 * COUNT as u64);
        assert_eq!(wrong(Flaw::NoOutput, Placement::OutOfPlace, 3), 6 * COUNT as u64);
    }

    #[test]
    fn a_write_beyond_the_output_is_wrong() {
        for placement in [Placement::OutOfPlace, Placement::InPlace] {
            let outcome = run(&[Flaw::WritesBeyond], placement, 1, None).unwrap().wrong.unwrap();
            assert_eq!((outcome.elements, outcome.first.unwrap().index), (2, COUNT as i64));
        }
    }

    #[test]
    fn the_last_timed_call_is_looked_at() {
        let outcome = run(&[Flaw::LastTimed], Placement::OutOfPlace, 1, None).unwrap().wrong.unwrap();
        assert_eq!((outcome.elements, outcome.first.unwrap().index), (1, COUNT as i64 - 1));
    }

    #[test]
    fn the_fault_is_in_its_rank_size_and_placement_alone() {
        let count = |placement, rank, bytes| {
            run(&[Flaw::None], placement, 2, Some(Fault { rank, bytes })).unwrap().wrong.unwrap().elements
        };
        assert_eq!(count(Placement::OutOfPlace, 0, COUNT * 4), 1);
        assert_eq!(count(Placement::InPlace, 0, COUNT * 4), 0);
        assert_eq!(count(Placement::OutOfPlace, 1, COUNT * 4), 0);
        assert_eq!(count(Placement::OutOfPlace, 0, COUNT), 0);
    }

    #[test]
    fn ranks_that_check_themselves_find_the_same() {
        let run = |flaw, placement, checks| run_checked(&[flaw], placement, checks, None, true).unwrap().wrong.unwrap();
        for placement in [Placement::OutOfPlace, Placement::InPlace] {
            assert_eq!(run(Flaw::None, placement, 3), Wrong::default());
            let beyond = run(Flaw::WritesBeyond, placement, 2);
            assert_eq!((beyond.elements, beyond.first.unwrap().index), (2, COUNT as i64));
            for first in [0, 1, 49, 50, 51, COUNT - 2] {
                let wrong = run(Flaw::Spoils(first), placement, 1);
                let told = wrong.first.unwrap();
                let round = 1000 + u64::from(placement == Placement::InPlace);
                assert_eq!((wrong.elements, told.index), (2, first as i64));
                assert_eq!((told.expected, told.got), (generated(0, round, first).to_string(), "-7".to_owned()));
            }
        }
        assert_eq!(run(Flaw::NoOutput, Placement::OutOfPlace, 3).elements, 3 * COUNT as u64);
        let last = run(Flaw::LastTimed, Placement::OutOfPlace, 1);
        assert_eq!((last.elements, last.first.unwrap().index), (1, COUNT as i64 - 1));
        let count = |placement| {
            let fault = Some(Fault { rank: 0, bytes: COUNT * 4 });
            let wrong = run_checked(&[Flaw::None], placement, 2, fault, true).unwrap().wrong.unwrap();
            (wrong.elements, wrong.first.map(|first| first.index))
        };
        assert_eq!(count(Placement::OutOfPlace), (1, Some(COUNT as i64 / 2)));
        assert_eq!(count(Placement::InPlace), (0, None));
    }

    #[test]
    fn without_checks_nothing_is_known() {
        assert_eq!(run(&[Flaw::NoOutput], Placement::OutOfPlace, 0, None).unwrap().wrong, None);
    }

    #[test]
    fn the_rank_that_failed_is_told_and_the_others_do_not_wait_for_it() {
        for flaws in [[Flaw::None, Flaw::Fails], [Flaw::Fails, Flaw::None]] {
            let error = run(&flaws, Placement::OutOfPlace, 1, None).unwrap_err().to_string();
            assert!(error.ends_with("has a reason"), "{error}");
        }
    }
}
