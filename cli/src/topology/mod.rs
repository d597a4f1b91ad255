//! The machine as all-reduce sees it: GPUs, the PCI tree that they hang in, NUMA nodes, NICs and NVLinks.
//!
//! [`source`] is where everything is read from: this machine, or a folder that looks like it. [`nvml`] has what NVML
//! answers, as data. [`machine`] is the model, and [`read`] makes it of a source; [`acs`] finds a bridge's ACS control.
//! [`lspci`] reads that from lspci's text. [`matrix`] says how each pair is connected, in the terms of `nvidia-smi topo -m`; [`smi`] reads that command's text,
//! and [`xml`] reads and writes NCCL's topology files. [`nccl`] has NCCL's own rule for P2P, and
//! [`visible`] which GPU each of CUDA's devices is.
//!
//! What could not be seen is `None`, with the reason in [`Machine::unseen`](machine::Machine::unseen): it is never
//! taken for "linked", nor for "off".

pub(crate) mod acs;
pub(crate) mod address;
#[cfg(test)]
#[path = "../../tests/fixtures/mod.rs"]
pub(crate) mod fixtures;
pub(crate) mod lspci;
pub(crate) mod machine;
pub(crate) mod matrix;
pub(crate) mod nccl;
pub(crate) mod nvml;
pub(crate) mod read;
pub(crate) mod smi;
pub(crate) mod source;
#[cfg(test)]
mod tests;
pub(crate) mod visible;
pub(crate) mod xml;
