//! NCCL's own rule for P2P between two GPUs of one machine (`ncclTopoCheckP2p` in its `graph/paths.cc`, 2.18 to 2.28).
//!
//! It compares the kind of path with a level, PXB by default, and asks NVML. It never reads ACS.

use std::fmt;

use serde::Serialize;

use super::{
    machine::{Machine, Pair},
    matrix::{self, Connection, Relation},
    nvml::Status,
};

/// NCCL's kinds of paths. It has no NODE: paths within a NUMA node are PHB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Path {
    Loc,
    Nvl,
    Pix,
    Pxb,
    Phb,
    Sys,
}

impl Path {
    /// NCCL's kind of this connection; `None` if unknown.
    pub(crate) fn of(connection: Connection) -> Option<Path> {
        // A link that isn't known of may be there, and would be shorter than any other path.
        if connection.nvlinks? > 0 {
            return Some(Path::Nvl);
        }
        Some(match connection.pci? {
            Relation::Pix => Path::Pix,
            Relation::Pxb => Path::Pxb,
            Relation::Phb | Relation::Node => Path::Phb,
            Relation::Sys => Path::Sys,
        })
    }

    /// A value of `NCCL_P2P_LEVEL`: a name, or a number of NCCL's first versions.
    pub(crate) fn parse(text: &str) -> Option<Path> {
        let names = [Path::Loc, Path::Nvl, Path::Pix, Path::Pxb, Path::Phb, Path::Sys];
        let numbers = [Path::Loc, Path::Pix, Path::Pxb, Path::Phb, Path::Sys, Path::Sys];
        match text.parse::<usize>() {
            Ok(number) => Some(numbers[number.min(5)]),
            Err(_) => names.into_iter().find(|path| path.to_string() == text),
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Loc => "LOC",
            Path::Nvl => "NVL",
            Path::Pix => "PIX",
            Path::Pxb => "PXB",
            Path::Phb => "PHB",
            Path::Sys => "SYS",
        })
    }
}

/// The longest path that NCCL has P2P over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) path: Path,
    /// What it is from.
    pub(crate) from: &'static str,
}

/// The level, given what `NCCL_P2P_DISABLE` and `NCCL_P2P_LEVEL` are set to.
pub(crate) fn level(machine: &Machine, disable: Option<&str>, level: Option<&str>) -> Level {
    if disable.and_then(|value| value.parse::<i64>().ok()).is_some_and(|value| value != 0) {
        return Level { path: Path::Loc, from: "NCCL_P2P_DISABLE" };
    }
    if let Some(path) = level.and_then(Path::parse) {
        return Level { path, from: "NCCL_P2P_LEVEL" };
    }
    if machine.cpu.is_amd() && machine.gpus.len() <= 2 {
        return Level { path: Path::Sys, from: "NCCL's default for at most 2 GPUs on AMD" };
    }
    Level { path: Path::Pxb, from: "NCCL's default" }
}

/// What NCCL does between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    P2p,
    /// The path is beyond the level.
    TooFar(Path),
    /// NVML doesn't grant it.
    Refused(Status),
    Unknown,
}

/// Decides as NCCL does.
pub(crate) fn decide(machine: &Machine, pair: Pair, level: Level) -> Decision {
    match Path::of(matrix::gpus(machine, pair)) {
        Some(path) if path > level.path => Decision::TooFar(path),
        _ if machine.p2p_refused(pair).is_some() => {
            Decision::Refused(machine.p2p_refused(pair).unwrap_or(Status::Unknown))
        }
        Some(_) if machine.p2p_granted(pair) => Decision::P2p,
        _ => Decision::Unknown,
    }
}
