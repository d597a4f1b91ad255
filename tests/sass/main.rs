//! The contract of the compiled kernels: wide accesses, system scope, packets in one access and without fences, polled by
//! loads that go out together, no spills, nothing that is not coherent.
//!
//! A kernel that lost these would still pass tests of results, slowly, or fail them rarely. cuobjdump takes apart what
//! build.rs compiled. Without nvcc or cuobjdump this says so and passes, or fails where PEERSUM_REQUIRE_NVCC is set.
#![cfg(feature = "cuda")]

mod contract;
mod listing;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use contract::Kernel;
use peersum::DType;

/// Kernels of `kernels/verify.cu` and `kernels/self_test.cu`, which are no part of a call, and of `kernels/probe.cu`, which reduce nothing: the stack is
/// all that they are held to.
const HELPERS: [&str; 8] = [
    "peersum_fill_",
    "peersum_check_",
    "peersum_advance",
    "peersum_empty",
    "peersum_probe_",
    "peersum_read_",
    "peersum_trial_",
    "peersum_write_",
];

/// The images that build.rs left, or why there are none.
fn images() -> Result<Vec<PathBuf>, String> {
    let folder = option_env!("PEERSUM_FATBIN_DIR").ok_or("the crate was built without nvcc")?;
    let entries = fs::read_dir(folder).map_err(|error| format!("{folder}: {error}"))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let images: Vec<_> = paths.filter(|path| path.extension().is_some_and(|extension| extension == "fatbin")).collect();
    if images.is_empty() { Err(format!("{folder} has no images")) } else { Ok(images) }
}

/// cuobjdump: what PEERSUM_CUOBJDUMP names, or that beside nvcc, or that on PATH.
fn cuobjdump() -> Result<PathBuf, String> {
    if let Some(named) = env::var_os("PEERSUM_CUOBJDUMP") {
        return Ok(named.into());
    }
    let beside = option_env!("PEERSUM_BUILT_WITH").map(|nvcc| Path::new(nvcc).with_file_name("cuobjdump"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("cuobjdump"));
    beside.into_iter().chain(on_path).find(|tool| tool.is_file()).ok_or_else(|| {
        "there is no cuobjdump: set PEERSUM_CUOBJDUMP, or put it beside nvcc or on PATH, and nvdisasm with it".into()
    })
}

fn run(tool: &Path, option: &str, image: &Path) -> String {
    let output = Command::new(tool).arg(option).arg(image).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", tool.display()));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {option} {} failed: {errors}", tool.display(), image.display());
    String::from_utf8(output.stdout).expect("cuobjdump prints UTF-8")
}

#[test]
fn every_kernel_keeps_the_contract() {
    let required = env::var_os("PEERSUM_REQUIRE_NVCC").is_some_and(|value| !value.is_empty() && value != "0");
    let (images, tool) = match images().and_then(|images| Ok((images, cuobjdump()?))) {
        Ok(found) => found,
        Err(reason) if required => panic!("PEERSUM_REQUIRE_NVCC is set, but {reason}"),
        Err(reason) => return eprintln!("skipped: {reason}"),
    };
    let mut broken = Vec::new();
    let mut kernels: BTreeMap<String, BTreeSet<Kernel>> = BTreeMap::new();
    for image in &images {
        for ((architecture, name), bytes) in listing::stacks(&run(&tool, "-res-usage", image)) {
            if bytes != 0 {
                broken.push(format!("{architecture} {name}: {bytes} bytes of stack"));
            }
        }
        for function in listing::functions(&run(&tool, "-sass", image)) {
            let Some(kernel) = Kernel::of(&function.name) else {
                if !HELPERS.iter().any(|helper| function.name.starts_with(helper)) {
                    broken.push(format!("{} {}: neither a kernel nor a helper", function.architecture, function.name));
                }
                continue;
            };
            for violation in contract::violations(&function, &kernel) {
                broken.push(format!("{} {}: {violation}", function.architecture, function.name));
            }
            kernels.entry(function.architecture).or_default().insert(kernel);
        }
    }
    assert!(!kernels.is_empty(), "cuobjdump found no kernels in {images:?}");
    if required {
        let architectures: Vec<_> = kernels.keys().map(String::as_str).collect();
        assert_eq!(architectures, ["sm_100", "sm_120", "sm_80", "sm_90"], "PEERSUM_CUDA_ARCHS must not be set");
    }
    let dtypes = DType::ALL.map(|dtype| dtype.to_string());
    for (architecture, present) in &kernels {
        broken.extend(
            contract::missing(present, &dtypes).into_iter().map(|kernel| format!("{architecture}: no {kernel}")),
        );
    }
    assert!(broken.is_empty(), "{} violations:\n{}", broken.len(), broken.join("\n"));
    let count: usize = kernels.values().map(BTreeSet::len).sum();
    eprintln!("{count} kernels for {} keep the contract", kernels.into_keys().collect::<Vec<_>>().join(", "));
}
