//! What was measured, and what was decided from it.

use crate::{
    Algorithm, Choice, DType, Placement,
    protocol::bindings::{PEERSUM_MAX_BLOCKS, PEERSUM_MAX_THREADS},
};

use super::Machine;

/// How much the times of what takes over and of what it takes over from may differ: a true crossover is continuous.
const CONTINUOUS: f64 = 1.2;

/// Decisions for any number of machines: the content of a file, which [`Table::read`] reads and [`Table::write`]
/// writes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// One for each machine.
    pub entries: Vec<Entry>,
}

/// What was measured and decided on one machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// What it holds for.
    pub machine: Machine,
    /// When it was measured, a date.
    pub measured: String,
    /// The command that measured it.
    pub command: String,
    /// One for each placement and element type that was measured.
    pub curves: Vec<Curve>,
}

/// What was measured and decided for tensors of one element type that lie in one way.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Where the tensors lie.
    pub placement: Placement,
    /// The element type.
    pub dtype: DType,
    /// From how many bytes on NCCL is called.
    pub nccl_from: NcclFrom,
    /// How messages are done, by increasing bytes; the first step is from 0. No algorithm comes back once left.
    pub steps: Vec<Step>,
    /// The evidence, by increasing bytes. It may be empty, and decides nothing.
    pub points: Vec<Point>,
}

/// From how many bytes on NCCL is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NcclFrom {
    /// It was not measured, so it is not called.
    NotMeasured,
    /// It was measured, and is at no size faster.
    Never,
    /// From so many bytes on; 0 is everywhere.
    Bytes(u64),
}

/// How messages of at least so many bytes, and fewer than the next step's, are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Bytes of the shortest such message.
    pub from_bytes: u64,
    /// How they are done.
    pub choice: Choice,
}

/// What was measured at one size.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Bytes of the message.
    pub bytes: u64,
    /// NCCL's median, µs a call, if it was measured.
    pub nccl_us: Option<f64>,
    /// Every algorithm that was measured, on its best grid.
    pub own: Vec<Timing>,
}

/// What one choice took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// The algorithm and its grid.
    pub choice: Choice,
    /// Its median, µs a call.
    pub us: f64,
}

/// A border where the times on both sides differ by more than a fifth: it is stale, or sizes beside it were not
/// measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Gap {
    /// The border, bytes.
    pub border_bytes: u64,
    /// Where the two were compared, bytes: the border, or the nearest size at which both were measured.
    pub at_bytes: u64,
    /// What is taken below the border, and its time in µs.
    pub below: (&'static str, f64),
    /// What is taken from the border on, and its time in µs.
    pub above: (&'static str, f64),
}

impl Table {
    /// Puts `entry` in the place of the one for the same machine, or behind all others.
    pub fn upsert(&mut self, entry: Entry) {
        match self.entries.iter_mut().find(|old| old.machine == entry.machine) {
            Some(old) => *old = entry,
            None => self.entries.push(entry),
        }
    }

    /// Whether it can be used and written; the error says what is wrong and where.
    pub fn validate(&self) -> Result<(), String> {
        for (index, entry) in self.entries.iter().enumerate() {
            let located = |error| format!("entry {}: {error}", index + 1);
            entry.validate().map_err(located)?;
            if self.entries[..index].iter().any(|earlier| earlier.machine == entry.machine) {
                return Err(located("another entry is for the same machine".into()));
            }
        }
        Ok(())
    }
}

impl Entry {
    /// Whether it hands calls of any size over to NCCL.
    pub fn hands_over(&self) -> bool {
        self.curves.iter().any(Curve::hands_over)
    }

    /// The same as [`Table::validate`], of one entry.
    pub fn validate(&self) -> Result<(), String> {
        self.machine.validate()?;
        for text in [&self.measured, &self.command] {
            if text.is_empty() || text.chars().any(char::is_control) {
                return Err(format!("{text:?} is empty or has control characters"));
            }
        }
        for (index, curve) in self.curves.iter().enumerate() {
            let located = |error| format!("curve {} of {}: {error}", placement_name(curve.placement), curve.dtype);
            curve.validate().map_err(located)?;
            let same = |earlier: &Curve| (earlier.placement, earlier.dtype) == (curve.placement, curve.dtype);
            if self.curves[..index].iter().any(same) {
                return Err(located("it is there twice".into()));
            }
            if curve.hands_over() && self.machine.nccl.is_none() {
                return Err(located("it hands over to NCCL, but the machine has none".into()));
            }
        }
        Ok(())
    }
}

impl Curve {
    /// Whether it hands calls of any size over to NCCL.
    pub fn hands_over(&self) -> bool {
        matches!(self.nccl_from, NcclFrom::Bytes(_))
    }

    /// The step for a message of `bytes` bytes, and how many bytes the next begins at. `None` if there are no steps,
    /// which no valid curve has.
    pub fn step(&self, bytes: u64) -> Option<(&Step, Option<u64>)> {
        let next = self.steps.partition_point(|step| step.from_bytes <= bytes);
        let step = self.steps.get(next.checked_sub(1)?)?;
        Some((step, self.steps.get(next).map(|next| next.from_bytes)))
    }

    /// What `algorithm` takes for `bytes` bytes, µs: between two sizes along a straight line of the logarithms. `None`
    /// outside what was measured.
    pub fn own_us(&self, algorithm: Algorithm, bytes: u64) -> Option<f64> {
        interpolate(&self.own_times(algorithm), bytes)
    }

    /// The same of NCCL.
    pub fn nccl_us(&self, bytes: u64) -> Option<f64> {
        interpolate(&self.nccl_times(), bytes)
    }

    /// Borders at which the evidence on both sides doesn't meet. Those without evidence on both sides are not among
    /// them.
    pub fn gaps(&self) -> Vec<Gap> {
        let borders = self.steps.windows(2).filter(|pair| pair[0].choice.algorithm != pair[1].choice.algorithm);
        let mut gaps: Vec<Gap> = borders
            .filter_map(|pair| {
                let (below, above) = (pair[0].choice.algorithm, pair[1].choice.algorithm);
                gap(pair[1].from_bytes, (below.name(), self.own_times(below)), (above.name(), self.own_times(above)))
            })
            .collect();
        if let NcclFrom::Bytes(border @ 1..) = self.nccl_from
            && let Some((step, _)) = self.step(border - 1)
        {
            let below = step.choice.algorithm;
            gaps.extend(gap(border, (below.name(), self.own_times(below)), ("NCCL", self.nccl_times())));
        }
        gaps
    }

    fn own_times(&self, algorithm: Algorithm) -> Vec<(u64, f64)> {
        let of = |point: &Point| point.own.iter().find(|timing| timing.choice.algorithm == algorithm).map(|own| own.us);
        self.points.iter().filter_map(|point| Some((point.bytes, of(point)?))).collect()
    }

    fn nccl_times(&self) -> Vec<(u64, f64)> {
        self.points.iter().filter_map(|point| Some((point.bytes, point.nccl_us?))).collect()
    }

    fn validate(&self) -> Result<(), String> {
        if self.steps.first().is_none_or(|step| step.from_bytes != 0) {
            return Err("its first step is not from 0 bytes".into());
        }
        let mut left = Vec::new();
        for (index, step) in self.steps.iter().enumerate() {
            let located = |error| format!("step from {} bytes: {error}", step.from_bytes);
            in_range(step.from_bytes).and_then(|()| self.takes(step.choice)).map_err(located)?;
            let before = index.checked_sub(1).map(|before| &self.steps[before]);
            if before.is_some_and(|before| before.from_bytes >= step.from_bytes) {
                return Err(located("it does not lie above the step before it".into()));
            }
            let algorithm = step.choice.algorithm;
            if before.is_some_and(|before| before.choice.algorithm != algorithm) && left.contains(&algorithm) {
                return Err(located(format!("{algorithm} was left below it")));
            }
            left.push(algorithm);
        }
        if let NcclFrom::Bytes(bytes) = self.nccl_from {
            in_range(bytes)?;
        }
        let mut last = 0;
        for point in &self.points {
            let located = |error| format!("point of {} bytes: {error}", point.bytes);
            in_range(point.bytes).map_err(located)?;
            if point.bytes <= last {
                return Err(located("it does not lie above the point before it, or above 0".into()));
            }
            last = point.bytes;
            for (index, timing) in point.own.iter().enumerate() {
                let algorithm = timing.choice.algorithm;
                self.takes(timing.choice).map_err(located)?;
                if point.own[..index].iter().any(|earlier| earlier.choice.algorithm == algorithm) {
                    return Err(located(format!("{algorithm} is there twice")));
                }
            }
            for us in point.own.iter().map(|timing| timing.us).chain(point.nccl_us) {
                if !(us.is_finite() && us > 0.0) {
                    return Err(located(format!("{us} is no time in µs")));
                }
            }
        }
        Ok(())
    }

    /// Whether tensors that lie so can be reduced like that.
    fn takes(&self, Choice { algorithm, blocks, threads }: Choice) -> Result<(), String> {
        if algorithm == Algorithm::Nccl {
            return Err("nccl is none of the library's own: nccl_from_bytes and nccl_us are for it".into());
        }
        if !algorithm.serves(self.placement) {
            return Err(format!("{algorithm} can't reduce tensors that lie {}", placement_name(self.placement)));
        }
        if !(1..=PEERSUM_MAX_BLOCKS).contains(&blocks) {
            return Err(format!("{blocks} blocks, where there are 1 to {PEERSUM_MAX_BLOCKS}"));
        }
        if threads == 0 || !threads.is_multiple_of(32) || threads > PEERSUM_MAX_THREADS {
            return Err(format!("{threads} threads, which is no multiple of 32 from 32 to {PEERSUM_MAX_THREADS}"));
        }
        Ok(())
    }
}

/// TOML's integers end there.
fn in_range(bytes: u64) -> Result<(), String> {
    i64::try_from(bytes).map(|_| ()).map_err(|_| format!("{bytes} bytes are more than {}", i64::MAX))
}

fn gap(border: u64, below: (&'static str, Vec<(u64, f64)>), above: (&'static str, Vec<(u64, f64)>)) -> Option<Gap> {
    let both_at = |bytes| Some((interpolate(&below.1, bytes)?, interpolate(&above.1, bytes)?));
    let (at_bytes, (below_us, above_us)) = match both_at(border) {
        Some(times) => (border, times),
        None => {
            let common = below.1.iter().map(|&(bytes, _)| bytes).filter(|&bytes| both_at(bytes).is_some());
            let nearest = common.min_by_key(|bytes| bytes.abs_diff(border))?;
            (nearest, both_at(nearest)?)
        }
    };
    let apart = below_us.max(above_us) / below_us.min(above_us);
    let (below, above) = ((below.0, below_us), (above.0, above_us));
    (apart > CONTINUOUS).then_some(Gap { border_bytes: border, at_bytes, below, above })
}

/// Between the neighbours of `bytes` among `times`, which are by increasing bytes.
fn interpolate(times: &[(u64, f64)], bytes: u64) -> Option<f64> {
    let above = times.partition_point(|&(measured, _)| measured < bytes);
    let &(high, high_us) = times.get(above)?;
    if high == bytes {
        return Some(high_us);
    }
    let &(low, low_us) = times.get(above.checked_sub(1)?)?;
    let along = (bytes as f64 / low as f64).ln() / (high as f64 / low as f64).ln();
    Some((low_us.ln() * (1.0 - along) + high_us.ln() * along).exp())
}

/// All placements, in the order of [`placement_index`].
pub(super) const PLACEMENTS: [Placement; 4] =
    [Placement::Anywhere, Placement::SymmetricInput, Placement::Symmetric, Placement::SymmetricInPlace];

pub(super) const fn placement_index(placement: Placement) -> usize {
    match placement {
        Placement::Anywhere => 0,
        Placement::SymmetricInput => 1,
        Placement::Symmetric => 2,
        Placement::SymmetricInPlace => 3,
    }
}

/// Its name in tables.
pub(super) const fn placement_name(placement: Placement) -> &'static str {
    match placement {
        Placement::Anywhere => "anywhere",
        Placement::SymmetricInput => "symmetric-input",
        Placement::Symmetric => "symmetric",
        Placement::SymmetricInPlace => "symmetric-in-place",
    }
}

impl std::fmt::Display for Gap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Gap { border_bytes, at_bytes, below: (below, below_us), above: (above, above_us) } = self;
        write!(f, "{below} hands over to {above} at {border_bytes} B, but ")?;
        if at_bytes != border_bytes {
            write!(f, "at {at_bytes} B, the nearest size with both, ")?;
        }
        write!(f, "they take {below_us:.2} and {above_us:.2} µs")
    }
}

#[cfg(test)]
mod tests;
