//! Machines and logs, as the command's doctor reads them: files of sysfs and procfs, NCCL's configuration files, what NVML
//! answers, and what NCCL and benchmarks printed. All checks run over whatever comes of them.
//!
//! The bytes are files one after the other. A line `@/sys/...` begins a file, and `=/from /to` is a link; files named
//! `@log` and `@results` are NCCL's log and a benchmark's results.

#![no_main]

use std::{collections::BTreeMap, io};

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)]
#[path = "../../cli/src/sizes.rs"]
mod sizes;
#[allow(dead_code)]
#[path = "../../cli/src/topology/mod.rs"]
mod topology;

#[allow(dead_code)]
#[path = "../../cli/src/model"]
mod model {
    pub(crate) mod runs;
}

#[allow(dead_code)]
#[path = "../../cli/src/doctor"]
mod doctor {
    mod examine;
    mod finding;
    mod links;
    mod nccl_log;
    mod p2p;
    mod private;
    mod results;
    mod settings;
    mod show;
    mod system;

    use super::{
        model::runs::Run,
        topology::{read, source::Source},
    };

    /// Examines, and prints.
    pub(super) fn all(source: &dyn Source, log: Option<&str>, results: &str) {
        let machine = read::read(source);
        let log = log.map(nccl_log::Log::parse);
        let runs = Run::parse(results).unwrap_or_default();
        let benchmarks = examine::Benchmarks { runs: &runs, link: None };
        let outcome = examine::examine(source, &machine, log.as_ref(), &benchmarks);
        assert!(outcome.exit_code() <= 3);
        // No machine is fine that shows nothing.
        assert!(!machine.gpus.is_empty() || outcome.exit_code() != 0);
        show::show(&mut io::sink(), &machine, log.as_ref(), &runs, &outcome).expect("a sink takes all");
    }

    use std::io;
}

use topology::{machine::Machine, matrix::Matrix, nvml::Answers, read, source::Source, visible::Visible, xml};

/// Files in memory.
#[derive(Default)]
struct Files {
    files: BTreeMap<String, Vec<u8>>,
    links: BTreeMap<String, String>,
}

impl Files {
    fn new(bytes: &[u8]) -> Files {
        let mut files = Files::default();
        let mut at: Option<String> = None;
        for line in bytes.split_inclusive(|&byte| byte == b'\n') {
            let text = String::from_utf8_lossy(line);
            if let Some(path) = text.strip_prefix('@') {
                let path = path.trim().to_owned();
                files.files.entry(path.clone()).or_default();
                at = Some(path);
            } else if let Some((from, to)) = text.strip_prefix('=').and_then(|link| link.trim().split_once(' ')) {
                files.links.insert(from.into(), to.into());
            } else if let Some(path) = &at {
                files.files.entry(path.clone()).or_default().extend(line);
            }
        }
        files
    }

    fn text_of(&self, name: &str) -> Option<String> {
        self.files.get(name).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    /// With the longest link that begins it followed, once.
    fn followed(&self, path: &str) -> String {
        let inside = |from: &str| path.strip_prefix(from).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let link = self.links.iter().filter(|(from, _)| inside(from)).max_by_key(|(from, _)| from.len());
        link.map_or(path.to_owned(), |(from, to)| format!("{to}{}", &path[from.len()..]))
    }
}

fn not_there() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Source for Files {
    fn bytes(&self, path: &str) -> io::Result<Vec<u8>> {
        self.files.get(&self.followed(path)).cloned().ok_or_else(not_there)
    }

    fn names(&self, path: &str) -> io::Result<Vec<String>> {
        let below = format!("{}/", self.followed(path));
        let all = self.files.keys().chain(self.links.keys());
        let mut names: Vec<String> =
            all.filter_map(|known| known.strip_prefix(&below)?.split('/').next().map(str::to_owned)).collect();
        names.sort();
        names.dedup();
        if names.is_empty() { Err(not_there()) } else { Ok(names) }
    }

    fn resolved(&self, path: &str) -> io::Result<String> {
        let resolved = self.followed(path);
        let below = format!("{resolved}/");
        let there = resolved != path || self.files.keys().any(|known| *known == resolved || known.starts_with(&below));
        if there { Ok(resolved) } else { Err(not_there()) }
    }

    fn nvml(&self) -> Result<Answers, String> {
        let text = self.files.get("/nvml.json").ok_or("none")?;
        serde_json::from_slice(text).map_err(|error| error.to_string())
    }

    fn variables(&self) -> Vec<(String, String)> {
        let text = self.text_of("/environment").unwrap_or_default();
        text.lines().filter_map(|line| line.split_once('=')).map(|(name, value)| (name.into(), value.into())).collect()
    }
}

fuzz_target!(|bytes: &[u8]| {
    let files = Files::new(bytes);
    let machine: Machine = read::read(&files);
    let matrix = Matrix::of(&machine);
    assert_eq!(matrix.cells.len(), machine.gpus.len() + machine.nics.len());
    // Whatever is in it, it is whole XML; whether NCCL could use it is another matter.
    let written = xml::write(&machine);
    assert!(
        !format!("{:#}", xml::parse(&written).err().unwrap_or_else(|| anyhow::anyhow!("none")))
            .contains("no whole XML")
    );
    let (list, order) = (files.variable("CUDA_VISIBLE_DEVICES"), files.variable("CUDA_DEVICE_ORDER"));
    let _ = Visible::of_variables(&machine, list.as_deref(), order.as_deref());
    // What doesn't look like files is a log.
    let log =
        files.text_of("@log").or_else(|| files.files.is_empty().then(|| String::from_utf8_lossy(bytes).into_owned()));
    doctor::all(&files, log.as_deref(), &files.text_of("@results").unwrap_or_default());
});
