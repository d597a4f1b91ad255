//! From measurements to the curve of a table: which algorithm, on which grid, for which message. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use peersum::{
    Algorithm, Choice, DType, Placement,
    crossover::{Curve, Gap, NcclFrom, Point, Step, Timing},
};

/// What a switch of algorithms must save, summed over all sizes, and what NCCL must save at a size for the size to
/// count for it. Medians of several runs on an idle machine differ by as much.
const HYSTERESIS: f64 = 1.03;
/// What a choice may lose at one size to the best, wherever that is possible.
const LOSS: f64 = 1.04;
/// What a grid may lose to the best one so that the one of the size before is kept.
const GRID_LOSS: f64 = 1.02;

/// Costs that come before all sums of logarithms: a size that loses more than [`LOSS`], and one that was not measured.
const LOSES: f64 = 1e3;
const UNMEASURED: f64 = 1e6;

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Candidate {
    /// One of the library's algorithms on one grid.
    Own(Choice),
    /// NCCL.
    Nccl,
}

impl From<Choice> for Candidate {
    fn from(choice: Choice) -> Candidate {
        if choice.algorithm == Algorithm::Nccl { Candidate::Nccl } else { Candidate::Own(choice) }
    }
}

/// What one candidate gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    pub(crate) candidate: Candidate,
    /// Median, µs a call.
    pub(crate) us: f64,
    /// Elements that were wrong.
    pub(crate) wrong: u64,
}

/// What was measured at one size.
#[derive(Clone, Debug)]
pub(crate) struct Size {
    /// Bytes of the message.
    pub(crate) bytes: u64,
    pub(crate) cells: Vec<Cell>,
}

/// A curve, and what is to be said about it.
#[derive(Clone, Debug)]
pub(crate) struct Fit {
    pub(crate) curve: Curve,
    pub(crate) warnings: Vec<Warning>,
}

/// What is to be said about a fit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Warning {
    /// It gave wrong elements, so it is refused at every size.
    Wrong { name: &'static str, cells: usize, bytes: u64, wrong: u64 },
    /// It can't reduce tensors that lie so, and was not looked at.
    Unserved { algorithm: Algorithm },
    /// A time that is none was not looked at.
    NoTime { name: &'static str, bytes: u64, us: f64 },
    /// Nothing of the library was measured at this size, so the size was not looked at.
    NothingOwn { bytes: u64 },
    /// No monotone switch avoids it: the algorithm was not measured at this size.
    Unmeasured { algorithm: Algorithm, bytes: u64 },
    /// No monotone switch avoids it: the algorithm loses more than [`LOSS`] at this size.
    Loses { algorithm: Algorithm, bytes: u64, us: f64, best_us: f64 },
    /// NCCL was not measured at the longest size, so it is not known from where on it is faster.
    NcclUnmeasured { bytes: u64 },
    /// One border can't have both: NCCL was faster here, below the border.
    NcclFaster { bytes: u64, us: f64, nccl_us: f64 },
    /// One border can't have both: NCCL was slower here, above the border.
    NcclSlower { bytes: u64, us: f64, nccl_us: f64 },
    /// The evidence doesn't meet at a border.
    Gap(Gap),
}

/// Why there is no curve: nothing that can be chosen was measured.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NoCurve {
    pub(crate) warnings: Vec<Warning>,
}

/// Decides what tensors of `dtype` that lie so are reduced by. `sizes` need no order; a size of 0 bytes is left out.
///
/// * An algorithm, or NCCL, with one wrong element is refused at every size.
/// * Of an algorithm's grids the best counts, or the one of the size before, if that loses less than 2 %.
/// * Each algorithm has one range of sizes. Of all such switches the one that loses least is taken, in the sum over all
///   sizes of the logarithm of time over the best time, and 3 % for each switch; sizes that lose more than 4 % count
///   before that.
/// * A border lies where the two curves cross, between sizes along straight lines of the logarithms.
/// * NCCL takes over where that, with 3 % in the library's favour, saves most in total.
pub(crate) fn fit(placement: Placement, dtype: DType, sizes: &[Size]) -> Result<Fit, NoCurve> {
    let mut warnings = Vec::new();
    let sizes = admit(placement, sizes, &mut warnings);
    let Some(times) = Times::new(&sizes) else { return Err(NoCurve { warnings }) };
    let chosen = times.switch();
    for (index, &algorithm) in chosen.iter().enumerate() {
        let (bytes, best_us) = (times.bytes[index], times.best[index]);
        match times.own(index, algorithm) {
            None => warnings.push(Warning::Unmeasured { algorithm, bytes }),
            Some(timing) if timing.us > best_us * LOSS => {
                warnings.push(Warning::Loses { algorithm, bytes, us: timing.us, best_us });
            }
            Some(_) => (),
        }
    }
    let refused = warnings.iter().any(|warning| matches!(warning, Warning::Wrong { name: NCCL, .. }));
    let (steps, points) = (times.steps(&chosen), times.points());
    let mut curve = Curve { placement, dtype, nccl_from: NcclFrom::NotMeasured, steps, points };
    curve.nccl_from = if refused { NcclFrom::Never } else { times.nccl_from(&chosen, &curve, &mut warnings) };
    warnings.extend(curve.gaps().into_iter().map(Warning::Gap));
    Ok(Fit { curve, warnings })
}

const NCCL: &str = "NCCL";

impl Candidate {
    fn name(self) -> &'static str {
        match self {
            Candidate::Own(choice) => choice.algorithm.name(),
            Candidate::Nccl => NCCL,
        }
    }
}

/// By bytes, what may be chosen.
fn admit(placement: Placement, sizes: &[Size], warnings: &mut Vec<Warning>) -> BTreeMap<u64, Vec<Cell>> {
    let plain = |cell: Cell| match cell.candidate {
        Candidate::Own(choice) => Cell { candidate: choice.into(), ..cell },
        Candidate::Nccl => cell,
    };
    let all = || sizes.iter().flat_map(|size| size.cells.iter().map(|&cell| (size.bytes, plain(cell))));
    let mut wrong = BTreeMap::new();
    for (bytes, cell) in all().filter(|(_, cell)| cell.wrong > 0) {
        wrong.entry(cell.candidate.name()).or_insert_with(Vec::new).push((bytes, cell.wrong));
    }
    warnings.extend(wrong.iter().map(|(&name, cells)| {
        let (bytes, wrong) = cells[0];
        Warning::Wrong { name, cells: cells.len(), bytes, wrong }
    }));
    let mut unserved = BTreeSet::new();
    let mut admitted: BTreeMap<u64, Vec<Cell>> = BTreeMap::new();
    for (bytes, cell) in all().filter(|&(bytes, _)| bytes > 0) {
        let name = cell.candidate.name();
        match cell.candidate {
            _ if wrong.contains_key(name) => continue,
            Candidate::Own(choice) if !choice.algorithm.serves(placement) => {
                unserved.insert(choice.algorithm);
                continue;
            }
            _ if !(cell.us.is_finite() && cell.us > 0.0) => {
                warnings.push(Warning::NoTime { name, bytes, us: cell.us });
                continue;
            }
            _ => admitted.entry(bytes).or_default().push(cell),
        }
    }
    warnings.extend(unserved.into_iter().map(|algorithm| Warning::Unserved { algorithm }));
    admitted.retain(|&bytes, cells| {
        let own = cells.iter().any(|cell| cell.candidate != Candidate::Nccl);
        if !own {
            warnings.push(Warning::NothingOwn { bytes });
        }
        own
    });
    admitted
}

/// Every size's times, by index of the size.
struct Times {
    bytes: Vec<u64>,
    /// Each algorithm on the grid that it would run on.
    own: Vec<BTreeMap<Algorithm, Timing>>,
    /// The best of any grid, µs.
    best: Vec<f64>,
    nccl: Vec<Option<f64>>,
}

impl Times {
    /// `None` if there are no sizes. Each has something of the library's.
    fn new(sizes: &BTreeMap<u64, Vec<Cell>>) -> Option<Times> {
        let mut times = Times { bytes: Vec::new(), own: Vec::new(), best: Vec::new(), nccl: Vec::new() };
        let mut grids: BTreeMap<Algorithm, Choice> = BTreeMap::new();
        for (&bytes, cells) in sizes {
            let mut nccl: Option<f64> = None;
            let mut timings: BTreeMap<Algorithm, Vec<Timing>> = BTreeMap::new();
            for cell in cells {
                match cell.candidate {
                    Candidate::Own(choice) => {
                        timings.entry(choice.algorithm).or_default().push(Timing { choice, us: rounded(cell.us) });
                    }
                    Candidate::Nccl => nccl = Some(nccl.map_or(cell.us, |least| least.min(cell.us))),
                }
            }
            let all = timings.values().flatten().map(|timing| timing.us);
            times.best.push(all.fold(f64::INFINITY, f64::min));
            let taken = timings.into_iter().map(|(algorithm, timings)| {
                let timing = grid(&timings, grids.get(&algorithm));
                grids.insert(algorithm, timing.choice);
                (algorithm, timing)
            });
            times.own.push(taken.collect());
            times.bytes.push(bytes);
            times.nccl.push(nccl.map(rounded));
        }
        (!times.bytes.is_empty()).then_some(times)
    }

    fn own(&self, index: usize, algorithm: Algorithm) -> Option<Timing> {
        self.own[index].get(&algorithm).copied()
    }

    /// The algorithm of every size: dynamic programming over which algorithms were left already, and which one runs.
    fn switch(&self) -> Vec<Algorithm> {
        let algorithms: Vec<Algorithm> =
            self.own.iter().flat_map(|own| own.keys().copied()).collect::<BTreeSet<_>>().into_iter().collect();
        let cost = |index: usize, of: usize| match self.own(index, algorithms[of]) {
            None => UNMEASURED,
            Some(timing) => {
                let loss = timing.us / self.best[index];
                loss.ln() + if loss > LOSS { LOSES } else { 0.0 }
            }
        };
        // By (set of those that ran so far, the one that runs): the least cost up to this size, and where it came from.
        type State = (u32, usize);
        let mut reached: BTreeMap<State, f64> = (0..algorithms.len()).map(|of| ((1 << of, of), cost(0, of))).collect();
        let mut came_from: Vec<BTreeMap<State, State>> = Vec::new();
        for index in 1..self.bytes.len() {
            let mut next: BTreeMap<State, f64> = BTreeMap::new();
            let mut from: BTreeMap<State, State> = BTreeMap::new();
            for (&(ran, running), &so_far) in &reached {
                for of in 0..algorithms.len() {
                    if of != running && ran & 1 << of != 0 {
                        continue;
                    }
                    let switch = if of == running { 0.0 } else { HYSTERESIS.ln() };
                    let (state, total) = ((ran | 1 << of, of), so_far + switch + cost(index, of));
                    if next.get(&state).is_none_or(|&least| total < least) {
                        next.insert(state, total);
                        from.insert(state, (ran, running));
                    }
                }
            }
            reached = next;
            came_from.push(from);
        }
        let least = reached.iter().min_by(|left, right| left.1.total_cmp(right.1));
        let (mut state, _) = least.map(|(&state, &cost)| (state, cost)).expect("a size has an algorithm");
        let mut chosen = vec![algorithms[state.1]];
        for from in came_from.iter().rev() {
            state = from[&state];
            chosen.push(algorithms[state.1]);
        }
        chosen.reverse();
        chosen
    }

    /// A size's grid is also that of what lies between it and the size before: a grid that is too large for a message
    /// loses less than one that must go round again.
    fn steps(&self, chosen: &[Algorithm]) -> Vec<Step> {
        let mut steps = vec![Step { from_bytes: 0, choice: self.choice(0, chosen[0]) }];
        let mut push = |from_bytes, choice| {
            if steps.last().is_some_and(|last: &Step| last.choice != choice) {
                steps.push(Step { from_bytes, choice });
            }
        };
        for index in 1..self.bytes.len() {
            let (below, above) = (chosen[index - 1], chosen[index]);
            let first = self.bytes[index - 1] + 1;
            if below != above {
                let time = |index, algorithm| self.own(index, algorithm).map(|timing| timing.us);
                let border = self.border(index, |at| time(at, below), |at| time(at, above));
                if border > first {
                    push(first, self.choice(index, below));
                }
                push(border, self.choice(index, above));
            } else {
                push(first, self.choice(index, above));
            }
        }
        steps
    }

    /// An algorithm and its grid at a size, or the nearest size that it was measured at.
    fn choice(&self, index: usize, algorithm: Algorithm) -> Choice {
        let measured = (0..self.bytes.len()).filter_map(|at| Some((at, self.own(at, algorithm)?)));
        let nearest = measured.min_by_key(|&(at, _)| at.abs_diff(index));
        nearest.expect("an algorithm that was never measured is not chosen").1.choice
    }

    /// Where what is taken at a size takes over from what is taken at the size before: where their times cross, or in
    /// the middle, of the logarithms, where it can't be told.
    fn border(&self, index: usize, below: impl Fn(usize) -> Option<f64>, above: impl Fn(usize) -> Option<f64>) -> u64 {
        let (low, high) = (self.bytes[index - 1], self.bytes[index]);
        // By how much the one above loses.
        let loss = |at| Some((above(at)? / below(at)?).ln());
        let along = match (loss(index - 1), loss(index)) {
            (Some(at_low), _) if at_low <= 0.0 => 0.0,
            (_, Some(at_high)) if at_high >= 0.0 => 1.0,
            (Some(at_low), Some(at_high)) => at_low / (at_low - at_high),
            _ => 0.5,
        };
        let crossing = low as f64 * (high as f64 / low as f64).powf(along);
        // Of packs, since a border that is known to some per cent needs no more digits.
        (crossing as u64).next_multiple_of(16).clamp(low + 1, high)
    }

    fn nccl_from(&self, chosen: &[Algorithm], curve: &Curve, warnings: &mut Vec<Warning>) -> NcclFrom {
        let sizes = self.bytes.len();
        match (self.nccl.iter().any(Option::is_some), self.nccl[sizes - 1]) {
            (false, _) => return NcclFrom::NotMeasured,
            // Whether it stays faster is not known.
            (true, None) => {
                warnings.push(Warning::NcclUnmeasured { bytes: self.bytes[sizes - 1] });
                return NcclFrom::NotMeasured;
            }
            (true, Some(_)) => (),
        }
        let own = |index: usize| curve.own_us(chosen[index], self.bytes[index]);
        let nccl = |index: usize| curve.nccl_us(self.bytes[index]);
        let both = |index: usize| Some((own(index)?, nccl(index)?));
        // What handing over from a size on costs in total; nothing if never, which an equal cost doesn't beat.
        let (mut first, mut least, mut cost) = (sizes, 0.0, 0.0);
        for index in (0..sizes).rev() {
            cost += both(index).map_or(UNMEASURED, |(own, nccl)| (nccl * HYSTERESIS / own).ln());
            if cost < least {
                (first, least) = (index, cost);
            }
        }
        for (index, &bytes) in self.bytes.iter().enumerate() {
            match both(index) {
                Some((us, nccl_us)) if index < first && nccl_us * HYSTERESIS < us => {
                    warnings.push(Warning::NcclFaster { bytes, us, nccl_us });
                }
                Some((us, nccl_us)) if index >= first && us * HYSTERESIS < nccl_us => {
                    warnings.push(Warning::NcclSlower { bytes, us, nccl_us });
                }
                _ => (),
            }
        }
        match first {
            0 => NcclFrom::Bytes(0),
            index if index == sizes => NcclFrom::Never,
            index => NcclFrom::Bytes(self.border(index, own, nccl)),
        }
    }

    fn points(&self) -> Vec<Point> {
        let point = |index: usize| Point {
            bytes: self.bytes[index],
            nccl_us: self.nccl[index],
            own: self.own[index].values().copied().collect(),
        };
        (0..self.bytes.len()).map(point).collect()
    }
}

/// The grid of the size before, if that loses little, or the best.
fn grid(timings: &[Timing], before: Option<&Choice>) -> Timing {
    let best = timings.iter().copied().min_by(|left, right| left.us.total_cmp(&right.us));
    let best = best.expect("an algorithm is there for its timings");
    let kept = timings.iter().copied().filter(|timing| Some(&timing.choice) == before);
    kept.min_by(|left, right| left.us.total_cmp(&right.us)).filter(|kept| kept.us < best.us * GRID_LOSS).unwrap_or(best)
}

/// To nanoseconds, which is more than anything can tell.
fn rounded(us: f64) -> f64 {
    let rounded = (us * 1e3).round() / 1e3;
    if rounded > 0.0 && rounded.is_finite() { rounded } else { us }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::Wrong { name, cells, bytes, wrong } => {
                write!(f, "{name} gave wrong results in {cells} of its cells (at {bytes} B {wrong} elements): ")?;
                write!(f, "it is refused at every size")
            }
            Warning::Unserved { algorithm } => write!(f, "{algorithm} can't reduce tensors that lie so: left out"),
            Warning::NoTime { name, bytes, us } => write!(f, "{name} at {bytes} B: {us} µs is no time: left out"),
            Warning::NothingOwn { bytes } => write!(f, "{bytes} B: no algorithm but NCCL has a time: left out"),
            Warning::Unmeasured { algorithm, bytes } => {
                write!(f, "{algorithm} is taken for {bytes} B, where it was not measured: no one switch avoids it")
            }
            Warning::Loses { algorithm, bytes, us, best_us } => {
                write!(f, "{algorithm} is taken for {bytes} B with {us:.2} µs, where the best takes {best_us:.2}: ")?;
                write!(f, "no one switch avoids it")
            }
            Warning::NcclUnmeasured { bytes } => {
                write!(f, "NCCL was not measured at {bytes} B, so it is not known from where on it is faster: ")?;
                write!(f, "it isn't called")
            }
            Warning::NcclFaster { bytes, us, nccl_us } => {
                write!(f, "NCCL takes {nccl_us:.2} µs for {bytes} B and the best algorithm {us:.2}, but NCCL is not ")?;
                write!(f, "faster from there on: it isn't called")
            }
            Warning::NcclSlower { bytes, us, nccl_us } => {
                write!(
                    f,
                    "NCCL takes {nccl_us:.2} µs for {bytes} B and the best algorithm {us:.2}, but NCCL is faster "
                )?;
                write!(f, "at the sizes around: it is called")
            }
            Warning::Gap(gap) => write!(f, "{gap}: measure sizes between"),
        }
    }
}

impl fmt::Display for NoCurve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nothing that can be chosen was measured")?;
        self.warnings.iter().try_for_each(|warning| write!(f, "; {warning}"))
    }
}

impl std::error::Error for NoCurve {}

#[cfg(test)]
mod tests;
