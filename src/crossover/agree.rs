//! One table for all ranks.

use super::{Entry, Reason, Source, Table, Tuned};
use crate::{Error, Result, meeting::Seat};

/// What all ranks of a group choose by.
pub(crate) struct Agreed {
    /// That of rank 0.
    pub(crate) source: Source,
    /// Which ranks had another, if any had.
    pub(crate) warning: Option<String>,
}

/// Lets every rank choose by what rank 0 has, its table or priors: ranks that chose differently would wait for each other.
pub(crate) fn agree(seat: &mut Seat, own: Source) -> Result<Agreed> {
    let hashes = seat.all_gather(own.hash())?;
    let Some(other) = (0..hashes.len()).find(|&rank| hashes[rank] != hashes[0]) else {
        return Ok(Agreed { source: own, warning: None });
    };
    // All have seen the same hashes, so all come here.
    let names = seat.all_gather(own.name())?;
    let others: Vec<String> =
        (0..hashes.len()).filter(|&rank| hashes[rank] != hashes[0]).map(|rank| rank.to_string()).collect();
    let warning = format!(
        "rank{} {} would choose by another table than rank 0: all take that of rank 0 ({}; rank {other}: {})",
        if others.len() == 1 { "" } else { "s" },
        others.join(", "),
        names[0],
        names[other],
    );
    let rank = seat.rank();
    let told = seat.all_gather(if rank == 0 { own.to_words() } else { Vec::new() })?;
    let source = if hashes[rank] == hashes[0] { own } else { Source::of_words(&told[0], &names[0])? };
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

    /// What another rank needs of it to choose alike: all but the evidence, which can be long.
    fn to_words(&self) -> Vec<String> {
        match self {
            Source::Table(tuned) => {
                let curves = tuned.entry().curves.iter().cloned();
                let curves = curves.map(|curve| super::Curve { points: Vec::new(), ..curve }).collect();
                let entry = Entry { curves, ..(**tuned.entry()).clone() };
                let text = Table { entries: vec![entry] }.to_text();
                let without = tuned.without_nccl().unwrap_or_default().to_owned();
                vec![text, tuned.path().display().to_string(), without]
            }
            Source::Priors(_) => Vec::new(),
        }
    }

    fn of_words(words: &[String], name: &str) -> Result<Source> {
        let [text, path, without] = words else {
            return Ok(Source::Priors(Reason::Other(format!("rank 0 has no table ({name})"))));
        };
        let failed = |reason| Error::PeerFailed { peer: 0, reason: format!("the table that it shared: {reason}") };
        let entry = Table::parse(text).map_err(failed)?.entries.pop().ok_or_else(|| failed("it is empty".into()))?;
        let without = Some(without.clone()).filter(|without| !without.is_empty());
        Tuned::new(entry.into(), path.into(), without).map(Source::Table).map_err(failed)
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
