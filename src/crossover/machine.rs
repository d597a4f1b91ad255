//! What a measurement holds for.

/// What a measurement was made on, and what it holds for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    /// The GPUs' name, or their names joined by " + " where they differ.
    pub gpu: String,
    /// The number of ranks.
    pub world: u32,
    /// How ranks reach each other: a row for each rank, a letter for each peer. `=` is the same device, `N` peer access
    /// with native atomics (NVLink), `P` peer access without, `x` none. Two ranks over NVLink are `["=N", "N="]`.
    pub links: Vec<String>,
    /// The version of the driver.
    pub driver: String,
    /// The version of NCCL, if it is there.
    pub nccl: Option<String>,
    /// The version of this crate.
    pub peersum: String,
    /// A hash of the compiled kernels, in hexadecimal.
    pub kernels: String,
}

/// How a measurement's machine and the one at hand differ.
pub(super) struct Differences {
    /// Other GPUs, links or ranks. The rest is software, which was replaced on the same machine.
    pub(super) hardware: usize,
    pub(super) sentences: Vec<String>,
}

impl Machine {
    /// What differs between the machine of a measurement and the one at hand, but for NCCL, which concerns its border
    /// alone.
    pub(super) fn differences(&self, here: &Machine) -> Differences {
        let mut sentences = Vec::new();
        if self.gpu != here.gpu {
            sentences.push(format!("measured on {}, this is {}", self.gpu, here.gpu));
        }
        if self.world != here.world {
            sentences.push(format!("measured with {} ranks, here are {}", self.world, here.world));
        } else if self.links != here.links {
            sentences.push(format!(
                "measured with links {}, here they are {}",
                self.links.join(" "),
                here.links.join(" ")
            ));
        }
        let hardware = sentences.len();
        if self.driver != here.driver {
            sentences.push(format!("measured with driver {}, this is {}", self.driver, here.driver));
        }
        if self.peersum != here.peersum {
            sentences.push(format!("measured by peersum {}, this is {}", self.peersum, here.peersum));
        }
        if self.kernels != here.kernels {
            sentences.push(format!("measured with kernels {}, these are {}", self.kernels, here.kernels));
        }
        Differences { hardware, sentences }
    }

    /// Why a border to NCCL that was measured on `self` doesn't hold here, if it doesn't.
    pub(super) fn nccl_differs(&self, here: &Machine) -> Option<String> {
        match (&self.nccl, &here.nccl) {
            (measured, here) if measured == here => None,
            (Some(measured), Some(here)) => Some(format!("measured with NCCL {measured}, this is {here}")),
            (Some(measured), None) => Some(format!("measured with NCCL {measured}, there is none here")),
            (None, _) => Some("measured without NCCL".into()),
        }
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        let names = [&self.gpu, &self.driver, &self.peersum, &self.kernels];
        for text in names.into_iter().chain(&self.nccl).chain(&self.links) {
            if text.is_empty() || text.chars().any(char::is_control) {
                return Err(format!("machine: {text:?} is empty or has control characters"));
            }
        }
        if self.world == 0 || self.links.len() != self.world as usize {
            return Err(format!("machine: {} rows of links for {} ranks", self.links.len(), self.world));
        }
        for row in &self.links {
            if row.len() != self.links.len() || !row.bytes().all(|letter| b"=NPx".contains(&letter)) {
                return Err(format!(
                    "machine: links '{row}' are not a letter of '=NPx' for each of {} ranks",
                    self.world
                ));
            }
        }
        Ok(())
    }
}
