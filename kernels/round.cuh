// A block's rounds: where its slots are, and the exchange of flags between writing and reading them.
//
// The proof that two halves suffice is in src/protocol/mod.rs. What it needs of this file: no thread of the block
// releases round e+1 before every thread has finished reading round e. `exchange` opens with a block barrier, and one
// thread a peer releases after it.
#pragma once

#include "wait.cuh"

namespace peersum {

// Begins a call: waits until the kernel before this one in the stream has finished. What needs neither the caller's nor the
// segments' memory belongs before it: there it costs nothing while that kernel still runs.
__device__ __forceinline__ void begin_call(const peersum_call& call) {
  wait_for_previous_kernel();
  if (call.early) let_next_kernel_come();
}

// What the rounds by flags and by packets have in common.
template <int N>
class Rounds {
 public:
  // In the region that starts at this offset of every segment. Touches no memory.
  __device__ Rounds(const peersum_call& call, uint64_t region)
      : call_(call),
        region_(region),
        slots_(region + peersum_slot_offset(N, call.max_blocks, call.slot_bytes, 0, blockIdx.x, 0)),
        slots_of_half_(peersum_slot_offset(N, call.max_blocks, call.slot_bytes, 1, 0, 0) -
                       peersum_slot_offset(N, call.max_blocks, call.slot_bytes, 0, 0, 0)),
        flags_(region + peersum_flag_offset(N, call.max_blocks, 0, blockIdx.x, 0)),
        flags_of_half_(static_cast<uint32_t>(peersum_flag_offset(N, call.max_blocks, 1, 0, 0) -
                                             peersum_flag_offset(N, call.max_blocks, 0, 0, 0))) {}

  // Takes up where the last call ended; after begin_call.
  __device__ void begin() {
    epoch_ = load_word(epoch_of(call_, region_));
    abort_ = load_relaxed_sys(&control(call_, call_.rank)->abort);
  }

  // The slot that holds what `source` hands to this block, in the memory of rank `owner`, in the half of this round.
  __device__ Pack* slot(uint32_t owner, uint32_t source) const {
    return in_half(first_slot(owner, source));
  }

  // The same in two steps, of which only the second needs the epoch.
  __device__ uint64_t first_slot(uint32_t owner, uint32_t source) const {
    return call_.segments[owner] + slots_ + source * call_.slot_bytes;
  }
  __device__ Pack* in_half(uint64_t first) const {
    return global<Pack>(first + ((epoch_ & 1u) != 0 ? slots_of_half_ : 0));
  }

  // The flag line that `writer` writes in the memory of rank `owner`, likewise.
  __device__ uint64_t first_line(uint32_t owner, uint32_t writer) const {
    return call_.segments[owner] + flags_ + writer * PEERSUM_LINE_BYTES;
  }
  __device__ uint64_t* line_in_half(uint64_t first) const {
    return global<uint64_t>(first + ((epoch_ & 1u) != 0 ? flags_of_half_ : 0));
  }

  // Leaves the epoch for the next call. Only after a block barrier, so that all threads have read it.
  __device__ void finish() const {
    if (threadIdx.x == 0) store_word(epoch_of(call_, region_), epoch_);
  }

 protected:
  __device__ static uint32_t* epoch_of(const peersum_call& call, uint64_t region) {
    return &global<peersum_control>(call.segments[call.rank] + region)->epochs[blockIdx.x];
  }
  __device__ uint64_t flag() const { return static_cast<uint64_t>(call_.hash) << PEERSUM_HASH_SHIFT | epoch_; }

  const peersum_call& call_;
  uint64_t region_;
  uint64_t slots_;          // of the first half, from the start of a segment
  uint64_t slots_of_half_;  // bytes
  uint64_t flags_;
  uint32_t flags_of_half_;
  uint32_t epoch_;
  uint32_t abort_;
};

template <int N>
class Block : public Rounds<N> {
  using Rounds<N>::call_;
  using Rounds<N>::epoch_;
  using Rounds<N>::abort_;

 public:
  __device__ explicit Block(const peersum_call& call)
      : Rounds<N>(call, 0),
        waits_(threadIdx.x < N && threadIdx.x != call.rank),
        peer_(waits_ ? threadIdx.x : call.rank),
        mine_(this->first_line(peer_, call.rank)),
        theirs_(this->first_line(call.rank, peer_)) {}

  // Has what the first meeting needs, before the wait for the kernel before this one.
  __device__ void prepare() const { have(mine_, theirs_); }

  // Goes on to the next round: its half becomes the one that `slot` means.
  __device__ void next_round() { epoch_++; }

  // Tells every peer that this block has written the round, and waits until every peer has said so. All threads call
  // it. False, for all of them, if a wait gave up.
  __device__ bool exchange(uint32_t phase) {
    __syncthreads();
    return meet<true>(phase);
  }

  // The same where no payload goes with the flags. Before the first access to memory: what the kernels before this one wrote
  // is visible everywhere since they ended. Or after the last read: what was read has come, since the barrier that all threads
  // have passed needs it. So neither a release nor an acquire is paid for.
  __device__ bool enter() { return meet<false>(PEERSUM_PHASE_ENTRY); }
  __device__ bool exit_after_reads() {
    __syncthreads();
    return meet<false>(PEERSUM_PHASE_EXIT);
  }
  // Or where there is nothing to read: whoever leaves knows that every rank is in this call.
  __device__ bool pass_gate() { return meet<false>(PEERSUM_PHASE_GATE); }

 private:
  template <bool kPayload>
  __device__ bool meet(uint32_t phase) {
    bool arrived = true;
    if (threadIdx.x < 32) {  // the first warp, whole: a lane a peer
      const uint64_t flag = this->flag();
      const Awaited awaited{this->region_, peer_, blockIdx.x, phase, flag};
      Outcome outcome{PEERSUM_GAVE_UP_ABORTED, abort_, 0, 0};
      if (__all_sync(~0u, abort_ == 0)) {
        if (waits_) {
          kPayload ? store_release_sys(this->line_in_half(mine_), flag) : store_relaxed_sys(this->line_in_half(mine_), flag);
        }
        outcome = wait_for<kPayload>(call_, waits_, this->line_in_half(theirs_), awaited);
      }
      arrived = outcome.reason == 0;
      if (!arrived && waits_) give_up(call_, awaited, outcome);
    }
    return __syncthreads_and(arrived);
  }

  // Of the first warp: whether this lane waits, for whom, and the two flag lines between them.
  bool waits_;
  uint32_t peer_;
  uint64_t mine_, theirs_;
};

// The first unit of a block: peersum_split_start, its division done by the host.
__device__ __forceinline__ uint64_t block_start(const peersum_call& call, uint32_t block) {
  return call.block_units * block + min(block, call.longer_blocks);
}

// Units of a block.
__device__ __forceinline__ uint64_t block_length(const peersum_call& call, uint32_t block) {
  return call.block_units + (block < call.longer_blocks ? 1 : 0);
}

// Part `index` of `total` packs over N ranks.
struct Part {
  uint32_t start;
  uint32_t length;
};

template <int N>
__device__ __forceinline__ Part part_of(uint32_t total, uint32_t index) {
  const uint32_t base = total / N, longer = total % N;
  return Part{base * index + min(index, longer), base + (index < longer ? 1u : 0u)};
}

}  // namespace peersum
