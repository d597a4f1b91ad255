// Packs of elements: to and from f32, and to and from tensors of any length and alignment.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "memory.cuh"

namespace peersum {

// How a 16-byte pack holds elements of T. Widening is exact, narrowing rounds to nearest, ties to even.
template <typename T>
struct Elements;

template <>
struct Elements<float> {
  static constexpr int kCount = 4;
  __device__ static void widen(const Pack& pack, float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = __uint_as_float(pack.words[i]);
  }
  __device__ static Pack narrow(const float (&values)[kCount]) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < 4; i++) pack.words[i] = __float_as_uint(values[i]);
    return pack;
  }
};

template <>
struct Elements<__half> {
  static constexpr int kCount = 8;
  __device__ static void widen(const Pack& pack, float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      __half2_raw raw;
      raw.x = static_cast<unsigned short>(pack.words[i]);
      raw.y = static_cast<unsigned short>(pack.words[i] >> 16);
      const float2 pair = __half22float2(__half2(raw));
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
  __device__ static Pack narrow(const float (&values)[kCount]) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __half2_raw raw = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      pack.words[i] = static_cast<uint32_t>(raw.y) << 16 | raw.x;
    }
    return pack;
  }
};

template <>
struct Elements<__nv_bfloat16> {
  static constexpr int kCount = 8;
  __device__ static void widen(const Pack& pack, float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      values[2 * i] = __uint_as_float(pack.words[i] << 16);
      values[2 * i + 1] = __uint_as_float(pack.words[i] & 0xffff0000u);
    }
  }
  __device__ static Pack narrow(const float (&values)[kCount]) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __nv_bfloat162_raw raw = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      pack.words[i] = static_cast<uint32_t>(raw.y) << 16 | raw.x;
    }
    return pack;
  }
};

// An element's bits.
template <int kBytes>
struct Bits;
template <>
struct Bits<2> {
  using Type = uint16_t;
};
template <>
struct Bits<4> {
  using Type = uint32_t;
};

// A tensor of the caller's, seen as packs. Whole packs of a 16-byte aligned tensor move as one access; the tail, and
// every pack of any other tensor, element by element. So the packs of a message, and with them slots, plan and flags,
// do not depend on the alignment, which may differ from rank to rank.
template <typename T>
class Tensor {
  using Word = typename Bits<sizeof(T)>::Type;
  static constexpr int kCount = Elements<T>::kCount;

 public:
  __device__ Tensor(uint64_t address, uint64_t count, bool vector)
      : base_(global<Word>(address)), count_(count), vector_(vector) {}

  __device__ Pack load(uint64_t index) const {
    const uint64_t first = index * kCount;
    if (vector_ && first + kCount <= count_) return load_pack(reinterpret_cast<const Pack*>(base_) + index);
    Pack pack{};
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (first + i < count_) {
        pack.words[i * sizeof(T) / 4] |= static_cast<uint32_t>(base_[first + i]) << (i * sizeof(T) % 4 * 8);
      }
    }
    return pack;
  }

  __device__ void store(uint64_t index, const Pack& pack) const {
    const uint64_t first = index * kCount;
    if (vector_ && first + kCount <= count_) {
      store_pack(reinterpret_cast<Pack*>(base_) + index, pack);
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (first + i < count_) {
        base_[first + i] = static_cast<Word>(pack.words[i * sizeof(T) / 4] >> (i * sizeof(T) % 4 * 8));
      }
    }
  }

 private:
  Word* base_;
  uint64_t count_;
  bool vector_;
};

}  // namespace peersum
