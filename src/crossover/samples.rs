//! A machine and its table, for tests.

use super::{Curve, Entry, Machine, NcclFrom, Point, Step, Table, Timing};
use crate::{Algorithm, Choice, DType, Placement};

pub(super) fn machine() -> Machine {
    Machine {
        gpu: "NVIDIA H200".into(),
        world: 2,
        links: vec!["=N".into(), "N=".into()],
        driver: "580.159.04".into(),
        nccl: Some("2.32.3".into()),
        peersum: "0.1.0".into(),
        kernels: "00c0ffee".into(),
    }
}

pub(super) fn choice(algorithm: Algorithm, blocks: u32, threads: u32) -> Choice {
    Choice { algorithm, blocks, threads }
}

/// Packets, then a two-shot, then NCCL; the times cross at the borders.
pub(super) fn curve(placement: Placement, dtype: DType) -> Curve {
    let packets = choice(Algorithm::OneShotLl, 8, 128);
    let more_packets = choice(Algorithm::OneShotLl, 32, 352);
    let two_shot = choice(Algorithm::TwoShotPull, 64, 512);
    let timing = |choice, us| Timing { choice, us };
    Curve {
        placement,
        dtype,
        nccl_from: NcclFrom::Bytes(4 << 20),
        steps: vec![
            Step { from_bytes: 0, choice: packets },
            Step { from_bytes: 8193, choice: more_packets },
            Step { from_bytes: 1 << 20, choice: two_shot },
        ],
        points: vec![
            Point { bytes: 8192, nccl_us: Some(6.0), own: vec![timing(packets, 1.5), timing(two_shot, 4.0)] },
            Point { bytes: 1 << 20, nccl_us: Some(12.0), own: vec![timing(more_packets, 6.0), timing(two_shot, 6.5)] },
            Point { bytes: 4 << 20, nccl_us: Some(20.0), own: vec![timing(two_shot, 20.5)] },
            Point { bytes: 16 << 20, nccl_us: Some(40.25), own: vec![timing(two_shot, 70.0)] },
        ],
    }
}

/// Of bf16, tensors anywhere.
pub(super) fn entry() -> Entry {
    Entry {
        machine: machine(),
        measured: "2026-11-30".into(),
        command: "peersum tune -g 2".into(),
        curves: vec![curve(Placement::Anywhere, DType::BF16)],
    }
}

pub(super) fn table() -> Table {
    Table { entries: vec![entry()] }
}

/// Packets everywhere, as no table here has them.
pub(super) fn priors(_bytes: u64, world: u32, _placement: Placement) -> Choice {
    choice(Algorithm::TwoShotLl, world, 64)
}
