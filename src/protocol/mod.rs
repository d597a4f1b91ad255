//! The protocol: pure, shared by both backends, mirrored by `kernels/`.
//!
//! # Rounds
//!
//! A call is split over *blocks* (a CTA each on the GPU), and block b of one rank talks to block b of its peers alone. A
//! block works in *rounds*. In round e every rank writes into the *half* e mod 2 of the staging, then releases its flag
//! of that half to every peer, then acquires every peer's, then reads what the round delivered. A one-shot takes one
//! round a chunk, a two-shot two (reduce-scatter, all-gather). The epoch e is kept in the segment, one for each block,
//! so that a replayed CUDA graph advances it like an eager call.
//!
//! # Why two halves are enough, and no barrier at the end
//!
//! *Claim:* when rank j starts to write round e, every rank has finished reading round e−2, whose half it overwrites.
//!
//! *Proof:* j starts to write round e after it acquired every peer's flag of round e−1. A peer released that flag after
//! all threads of its block had finished reading round e−2: program order in each thread, then the block's barrier, then
//! the release. So every read of round e−2 happens before every write of round e. ∎
//!
//! The same holds for the flags, which lie in halves too: a word that a rank still polls for round e is overwritten in
//! round e+2 at the earliest, which no peer starts before this rank has released round e+1, that is after it left the
//! poll. So a poll compares for equality and no wrap of the epoch can confuse it.
//!
//! On the host stores may pass the caches by, which a release does not order on x86; the loops that make them end with
//! the fence that does, so "writes, then releases" holds for them too (`host/reduce`). Where in its half a round writes is any
//! place that the ranks compute alike.
//!
//! The argument uses nothing of what the slots hold, so one epoch a block serves all algorithms by flags and they may
//! alternate. Those by LL packets have slots and epochs of their own, and an argument of their own: `kernels/packets.cuh`,
//! and `src/host/packets.rs` for the host.
//! It needs that all ranks run the same rounds: the plan is a pure function of what they agree on, and the hash in each
//! flag ([`call`]) shows when they don't.
//!
//! loom and shuttle check both on the host backend, and that they fail with one half, with a relaxed release, or with an
//! epoch that is stored apart from its payload.

#[rustfmt::skip]
pub(crate) mod bindings;
pub mod call;
pub mod layout;
pub mod plan;
pub mod split;
