//! All ranks time candidates in turns, then check them.

use std::{
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::Result;

use super::{
    barrier::{Barrier, Broken, Spinning},
    candidate::{Candidate, Home, Way},
    check::{Checker, Parts, TIMED_SEED},
    datum::Datum,
    geometry::Geometry,
    inputs::{Inputs, Pattern},
    rank::{Buffer, Call, Rank, Schedule, Timing},
    statistics,
    team::Team,
    verify::Wrong,
};

/// One bit flipped in the output of one rank, out of place, at one size: shows that the check sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) rank: usize,
    pub(crate) bytes: usize,
}

/// What is measured: a call, by each candidate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) call: Call,
    pub(crate) schedule: Schedule,
    /// Times that each candidate's turn comes.
    pub(crate) rounds: usize,
    pub(crate) geometry: Geometry,
    pub(crate) checks: usize,
    /// Whether ranks check where they are wherever they can.
    pub(crate) checked_by_ranks: bool,
    pub(crate) fault: Option<Fault>,
}

/// What came of a candidate.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// By rank: the medians of its rounds, and the samples of all of them.
    pub(crate) timings: Vec<Timing>,
    /// `None` where nothing was checked.
    pub(crate) wrong: Option<Wrong>,
}

/// Fills the buffers in these places, once: what the timed calls reduce is looked at in one tensor alone.
pub(crate) fn fill<T: Datum, R: Rank<T>>(
    ranks: &mut [R],
    team: &Team,
    geometry: &Geometry,
    homes: &[Home],
) -> Result<()> {
    let inputs = Inputs::<T>::new(Pattern::Exact, TIMED_SEED, team.world(ranks.len()));
    on_all(ranks, team, |rank, _| {
        let values = inputs.of_rank(rank.rank(), 0..geometry.len());
        for &home in homes {
            rank.take(&Candidate { way: Way::Chosen, home, plan: None })?;
            rank.write(Buffer::Send, 0, &values)?;
            rank.write(Buffer::Receive, 0, &values)?;
        }
        Ok(())
    })?;
    Ok(())
}

/// Times all candidates, round by round so that drift hits them alike, and checks each. By candidate: what came of it,
/// or why it could not be timed, which the ranks agree on. Of ranks that are processes, each learns all of it.
pub(crate) fn measure<T: Datum, R: Rank<T>>(
    ranks: &mut [R],
    team: &Team,
    job: &Job,
    candidates: &[Candidate],
) -> Result<Vec<Result<Outcome, String>>> {
    let world = team.world(ranks.len());
    let expected = Parts::new(ranks.len(), world);
    let refusals = Refusals::new(candidates.len());
    let by_rank = on_all(ranks, team, |rank, barrier| {
        let checker = Checker { job, expected: &expected, barrier };
        one_rank(rank, job, candidates, &checker, &refusals)
    })?;
    let by_rank = team.all_of(by_rank)?;
    let mut outcomes = vec![Outcome::default(); candidates.len()];
    for of_rank in by_rank {
        for (outcome, (timing, wrong)) in outcomes.iter_mut().zip(of_rank) {
            outcome.timings.push(timing);
            outcome.wrong.get_or_insert_default().add(wrong);
        }
    }
    Ok(outcomes
        .into_iter()
        .zip(candidates)
        .enumerate()
        .map(|(number, (mut outcome, candidate))| {
            if job.checks == 0 || candidate.patterns(job.call.case.op, world).is_empty() {
                outcome.wrong = None;
            }
            refusals.of(number).map_or(Ok(outcome), Err)
        })
        .collect())
}

/// One rank's part: by candidate, its times and what it found wrong.
fn one_rank<T: Datum, R: Rank<T>>(
    rank: &mut R,
    job: &Job,
    candidates: &[Candidate],
    checker: &Checker<'_, T>,
    refusals: &Refusals,
) -> Result<Vec<(Timing, Wrong)>> {
    let barrier = checker.barrier;
    let mut ready = Vec::new();
    for (number, candidate) in candidates.iter().enumerate() {
        let taken = rank.take(candidate).and_then(|()| checker.write_timed(rank));
        // They come together: NCCL's first call makes its connections.
        barrier.wait()?;
        let made = taken.and_then(|()| rank.ready(&job.call, &job.schedule));
        ready.push(made.map_err(|error| refusals.note(number, &error)).ok());
        barrier.wait()?;
    }
    refusals.agree(barrier)?;
    let mut rounds = vec![Vec::new(); candidates.len()];
    let mut wrongs = vec![Wrong::default(); candidates.len()];
    for round in 0..job.rounds {
        for number in turns(round, candidates.len()) {
            let (Some(ready), None) = (&ready[number], refusals.of(number)) else { continue };
            rank.take(&candidates[number])?;
            let last = round + 1 == job.rounds;
            if last {
                checker.poison_timed(rank)?;
            }
            rounds[number].push(rank.time(ready, &job.call, &job.schedule, barrier)?);
            if last {
                wrongs[number].add(checker.timed(rank, &candidates[number])?);
            }
        }
    }
    barrier.wait()?;
    // What they held is freed when no rank is in a call.
    drop(ready);
    barrier.wait()?;
    for (number, candidate) in candidates.iter().enumerate() {
        if refusals.of(number).is_none() {
            rank.take(candidate)?;
            wrongs[number].add(checker.fresh(rank, candidate)?);
        }
    }
    Ok(rounds.iter().map(|rounds| statistics::over_rounds(rounds)).zip(wrongs).collect())
}

/// The order of a round. It starts with another candidate each time, and every other one goes backwards, so that none
/// always follows the same one, nor is always the first.
fn turns(round: usize, candidates: usize) -> impl Iterator<Item = usize> {
    (0..candidates).map(move |turn| {
        let place = (turn + round / 2) % candidates;
        if round.is_multiple_of(2) { place } else { candidates - 1 - place }
    })
}

/// Why candidates can't be timed, as far as any rank has found out.
struct Refusals(Vec<Mutex<Option<String>>>);

impl Refusals {
    fn new(candidates: usize) -> Self {
        Refusals((0..candidates).map(|_| Mutex::default()).collect())
    }

    fn note(&self, candidate: usize, error: &anyhow::Error) {
        let mut reason = self.0[candidate].lock().unwrap_or_else(PoisonError::into_inner);
        reason.get_or_insert_with(|| format!("{error:#}"));
    }

    /// Learns what ranks in other processes have found out.
    fn agree(&self, barrier: &Barrier<'_>) -> Result<()> {
        let Barrier::Processes(peers) = barrier else { return Ok(()) };
        let own: Vec<_> = (0..self.0.len()).map(|candidate| self.of(candidate)).collect();
        let all = peers.all_gather(&own)?;
        for (candidate, reason) in self.0.iter().enumerate() {
            let first = all.iter().find_map(|of_rank| of_rank.get(candidate).cloned().flatten());
            *reason.lock().unwrap_or_else(PoisonError::into_inner) = first;
        }
        Ok(())
    }

    fn of(&self, candidate: usize) -> Option<String> {
        self.0[candidate].lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Runs a part on every rank of this process, each on its own thread. Of the errors, it returns one that is a cause.
pub(crate) fn on_all<T: Datum, R: Rank<T>, O: Send>(
    ranks: &mut [R],
    team: &Team,
    part: impl Fn(&mut R, &Barrier<'_>) -> Result<O> + Sync,
) -> Result<Vec<O>> {
    let barrier = match team {
        Team::Threads => Barrier::Threads(Spinning::new(ranks.len())),
        Team::Processes(peers) => Barrier::Processes(peers),
    };
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

#[cfg(test)]
mod tests {
    use std::{borrow::Cow, ops::Range};

    use anyhow::bail;
    use peersum::{Algorithm, Choice, DType, ReduceOp};

    use super::*;
    use crate::measure::{
        case::{Case, Mode, Placement},
        rank::Round,
    };

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
        /// Has none but the first candidate.
        Refuses,
        /// Does nothing in the timed calls of other candidates than the first.
        IdleInTurn,
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
        taken: Way,
        /// Whose timed calls came, in their order.
        timed: Vec<Way>,
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
        type Ready = ();

        fn rank(&self) -> usize {
            self.rank
        }

        fn take(&mut self, candidate: &Candidate) -> Result<()> {
            self.taken = candidate.way;
            Ok(())
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

        fn checks_itself(&self, _bytes: usize, _preferred: bool) -> bool {
            self.checks_itself
        }

        fn generate(&mut self, buffer: Buffer, tensor: Range<usize>, of: usize, round: Round) -> Result<()> {
            let values: Vec<_> = (0..tensor.len()).map(|index| generated(of, round.number, index)).collect();
            self.write(buffer, tensor.start, &values)
        }

        fn count_wrong(&mut self, tensor: Range<usize>, _op: ReduceOp, round: Round) -> Result<u64> {
            let output = self.receive[tensor].iter().enumerate();
            Ok(output.filter(|&(index, &got)| got.bits() != generated(self.rank, round.number, index).bits()).count()
                as u64)
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

        fn ready(&mut self, _call: &Call, _schedule: &Schedule) -> Result<()> {
            match (self.flaw, self.taken) {
                (Flaw::Refuses, Way::Forced(_)) => bail!("there is no such thing"),
                _ => Ok(()),
            }
        }

        fn time(&mut self, (): &(), call: &Call, schedule: &Schedule, barrier: &Barrier<'_>) -> Result<Timing> {
            if self.flaw == Flaw::Fails {
                bail!("rank {} has a reason", self.rank);
            }
            barrier.wait()?;
            self.timed.push(self.taken);
            if self.flaw == Flaw::IdleInTurn && self.taken != Way::Chosen {
                return Ok(Timing::default());
            }
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
        let mut ranks = copiers(flaws, checks_itself);
        let job = job(placement, checks, fault);
        // Twice: what a check leaves must not disturb the next.
        measure(&mut ranks, &Team::Threads, &job, &[CHOSEN])?;
        Ok(measure(&mut ranks, &Team::Threads, &job, &[CHOSEN])?.remove(0).expect("a candidate that is there"))
    }

    const CHOSEN: Candidate = Candidate { way: Way::Chosen, home: Home::Plain, plan: None };

    fn forced(blocks: u32) -> Candidate {
        let choice = Choice { algorithm: Algorithm::OneShot, blocks, threads: 1 };
        Candidate { way: Way::Forced(choice), ..CHOSEN }
    }

    fn copiers(flaws: &[Flaw], checks_itself: bool) -> Vec<Copier> {
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
                taken: Way::Chosen,
                timed: Vec::new(),
            })
            .collect();
        fill(&mut ranks, &Team::Threads, &geometry, &[Home::Plain]).expect("copiers can be written to");
        ranks
    }

    fn job(placement: Placement, checks: usize, fault: Option<Fault>) -> Job {
        let case = Case { count: COUNT, dtype: DType::F32, op: ReduceOp::Sum };
        Job {
            call: Call { case, placement, mode: Mode::Blocking },
            schedule: Schedule { iterations: 11, warmup: 0, replays: 1, per_iteration: false },
            rounds: 1,
            geometry: Geometry::new::<f32>(1000, 1),
            checks,
            checked_by_ranks: false,
            fault,
        }
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

    #[test]
    fn candidates_take_turns_round_by_round() {
        let orders: Vec<Vec<_>> = (0..6).map(|round| turns(round, 3).collect()).collect();
        assert_eq!(orders, [[0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2], [2, 0, 1], [0, 2, 1]]);
        let mut ranks = copiers(&[Flaw::None], false);
        let candidates = [CHOSEN, forced(1), forced(2)];
        measure(&mut ranks, &Team::Threads, &Job { rounds: 6, ..job(Placement::OutOfPlace, 1, None) }, &candidates)
            .unwrap();
        let timed: Vec<_> = orders.concat().into_iter().map(|number| candidates[number].way).collect();
        assert_eq!(ranks[0].timed, timed);
    }

    #[test]
    fn a_candidate_that_can_not_be_timed_says_why_and_the_others_are() {
        for flaws in [[Flaw::None, Flaw::Refuses], [Flaw::Refuses, Flaw::None]] {
            let mut ranks = copiers(&flaws, true);
            let job = Job { rounds: 2, ..job(Placement::InPlace, 0, None) };
            let outcomes = measure(&mut ranks, &Team::Threads, &job, &[CHOSEN, forced(1), CHOSEN]).unwrap();
            let refused: Vec<_> = outcomes.iter().map(|outcome| outcome.as_ref().err().cloned()).collect();
            assert_eq!(refused, [None, Some("there is no such thing".to_owned()), None]);
            assert!(ranks.iter().all(|rank| rank.timed == [Way::Chosen; 4]));
        }
    }

    #[test]
    fn right_bits_that_another_candidate_left_are_not_taken_for_this_one_s() {
        let mut ranks = copiers(&[Flaw::IdleInTurn], false);
        let outcomes =
            measure(&mut ranks, &Team::Threads, &job(Placement::OutOfPlace, 1, None), &[CHOSEN, forced(1)]).unwrap();
        let wrong: Vec<_> = outcomes.into_iter().map(|outcome| outcome.unwrap().wrong.unwrap().elements).collect();
        assert_eq!(wrong, [0, COUNT as u64]);
    }
}
