// One-shot all-reduce: every rank gets every input and reduces all of it. One round a chunk.
//
//   push                                     pull
//   1. store my chunk into every peer's      1. store my chunk into my own slots of the half
//      slot for me                           2. release my flag to all peers, acquire theirs
//   2. release my flag to all peers,         3. load every peer's chunk from its memory, reduce in
//      acquire theirs                           rank order, store the output
//   3. load every peer's chunk from my own
//      slots, reduce in rank order, store
//      the output
//
// To prove: when step 1 of round e overwrites a half, everybody has finished step 3 of round e-2 (src/protocol/mod.rs).
// In place works: a thread reads a pack of the input for the last time, in step 3, before it writes that pack.
#pragma once

#include "reduce.cuh"
#include "round.cuh"

namespace peersum {

// A pack of every source: the rank's own, the others' from `slot_of(source)`.
template <int N, typename SlotOf>
__device__ __forceinline__ void gather(Pack (&packs)[N], const Pack& own, uint32_t rank, uint32_t index,
                                       const SlotOf& slot_of) {
#pragma unroll
  for (uint32_t source = 0; source < N; source++) {
    packs[source] = source == rank ? own : load_pack(slot_of(source) + index);
  }
}

template <typename T, typename Op, int N, bool kPull>
__device__ __forceinline__ void one_shot(const peersum_call& call) {
  Block<N> block(call);
  const Tensor<T> input(call.input, call.count, call.vector_input);
  const Tensor<T> output(call.output, call.count, call.vector_output);
  uint64_t start = block_start(call, blockIdx.x);
  const uint64_t end = block_start(call, blockIdx.x + 1);
  for (; start < end; start += call.chunk_packs) {
    const uint32_t length = static_cast<uint32_t>(min(call.chunk_packs, end - start));
    block.next_round();
    for (uint32_t i = threadIdx.x; i < length; i += blockDim.x) {
      const Pack own = input.load(start + i);
      if constexpr (kPull) {
        store_pack(block.slot(call.rank, 0) + i, own);
      } else {
#pragma unroll
        for (uint32_t step = 1; step < N; step++) {  // from rank + 1 on, so that ranks don't converge on one peer
          const uint32_t peer = call.rank + step < N ? call.rank + step : call.rank + step - N;
          store_pack(block.slot(peer, call.rank) + i, own);
        }
      }
    }
    if (!block.exchange(PEERSUM_PHASE_EXCHANGE)) return;
    for (uint32_t i = threadIdx.x; i < length; i += blockDim.x) {
      Pack gathered[N];
      gather<N>(gathered, input.load(start + i), call.rank, i, [&](uint32_t source) {
        return kPull ? block.slot(source, 0) : block.slot(call.rank, source);
      });
      output.store(start + i, reduce<T, Op, N>(gathered, call.op));
    }
  }
  block.finish();
}

}  // namespace peersum
