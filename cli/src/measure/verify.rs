//! What a right output is, and how a wrong one is told.

use std::{borrow::Cow, fmt};

use serde::{Deserialize, Serialize};

use super::{datum::Datum, inputs::Pattern};

/// What a check found, of one rank or of all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Wrong {
    pub(crate) elements: u64,
    pub(crate) first: Option<FirstWrong>,
}

impl Wrong {
    /// Adds what a later check, or a higher rank, found.
    pub(crate) fn add(&mut self, other: Wrong) {
        self.elements += other.elements;
        if self.first.is_none() {
            self.first = other.first;
        }
    }
}

/// The first wrong element of a check.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct FirstWrong {
    pub(crate) rank: usize,
    /// Of the output; negative, or not below the count, where a call wrote outside of it.
    pub(crate) index: i64,
    pub(crate) expected: String,
    pub(crate) expected_bits: String,
    pub(crate) got: String,
    pub(crate) got_bits: String,
    pub(crate) check: Cow<'static, str>,
}

impl fmt::Display for FirstWrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FirstWrong { rank, index, expected, expected_bits, got, got_bits, check } = self;
        write!(
            f,
            "rank {rank}, element {index}: expected {expected} ({expected_bits}), got {got} ({got_bits}), with {check}"
        )
    }
}

/// Which output is looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Check {
    pub(crate) rank: usize,
    pub(crate) kind: Kind,
}

/// What stood in the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A call of its own, with fresh inputs and a poisoned output.
    Fresh(Pattern),
    /// The same, with inputs that were made, and an output that was looked at, where the ranks are.
    Generated,
    /// The last of the timed calls, which had no pause between them.
    Timed,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Fresh(pattern) => pattern.name(),
            Kind::Generated => "inputs made on the device",
            Kind::Timed => "the last timed call's inputs",
        }
    }
}

impl Check {
    /// Compares a window of an output buffer: `lead` elements that must still be poison, the output, and more poison.
    pub(crate) fn window<T: Datum>(self, window: &[T], lead: usize, expected: &Expected<'_, T>) -> Wrong {
        let count = expected.count();
        let (before, rest) = window.split_at(lead);
        let (output, after) = rest.split_at(count);
        let mut wrong = self.guard(before, -(lead as i64));
        let mut start = 0;
        for part in expected.parts {
            for (index, (&want, &got)) in part.iter().zip(&output[start..]).enumerate() {
                self.element((start + index) as i64, want, got, &mut wrong);
            }
            start += part.len();
        }
        wrong.add(self.guard(after, count as i64));
        wrong
    }

    /// Compares elements beside an output, which must still be poison; the first of them has this index.
    pub(crate) fn guard<T: Datum>(self, guard: &[T], first: i64) -> Wrong {
        let mut wrong = Wrong::default();
        for (index, &got) in guard.iter().enumerate() {
            self.element(first + index as i64, T::POISON, got, &mut wrong);
        }
        wrong
    }

    /// So many wrong elements, which somebody else counted, with the first of them.
    pub(crate) fn found<T: Datum>(self, elements: u64, index: i64, want: T, got: T) -> Wrong {
        let mut wrong = Wrong::default();
        self.note(index, want, got, &mut wrong);
        Wrong { elements, ..wrong }
    }

    #[inline(always)]
    fn element<T: Datum>(self, index: i64, want: T, got: T, wrong: &mut Wrong) {
        if want.bits() != got.bits() {
            self.note(index, want, got, wrong);
        }
    }

    #[cold]
    fn note<T: Datum>(self, index: i64, want: T, got: T, wrong: &mut Wrong) {
        wrong.elements += 1;
        let bits = |value: T| format!("{:#0width$x}", value.bits(), width = 2 + 2 * size_of::<T>());
        wrong.first.get_or_insert_with(|| FirstWrong {
            rank: self.rank,
            index,
            expected: want.to_f32().to_string(),
            expected_bits: bits(want),
            got: got.to_f32().to_string(),
            got_bits: bits(got),
            check: self.kind.name().into(),
        });
    }
}

/// The right output, in the parts that the ranks' threads computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected<'a, T> {
    pub(crate) parts: &'a [&'a [T]],
}

impl<T> Expected<'_, T> {
    fn count(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    const CHECK: Check = Check { rank: 2, kind: Kind::Fresh(Pattern::Exact) };
    const POISON: f32 = <f32 as Datum>::POISON;

    fn window(window: &[f32]) -> Wrong {
        CHECK.window(window, 1, &Expected { parts: &[&[1.0, 2.0], &[3.0]] })
    }

    #[test]
    fn right_is_silent() {
        assert_eq!(window(&[POISON, 1.0, 2.0, 3.0, POISON]), Wrong::default());
    }

    #[test]
    fn wrong_elements_are_counted_and_the_first_one_told() {
        let wrong = window(&[POISON, 1.0, 2.5, POISON, POISON]);
        assert_eq!(wrong.elements, 2);
        assert_eq!(
            wrong.first.unwrap().to_string(),
            "rank 2, element 1: expected 2 (0x40000000), got 2.5 (0x40200000), with exact integers"
        );
    }

    #[test]
    fn writes_outside_of_the_output_are_wrong() {
        assert_eq!(window(&[0.0, 1.0, 2.0, 3.0, POISON]).first.unwrap().index, -1);
        assert_eq!(window(&[POISON, 1.0, 2.0, 3.0, 3.0]).first.unwrap().index, 3);
    }

    #[test]
    fn bits_are_compared_not_values() {
        let expected = Expected { parts: &[&[f16::from_f32(0.0)]] };
        let wrong = CHECK.window(&[f16::from_f32(-0.0)], 0, &expected);
        assert_eq!(wrong.first.unwrap().got_bits, "0x8000");
    }

    #[test]
    fn sums_keep_the_first_of_all() {
        let mut sum = window(&[POISON, 1.0, 2.0, 0.0, POISON]);
        sum.add(window(&[0.0, 1.0, 2.0, 3.0, POISON]));
        assert_eq!((sum.elements, sum.first.unwrap().index), (2, 2));
    }
}
