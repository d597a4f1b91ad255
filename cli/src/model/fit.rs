//! Fits α and β to measurements: time = α + f × bytes / β, f being what a rank must send for each byte of the message.
//!
//! α is what a call costs whatever its size: launch, first look at the tensors, and all steps. With one number of ranks
//! these can't be told apart. With several, steps can, if it is known how many there are: time = operation + steps × α +
//! f × bytes / β.
//!
//! Errors count relatively, or long messages alone would decide.

use anyhow::{Result, ensure};

use super::runs::{Point, Run};

/// α and β of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fit {
    /// µs of a call of no bytes.
    pub(crate) alpha_us: f64,
    /// GB/s of bus bandwidth.
    pub(crate) gb_per_s: f64,
    /// f.
    pub(crate) factor: f64,
}

/// Measured times that differ from the model's by more than this part are where it fails.
pub(crate) const FAILS: f64 = 0.25;

impl Fit {
    /// Of a run with at least three sizes.
    pub(crate) fn of(run: &Run) -> Result<Fit> {
        ensure!(run.points.len() >= 3, "{} sizes are too few to fit to: at least 3", run.points.len());
        let factor = run.bus_factor();
        ensure!(factor.is_some(), "the number of ranks, at least 2, or the collective is not known ({})", run.title());
        let factor = factor.unwrap_or(1.0);
        let rows: Vec<_> = run.points.iter().map(|point| ([1.0, factor * point.bytes as f64], point.us)).collect();
        let [alpha_us, per_byte] = least_squares(&rows);
        ensure!(
            per_byte > 0.0,
            "the time doesn't grow with the size ({}): there is no bandwidth to fit; add longer messages",
            run.title()
        );
        Ok(Fit { alpha_us, gb_per_s: 1.0 / (per_byte * 1e3), factor })
    }

    pub(crate) fn us(&self, bytes: u64) -> f64 {
        self.alpha_us + self.factor * bytes as f64 / (self.gb_per_s * 1e3)
    }

    /// The size at which half of the time is α.
    pub(crate) fn half_bytes(&self) -> f64 {
        self.alpha_us * self.gb_per_s * 1e3 / self.factor
    }

    /// Where the model fails: sizes in a row that are off on the same side.
    pub(crate) fn failures(&self, run: &Run) -> Vec<Failure> {
        let mut failures: Vec<Failure> = Vec::new();
        let mut before: Option<bool> = None;
        for point in &run.points {
            let ratio = point.us / self.us(point.bytes);
            let slower = ratio > 1.0;
            if (ratio - 1.0).abs() <= FAILS {
                before = None;
                continue;
            }
            match failures.last_mut().filter(|_| before == Some(slower)) {
                Some(last) => {
                    last.to = point.bytes;
                    if (ratio - 1.0).abs() > (last.worst - 1.0).abs() {
                        last.worst = ratio;
                    }
                }
                None => failures.push(Failure { from: point.bytes, to: point.bytes, worst: ratio }),
            }
            before = Some(slower);
        }
        failures
    }
}

/// Sizes at which the measured time is not the model's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Failure {
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Measured over model.
    pub(crate) worst: f64,
}

/// Of several runs of one algorithm between different numbers of ranks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepFit {
    /// µs of a call that are not for its steps.
    pub(crate) operation_us: f64,
    /// µs of a step.
    pub(crate) step_us: f64,
    pub(crate) gb_per_s: f64,
}

impl StepFit {
    /// `steps` says how many an algorithm has between so many ranks. None where the numbers of steps are all the same, or
    /// what comes out can't be.
    pub(crate) fn of(runs: &[&Run], steps: impl Fn(u32) -> f64) -> Option<StepFit> {
        let mut rows = Vec::new();
        let mut counts = Vec::new();
        for run in runs {
            let (ranks, factor) = (run.ranks?, run.bus_factor()?);
            counts.push(steps(ranks));
            let row = |point: &Point| ([1.0, steps(ranks), factor * point.bytes as f64], point.us);
            rows.extend(run.points.iter().map(row));
        }
        if rows.len() < 4 || counts.iter().all(|&count| count == counts[0]) {
            return None;
        }
        let [operation_us, step_us, per_byte] = least_squares(&rows);
        (per_byte > 0.0).then(|| StepFit { operation_us, step_us, gb_per_s: 1.0 / (per_byte * 1e3) })
    }
}

/// The coefficients, none below zero, for which Σ ((row · x − y) / y)² is least. Those that would be below zero are left
/// out one after the other.
fn least_squares<const N: usize>(rows: &[([f64; N], f64)]) -> [f64; N] {
    let mut used = [true; N];
    loop {
        let solution = solve(rows, used);
        let worst = (0..N).filter(|&index| used[index]).min_by(|&a, &b| solution[a].total_cmp(&solution[b]));
        match worst.filter(|&index| solution[index] < 0.0) {
            Some(index) => used[index] = false,
            None => return solution,
        }
    }
}

fn solve<const N: usize>(rows: &[([f64; N], f64)], used: [bool; N]) -> [f64; N] {
    // Columns of like size, so that the normal equations stay well conditioned.
    let scale: [f64; N] = std::array::from_fn(|column| {
        let most = rows.iter().map(|(row, y)| (row[column] / y).abs()).fold(0.0, f64::max);
        if most > 0.0 { most } else { 1.0 }
    });
    let mut matrix = [[0.0; N]; N];
    let mut right = [0.0; N];
    for (row, y) in rows {
        let scaled: [f64; N] =
            std::array::from_fn(|column| if used[column] { row[column] / y / scale[column] } else { 0.0 });
        for a in 0..N {
            right[a] += scaled[a];
            for b in 0..N {
                matrix[a][b] += scaled[a] * scaled[b];
            }
        }
    }
    (0..N).filter(|&column| !used[column]).for_each(|column| matrix[column][column] = 1.0);
    let mut solution = [0.0; N];
    // Gauss, with the greatest pivot.
    for column in 0..N {
        let pivot = (column..N).max_by(|&a, &b| matrix[a][column].abs().total_cmp(&matrix[b][column].abs()));
        let pivot = pivot.unwrap_or(column);
        matrix.swap(column, pivot);
        right.swap(column, pivot);
        if matrix[column][column].abs() < 1e-12 {
            continue;
        }
        for row in column + 1..N {
            let times = matrix[row][column] / matrix[column][column];
            for at in column..N {
                matrix[row][at] -= times * matrix[column][at];
            }
            right[row] -= times * right[column];
        }
    }
    for column in (0..N).rev() {
        let known: f64 = (column + 1..N).map(|at| matrix[column][at] * solution[at]).sum();
        if matrix[column][column].abs() >= 1e-12 {
            solution[column] = (right[column] - known) / matrix[column][column];
        }
    }
    std::array::from_fn(|column| solution[column] / scale[column])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(ranks: u32, points: &[(u64, f64)]) -> Run {
        let points = points.iter().map(|&(bytes, us)| Point { bytes, us, bus_gb_per_s: None, wrong: None });
        Run { ranks: Some(ranks), points: points.collect(), ..Run::default() }
    }

    const KB: u64 = 1 << 10;
    const MB: u64 = 1 << 20;

    /// Measured on a published NVLink node of 8 GPUs, in CUDA graphs.
    #[test]
    fn the_published_measurements_give_the_published_fits() {
        let two_shot = run(8, &[(64 * KB, 10.5), (MB, 13.9), (16 * MB, 106.0), (64 * MB, 395.0)]);
        let fit = Fit::of(&two_shot).unwrap();
        assert!((fit.alpha_us / 9.3 - 1.0).abs() < 0.1 && (fit.gb_per_s / 293.0 - 1.0).abs() < 0.1, "{fit:?}");
        let nccl = run(8, &[(64 * KB, 23.2), (MB, 29.0), (16 * MB, 117.0), (128 * MB, 700.0)]);
        let fit = Fit::of(&nccl).unwrap();
        assert!((fit.alpha_us / 23.2 - 1.0).abs() < 0.1 && (fit.gb_per_s / 318.0 - 1.0).abs() < 0.1, "{fit:?}");
        assert!(fit.failures(&nccl).is_empty());
    }

    #[test]
    fn where_the_model_fails_is_said() {
        // A protocol that changes at 1 MiB: before it half of the bandwidth.
        let points: Vec<_> = (0..16)
            .map(|shift| {
                let bytes = KB << shift;
                (bytes, 10.0 + bytes as f64 / if bytes <= MB { 20e3 } else { 200e3 })
            })
            .collect();
        let run = run(2, &points);
        let fit = Fit::of(&run).unwrap();
        let failures = fit.failures(&run);
        assert!(!failures.is_empty(), "{fit:?}");
        assert!(failures.iter().any(|failure| failure.worst > 1.25 && failure.to <= 2 * MB), "{failures:?}");
        assert!(failures.iter().all(|failure| failure.from <= failure.to));
    }

    #[test]
    fn what_can_not_be_fitted_is_said() {
        let error = |run: &Run| Fit::of(run).unwrap_err().to_string();
        assert!(error(&run(2, &[(KB, 1.0), (MB, 2.0)])).contains("2 sizes are too few"));
        assert!(error(&run(1, &[(KB, 1.0), (MB, 2.0), (2 * MB, 3.0)])).contains("the number of ranks"));
        assert!(error(&run(2, &[(KB, 9.0), (2 * KB, 8.0), (MB, 2.0)])).contains("doesn't grow"));
    }

    #[test]
    fn steps_are_told_from_the_operation_with_several_numbers_of_ranks() {
        let ring = |ranks: u32| 2.0 * (f64::from(ranks) - 1.0);
        let runs: Vec<_> = [2, 4, 8]
            .map(|ranks| {
                let n = f64::from(ranks);
                let us = |bytes: u64| 9.0 + ring(ranks) * 1.5 + 2.0 * (n - 1.0) / n * bytes as f64 / 300e3;
                run(ranks, &[KB, 64 * KB, MB, 64 * MB].map(|bytes| (bytes, us(bytes))))
            })
            .into();
        let fit = StepFit::of(&runs.iter().collect::<Vec<_>>(), ring).unwrap();
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-6;
        assert!(close(fit.operation_us, 9.0) && close(fit.step_us, 1.5) && close(fit.gb_per_s, 300.0), "{fit:?}");
        // One number of steps says nothing of them.
        assert_eq!(StepFit::of(&runs.iter().collect::<Vec<_>>(), |_| 2.0), None);
    }

    proptest! {
        #[test]
        fn a_model_s_own_times_are_fitted(alpha in 0.1..200.0f64, beta in 1.0..900.0f64, ranks in 2..16u32) {
            let n = f64::from(ranks);
            let us = |bytes: u64| alpha + 2.0 * (n - 1.0) / n * bytes as f64 / (beta * 1e3);
            let run = run(ranks, &(0..18).map(|shift| (KB << shift, us(KB << shift))).collect::<Vec<_>>());
            let fit = Fit::of(&run).unwrap();
            prop_assert!((fit.alpha_us / alpha - 1.0).abs() < 1e-6 && (fit.gb_per_s / beta - 1.0).abs() < 1e-6, "{:?}", fit);
        }

        #[test]
        fn no_times_break_it(times in prop::collection::vec(1e-3..1e9f64, 3..20)) {
            let run = run(4, &times.iter().enumerate().map(|(index, &us)| (KB << index, us)).collect::<Vec<_>>());
            if let Ok(fit) = Fit::of(&run) {
                prop_assert!(fit.alpha_us >= 0.0 && fit.gb_per_s > 0.0 && fit.us(KB).is_finite());
            }
        }
    }
}
