//! What was measured, and where it is kept until all of it is.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow};
use peersum::{Algorithm, Choice, DType, Placement};
use serde::{Deserialize, Serialize};

use super::fit;
use crate::measure::{
    candidate::{Candidate, Home, Way},
    run::Outcome,
    statistics::{median, slowest_of_each},
};

/// What one candidate gave at one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) algorithm: String,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    pub(super) home: Home,
    pub(super) in_place: bool,
    /// In a graph.
    pub(super) calls: usize,
    pub(super) rounds: usize,
    /// Of each replay, the slowest rank's time over the calls.
    pub(super) samples_us: Vec<f64>,
    pub(super) wrong: u64,
}

impl Measured {
    pub(super) fn new(
        candidate: &Candidate,
        in_place: bool,
        (calls, rounds): (usize, usize),
        outcome: &Outcome,
    ) -> Option<Measured> {
        let (algorithm, blocks, threads) = match candidate.way {
            Way::Chosen | Way::NcclAlone => return None,
            Way::Forced(choice) => (choice.algorithm.name(), choice.blocks, choice.threads),
            Way::Empty { blocks, threads } => (EMPTY, blocks, threads),
        };
        Some(Measured {
            algorithm: algorithm.into(),
            blocks,
            threads,
            home: candidate.home,
            in_place,
            calls,
            rounds,
            samples_us: slowest_of_each(&outcome.timings),
            wrong: outcome.wrong.as_ref().map_or(0, |wrong| wrong.elements),
        })
    }

    pub(super) fn is_nccl(&self) -> bool {
        self.algorithm == Algorithm::Nccl.name()
    }

    pub(super) fn us(&self) -> f64 {
        median(self.samples_us.iter().copied())
    }

    /// Whether it says how long calls take whose tensors lie so.
    fn serves(&self, placement: Placement, algorithm: Algorithm) -> bool {
        let measured = match (self.home, self.in_place) {
            (Home::Plain, _) => Placement::Anywhere,
            (Home::Symmetric, false) => Placement::Symmetric,
            (Home::Symmetric, true) => Placement::SymmetricInPlace,
        };
        // What goes through staging doesn't look where tensors lie.
        measured == placement || !(algorithm.is_direct() || algorithm == Algorithm::Nccl)
    }

    fn cell(&self, placement: Placement) -> Option<fit::Cell> {
        let algorithm: Algorithm = self.algorithm.parse().ok()?;
        let candidate = match algorithm {
            Algorithm::Nccl => fit::Candidate::Nccl,
            _ => fit::Candidate::Own(Choice { algorithm, blocks: self.blocks, threads: self.threads }),
        };
        // A file that was tampered with may have no sample, whose median is no time.
        (self.serves(placement, algorithm) && self.us() > 0.0).then(|| fit::Cell {
            candidate,
            us: self.us(),
            wrong: self.wrong,
        })
    }
}

/// What stands for the algorithm of a kernel that does nothing.
pub(super) const EMPTY: &str = "empty";

/// All that was measured at one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SizeRecord {
    pub(super) dtype: String,
    pub(super) bytes: u64,
    pub(super) measured: Vec<Measured>,
    /// Candidates that could not be measured, and why.
    pub(super) missing: Vec<(String, String)>,
}

/// What was measured, size by size: in memory, and in a file beside the table until the table is written.
#[derive(Debug)]
pub(super) struct Kept {
    path: PathBuf,
    content: Content,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    /// The machine and the options: what was measured on another, or with others, is of no use.
    key: String,
    sizes: Vec<SizeRecord>,
}

impl Kept {
    /// Takes up what an earlier run with this key has left beside `table`.
    pub(super) fn open(table: &Path, key: String, restart: bool) -> Result<Kept> {
        let mut path = table.as_os_str().to_owned();
        path.push(".partial");
        let path = PathBuf::from(path);
        let earlier = match fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str::<Content>(&text).ok(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(anyhow!("can't read {}: {error}", path.display())),
        };
        let earlier = earlier.filter(|content| content.key == key && !restart);
        let kept = Kept { path, content: earlier.unwrap_or(Content { key, sizes: Vec::new() }) };
        // Shows now if the place can't be written to.
        kept.write()?;
        Ok(kept)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn sizes(&self) -> &[SizeRecord] {
        &self.content.sizes
    }

    pub(super) fn has(&self, dtype: DType, bytes: u64) -> bool {
        self.sizes().iter().any(|size| size.dtype == dtype.to_string() && size.bytes == bytes)
    }

    /// Adds a size that was finished.
    pub(super) fn add(&mut self, size: SizeRecord) -> Result<()> {
        self.content.sizes.push(size);
        self.write()
    }

    /// Removes the file: the table has all of it.
    pub(super) fn remove(&self) -> Result<()> {
        fs::remove_file(&self.path).with_context(|| format!("can't remove {}", self.path.display()))
    }

    /// What decides between candidates for tensors that lie so.
    pub(super) fn of(&self, placement: Placement, dtype: DType) -> Vec<fit::Size> {
        let sizes = self.sizes().iter().filter(|size| size.dtype == dtype.to_string());
        sizes
            .map(|size| fit::Size {
                bytes: size.bytes,
                cells: size.measured.iter().filter_map(|measured| measured.cell(placement)).collect(),
            })
            .collect()
    }

    fn write(&self) -> Result<()> {
        let mut beside = self.path.as_os_str().to_owned();
        beside.push(".new");
        let located = || format!("can't write {}", self.path.display());
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder).with_context(located)?;
        }
        fs::write(&beside, serde_json::to_string(&self.content)?).with_context(located)?;
        fs::rename(&beside, &self.path).with_context(located)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(algorithm: &str, home: Home, in_place: bool) -> Measured {
        Measured {
            algorithm: algorithm.into(),
            blocks: 2,
            threads: 128,
            home,
            in_place,
            calls: 10,
            rounds: 3,
            samples_us: vec![3.0, 1.0, 2.0],
            wrong: 0,
        }
    }

    fn size(bytes: u64) -> SizeRecord {
        SizeRecord {
            dtype: "bf16".into(),
            bytes,
            measured: vec![measured("two-shot", Home::Plain, false)],
            missing: vec![("nccl".into(), "it is not there".into())],
        }
    }

    #[test]
    fn what_was_finished_is_there_again_after_an_interrupt() {
        let folder = tempfile::tempdir().unwrap();
        let table = folder.path().join("a/table.toml");
        let mut kept = Kept::open(&table, "machine".into(), false).unwrap();
        kept.add(size(1024)).unwrap();
        kept.add(size(2048)).unwrap();
        drop(kept);
        let again = Kept::open(&table, "machine".into(), false).unwrap();
        assert_eq!(again.sizes(), [size(1024), size(2048)]);
        assert!(again.has(DType::BF16, 2048) && !again.has(DType::BF16, 4096) && !again.has(DType::F32, 2048));
        again.remove().unwrap();
        assert!(!again.path().exists());
    }

    #[test]
    fn what_another_run_measured_is_not_taken_up() {
        let folder = tempfile::tempdir().unwrap();
        let table = folder.path().join("table.toml");
        let fill = || Kept::open(&table, "machine".into(), true).unwrap().add(size(1024)).unwrap();
        fill();
        assert!(Kept::open(&table, "another machine".into(), false).unwrap().sizes().is_empty());
        fill();
        assert!(Kept::open(&table, "machine".into(), true).unwrap().sizes().is_empty());
        fs::write(folder.path().join("table.toml.partial"), "{ cut of").unwrap();
        assert!(Kept::open(&table, "machine".into(), false).unwrap().sizes().is_empty());
    }

    #[test]
    fn a_place_that_can_not_be_written_to_shows_at_once() {
        let error = Kept::open(Path::new("/proc/none/table.toml"), String::new(), false).unwrap_err();
        assert!(format!("{error:#}").contains("/proc/none/table.toml.partial"), "{error:#}");
    }

    #[test]
    fn a_measurement_serves_the_placements_that_it_was_made_for_and_staging_all() {
        use Placement::{Anywhere, Symmetric, SymmetricInPlace};
        let served = |algorithm, home, in_place| {
            let measured = measured(algorithm, home, in_place);
            [Anywhere, Symmetric, SymmetricInPlace].map(|placement| measured.cell(placement).is_some())
        };
        assert_eq!(served("two-shot", Home::Symmetric, false), [true; 3]);
        assert_eq!(served("two-shot-direct", Home::Symmetric, false), [false, true, false]);
        assert_eq!(served("two-shot-direct", Home::Symmetric, true), [false, false, true]);
        assert_eq!(served("nccl", Home::Plain, false), [true, false, false]);
        assert_eq!(served("nccl", Home::Symmetric, false), [false, true, false]);
        assert_eq!(served("nccl", Home::Symmetric, true), [false, false, true]);
        assert_eq!(served(EMPTY, Home::Plain, false), [false; 3]);
        assert_eq!(measured("two-shot", Home::Plain, false).cell(Anywhere).unwrap().us, 2.0);
        let none = Measured { samples_us: Vec::new(), ..measured("two-shot", Home::Plain, false) };
        assert!(none.cell(Anywhere).is_none());
    }
}
