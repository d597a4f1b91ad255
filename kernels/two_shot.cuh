// Two-shot all-reduce: reduce-scatter, then all-gather; rank r reduces part r of each chunk. The second half of a chunk goes
// with the first half of the next, in one round: a round more than there are chunks.
//
//   push                                          pull
//   1. store part p of the first chunk into       1. store the other parts of the first chunk into my own slots of
//      rank p's slot for me                          the half
//   2. release, acquire                           2. release, acquire
//   3. load my part of every rank from my slots,  3. load my part of every rank from its memory, reduce in
//      reduce in rank order, store it into every     rank order, store it into my own last slot of the next half
//      peer's slot for me in the next half           and into the output
//      and into the output                        4. load every other part of the chunk before this from its
//   4. load every other part of the chunk before     owner's memory, store the output
//      this from my slots, store the output       5. step 1 for the next chunk, in the next half; on to step 2
//   5. step 1 for the next chunk, in the next     6. after the last: release, acquire; step 4 for the last chunk
//      half; on to step 2
//   6. after the last: release, acquire; step 4
//      for the last chunk
//
// A slot of a push holds two parts side by side: in its first half what step 1 stores, in its second what step 3 does.
//
// To prove: as for one-shot, with steps 1, 3 and 5 the writers of a round and steps 3 and 4 its readers. The reduced part is
// rounded once, in step 3, and copied from there: the same bits as one-shot.
// In place works: steps 1, 3 and 5 read a chunk of the input before step 4 of the next round writes it, and what step 3
// writes of it, only step 3 reads.
#pragma once

#include "one_shot.cuh"

namespace peersum {

// A chunk of a block, in packs.
struct Chunk {
  uint64_t start;
  uint32_t length;
};

template <typename T, typename Op, int N, bool kPull>
__device__ __forceinline__ void two_shot(const peersum_call& call) {
  constexpr int kAtOnce = kPull || N <= 6 ? kCopies<Op, N> : 4;
  Block<N> block(call);
  const Tensor<T> input(call.input, call.count, call.vector_input);
  const Tensor<T> output(call.output, call.count, call.vector_output);
  // Threads in N teams, one a part, for the steps that move parts: peer rank + 1 + team, so that ranks don't converge.
  const uint32_t team_threads = blockDim.x / N;
  const uint32_t team = threadIdx.x / team_threads, lane = threadIdx.x % team_threads;
  uint32_t peer = call.rank + 1 + team;
  peer = peer < N ? peer : peer - N;
  const bool moves = team < N - 1;  // the team of the rank's own part, and threads beyond N teams, have nothing to move
  const uint32_t reduced_part = static_cast<uint32_t>(call.slot_bytes / (2 * sizeof(Pack)));  // where it starts in a slot
  const uint64_t end = block_start(call, blockIdx.x + 1);
  const auto chunk_at = [&](uint64_t start) {
    return Chunk{start, start < end ? static_cast<uint32_t>(min(call.chunk_units, end - start)) : 0u};
  };

  const auto scatter = [&](const Chunk& chunk) {
    if constexpr (kPull) {
      // All but my own part, which nobody loads.
      const Part own = part_of<N>(chunk.length, call.rank);
      Pack* staged = block.slot(call.rank, 0);
      const uint32_t after = own.start + own.length;
      read_packs<kAtOnce>(input, chunk.start, own.start, threadIdx.x, blockDim.x,
                          [&](uint32_t i, const Pack& pack) { store_pack(staged + i, pack); });
      read_packs<kAtOnce>(input, chunk.start + after, chunk.length - after, threadIdx.x, blockDim.x,
                          [&](uint32_t i, const Pack& pack) { store_pack(staged + after + i, pack); });
    } else if (moves) {
      const Part theirs = part_of<N>(chunk.length, peer);
      Pack* slot = block.slot(peer, call.rank);
      read_packs<kAtOnce>(input, chunk.start + theirs.start, theirs.length, lane, team_threads,
                          [&](uint32_t i, const Pack& pack) { store_pack(slot + i, pack); });
    }
  };
  // From the half of `scattered` into that of the round under way.
  const auto reduce_own = [&](const Chunk& chunk, const Block<N>& scattered) {
    const Part own = part_of<N>(chunk.length, call.rank);
    reduce_packs<T, Op, N>(
        call, input, output, chunk.start + own.start, own.length,
        [&](uint32_t source) {
          return kPull ? scattered.slot(source, 0) + own.start : scattered.slot(call.rank, source);
        },
        [&](uint32_t i, bool whole, const Pack& pack) {
          if constexpr (kPull) {
            store_pack(block.slot(call.rank, N - 1) + i, pack);
          } else {
            push_pack<N>(call, i, pack, [&](uint32_t peer) { return block.slot(peer, call.rank) + reduced_part; });
          }
          const uint64_t index = chunk.start + own.start + i;
          whole ? output.store_whole(index, pack) : output.store_part(index, pack);
        });
  };
  const auto gather = [&](const Chunk& chunk, const Block<N>& gathered) {
    if (!moves) return;
    const Part theirs = part_of<N>(chunk.length, peer);
    const Pack* slot = kPull ? gathered.slot(peer, N - 1) : gathered.slot(call.rank, peer) + reduced_part;
    write_packs<kAtOnce>(output, chunk.start + theirs.start, theirs.length, lane, team_threads,
                         [&](uint32_t i) { return load_pack(slot + i); });
  };

  begin_call(call);
  block.begin();
  block.next_round();
  Chunk previous{0, 0}, chunk = chunk_at(block_start(call, blockIdx.x));
  scatter(chunk);
  while (chunk.length != 0) {
    if (!block.exchange(PEERSUM_PHASE_REDUCE_SCATTER)) return;
    const Block<N> arrived = block;
    block.next_round();
    reduce_own(chunk, arrived);
    gather(previous, arrived);
    previous = chunk;
    chunk = chunk_at(chunk.start + chunk.length);
    scatter(chunk);
  }
  if (!block.exchange(PEERSUM_PHASE_ALL_GATHER)) return;
  gather(previous, block);
  block.finish();
}

}  // namespace peersum
