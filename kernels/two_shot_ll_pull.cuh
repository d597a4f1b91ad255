// Two-shot all-reduce, each half by what is cheaper there: reduce-scatter by LL packets, all-gather by pull.
//
//   1. store part p of my chunk into rank p's slot for me, packet by packet
//   2. load my part's packet of every peer from my slots until it has come, reduce in rank order, store the result into my
//      own slots of the region of flags, and into the output
//   3. release my flag to all peers, acquire theirs
//   4. load every other part from its owner's memory, store the output
//
// Against two pulls it saves the copy into the rank's own slots and one exchange of flags; against packets all the way,
// most of their bytes: what is gathered goes once, 16 bytes of payload in 16.
//
// To prove: a chunk is one round of packets (packets.cuh) and one round of flags (round.cuh), each in its own region with
// its own epoch, and each argument holds by itself: every rank gets a packet from every peer, since parts have one unit at
// least, and the barriers of step 3 lie behind every poll of step 2. In place works as in two_shot_ll.cuh.
//
// A unit is 48 bytes, the payload of 4 packets and 3 packs, so that parts are whole in both.
#pragma once

#include "one_shot.cuh"
#include "packets.cuh"

namespace peersum {

template <typename T, typename Op, int N>
__device__ __forceinline__ void two_shot_ll_pull(const peersum_call& call) {
  constexpr int kMoves = 4;
  PacketBlock<N> scatter(call);
  Block<N> block(call);
  const Tensor<T> input(call.input, call.count, call.vector_input);
  const Tensor<T> output(call.output, call.count, call.vector_output);
  const uint32_t team_threads = blockDim.x / N;
  const uint32_t team = threadIdx.x / team_threads, lane = threadIdx.x % team_threads;
  uint32_t peer = call.rank + 1 + team;
  peer = peer < N ? peer : peer - N;
  const bool moves = team < N - 1;
  uint64_t start = block_start(call, blockIdx.x);
  const uint64_t end = block_start(call, blockIdx.x + 1);
  for (; start < end; start += call.chunk_units) {
    const uint32_t length = static_cast<uint32_t>(min(call.chunk_units, end - start));
    const uint32_t part = (length + N - 1) / N;
    // In packets and in packs, from the start of the chunk.
    const uint64_t first_packet = start * 4, first_pack = start * 3;
    const auto load = [&](uint32_t packet) {
      return packet < length * 4 ? input.load_payload(first_packet + packet) : Pack{};
    };
    scatter.next_round();
    if (moves) {
      Pack* slot = scatter.slot(peer, call.rank);
      move_packs<kMoves>(
          lane, part * 4, team_threads, [&](uint32_t i) { return load(peer * part * 4 + i); },
          [&](uint32_t i, const Pack& payload) { scatter.store(slot + i, payload); });
      if (lane == 0) scatter.announce(peer);  // a poll that waits long looks at it; the exchange of flags compares
    }
    block.next_round();
    uint32_t* staged = reinterpret_cast<uint32_t*>(block.slot(call.rank, 0));
    bool arrived = true;
    for (uint32_t i = threadIdx.x; i < part * 4; i += blockDim.x) {
      const uint32_t packet = call.rank * part * 4 + i;
      const Pack own = load(packet);
      Pack packets[N];
      arrived = scatter.poll(
          packets, scatter.epoch(), PEERSUM_PHASE_REDUCE_SCATTER, scatter.watch(false, call.rank),
          [&](uint32_t source) { return scatter.slot(call.rank, source) + i; }, [&](uint32_t source) { return source; },
          [&](uint32_t source) { return source != call.rank; });
      if (!arrived) break;
      Pack gathered[N];
#pragma unroll
      for (uint32_t source = 0; source < N; source++) gathered[source] = source == call.rank ? own : packets[source];
      const Pack reduced = reduce<T, Op, N, kPayloadWords>(gathered, call.op);
#pragma unroll
      for (int word = 0; word < kPayloadWords; word++) store_word(staged + i * kPayloadWords + word, reduced.words[word]);
      if (packet < length * 4) output.store_payload(first_packet + packet, reduced);
    }
    if (!scatter.conclude(arrived) || !block.exchange(PEERSUM_PHASE_ALL_GATHER)) return;
    if (moves && peer * part < length) {
      const Pack* theirs = block.slot(peer, 0);
      const uint32_t packs = min(part, length - peer * part) * 3;
      write_packs<4>(output, first_pack + peer * part * 3, packs, lane, team_threads,
                           [&](uint32_t i) { return load_pack(theirs + i); });
    }
  }
  scatter.finish();
  block.finish();
}

}  // namespace peersum
