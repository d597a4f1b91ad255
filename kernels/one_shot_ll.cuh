// One-shot all-reduce by LL packets: one round a chunk, one hop, no fence.
//
//   1. store my chunk, packet by packet, into every peer's slot for me
//   2. load every peer's packet from my own slots until it has come, reduce in rank order, store the output
//   3. block barrier: nobody goes on before all have read
//
// Two forms. In the one for long messages each thread stores all its packets before it polls for the first, and reads the
// input again then: many packets are under way. In the other each thread has one or two, and keeps them in registers.
//
// To prove: packets.cuh. In place works: step 2 reads the input again before it writes the same place, or has kept it.
#pragma once

#include "packets.cuh"
#include "one_shot.cuh"

namespace peersum {

// Reduces what every rank has for one place, the rank's own from `own`, and stores it.
template <typename T, typename Op, int N>
__device__ __forceinline__ void reduce_payload(const peersum_call& call, const Tensor<T>& output,
                                               const typename Tensor<T>::Payload& place, const Pack& own,
                                               const Pack* packets) {
  Pack gathered[N];
#pragma unroll
  for (uint32_t source = 0; source < N; source++) gathered[source] = source == call.rank ? own : packets[source];
  output.store_payload(place, reduce<T, Op, N, kPayloadWords>(gathered, call.op));
}

// The whole message, where no thread has more than kAtOnce packets.
//
// Among more than four ranks a rank stores its packets for itself too, and polls them: then all sources are alike, which
// costs less than telling its own from the others.
template <typename T, typename Op, int N, int kAtOnce>
__device__ __forceinline__ void one_shot_ll_short(const peersum_call& call) {
  constexpr bool kToItself = N > 4;
  constexpr int kReceivers = kToItself ? N : N - 1;
  PacketBlock<N> block(call);
  const Tensor<T> input(call.input, call.count, call.vector_input);
  const Tensor<T> output(call.output, call.count, call.vector_output);
  const uint64_t start = block_start(call, blockIdx.x) + threadIdx.x;
  const uint32_t length = static_cast<uint32_t>(block_length(call, blockIdx.x));
  const auto has = [&](uint32_t u) { return threadIdx.x + u * blockDim.x < length; };
  // All places, in the first half: before the wait for the kernel before this one, which they don't need.
  uint64_t to[kReceivers], from[N];
#pragma unroll
  for (uint32_t step = 1; step <= kReceivers; step++) {
    const uint32_t peer = call.rank + step < N ? call.rank + step : call.rank + step - N;
    to[step - 1] = block.first_slot(peer, call.rank) + threadIdx.x * sizeof(Pack);
    have(to[step - 1]);
  }
  const uint32_t polled = has(0) ? threadIdx.x : 0;  // a thread without a packet may watch all the same
#pragma unroll
  for (uint32_t source = 0; source < N; source++) {
    from[source] = block.first_slot(call.rank, source) + polled * sizeof(Pack);
    have(from[source]);
  }
  const bool watches = threadIdx.x < N && threadIdx.x != call.rank;
  const uint32_t watched = watches ? threadIdx.x : call.rank;
  const uint64_t announced = block.first_line(watched, call.rank), awaited = block.first_line(call.rank, watched);
  have(announced, awaited);
  typename Tensor<T>::Payload input_places[kAtOnce], output_places[kAtOnce];
#pragma unroll
  for (uint32_t u = 0; u < kAtOnce; u++) {
    input_places[u] = input.payload(start + u * blockDim.x);
    output_places[u] = output.payload(start + u * blockDim.x);
    have(input_places[u].words, input_places[u].plain, output_places[u].words, output_places[u].plain);
  }
  begin_call(call);
  block.begin();
  Pack own[kAtOnce];
#pragma unroll
  for (uint32_t u = 0; u < kAtOnce; u++) {
    if (has(u)) own[u] = input.load_payload(input_places[u]);
  }
  block.next_round();
#pragma unroll
  for (uint32_t u = 0; u < kAtOnce; u++) {
    if (!has(u)) break;
#pragma unroll
    for (uint32_t step = 1; step <= kReceivers; step++) block.store(block.in_half(to[step - 1]) + u * blockDim.x, own[u]);
  }
  if (watches) block.announce(announced);
  bool arrived = true;
  if (has(0) || watches) {
    Pack packets[kAtOnce * N];
    const uint32_t all = has(0) ? ~0u : 0;
    arrived = block.poll(
        packets, block.epoch(), PEERSUM_PHASE_EXCHANGE, block.watch(watches, awaited, watched),
        [&](uint32_t j) { return block.in_half(from[j % N]) + (has(j / N) ? j / N * blockDim.x : 0); },
        [](uint32_t j) { return j % N; }, [](uint32_t) { return true; },  // a second that it hasn't is the first again
        [&](uint32_t j) { return (kToItself || j % N != call.rank) && (j < N || has(j / N)) ? all : 0; });
#pragma unroll
    for (uint32_t u = 0; u < kAtOnce; u++) {
      if (!arrived || !has(u)) break;
      if (kToItself) {
        Pack gathered[N];
#pragma unroll
        for (uint32_t source = 0; source < N; source++) gathered[source] = packets[u * N + source];
        output.store_payload(output_places[u], reduce<T, Op, N, kPayloadWords>(gathered, call.op));
      } else {
        reduce_payload<T, Op, N>(call, output, output_places[u], own[u], packets + u * N);
      }
    }
  }
  if (!block.conclude(arrived)) return;
  block.finish();
  block.sweep(block.epoch(), length);
}

template <typename T, typename Op, int N>
__device__ __forceinline__ void one_shot_ll_long(const peersum_call& call) {
  constexpr int kAtOnce = N <= 4 ? 2 : 1;
  PacketBlock<N> block(call);
  const Tensor<T> input(call.input, call.count, call.vector_input);
  const Tensor<T> output(call.output, call.count, call.vector_output);
  uint64_t start = block_start(call, blockIdx.x);
  const uint64_t end = block_start(call, blockIdx.x + 1);
  begin_call(call);
  block.begin();
  if (start >= end) return;  // without a round there is nothing to sweep behind; but no block is without a unit
  uint32_t length;
  for (; start < end; start += call.chunk_units) {
    length = static_cast<uint32_t>(min(call.chunk_units, end - start));
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
    const bool watches = threadIdx.x < N && threadIdx.x != call.rank;
    if (watches) block.announce(block.first_line(threadIdx.x, call.rank));
    const Pack* slots[N];
#pragma unroll
    for (uint32_t source = 0; source < N; source++) slots[source] = block.slot(call.rank, source);
    bool arrived = true;
    // A thread that watches a peer polls once at least, also where it has no packet.
    for (uint32_t base = threadIdx.x, watching = watches; arrived && (base < length || watching);
         base += kAtOnce * blockDim.x, watching = 0) {
      const auto has = [&](uint32_t u) { return base + u * blockDim.x < length; };
      Pack packets[kAtOnce * N], own[kAtOnce];
#pragma unroll
      for (uint32_t u = 0; u < kAtOnce; u++) {
        if (has(u)) own[u] = input.load_payload(start + base + u * blockDim.x);
      }
      arrived = block.poll(
          packets, block.epoch(), PEERSUM_PHASE_EXCHANGE, block.watch(watching, block.first_line(call.rank, threadIdx.x), threadIdx.x),
          [&](uint32_t j) { return slots[j % N] + base + j / N * blockDim.x; }, [](uint32_t j) { return j % N; },
          [&](uint32_t j) { return has(j / N); }, [&](uint32_t j) { return j % N != call.rank ? ~0u : 0; });
      if (!arrived) break;
#pragma unroll
      for (uint32_t u = 0; u < kAtOnce; u++) {
        if (!has(u)) break;
        const auto place = output.payload(start + base + u * blockDim.x);
        reduce_payload<T, Op, N>(call, output, place, own[u], packets + u * N);
      }
    }
    if (!block.conclude(arrived)) return;
  }
  block.finish();
  block.sweep(block.epoch(), length);
}

template <typename T, typename Op, int N>
__device__ __forceinline__ void one_shot_ll(const peersum_call& call) {
  // The same for all threads of all blocks, so that the compiler may treat the forms as kernels of their own.
  const uint64_t longest = call.block_units + (call.longer_blocks != 0 ? 1 : 0);
  const bool one_chunk = longest <= call.chunk_units;
  if (one_chunk && longest <= blockDim.x) {
    one_shot_ll_short<T, Op, N, 1>(call);
  } else if (N <= 4 && one_chunk && longest <= 2 * blockDim.x) {
    one_shot_ll_short<T, Op, N, N <= 4 ? 2 : 1>(call);
  } else {
    one_shot_ll_long<T, Op, N>(call);
  }
}

}  // namespace peersum
