//! The choice.

use std::{path::PathBuf, sync::Arc};

use super::{
    Curve, Entry, NcclFrom, Reason,
    table::{PLACEMENTS, placement_index},
};
use crate::{Choice, DType, Placement, protocol::plan::Priors};

/// Where choices come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A table that was measured here.
    Table(Tuned),
    /// Priors, and why there is no table.
    Priors(Reason),
}

/// An entry that holds here.
#[derive(Clone, Debug)]
pub struct Tuned {
    entry: Arc<Entry>,
    path: PathBuf,
    without_nccl: Option<String>,
    /// Which curve to ask, by placement and element type.
    curves: [[Option<usize>; DType::ALL.len()]; PLACEMENTS.len()],
}

/// What is to be done: all that a choice may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Question {
    /// Bytes of the message.
    pub bytes: u64,
    /// Its element type.
    pub dtype: DType,
    /// The number of ranks.
    pub world: u32,
    /// Where the tensors lie.
    pub placement: Placement,
    /// Whether the same bits are asked for at every size, so that NCCL must not take over.
    pub deterministic: bool,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// How the library does it, if it does.
    pub own: Choice,
    /// Whether NCCL is to do it, where it can be had.
    pub nccl: bool,
}

impl Tuned {
    /// `path` is the file that `entry` is from, and `without_nccl` says why its border to NCCL doesn't hold, if it
    /// doesn't ([`Found`](super::Found)). The error is that of [`Entry::validate`].
    pub fn new(entry: Arc<Entry>, path: PathBuf, without_nccl: Option<String>) -> Result<Tuned, String> {
        entry.validate()?;
        let curves = PLACEMENTS.map(|placement| DType::ALL.map(|dtype| nearest(&entry.curves, placement, dtype)));
        Ok(Tuned { entry, path, without_nccl, curves })
    }

    /// The entry.
    pub fn entry(&self) -> &Arc<Entry> {
        &self.entry
    }

    /// The file that it is from.
    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Why the border to NCCL doesn't hold, if it doesn't.
    pub fn without_nccl(&self) -> Option<&str> {
        self.without_nccl.as_deref()
    }

    /// The curve for tensors of `dtype` that lie so: its own, or that of another type of the same size, or of any.
    /// Bytes decide between algorithms, elements hardly.
    pub fn curve(&self, placement: Placement, dtype: DType) -> Option<&Curve> {
        let index = self.curves[placement_index(placement)][dtype.code() as usize]?;
        self.entry.curves.get(index)
    }
}

/// Tensors that lie in another way have no curve here, not even those anywhere: the algorithms that a placement is made
/// for are not on the others' curves, and without them a table would make calls slower than priors do.
fn nearest(curves: &[Curve], placement: Placement, dtype: DType) -> Option<usize> {
    let of = |wanted: &dyn Fn(DType) -> bool| {
        let mut types = DType::ALL.into_iter().filter(|&dtype| wanted(dtype));
        types.find_map(|dtype| curves.iter().position(|curve| (curve.placement, curve.dtype) == (placement, dtype)))
    };
    of(&|other| other == dtype).or_else(|| of(&|other| other.size() == dtype.size())).or_else(|| of(&|_| true))
}

impl Source {
    /// What to do, and with `priors` where no table says. Allocates nothing: it is part of every call.
    pub fn choose(&self, question: &Question, priors: Priors) -> Decision {
        let Question { bytes, world, placement, deterministic, .. } = *question;
        let tuned = self.curve(question).ok().and_then(|(tuned, curve)| Some((tuned, curve, curve.step(bytes)?.0)));
        match tuned {
            Some((tuned, curve, step)) => {
                let border = matches!(curve.nccl_from, NcclFrom::Bytes(from) if from <= bytes);
                Decision { own: step.choice, nccl: border && tuned.without_nccl.is_none() && !deterministic }
            }
            None => Decision { own: priors(bytes, world, placement), nccl: false },
        }
    }

    /// Why there is no table, if there is none.
    pub fn reason(&self) -> Option<&Reason> {
        match self {
            Source::Table(_) => None,
            Source::Priors(reason) => Some(reason),
        }
    }

    /// The curve that decides; `Err` has the table that has none, if there is one.
    pub(super) fn curve(&self, question: &Question) -> Result<(&Tuned, &Curve), Option<&Tuned>> {
        let Source::Table(tuned) = self else { return Err(None) };
        // A table of other ranks was not found, but could be handed in.
        let holds = tuned.entry.machine.world == question.world;
        let curve = tuned.curve(question.placement, question.dtype).filter(|_| holds);
        curve.map(|curve| (tuned, curve)).ok_or(Some(tuned))
    }
}

#[cfg(test)]
mod tests;
