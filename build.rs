//! Compiles `kernels/*.cu` to fatbins where nvcc is found, and writes `$OUT_DIR/kernels.rs`, which embeds them.
//!
//! Nothing of CUDA is linked, and without nvcc the crate builds all the same: the CUDA backend then says why it has no
//! kernels. `tests/build_script.rs` includes this file and holds its pure part.

use std::{
    collections::BTreeSet,
    env,
    ffi::{OsStr, OsString},
    fmt::Write as _,
    fs, iter,
    num::NonZero,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// Architectures that get machine code. Code for x.0 runs on every x.y, so these are the GPUs of 8.x, 9.x, 10.x, 12.x.
const ARCHITECTURES: [u32; 4] = [80, 90, 100, 120];

/// The PTX that goes along, which the driver compiles when it loads. PTX serves only GPUs that are not older, so that
/// of the newest architecture would leave out 11.x; this one serves 11.x and whatever comes after 12.x, and also 10.x
/// and 12.x where nvcc is too old to make their code. Only 8.x is older, and its code is always there.
const PTX: u32 = 90;

/// Where nvcc is looked for, in this order; the last place is [`DEFAULT_NVCC`].
const NVCC: &str = "PEERSUM_NVCC";
const TOOLKITS: [&str; 2] = ["CUDA_HOME", "CUDA_PATH"];
const DEFAULT_NVCC: &str = "/usr/local/cuda/bin/nvcc";

/// The unit that the command alone uses: an image of its own, which the library doesn't load.
const PROBE: &str = "probe";

const REQUIRE: &str = "PEERSUM_REQUIRE_NVCC";
const ONLY: &str = "PEERSUM_CUDA_ARCHS";

/// The oldest CUDA that compiles the kernels: 16-byte accesses at system scope are of PTX ISA 8.4.
const OLDEST: (u32, u32) = (12, 4);

const INSTALL: &str = "install the CUDA toolkit, 12.4 or later (12.8 or later for machine code for 10.x and 12.x), \
                       then set PEERSUM_NVCC to its nvcc or CUDA_HOME to its folder, or put nvcc on PATH, and build again";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The kernels belong to the CUDA backend.
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    if let Err(message) = kernels() {
        for line in message.lines().filter(|line| !line.trim().is_empty()) {
            println!("cargo::error={line}");
        }
    }
}

/// Writes `$OUT_DIR/kernels.rs`, with the images or with the reason why there are none.
fn kernels() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: this is a build script of cargo")?);
    let required = variable(REQUIRE).is_some_and(|value| value != "0");
    let generated = match compile(&out)? {
        Ok(images) => {
            println!("cargo::rustc-cfg=peersum_kernels");
            rust_source(&images, "")
        }
        Err(reason) if required => return Err(format!("{REQUIRE} is set, but {reason}")),
        Err(reason) => rust_source(&[], &reason),
    };
    // What the command measures links with is none of the kernels whose times a table holds.
    let mut sources = sources(Path::new("kernels"))?;
    sources.retain(|(name, _)| Path::new(name).file_stem() != Some(OsStr::new(PROBE)));
    let generated = generated + &digest_source(&sources);
    let path = out.join("kernels.rs");
    fs::write(&path, generated).map_err(|error| format!("{}: {error}", path.display()))
}

/// The sources in a folder by name, whatever they are of.
fn sources(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, String> {
    let mut sources = Vec::new();
    for extension in ["cu", "cuh", "h"] {
        for path in files(folder, extension).map_err(|error| format!("{}: {error}", folder.display()))? {
            let text = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
            sources.push((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), text));
        }
    }
    sources.sort();
    Ok(sources)
}

/// The line of `$OUT_DIR/kernels.rs` that tells these kernels from others: of the sources, so that builds for different GPUs
/// agree.
pub(crate) fn digest_source(sources: &[(String, Vec<u8>)]) -> String {
    // FNV-1a, 64 bits (Fowler, Noll, Vo). A length ends each text, so that none goes on in the next.
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes {
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for (name, text) in sources {
        for part in [name.as_bytes(), text] {
            add(part);
            add(&(part.len() as u64).to_le_bytes());
        }
    }
    format!("\n/// Of the kernels' sources.\npub(crate) const DIGEST: &str = \"{digest:016x}\";\n")
}

/// The file names of the images in `out`, or why there can be none. The outer error is a failure of the build.
fn compile(out: &Path) -> Result<Result<Vec<String>, String>, String> {
    println!("cargo::rerun-if-changed=kernels");
    let units = files(Path::new("kernels"), "cu").map_err(|error| format!("kernels: {error}"))?;
    if units.is_empty() {
        return Ok(Err("this source tree has no kernels/*.cu".into()));
    }
    // docs.rs has no toolkit, and documentation needs no kernels.
    if variable("DOCS_RS").is_some() {
        return Ok(Err("this is a build for documentation (DOCS_RS is set)".into()));
    }
    let Some(nvcc) = find_nvcc(&variable, &|path| path.is_file())? else {
        return Ok(Err(format!("no nvcc was found when this crate was built: {INSTALL}")));
    };
    println!("cargo::rerun-if-changed={}", nvcc.display());
    // tests/sass takes the images apart with the tools beside nvcc.
    println!("cargo::rustc-env=PEERSUM_BUILT_WITH={}", nvcc.display());
    println!("cargo::rustc-env=PEERSUM_FATBIN_DIR={}", out.display());
    let supported = numbers(&run(Command::new(&nvcc).arg("--list-gpu-code"))?);
    let version = run(Command::new(&nvcc).arg("--version"))?;
    let targets =
        check_release(&version).and_then(|()| targets(variable(ONLY).as_deref(), &supported)).map_err(|message| {
            format!("{message}; {} is of {}", nvcc.display(), release(&version).unwrap_or("no release"))
        })?;
    for warning in &targets.warnings {
        println!("cargo::warning={warning}");
    }
    // nvcc itself reads these.
    for name in ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"] {
        variable(name);
    }

    // An image of a unit that is gone would be taken for one of today's by whoever looks into the folder.
    for image in files(out, "fatbin").map_err(|error| format!("{}: {error}", out.display()))? {
        fs::remove_file(&image).map_err(|error| format!("{}: {error}", image.display()))?;
    }
    let jobs = variable("NUM_JOBS").and_then(|jobs| jobs.to_str()?.parse().ok()).unwrap_or(NonZero::<usize>::MIN);
    let workers = jobs.get().min(units.len());
    let next = AtomicUsize::new(0);
    let work = || {
        iter::from_fn(|| units.get(next.fetch_add(1, Ordering::Relaxed)))
            .map(|unit| {
                let image = format!("{}.fatbin", unit.file_stem().unwrap_or_default().display());
                let arguments = arguments(&targets, jobs.get() / workers, unit, &out.join(&image));
                let warnings = run(Command::new(&nvcc).args(arguments))?;
                for line in warnings.lines().filter(|line| !line.trim().is_empty()) {
                    println!("cargo::warning={line}");
                }
                Ok(image)
            })
            .collect::<Result<Vec<_>, String>>()
    };
    let results: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| Err("a build thread panicked".into())))
            .collect()
    });
    let mut images = Vec::new();
    for result in results {
        images.extend(result?);
    }
    // Who compiled what depends on timing; the generated file must not.
    images.sort();
    Ok(Ok(images))
}

/// The value of an environment variable, if it is set and not empty. cargo reruns this script when it changes.
fn variable(name: &str) -> Option<OsString> {
    // cargo sets NUM_JOBS itself, and another number of jobs gives the same images.
    if name != "NUM_JOBS" {
        println!("cargo::rerun-if-env-changed={name}");
    }
    env::var_os(name).filter(|value| !value.is_empty())
}

/// The files of a folder that end so, in the order of their names.
fn files(folder: &Path, extension: &str) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension() == Some(OsStr::new(extension)) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Looks for nvcc. A variable that is set and leads to nothing is an error: whoever set it meant that toolkit.
pub(crate) fn find_nvcc(
    variable: &dyn Fn(&str) -> Option<OsString>,
    is_file: &dyn Fn(&Path) -> bool,
) -> Result<Option<PathBuf>, String> {
    let named = iter::once((NVCC, "")).chain(TOOLKITS.map(|name| (name, "bin/nvcc")));
    for (name, below) in named {
        let Some(value) = variable(name) else { continue };
        let value = PathBuf::from(value);
        let nvcc = if below.is_empty() { value.clone() } else { value.join(below) };
        return if is_file(&nvcc) {
            Ok(Some(nvcc))
        } else {
            Err(format!(
                "{name} is set to {}, but {} is no file: set it to a CUDA toolkit's {}, or unset it",
                value.display(),
                nvcc.display(),
                if below.is_empty() { "nvcc" } else { "folder" },
            ))
        };
    }
    let path = variable("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("nvcc"));
    Ok(on_path.chain([PathBuf::from(DEFAULT_NVCC)]).find(|nvcc| is_file(nvcc)))
}

/// What nvcc is to compile for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Targets {
    pub(crate) machine: Vec<u32>,
    pub(crate) ptx: Option<u32>,
    pub(crate) warnings: Vec<String>,
}

/// Chooses from what this nvcc supports. `only` is a list such as "90" or "80,90", for quick builds while developing.
pub(crate) fn targets(only: Option<&OsStr>, supported: &BTreeSet<u32>) -> Result<Targets, String> {
    let needed = |number: u32| if number < 100 { "12.4" } else { "12.8" };
    if let Some(only) = only {
        let list = only.to_str().ok_or_else(|| format!("{ONLY} is not UTF-8"))?;
        let mut machine = BTreeSet::new();
        for item in list.split(',') {
            let number = item
                .trim()
                .parse::<u32>()
                .map_err(|_| format!("{ONLY}={list}: '{item}' is no number; write for example {ONLY}=90,100"))?;
            if number < ARCHITECTURES[0] {
                return Err(format!("{ONLY}={list}: the kernels need {} or later", ARCHITECTURES[0]));
            }
            if !supported.contains(&number) {
                return Err(format!("{ONLY}={list}: nvcc can't compile for sm_{number}"));
            }
            machine.insert(number);
        }
        return Ok(Targets { machine: machine.into_iter().collect(), ptx: None, warnings: Vec::new() });
    }
    if !supported.contains(&PTX) {
        return Err(format!("nvcc can't compile for sm_{PTX}: it must be of CUDA {} or later", needed(PTX)));
    }
    let (machine, missing): (Vec<u32>, Vec<u32>) =
        ARCHITECTURES.into_iter().partition(|number| supported.contains(number));
    let warnings = missing
        .into_iter()
        .map(|number| {
            let generation = number / 10;
            if number > PTX {
                format!(
                    "this nvcc can't compile for sm_{number} (CUDA {} or later can): GPUs of {generation}.x will compile \
                     the kernels from PTX when they load them",
                    needed(number)
                )
            } else {
                format!("this nvcc can't compile for sm_{number}: there are no kernels for GPUs of {generation}.x")
            }
        })
        .collect();
    Ok(Targets { machine, ptx: Some(PTX), warnings })
}

/// nvcc's arguments for one translation unit.
pub(crate) fn arguments(targets: &Targets, threads: usize, unit: &Path, image: &Path) -> Vec<OsString> {
    // Line numbers let a profiler show the source. Compressed, the images take a sixth of the room.
    let mut arguments: Vec<OsString> =
        ["-O3", "-std=c++17", "--fatbin", "-lineinfo", "-Xfatbin=-compress-all"].map(Into::into).into();
    for number in &targets.machine {
        arguments.push(format!("--generate-code=arch=compute_{number},code=sm_{number}").into());
    }
    if let Some(number) = targets.ptx {
        arguments.push(format!("--generate-code=arch=compute_{number},code=compute_{number}").into());
    }
    if threads > 1 {
        arguments.push(format!("--threads={threads}").into());
    }
    arguments.extend([OsString::from("-o"), image.into(), unit.into()]);
    arguments
}

/// The numbers in lines such as "sm_90".
pub(crate) fn numbers(list: &str) -> BTreeSet<u32> {
    list.lines().filter_map(|line| line.trim().strip_prefix("sm_")?.parse().ok()).collect()
}

/// "release 13.0" of what `nvcc --version` prints.
pub(crate) fn release(version: &str) -> Option<&str> {
    let start = version.find("release ")?;
    version[start..].split([',', '\n']).next()
}

/// Whether the nvcc that printed this is new enough. One that doesn't say is left to fail by itself.
pub(crate) fn check_release(version: &str) -> Result<(), String> {
    let numbers = release(version)
        .and_then(|release| release.strip_prefix("release ")?.trim().split_once('.'))
        .and_then(|(major, minor)| Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?)));
    match numbers {
        Some(found) if found < OLDEST => Err(format!("nvcc must be of CUDA {}.{} or later", OLDEST.0, OLDEST.1)),
        _ => Ok(()),
    }
}

/// The source of `$OUT_DIR/kernels.rs`.
pub(crate) fn rust_source(images: &[String], reason: &str) -> String {
    let mut source = String::from("// Written by build.rs.\n\n");
    let (mut list, mut probe) = (String::new(), String::from("None"));
    for (index, image) in images.iter().enumerate() {
        // The driver reads an image's headers in place, and bytes alone may lie anywhere.
        writeln!(
            source,
            "const IMAGE_{index}: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!(\"OUT_DIR\"), {:?})));",
            format!("/{image}")
        )
        .expect("a String takes all");
        if Path::new(image).file_stem() == Some(OsStr::new(PROBE)) {
            probe = format!("Some(&IMAGE_{index}.0)");
        } else {
            write!(list, "{}&IMAGE_{index}.0", if list.is_empty() { "" } else { ", " }).expect("a String takes all");
        }
    }
    if !images.is_empty() {
        source.push_str("\n#[repr(C, align(16))]\nstruct Aligned<T: ?Sized>(T);\n");
    }
    write!(
        source,
        "\n/// The compiled kernels: fatbins, each aligned to 16 bytes.\n\
         pub(crate) static IMAGES: &[&[u8]] = &[{list}];\n\
         \n/// The kernels of `peersum p2p` and `peersum probe`.\n\
         pub(crate) static PROBE: Option<&[u8]> = {probe};\n\
         \n/// Why there are none; empty if there are.\n\
         #[allow(dead_code)]\n\
         pub(crate) const REASON: &str = {reason:?};\n"
    )
    .expect("a String takes all");
    source
}

/// Runs a command to its end: what it printed, which is the error's text if it failed.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let printed = format!("{}{}", String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    if output.status.success() {
        Ok(printed)
    } else {
        Err(format!("{command:?} failed ({}):\n{printed}", output.status))
    }
}
