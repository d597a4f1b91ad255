//! Where everything about a machine is read from.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use super::nvml::{self, Answers};

/// No file of sysfs or procfs that is read here is longer; `/proc/cpuinfo` of a large machine is the longest.
const LONGEST: u64 = 4 << 20;

/// A machine: the files of `/sys`, `/proc`, `/dev` and `/etc`, what NVML answers, and the variables of this process.
/// Paths are absolute.
pub(crate) trait Source {
    /// The file's bytes.
    fn bytes(&self, path: &str) -> io::Result<Vec<u8>>;
    /// The names in a folder, sorted.
    fn names(&self, path: &str) -> io::Result<Vec<String>>;
    /// The path with all symbolic links followed.
    fn resolved(&self, path: &str) -> io::Result<String>;
    /// What NVML answers, or why it doesn't.
    fn nvml(&self) -> Result<Answers, String>;
    /// The variables of the environment.
    fn variables(&self) -> Vec<(String, String)>;

    /// The file's text without white space at its ends.
    fn text(&self, path: &str) -> io::Result<String> {
        Ok(String::from_utf8_lossy(&self.bytes(path)?).trim().to_owned())
    }

    /// Whether there is something of that name.
    fn is_there(&self, path: &str) -> bool {
        self.resolved(path).is_ok()
    }

    /// The variable's value, if it is set.
    fn variable(&self, name: &str) -> Option<String> {
        self.variables().into_iter().find(|(set, _)| set == name).map(|(_, value)| value)
    }
}

/// This machine.
pub(crate) struct Here;

impl Source for Here {
    fn bytes(&self, path: &str) -> io::Result<Vec<u8>> {
        read(Path::new(path))
    }

    fn names(&self, path: &str) -> io::Result<Vec<String>> {
        names(Path::new(path))
    }

    fn resolved(&self, path: &str) -> io::Result<String> {
        Ok(fs::canonicalize(path)?.to_string_lossy().into_owned())
    }

    fn nvml(&self) -> Result<Answers, String> {
        nvml::ask()
    }

    fn variables(&self) -> Vec<(String, String)> {
        let lossy = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        std::env::vars_os().map(|(name, value)| (lossy(name), lossy(value))).collect()
    }
}

/// A folder that looks like a machine: `sys`, `proc`, `dev`, `etc`, and beside them `nvml.json` (see [`Answers`]) and
/// `environment`, lines of `NAME=value`.
pub(crate) struct Folder {
    root: PathBuf,
}

impl Folder {
    /// The folder must be there.
    pub(crate) fn new(root: &Path) -> io::Result<Self> {
        let root = fs::canonicalize(root)?;
        if !root.is_dir() {
            return Err(io::Error::from(io::ErrorKind::NotADirectory));
        }
        Ok(Folder { root })
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

impl Source for Folder {
    fn bytes(&self, path: &str) -> io::Result<Vec<u8>> {
        read(&self.path(path))
    }

    fn names(&self, path: &str) -> io::Result<Vec<String>> {
        names(&self.path(path))
    }

    fn resolved(&self, path: &str) -> io::Result<String> {
        let resolved = fs::canonicalize(self.path(path))?;
        let inside = resolved.strip_prefix(&self.root).map_err(|_| io::Error::from(io::ErrorKind::NotFound))?;
        Ok(format!("/{}", inside.display()))
    }

    fn nvml(&self) -> Result<Answers, String> {
        let text = self.bytes("/nvml.json").map_err(|error| format!("nvml.json: {error}"))?;
        serde_json::from_slice(&text).map_err(|error| format!("nvml.json: {error}"))
    }

    fn variables(&self) -> Vec<(String, String)> {
        let text = self.text("/environment").unwrap_or_default();
        text.lines().filter_map(|line| line.split_once('=')).map(|(name, value)| (name.into(), value.into())).collect()
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn names(path: &Path) -> io::Result<Vec<String>> {
    let mut names = fs::read_dir(path)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}
