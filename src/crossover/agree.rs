//! One table for all ranks.

use super::Source;
use crate::{Result, meeting::Local};

/// What all ranks of a group choose by.
pub(crate) struct Agreed {
    /// That of rank 0.
    pub(crate) source: Source,
    /// Which ranks had another, if any had.
    pub(crate) warning: Option<String>,
}

/// Lets every rank choose by what rank 0 has, its table or priors: ranks that chose differently would wait for each
/// other.
pub(crate) fn agree(seat: &mut Local, own: Source) -> Result<Agreed> {
    let hashes = seat.all_gather(own.hash())?;
    let Some(other) = (0..hashes.len()).find(|&rank| hashes[rank] != hashes[0]) else {
        return Ok(Agreed { source: own, warning: None });
    };
    // All have seen the same hashes, so all come here.
    let sources = seat.all_gather(own)?;
    let others: Vec<String> =
        (0..hashes.len()).filter(|&rank| hashes[rank] != hashes[0]).map(|rank| rank.to_string()).collect();
    let warning = format!(
        "rank{} {} would choose by another table than rank 0: all take that of rank 0 ({}; rank {other}: {})",
        if others.len() == 1 { "" } else { "s" },
        others.join(", "),
        sources[0].name(),
        sources[other].name(),
    );
    let source = sources.into_iter().next().expect("rank 0 laid its own down");
    Ok(Agreed { source, warning: Some(warning) })
}

impl Source {
    /// Of all that decides and its evidence. Where it was read from and why there is no table decide nothing.
    fn hash(&self) -> u64 {
        match self {
            Source::Table(tuned) => {
                let nccl = if tuned.without_nccl().is_none() { "with NCCL\n" } else { "without NCCL\n" };
                fnv1a(nccl.bytes().chain(tuned.entry().to_text().bytes()))
            }
            Source::Priors(_) => fnv1a("priors".bytes()),
        }
    }

    fn name(&self) -> String {
        match self {
            Source::Table(tuned) => {
                let without = tuned.without_nccl().map(|why| format!(", without NCCL: {why}"));
                let without = without.unwrap_or_default();
                format!("{}, measured {}{without}", tuned.path().display(), tuned.entry().measured)
            }
            Source::Priors(reason) => format!("priors: {reason}"),
        }
    }
}

/// FNV-1a of 64 bits: the same in every process and release, which `std`'s hashes don't promise.
fn fnv1a(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests;
