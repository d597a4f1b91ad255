//! What was decided: the entry of the table, and what is told of it.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow, ensure};
use peersum::{
    DType, Placement,
    crossover::{self, Curve, Entry, Machine, NcclFrom, Reason, Step, Table},
};

use super::{
    date,
    fit::{self, Warning},
    kept::Kept,
    options::Config,
};
use crate::sizes::Size;

/// The file that the table goes to.
#[derive(Debug)]
pub(super) struct Destination {
    path: PathBuf,
}

impl Destination {
    /// The file that is named, or the user's. What is there must be a table, since its other entries stay.
    pub(super) fn open(named: Option<&Path>) -> Result<Destination> {
        let place = crossover::locate(named, |name| std::env::var_os(name));
        let place = place.context(
            "there is no place for the table, since neither HOME nor XDG_CACHE_HOME is set: name a file with --output",
        )?;
        let destination = Destination { path: place.path };
        destination.table()?;
        Ok(destination)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn table(&self) -> Result<Table> {
        if matches!(self.path.try_exists(), Ok(false)) {
            return Ok(Table::default());
        }
        Table::read(&self.path)
            .map_err(|reason: Reason| anyhow!("{reason}: move the file away, or name another with --output"))
    }

    /// Puts the entry into the file; it is read again, since somebody else may have written it meanwhile.
    pub(super) fn write(&self, entry: Entry) -> Result<()> {
        let mut table = self.table()?;
        table.upsert(entry);
        Ok(table.write(&self.path)?)
    }
}

/// What was decided.
pub(super) struct Verdict {
    pub(super) entry: Entry,
    /// By curve, like the curves of the entry.
    warnings: Vec<Vec<Warning>>,
    /// Placements for which nothing could be chosen, and why.
    without: Vec<(Placement, DType, String)>,
    /// What could not be measured, why, and at how many sizes.
    missing: Vec<(String, String, usize)>,
}

impl Verdict {
    pub(super) fn new(kept: &Kept, config: &Config, machine: Machine) -> Result<Verdict> {
        let (mut curves, mut warnings, mut without) = (Vec::new(), Vec::new(), Vec::new());
        for &dtype in &config.dtypes {
            for &placement in &config.placements {
                match fit::fit(placement, dtype, &kept.of(placement, dtype)) {
                    Ok(fit) => {
                        curves.push(fit.curve);
                        warnings.push(fit.warnings);
                    }
                    Err(none) => without.push((placement, dtype, none.to_string())),
                }
            }
        }
        if curves.is_empty() {
            let reasons: Vec<_> = without.iter().map(|(_, _, reason)| reason.as_str()).collect();
            let reason = reasons.first().copied().unwrap_or("nothing was measured");
            ensure!(!curves.is_empty(), "there is no table: {reason}");
        }
        let mut missing: Vec<(String, String, usize)> = Vec::new();
        for (name, reason) in kept.sizes().iter().flat_map(|size| &size.missing) {
            match missing.iter_mut().find(|(known, why, _)| (known, why) == (name, reason)) {
                Some((_, _, sizes)) => *sizes += 1,
                None => missing.push((name.clone(), reason.clone(), 1)),
            }
        }
        let entry = Entry { machine, measured: date::today(), command: command(), curves };
        Ok(Verdict { entry, warnings, without, missing })
    }

    /// Whether no candidate gave a wrong element.
    pub(super) fn is_right(&self) -> bool {
        !self.warnings.iter().flatten().any(|warning| matches!(warning, Warning::Wrong { .. }))
            && self.without.is_empty()
    }

    /// Prints the decisions, and what is to be said about them.
    pub(super) fn tell(&self, out: &mut dyn Write) -> io::Result<()> {
        for (curve, warnings) in self.entry.curves.iter().zip(&self.warnings) {
            writeln!(out, "#")?;
            writeln!(out, "# {}, tensors {}", curve.dtype, lies(curve.placement))?;
            writeln!(out, "# {:>12}  {:<16} {:>7} {:>8}  expected", "from", "", "blocks", "threads")?;
            let border = match curve.nccl_from {
                NcclFrom::Bytes(bytes) => Some(bytes),
                NcclFrom::Never | NcclFrom::NotMeasured => None,
            };
            for step in curve.steps.iter().filter(|step| border.is_none_or(|border| step.from_bytes < border)) {
                step_line(out, curve, step)?;
            }
            match (border, curve.nccl_from) {
                (Some(bytes), _) => {
                    let expected = expected(curve, bytes, |bytes| curve.nccl_us(bytes));
                    writeln!(out, "  {:>12}  {:<16} {:>7} {:>8}  {expected}", bytes_name(bytes), "NCCL", "", "")?;
                }
                (None, NcclFrom::Never) => writeln!(out, "# NCCL is at no size faster")?,
                (None, _) => writeln!(out, "# NCCL was not measured, so no call is handed over to it")?,
            }
            for warning in warnings {
                writeln!(out, "# WARNING: {warning}")?;
            }
        }
        if !self.without.is_empty() || !self.missing.is_empty() {
            writeln!(out, "#")?;
        }
        for (placement, dtype, reason) in &self.without {
            writeln!(out, "# WARNING: no curve for {dtype}, tensors {}: {reason}", lies(*placement))?;
        }
        for (name, reason, sizes) in &self.missing {
            let many = if *sizes == 1 { "" } else { "s" };
            writeln!(out, "# Not measured at {sizes} size{many}: {name}: {reason}")?;
        }
        writeln!(out, "#")
    }
}

fn step_line(out: &mut dyn Write, curve: &Curve, step: &Step) -> io::Result<()> {
    let algorithm = step.choice.algorithm;
    writeln!(
        out,
        "  {:>12}  {:<16} {:>7} {:>8}  {}",
        bytes_name(step.from_bytes),
        algorithm.name(),
        step.choice.blocks,
        step.choice.threads,
        expected(curve, step.from_bytes, |bytes| curve.own_us(algorithm, bytes)),
    )
}

/// What a call takes, at the first size from here on that was measured.
fn expected(curve: &Curve, from_bytes: u64, us: impl Fn(u64) -> Option<f64>) -> String {
    let at = curve.points.iter().map(|point| point.bytes).find(|&bytes| bytes >= from_bytes);
    match at.and_then(|bytes| Some((bytes, us(bytes)?))) {
        Some((bytes, us)) => format!("{us:.2} us at {}", Size(bytes)),
        None => "not measured".into(),
    }
}

/// Bytes in the largest unit that is exact.
fn bytes_name(bytes: u64) -> String {
    Size(bytes).to_string()
}

/// Where tensors lie, in words.
pub(super) fn lies(placement: Placement) -> &'static str {
    match placement {
        Placement::Anywhere => "anywhere",
        Placement::SymmetricInput => "with the input in symmetric memory",
        Placement::Symmetric => "in symmetric memory",
        Placement::SymmetricInPlace => "in symmetric memory, in place",
        _ => "elsewhere",
    }
}

/// The command line, as one line.
fn command() -> String {
    let mut words = vec!["peersum".to_owned()];
    words.extend(std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()));
    words.join(" ").chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use peersum::{
        Algorithm, Choice,
        crossover::{Point, Timing},
    };

    use super::*;

    fn verdict(nccl_from: NcclFrom) -> Verdict {
        let choice = |algorithm, blocks| Choice { algorithm, blocks, threads: 128 };
        let (ll, pull) = (choice(Algorithm::OneShotLl, 4), choice(Algorithm::TwoShotPull, 32));
        let point = |bytes, first, second, nccl| Point {
            bytes,
            nccl_us: Some(nccl),
            own: vec![Timing { choice: ll, us: first }, Timing { choice: pull, us: second }],
        };
        let curve = Curve {
            placement: Placement::Anywhere,
            dtype: DType::BF16,
            nccl_from,
            steps: vec![Step { from_bytes: 0, choice: ll }, Step { from_bytes: 3000, choice: pull }],
            points: vec![point(1024, 2.0, 3.0, 9.0), point(4096, 6.0, 4.0, 9.5), point(16384, 20.0, 12.0, 10.0)],
        };
        let machine = Machine {
            gpu: "a GPU".into(),
            world: 1,
            links: vec!["=".into()],
            driver: "1".into(),
            nccl: Some("2.30.0".into()),
            peersum: "0.1.0".into(),
            kernels: "0".into(),
        };
        Verdict {
            entry: Entry {
                machine,
                measured: "2026-11-30".into(),
                command: "peersum tune".into(),
                curves: vec![curve],
            },
            warnings: vec![vec![Warning::NothingOwn { bytes: 64 }]],
            without: Vec::new(),
            missing: vec![("two-shot".into(), "it does not fit".into(), 2)],
        }
    }

    fn told(verdict: &Verdict) -> String {
        let mut out = Vec::new();
        verdict.tell(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn decisions_have_their_grids_and_times_and_nccl_its_border() {
        let text = told(&verdict(NcclFrom::Bytes(12_000)));
        let rows: Vec<Vec<&str>> =
            text.lines().filter(|line| !line.starts_with('#')).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["0", "one-shot-ll", "4", "128", "2.00", "us", "at", "1K"]);
        assert_eq!(rows[1], ["3000", "two-shot-pull", "32", "128", "4.00", "us", "at", "4K"]);
        assert_eq!(rows[2], ["12000", "NCCL", "10.00", "us", "at", "16K"]);
        assert!(text.contains("# WARNING: 64 B: no algorithm but NCCL has a time"), "{text}");
        assert!(text.contains("# Not measured at 2 sizes: two-shot: it does not fit"), "{text}");
        // Steps above the border are never taken.
        assert_eq!(told(&verdict(NcclFrom::Bytes(2_000))).matches("two-shot-pull").count(), 0);
        assert!(told(&verdict(NcclFrom::Never)).contains("# NCCL is at no size faster"));
        assert!(told(&verdict(NcclFrom::NotMeasured)).contains("# NCCL was not measured"));
    }

    #[test]
    fn a_wrong_element_is_no_success() {
        let mut verdict = verdict(NcclFrom::Never);
        assert!(verdict.is_right());
        verdict.warnings[0].push(Warning::Wrong { name: "two-shot", cells: 1, bytes: 64, wrong: 1 });
        assert!(!verdict.is_right());
    }

    #[test]
    fn a_file_that_is_no_table_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.toml");
        fs::write(&path, "what is this").unwrap();
        let error = Destination::open(Some(&path)).unwrap_err().to_string();
        assert!(error.contains("move the file away") && error.contains("table.toml"), "{error}");
        fs::remove_file(&path).unwrap();
        let destination = Destination::open(Some(&path)).unwrap();
        destination.write(verdict(NcclFrom::Never).entry).unwrap();
        assert_eq!(Table::read(&path).unwrap().entries.len(), 1);
    }
}
