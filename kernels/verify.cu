// Inputs that can be computed again, and a check of every element of a result against them.
//
// Element i of rank r in round s is a function of (s, r, i) alone, with values over many magnitudes, so that the order
// of a sum and every rounding shows in the bits. The check computes all ranks' elements again, reduces them by the
// definition (f32, rank order, one rounding), and compares bits; it shares no code with the algorithms but the rounding.
// The round is read from device memory, so that a replayed graph has new data each time. With its highest bit set the values
// are small integers instead, for algorithms that add in another order: every sum of theirs is exact in bf16 too.
#include "reduce.cuh"

namespace peersum {

__device__ __forceinline__ uint32_t mix(uint32_t x) {
  // The finaliser of MurmurHash3 (Appleby, 2008, public domain).
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// A number of either sign with a 16-bit significand and an exponent from 2^-14 to 2^1: f16 holds sums of eight. In a round of
// exact sums, an integer from -16 to 15: bf16 holds all sums of eight.
__device__ __forceinline__ float number(uint64_t round, uint32_t rank, uint64_t index) {
  uint32_t hash = mix(static_cast<uint32_t>(round) * 0x9e3779b9u + rank);
  hash = mix(hash ^ static_cast<uint32_t>(index));
  hash = mix(hash + static_cast<uint32_t>(index >> 32) + 0x7f4a7c15u);
  if (round >> 63) return static_cast<float>(static_cast<int32_t>(hash >> 27) - 16);
  const float significand = static_cast<float>(static_cast<int32_t>(hash << 16) >> 16) * 0x1p-15f;
  return ldexpf(significand, static_cast<int>(hash >> 28) - 14);
}

template <typename T>
struct Scalar;
template <>
struct Scalar<float> {
  __device__ static float round(float value) { return value; }
  __device__ static float widen(float value) { return value; }
  __device__ static uint32_t bits(float value) { return __float_as_uint(value); }
};
template <>
struct Scalar<__half> {
  __device__ static __half round(float value) { return __float2half_rn(value); }
  __device__ static float widen(__half value) { return __half2float(value); }
  __device__ static uint32_t bits(__half value) { return __half_as_ushort(value); }
};
template <>
struct Scalar<__nv_bfloat16> {
  __device__ static __nv_bfloat16 round(float value) { return __float2bfloat16_rn(value); }
  __device__ static float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
  __device__ static uint32_t bits(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }
};

template <typename T>
__device__ __forceinline__ void fill(T* tensor, uint64_t count, uint32_t rank, const uint64_t* round) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += uint64_t{gridDim.x} * blockDim.x) {
    tensor[i] = Scalar<T>::round(number(*round, rank, i));
  }
}

template <typename T>
__device__ __forceinline__ void check(const T* tensor, uint64_t count, uint32_t world, uint32_t op,
                                      const uint64_t* round, unsigned long long* wrong) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += uint64_t{gridDim.x} * blockDim.x) {
    float expected = 0;
    for (uint32_t rank = 0; rank < world; rank++) {
      const float value = Scalar<T>::widen(Scalar<T>::round(number(*round, rank, i)));
      if (rank == 0) {
        expected = value;
      } else if (op == PEERSUM_MAX) {
        expected = fmaxf(expected, value);
      } else if (op == PEERSUM_MIN) {
        expected = fminf(expected, value);
      } else {
        expected = __fadd_rn(expected, value);
      }
    }
    if (op == PEERSUM_AVERAGE) expected = __fdiv_rn(expected, static_cast<float>(world));
    if (Scalar<T>::bits(tensor[i]) != Scalar<T>::bits(Scalar<T>::round(expected))) atomicAdd(wrong, 1ull);
  }
}

}  // namespace peersum

#define PEERSUM_VERIFY(name, Type)                                                                                \
  extern "C" __global__ void peersum_fill_##name(Type* tensor, uint64_t count, uint32_t rank, const uint64_t* round) { \
    peersum::fill(tensor, count, rank, round);                                                                    \
  }                                                                                                               \
  extern "C" __global__ void peersum_check_##name(const Type* tensor, uint64_t count, uint32_t world, uint32_t op, \
                                                  const uint64_t* round, unsigned long long* wrong) {             \
    peersum::check(tensor, count, world, op, round, wrong);                                                       \
  }

PEERSUM_VERIFY(f32, float)
PEERSUM_VERIFY(f16, __half)
PEERSUM_VERIFY(bf16, __nv_bfloat16)

// Whether packets and words come whole: every thread of the writer's grid stores rounds 1, 2, ... to a place of its own, as fast
// as it can, and a thread of the reader's loads there all the time. A round's bits follow from one another, so that a load with
// some of one round and some of another shows. `counts` are loads, rounds that a load found for the first time, and torn loads.
namespace peersum {

__device__ __forceinline__ Pack whole_packet(uint32_t round, uint32_t place) {
  const uint32_t first = mix(round * 0x9e3779b9u + place);
  return Pack{{first, mix(first), ~first, round}};
}

__device__ __forceinline__ uint64_t whole_word(uint32_t round, uint32_t place) {
  return static_cast<uint64_t>(mix(round * 0x9e3779b9u + place)) << 32 | round;
}

template <typename Load>
__device__ __forceinline__ void read_whole(uint32_t rounds, uint64_t patience_ns, unsigned long long* counts,
                                           const Load& load) {
  unsigned long long loads = 0, fresh = 0, torn = 0;
  const uint64_t started = global_timer();
  for (uint32_t last = 0; last != rounds;) {
    bool whole = true;
    const uint32_t round = load(&whole);
    loads++;
    if (!whole) torn++;
    if (round != last) fresh++;
    last = round;
    if (loads % 1024 == 0 && global_timer() - started > patience_ns) break;
  }
  atomicAdd(counts, loads);
  atomicAdd(counts + 1, fresh);
  atomicAdd(counts + 2, torn);
}

}  // namespace peersum

extern "C" __global__ void peersum_write_packets(peersum::Pack* places, uint32_t rounds) {
  const uint32_t place = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t round = 1; round <= rounds; round++) {
    peersum::store_packet_relaxed_sys(places + place, peersum::whole_packet(round, place));
  }
}

extern "C" __global__ void peersum_read_packets(const peersum::Pack* places, uint32_t rounds, uint64_t patience_ns,
                                                unsigned long long* counts) {
  const uint32_t place = blockIdx.x * blockDim.x + threadIdx.x;
  peersum::read_whole(rounds, patience_ns, counts, [&](bool* whole) {
    const peersum::Pack found = peersum::load_packet_relaxed_sys(places + place);
    const uint32_t round = found.words[3];
    const peersum::Pack expected = peersum::whole_packet(round, place);
    *whole = round == 0 || (found.words[0] == expected.words[0] && found.words[1] == expected.words[1] &&
                            found.words[2] == expected.words[2]);
    return round;
  });
}

extern "C" __global__ void peersum_write_words(uint64_t* places, uint32_t rounds) {
  const uint32_t place = blockIdx.x * blockDim.x + threadIdx.x;
  for (uint32_t round = 1; round <= rounds; round++) {
    peersum::store_relaxed_sys(places + place, peersum::whole_word(round, place));
  }
}

extern "C" __global__ void peersum_read_words(const uint64_t* places, uint32_t rounds, uint64_t patience_ns,
                                              unsigned long long* counts) {
  const uint32_t place = blockIdx.x * blockDim.x + threadIdx.x;
  peersum::read_whole(rounds, patience_ns, counts, [&](bool* whole) {
    const uint64_t found = peersum::load_relaxed_sys(places + place);
    const uint32_t round = static_cast<uint32_t>(found);
    *whole = round == 0 || found == peersum::whole_word(round, place);
    return round;
  });
}

// The next round.
extern "C" __global__ void peersum_advance(uint64_t* round) { *round += 1; }

// Nothing: what any kernel costs.
extern "C" __global__ void peersum_empty() {}
