//! The drawing of what was decided.

use std::collections::BTreeMap;

use peersum::crossover::{Curve, Entry, NcclFrom};

use super::verdict::lies;
use crate::{
    bandwidth,
    dtypes::once_each,
    plot::{Border, Figure, Row, Series},
};

/// A row for each curve.
pub(super) fn figure(entry: &Entry, world: usize, devices: &[String]) -> Figure {
    let names = once_each(devices.iter().cloned()).join(" + ");
    let nccl = entry.machine.nccl.as_ref().map_or("no NCCL".to_owned(), |version| format!("NCCL {version}"));
    Figure {
        title: format!("All-reduce by {world} ranks on {names}"),
        subtitle: format!("sum, CUDA graphs, peersum {}, {nccl}, {}", entry.machine.peersum, entry.measured),
        bandwidth: ("busbw (GB/s)", bandwidth::bus_factor(world)),
        rows: entry.curves.iter().map(row).collect(),
    }
}

fn row(curve: &Curve) -> Row {
    let nccl_from = match curve.nccl_from {
        NcclFrom::Bytes(bytes) => bytes,
        NcclFrom::Never | NcclFrom::NotMeasured => u64::MAX,
    };
    let mut times: BTreeMap<_, Vec<(u64, f64)>> = BTreeMap::new();
    let (mut chosen, mut nccl) = (Vec::new(), Vec::new());
    for point in &curve.points {
        for own in &point.own {
            times.entry(own.choice.algorithm).or_default().push((point.bytes, own.us));
        }
        nccl.extend(point.nccl_us.map(|us| (point.bytes, us)));
        let of_step = |bytes| curve.own_us(curve.step(bytes)?.0.choice.algorithm, bytes);
        let us = if point.bytes >= nccl_from { point.nccl_us } else { of_step(point.bytes) };
        chosen.extend(us.map(|us| (point.bytes, us)));
    }
    let mut series = vec![Series { name: "chosen".into(), points: chosen, chosen: true }];
    let own = times.into_iter().map(|(algorithm, points)| (algorithm.name(), points));
    for (name, points) in own.chain([("nccl", nccl)]).filter(|(_, points)| !points.is_empty()) {
        series.push(Series { name: name.into(), points, chosen: false });
    }
    let switches = curve.steps.windows(2).filter(|pair| pair[0].choice.algorithm != pair[1].choice.algorithm);
    let mut borders: Vec<_> = switches
        .filter(|pair| pair[1].from_bytes < nccl_from)
        .map(|pair| Border::to(pair[1].from_bytes, pair[1].choice.algorithm.name()))
        .collect();
    if nccl_from != u64::MAX {
        borders.push(Border::to(nccl_from, "nccl"));
    }
    Row { heading: format!("{}, tensors {}", curve.dtype, lies(curve.placement)), series, borders }
}

#[cfg(test)]
mod tests {
    use peersum::{
        Algorithm, Choice, DType, Placement,
        crossover::{Point, Step, Timing},
    };

    use super::*;

    #[test]
    fn what_is_chosen_follows_the_steps_and_the_border_and_both_are_marked() {
        let choice = |algorithm| Choice { algorithm, blocks: 4, threads: 128 };
        let (first, second) = (choice(Algorithm::OneShotLl), choice(Algorithm::TwoShot));
        let point = |bytes, us: [f64; 3]| Point {
            bytes,
            nccl_us: Some(us[2]),
            own: vec![Timing { choice: first, us: us[0] }, Timing { choice: second, us: us[1] }],
        };
        let curve = Curve {
            placement: Placement::Symmetric,
            dtype: DType::F16,
            nccl_from: NcclFrom::Bytes(3000),
            steps: vec![Step { from_bytes: 0, choice: first }, Step { from_bytes: 1500, choice: second }],
            points: vec![point(1024, [1.0, 2.0, 5.0]), point(2048, [4.0, 3.0, 5.5]), point(4096, [9.0, 8.0, 6.0])],
        };
        let row = row(&curve);
        assert_eq!(row.heading, "f16, tensors in symmetric memory");
        assert_eq!(row.series[0].points, [(1024, 1.0), (2048, 3.0), (4096, 6.0)]);
        let names: Vec<_> = row.series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["chosen", "two-shot", "one-shot-ll", "nccl"]);
        assert_eq!(row.borders.iter().map(|border| border.bytes).collect::<Vec<_>>(), [1500, 3000]);
    }
}
