//! The self-test of a group of processes: calls of every algorithm through their mappings, before anybody gets it.
//! [`self_test`](crate::self_test) has what they carry, and why.

use super::{
    communicator::Communicator,
    packets::{PAYLOAD_BYTES, Region},
    record,
    sync::Ordering,
};
use crate::{
    Algorithm, DType, Error, Options, Plan, ReduceOp, Result,
    meeting::Seat,
    protocol::{
        call::{self, Flag},
        split::PACK_BYTES,
    },
    self_test::{Digits, ODD, Parts, Report, Stop, Trial, verdict},
};

/// Runs the test; every rank of the meeting does, and all return the same.
///
/// Afterwards the segments are as new: each rank clears its own once all have told that their last call is over, so no
/// store to it is still to come, and none begins a call before all have cleared theirs. The seat's messages order that
/// as they do the first use of fresh memory.
pub(super) fn run(communicator: &mut Communicator, options: &Options, seat: &mut Seat) -> Result<()> {
    let trials = trials(communicator)?;
    let report = run_trials(communicator, &trials, options.first_epoch);
    let reports = seat.all_gather(report)?;
    if let Some(error) = verdict(&trials, &reports) {
        return Err(error);
    }
    communicator.group().segment(communicator.rank() as u32).renew(options.first_epoch);
    seat.all_gather(())?;
    Ok(())
}

/// Every algorithm with one element, some, and so many that each line of both halves of the staging is used: chunks
/// take turns, and a two-shot's parts fill half a slot.
fn trials(communicator: &mut Communicator) -> Result<Vec<Trial>> {
    let mut trials = Vec::new();
    for algorithm in super::ALGORITHMS {
        communicator.force(algorithm);
        let unit_bytes = if algorithm.packet_rounds() > 0 { PAYLOAD_BYTES } else { PACK_BYTES };
        let trial = |count| {
            let plan = communicator.plan(count, DType::F32)?;
            Ok::<_, Error>(plan.map(|plan| Trial { plan, count, unit_bytes, parts: Parts::Even }))
        };
        let Some(Trial { plan: Plan { chunk_bytes, .. }, .. }) = trial(1)? else { continue };
        let blocks = communicator.group().layout.max_blocks as usize;
        let long = 2 * blocks * chunk_bytes as usize / size_of::<f32>() + ODD;
        for count in [1, 1000, long] {
            trials.extend(trial(count)?);
        }
    }
    Ok(trials)
}

fn run_trials(communicator: &mut Communicator, trials: &[Trial], first_epoch: u32) -> Report {
    let digits = Digits::new(communicator.rank(), communicator.world_size());
    let mut report = Report::default();
    let mut buffer: Vec<f32> = Vec::new();
    for (number, trial) in trials.iter().enumerate() {
        buffer.clear();
        buffer.extend((0..trial.count).map(|element| digits.own(number, element)));
        communicator.force(trial.plan.algorithm);
        if let Err(error) = communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum) {
            report.stopped = Some(stop(communicator, number, trial.plan.algorithm, first_epoch, &error));
            break;
        }
        // One that is found wrong ends nothing: the others need this rank's flags to find out for themselves.
        let right = |(element, &sum): (usize, &f32)| sum == digits.sum(number, element);
        if report.direct.is_none() && !buffer.iter().enumerate().all(right) {
            trial.examine(&digits, number, &buffer, &mut report);
        }
    }
    report
}

/// What is to be told of a call that failed.
#[cold]
fn stop(communicator: &Communicator, call: usize, algorithm: Algorithm, first_epoch: u32, error: &Error) -> Stop {
    let (rank, group) = (communicator.rank(), communicator.group());
    let own = group.segment(rank as u32);
    let region = if algorithm.packet_rounds() > 0 { Region::Packets } else { Region::Flags };
    let rounds = own.epoch(region, 0).wrapping_sub(first_epoch);
    let stop = |peer, gone, reason| Stop { call, rounds, peer, gone, reason };
    // The error is what ended the group. What this rank waited for itself may be another thing, and nearer to the
    // cause.
    match (error, record::from_words(own.record())) {
        (Error::PeerGone { rank, peer }, _) => return stop(Some(*peer), Some(*rank), error.to_string()),
        (_, Some(Error::PeerTimeout { rank: of, peer, .. })) if of == rank => {
            return stop(Some(peer), None, format!("nothing came within {:?}", group.timeout));
        }
        (_, Some(Error::Mismatch { rank: of, peer, .. })) if of == rank => {
            return stop(Some(peer), None, "a flag of another call came".into());
        }
        _ => {}
    }
    let mut epoch = own.epoch(region, 0);
    // A two-shot by packets finishes both its rounds at once.
    for _ in 0..algorithm.packet_rounds().max(1) {
        epoch = region.next(epoch);
        let missing = (0..communicator.world_size()).filter(|&peer| peer != rank).find(|&peer| {
            let word = own.signal(region, call::parity(epoch), 0, peer as u32).load(Ordering::Acquire);
            Flag::from_word(word).is_none_or(|flag| flag.epoch != epoch)
        });
        if missing.is_some() {
            return stop(missing, None, format!("nothing came within {:?}", group.timeout));
        }
    }
    stop(None, None, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host;

    #[test]
    fn the_calls_use_every_algorithm_and_more_than_a_chunk() {
        for (world, staging) in [(2, 4 << 20), (4, 1 << 16), (128, 1 << 20)] {
            let options = Options::default().staging_bytes(staging);
            let mut group = Communicator::local(world, &options).unwrap();
            let trials = trials(&mut group[0]).unwrap();
            for algorithm in host::ALGORITHMS {
                let of: Vec<_> = trials.iter().filter(|trial| trial.plan.algorithm == algorithm).collect();
                assert_eq!([of[0].count, of[1].count], [1, 1000]);
                assert!((of[2].count * 4) as u64 > of[2].plan.chunk_bytes);
                // Every element of a two-shot is somebody's, and each has some.
                let owners: Vec<_> = (0..of[2].count).map(|element| of[2].owner(element, world)).collect();
                let some = (0..world).all(|rank| owners.contains(&Some(rank)));
                assert_eq!(owners.iter().all(Option::is_some) && some, algorithm.rounds() == 2);
            }
        }
    }
}
