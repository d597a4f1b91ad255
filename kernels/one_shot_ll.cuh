// One-shot all-reduce by LL packets: one round a chunk, one hop, no fence.
//
//   1. store my chunk, packet by packet, into every peer's slot for me
//   2. load every peer's packet from my own slots until it has come, reduce in rank order, store the output
//   3. block barrier: nobody goes on before all have read
//
// To prove: packets.cuh. In place works: step 2 reads the input again before it writes the same place.
#pragma once

#include "packets.cuh"
#include "one_shot.cuh"

namespace peersum {

template <typename T, typename Op, int N>
__device__ __forceinline__ void one_shot_ll(const peersum_call& call) {
  constexpr int kAtOnce = N <= 2 ? 4 : N <= 4 ? 2 : 1;
  PacketBlock<N> block(call);
  const Tensor<T> input(call.input, call.count, call.vector_input);
  const Tensor<T> output(call.output, call.count, call.vector_output);
  uint64_t start = block_start(call, blockIdx.x);
  const uint64_t end = block_start(call, blockIdx.x + 1);
  for (; start < end; start += call.chunk_units) {
    const uint32_t length = static_cast<uint32_t>(min(call.chunk_units, end - start));
    block.next_round();
    move_packs<4>(
        threadIdx.x, length, blockDim.x, [&](uint32_t i) { return input.load_payload(start + i); },
        [&](uint32_t i, const Pack& payload) {
#pragma unroll
          for (uint32_t step = 1; step < N; step++) {
            const uint32_t peer = call.rank + step < N ? call.rank + step : call.rank + step - N;
            block.store(block.slot(peer, call.rank) + i, payload);
          }
        });
    // After the stores: these don't wait for the epoch to be loaded before they load the input.
    const bool watches = threadIdx.x < N && threadIdx.x != call.rank;
    if (watches) block.announce(threadIdx.x);
    const Pack* slots[N];
#pragma unroll
    for (uint32_t source = 0; source < N; source++) slots[source] = block.slot(call.rank, source);
    bool arrived = true;
    // A thread that watches a peer polls once at least, also where it has no packet.
    for (uint32_t base = threadIdx.x, watching = watches; arrived && (base < length || watching);
         base += kAtOnce * blockDim.x, watching = 0) {
      Pack packets[kAtOnce * N], own[kAtOnce];
#pragma unroll
      for (uint32_t u = 0; u < kAtOnce; u++) {
        if (base + u * blockDim.x < length) own[u] = input.load_payload(start + base + u * blockDim.x);
      }
      arrived = block.poll(
          packets, block.epoch(), PEERSUM_PHASE_EXCHANGE, block.watch(watching, threadIdx.x),
          [&](uint32_t j) { return slots[j % N] + base + j / N * blockDim.x; }, [&](uint32_t j) { return j % N; },
          [&](uint32_t j) { return j % N != call.rank && base + j / N * blockDim.x < length; });
      if (!arrived) break;
#pragma unroll
      for (uint32_t u = 0; u < kAtOnce; u++) {
        const uint32_t i = base + u * blockDim.x;
        if (i >= length) break;
        Pack gathered[N];
#pragma unroll
        for (uint32_t source = 0; source < N; source++) {
          gathered[source] = source == call.rank ? own[u] : packets[u * N + source];
        }
        output.store_payload(start + i, reduce<T, Op, N, kPayloadWords>(gathered, call.op));
      }
    }
    if (!block.conclude(arrived)) return;
  }
  block.finish();
}

}  // namespace peersum
