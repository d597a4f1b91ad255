//! Where ticks and labels go.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};

/// A linear axis with ticks at these places.
pub(super) struct Scale {
    range: (f64, f64),
    ticks: Vec<f64>,
}

impl Scale {
    pub(super) fn new(range: (f64, f64), ticks: Vec<f64>) -> Self {
        Scale { range, ticks }
    }
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        let (from, to) = self.range;
        first + ((value - from) / (to - from) * f64::from(last - first)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.range.0..self.range.1
    }
}

/// `64 KiB`.
pub(super) fn bytes_name(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift {
            return format!("{} {unit}", number(bytes as f64 / (1u64 << shift) as f64));
        }
    }
    format!("{bytes} B")
}

/// A number without digits that say nothing.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        magnitude if magnitude >= 100.0 => format!("{value:.0}"),
        magnitude if magnitude >= 10.0 => trim(format!("{value:.1}")),
        _ => trim(format!("{value:.2}")),
    }
}

fn trim(text: String) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Powers of two in a range of logarithms to the base 2, eight at most.
pub(super) fn size_ticks((from, to): (f64, f64)) -> Vec<f64> {
    let (first, last) = (from.ceil() as i32, to.floor() as i32);
    let step = ((last - first) / 8 + 1).max(1);
    (first..=last).filter(|power| power.rem_euclid(step) == 0).map(f64::from).collect()
}

/// 1, 2 and 5 times powers of ten in a range of logarithms to the base 10; over many decades, the powers alone.
pub(super) fn log_ticks((from, to): (f64, f64)) -> Vec<f64> {
    let mantissas: &[f64] = if to - from <= 3.2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    (from.floor() as i32..=to.ceil() as i32)
        .flat_map(|decade| mantissas.iter().map(move |mantissa| f64::from(decade) + mantissa.log10()))
        .filter(|tick| (from..=to).contains(tick))
        .collect()
}

/// Round numbers from 0 to a greatest one, some six.
pub(super) fn linear_ticks(greatest: f64) -> Vec<f64> {
    let rough = greatest / 6.0;
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|mantissa| mantissa * decade).into_iter().find(|&step| step >= rough);
    let step = step.unwrap_or(10.0 * decade);
    (0..).map(|tick| f64::from(tick) * step).take_while(|&tick| tick <= greatest).collect()
}

/// Pixels of a text in a font without serifs, more rather than less.
pub(super) fn text_width(text: &str, size: u32) -> i32 {
    // The backend writes a font of size/1.24, whose characters are half as wide as it is high, or a little more.
    (text.chars().count() as f64 * f64::from(size) / 1.24 * 0.58).ceil() as i32
}

/// Labels above a panel, in as many levels as it takes for none to overlap, as far as there are levels.
pub(super) struct Levels {
    taken: Vec<Vec<Range<i32>>>,
}

impl Levels {
    pub(super) fn new(levels: usize) -> Self {
        Levels { taken: vec![Vec::new(); levels] }
    }

    /// The middle and the level of a label that is to be at `middle`, and not to leave the panel.
    pub(super) fn place(&mut self, middle: i32, text: &str, panel: Range<i32>) -> (i32, usize) {
        const GAP: i32 = 8;
        let half = text_width(text, 13) / 2;
        let middle = middle.min(panel.end - half).max(panel.start + half);
        let wanted = middle - half - GAP..middle + half + GAP;
        let overlaps = |taken: &Range<i32>| taken.start < wanted.end && wanted.start < taken.end;
        let free = self.taken.iter().position(|taken| !taken.iter().any(overlaps));
        let level = free.unwrap_or(self.taken.len() - 1);
        self.taken[level].push(wanted);
        (middle, level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        let names = [64, 1 << 10, 1536, 96 << 10, 1 << 20, 5 << 29].map(bytes_name);
        assert_eq!(names, ["64 B", "1 KiB", "1.5 KiB", "96 KiB", "1 MiB", "2.5 GiB"]);
        assert_eq!([0.5, 1.0, 2.25, 10.0, 12.5, 250.0].map(number), ["0.5", "1", "2.25", "10", "12.5", "250"]);
    }

    #[test]
    fn ticks_are_round_and_not_too_many() {
        assert_eq!(size_ticks((9.7, 16.3)), [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]);
        assert_eq!(size_ticks((9.7, 26.3)), [12.0, 15.0, 18.0, 21.0, 24.0]);
        let times: Vec<_> = log_ticks((0.2, 1.4)).into_iter().map(|tick| number(10f64.powf(tick))).collect();
        assert_eq!(times, ["2", "5", "10", "20"]);
        assert_eq!(log_ticks((-1.0, 4.0)), [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0]);
        assert_eq!(linear_ticks(520.0), [0.0, 100.0, 200.0, 300.0, 400.0, 500.0]);
        assert_eq!(linear_ticks(0.9), [0.0, 0.2, 0.4, 0.6, 0.8].map(|tick: f64| (tick * 5.0).round() * 0.2));
    }

    #[test]
    fn labels_that_would_overlap_go_up_a_level() {
        let mut levels = Levels::new(3);
        assert_eq!(levels.place(300, "two-shot from 64 KiB", 100..600), (300, 0));
        assert_eq!(levels.place(310, "nccl from 70 KiB", 100..600).1, 1);
        assert_eq!(levels.place(500, "nccl", 100..600).1, 0);
        // Near the edge it moves inwards.
        let (middle, _) = levels.place(599, "two-shot from 64 KiB", 100..600);
        assert!(middle < 560 && middle + text_width("two-shot from 64 KiB", 13) / 2 <= 600);
    }
}
