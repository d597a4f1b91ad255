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

// Packs that a thread moves at a time where it only copies: as many as the compiler for the architecture finds registers
// for, in a block of the most threads.
template <typename Op, int N>
#if __CUDA_ARCH__ == 900
constexpr int kCopies = IsSum<Op>::kValue && N > 2 ? 8 : 4;
#else
constexpr int kCopies = 4;
#endif

// A pack of every source.
template <int N>
struct Gathered {
  Pack packs[N];
};

// The rank's own pack of `input`, and the others' from `slot_of(source)`, at index i of the chunk: reduced, and handed
// to `store(i, whole, pack)`, where whole says that input and output are aligned there. Several at a time for few ranks.
template <typename T, typename Op, int N, typename SlotOf, typename Store>
__device__ __forceinline__ void reduce_packs(const peersum_call& call, const Tensor<T>& input, const Tensor<T>& output,
                                             uint64_t start, uint32_t length, const SlotOf& slot_of,
                                             const Store& store) {
  constexpr int kAtOnce = N <= 3 ? 2 : 1;
  const Pack* slots[N];  // computed once: loads whose addresses are computed between them go out later
#pragma unroll
  for (uint32_t source = 0; source < N; source++) slots[source] = slot_of(source);
  const uint32_t whole = min(input.whole(start, length), output.whole(start, length));
  const auto gather = [&](uint32_t i, bool is_whole) {
    const Pack own = is_whole ? input.load_whole(start + i) : input.load_part(start + i);
    Gathered<N> gathered;
#pragma unroll
    for (uint32_t source = 0; source < N; source++) {
      gathered.packs[source] = source == call.rank ? own : load_pack(slots[source] + i);
    }
    return gathered;
  };
  move_packs<kAtOnce>(
      threadIdx.x, whole, blockDim.x, [&](uint32_t i) { return gather(i, true); },
      [&](uint32_t i, const Gathered<N>& gathered) { store(i, true, reduce<T, Op, N>(gathered.packs, call.op)); });
  if (whole == length) return;
  for (uint32_t i = next_from(threadIdx.x, whole, blockDim.x); i < length; i += blockDim.x) {
    store(i, false, reduce<T, Op, N>(gather(i, false).packs, call.op));
  }
}

// Stores a pack at `to_rank(r) + i` for every peer, from rank + 1 on, so that ranks don't converge on one.
template <int N, typename SlotOf>
__device__ __forceinline__ void push_pack(const peersum_call& call, uint32_t i, const Pack& pack, const SlotOf& slot_at) {
#pragma unroll
  for (uint32_t step = 1; step < N; step++) {
    const uint32_t peer = call.rank + step < N ? call.rank + step : call.rank + step - N;
    store_pack(slot_at(peer) + i, pack);
  }
}

template <typename T, typename Op, int N, bool kPull>
__device__ __forceinline__ void one_shot(const peersum_call& call) {
  Block<N> block(call);
  const Tensor<T> input(call.input, call.count, call.vector_input);
  const Tensor<T> output(call.output, call.count, call.vector_output);
  uint64_t start = block_start(call, blockIdx.x);
  const uint64_t end = block_start(call, blockIdx.x + 1);
  begin_call(call);
  block.begin();
  for (; start < end; start += call.chunk_units) {
    const uint32_t length = static_cast<uint32_t>(min(call.chunk_units, end - start));
    block.next_round();
    if constexpr (kPull) {
      Pack* staged = block.slot(call.rank, 0);
      read_packs<kCopies<Op, N>>(input, start, length, threadIdx.x, blockDim.x,
                          [&](uint32_t i, const Pack& pack) { store_pack(staged + i, pack); });
    } else {
      read_packs<4>(input, start, length, threadIdx.x, blockDim.x, [&](uint32_t i, const Pack& pack) {
        push_pack<N>(call, i, pack, [&](uint32_t peer) { return block.slot(peer, call.rank); });
      });
    }
    if (!block.exchange(PEERSUM_PHASE_EXCHANGE)) return;
    reduce_packs<T, Op, N>(
        call, input, output, start, length,
        [&](uint32_t source) { return kPull ? block.slot(source, 0) : block.slot(call.rank, source); },
        [&](uint32_t i, bool whole, const Pack& pack) {
          whole ? output.store_whole(start + i, pack) : output.store_part(start + i, pack);
        });
  }
  block.finish();
}

}  // namespace peersum
