//! Why a call is done as it is.

use std::{fmt, path::PathBuf};

use super::{Decision, NcclFrom, Question, Reason, Source, Tuned, table::placement_name};
use crate::{
    Choice, DType, Error,
    protocol::plan::{Plan, Priors},
};

/// What a call does in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It runs one of the library's kernels.
    Own(Plan),
    /// It calls NCCL.
    Nccl,
}

/// What [`Source::explain`] can't know by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts<'a> {
    /// What the call does in the end.
    pub taken: Taken,
    /// Whether the algorithm was forced ([`Options::algorithm`](crate::Options::algorithm)).
    pub forced: bool,
    /// Why NCCL can't be had, if it can't.
    pub nccl_missing: Option<&'a str>,
    /// Why the ranks can't use each other's memory, if they can't: then NCCL has all calls.
    pub fallback: Option<&'a Error>,
}

/// Why a call is done as it is; its [`Display`](fmt::Display) is some sentences.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// What was asked.
    pub question: Question,
    /// What the call does.
    pub taken: Taken,
    /// Why that.
    pub why: Why,
    /// Where the choice is from, also if it was not followed.
    pub origin: Origin,
    /// The grid that was wanted, if another is taken: what can't be resident together, or has nothing to do, is left
    /// away.
    pub wanted: Option<Choice>,
    /// What it takes by the table's evidence, µs. `None` outside of what was measured, on another grid, and by priors.
    pub expected_us: Option<f64>,
    /// Why NCCL is not called, where it isn't.
    pub not_nccl: Option<NotNccl>,
    /// Why the ranks can't use each other's memory, if that is why NCCL is called.
    pub fallback: Option<Error>,
}

/// Why an algorithm is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It was forced.
    Forced,
    /// A step of the curve has it.
    Step {
        /// Bytes from which it has it.
        from_bytes: u64,
        /// Bytes from which the next step has another, if there is one.
        below_bytes: Option<u64>,
    },
    /// The message lies above the border to NCCL.
    Border {
        /// The border, bytes.
        from_bytes: u64,
    },
    /// Priors have it.
    Priors,
    /// The ranks can't use each other's memory, so NCCL has all calls.
    Fallback,
}

/// Where a choice is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From a table.
    Table {
        /// The file.
        path: PathBuf,
        /// When it was measured.
        measured: String,
        /// The command that measured it.
        command: String,
        /// The element type that was measured; the call's own, or another whose curve is taken instead.
        dtype: DType,
    },
    /// From priors.
    Priors {
        /// Why there is no table.
        reason: Reason,
    },
}

/// Why NCCL is not called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotNccl {
    /// Another algorithm was forced.
    Forced,
    /// Nothing was measured, and priors never hand over.
    Priors,
    /// The table was measured without it.
    NotMeasured,
    /// The table was measured with another, or there is none here; the text says which.
    Differs(String),
    /// It is at no size faster.
    NeverFaster,
    /// It is faster from so many bytes on.
    Below(u64),
    /// It is faster, but the same bits are asked for at every size.
    Deterministic,
    /// It is faster, but can't be had; the text says why.
    Missing(String),
}

impl Source {
    /// Why a call is done as `facts` say; the question and the priors are those of [`Source::choose`].
    pub fn explain(&self, question: &Question, facts: &Facts<'_>, priors: Priors) -> Explanation {
        let Decision { own, .. } = self.choose(question, priors);
        let curve = self.curve(question);
        let step = curve.ok().and_then(|(_, curve)| curve.step(question.bytes));
        let origin = match (curve, self) {
            (Ok((tuned, curve)), _) => Origin::Table {
                path: tuned.path().clone(),
                measured: tuned.entry().measured.clone(),
                command: tuned.entry().command.clone(),
                dtype: curve.dtype,
            },
            (Err(Some(tuned)), _) => Origin::Priors { reason: not_measured(tuned, question) },
            (Err(None), source) => {
                Origin::Priors { reason: source.reason().cloned().unwrap_or(Reason::Untuned { path: None }) }
            }
        };
        let why = match (facts.taken, step) {
            _ if facts.forced => Why::Forced,
            _ if facts.fallback.is_some() => Why::Fallback,
            (Taken::Nccl, _) => Why::Border {
                from_bytes: match curve.map(|(_, curve)| curve.nccl_from) {
                    Ok(NcclFrom::Bytes(bytes)) => bytes,
                    _ => 0,
                },
            },
            (Taken::Own(_), Some((step, below_bytes))) => Why::Step { from_bytes: step.from_bytes, below_bytes },
            (Taken::Own(_), None) => Why::Priors,
        };
        let taken = match facts.taken {
            Taken::Own(plan) => Some(Choice { algorithm: plan.algorithm, blocks: plan.blocks, threads: plan.threads }),
            Taken::Nccl => None,
        };
        let expected_us = curve.ok().and_then(|(_, curve)| match taken {
            Some(taken) if taken == own => curve.own_us(own.algorithm, question.bytes),
            Some(_) => None,
            None => curve.nccl_us(question.bytes),
        });
        Explanation {
            question: *question,
            taken: facts.taken,
            why,
            origin,
            wanted: taken.filter(|&taken| !facts.forced && taken != own).map(|_| own),
            expected_us,
            not_nccl: taken.and_then(|_| self.not_nccl(question, facts)),
            fallback: facts.fallback.cloned(),
        }
    }

    fn not_nccl(&self, question: &Question, facts: &Facts<'_>) -> Option<NotNccl> {
        if facts.forced {
            return Some(NotNccl::Forced);
        }
        let Ok((tuned, curve)) = self.curve(question) else { return Some(NotNccl::Priors) };
        match curve.nccl_from {
            NcclFrom::NotMeasured => Some(NotNccl::NotMeasured),
            NcclFrom::Never => Some(NotNccl::NeverFaster),
            NcclFrom::Bytes(from) if question.bytes < from => Some(NotNccl::Below(from)),
            NcclFrom::Bytes(_) if question.deterministic => Some(NotNccl::Deterministic),
            NcclFrom::Bytes(_) => match (tuned.without_nccl(), facts.nccl_missing) {
                (Some(differs), Some(missing)) => Some(NotNccl::Differs(format!("{differs} ({missing})"))),
                (Some(differs), None) => Some(NotNccl::Differs(differs.into())),
                (None, missing) => missing.map(|missing| NotNccl::Missing(missing.into())),
            },
        }
    }
}

fn not_measured(tuned: &Tuned, question: &Question) -> Reason {
    let (path, measured) = (tuned.path().clone(), tuned.entry().machine.world);
    if measured == question.world {
        return Reason::NotMeasured { path, placement: question.placement };
    }
    let cause = format!("measured with {measured} ranks, here are {}", question.world);
    Reason::Elsewhere { path, cause, stale: false, named: true }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Question { bytes, dtype, placement, .. } = self.question;
        let many = |number: u32| if number == 1 { "" } else { "s" };
        match self.taken {
            Taken::Own(Plan { algorithm, blocks, threads, .. }) => {
                write!(f, "{algorithm}, {blocks} block{} of {threads} threads", many(blocks))?;
            }
            Taken::Nccl => write!(f, "NCCL")?,
        }
        write!(f, " for {bytes} B of {dtype}, tensors {}", placement_name(placement))?;
        match self.why {
            Why::Forced => write!(f, ": forced. Else it would be up to ")?,
            Why::Step { from_bytes, below_bytes: Some(below) } => {
                write!(f, ": it has {from_bytes} to {} B in ", below - 1)?;
            }
            Why::Step { from_bytes, below_bytes: None } => write!(f, ": it has all from {from_bytes} B in ")?,
            Why::Border { from_bytes } => write!(f, ": it has all from {from_bytes} B in ")?,
            Why::Priors => write!(f, ": chosen by ")?,
            Why::Fallback => {
                write!(f, ": it has all calls. ")?;
                if let Some(error) = &self.fallback {
                    write!(f, "{error}. ")?;
                }
                write!(f, "Else it would be up to ")?;
            }
        }
        match &self.origin {
            Origin::Table { path, measured, command, dtype: of } => {
                write!(f, "the table {} (measured {measured} by `{command}`", path.display())?;
                if *of != dtype {
                    write!(f, ", with {of}")?;
                }
                write!(f, ")")?;
            }
            Origin::Priors { reason } => write!(f, "priors, since there is no table: {reason}")?,
        }
        if let Some(us) = self.expected_us {
            write!(f, "; {us:.2} µs expected")?;
        }
        write!(f, ".")?;
        if let Some(Choice { algorithm, blocks, threads }) = self.wanted {
            write!(f, " Wanted were {blocks} block{} of {threads} threads", many(blocks))?;
            match self.taken {
                Taken::Own(plan) if plan.algorithm == algorithm => (),
                _ => write!(f, " of {algorithm}")?,
            }
            write!(f, ".")?;
        }
        let Some(not_nccl) = &self.not_nccl else { return Ok(()) };
        write!(f, " Not NCCL: ")?;
        match not_nccl {
            NotNccl::Forced => write!(f, "forced."),
            NotNccl::Priors => write!(f, "priors never hand over to it."),
            NotNccl::NotMeasured => write!(f, "the table was measured without it."),
            NotNccl::Differs(how) => write!(f, "{how}."),
            NotNccl::NeverFaster => write!(f, "it is at no size faster."),
            NotNccl::Below(from) => write!(f, "it has all from {from} B."),
            NotNccl::Deterministic => write!(f, "it would be faster, but the same bits are asked for at every size."),
            NotNccl::Missing(why) => write!(f, "it would be faster, but {why}."),
        }
    }
}

#[cfg(test)]
mod tests;
