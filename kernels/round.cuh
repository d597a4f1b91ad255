// A block's rounds: where its slots are, and the exchange of flags between writing and reading them.
//
// The proof that two halves suffice is in src/protocol/mod.rs. What it needs of this file: no thread of the block
// releases round e+1 before every thread has finished reading round e. `exchange` opens with a block barrier, and one
// thread a peer releases after it.
#pragma once

#include "wait.cuh"

namespace peersum {

template <int N>
class Block {
 public:
  __device__ explicit Block(const peersum_call& call)
      : call_(call),
        epoch_(control(call, call.rank)->epochs[blockIdx.x]),
        abort_(load_relaxed_sys(&control(call, call.rank)->abort)) {}

  // Goes on to the next round: its half becomes the one that `slot` means.
  __device__ void next_round() { epoch_++; }

  // The slot that holds what `source` hands to this block, in the memory of rank `owner`.
  __device__ Pack* slot(uint32_t owner, uint32_t source) const {
    return global<Pack>(call_.segments[owner] + peersum_slot_offset(N, call_.max_blocks, call_.slot_bytes, epoch_ & 1u,
                                                                    blockIdx.x, source));
  }

  // Tells every peer that this block has written the round, and waits until every peer has said so. All threads call
  // it. False, for all of them, if a wait gave up.
  __device__ bool exchange(uint32_t phase) {
    __syncthreads();
    bool arrived = true;
    if (threadIdx.x < N && threadIdx.x != call_.rank) {
      const uint32_t peer = threadIdx.x;
      const uint64_t flag = static_cast<uint64_t>(call_.hash) << PEERSUM_HASH_SHIFT | epoch_;
      const Awaited awaited{peer, blockIdx.x, phase, flag};
      Outcome outcome{PEERSUM_GAVE_UP_ABORTED, abort_, 0, 0};
      if (abort_ == 0) {
        store_release_sys(flag_of(peer, call_.rank), flag);
        outcome = wait_for(call_, flag_of(call_.rank, peer), awaited);
      }
      arrived = outcome.reason == 0;
      if (!arrived) give_up(call_, awaited, outcome);
    }
    return __syncthreads_and(arrived);
  }

  // Leaves the epoch for the next call. Only after an exchange, so that all threads have read it.
  __device__ void finish() const {
    if (threadIdx.x == 0) control(call_, call_.rank)->epochs[blockIdx.x] = epoch_;
  }

 private:
  __device__ uint64_t* flag_of(uint32_t owner, uint32_t writer) const {
    return global<uint64_t>(call_.segments[owner] +
                            peersum_flag_offset(N, call_.max_blocks, epoch_ & 1u, blockIdx.x, writer));
  }

  const peersum_call& call_;
  uint32_t epoch_;
  uint32_t abort_;
};

// The first pack of a block: peersum_split_start, its division done by the host.
__device__ __forceinline__ uint64_t block_start(const peersum_call& call, uint32_t block) {
  return call.block_packs * block + min(block, call.longer_blocks);
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
