//! The JSON of `peersum topo`. What is unknown is null.

use serde::Serialize;

use super::Seen;
use crate::topology::{machine::Machine, matrix::Matrix, visible::Visible};

/// Everything that was seen.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    schema: &'static str,
    /// Grows when a field changes its meaning or goes, not when one is added.
    schema_version: u32,
    peersum_version: &'static str,
    sources: &'a [String],
    unseen: &'a [String],
    matrix: &'a Matrix,
    machine: Option<&'a Machine>,
    /// By CUDA's ordinals.
    cuda_devices: Option<&'a Visible>,
}

impl<'a> Report<'a> {
    pub(super) fn new(seen: &'a Seen) -> Self {
        Report {
            schema: "peersum-topo",
            schema_version: 1,
            peersum_version: env!("CARGO_PKG_VERSION"),
            sources: &seen.sources,
            unseen: &seen.unseen,
            matrix: &seen.matrix,
            machine: seen.machine.as_ref(),
            cuda_devices: seen.visible.as_ref(),
        }
    }
}
