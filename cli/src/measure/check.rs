//! Whether a candidate's outputs are right.

use std::{ops::Range, sync::RwLock};

use anyhow::Result;
use peersum::ReduceOp;

use super::{
    barrier::Barrier,
    candidate::{Candidate, Way},
    case::Placement,
    datum::Datum,
    inputs::{self, Inputs, Pattern},
    rank::{Buffer, Rank, Round},
    run::{Fault, Job},
    verify::{Check, Expected, Kind, Wrong},
};

/// The seed of what stands in the send buffers while calls are timed.
pub(super) const TIMED_SEED: u64 = 99;

/// What the threads of all ranks share when they check.
pub(super) struct Checker<'a, T> {
    pub(super) job: &'a Job,
    pub(super) expected: &'a Parts<T>,
    pub(super) barrier: &'a Barrier<'a>,
}

impl<T: Datum> Checker<'_, T> {
    fn world(&self) -> usize {
        self.expected.world()
    }

    /// Where the last of the timed calls has its tensor.
    fn last_tensor(&self) -> Range<usize> {
        self.job.geometry.tensor(self.job.call.case.count, self.job.schedule.iterations - 1)
    }

    fn by_ranks<R: Rank<T>>(&self, rank: &R) -> bool {
        rank.checks_itself(self.job.call.case.bytes(), self.job.checked_by_ranks)
    }

    /// Whether the outputs of timed calls are looked at: not in place, where they have been reduced again and again.
    fn looks_at_timed(&self) -> bool {
        self.job.checks > 0 && self.job.call.placement == Placement::OutOfPlace
    }

    /// Writes the input of the last timed call, which the check knows: the checks before may have overwritten it.
    pub(super) fn write_timed<R: Rank<T>>(&self, rank: &mut R) -> Result<()> {
        if !self.looks_at_timed() {
            return Ok(());
        }
        let (tensor, number) = (self.last_tensor(), rank.rank());
        if self.by_ranks(rank) {
            return rank.generate(Buffer::Send, tensor, number, Round { number: TIMED_SEED, exact: true });
        }
        let inputs = Inputs::<T>::new(Pattern::Exact, TIMED_SEED, self.world());
        rank.write(Buffer::Send, tensor.start, &inputs.of_rank(number, tensor))
    }

    /// Poisons the output of the last timed call, where another candidate may have left the right bits.
    pub(super) fn poison_timed<R: Rank<T>>(&self, rank: &mut R) -> Result<()> {
        if self.looks_at_timed() { rank.poison(self.last_tensor()) } else { Ok(()) }
    }

    /// Looks at the output of the last timed call. The calls before it left the same bits there if they were right, but
    /// a call that reads a peer's data of the call before, or is overtaken by the next, shows here and nowhere else.
    pub(super) fn timed<R: Rank<T>>(&self, rank: &mut R, candidate: &Candidate) -> Result<Wrong> {
        let case = &self.job.call.case;
        if !self.looks_at_timed() || candidate.patterns(case.op, self.world()).is_empty() {
            return Ok(Wrong::default());
        }
        // All ranks have finished: a copy may wait behind another rank's kernel.
        self.barrier.wait()?;
        let check = Check { rank: rank.rank(), kind: Kind::Timed };
        let tensor = self.last_tensor();
        if self.by_ranks(rank) {
            return self.count_and_find(rank, check, tensor, Round { number: TIMED_SEED, exact: true });
        }
        let inputs = Inputs::<T>::new(Pattern::Exact, TIMED_SEED, self.world());
        self.expected.compute(rank.rank(), case.count, |part| {
            inputs.reduced(case.op, part.start + tensor.start..part.end + tensor.start)
        });
        self.barrier.wait()?;
        let output = rank.read(tensor)?;
        let wrong = self.expected.with(|expected| check.window(&output, 0, expected));
        self.barrier.wait()?;
        Ok(wrong)
    }

    /// Calls of their own, with fresh inputs and poisoned outputs.
    pub(super) fn fresh<R: Rank<T>>(&self, rank: &mut R, candidate: &Candidate) -> Result<Wrong> {
        let mut wrong = Wrong::default();
        let patterns = candidate.patterns(self.job.call.case.op, self.world());
        for iteration in 0..self.job.checks {
            if patterns.is_empty() {
                break;
            }
            if self.by_ranks(rank) {
                // One call: what the device makes takes all magnitudes anyway, where it may.
                let exact = !patterns.contains(&Pattern::Realistic);
                wrong.add(self.fresh_by_ranks(rank, candidate, iteration, exact)?);
                continue;
            }
            for &pattern in patterns {
                wrong.add(self.fresh_by_host(rank, candidate, iteration, pattern)?);
            }
        }
        Ok(wrong)
    }

    /// A number that no other check of this size has, in or out of place.
    fn seed(&self, iteration: usize) -> u64 {
        1000 + 2 * iteration as u64 + u64::from(self.job.call.placement == Placement::InPlace)
    }

    /// The buffer that holds the input.
    fn input(&self) -> Buffer {
        match self.job.call.placement {
            Placement::OutOfPlace => Buffer::Send,
            Placement::InPlace => Buffer::Receive,
        }
    }

    /// Whether the fault is to be put into the output of this call.
    fn is_spoilt(&self, rank: usize, candidate: &Candidate, iteration: usize) -> bool {
        iteration == 0
            && candidate.way == Way::Chosen
            && self.job.call.placement == Placement::OutOfPlace
            && self.job.fault == Some(Fault { rank, bytes: self.job.call.case.bytes() })
    }

    fn fresh_by_host<R: Rank<T>>(
        &self,
        rank: &mut R,
        candidate: &Candidate,
        iteration: usize,
        pattern: Pattern,
    ) -> Result<Wrong> {
        let (call, number) = (&self.job.call, rank.rank());
        let case = &call.case;
        let tensor = self.job.geometry.tensor(case.count, 0);
        let window = self.job.geometry.window(&tensor);
        let inputs = Inputs::<T>::new(pattern, self.seed(iteration), self.world());
        rank.poison(window.clone())?;
        rank.write(self.input(), tensor.start, &inputs.of_rank(number, 0..case.count))?;
        rank.prepare(call)?;
        self.expected.compute(number, case.count, |part| inputs.reduced(case.op, part));
        self.barrier.wait()?;
        rank.call(call)?;
        self.barrier.wait()?;
        let mut output = rank.read(window)?;
        if pattern == Pattern::Exact && self.is_spoilt(number, candidate, iteration) {
            flip_a_bit(&mut output.to_mut()[tensor.clone()]);
        }
        let check = Check { rank: number, kind: Kind::Fresh(pattern) };
        let wrong = self.expected.with(|expected| check.window(&output, tensor.start, expected));
        self.barrier.wait()?;
        Ok(wrong)
    }

    /// The same of a call whose elements are too many for the host: the ranks make their inputs where they are and
    /// count what is wrong there. The host looks at the guards, and at one element if any is wrong.
    fn fresh_by_ranks<R: Rank<T>>(
        &self,
        rank: &mut R,
        candidate: &Candidate,
        iteration: usize,
        exact: bool,
    ) -> Result<Wrong> {
        let (call, number) = (&self.job.call, rank.rank());
        let count = call.case.count;
        let tensor = self.job.geometry.tensor(count, 0);
        let window = self.job.geometry.window(&tensor);
        let round = Round { number: self.seed(iteration), exact };
        rank.poison(window.clone())?;
        rank.generate(self.input(), tensor.clone(), number, round)?;
        rank.prepare(call)?;
        self.barrier.wait()?;
        rank.call(call)?;
        // What follows waits for the device, on which other ranks' kernels may still wait for a peer.
        self.barrier.wait()?;
        if self.is_spoilt(number, candidate, iteration) {
            let middle = tensor.start + count / 2;
            let mut element = rank.read(middle..middle + 1)?.into_owned();
            flip_a_bit(&mut element);
            rank.write(Buffer::Receive, middle, &element)?;
        }
        let check = Check { rank: number, kind: Kind::Generated };
        let mut wrong = check.guard(&rank.read(window.start..tensor.start)?, -(tensor.start as i64));
        wrong.add(self.count_and_find(rank, check, tensor.clone(), round)?);
        wrong.add(check.guard(&rank.read(tensor.end..window.end)?, count as i64));
        Ok(wrong)
    }

    /// Counts the wrong elements of an output, and finds the first. If there is one, the output is lost.
    fn count_and_find<R: Rank<T>>(
        &self,
        rank: &mut R,
        check: Check,
        output: Range<usize>,
        round: Round,
    ) -> Result<Wrong> {
        let op: ReduceOp = self.job.call.case.op;
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
        let mut values = Vec::with_capacity(self.world());
        for of in 0..self.world() {
            rank.generate(Buffer::Receive, output.start..at + 1, of, round)?;
            values.push(rank.read(at..at + 1)?[0].to_f32());
        }
        let want = T::from_f32(inputs::reduce(op, values.into_iter(), self.world()));
        Ok(check.found(elements, right as i64, want, got))
    }
}

/// Negates the middle element, whose sign is its highest bit; a zero becomes −0, which no check takes for 0.
fn flip_a_bit<T: Datum>(output: &mut [T]) {
    let middle = output.len() / 2;
    if let Some(element) = output.get_mut(middle) {
        *element = T::from_f32(-element.to_f32());
    }
}

/// The right output, computed in as many parts as there are ranks in this process and read by all of them.
pub(super) struct Parts<T> {
    world: usize,
    parts: Vec<RwLock<Vec<T>>>,
}

impl<T: Datum> Parts<T> {
    pub(super) fn new(here: usize, world: usize) -> Self {
        Parts { world, parts: (0..here).map(|_| RwLock::default()).collect() }
    }

    pub(super) fn world(&self) -> usize {
        self.world
    }

    /// Computes a rank's part. All parts are there after a barrier, and until the next one nobody may call this.
    fn compute(&self, rank: usize, count: usize, part: impl FnOnce(Range<usize>) -> Vec<T>) {
        // Ranks that are threads are all here, and of those that are processes one is.
        let here = rank % self.parts.len();
        let share = count.div_ceil(self.parts.len());
        let start = (here * share).min(count);
        let values = part(start..(start + share).min(count));
        *self.parts[here].write().unwrap_or_else(|poison| poison.into_inner()) = values;
    }

    fn with<O>(&self, read: impl FnOnce(&Expected<'_, T>) -> O) -> O {
        let guards: Vec<_> =
            self.parts.iter().map(|part| part.read().unwrap_or_else(|poison| poison.into_inner())).collect();
        let parts: Vec<&[T]> = guards.iter().map(|guard| guard.as_slice()).collect();
        read(&Expected { parts: &parts })
    }
}
