// What the command measures about devices and the links between them: `peersum p2p` and `peersum probe`. The library launches none
// of these, and doesn't load the image that they are in.
//
// Data are compared by the device that owns the memory, with its own loads: a device that reads back through the mapping that
// it wrote through sees what it wrote, wherever that went. Times within a kernel are of the device's own clock. A kernel that
// waits for another one has a deadline, and says how far it came.
#include "memory.cuh"

namespace peersum {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
__device__ __forceinline__ uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// No word of a buffer is any other's, and none is what it was for another seed.
__device__ __forceinline__ uint64_t expected(uint64_t seed, uint64_t index) {
  return mix64(seed + (index + 1) * 0x9e3779b97f4a7c15ull);
}

constexpr uint32_t SPINS = 256;

// Whether a word came to a value before the deadline.
__device__ __forceinline__ bool wait_for(const uint32_t* word, uint32_t value, uint64_t deadline) {
  for (uint32_t spins = 0; static_cast<int32_t>(load_relaxed_sys(word) - value) < 0; spins++) {
    if (spins % SPINS == SPINS - 1 && global_timer() > deadline) return false;
  }
  return true;
}

__device__ __forceinline__ bool wait_for(const Pack* packet, uint32_t value, uint64_t deadline) {
  for (uint32_t spins = 0;; spins++) {
    // All of the packet is looked at, or the compiler would load its last word alone.
    const Pack loaded = load_packet_relaxed_sys(packet);
    if (static_cast<int32_t>(loaded.words[3] - value) >= 0 && loaded.words[0] == loaded.words[3]) return true;
    if (spins % SPINS == SPINS - 1 && global_timer() > deadline) return false;
  }
}

__device__ __forceinline__ void tell(uint32_t* word, uint32_t value) { store_relaxed_sys(word, value); }

__device__ __forceinline__ void tell(Pack* packet, uint32_t value) {
  store_packet_relaxed_sys(packet, Pack{{value, value, value, value}});
}

// Two threads on two devices, or in two streams of one, write to each other in turn. result: nanoseconds, rounds.
template <typename T>
__device__ __forceinline__ void ping_pong(T* mine, T* theirs, uint32_t rounds, uint32_t first, uint64_t patience,
                                          uint64_t* result) {
  const uint64_t deadline = global_timer() + patience;
  // Both are there when the first round is over, so that is where the time begins.
  uint64_t start = 0;
  uint32_t round = 1;
  for (; round <= rounds + 1; round++) {
    if (first != 0) tell(theirs, round);
    if (!wait_for(mine, round, deadline)) break;
    if (first == 0) tell(theirs, round);
    if (round == 1) start = global_timer();
  }
  result[0] = global_timer() - start;
  result[1] = round - 1;
}

}  // namespace
}  // namespace peersum

using peersum::Pack;

// Nothing: what any kernel costs.
extern "C" __global__ void peersum_probe_empty() {}

// Holds a stream back until the host says so, so that what is timed behind it was enqueued before it began.
extern "C" __global__ void peersum_probe_hold(const uint32_t* gate, uint64_t patience) {
  const uint64_t deadline = peersum::global_timer() + patience;
  peersum::wait_for(gate, 1, deadline);
}

// Four packs of a thread are on their way at once.
extern "C" __global__ void __launch_bounds__(512) peersum_probe_copy(Pack* to, const Pack* from, uint64_t packs) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x;
  for (; i + 3 * stride < packs; i += 4 * stride) {
    Pack loaded[4];
#pragma unroll
    for (int k = 0; k < 4; k++) loaded[k] = peersum::load_pack(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < 4; k++) peersum::store_pack(to + i + k * stride, loaded[k]);
  }
  for (; i < packs; i += stride) peersum::store_pack(to + i, peersum::load_pack(from + i));
}

struct peersum_probe_targets {
  uint64_t to[16];
  uint32_t count;
};

// To all targets at once, as a one-shot pushes: what one device sends.
extern "C" __global__ void __launch_bounds__(512)
    peersum_probe_spread(const __grid_constant__ peersum_probe_targets targets, const Pack* from, uint64_t packs) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < packs; i += stride) {
    const Pack pack = peersum::load_pack(from + i);
    for (uint32_t k = 0; k < targets.count; k++) {
      // Blocks begin at different targets, so that they do not all go to one.
      const uint32_t target = (k + blockIdx.x) % targets.count;
      peersum::store_pack(peersum::global<Pack>(targets.to[target]) + i, pack);
    }
  }
}

extern "C" __global__ void peersum_probe_fill(uint64_t* words, uint64_t count, uint64_t seed) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    words[i] = peersum::expected(seed, i);
  }
}

// report: words that are wrong; of the first of them, how many follow it, itself counted. So both begin at 0. By relaxed loads at system scope, which come from where peers write.
extern "C" __global__ void peersum_probe_check(const uint64_t* words, uint64_t count, uint64_t seed,
                                               unsigned long long* report) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += stride) {
    if (peersum::load_relaxed_sys(words + i) == peersum::expected(seed, i)) continue;
    atomicAdd(report, 1ull);
    atomicMax(report + 1, static_cast<unsigned long long>(count - i));
  }
}

// Each word has the place of the next: a circle of `count` words, `stride` apart. The last place is 0 again.
extern "C" __global__ void peersum_probe_chain(uint64_t* words, uint64_t count, uint64_t stride) {
  const uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x;
  if (i < count) words[i * stride] = (i + 1) % count * stride;
}

// Loads that wait for each other. result: nanoseconds, the place at the end.
extern "C" __global__ void peersum_probe_chase(const uint64_t* chain, uint32_t loads, uint64_t* result) {
  // The first loads find translations.
  uint64_t place = 0;
  for (uint32_t i = 0; i < loads; i++) place = peersum::load_relaxed_sys(chain + place);
  const uint64_t start = peersum::global_timer();
  for (uint32_t i = 0; i < loads; i++) place = peersum::load_relaxed_sys(chain + place);
  result[1] = place;
  result[0] = peersum::global_timer() - start;
}

extern "C" __global__ void peersum_probe_ping_flag(uint32_t* mine, uint32_t* theirs, uint32_t rounds, uint32_t first,
                                                   uint64_t patience, uint64_t* result) {
  peersum::ping_pong(mine, theirs, rounds, first, patience, result);
}

extern "C" __global__ void peersum_probe_ping_packet(Pack* mine, Pack* theirs, uint32_t rounds, uint32_t first,
                                                     uint64_t patience, uint64_t* result) {
  peersum::ping_pong(mine, theirs, rounds, first, patience, result);
}

// Stores, each with a fence behind it or not. result: nanoseconds, stores.
extern "C" __global__ void peersum_probe_fence(uint64_t* to, uint32_t rounds, uint32_t fence, uint64_t* result) {
  uint64_t start = 0;
  for (uint32_t i = 0; i < 2 * rounds; i++) {
    if (i == rounds) start = peersum::global_timer();
    peersum::store_relaxed_sys(to + i % 16 * 16, i);
    if (fence != 0) peersum::fence_acq_rel_sys();
  }
  result[0] = peersum::global_timer() - start;
  result[1] = rounds;
}

// Atomic additions that wait for each other. result: nanoseconds, the sum.
extern "C" __global__ void peersum_probe_atomic(uint32_t* to, uint32_t rounds, uint64_t* result) {
  uint64_t start = 0;
  uint32_t sum = 0;
  for (uint32_t i = 0; i < 2 * rounds; i++) {
    if (i == rounds) start = peersum::global_timer() + (sum >> 31);
    // The next address is known when this sum is.
    asm volatile("atom.relaxed.sys.global.add.u32 %0, [%1], 1;" : "=r"(sum) : "l"(to + (sum >> 31)) : "memory");
  }
  result[1] = sum;
  result[0] = peersum::global_timer() - start;
}
