//! NCCL's version numbers.

use std::{fmt, str::FromStr};

use crate::meeting::Wire;

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Before the first dot.
    pub major: u32,
    /// Between the dots.
    pub minor: u32,
    /// After the second dot.
    pub patch: u32,
}

impl Version {
    pub(super) const fn new(major: u32, minor: u32, patch: u32) -> Version {
        Version { major, minor, patch }
    }

    /// Of the number that `ncclGetVersion` gives. 2.9 changed how it is put together.
    pub(super) const fn from_code(code: u32) -> Version {
        match code {
            0..10_000 => Version::new(code / 1000, code % 1000 / 100, code % 100),
            _ => Version::new(code / 10_000, code % 10_000 / 100, code % 100),
        }
    }
}

impl Wire for Version {
    fn put(&self, out: &mut Vec<u8>) {
        [self.major, self.minor, self.patch].iter().for_each(|number| number.put(out));
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(Version { major: Wire::take(from)?, minor: Wire::take(from)?, patch: Wire::take(from)? })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}.{}.{}", self.major, self.minor, self.patch))
    }
}

/// The text was no version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no version of NCCL: it has the form 2.32.3, or 2.32")]
pub struct ParseVersionError {
    text: String,
}

/// Of two or three numbers with dots between them.
impl FromStr for Version {
    type Err = ParseVersionError;

    fn from_str(text: &str) -> Result<Version, ParseVersionError> {
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let parts = text.split('.').map(|part| digits(part).then(|| part.parse().ok()).flatten());
        match parts.collect::<Option<Vec<u32>>>().as_deref() {
            Some(&[major, minor]) => Ok(Version::new(major, minor, 0)),
            Some(&[major, minor, patch]) => Ok(Version::new(major, minor, patch)),
            _ => Err(ParseVersionError { text: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_encodings_are_read() {
        for (code, text) in [(23203, "2.32.3"), (21800, "2.18.0"), (20900, "2.9.0"), (2804, "2.8.4"), (30102, "3.1.2")]
        {
            assert_eq!(Version::from_code(code).to_string(), text);
        }
    }

    #[test]
    fn versions_are_ordered_by_their_numbers_and_read_back() {
        let version = |text: &str| text.parse::<Version>().unwrap();
        assert!(version("2.9.6") < version("2.18.0"));
        assert!(version("2.30") > version("2.29.7"));
        assert_eq!(version("2.32.3").to_string(), "2.32.3");
        for text in ["", "2", "2.", "2.32.3.1", "2.x", "+2.3", "2.-3", "2.99999999999"] {
            assert!(text.parse::<Version>().is_err(), "{text}");
        }
    }
}
