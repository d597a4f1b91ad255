// A block's rounds by LL packets: 12 bytes of payload and the epoch in one 16-byte access, so that the arrival of the data
// is the signal. No fence, no barrier between storing and reading.
//
// To prove: when round e overwrites a half, everybody has finished reading round e-2. A block ends each chunk with a
// barrier, `conclude`, so none of its threads stores round e+1 of a new chunk before all have read round e; and within a
// two-shot chunk, a thread stores a packet of round e+1 only after it has read the packets of round e that it reduces.
// In every round every rank gets a packet from every peer (parts are padded to one packet at least), and `conclude` makes
// what one thread has seen known to all. So a rank that starts round e has packets of round e-1 from every peer, which
// each stored after it had finished reading round e-2.
//
// Fresh memory is 0, so no round has epoch 0; the epoch goes from 2^32-1 to 2, which keeps the halves in turn.
//
// A poll compares for equality, and every place is looked at only in rounds long enough to reach it: a place could keep a
// packet for a whole lap of the epoch, and hand it to the round that has this epoch again. So in each half two rounds of a
// lap, half a lap apart, sweep: they leave nothing in this rank's slots at its peers as it was, but put a packet of no round
// wherever their own don't go. In a chunk that isn't the last there is no such place, since it fills the slots; behind the
// last, `sweep` does it. To prove: round x finds no packet of the round y that had its epoch in the lap before.
//
// * One of the rounds that sweep, s, lies between y and x, at least half a lap but one round before x. What it left has
//   another epoch than y, as has what came after it. (Of one sweep a lap, its own packets would stay until it came again.)
// * One block stores all of this, and `sweep` stores behind a barrier and at the end of a kernel: so a place takes it in
//   turn. And x sees what s left: no call has that many rounds (in the smallest slots it would be of 200 GB), so the kernel
//   of s has ended before the one began whose packets let this rank begin x.
// * Nobody waits for what `sweep` clears: it lies beyond the packets of its round; the round before in this half has been
//   read by all, since this rank has begun its own; and the next in this half needs this rank's next kernel.
//
// What a rank stores for itself it needs no sweep for: each thread polls there what it stored right before. Nor for the flag
// words beside the packets: a round stores all of its half. A block that is not in a call has no round there; all of this is
// about the rounds of one block.
#pragma once

#include "reduce.cuh"
#include "round.cuh"

namespace peersum {

constexpr int kPayloadWords = PEERSUM_LL_PAYLOAD_BYTES / 4;

// Packets of every source for one place.
template <int N>
struct Packets {
  Pack of[N];
};

template <int N>
class PacketBlock : public Rounds<N> {
  using Rounds<N>::call_;
  using Rounds<N>::epoch_;
  using Rounds<N>::abort_;

 public:
  __device__ explicit PacketBlock(const peersum_call& call) : Rounds<N>(call, call.packet_region) {}

  __device__ uint32_t epoch() const { return epoch_; }

  __device__ void next_round() {
    if (++epoch_ == 0) epoch_ = 2;
  }

  // Tells a peer, in the flag line that this rank has there, which call this round belongs to. The peer watches for it while
  // it polls the packets of a one-shot's round, or of a two-shot's second; a thread may announce such a round only when it
  // has packets of the round before from every peer, or the block has concluded it: before that a peer may still watch for
  // what it would overwrite.
  __device__ void announce(uint64_t first_line) const { store_relaxed_sys(this->line_in_half(first_line), this->flag()); }

  // What a thread watches for beside packets: that `peer` is in the same call, by the line that it has here.
  struct Watch {
    const uint64_t* flag;  // null: for nothing
    uint64_t awaited;
    uint32_t peer;
  };
  __device__ Watch watch(bool watches, uint64_t first_line, uint32_t peer) const {
    return Watch{watches ? this->line_in_half(first_line) : nullptr, this->flag(), peer};
  }

  __device__ void store(Pack* to, const Pack& payload) const {
    store_packet_relaxed_sys(to, Pack{{payload.words[0], payload.words[1], payload.words[2], epoch_}});
  }

  // Loads kCount packets of a round until all that count have its epoch: packet i is at place(i), written by peer(i), loaded
  // if loads(i), and counts unless mask(i) is 0 (else it is ~0), as for the rank's own. False if it gave up.
  template <int kCount, typename Place, typename Peer, typename Loads, typename Mask>
  __device__ bool poll(Pack (&packets)[kCount], uint32_t epoch, uint32_t phase, const Watch& watch, const Place& place,
                       const Peer& peer, const Loads& loads, const Mask& mask) const {
    // Kept, not computed again in each turn, which would part the loads from each other.
    uint64_t places[kCount];
    uint32_t masks[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      places[i] = keep(reinterpret_cast<uint64_t>(place(i)));
      masks[i] = mask(i);
    }
    uint64_t started = 0;
    for (uint32_t spins = 1;; spins++) {
      // All of them again, also those that have come: loads that depend on earlier ones would not go out together.
#pragma unroll
      for (int i = 0; i < kCount; i++) {
        if (loads(i)) packets[i] = load_packet_relaxed_sys(global<Pack>(places[i]));
      }
      uint32_t late = 0;
#pragma unroll
      for (int i = 0; i < kCount; i++) late |= loads(i) ? (packets[i].words[3] ^ epoch) & masks[i] : 0;
      if (watch.flag != nullptr && load_relaxed_sys(watch.flag) != watch.awaited) late = 1;
      if (late == 0) return true;
      if (spins % kSpinsBetweenLooks != 0 && abort_ == 0) continue;
      const uint32_t wanted = keep(epoch);  // nor are the comparisons kept for this
      uint32_t missing = watch.peer;
#pragma unroll
      for (int i = kCount - 1; i >= 0; i--) {
        if (loads(i) && ((packets[i].words[3] ^ wanted) & masks[i]) != 0) missing = peer(i);
      }
      const uint64_t flag = static_cast<uint64_t>(call_.hash) << PEERSUM_HASH_SHIFT | epoch;
      const Awaited awaited{this->region_, missing, blockIdx.x, phase, flag};
      const Outcome outcome = look(call_, flag_line(missing, epoch), awaited, started);
      if (outcome.reason == 0) continue;
      give_up(call_, awaited, outcome);
      return false;
    }
  }

  // Ends a chunk: all threads have read what they waited for. All threads call it, with whether their own polls
  // succeeded. False, for all of them, if anybody gave up.
  __device__ bool conclude(bool arrived) const { return __syncthreads_and(arrived); }

  // If the round sweeps, clears what its packets, `reached` of them in a slot, have left of this rank's slots at its peers.
  // All threads call it, when the last chunk has concluded, for the rounds of that.
  __device__ void sweep(uint32_t epoch, uint32_t reached) const {
    if (!sweeps(epoch)) return;
    // Computed again, not kept for this through all rounds.
    const uint64_t slots = call_.packet_region + peersum_slot_offset(N, call_.max_blocks, call_.slot_bytes, epoch & 1u,
                                                                     keep(blockIdx.x), call_.rank);
    const uint32_t places = static_cast<uint32_t>(call_.slot_bytes / sizeof(Pack));
#pragma unroll 1
    for (uint32_t peer = 0; peer < N; peer++) {
      if (peer == call_.rank) continue;
      Pack* slot = global<Pack>(call_.segments[peer] + slots);
#pragma unroll 1
      for (uint32_t i = reached + threadIdx.x; i < places; i += blockDim.x) store_packet_relaxed_sys(slot + i, Pack{});
    }
  }

 private:
  // In each half of a lap the rounds 2^30 and 2^30+1 of it, one of each half.
  __device__ static bool sweeps(uint32_t epoch) { return ((epoch ^ 1u << 30) & ~(1u << 31 | 1u)) == 0; }

  __device__ const uint64_t* flag_line(uint32_t writer, uint32_t epoch) const {
    return global<uint64_t>(this->first_line(call_.rank, writer) + ((epoch & 1u) != 0 ? this->flags_of_half_ : 0));
  }
};

}  // namespace peersum
