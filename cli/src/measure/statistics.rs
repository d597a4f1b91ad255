//! From many times to a few.

use clap::ValueEnum;
use serde::Serialize;

use super::rank::Timing;

/// Which rank's time counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Combine {
    Rank0,
    Mean,
    Min,
    Max,
}

impl ValueEnum for Combine {
    fn value_variants<'a>() -> &'a [Self] {
        &[Combine::Rank0, Combine::Mean, Combine::Min, Combine::Max]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        let (number, name, help) = match self {
            Combine::Rank0 => ("0", "rank0", "rank 0's"),
            Combine::Mean => ("1", "mean", "the mean of all ranks"),
            Combine::Min => ("2", "min", "the fastest rank's"),
            Combine::Max => ("3", "max", "the slowest rank's"),
        };
        Some(clap::builder::PossibleValue::new(number).alias(name).help(help))
    }
}

impl Combine {
    /// One number of one per rank; there is at least one.
    pub(crate) fn of(self, ranks: impl Iterator<Item = f64> + Clone) -> f64 {
        match self {
            Combine::Rank0 => ranks.clone().next().unwrap_or(0.0),
            Combine::Mean => {
                let count = ranks.clone().count();
                ranks.sum::<f64>() / count as f64
            }
            Combine::Min => ranks.fold(f64::INFINITY, f64::min),
            Combine::Max => ranks.fold(0.0, f64::max),
        }
    }

    /// The samples of the rank whose time counts, so that they belong to the time; of all ranks, for the mean.
    pub(crate) fn samples(self, ranks: &[Timing]) -> Vec<f64> {
        let by_time = |a: &&Timing, b: &&Timing| a.time_us.total_cmp(&b.time_us);
        let one = match self {
            Combine::Rank0 => ranks.first(),
            Combine::Min => ranks.iter().min_by(by_time),
            Combine::Max => ranks.iter().max_by(by_time),
            Combine::Mean => {
                let count = ranks.iter().map(|rank| rank.samples_us.len()).min().unwrap_or(0);
                let mean =
                    |sample: usize| ranks.iter().map(|rank| rank.samples_us[sample]).sum::<f64>() / ranks.len() as f64;
                return (0..count).map(mean).collect();
            }
        };
        one.map(|rank| rank.samples_us.clone()).unwrap_or_default()
    }

    pub(crate) fn describe(self) -> &'static str {
        match self {
            Combine::Rank0 => "rank 0",
            Combine::Mean => "mean over ranks",
            Combine::Min => "min over ranks",
            Combine::Max => "max over ranks",
        }
    }
}

/// The median: of an even number, the mean of the two in the middle. 0 where there is none.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        count if count.is_multiple_of(2) => (sorted[middle - 1] + sorted[middle]) / 2.0,
        _ => sorted[middle],
    }
}

/// One rank's rounds as one: medians of the times, and all samples.
pub(crate) fn over_rounds(rounds: &[Timing]) -> Timing {
    Timing {
        time_us: median(rounds.iter().map(|round| round.time_us)),
        wall_us: median(rounds.iter().map(|round| round.wall_us)),
        samples_us: rounds.iter().flat_map(|round| round.samples_us.iter().copied()).collect(),
    }
}

/// The slowest rank's time of each sample.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) fn slowest_of_each(ranks: &[Timing]) -> Vec<f64> {
    let count = ranks.iter().map(|rank| rank.samples_us.len()).min().unwrap_or(0);
    (0..count).map(|sample| Combine::Max.of(ranks.iter().map(|rank| rank.samples_us[sample]))).collect()
}

/// How samples spread. Percentiles are by nearest rank: each is one of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) samples: usize,
    pub(crate) min_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p95_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) max_us: f64,
    pub(crate) mean_us: f64,
    /// Standard deviation over mean, in percent; 0 for one sample.
    pub(crate) cv_percent: f64,
}

impl Spread {
    /// `None` where there is no sample.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min_us, &max_us) = (sorted.first()?, sorted.last()?);
        let count = sorted.len() as f64;
        let mean_us = sorted.iter().sum::<f64>() / count;
        let variance = sorted.iter().map(|sample| (sample - mean_us).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
        let percentile = |percent: f64| sorted[((percent / 100.0 * count).ceil() as usize).max(1) - 1];
        Some(Spread {
            samples: sorted.len(),
            min_us,
            p50_us: percentile(50.0),
            p95_us: percentile(95.0),
            p99_us: percentile(99.0),
            max_us,
            mean_us,
            cv_percent: if mean_us > 0.0 { variance.sqrt() / mean_us * 100.0 } else { 0.0 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let spread = Spread::of(&samples).unwrap();
        assert_eq!(
            (spread.min_us, spread.p50_us, spread.p95_us, spread.p99_us, spread.max_us),
            (1.0, 50.0, 95.0, 99.0, 100.0)
        );
        assert_eq!((spread.samples, spread.mean_us), (100, 50.5));
    }

    #[test]
    fn few_samples_have_percentiles_too() {
        let one = Spread::of(&[3.0]).unwrap();
        assert_eq!((one.min_us, one.p50_us, one.p99_us, one.max_us, one.cv_percent), (3.0, 3.0, 3.0, 3.0, 0.0));
        let three = Spread::of(&[1.0, 9.0, 2.0]).unwrap();
        assert_eq!((three.p50_us, three.p95_us), (2.0, 9.0));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn the_spread_is_the_sample_deviation_over_the_mean() {
        // Deviations ±1 around 10: variance 2 / (2 − 1).
        let spread = Spread::of(&[9.0, 11.0]).unwrap();
        assert!((spread.cv_percent - 2f64.sqrt() * 10.0).abs() < 1e-12);
    }

    #[test]
    fn samples_are_of_the_rank_whose_time_counts() {
        let rank = |samples: [f64; 2]| Timing {
            time_us: samples.iter().sum::<f64>() / 2.0,
            wall_us: 0.0,
            samples_us: samples.to_vec(),
        };
        let ranks = [rank([2.0, 4.0]), rank([1.0, 3.0]), rank([3.0, 5.0])];
        assert_eq!(Combine::Rank0.samples(&ranks), [2.0, 4.0]);
        assert_eq!(Combine::Min.samples(&ranks), [1.0, 3.0]);
        assert_eq!(Combine::Max.samples(&ranks), [3.0, 5.0]);
        assert_eq!(Combine::Mean.samples(&ranks), [2.0, 4.0]);
    }

    #[test]
    fn the_median_does_not_follow_an_outlier() {
        assert_eq!(median([]), 0.0);
        assert_eq!(median([3.0, 1.0, 1000.0]), 3.0);
        assert_eq!(median([4.0, 1.0, 1000.0, 2.0]), 3.0);
    }

    #[test]
    fn rounds_become_one_by_their_medians_and_keep_all_samples() {
        let round = |time_us| Timing { time_us, wall_us: 2.0 * time_us, samples_us: vec![time_us; 2] };
        let one = over_rounds(&[round(3.0), round(100.0), round(1.0)]);
        assert_eq!((one.time_us, one.wall_us), (3.0, 6.0));
        assert_eq!(one.samples_us, [3.0, 3.0, 100.0, 100.0, 1.0, 1.0]);
        // One round stays what it was.
        assert_eq!(over_rounds(&[round(3.0)]), round(3.0));
    }

    #[test]
    fn a_sample_of_all_ranks_is_the_slowest_one_s() {
        let rank = |samples: &[f64]| Timing { samples_us: samples.to_vec(), ..Timing::default() };
        assert_eq!(slowest_of_each(&[rank(&[1.0, 5.0]), rank(&[2.0, 3.0])]), [2.0, 5.0]);
        assert_eq!(slowest_of_each(&[]), [0.0; 0]);
    }

    #[test]
    fn ranks_are_combined_as_asked() {
        let ranks = [2.0, 1.0, 6.0];
        let by = |combine: Combine| combine.of(ranks.iter().copied());
        assert_eq!([by(Combine::Rank0), by(Combine::Mean), by(Combine::Min), by(Combine::Max)], [2.0, 3.0, 1.0, 6.0]);
    }
}
