// The one wait: it ends with the flag, at the deadline, or when another rank gave up.
//
// Whoever gives up says so in this order: its record for the hosts, then the abort word of every rank. So a host that
// finds a rank aborted by another finds that other's record too. Later calls see the abort word and don't wait at all.
//
// A host asks for an abort by a word in its memory, which a look reads too: so it needs no stream, whose work could be
// held up behind the very kernels that it is to end.
#pragma once

#include "memory.cuh"

namespace peersum {

// What is waited for; it goes into the record.
struct Awaited {
  uint64_t region;  // of the flag
  uint32_t peer;
  uint32_t block;
  uint32_t phase;
  uint64_t flag;
};

// How a wait ended.
struct Outcome {
  uint32_t reason;  // 0, or PEERSUM_GAVE_UP_*
  uint32_t abort;   // the abort word, if that is the reason
  uint64_t observed;
  uint64_t waited_ns;
};

__device__ __forceinline__ peersum_control* control(const peersum_call& call, uint32_t rank) {
  return global<peersum_control>(call.segments[rank]);
}

constexpr uint32_t kSpinsBetweenLooks = 1024;  // some hundred microseconds: looking costs a spin, so look rarely

// Whether a flag word of a peer says that it is in this epoch, but in another call.
__device__ __forceinline__ bool is_other_call(const peersum_call& call, uint64_t word, uint32_t epoch) {
  const uint32_t hash = static_cast<uint32_t>(word >> PEERSUM_HASH_SHIFT);
  return hash != 0 && hash != call.hash && static_cast<uint32_t>(word) == epoch;
}

// Whether the peer has begun another call that goes by the other region, where nobody waits for it: a round behind the
// last one there that this rank has finished.
__device__ __forceinline__ bool in_other_region(const peersum_call& call, const Awaited& awaited) {
  const uint64_t region = call.segments[call.rank] + (awaited.region == 0 ? call.packet_region : 0);
  uint32_t epoch = load_word(&global<peersum_control>(region)->epochs[awaited.block]) + 1;
  if (epoch == 0 && awaited.region == 0) epoch = 2;  // as packets count
  const uint64_t offset = peersum_flag_offset(call.world, call.max_blocks, epoch & 1u, awaited.block, awaited.peer);
  return is_other_call(call, load_acquire_sys(global<uint64_t>(region + offset)), epoch);
}

// A look up from a poll: whether to give up, at what `flag`, the awaited peer's flag word of this half, says of its call,
// at the abort word, and at the clock. `started` is 0 at the first look.
__device__ __forceinline__ Outcome look(const peersum_call& call, const uint64_t* flag, const Awaited& awaited,
                                        uint64_t& started) {
  Outcome outcome{0, 0, 0, 0};
  outcome.observed = load_relaxed_sys(flag);
  outcome.abort = load_relaxed_sys(&control(call, call.rank)->abort);
  if (load_relaxed_sys(&global<peersum_record>(call.record)->abort_requested) != 0) {
    outcome.abort = PEERSUM_ABORT_BY_HOST;
  }
  const uint64_t now = global_timer();
  if (started == 0) started = now;
  outcome.waited_ns = now - started;
  if (outcome.abort != 0) {
    // Before anything about calls: a rank that has given up goes on to its next one, in the epoch of the last.
    outcome.reason = PEERSUM_GAVE_UP_ABORTED;
  } else if (is_other_call(call, outcome.observed, static_cast<uint32_t>(awaited.flag)) ||
             // But not if it had been in this one, and has gone on since: then what is awaited has come.
             (in_other_region(call, awaited) && load_relaxed_sys(flag) != awaited.flag)) {
    outcome.reason = PEERSUM_GAVE_UP_MISMATCH;
  } else if (outcome.waited_ns > call.timeout_ns) {
    outcome.reason = PEERSUM_GAVE_UP_TIMEOUT;
  }
  return outcome;
}

// Waits until *flag is awaited.flag, for every lane of a warp at once: a lane that waits for nobody passes `waits` false.
// All lanes of the warp call it. kAcquire says whether
// what the flags release is read after it: then each load acquires, which costs less than a fence at the end.
template <bool kAcquire>
__device__ __forceinline__ Outcome wait_for(const peersum_call& call, bool waits, const uint64_t* flag,
                                            const Awaited& awaited) {
  Outcome outcome{0, 0, 0, 0};
  uint64_t started = 0;
  for (uint32_t spins = 1;; spins++) {
    if (waits) waits = (kAcquire ? load_acquire_sys(flag) : load_relaxed_sys(flag)) != awaited.flag;
    if (!__any_sync(~0u, waits)) break;
    if (spins % kSpinsBetweenLooks != 0) continue;
    if (waits) outcome = look(call, flag, awaited, started);
    if (__any_sync(~0u, outcome.reason != 0)) break;
  }
  return outcome;
}

__device__ __forceinline__ void give_up(const peersum_call& call, const Awaited& awaited, const Outcome& outcome) {
  // One block of the rank writes the record; the others have the same to say, or less.
  if (atomicCAS(&control(call, call.rank)->claimed, 0u, 1u) != 0u) return;
  peersum_record* record = global<peersum_record>(call.record);
  record->reason = outcome.reason;
  record->abort = outcome.abort;
  record->rank = call.rank;
  record->peer = awaited.peer;
  record->block = awaited.block;
  record->phase = awaited.phase;
  record->epoch = static_cast<uint32_t>(awaited.flag);
  record->expected = awaited.flag;
  record->observed = outcome.observed;
  record->waited_ns = outcome.waited_ns;
  // Whatever the reason: a peer that found this rank in another call names it by this.
  record->dtype = call.dtype;
  record->op = call.op;
  record->algorithm = call.algorithm;
  record->blocks = gridDim.x;
  record->threads = blockDim.x;
  record->count = call.count;
  record->chunk_units = call.chunk_units;
  record->input = call.input - call.segments[call.rank];
  record->output = call.output - call.segments[call.rank];
  store_release_sys(&record->state, 1u);
  fence_acq_rel_sys();
#pragma unroll 1
  for (uint32_t rank = 0; rank < call.world; rank++) {
    const bool by_host = outcome.abort == PEERSUM_ABORT_BY_HOST;
    store_relaxed_sys(&control(call, rank)->abort, by_host ? PEERSUM_ABORT_BY_HOST : 1u + call.rank);
  }
}

}  // namespace peersum
