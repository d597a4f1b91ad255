//! The file of a table: TOML that people can read.

use std::{
    fmt::Write as _,
    fs::{self, File},
    io::{self, Read as _, Write as _},
    path::Path,
    str::FromStr,
};

use serde::{Deserialize, Deserializer, de};

use super::{
    Reason,
    machine::Machine,
    table::{Curve, Entry, NcclFrom, PLACEMENTS, Point, Step, Table, Timing, placement_name},
};
use crate::{Algorithm, Choice, DType, Placement};

/// The version of the file's form.
pub const FORMAT: i64 = 1;

/// The longest file that is read, bytes: some thousand curves.
pub const MAX_FILE_BYTES: u64 = 4 << 20;

const HEADER: &str = "\
# Which algorithm peersum takes for which message, as measured on the machines below. Written by `peersum tune`.
#
# A message takes the last step whose from_bytes is not above its own bytes, and from nccl_from_bytes on (a number of
# bytes, \"never\" or \"not measured\") NCCL. The points are the evidence: each algorithm's best grid, median µs a call.
# An entry holds for the machine that it names, and for no other.
";

impl Table {
    /// From the text of a file. The error says what is wrong with it and on which line.
    pub fn parse(text: &str) -> Result<Table, String> {
        let located = |error: toml::de::Error| {
            let line =
                error.span().and_then(|span| text.get(..span.start)).map(|before| before.matches('\n').count() + 1);
            match line {
                Some(line) => format!("line {line}: {}", error.message()),
                None => error.message().to_owned(),
            }
        };
        // A later format may be anything else, so it is looked at first, and alone.
        match toml::from_str::<FileFormat>(text).map_err(located)?.format {
            None => return Err("it says no `format`, so it is no table of peersum".into()),
            Some(toml::Value::Integer(FORMAT)) => (),
            Some(other) => {
                return Err(format!("format {}, where this release reads {FORMAT}: run `peersum tune`", shown(&other)));
            }
        }
        let file: FileTable = toml::from_str(text).map_err(located)?;
        let table = Table { entries: file.entry.into_iter().map(Entry::from).collect() };
        table.validate()?;
        Ok(table)
    }

    /// From a file. Whatever is wrong with it is a [`Reason`] to go on without.
    pub fn read(path: &Path) -> Result<Table, Reason> {
        let unreadable = |error: io::Error| Reason::Unreadable { path: path.into(), cause: error.to_string() };
        let damaged = |cause: String| Reason::Damaged { path: path.into(), cause };
        // Opening a pipe would wait for who writes it.
        if !fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(damaged("it is no regular file".into()));
        }
        let mut bytes = Vec::new();
        File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)).map_err(unreadable)?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(damaged(format!("it is longer than {} MiB", MAX_FILE_BYTES >> 20)));
        }
        let text = str::from_utf8(&bytes).map_err(|error| damaged(format!("it is no UTF-8 text: {error}")))?;
        Table::parse(text).map_err(damaged)
    }

    /// Into a file, at once: a reader finds the old one or the new one. Makes the folder if it isn't there.
    ///
    /// Of two that write at the same time the later one's table stays. The error is of kind `InvalidData` if
    /// [`Table::validate`] refuses the table or the file would be longer than [`MAX_FILE_BYTES`].
    pub fn write(&self, path: &Path) -> io::Result<()> {
        self.validate().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let text = self.to_text();
        if text.len() as u64 > MAX_FILE_BYTES {
            let error = format!("{} would be longer than {} MiB: remove entries", path.display(), MAX_FILE_BYTES >> 20);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        let located = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        replace(path, text.as_bytes()).map_err(located)
    }

    /// The text of its file. Only what [`Table::validate`] accepts can be read again.
    pub fn to_text(&self) -> String {
        let mut text = format!("{HEADER}\nformat = {FORMAT}\n");
        for entry in &self.entries {
            text.push('\n');
            entry.write(&mut text);
        }
        text
    }
}

impl Entry {
    /// Its part of the file, which is also what ranks compare.
    pub(super) fn to_text(&self) -> String {
        let mut text = String::new();
        self.write(&mut text);
        text
    }

    fn write(&self, text: &mut String) {
        let Entry { machine, measured, command, curves } = self;
        let Machine { gpu, world, links, driver, nccl, peersum, kernels } = machine;
        let links: Vec<_> = links.iter().map(|row| quoted(row)).collect();
        *text += "[[entry]]\n";
        *text += &format!("measured = {}\ncommand = {}\n\n", quoted(measured), quoted(command));
        *text += &format!("[entry.machine]\ngpu = {}\nworld = {world}\n", quoted(gpu));
        *text += &format!("links = [{}]\ndriver = {}\n", links.join(", "), quoted(driver));
        if let Some(nccl) = nccl {
            *text += &format!("nccl = {}\n", quoted(nccl));
        }
        *text += &format!("peersum = {}\nkernels = {}\n", quoted(peersum), quoted(kernels));
        for curve in curves {
            text.push('\n');
            curve.write(text).expect("a String takes whatever is written");
        }
    }
}

impl Curve {
    fn write(&self, text: &mut String) -> std::fmt::Result {
        let Curve { placement, dtype, nccl_from, steps, points } = self;
        writeln!(text, "[[entry.curve]]\nplacement = \"{}\"\ndtype = \"{dtype}\"", placement_name(*placement))?;
        match nccl_from {
            NcclFrom::NotMeasured => writeln!(text, "nccl_from_bytes = \"{NOT_MEASURED}\"")?,
            NcclFrom::Never => writeln!(text, "nccl_from_bytes = \"{NEVER}\"")?,
            NcclFrom::Bytes(bytes) => writeln!(text, "nccl_from_bytes = {bytes}")?,
        }
        writeln!(text, "steps = [")?;
        for Step { from_bytes, choice: Choice { algorithm, blocks, threads } } in steps {
            write!(text, "    {{ from_bytes = {from_bytes}, algorithm = \"{algorithm}\"")?;
            writeln!(text, ", blocks = {blocks}, threads = {threads} }},")?;
        }
        writeln!(text, "]\npoints = [")?;
        for Point { bytes, nccl_us, own } in points {
            write!(text, "    {{ bytes = {bytes}, ")?;
            if let Some(us) = nccl_us {
                write!(text, "nccl_us = {us:?}, ")?;
            }
            writeln!(text, "own = [")?;
            for Timing { choice: Choice { algorithm, blocks, threads }, us } in own {
                write!(text, "        {{ us = {us:?}, algorithm = \"{algorithm}\"")?;
                writeln!(text, ", blocks = {blocks}, threads = {threads} }},")?;
            }
            writeln!(text, "    ] }},")?;
        }
        writeln!(text, "]")
    }
}

const NEVER: &str = "never";
const NOT_MEASURED: &str = "not measured";

/// As a string of TOML. [`Table::validate`] lets no control characters pass.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Short, whatever a file holds there.
fn shown(value: &toml::Value) -> String {
    match value {
        toml::Value::Integer(number) => number.to_string(),
        other => format!("of type {}", other.type_str()),
    }
}

/// Writes a file beside `path`, then renames it.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    // A link stays one, and what it leads to is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it names no file"))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let temporary = folder.join(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    // What a process of the same id left, which is gone.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => (),
    }
    let written = File::create_new(&temporary)
        .and_then(|mut file| file.write_all(content).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&temporary, &path));
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    }
    written
}

// The file as serde sees it. A key that is not known is an error, so that no typing error decides silently.

#[derive(Deserialize)]
struct FileFormat {
    format: Option<toml::Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTable {
    #[serde(rename = "format")]
    _format: i64,
    #[serde(default)]
    entry: Vec<FileEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    measured: String,
    command: String,
    machine: FileMachine,
    #[serde(default)]
    curve: Vec<FileCurve>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileMachine {
    gpu: String,
    world: u32,
    links: Vec<String>,
    driver: String,
    nccl: Option<String>,
    peersum: String,
    kernels: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileCurve {
    #[serde(deserialize_with = "placement")]
    placement: Placement,
    #[serde(deserialize_with = "dtype")]
    dtype: DType,
    #[serde(deserialize_with = "nccl_from")]
    nccl_from_bytes: NcclFrom,
    steps: Vec<FileStep>,
    points: Vec<FilePoint>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileStep {
    from_bytes: u64,
    #[serde(deserialize_with = "algorithm")]
    algorithm: Algorithm,
    blocks: u32,
    threads: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FilePoint {
    bytes: u64,
    nccl_us: Option<f64>,
    own: Vec<FileTiming>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTiming {
    us: f64,
    #[serde(deserialize_with = "algorithm")]
    algorithm: Algorithm,
    blocks: u32,
    threads: u32,
}

fn algorithm<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Algorithm, D::Error> {
    Algorithm::from_str(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}

fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
    let name = String::deserialize(deserializer)?;
    let found = DType::ALL.into_iter().find(|dtype| dtype.to_string() == name);
    found.ok_or_else(|| de::Error::custom(format!("unknown dtype '{name}'; there are f32, f16, bf16")))
}

fn placement<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Placement, D::Error> {
    let name = String::deserialize(deserializer)?;
    PLACEMENTS.into_iter().find(|&placement| placement_name(placement) == name).ok_or_else(|| {
        let names: Vec<_> = PLACEMENTS.into_iter().map(placement_name).collect();
        de::Error::custom(format!("unknown placement '{name}'; there are {}", names.join(", ")))
    })
}

fn nccl_from<'de, D: Deserializer<'de>>(deserializer: D) -> Result<NcclFrom, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a number of bytes, \"never\" or \"not measured\" is expected")]
    enum Border {
        Bytes(u64),
        Word(String),
    }
    match Border::deserialize(deserializer)? {
        Border::Bytes(bytes) => Ok(NcclFrom::Bytes(bytes)),
        Border::Word(word) if word == NEVER => Ok(NcclFrom::Never),
        Border::Word(word) if word == NOT_MEASURED => Ok(NcclFrom::NotMeasured),
        Border::Word(word) => {
            Err(de::Error::custom(format!("'{word}' is no number of bytes, \"{NEVER}\" or \"{NOT_MEASURED}\"")))
        }
    }
}

impl From<FileEntry> for Entry {
    fn from(FileEntry { measured, command, machine, curve }: FileEntry) -> Entry {
        let FileMachine { gpu, world, links, driver, nccl, peersum, kernels } = machine;
        let machine = Machine { gpu, world, links, driver, nccl, peersum, kernels };
        Entry { machine, measured, command, curves: curve.into_iter().map(Curve::from).collect() }
    }
}

impl From<FileCurve> for Curve {
    fn from(FileCurve { placement, dtype, nccl_from_bytes, steps, points }: FileCurve) -> Curve {
        let step = |FileStep { from_bytes, algorithm, blocks, threads }| Step {
            from_bytes,
            choice: Choice { algorithm, blocks, threads },
        };
        let timing = |FileTiming { us, algorithm, blocks, threads }| Timing {
            choice: Choice { algorithm, blocks, threads },
            us,
        };
        let point =
            |FilePoint { bytes, nccl_us, own }| Point { bytes, nccl_us, own: own.into_iter().map(timing).collect() };
        Curve {
            placement,
            dtype,
            nccl_from: nccl_from_bytes,
            steps: steps.into_iter().map(step).collect(),
            points: points.into_iter().map(point).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
