//! Message sizes: how they are written, and which ones a run goes through.

use std::fmt;

/// A number of bytes as nccl-tests writes them: `1024`, `8K`, `1.5M`, `1G`; the suffixes are binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let suffix = &text[digits.len()..];
        let shift = match suffix.to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            _ => return Err(format!("unknown suffix '{suffix}': there are K, M and G, powers of 1024")),
        };
        let value: f64 =
            digits.parse().map_err(|_| format!("'{text}' is not a size: write it as 4096, 8K, 1.5M or 1G"))?;
        let bytes = value * (1u64 << shift) as f64;
        // 2^53: beyond it f64 does not hold every integer, and no machine holds the buffer.
        if !(0.0..=9_007_199_254_740_992.0).contains(&bytes) {
            return Err(format!("'{text}' is out of range"));
        }
        Ok(Size(bytes as u64))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        match bytes {
            0 => f.write_str("0"),
            _ if bytes.is_multiple_of(1 << 30) => write!(f, "{}G", bytes >> 30),
            _ if bytes.is_multiple_of(1 << 20) => write!(f, "{}M", bytes >> 20),
            _ if bytes.is_multiple_of(1 << 10) => write!(f, "{}K", bytes >> 10),
            _ => write!(f, "{bytes}"),
        }
    }
}

/// How a run comes from one size to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Times this, at least 2.
    Factor(u64),
    /// Plus this many bytes, at least 1.
    Bytes(u64),
}

/// The sizes of a run, ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sweep {
    pub(crate) min_bytes: u64,
    pub(crate) max_bytes: u64,
    pub(crate) step: Step,
}

impl Sweep {
    /// The numbers of elements to reduce: each size rounded down to whole elements, and none twice in a row.
    pub(crate) fn counts(self, element_bytes: usize) -> impl Iterator<Item = usize> {
        let mut last = None;
        self.bytes().map(move |bytes| bytes as usize / element_bytes).filter(move |&count| {
            let fresh = last != Some(count);
            last = Some(count);
            fresh
        })
    }

    fn bytes(self) -> impl Iterator<Item = u64> {
        let Sweep { min_bytes, max_bytes, step } = self;
        std::iter::successors(Some(min_bytes), move |&bytes| match step {
            Step::Factor(factor) => bytes.checked_mul(factor),
            Step::Bytes(more) => bytes.checked_add(more),
        })
        .take_while(move |&bytes| bytes <= max_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> Result<u64, String> {
        text.parse::<Size>().map(|size| size.0)
    }

    #[test]
    fn suffixes_are_binary_and_of_either_case() {
        assert_eq!(size("1"), Ok(1));
        assert_eq!(size("8K"), Ok(8192));
        assert_eq!(size("8k"), Ok(8192));
        assert_eq!(size("1.5M"), Ok(1_572_864));
        assert_eq!(size("2g"), Ok(1 << 31));
        assert_eq!(size("64KiB"), Ok(65536));
        assert_eq!(size("0.3K"), Ok(307));
    }

    #[test]
    fn what_is_no_size_is_said() {
        for text in ["", "K", "8T", "8KB", "-1", "1e30", "nan", "inf", "8 K", "0x10"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert!(size("8T").unwrap_err().contains("'T'"));
    }

    #[test]
    fn sizes_are_shown_in_the_largest_whole_unit() {
        for text in ["1000", "1K", "1536K", "64M", "3G", "0"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_factor_multiplies_and_both_ends_are_run() {
        let sweep = Sweep { min_bytes: 1024, max_bytes: 65536, step: Step::Factor(4) };
        assert_eq!(sweep.counts(4).collect::<Vec<_>>(), [256, 1024, 4096, 16384]);
    }

    #[test]
    fn a_step_adds_and_the_last_one_stays_below_the_end() {
        let sweep = Sweep { min_bytes: 100, max_bytes: 450, step: Step::Bytes(100) };
        assert_eq!(sweep.counts(4).collect::<Vec<_>>(), [25, 50, 75, 100]);
    }

    #[test]
    fn sizes_are_rounded_down_to_whole_elements_and_not_run_twice() {
        let sweep = Sweep { min_bytes: 1, max_bytes: 9, step: Step::Bytes(1) };
        assert_eq!(sweep.counts(4).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(sweep.counts(2).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn the_end_of_the_numbers_ends_the_run() {
        let sweep = Sweep { min_bytes: 1 << 62, max_bytes: u64::MAX, step: Step::Factor(1 << 40) };
        assert_eq!(sweep.bytes().count(), 1);
    }
}
