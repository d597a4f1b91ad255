//! `peersum topo`: how the GPUs and NICs of a machine are connected.
//!
//! [`topology`](crate::topology) reads; [`show`] prints for people, and [`report`] is the JSON.

mod report;
mod show;

use std::{
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::{
    output, page,
    topology::{
        machine::Machine,
        matrix::Matrix,
        read, smi,
        source::{Folder, Here, Source},
        visible::Visible,
        xml,
    },
};

/// What `peersum topo` is told.
#[derive(Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Reads the text of `nvidia-smi topo -m`, or a topology file of NCCL's, instead of this machine; - is standard
    /// input
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,

    /// Reads DIR/sys, DIR/proc, DIR/dev, DIR/etc and DIR/nvml.json instead of this machine's
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    root: Option<PathBuf>,

    /// Writes a topology file for NCCL_TOPO_FILE, to standard output if no file is given
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    nccl_xml: Option<PathBuf>,

    /// Draws it as a graph, to a page that opens without a network
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,

    /// Prints everything as JSON
    #[arg(long)]
    json: bool,
}

/// No text that is read here is longer.
const LONGEST: u64 = 64 << 20;

/// What is shown.
pub(crate) struct Seen {
    pub(crate) matrix: Matrix,
    /// What else is known; nothing where a matrix is all that there is.
    pub(crate) machine: Option<Machine>,
    pub(crate) sources: Vec<String>,
    pub(crate) unseen: Vec<String>,
    /// Which of them CUDA's devices are; none where that isn't asked, or isn't known.
    pub(crate) visible: Option<Visible>,
}

/// What a file has, a folder that looks like a machine, or this one.
pub(crate) fn look(from: Option<&Path>, root: Option<&Path>) -> Result<Seen> {
    match from {
        Some(file) => of_text(&text(file)?).with_context(|| format!("can't read the topology in {}", file.display())),
        None => {
            let source = source(root)?;
            let mut seen = of_machine(read::read(&*source))?;
            let machine = seen.machine.as_ref().filter(|machine| !machine.gpus.is_empty());
            match machine.map(|machine| visible(&*source, machine, root.is_none())) {
                Some(Ok(visible)) => seen.visible = Some(visible),
                Some(Err(why)) => seen.unseen.push(format!("which GPU each of CUDA's devices is: {why}")),
                None => (),
            }
            Ok(seen)
        }
    }
}

/// CUDA's devices; by the driver, where this is its machine.
fn visible(source: &dyn Source, machine: &Machine, here: bool) -> Result<Visible, String> {
    #[cfg(feature = "cuda")]
    if here && let Some(addresses) = crate::probe::gpu::all_addresses() {
        return Ok(Visible::of_driver(machine, &addresses));
    }
    let _ = here;
    let (list, order) = (source.variable("CUDA_VISIBLE_DEVICES"), source.variable("CUDA_DEVICE_ORDER"));
    Visible::of_variables(machine, list.as_deref(), order.as_deref())
}

/// Runs the subcommand. An error is returned where nothing could be read.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let seen = look(arguments.from.as_deref(), arguments.root.as_deref())?;
    if let Some(file) = &arguments.nccl_xml {
        let Some(machine) = &seen.machine else {
            bail!("a matrix doesn't say where the devices are in the PCI tree, which NCCL's file is about");
        };
        let text = xml::write(machine);
        if file.as_os_str() != "-" {
            fs::write(file, text).with_context(|| format!("can't write {}", file.display()))?;
        } else {
            ensure!(!arguments.json, "--json and --nccl-xml both want standard output: give --nccl-xml a file");
            io::stdout().lock().write_all(text.as_bytes())?;
            return Ok(ExitCode::SUCCESS);
        }
    }
    if let Some(file) = &arguments.html {
        let mut text = Vec::new();
        show::show(&mut text, &seen)?;
        let text = String::from_utf8_lossy(&text);
        let pictures = [page::graph(&seen.matrix, seen.machine.as_ref())];
        page::write(file, &page::html("How this machine is connected", &text, &pictures))?;
    }
    output::report(arguments.json, &report::Report::new(&seen), |out| show::show(out, &seen))?;
    Ok(ExitCode::SUCCESS)
}

/// This machine, or a folder that looks like one.
pub(crate) fn source(root: Option<&Path>) -> Result<Box<dyn Source>> {
    Ok(match root {
        Some(root) => Box::new(Folder::new(root).with_context(|| format!("can't read the folder {}", root.display()))?),
        None => Box::new(Here),
    })
}

/// The text of a file, or of standard input.
pub(crate) fn text(file: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let read = if file.as_os_str() == "-" {
        io::stdin().lock().take(LONGEST + 1).read_to_end(&mut bytes)
    } else {
        fs::File::open(file).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes))
    };
    read.with_context(|| format!("can't read {}", file.display()))?;
    ensure!(bytes.len() as u64 <= LONGEST, "{} is longer than {} MiB", file.display(), LONGEST >> 20);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn of_machine(machine: Machine) -> Result<Seen> {
    ensure!(
        !machine.functions.is_empty() || !machine.gpus.is_empty(),
        "nothing of this machine can be seen: {}",
        machine.unseen.join("; ")
    );
    let (sources, unseen) = (machine.sources.clone(), machine.unseen.clone());
    Ok(Seen { matrix: Matrix::of(&machine), machine: Some(machine), sources, unseen, visible: None })
}

fn of_text(text: &str) -> Result<Seen> {
    if text.trim_start().starts_with('<') {
        return of_machine(xml::parse(text)?);
    }
    let (matrix, unseen) = smi::parse(text)?;
    Ok(Seen { matrix, machine: None, sources: vec!["the text of nvidia-smi topo -m".into()], unseen, visible: None })
}
