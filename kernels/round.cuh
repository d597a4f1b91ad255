// A block's rounds: where its slots are, and the exchange of flags between writing and reading them.
//
// The proof that two halves suffice is in src/protocol/mod.rs. What it needs of this file: no thread of the block
// releases round e+1 before every thread has finished reading round e. `exchange` opens with a block barrier, and one
// thread a peer releases after it.
#pragma once

#include "wait.cuh"

namespace peersum {

// What the rounds by flags and by packets have in common.
template <int N>
class Rounds {
 public:
  // In the region that starts at this offset of every segment.
  __device__ Rounds(const peersum_call& call, uint64_t region)
      : call_(call), region_(region), epoch_(begin(call, region)), abort_(load_relaxed_sys(&control(call, call.rank)->abort)) {}

  // The slot that holds what `source` hands to this block, in the memory of rank `owner`, in the half of this round.
  __device__ Pack* slot(uint32_t owner, uint32_t source) const {
    return global<Pack>(region_of(owner) + peersum_slot_offset(N, call_.max_blocks, call_.slot_bytes, epoch_ & 1u,
                                                               blockIdx.x, source));
  }

  // Leaves the epoch for the next call. Only after a block barrier, so that all threads have read it.
  __device__ void finish() const {
    if (threadIdx.x == 0) store_word(epoch_of(call_, region_), epoch_);
  }

 protected:
  __device__ static uint32_t begin(const peersum_call& call, uint64_t region) {
    wait_for_previous_kernel();
    if (call.early) let_next_kernel_come();
    return load_word(epoch_of(call, region));
  }
  __device__ static uint32_t* epoch_of(const peersum_call& call, uint64_t region) {
    return &global<peersum_control>(call.segments[call.rank] + region)->epochs[blockIdx.x];
  }
  __device__ uint64_t region_of(uint32_t owner) const { return call_.segments[owner] + region_; }
  __device__ uint64_t* flag_of(uint32_t owner, uint32_t writer) const {
    return global<uint64_t>(region_of(owner) +
                            peersum_flag_offset(N, call_.max_blocks, epoch_ & 1u, blockIdx.x, writer));
  }
  __device__ uint64_t flag() const { return static_cast<uint64_t>(call_.hash) << PEERSUM_HASH_SHIFT | epoch_; }

  const peersum_call& call_;
  uint64_t region_;
  uint32_t epoch_;
  uint32_t abort_;
};

template <int N>
class Block : public Rounds<N> {
  using Rounds<N>::call_;
  using Rounds<N>::epoch_;
  using Rounds<N>::abort_;

 public:
  __device__ explicit Block(const peersum_call& call) : Rounds<N>(call, 0) {}

  // Goes on to the next round: its half becomes the one that `slot` means.
  __device__ void next_round() { epoch_++; }

  // Tells every peer that this block has written the round, and waits until every peer has said so. All threads call
  // it. False, for all of them, if a wait gave up.
  __device__ bool exchange(uint32_t phase) {
    __syncthreads();
    bool arrived = true;
    if (threadIdx.x < 32) {  // the first warp, whole: a lane a peer
      const bool waits = threadIdx.x < N && threadIdx.x != call_.rank;
      const uint32_t peer = waits ? threadIdx.x : call_.rank;
      const uint64_t flag = this->flag();
      const Awaited awaited{this->region_, peer, blockIdx.x, phase, flag};
      Outcome outcome{PEERSUM_GAVE_UP_ABORTED, abort_, 0, 0};
      if (__all_sync(~0u, abort_ == 0)) {
        if (waits) store_release_sys(this->flag_of(peer, call_.rank), flag);
        outcome = wait_for<true>(call_, waits, this->flag_of(call_.rank, peer), awaited);
      }
      arrived = outcome.reason == 0;
      if (!arrived && waits) give_up(call_, awaited, outcome);
    }
    return __syncthreads_and(arrived);
  }
};

// The first unit of a block: peersum_split_start, its division done by the host.
__device__ __forceinline__ uint64_t block_start(const peersum_call& call, uint32_t block) {
  return call.block_units * block + min(block, call.longer_blocks);
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
