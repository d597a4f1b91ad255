//! How the ranks of a group find each other, and learn that one is gone.
//!
//! A rank takes a [`Seat`]: among threads of its process ([`local`]), or among processes ([`processes`]), whose rank 0
//! is the [`hub`] and the others its [`guest`]s. A [`Meeting`] says where ([`place`], [`environment`]); who may join is
//! decided by the user id that the system tells of each Unix socket and by a [`secret`].

// The models have threads alone, and without CUDA those of the host have nobody to meet.
#![cfg_attr(any(loom, shuttle, not(feature = "cuda")), allow(dead_code, unused_imports))]

mod local;

#[cfg(not(any(loom, shuttle)))]
mod environment;
#[cfg(not(any(loom, shuttle)))]
mod guest;
#[cfg(not(any(loom, shuttle)))]
mod hub;
#[cfg(not(any(loom, shuttle)))]
mod lifeline;
#[cfg(not(any(loom, shuttle)))]
mod message;
#[cfg(not(any(loom, shuttle)))]
mod place;
#[cfg(not(any(loom, shuttle)))]
mod processes;
#[cfg(not(any(loom, shuttle)))]
mod seat;
#[cfg(not(any(loom, shuttle)))]
mod secret;
#[cfg(not(any(loom, shuttle)))]
mod socket;
#[cfg(all(test, not(any(loom, shuttle))))]
mod tests;
#[cfg(not(any(loom, shuttle)))]
mod wire;

pub(crate) use local::Local;
#[cfg(not(any(loom, shuttle)))]
pub use place::Meeting;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use {
    lifeline::{Life, Lifelines},
    place::meet_through,
    seat::Seat,
    wire::Wire,
};

/// Gives the bytes to every parser of this module.
#[cfg(all(fuzzing, not(any(loom, shuttle))))]
pub(crate) fn fuzz(bytes: &[u8]) {
    message::fuzz(bytes);
    socket::fuzz(bytes);
    place::fuzz(bytes);
    environment::fuzz(bytes);
}
