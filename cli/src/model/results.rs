//! Reads the report of `peersum perf`, as far as the model needs it.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// The report.
#[derive(Debug, Deserialize)]
pub(super) struct Results {
    schema: String,
    schema_version: u32,
    pub(super) config: Config,
    pub(super) results: Vec<Row>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Config {
    pub(super) world_size: u32,
    pub(super) backend: String,
}

/// A measurement.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Row {
    pub(super) bytes: u64,
    pub(super) dtype: String,
    pub(super) op: String,
    pub(super) placement: String,
    pub(super) timing: String,
    pub(super) time_us: Option<f64>,
    pub(super) plan: Option<Plan>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Plan {
    pub(super) algorithm: String,
}

impl Results {
    pub(super) fn parse(text: &str) -> Result<Results> {
        let results: Results = serde_json::from_str(text).context("this is no report of `peersum perf -J`")?;
        ensure!(results.schema == "peersum-perf", "this is a report of {}, not of peersum-perf", results.schema);
        ensure!(
            results.schema_version == 1,
            "the report has schema_version {}, and 1 is what is read here",
            results.schema_version
        );
        ensure!(results.config.world_size >= 2, "the report is of one rank, between whom there are no hops");
        Ok(results)
    }
}
