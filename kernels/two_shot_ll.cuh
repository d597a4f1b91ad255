// Two-shot all-reduce by LL packets: reduce-scatter, then all-gather; two rounds a chunk, two hops, no fence.
//
//   1. store part p of my chunk into rank p's slot for me
//   2. load my part's packet of every peer from my slots until it has come, reduce in rank order, store the result into
//      every peer's slot for me in the next half, and into the output
//   3. load every other part's packet from my slots until it has come, store the output
//   4. block barrier
//
// To prove: packets.cuh. All parts of a chunk have the same number of packets, one at least; what lies beyond the chunk
// goes as zeros and is not written. In place works: steps 1 and 2 read the input, and step 3 writes other places than
// step 2 reads; what step 1 reads of them has been read before the peer could reduce it.
#pragma once

#include "packets.cuh"
#include "one_shot.cuh"

namespace peersum {

template <typename T, typename Op, int N>
__device__ __forceinline__ void two_shot_ll(const peersum_call& call) {
  constexpr int kMoves = N <= 4 ? 6 : 4;
  PacketBlock<N> block(call);
  const Tensor<T> input(call.input, call.count, call.vector_input);
  const Tensor<T> output(call.output, call.count, call.vector_output);
  const uint32_t team_threads = blockDim.x / N;
  const uint32_t team = threadIdx.x / team_threads, lane = threadIdx.x % team_threads;
  uint32_t peer = call.rank + 1 + team;
  peer = peer < N ? peer : peer - N;
  const bool moves = team < N - 1;
  // Places in the first half: before the wait for the kernel before this one, which they don't need.
  uint64_t to_peer = block.first_slot(peer, call.rank), from_peer = block.first_slot(call.rank, peer);
  uint64_t announced = block.first_line(peer, call.rank), awaited = block.first_line(call.rank, peer);
  have(to_peer, from_peer, announced, awaited);
  uint64_t start = block_start(call, blockIdx.x);
  const uint64_t end = block_start(call, blockIdx.x + 1);
  begin_call(call);
  block.begin();
  if (start >= end) return;  // without a round there is nothing to sweep behind; but no block is without a unit
  uint32_t part;
  for (; start < end; start += call.chunk_units) {
    const uint32_t length = static_cast<uint32_t>(min(call.chunk_units, end - start));
    part = (length + N - 1) / N;
    const auto load = [&](uint32_t unit) { return unit < length ? input.load_payload(start + unit) : Pack{}; };
    block.next_round();
    if (moves) {
      Pack* slot = block.in_half(to_peer);
      move_packs<kMoves>(
          lane, part, team_threads, [&](uint32_t i) { return load(peer * part + i); },
          [&](uint32_t i, const Pack& payload) { block.store(slot + i, payload); });
      if (lane == 0) block.announce(announced);  // nobody watches for this one; a poll that waits long looks at it
    }
    const uint32_t scattered = block.epoch();
    const Pack* slots[N];
#pragma unroll
    for (uint32_t source = 0; source < N; source++) slots[source] = block.slot(call.rank, source);
    block.next_round();
    bool arrived = true;
    for (uint32_t i = threadIdx.x; i < part; i += blockDim.x) {
      const uint32_t unit = call.rank * part + i;
      const Pack own = load(unit);
      Pack packets[N];
      arrived = block.poll(
          packets, scattered, PEERSUM_PHASE_REDUCE_SCATTER, block.watch(false, 0, call.rank), [&](uint32_t source) { return slots[source] + i; },
          [](uint32_t source) { return source; }, [](uint32_t) { return true; },
          [&](uint32_t source) { return source != call.rank ? ~0u : 0; });
      if (!arrived) break;
      if (i == 0) {
#pragma unroll
        for (uint32_t step = 1; step < N; step++) {
          block.announce(block.first_line(call.rank + step < N ? call.rank + step : call.rank + step - N, call.rank));
        }
      }
      Pack gathered[N];
#pragma unroll
      for (uint32_t source = 0; source < N; source++) gathered[source] = source == call.rank ? own : packets[source];
      const Pack reduced = reduce<T, Op, N, kPayloadWords>(gathered, call.op);
#pragma unroll
      for (uint32_t step = 1; step < N; step++) {
        const uint32_t to = call.rank + step < N ? call.rank + step : call.rank + step - N;
        block.store(block.slot(to, call.rank) + i, reduced);
      }
      if (unit < length) output.store_payload(start + unit, reduced);
    }
    if (moves) {
      const Pack* slot = block.in_half(from_peer);
      for (uint32_t base = lane; arrived && base < part; base += kMoves * team_threads) {
        Pack packets[kMoves];
        arrived = block.poll(
            packets, block.epoch(), PEERSUM_PHASE_ALL_GATHER, block.watch(base == 0, awaited, peer),
            [&](uint32_t u) { return slot + base + u * team_threads; }, [&](uint32_t) { return peer; },
            [&](uint32_t u) { return base + u * team_threads < part; }, [](uint32_t) { return ~0u; });
        if (!arrived) break;
#pragma unroll
        for (uint32_t u = 0; u < kMoves; u++) {
          const uint32_t i = base + u * team_threads, unit = peer * part + i;
          if (i < part && unit < length) output.store_payload(start + unit, packets[u]);
        }
      }
    }
    if (!block.conclude(arrived)) return;
  }
  block.finish();
  block.sweep(block.epoch() - 1, part);  // behind a wrap it was another, which doesn't sweep either
  block.sweep(block.epoch(), part);
}

}  // namespace peersum
