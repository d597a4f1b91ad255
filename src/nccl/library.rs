//! Where NCCL is found, and whether it serves.

use std::{
    collections::HashMap,
    error::Error as _,
    ffi::{CStr, OsString},
    fmt,
    mem::ManuallyDrop,
    path::{Path, PathBuf},
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    NEWEST_TRIED, Version,
    sys::{self, Functions, Status},
};
use crate::{Error, Result};

const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Where PyPI's package puts it, from the folder that packages are installed to.
const IN_SITE_PACKAGES: &str = "nvidia/nccl/lib/libnccl.so.2";

/// NCCL, loaded at run time.
///
/// Any 2.x from 2.18 on serves; what a version lacks is not used. It is never unloaded: its threads and CUDA's
/// callbacks into it may outlive any communicator.
pub struct Library {
    name: PathBuf,
    version: Version,
    functions: Functions,
    _loaded: ManuallyDrop<libloading::Library>,
}

impl Library {
    /// Loads NCCL from `path`, a file or a folder that has `libnccl.so.2` or `libnccl.so`, or searches for it.
    ///
    /// The search takes the first that loads and serves of: `libnccl.so.2` and `libnccl.so` where the system's loader
    /// looks, which also finds one that the process has loaded already; then what PyPI's packages `nvidia-nccl-cu*`
    /// have installed, for the Python environment of `VIRTUAL_ENV`, of `CONDA_PREFIX`, of `PYTHONPATH`, of the user and
    /// of the system. Once found, the same library is returned for the same `path`, at the price of a look into a map.
    ///
    /// # Errors
    ///
    /// [`Error::NcclUnavailable`] with what was tried and what came of each.
    pub fn open(path: Option<&Path>) -> Result<Arc<Library>> {
        static OPEN: Mutex<Option<HashMap<Option<PathBuf>, Arc<Library>>>> = Mutex::new(None);
        // Held while loading, so that threads that come together don't load twice.
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        let key = path.map(Path::to_path_buf);
        if let Some(library) = open.get(&key) {
            return Ok(library.clone());
        }
        let library = Arc::new(match path {
            Some(path) => load_first(given(path), "")?,
            None => search(&|name| std::env::var_os(name))?,
        });
        if library.version > NEWEST_TRIED {
            tracing::debug!(version = %library.version, name = %library.name.display(), "NCCL is newer than was tried");
        }
        open.insert(key, library.clone());
        Ok(library)
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The name that it was loaded by: a path, or `libnccl.so.2` where the system's loader has found it.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Whether ranks can register windows of symmetric memory.
    pub(super) fn has_windows(&self) -> bool {
        self.functions.windows.is_some()
    }

    /// Whether the end of a communicator frees its windows, after all that uses them has ended.
    pub(super) fn frees_windows(&self) -> bool {
        self.version >= Version::new(2, 29, 7)
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// What a new group of ranks meets by.
    pub(super) fn unique_id(&self, rank: usize) -> Result<sys::UniqueId> {
        let mut id = sys::UniqueId { bytes: [0; 128] };
        // SAFETY: `id` is a valid place for the answer.
        let status = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", rank, status)?;
        Ok(id)
    }

    /// Turns a status into a result.
    pub(super) fn check(&self, call: &'static str, rank: usize, status: Status) -> Result<()> {
        if status == sys::SUCCESS {
            return Ok(());
        }
        // SAFETY: any number may be asked for; the answer is null or a string in static memory.
        let mut description = unsafe { text((self.functions.get_error_string)(status)) };
        // One for the process: it may be another rank's, which mostly is as telling, or of an earlier failure.
        let last = self.functions.get_last_error.map(|last_error| {
            // SAFETY: NCCL doesn't look at the communicator, so it may be none. The answer is null or a string in
            // static memory; NCCL may be writing another at this moment, always within that memory and with an end.
            unsafe { text(last_error(ptr::null_mut())) }
        });
        if let Some(last) = last.map(|last| last.trim().to_owned()).filter(|last| !last.is_empty()) {
            description = format!("{description}; NCCL's last error: {last}");
        }
        let hint = hint(status, &description);
        Err(Error::Nccl { call, rank, code: status, name: sys::name(status), description, hint })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("name", &self.name).field("version", &self.version).finish_non_exhaustive()
    }
}

/// What can be done about a status, where that is known.
fn hint(status: Status, description: &str) -> Option<&'static str> {
    if is_not_yet_initialized(description) {
        return Some(
            "CUDA says that while the fabric manager (nvidia-fabricmanager) is not running or not done; \
             NCCL_NVLS_ENABLE=0 does without it",
        );
    }
    matches!(status, sys::UNHANDLED_CUDA_ERROR | sys::SYSTEM_ERROR).then_some(
        "Set NCCL_NVLS_ENABLE=0 if NVLink multicast can't be set up here (a container without /dev/nvidia-caps, a fabric \
         manager that was restarted); NCCL_DEBUG=WARN prints more",
    )
}

/// Whether a text speaks of CUDA's error 802, which goes away by itself while a machine starts.
pub(super) fn is_not_yet_initialized(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    ["system not yet initialized", "failure 802", "error 802"].iter().any(|words| text.contains(words))
}

/// # Safety
/// The pointer must be null or to a string.
unsafe fn text(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return "unknown".into();
    }
    // SAFETY: the caller vouches for it.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// What may be meant by a path that was given.
fn given(path: &Path) -> Vec<PathBuf> {
    if path.is_dir() {
        return NAMES.map(|name| path.join(name)).to_vec();
    }
    // Without a slash the system's loader would search for it.
    let name_only = path.parent().is_none_or(|parent| parent.as_os_str().is_empty());
    vec![if name_only { Path::new(".").join(path) } else { path.to_owned() }]
}

fn search(environment: &dyn Fn(&str) -> Option<OsString>) -> Result<Library> {
    let folders = site_packages(environment);
    let packaged = folders.iter().map(|folder| folder.join(IN_SITE_PACKAGES)).filter(|path| path.exists());
    let names = NAMES.iter().map(PathBuf::from).chain(packaged);
    let looked = format!(
        "; {IN_SITE_PACKAGES} was looked for in {} folders of Python packages. Install NCCL (`pip install \
         nvidia-nccl-cu13`, or the system's libnccl2), or give the path to it",
        folders.len()
    );
    load_first(names, &looked)
}

/// The folders that Python's packages are installed to, of the environments that are in sight.
fn site_packages(environment: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let set = |name| environment(name).filter(|value| !value.is_empty());
    let mut folders = Vec::new();
    for prefix in ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(set) {
        folders.extend(of_pythons(&Path::new(&prefix).join("lib")));
    }
    if let Some(paths) = set("PYTHONPATH") {
        folders.extend(std::env::split_paths(&paths).filter(|path| path.is_dir()));
    }
    if let Some(home) = set("HOME") {
        folders.extend(of_pythons(&Path::new(&home).join(".local/lib")));
    }
    folders.extend(of_pythons(Path::new("/usr/local/lib")));
    folders.extend(of_pythons(Path::new("/usr/lib")));
    folders
}

/// `python3*/site-packages` and `python3*/dist-packages`, the latest Python's first.
fn of_pythons(lib: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(lib).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut pythons: Vec<(u32, String)> = names
        .filter_map(|name| {
            let minor = name.strip_prefix("python3")?;
            Some((minor.strip_prefix('.').and_then(|minor| minor.parse().ok()).unwrap_or(0), name))
        })
        .collect();
    pythons.sort_by(|left, right| right.cmp(left));
    let folders =
        pythons.iter().flat_map(|(_, name)| ["site-packages", "dist-packages"].map(|kind| lib.join(name).join(kind)));
    folders.filter(|folder| folder.is_dir()).collect()
}

/// The first that loads and serves, or what came of each.
fn load_first(names: impl IntoIterator<Item = PathBuf>, looked: &str) -> Result<Library> {
    let mut tried = Vec::new();
    for name in names {
        match load(&name) {
            Ok(library) => return Ok(library),
            Err(reason) => tried.push(format!("{}: {reason}", name.display())),
        }
    }
    Err(Error::NcclUnavailable { reason: format!("{}{looked}", tried.join("; ")) })
}

fn load(name: &Path) -> Result<Library, String> {
    // SAFETY: loading NCCL runs its initialisers, as in any program that uses it. That a file of this name is NCCL is
    // what whoever installed it or gave its path says.
    let loaded = unsafe { libloading::Library::new(name) }.map_err(|error| {
        // The error itself says no more than that it failed.
        error.source().map_or_else(|| error.to_string(), |source| source.to_string())
    })?;
    // Never unloaded, not even if it doesn't serve: somebody else in the process may have it.
    let loaded = ManuallyDrop::new(loaded);
    // SAFETY: a library that has functions of these names is NCCL or made to take its place; it stays loaded.
    let (version, functions) = unsafe { Functions::of(&loaded) }?;
    Ok(Library { name: name.to_owned(), version, functions, _loaded: loaded })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_stub::{Stub, variants};

    /// A folder that is gone with the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("peersum-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn packages_of_python_are_found_by_the_environment() {
        let root = Folder::new("site-packages");
        let folder = |path: &str| {
            let path = root.0.join(path);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let expected = [
            folder("venv/lib/python3.12/site-packages"),
            folder("venv/lib/python3.9/site-packages"),
            folder("conda/lib/python3.11/site-packages"),
            folder("extra"),
            folder("home/.local/lib/python3.10/site-packages"),
        ];
        folder("venv/lib/ruby/site-packages");
        let environment = |name: &str| {
            let path = match name {
                "VIRTUAL_ENV" => "venv",
                "CONDA_PREFIX" => "conda",
                "PYTHONPATH" => {
                    return Some(std::env::join_paths([root.0.join("extra"), root.0.join("absent")]).unwrap());
                }
                "HOME" => "home",
                _ => return None,
            };
            Some(root.0.join(path).into_os_string())
        };
        assert_eq!(site_packages(&environment)[..expected.len()], expected);
    }

    #[test]
    fn what_pypi_installs_is_found_where_the_system_has_none() {
        if load_first(NAMES.map(PathBuf::from), "").is_ok() {
            return eprintln!("skipped: this machine has an NCCL where the system's loader looks, which comes first");
        }
        let root = Folder::new("venv");
        let installed = root.0.join("lib/python3.12/site-packages").join(IN_SITE_PACKAGES);
        std::fs::create_dir_all(installed.parent().unwrap()).unwrap();
        std::fs::copy(variants::V2_32, &installed).unwrap();
        let library = search(&|name| (name == "VIRTUAL_ENV").then(|| root.0.clone().into_os_string())).unwrap();
        assert_eq!((library.name(), library.version()), (&*installed, Version::new(2, 32, 3)));
    }

    #[test]
    fn a_library_that_does_not_serve_is_passed_over_for_one_that_does() {
        let (old, good) = (Stub::new(variants::V2_17), Stub::new(variants::V2_18));
        let library = load_first([old.path().to_owned(), good.path().to_owned()], "").unwrap();
        assert_eq!(library.name(), good.path());
    }

    #[test]
    fn error_802_is_told_by_its_words() {
        for text in ["Cuda failure 802 'system not yet initialized'", "Cuda failure 'System not yet initialized'"] {
            assert!(is_not_yet_initialized(text), "{text}");
        }
        for text in ["Cuda failure 700 'an illegal memory access'", "comm 0x7f8020000 rank 802"] {
            assert!(!is_not_yet_initialized(text), "{text}");
        }
    }
}
