//! The self-test: calls of every algorithm through the mappings of a group that has just met, before anybody gets it. Here
//! is what they carry, and what is made of what came; each backend makes its own calls.
//!
//! A mapping can be made without an error and still not lead where it should: to a copy of the peer's memory, or there
//! with lines that stay behind. Copies that are read back through the same mapping don't show that. So the calls are
//! the real ones, by their own flags and packets, and what they bring is checked by the rank that it is for.
//!
//! # Whose contribution was wrong
//!
//! Element e of a call is a sum of octal digits: a hash of e and the call gives eight of them, and digit k is what rank
//! 8w + k contributes, where w is the element's *window* of ranks. The others contribute 0 there. So sums are below
//! 2^24 and exact in any order, no two calls leave the same in a slot, and a digit that is wrong names its rank. With
//! 2^n windows, at most 16, the elements of each line of 64 bytes belong to all of them in turn: in a single call every
//! line has something of every rank, and what a slot holds of an earlier call is of the same window.
//!
//! That an element is wrong in its own rank's part of a two-shot, or in a one-shot, says which rank's contribution
//! never arrived there. Elsewhere it can be the fault of the part's owner or of what had come to that, which is then
//! for the owner to tell; the verdict prefers what is told first-hand.

use crate::{Algorithm, Error, Plan, meeting::Wire, protocol::split};

/// Ranks that contribute to one element: octal digits of an f32's 24 bits.
const WINDOW: usize = 8;
/// Elements that no chunk ends with.
pub(crate) const ODD: usize = 1003;

/// One call of the test, of f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trial {
    pub(crate) plan: Plan,
    pub(crate) count: usize,
    /// Bytes of what it splits a message into.
    pub(crate) unit_bytes: u64,
    /// How a two-shot splits a chunk over the ranks.
    pub(crate) parts: Parts,
}

/// The parts of a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parts {
    /// They differ by one unit at most, the longer ones first.
    Even,
    /// All are as long as the first, but for what there is not.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Alike,
}

/// What a rank tells the others. Calls are told by their number.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Report {
    /// Where the rank itself found what a peer had sent it wrong.
    pub(crate) direct: Option<Finding>,
    /// Where it found something wrong that the peer may have had from others.
    pub(crate) indirect: Option<Finding>,
    /// Why it did not come to the end.
    pub(crate) stopped: Option<Stop>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finding {
    pub(crate) call: usize,
    pub(crate) peer: usize,
    pub(crate) element: usize,
    pub(crate) expected: u32,
    /// An f32's bits.
    pub(crate) found: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stop {
    pub(crate) call: usize,
    /// Rounds that it had finished.
    pub(crate) rounds: u32,
    /// The peer that it waited for.
    pub(crate) peer: Option<usize>,
    /// The rank that saw that the process of `peer` is gone.
    pub(crate) gone: Option<usize>,
    pub(crate) reason: String,
}

/// What all ranks make of what all have told.
pub(crate) fn verdict(trials: &[Trial], reports: &[Report]) -> Option<Error> {
    let stops = || reports.iter().enumerate().filter_map(|(rank, report)| Some((rank, report.stopped.as_ref()?)));
    let gone = stops().find_map(|(_, stop)| Some((stop.gone?, stop.peer?)));
    if let Some((rank, peer)) = gone {
        return Some(Error::PeerGone { rank, peer });
    }
    let name = |number: usize| match trials.get(number) {
        Some(trial) => format!("{} of {} x f32", trial.plan.algorithm, trial.count),
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

impl Trial {
    /// The rank that reduces this element alone, if one does.
    pub(crate) fn owner(&self, element: usize, world: usize) -> Option<usize> {
        if self.plan.algorithm.rounds() == 1 || self.plan.algorithm == Algorithm::OneShotDirect {
            return None;
        }
        let (bytes, world) = ((self.count * size_of::<f32>()) as u64, world as u64);
        let units = bytes.div_ceil(self.unit_bytes);
        let unit = (element * size_of::<f32>()) as u64 / self.unit_bytes;
        let blocks = u64::from(self.plan.blocks);
        let block = (0..blocks).map(|block| split::split(units, blocks, block)).find(|block| block.contains(&unit))?;
        let chunk =
            split::chunks(block, self.plan.chunk_bytes / self.unit_bytes).find(|chunk| chunk.contains(&unit))?;
        let (length, unit) = (chunk.end - chunk.start, unit - chunk.start);
        let owner = match self.parts {
            Parts::Even => (0..world).find(|&rank| split::split(length, world, rank).contains(&unit))?,
            Parts::Alike => unit / length.div_ceil(world),
        };
        Some(owner as usize)
    }

    /// Looks through the `sums` of trial `number`, which are not all right, for the first element that says most about what
    /// went wrong.
    #[cold]
    pub(crate) fn examine(&self, digits: &Digits, number: usize, sums: &[f32], report: &mut Report) {
        for (element, &found) in sums.iter().enumerate() {
            let expected = digits.sum(number, element);
            if found == expected {
                continue;
            }
            let finding =
                |peer| Some(Finding { call: number, peer, element, expected: expected as u32, found: found.to_bits() });
            let owner = self.owner(element, digits.world).unwrap_or(digits.rank);
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
}

/// Which digits are whose.
pub(crate) struct Digits {
    rank: usize,
    world: usize,
    /// A power of two.
    windows: usize,
}

impl Digits {
    pub(crate) fn new(rank: usize, world: usize) -> Digits {
        Digits { rank, world, windows: world.div_ceil(WINDOW).next_power_of_two() }
    }

    /// What this rank contributes.
    #[inline]
    pub(crate) fn own(&self, call: usize, element: usize) -> f32 {
        let mine = self.window(element) == self.rank / WINDOW;
        let mask = if mine { 7 << (3 * (self.rank % WINDOW)) } else { 0 };
        (digits(call, element) & mask) as f32
    }

    /// What all contribute together.
    #[inline]
    pub(crate) fn sum(&self, call: usize, element: usize) -> f32 {
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

/// From any bytes, as a peer may send.
#[cfg(fuzzing)]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Some(report) = Report::from_bytes(bytes) {
        let _ = verdict(&[], &[report]).map(|error| error.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(call: usize, peer: usize) -> Option<Finding> {
        Some(Finding { call, peer, element: 5, expected: 0o17, found: 8.0f32.to_bits() })
    }

    fn stopped(call: usize, rounds: u32, peer: Option<usize>) -> Report {
        let reason = "nothing came".to_owned();
        Report { stopped: Some(Stop { call, rounds, peer, gone: None, reason }), ..Report::default() }
    }

    /// The pair that the verdict names.
    fn pair(reports: &[Report]) -> Option<(usize, usize)> {
        match verdict(&[], reports)? {
            Error::SelfTestFailed { rank, peer, .. } | Error::PeerGone { rank, peer } => Some((rank, peer)),
            error => panic!("{error}"),
        }
    }

    #[test]
    fn the_digits_add_up_and_a_wrong_one_names_its_rank() {
        for world in [2, 3, 8, 9, 16, 17, 40, 128] {
            let all: Vec<_> = (0..world).map(|rank| Digits::new(rank, world)).collect();
            let mut named = vec![0; world];
            for call in 0..3 {
                for element in 0..256 {
                    let own: Vec<_> = all.iter().map(|digits| digits.own(call, element)).collect();
                    let sum = all[0].sum(call, element);
                    assert_eq!(own.iter().sum::<f32>(), sum);
                    for peer in 1..world {
                        // What the same place held in the call before, or nothing.
                        for stale in [0.0, all[peer].own(call + 7, element)] {
                            let found = sum - own[peer] + stale;
                            let right = found == sum;
                            let culprit = all[0].culprit(element, sum, found);
                            assert_eq!(culprit, (!right).then_some(peer), "{world}: {call}, {element}");
                            named[peer] += usize::from(!right);
                        }
                    }
                }
            }
            assert!(named[1..].iter().all(|&times| times > 50), "{named:?}");
            assert_eq!(all[0].culprit(0, 1.0, f32::NAN), None);
            assert_eq!(all[0].culprit(0, 1.0, 1.5), None);
        }
    }

    #[test]
    fn the_verdict_prefers_what_is_nearest_to_the_cause() {
        let (right, direct) =
            (Report::default(), |call, peer| Report { direct: finding(call, peer), ..Report::default() });
        let indirect = |call, peer| Report { indirect: finding(call, peer), ..Report::default() };
        assert_eq!(pair(&[right.clone(), right.clone()]), None);
        // A wrong sum that was passed on is told by all, and by its owner first-hand.
        assert_eq!(pair(&[indirect(4, 1), direct(4, 2), indirect(4, 1)]), Some((1, 2)));
        assert_eq!(pair(&[right.clone(), direct(5, 0), direct(3, 0)]), Some((2, 0)));
        assert_eq!(pair(&[right.clone(), right.clone(), indirect(3, 1)]), Some((2, 1)));
        // Who waits for a rank that waits itself, has stopped later.
        assert_eq!(pair(&[stopped(1, 2, Some(2)), stopped(1, 1, Some(2)), stopped(0, 0, Some(1))]), Some((2, 1)));
        assert_eq!(pair(&[stopped(1, 2, Some(2)), stopped(1, 1, Some(0)), stopped(0, 0, None)]), Some((1, 0)));
        assert_eq!(pair(&[right.clone(), stopped(0, 0, None)]), Some((1, 1)));
        assert_eq!(pair(&[direct(7, 1), stopped(0, 0, Some(0)), indirect(0, 1)]), Some((0, 1)));
        // A process that is gone is the cause of all.
        let mut gone = stopped(3, 1, Some(2));
        gone.stopped.as_mut().unwrap().gone = Some(1);
        assert_eq!(pair(&[stopped(0, 0, Some(1)), gone, direct(0, 1)]), Some((1, 2)));
    }

    #[test]
    fn reports_survive_their_bytes() {
        for report in [
            Report::default(),
            Report { direct: finding(1, 2), indirect: finding(3, 4), stopped: stopped(5, 6, Some(7)).stopped },
            stopped(usize::MAX, u32::MAX, None),
        ] {
            let bytes = report.to_bytes();
            assert_eq!(Report::from_bytes(&bytes), Some(report));
            assert_eq!(Report::from_bytes(&bytes[1..]), None);
        }
    }
}
