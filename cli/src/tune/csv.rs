//! All that was measured, as CSV.

use std::{fmt::Write, fs, path::Path};

use anyhow::{Context, Result};

use super::kept::{Measured, SizeRecord};
use crate::measure::{candidate::Home, statistics::Spread};

const HEADER: &str =
    "kernel,blocks,threads,ranks,dtype,memory,place,bytes,calls,rounds,median_us,min_us,p95_us,max_us,wrong";

/// What an empty kernel costs first, then size by size.
pub(super) fn write(path: &Path, ranks: usize, empty: &[Measured], sizes: &[SizeRecord]) -> Result<()> {
    fs::write(path, text(ranks, empty, sizes)).with_context(|| format!("can't write {}", path.display()))
}

fn text(ranks: usize, empty: &[Measured], sizes: &[SizeRecord]) -> String {
    let mut text = format!("{HEADER}\n");
    for measured in empty {
        line(&mut text, ranks, "", 0, measured);
    }
    for size in sizes {
        for measured in &size.measured {
            line(&mut text, ranks, &size.dtype, size.bytes, measured);
        }
    }
    text
}

fn line(text: &mut String, ranks: usize, dtype: &str, bytes: u64, measured: &Measured) {
    let Measured { algorithm, blocks, threads, home, in_place, calls, rounds, samples_us, wrong } = measured;
    let Some(spread) = Spread::of(samples_us) else { return };
    let memory = match home {
        Home::Plain => "plain",
        Home::Symmetric => "symmetric",
    };
    let place = if *in_place { "in" } else { "out" };
    let (median, least, p95, most) = (measured.us(), spread.min_us, spread.p95_us, spread.max_us);
    // To a string nothing can fail.
    let _ = writeln!(
        text,
        "{algorithm},{blocks},{threads},{ranks},{dtype},{memory},{place},{bytes},{calls},{rounds},{median:.3},{least:.3},\
         {p95:.3},{most:.3},{wrong}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_has_a_value_for_every_column() {
        let measured = |algorithm: &str| Measured {
            algorithm: algorithm.into(),
            blocks: 16,
            threads: 128,
            home: Home::Symmetric,
            in_place: true,
            calls: 100,
            rounds: 7,
            samples_us: vec![2.0, 1.0, 3.0],
            wrong: 0,
        };
        let size =
            SizeRecord { dtype: "bf16".into(), bytes: 1024, measured: vec![measured("two-shot")], missing: Vec::new() };
        let text = text(4, &[measured("empty")], &[size]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1], "empty,16,128,4,,symmetric,in,0,100,7,2.000,1.000,3.000,3.000,0");
        assert_eq!(lines[2], "two-shot,16,128,4,bf16,symmetric,in,1024,100,7,2.000,1.000,3.000,3.000,0");
        assert!(lines.iter().all(|line| line.split(',').count() == HEADER.split(',').count()));
    }
}
