//! The drawing of a run.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use peersum::Algorithm;

use super::{
    options::Config,
    report::{CHOSEN, Record},
};
use crate::{
    bandwidth,
    measure::{case::Placement, group::Device, statistics::median},
    plot::{Border, Figure, Row, Series, crossing},
};

/// A drawing that waits for what is measured.
pub(super) struct Chart {
    path: PathBuf,
    figure: Figure,
    borders: Vec<(u64, Algorithm)>,
}

impl Chart {
    /// `borders` says where the choice changes, and to what. A place that can't be written to shows now.
    pub(super) fn new(
        path: &Path,
        devices: &[Device],
        config: &Config,
        borders: Vec<(u64, Algorithm)>,
    ) -> Result<Chart> {
        let world = devices.len();
        let bandwidth = match world {
            1 => ("algbw (GB/s)", 1.0),
            _ => ("busbw (GB/s)", bandwidth::bus_factor(world)),
        };
        let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
        let alike = names.windows(2).all(|pair| pair[0] == pair[1]);
        let what = if alike { names.first().copied().unwrap_or_default() } else { "several kinds of devices" };
        let placed = match config.library.symmetric_bytes {
            0 => "out of place",
            _ => "out of place, in symmetric memory",
        };
        let figure = Figure {
            title: format!("All-reduce by {world} ranks on {what}"),
            subtitle: format!(
                "{}, {}, {placed}, peersum {}",
                config.dtypes[0],
                config.ops[0],
                env!("CARGO_PKG_VERSION")
            ),
            bandwidth,
            rows: Vec::new(),
        };
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("can't write {}", path.display()))?;
        Ok(Chart { path: path.to_owned(), figure, borders })
    }

    /// Draws what was measured out of place; over several cycles, the median.
    pub(super) fn draw(mut self, records: &[Record]) -> Result<()> {
        let mut times: BTreeMap<&str, BTreeMap<u64, Vec<f64>>> = BTreeMap::new();
        let mut order = Vec::new();
        for record in records {
            let (placement, bytes, candidates) = record.point();
            for (name, us) in candidates.into_iter().filter(|_| placement == Placement::OutOfPlace) {
                if !order.contains(&name) {
                    order.push(name);
                }
                times.entry(name).or_default().entry(bytes).or_default().push(us);
            }
        }
        let points = |name: &str| -> Vec<(u64, f64)> {
            let of = times.get(name).into_iter().flatten();
            of.map(|(&bytes, times)| (bytes, median(times.iter().copied()))).collect()
        };
        let nccl = Algorithm::Nccl.name();
        let mut borders: Vec<_> = self.borders.iter().map(|&(bytes, to)| Border::to(bytes, to.name())).collect();
        // Where the choice would hand over, if it went by this run.
        if !self.borders.iter().any(|(_, to)| *to == Algorithm::Nccl)
            && let Some(bytes) = crossing(&points(CHOSEN), &points(nccl))
        {
            borders.push(Border { label: format!("{} (measured)", Border::to(bytes, nccl).label), bytes });
        }
        let series =
            order.iter().map(|&name| Series { name: name.to_owned(), points: points(name), chosen: name == CHOSEN });
        self.figure.rows = vec![Row { heading: String::new(), series: series.collect(), borders }];
        self.figure.write(&self.path)
    }
}
