//! What processes say to each other at a meeting, and the one place where bytes from outside are read.
//!
//! ```text
//! rank 0 (hub)                         rank r (guest)
//!                                      connects
//! Challenge: a nonce
//!                                      Hello: who it is, a nonce, a tag over both nonces
//! Answer: seated, or why not; a tag
//! Started, once all are seated
//!                                      Share of round 1
//! Share of every rank, as they come
//! ```
//!
//! A tag can be made by those alone who know the group's secret, and holds for one connection. Until a guest is seated
//! it may say nothing but a Hello. What stands ahead of the rest of a Challenge and of a Hello stays as it is in all
//! versions of the protocol, so that each can be told of the other.

use super::{
    secret::{BYTES, Secret},
    wire::Wire,
};
use crate::{Error, Result};

/// The version of this protocol.
pub(super) const PROTOCOL: u16 = 1;
/// The most bytes of a message of a seated rank.
pub(super) const MOST_BYTES: usize = 40 << 10;
/// The most bytes that a rank may share in one round.
pub(super) const MOST_SHARED: usize = 32 << 10;
/// The most bytes of a message of who is not yet known.
pub(super) const MOST_OF_A_STRANGER: usize = 1 << 10;
/// The most bytes of a reason that is told.
const MOST_OF_A_REASON: usize = 2 << 10;
const MAGIC: [u8; 7] = *b"peersum";

/// What rank 0 says first.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Challenge {
    pub(super) protocol: u16,
    pub(super) version: String,
    pub(super) nonce: [u8; BYTES],
}

/// What another rank answers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Hello {
    pub(super) protocol: u16,
    pub(super) rank: u32,
    pub(super) version: String,
    pub(super) nonce: [u8; BYTES],
    /// `None` if the protocol is another.
    pub(super) terms: Option<Terms>,
}

/// What must be the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Terms {
    pub(super) world: u32,
    /// Which boot of which machine.
    pub(super) boot: String,
}

/// What becomes of a rank that has said Hello.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer {
    /// It belongs to the group, and this connection is its own.
    Seated,
    /// It is to come to the Unix socket of this abstract name, in this network namespace.
    Ticket { name: String, namespace: String },
    /// It can't join, and nobody can.
    Refused(Verdict),
}

/// What seated ranks say.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message {
    /// All ranks are seated.
    Started,
    /// What a rank shares in a round, perhaps with descriptors beside it. Rounds count from 1.
    Share { round: u32, rank: u32, bytes: Vec<u8> },
    /// The sender has waited long enough, so many milliseconds, in this round, or in 0 for all to be seated.
    GiveUp { round: u32, waited: u64 },
    /// The sender failed.
    Leave { reason: String },
    /// The meeting is over without a group.
    End(Verdict),
}

/// Why a meeting ended without a group.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    /// Some did not come. `waited` is in milliseconds.
    Missing { ranks: Vec<u32>, waited: u64 },
    /// The process of a rank is gone.
    Gone { peer: u32 },
    /// A rank failed.
    Failed { peer: u32, reason: String },
    /// Two came as one.
    RankTaken { rank: u32 },
    /// Rank 0's number of ranks, and another's.
    Worlds { world: u32, peer: u32, peer_world: u32 },
    /// Rank 0's version, and another's.
    Versions { version: String, peer: u32, peer_version: String },
    /// This rank is on another machine than rank 0.
    Machines { peer: u32 },
}

impl Verdict {
    /// As rank `rank` returns it.
    pub(super) fn error(self, rank: usize) -> Error {
        match self {
            Verdict::Missing { ranks, waited } => Error::MeetingTimeout {
                rank,
                missing: ranks.into_iter().map(|rank| rank as usize).collect(),
                waited: std::time::Duration::from_millis(waited),
            },
            Verdict::Gone { peer } => Error::PeerGone { rank, peer: peer as usize },
            Verdict::Failed { peer, reason } => Error::PeerFailed { peer: peer as usize, reason },
            Verdict::RankTaken { rank } => Error::RankTaken { rank: rank as usize },
            Verdict::Worlds { world, peer, peer_world } => Error::WorldsDiffer {
                rank: 0,
                world: world as usize,
                peer: peer as usize,
                peer_world: peer_world as usize,
            },
            Verdict::Versions { version, peer, peer_version } => {
                Error::VersionsDiffer { rank: 0, version, peer: peer as usize, peer_version }
            }
            Verdict::Machines { peer } => {
                Error::SeveralMachines { reason: format!("rank {peer} is on another than rank 0") }
            }
        }
    }
}

const CHALLENGE: u8 = 1;
const HELLO: u8 = 2;
const ANSWER: u8 = 3;
const STARTED: u8 = 4;
const SHARE: u8 = 5;
const GIVE_UP: u8 = 6;
const LEAVE: u8 = 7;
const END: u8 = 8;

fn head(kind: u8, protocol: u16) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    kind.put(&mut out);
    protocol.put(&mut out);
    out
}

/// The kind and the protocol of a message, and the rest.
fn take_head(mut bytes: &[u8]) -> Option<(u8, u16, &[u8])> {
    let from = &mut bytes;
    let magic = <[u8; 7]>::take(from)?;
    let (kind, protocol) = (u8::take(from)?, u16::take(from)?);
    (magic == MAGIC).then_some((kind, protocol, *from))
}

impl Challenge {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = head(CHALLENGE, self.protocol);
        self.version.put(&mut out);
        self.nonce.put(&mut out);
        out
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Challenge> {
        let (kind, protocol, mut rest) = take_head(bytes)?;
        let challenge = Challenge { protocol, version: String::take(&mut rest)?, nonce: Wire::take(&mut rest)? };
        // Of another protocol more may follow.
        (kind == CHALLENGE && (rest.is_empty() || protocol != PROTOCOL)).then_some(challenge)
    }
}

impl Hello {
    /// With a tag for who sent this challenge.
    pub(super) fn to_bytes(&self, secret: &Secret, challenge: &[u8; BYTES]) -> Vec<u8> {
        let mut out = head(HELLO, self.protocol);
        self.rank.put(&mut out);
        self.version.put(&mut out);
        self.nonce.put(&mut out);
        if let Some(Terms { world, boot }) = &self.terms {
            world.put(&mut out);
            boot.put(&mut out);
        }
        sealed(out, secret, b"hello", &[challenge])
    }

    /// `None` also if it does not prove that the sender knows the secret.
    pub(super) fn parse(bytes: &[u8], secret: &Secret, challenge: &[u8; BYTES]) -> Option<Hello> {
        Hello::parse_unsealed(unsealed(bytes, secret, b"hello", &[challenge])?)
    }

    /// Without the tag.
    fn parse_unsealed(bytes: &[u8]) -> Option<Hello> {
        let (kind, protocol, mut rest) = take_head(bytes)?;
        let from = &mut rest;
        let (rank, version, nonce) = (u32::take(from)?, String::take(from)?, Wire::take(from)?);
        let terms = match protocol {
            PROTOCOL => {
                let terms = Terms { world: u32::take(from)?, boot: String::take(from)? };
                Some(from.is_empty().then_some(terms)?)
            }
            _ => None,
        };
        (kind == HELLO).then_some(Hello { protocol, rank, version, nonce, terms })
    }
}

impl Answer {
    /// With a tag for who sent this Hello to this challenge.
    pub(super) fn to_bytes(&self, secret: &Secret, challenge: &[u8; BYTES], hello: &[u8; BYTES]) -> Vec<u8> {
        let mut out = head(ANSWER, PROTOCOL);
        match self {
            Answer::Seated => 0u8.put(&mut out),
            Answer::Ticket { name, namespace } => {
                1u8.put(&mut out);
                name.put(&mut out);
                namespace.put(&mut out);
            }
            Answer::Refused(verdict) => {
                2u8.put(&mut out);
                verdict.put(&mut out);
            }
        }
        sealed(out, secret, b"answer", &[challenge, hello])
    }

    /// `None` also if it does not prove that the sender knows the secret.
    pub(super) fn parse(bytes: &[u8], secret: &Secret, challenge: &[u8; BYTES], hello: &[u8; BYTES]) -> Option<Answer> {
        Answer::parse_unsealed(unsealed(bytes, secret, b"answer", &[challenge, hello])?)
    }

    /// Without the tag.
    fn parse_unsealed(bytes: &[u8]) -> Option<Answer> {
        let (kind, protocol, mut rest) = take_head(bytes)?;
        let from = &mut rest;
        let answer = match u8::take(from)? {
            0 => Answer::Seated,
            1 => Answer::Ticket { name: String::take(from)?, namespace: String::take(from)? },
            2 => Answer::Refused(Verdict::take(from)?),
            _ => return None,
        };
        (kind == ANSWER && protocol == PROTOCOL && from.is_empty()).then_some(answer)
    }
}

impl Message {
    /// What a rank shares.
    ///
    /// # Errors
    ///
    /// If it is too much.
    pub(super) fn share(round: u32, rank: usize, bytes: Vec<u8>) -> Result<Message> {
        if bytes.len() > MOST_SHARED {
            return Err(Error::PeerFailed {
                peer: rank,
                reason: format!("{} bytes can't be shared at once, {MOST_SHARED} can", bytes.len()),
            });
        }
        Ok(Message::Share { round, rank: rank as u32, bytes })
    }

    /// What a rank says that failed.
    pub(super) fn leave(error: &Error) -> Message {
        Message::Leave { reason: reason(error) }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let kind = match self {
            Message::Started => STARTED,
            Message::Share { .. } => SHARE,
            Message::GiveUp { .. } => GIVE_UP,
            Message::Leave { .. } => LEAVE,
            Message::End(_) => END,
        };
        let mut out = head(kind, PROTOCOL);
        match self {
            Message::Started => {}
            Message::Share { round, rank, bytes } => {
                round.put(&mut out);
                rank.put(&mut out);
                bytes.put(&mut out);
            }
            Message::GiveUp { round, waited } => {
                round.put(&mut out);
                waited.put(&mut out);
            }
            Message::Leave { reason } => reason.put(&mut out),
            Message::End(verdict) => verdict.put(&mut out),
        }
        out
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Message> {
        let (kind, protocol, mut rest) = take_head(bytes)?;
        let from = &mut rest;
        let message = match kind {
            STARTED => Message::Started,
            SHARE => Message::Share { round: u32::take(from)?, rank: u32::take(from)?, bytes: Vec::take(from)? },
            GIVE_UP => Message::GiveUp { round: u32::take(from)?, waited: u64::take(from)? },
            LEAVE => Message::Leave { reason: String::take(from)? },
            END => Message::End(Verdict::take(from)?),
            _ => return None,
        };
        (protocol == PROTOCOL && from.is_empty()).then_some(message)
    }
}

/// The words of an error, cut where they are too many to be told.
pub(super) fn reason(error: &Error) -> String {
    let mut reason = error.to_string();
    if reason.len() > MOST_OF_A_REASON {
        let end = (0..=MOST_OF_A_REASON).rev().find(|&end| reason.is_char_boundary(end)).unwrap_or(0);
        reason.truncate(end);
    }
    reason
}

impl Wire for Verdict {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Verdict::Missing { ranks, waited } => {
                0u8.put(out);
                ranks.put(out);
                waited.put(out);
            }
            Verdict::Gone { peer } => {
                1u8.put(out);
                peer.put(out);
            }
            Verdict::Failed { peer, reason } => {
                2u8.put(out);
                peer.put(out);
                reason.put(out);
            }
            Verdict::RankTaken { rank } => {
                3u8.put(out);
                rank.put(out);
            }
            Verdict::Worlds { world, peer, peer_world } => {
                4u8.put(out);
                [world, peer, peer_world].into_iter().for_each(|number| number.put(out));
            }
            Verdict::Versions { version, peer, peer_version } => {
                5u8.put(out);
                version.put(out);
                peer.put(out);
                peer_version.put(out);
            }
            Verdict::Machines { peer } => {
                6u8.put(out);
                peer.put(out);
            }
        }
    }

    fn take(from: &mut &[u8]) -> Option<Verdict> {
        Some(match u8::take(from)? {
            0 => Verdict::Missing { ranks: Wire::take(from)?, waited: u64::take(from)? },
            1 => Verdict::Gone { peer: u32::take(from)? },
            2 => Verdict::Failed { peer: u32::take(from)?, reason: String::take(from)? },
            3 => Verdict::RankTaken { rank: u32::take(from)? },
            4 => Verdict::Worlds { world: u32::take(from)?, peer: u32::take(from)?, peer_world: u32::take(from)? },
            5 => Verdict::Versions {
                version: String::take(from)?,
                peer: u32::take(from)?,
                peer_version: String::take(from)?,
            },
            6 => Verdict::Machines { peer: u32::take(from)? },
            _ => return None,
        })
    }
}

/// Appends a tag over all of a message, for who sent these nonces.
fn sealed(mut message: Vec<u8>, secret: &Secret, label: &[u8], nonces: &[&[u8; BYTES]]) -> Vec<u8> {
    let tag = secret.tag(label, parts(nonces, &message));
    message.extend(tag);
    message
}

/// The message of such a tag, if it is right.
fn unsealed<'a>(bytes: &'a [u8], secret: &Secret, label: &[u8], nonces: &[&[u8; BYTES]]) -> Option<&'a [u8]> {
    let (message, tag) = bytes.split_last_chunk::<BYTES>()?;
    secret.verify(label, parts(nonces, message), tag).then_some(message)
}

fn parts<'a>(nonces: &'a [&'a [u8; BYTES]], message: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    nonces.iter().map(|nonce| nonce.as_slice()).chain([message])
}

#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    let (secret, nonce) = (Secret::given(b"secret"), [0; BYTES]);
    Challenge::parse(bytes);
    Hello::parse(bytes, &secret, &nonce);
    Answer::parse(bytes, &secret, &nonce, &nonce);
    // Behind a right tag, which no fuzzer finds.
    Hello::parse_unsealed(bytes);
    Answer::parse_unsealed(bytes);
    if let Some(message) = Message::parse(bytes) {
        assert_eq!(message.to_bytes(), bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello(rank: u32, version: String, terms: Option<Terms>) -> Hello {
        let protocol = if terms.is_some() { PROTOCOL } else { PROTOCOL + 1 };
        Hello { protocol, rank, version, nonce: [7; BYTES], terms }
    }

    fn verdicts() -> impl Strategy<Value = Verdict> {
        prop_oneof![
            (any::<Vec<u32>>(), any::<u64>()).prop_map(|(ranks, waited)| Verdict::Missing { ranks, waited }),
            any::<u32>().prop_map(|peer| Verdict::Gone { peer }),
            (any::<u32>(), any::<String>()).prop_map(|(peer, reason)| Verdict::Failed { peer, reason }),
            any::<u32>().prop_map(|rank| Verdict::RankTaken { rank }),
            any::<[u32; 3]>().prop_map(|[world, peer, peer_world]| Verdict::Worlds { world, peer, peer_world }),
            (any::<String>(), any::<u32>(), any::<String>())
                .prop_map(|(version, peer, peer_version)| Verdict::Versions { version, peer, peer_version }),
            any::<u32>().prop_map(|peer| Verdict::Machines { peer }),
        ]
    }

    fn messages() -> impl Strategy<Value = Message> {
        prop_oneof![
            Just(Message::Started),
            any::<(u32, u32, Vec<u8>)>().prop_map(|(round, rank, bytes)| Message::Share { round, rank, bytes }),
            any::<(u32, u64)>().prop_map(|(round, waited)| Message::GiveUp { round, waited }),
            any::<String>().prop_map(|reason| Message::Leave { reason }),
            verdicts().prop_map(Message::End),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_their_bytes(message in messages(), cut: prop::sample::Index) {
            let bytes = message.to_bytes();
            prop_assert_eq!(Message::parse(&bytes), Some(message));
            prop_assert_eq!(Message::parse(&bytes[..cut.index(bytes.len())]), None, "truncated");
            prop_assert_eq!(Message::parse(&[&bytes[..], &[0]].concat()), None, "with something behind it");
        }

        #[test]
        fn greetings_survive_their_bytes(rank: u32, world: u32, version: String, boot: String, verdict in verdicts()) {
            let secret = Secret::given(b"secret");
            let nonce = [3; BYTES];
            for terms in [None, Some(Terms { world, boot: boot.clone() })] {
                let hello = hello(rank, version.clone(), terms);
                prop_assert_eq!(Hello::parse(&hello.to_bytes(&secret, &nonce), &secret, &nonce), Some(hello));
            }
            let challenge = Challenge { protocol: PROTOCOL, version: version.clone(), nonce };
            prop_assert_eq!(Challenge::parse(&challenge.to_bytes()), Some(challenge));
            let ticket = Answer::Ticket { name: version, namespace: boot };
            for answer in [Answer::Seated, Answer::Refused(verdict), ticket] {
                let bytes = answer.to_bytes(&secret, &nonce, &nonce);
                prop_assert_eq!(Answer::parse(&bytes, &secret, &nonce, &nonce), Some(answer));
            }
        }

        #[test]
        fn a_changed_greeting_is_none(byte: prop::sample::Index, bit in 0u8..8) {
            let (secret, nonce) = (Secret::given(b"secret"), [3; BYTES]);
            let hello = hello(1, "1.2.3".into(), Some(Terms { world: 2, boot: "boot".into() }));
            let mut bytes = hello.to_bytes(&secret, &nonce);
            let at = byte.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Hello::parse(&bytes, &secret, &nonce), None);
        }

        #[test]
        fn any_bytes_are_a_message_or_none(bytes: Vec<u8>, kind in 0u8..10) {
            // With a right head too, or nothing behind it would ever be read.
            for bytes in [bytes.clone(), [head(kind, PROTOCOL), bytes].concat()] {
                let message = Message::parse(&bytes);
                prop_assert!(message.is_none_or(|message| message.to_bytes() == bytes));
                Challenge::parse(&bytes);
                Hello::parse_unsealed(&bytes);
                Answer::parse_unsealed(&bytes);
            }
        }
    }

    #[test]
    fn a_greeting_is_for_one_connection_and_one_secret() {
        let secret = Secret::given(b"secret");
        let hello = hello(1, "1.2.3".into(), Some(Terms { world: 2, boot: "boot".into() }));
        let bytes = hello.to_bytes(&secret, &[1; BYTES]);
        assert!(Hello::parse(&bytes, &secret, &[1; BYTES]).is_some());
        assert_eq!(Hello::parse(&bytes, &secret, &[2; BYTES]), None, "replayed");
        assert_eq!(Hello::parse(&bytes, &Secret::given(b"other"), &[1; BYTES]), None);
        // Nor is a Hello an Answer.
        assert_eq!(unsealed(&bytes, &secret, b"answer", &[&[1; BYTES]]), None);
    }

    #[test]
    fn what_is_told_is_bounded() {
        assert!(Message::share(1, 0, vec![0; MOST_SHARED]).unwrap().to_bytes().len() <= MOST_BYTES);
        assert!(Message::share(1, 0, vec![0; MOST_SHARED + 1]).is_err());
        let long = Error::PeerFailed { peer: 1, reason: "ü".repeat(MOST_BYTES) };
        assert!(Message::leave(&long).to_bytes().len() <= MOST_BYTES);
        let all = Verdict::Missing { ranks: (0..128).collect(), waited: u64::MAX };
        let answer = Answer::Refused(all).to_bytes(&Secret::given(b""), &[0; BYTES], &[0; BYTES]);
        assert!(answer.len() <= MOST_OF_A_STRANGER);
    }
}
