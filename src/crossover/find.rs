//! Where the table is, and whether one of its entries holds here.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use super::{Entry, Machine, Source, Table, Tuned, table::placement_name};
use crate::Placement;

/// The environment variable that names the table's file.
pub const TABLE_VARIABLE: &str = "PEERSUM_TABLE";

/// Where a table is looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// Whether somebody named it. If not, it needs not be there.
    pub named: bool,
}

/// An entry that holds here.
#[derive(Clone, Debug, PartialEq)]
pub struct Found<'a> {
    /// The entry.
    pub entry: &'a Entry,
    /// Why its border to NCCL doesn't hold all the same, if it doesn't.
    pub without_nccl: Option<String>,
}

/// Why priors choose and no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// Nobody named a file, and there is none where one is looked for.
    #[error("no table was measured ({}): run `peersum tune`", or_no_home(.path))]
    Untuned {
        /// The user's file, if it is known where it would be.
        path: Option<PathBuf>,
    },
    /// The file can't be read, or isn't there though it was named.
    #[error("{}: {cause}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        cause: String,
    },
    /// The file is not a table.
    #[error("{} is not a table that can be used: {cause}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        cause: String,
    },
    /// No entry of the table holds here.
    #[error("{} does not hold here: {cause}: run `peersum tune`", .path.display())]
    Elsewhere {
        /// The file.
        path: PathBuf,
        /// What differs from the nearest entry.
        cause: String,
        /// Whether the nearest entry is of this very machine, with other software.
        stale: bool,
        /// Whether the file was named.
        named: bool,
    },
    /// The table has no curve for tensors that lie so.
    #[error("{} has no curve of placement {}: run `peersum tune`", .path.display(), placement_name(*.placement))]
    NotMeasured {
        /// The file.
        path: PathBuf,
        /// Where they lie.
        placement: Placement,
    },
    /// The caller has one of its own.
    #[error("{0}")]
    Other(String),
}

fn or_no_home(path: &Option<PathBuf>) -> String {
    path.as_ref().map_or("neither XDG_CACHE_HOME nor HOME is set".into(), |path| path.display().to_string())
}

impl Reason {
    /// Whether it is worth a warning: something that was asked for, or was measured on this machine, is of no use.
    pub fn is_warning(&self) -> bool {
        match self {
            Reason::Untuned { .. } | Reason::NotMeasured { .. } | Reason::Other(_) => false,
            Reason::Unreadable { .. } | Reason::Damaged { .. } => true,
            Reason::Elsewhere { stale, named, .. } => *stale || *named,
        }
    }
}

/// Where the table is: the file that the caller names, or the one that [`TABLE_VARIABLE`] names, or the user's
/// ([`default_path`]). `variable` looks up the environment.
pub fn locate(named: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Option<Place> {
    let by_variable = || variable(TABLE_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    match named.map(Path::to_owned).or_else(by_variable) {
        Some(path) => Some(Place { path, named: true }),
        None => default_path(variable).map(|path| Place { path, named: false }),
    }
}

/// The user's table: `$XDG_CACHE_HOME/peersum/table.toml`, or `$HOME/.cache/peersum/table.toml`. `None` if neither
/// variable has an absolute path.
pub fn default_path(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("peersum").join("table.toml"))
}

impl Table {
    /// The entry that was measured on a machine like `here`. The error says what differs from the nearest entry, and
    /// whether no more than software does.
    pub fn find(&self, here: &Machine) -> Result<Found<'_>, (String, bool)> {
        let compared = self.entries.iter().map(|entry| (entry, entry.machine.differences(here)));
        // Among entries that differ in NCCL alone the one with the NCCL at hand, whose border holds.
        let nearest = compared.min_by_key(|(entry, differences)| {
            (differences.hardware, differences.sentences.len(), entry.machine.nccl != here.nccl)
        });
        match nearest {
            Some((entry, differences)) if differences.sentences.is_empty() => {
                Ok(Found { entry, without_nccl: entry.machine.nccl_differs(here) })
            }
            Some((_, differences)) => Err((differences.sentences.join("; "), differences.hardware == 0)),
            None => Err(("it has no entries".into(), false)),
        }
    }
}

impl Source {
    /// The table of the machine at hand, or why there is none: what [`locate`] and [`Table::find`] find.
    pub fn load(here: &Machine, named: Option<&Path>, variable: impl Fn(&str) -> Option<OsString>) -> Source {
        Self::try_load(here, locate(named, variable)).unwrap_or_else(Source::Priors)
    }

    fn try_load(here: &Machine, place: Option<Place>) -> Result<Source, Reason> {
        let Place { path, named } = place.ok_or(Reason::Untuned { path: None })?;
        if !named && matches!(path.try_exists(), Ok(false)) {
            return Err(Reason::Untuned { path: Some(path) });
        }
        let table = Table::read(&path)?;
        match table.find(here) {
            Ok(Found { entry, without_nccl }) => Tuned::new(entry.clone().into(), path.clone(), without_nccl)
                .map(Source::Table)
                .map_err(|cause| Reason::Damaged { path, cause }),
            Err((cause, stale)) => Err(Reason::Elsewhere { path, cause, stale, named }),
        }
    }
}

#[cfg(test)]
mod tests;
