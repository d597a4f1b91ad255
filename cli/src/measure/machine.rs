//! What the figures were measured on.

use std::{collections::BTreeMap, fs};

use serde::{Deserialize, Serialize};

/// The machine, as far as it bears on the figures.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) hostname: String,
    pub(crate) cpu: String,
    /// That this process may run on.
    pub(crate) cores: usize,
    pub(crate) architecture: &'static str,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) kernel: String,
    /// Of the NVIDIA kernel module.
    pub(crate) nvidia_driver: Option<String>,
    /// The CUDA version that the driver supports, as 12.8.
    pub(crate) cuda_driver_api: Option<String>,
    /// One for each device that a rank runs on.
    pub(crate) gpus: Vec<Gpu>,
    /// Variables that CUDA, NCCL or this library reads.
    pub(crate) environment: BTreeMap<String, String>,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gpu {
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    pub(crate) pci: String,
    pub(crate) uuid: String,
    pub(crate) compute_capability: String,
    pub(crate) multiprocessors: u32,
    pub(crate) memory_bytes: u64,
}

impl Machine {
    pub(crate) fn here(cuda_driver_api: Option<String>, gpus: Vec<Gpu>) -> Self {
        Machine {
            hostname: hostname(),
            cpu: cpu_model(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            architecture: std::env::consts::ARCH,
            memory_bytes: meminfo("MemTotal"),
            kernel: first_line("/proc/sys/kernel/osrelease").unwrap_or_default(),
            nvidia_driver: fs::read_to_string("/proc/driver/nvidia/version")
                .ok()
                .and_then(|text| nvidia_version(&text)),
            cuda_driver_api,
            gpus,
            environment: relevant(
                std::env::vars_os()
                    .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))),
            ),
        }
    }
}

pub(crate) fn hostname() -> String {
    first_line("/proc/sys/kernel/hostname").unwrap_or_else(|| "localhost".into())
}

/// The CPU's name, or its architecture where the kernel does not tell.
pub(crate) fn cpu_model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    value(&text, "model name").unwrap_or(std::env::consts::ARCH).to_owned()
}

/// Bytes that can be allocated without swapping.
pub(crate) fn available_memory() -> Option<u64> {
    meminfo("MemAvailable")
}

fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes: u64 = value(&text, key)?.strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

/// The value of the first `key : value` line.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim())
    })
}

fn first_line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(str::to_owned)
}

/// The word that is a version with a dot, in the line that the kernel module prints about itself.
fn nvidia_version(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with("NVRM version"))?;
    line.split_whitespace()
        .find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'))
        .map(str::to_owned)
}

/// The variables that bear on the figures; what may hold a secret stays out, whatever its prefix.
fn relevant(variables: impl Iterator<Item = (String, String)>) -> BTreeMap<String, String> {
    const PREFIXES: [&str; 3] = ["CUDA_", "NCCL_", "PEERSUM_"];
    const SECRET: [&str; 4] = ["KEY", "TOKEN", "SECRET", "PASSWORD"];
    variables
        .filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .filter(|(name, _)| !SECRET.iter().any(|word| name.contains(word)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_variables_that_matter_are_kept() {
        let of = |name: &str| (name.to_owned(), "1".to_owned());
        let kept = relevant(
            ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "PEERSUM_NVCC", "HOME", "AWS_SECRET", "NCCL_API_KEY", "MY_CUDA_"]
                .map(of)
                .into_iter(),
        );
        assert_eq!(kept.keys().collect::<Vec<_>>(), ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "PEERSUM_NVCC"]);
    }

    #[test]
    fn the_driver_s_version_is_found_in_both_kinds_of_its_line() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n";
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root)\nGCC: 12.3";
        assert_eq!(nvidia_version(closed).as_deref(), Some("535.183.01"));
        assert_eq!(nvidia_version(open).as_deref(), Some("570.86.15"));
        assert_eq!(nvidia_version(""), None);
    }

    #[test]
    fn values_are_trimmed() {
        assert_eq!(value("a\t: 1\nmodel name\t: An \"X\", 2 GHz \n", "model name"), Some("An \"X\", 2 GHz"));
        assert_eq!(value("", "model name"), None);
    }
}
