//! The self-test: calls of every algorithm through the mappings of a group that has just met, before anybody gets it.
//!
//! A mapping can be made without an error and still not lead where it should: to a copy of the peer's memory, or there
//! with lines that stay behind. Copies that are read back through the same mapping don't show that. So the calls are
//! the real ones, by their own flags and packets, and what they bring is checked by the rank that it is for.
//!
//! # Whose contribution was wrong
//!
//! Element e of a call is a sum of octal digits: a hash of e and the call gives eight of them, and digit k is what rank
//! 8w + k contributes, where w is the element's *window* of ranks. The others contribute 0 there. So sums are below 2^24
//! and exact in any order, no two calls leave the same in a slot, and a digit that is wrong names its rank. With 2^n
//! windows, at most 16, the elements of each line of 64 bytes belong to all of them in turn: in a single call every line
//! has something of every rank, and what a slot holds of an earlier call is of the same window.
//!
//! That an element is wrong in its own rank's part of a two-shot, or in a one-shot, says which rank's contribution never
//! arrived there. Elsewhere it can be the fault of the part's owner or of what had come to that, which is then for the
//! owner to tell; the verdict prefers what is told first-hand.

use super::{
    communicator::Communicator,
    packets::{PAYLOAD_BYTES, Region},
    record,
    sync::Ordering,
};
use crate::{
    Algorithm, DType, Error, Options, Plan, ReduceOp, Result,
    meeting::{Seat, Wire},
    protocol::{
        call::{self, Flag},
        split::{self, PACK_BYTES},
    },
};

/// Ranks that contribute to one element: octal digits of an f32's 24 bits.
const WINDOW: usize = 8;
/// Elements that no chunk ends with.
const ODD: usize = 1003;

/// One call of the test.
#[derive(Clone, Copy, Debug)]
struct Call {
    plan: Plan,
    count: usize,
}

/// What a rank tells the others. Calls are told by their number.
#[derive(Clone, Debug, Default, PartialEq)]
struct Report {
    /// Where the rank itself found what a peer had sent it wrong.
    direct: Option<Finding>,
    /// Where it found something wrong that the peer may have had from others.
    indirect: Option<Finding>,
    /// Why it did not come to the end.
    stopped: Option<Stop>,
}

#[derive(Clone, Debug, PartialEq)]
struct Finding {
    call: usize,
    peer: usize,
    element: usize,
    expected: u32,
    /// An f32's bits.
    found: u32,
}

#[derive(Clone, Debug, PartialEq)]
struct Stop {
    call: usize,
    /// Rounds that it had finished.
    rounds: u32,
    /// The peer that it waited for.
    peer: Option<usize>,
    /// The rank that saw that the process of `peer` is gone.
    gone: Option<usize>,
    reason: String,
}

/// Runs the test; every rank of the meeting does, and all return the same.
///
/// Afterwards the segments are as new: each rank clears its own once all have told that their last call is over, so no
/// store to it is still to come, and none begins a call before all have cleared theirs. The seat's messages order that
/// as they do the first use of fresh memory.
pub(super) fn run(communicator: &mut Communicator, options: &Options, seat: &mut Seat) -> Result<()> {
    let calls = calls(communicator)?;
    let report = run_calls(communicator, &calls, options.first_epoch);
    let reports = seat.all_gather(report)?;
    if let Some(error) = verdict(&calls, &reports) {
        return Err(error);
    }
    communicator.group().segment(communicator.rank() as u32).renew(options.first_epoch);
    seat.all_gather(())?;
    Ok(())
}

/// Every algorithm with one element, some, and so many that each line of both halves of the staging is used: a one-shot's
/// chunks take turns, a two-shot's take both.
fn calls(communicator: &mut Communicator) -> Result<Vec<Call>> {
    let mut calls = Vec::new();
    for algorithm in super::ALGORITHMS {
        communicator.force(algorithm);
        let plan = |count| Ok::<_, Error>(communicator.plan(count, DType::F32)?.map(|plan| Call { plan, count }));
        let Some(Call { plan: Plan { chunk_bytes, .. }, .. }) = plan(1)? else { continue };
        let chunks = if algorithm.rounds() == 1 { 2 } else { 1 };
        let long = chunks * chunk_bytes as usize / size_of::<f32>() + ODD;
        for count in [1, 1000, long] {
            calls.extend(plan(count)?);
        }
    }
    Ok(calls)
}

fn run_calls(communicator: &mut Communicator, calls: &[Call], first_epoch: u32) -> Report {
    let digits = Digits::new(communicator.rank(), communicator.world_size());
    let mut report = Report::default();
    let mut buffer: Vec<f32> = Vec::new();
    for (number, call) in calls.iter().enumerate() {
        buffer.clear();
        buffer.extend((0..call.count).map(|element| digits.own(number, element)));
        communicator.force(call.plan.algorithm);
        if let Err(error) = communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum) {
            report.stopped = Some(stop(communicator, number, call.plan.algorithm, first_epoch, &error));
            break;
        }
        // One that is found wrong ends nothing: the others need this rank's flags to find out for themselves.
        let right = |(element, &sum): (usize, &f32)| sum == digits.sum(number, element);
        if report.direct.is_none() && !buffer.iter().enumerate().all(right) {
            examine(&digits, number, call, &buffer, &mut report);
        }
    }
    report
}

/// Looks for the first element that says most about what went wrong.
#[cold]
fn examine(digits: &Digits, number: usize, call: &Call, sums: &[f32], report: &mut Report) {
    for (element, &found) in sums.iter().enumerate() {
        let expected = digits.sum(number, element);
        if found == expected {
            continue;
        }
        let finding =
            |peer| Some(Finding { call: number, peer, element, expected: expected as u32, found: found.to_bits() });
        let owner = call.owner(element, digits.world).unwrap_or(digits.rank);
        let culprit = if owner == digits.rank { digits.culprit(element, expected, found) } else { None };
        if culprit.is_some() {
            report.direct = culprit.and_then(finding);
            return;
        }
        if report.indirect.is_none() {
            let next = (digits.rank + 1) % digits.world;
            report.indirect = finding(if owner == digits.rank { next } else { owner });
        }
    }
}

/// What is to be told of a call that failed.
#[cold]
fn stop(communicator: &Communicator, call: usize, algorithm: Algorithm, first_epoch: u32, error: &Error) -> Stop {
    let (rank, group) = (communicator.rank(), communicator.group());
    let own = group.segment(rank as u32);
    let region = if algorithm.packet_rounds() > 0 { Region::Packets } else { Region::Flags };
    let rounds = own.epoch(region, 0).wrapping_sub(first_epoch);
    let stop = |peer, gone, reason| Stop { call, rounds, peer, gone, reason };
    // The error is what ended the group. What this rank waited for itself may be another thing, and nearer to the cause.
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

/// What all ranks make of what all have told.
fn verdict(calls: &[Call], reports: &[Report]) -> Option<Error> {
    let stops = || reports.iter().enumerate().filter_map(|(rank, report)| Some((rank, report.stopped.as_ref()?)));
    if let Some((_, stop)) = stops().find(|(_, stop)| stop.gone.is_some()) {
        return Some(Error::PeerGone { rank: stop.gone?, peer: stop.peer? });
    }
    let name = |number: usize| match calls.get(number) {
        Some(call) => format!("{} of {} x f32", call.plan.algorithm, call.count),
        None => format!("call {number}"),
    };
    let found = |of: fn(&Report) -> &Option<Finding>| {
        let all = reports.iter().enumerate().filter_map(|(rank, report)| Some((rank, of(report).as_ref()?)));
        let (rank, finding) = all.min_by_key(|(rank, finding)| (finding.call, *rank))?;
        let Finding { call, peer, element, expected, found } = *finding;
        let found = f32::from_bits(found);
        let reason = format!("{}: element {element} is {found}, not {expected}", name(call));
        Some(Error::SelfTestFailed { rank, peer, reason })
    };
    let stopped = || {
        // Ranks that wait wait for those that stopped before them.
        let first = stops().min_by_key(|(rank, stop)| (stop.peer.is_none(), stop.call, stop.rounds, *rank));
        let (rank, stop) = first?;
        let reason = format!("{}: {}", name(stop.call), stop.reason);
        Some(Error::SelfTestFailed { rank, peer: stop.peer.unwrap_or(rank), reason })
    };
    found(|report| &report.direct).or_else(stopped).or_else(|| found(|report| &report.indirect))
}

impl Call {
    /// The rank that reduces this element alone, if one does.
    fn owner(&self, element: usize, world: usize) -> Option<usize> {
        if self.plan.algorithm.rounds() == 1 {
            return None;
        }
        let unit_bytes = if self.plan.algorithm.packet_rounds() > 0 { PAYLOAD_BYTES } else { PACK_BYTES };
        let units = ((self.count * size_of::<f32>()) as u64).div_ceil(unit_bytes);
        let unit = (element * size_of::<f32>()) as u64 / unit_bytes;
        let chunk = split::chunks(0..units, self.plan.chunk_bytes / unit_bytes).find(|chunk| chunk.contains(&unit))?;
        let (length, unit) = (chunk.end - chunk.start, unit - chunk.start);
        (0..world).find(|&rank| split::split(length, world as u64, rank as u64).contains(&unit))
    }
}

/// Which digits are whose.
struct Digits {
    rank: usize,
    world: usize,
    /// A power of two.
    windows: usize,
}

impl Digits {
    fn new(rank: usize, world: usize) -> Digits {
        Digits { rank, world, windows: world.div_ceil(WINDOW).next_power_of_two() }
    }

    /// What this rank contributes.
    #[inline]
    fn own(&self, call: usize, element: usize) -> f32 {
        let mine = self.window(element) == self.rank / WINDOW;
        let mask = if mine { 7 << (3 * (self.rank % WINDOW)) } else { 0 };
        (digits(call, element) & mask) as f32
    }

    /// What all contribute together.
    #[inline]
    fn sum(&self, call: usize, element: usize) -> f32 {
        let ranks = self.world.saturating_sub(self.window(element) * WINDOW).min(WINDOW);
        (digits(call, element) & ((1 << (3 * ranks)) - 1)) as f32
    }

    /// The peer whose digit is wrong.
    fn culprit(&self, element: usize, expected: f32, found: f32) -> Option<usize> {
        let differ = expected as u32 ^ found as u32;
        let exact = (found as u32) as f32 == found && found < (1 << (3 * WINDOW)) as f32;
        let wrong = (0..WINDOW).filter(|digit| exact && differ >> (3 * digit) & 7 != 0);
        let mut ranks = wrong.map(|digit| self.window(element) * WINDOW + digit);
        ranks.find(|&rank| rank != self.rank && rank < self.world)
    }

    #[inline]
    fn window(&self, element: usize) -> usize {
        element & (self.windows - 1)
    }
}

/// Eight octal digits that depend on both.
#[inline]
fn digits(call: usize, element: usize) -> u32 {
    let mut bits = (element as u32).wrapping_mul(0x9e37_79b1) ^ (1 + call as u32).wrapping_mul(0x85eb_ca6b);
    bits = (bits ^ bits >> 16).wrapping_mul(0x7feb_352d);
    bits = (bits ^ bits >> 15).wrapping_mul(0x846c_a68b);
    (bits ^ bits >> 16) >> 8
}

impl Wire for Report {
    fn put(&self, out: &mut Vec<u8>) {
        self.direct.put(out);
        self.indirect.put(out);
        self.stopped.put(out);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let (direct, indirect) = (Wire::take(from)?, Wire::take(from)?);
        Some(Report { direct, indirect, stopped: Wire::take(from)? })
    }
}

impl Wire for Finding {
    fn put(&self, out: &mut Vec<u8>) {
        [self.call, self.peer, self.element].iter().for_each(|number| number.put(out));
        [self.expected, self.found].iter().for_each(|number| number.put(out));
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let (call, peer, element) = (Wire::take(from)?, Wire::take(from)?, Wire::take(from)?);
        Some(Finding { call, peer, element, expected: Wire::take(from)?, found: Wire::take(from)? })
    }
}

impl Wire for Stop {
    fn put(&self, out: &mut Vec<u8>) {
        self.call.put(out);
        self.rounds.put(out);
        self.peer.put(out);
        self.gone.put(out);
        self.reason.put(out);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let (call, rounds, peer) = (Wire::take(from)?, Wire::take(from)?, Wire::take(from)?);
        Some(Stop { call, rounds, peer, gone: Wire::take(from)?, reason: Wire::take(from)? })
    }
}
