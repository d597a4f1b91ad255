// All-reduce of tensors in symmetric memory: ranks read, and write, each other's tensors where they are. No staging.
//
//   one-shot                                          two-shot
//   1. flags to and from all peers: every input is written, every output may be
//   2. load every rank's input, reduce in rank        2. load my part of every rank's input, reduce in rank order,
//      order, store the output                           store it into that part of every rank's output
//   3. flags to and from all peers: nobody reads my      3. release my flag to all peers, acquire theirs: nobody
//      input any more                                       reads my input any more, my output is whole
//
// Peers' tensors are loaded at system scope, past the L1 cache, where a kernel before this one may have left what they held
// then: nothing is acquired that would empty it.
//
// A block's range is its own on every rank, and so are its flags: no block waits for more than it needs.
//
// In place works in two shots: what a thread overwrites, on any rank, only that thread reads. In one shot it doesn't: a peer
// may read what is written. The plan sees to that.
#pragma once

#include "one_shot.cuh"

namespace peersum {

template <typename T, typename Op, int N, bool kTwoShot>
__device__ __forceinline__ void direct(const peersum_call& call) {
  constexpr int kAtOnce = N <= 4 ? 4 : 2;
  constexpr int kOutputs = kTwoShot ? N : 1;
  Block<N> block(call);
  // The same offset in every rank's segment, as the hash of the call makes sure. Outputs from rank + 1 on, so that ranks don't
  // converge on one; my own last.
  const uint64_t own = call.segments[call.rank], input = call.input - own, output = call.output - own;
  const auto input_of = [&](uint32_t rank) { return call.segments[rank] + input; };
  const auto output_at = [&](uint32_t to) {
    const uint32_t peer = call.rank + 1 + to < N ? call.rank + 1 + to : call.rank + 1 + to - N;
    return kTwoShot ? call.segments[peer] + output : call.output;
  };
  uint64_t start = block_start(call, blockIdx.x);
  uint32_t length = static_cast<uint32_t>(block_length(call, blockIdx.x));  // packs, which the plan keeps below 2^32
  if (kTwoShot) {
    const Part part = part_of<N>(length, call.rank);
    start += part.start;
    length = part.length;
  }
  const bool aligned = call.vector_input != 0 && call.vector_output != 0;
  const uint64_t packs = call.count * sizeof(T) / sizeof(Pack);
  const uint32_t whole = aligned && packs > start ? static_cast<uint32_t>(min(packs - start, static_cast<uint64_t>(length))) : 0;
  const uint64_t offset = start * sizeof(Pack);
  block.prepare();

  begin_call(call);
  block.begin();
  block.next_round();
  if (!block.enter()) return;
  for (uint32_t first = threadIdx.x; first < whole; first += kAtOnce * blockDim.x) {
    Gathered<N> gathered[kAtOnce];
    const auto has = [&](uint32_t u) { return u == 0 || first + u * blockDim.x < whole; };
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; u++) {
      if (!has(u)) continue;
#pragma unroll
      for (uint32_t rank = 0; rank < N; rank++) {
        gathered[u].packs[rank] = load_packet_relaxed_sys(global<Pack>(input_of(rank) + offset) + first + u * blockDim.x);
      }
    }
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; u++) {
      if (!has(u)) continue;
      const Pack reduced = reduce<T, Op, N>(gathered[u].packs, call.op);
#pragma unroll
      for (uint32_t to = 0; to < kOutputs; to++) {
        store_pack(global<Pack>(output_at(to) + offset) + first + u * blockDim.x, reduced);
      }
    }
  }
  // Element by element, what is in no whole pack, or not aligned.
  constexpr uint32_t kCount = sizeof(Pack) / sizeof(T);
  using Bits = typename Bits<sizeof(T)>::Type;
  const uint64_t last = min((start + length) * kCount, call.count);
#pragma unroll 1
  for (uint64_t i = (start + whole) * kCount + threadIdx.x; i < last; i += blockDim.x) {
    Gathered<N> gathered;
#pragma unroll
    for (uint32_t rank = 0; rank < N; rank++) gathered.packs[rank].words[0] = load_relaxed_sys(global<Bits>(input_of(rank)) + i);
    const Bits reduced = static_cast<Bits>(reduce<T, Op, N, 1>(gathered.packs, call.op).words[0]);
#pragma unroll
    for (uint32_t to = 0; to < kOutputs; to++) store_plain(output_at(to) + i * sizeof(T), reduced);
  }
  block.next_round();
  if (kTwoShot ? block.exchange(PEERSUM_PHASE_EXIT) : block.exit_after_reads()) block.finish();
}

}  // namespace peersum
