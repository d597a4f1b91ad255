// Two-shot all-reduce: reduce-scatter, then all-gather; rank r reduces part r of each chunk. Two rounds a chunk.
//
//   push                                          pull
//   1. store part p into rank p's slot for me     1. store the other parts into my own slots of the half
//   2. release, acquire                           2. release, acquire
//   3. load my part of every rank from my slots,  3. load my part of every rank from its memory, reduce in
//      reduce in rank order, store it into every     rank order, store it into my own slots of the next half
//      peer's slot for me in the next half           and into the output
//      and into the output                        4. release, acquire
//   4. release, acquire                           5. load every other part from its owner's memory, store the output
//   5. load every other part from my slots,
//      store the output
//
// To prove: as for one-shot, with steps 1 and 3 the writers and steps 3 and 5 the readers of successive rounds. The
// reduced part is rounded once, in step 3, and copied from there: the same bits as one-shot.
// In place works: steps 1 and 3 read the input, and step 5 writes other packs than step 3 reads, behind two barriers.
#pragma once

#include "one_shot.cuh"

namespace peersum {

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
  uint64_t start = block_start(call, blockIdx.x);
  const uint64_t end = block_start(call, blockIdx.x + 1);
  begin_call(call);
  block.begin();
  for (; start < end; start += call.chunk_units) {
    const uint32_t length = static_cast<uint32_t>(min(call.chunk_units, end - start));
    const Part own = part_of<N>(length, call.rank), theirs = part_of<N>(length, peer);
    block.next_round();
    if constexpr (kPull) {
      // All but my own part, which nobody loads.
      Pack* staged = block.slot(call.rank, 0);
      const uint32_t after = own.start + own.length;
      read_packs<kAtOnce>(input, start, own.start, threadIdx.x, blockDim.x,
                                 [&](uint32_t i, const Pack& pack) { store_pack(staged + i, pack); });
      read_packs<kAtOnce>(input, start + after, length - after, threadIdx.x, blockDim.x,
                                 [&](uint32_t i, const Pack& pack) { store_pack(staged + after + i, pack); });
    } else if (moves) {
      Pack* slot = block.slot(peer, call.rank);
      read_packs<kAtOnce>(input, start + theirs.start, theirs.length, lane, team_threads,
                          [&](uint32_t i, const Pack& pack) { store_pack(slot + i, pack); });
    }
    if (!block.exchange(PEERSUM_PHASE_REDUCE_SCATTER)) return;
    const Block<N> scattered = block;
    block.next_round();
    reduce_packs<T, Op, N>(
        call, input, output, start + own.start, own.length,
        [&](uint32_t source) {
          return kPull ? scattered.slot(source, 0) + own.start : scattered.slot(call.rank, source);
        },
        [&](uint32_t i, bool whole, const Pack& pack) {
          if constexpr (kPull) {
            store_pack(block.slot(call.rank, 0) + i, pack);
          } else {
            push_pack<N>(call, i, pack, [&](uint32_t peer) { return block.slot(peer, call.rank); });
          }
          const uint64_t index = start + own.start + i;
          whole ? output.store_whole(index, pack) : output.store_part(index, pack);
        });
    if (!block.exchange(PEERSUM_PHASE_ALL_GATHER)) return;
    if (moves) {
      const Pack* slot = kPull ? block.slot(peer, 0) : block.slot(call.rank, peer);
      write_packs<kAtOnce>(output, start + theirs.start, theirs.length, lane, team_threads,
                           [&](uint32_t i) { return load_pack(slot + i); });
    }
  }
  block.finish();
}

}  // namespace peersum
