//! What only the ranks of a group share, and what they prove with it.

use std::fmt;

use hmac_sha256::HMAC;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::{Error, Result};

/// Bytes of a nonce, a tag or a secret.
pub(super) const BYTES: usize = 32;

/// A key. It never goes over a wire or into a log: ranks prove that they have it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Secret([u8; BYTES]);

impl Secret {
    pub(super) fn random() -> Result<Secret> {
        random().map(Secret)
    }

    pub(super) fn from_key(key: [u8; BYTES]) -> Secret {
        Secret(key)
    }

    pub(super) fn key(&self) -> &[u8; BYTES] {
        &self.0
    }

    /// From what the caller calls a secret.
    pub(super) fn given(secret: &[u8]) -> Secret {
        Secret::of(b"given", [secret])
    }

    /// From these parts, in this order.
    pub(super) fn of<'a>(label: &[u8], parts: impl IntoIterator<Item = &'a [u8]>) -> Secret {
        Secret(tag(b"peersum", label, parts).finalize())
    }

    /// Another one, which says nothing of this one.
    pub(super) fn derive<'a>(&self, label: &[u8], parts: impl IntoIterator<Item = &'a [u8]>) -> Secret {
        Secret(tag(&self.0, label, parts).finalize())
    }

    /// Proves knowledge of the key, for these parts and this purpose alone.
    pub(super) fn tag<'a>(&self, label: &[u8], parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; BYTES] {
        tag(&self.0, label, parts).finalize()
    }

    /// Whether `proof` is that tag. Takes the same time whatever it is.
    pub(super) fn verify<'a>(
        &self,
        label: &[u8],
        parts: impl IntoIterator<Item = &'a [u8]>,
        proof: &[u8; BYTES],
    ) -> bool {
        tag(&self.0, label, parts).finalize_verify(proof)
    }

    /// A name that nobody guesses who doesn't have the key.
    pub(super) fn name(&self) -> String {
        name(&self.tag(b"name", []))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A name in the abstract namespace of Unix sockets.
pub(super) fn name(bytes: &[u8; BYTES]) -> String {
    use std::fmt::Write;
    let mut name = String::from("peersum-");
    for byte in &bytes[..BYTES / 2] {
        let _ = write!(name, "{byte:02x}");
    }
    name
}

/// Numbers that nobody can foresee.
pub(super) fn random() -> Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    let failed = |reason: String| Error::System { call: "getrandom", reason };
    // So few come at once, without an interruption.
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(BYTES) => Ok(bytes),
        Ok(count) => Err(failed(format!("{count} bytes came"))),
        Err(errno) => Err(failed(errno.to_string())),
    }
}

/// Lengths stand before parts, so that no two lists of parts give the same bytes.
fn tag<'a>(key: &[u8], label: &[u8], parts: impl IntoIterator<Item = &'a [u8]>) -> HMAC {
    let mut tag = HMAC::new(key);
    let mut part = |part: &[u8]| {
        tag.update((part.len() as u64).to_le_bytes());
        tag.update(part);
    };
    part(label);
    parts.into_iter().for_each(part);
    tag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_of_its_key_its_purpose_and_its_parts() {
        let key = Secret::given(b"key");
        let proof = key.tag(b"hello", [&b"ab"[..], b"c"]);
        assert!(key.verify(b"hello", [&b"ab"[..], b"c"], &proof));
        assert!(!key.verify(b"hello", [&b"a"[..], b"bc"], &proof));
        assert!(!key.verify(b"hullo", [&b"ab"[..], b"c"], &proof));
        assert!(!Secret::given(b"kez").verify(b"hello", [&b"ab"[..], b"c"], &proof));
        let mut other = proof;
        other[31] ^= 1;
        assert!(!key.verify(b"hello", [&b"ab"[..], b"c"], &other));
    }

    #[test]
    fn names_and_nonces_are_of_their_own() {
        assert_ne!(random().unwrap(), random().unwrap());
        let name = Secret::given(b"key").name();
        assert_eq!((name.len(), &name[..8]), (8 + BYTES, "peersum-"));
        assert_ne!(name, Secret::given(b"kez").name());
        assert_eq!(format!("{:?}", Secret::given(b"key")), "Secret(..)");
    }
}
