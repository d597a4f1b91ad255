// Packs of elements: to and from f32, and to and from tensors of any length and alignment.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "memory.cuh"

namespace peersum {

// How a 32-bit word holds elements of T. Widening is exact, narrowing rounds to nearest, ties to even.
template <typename T>
struct Elements;

template <>
struct Elements<float> {
  static constexpr int kInWord = 1;
  __device__ static void widen(uint32_t word, float* values) { values[0] = __uint_as_float(word); }
  __device__ static uint32_t narrow(const float* values) { return __float_as_uint(values[0]); }
};

template <>
struct Elements<__half> {
  static constexpr int kInWord = 2;
  __device__ static void widen(uint32_t word, float* values) {
    __half2_raw raw;
    raw.x = static_cast<unsigned short>(word);
    raw.y = static_cast<unsigned short>(word >> 16);
    const float2 pair = __half22float2(__half2(raw));
    values[0] = pair.x;
    values[1] = pair.y;
  }
  __device__ static uint32_t narrow(const float* values) {
    const __half2_raw raw = __floats2half2_rn(values[0], values[1]);
    return static_cast<uint32_t>(raw.y) << 16 | raw.x;
  }
};

template <>
struct Elements<__nv_bfloat16> {
  static constexpr int kInWord = 2;
  __device__ static void widen(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  __device__ static uint32_t narrow(const float* values) {
    const __nv_bfloat162_raw raw = __floats2bfloat162_rn(values[0], values[1]);
    return static_cast<uint32_t>(raw.y) << 16 | raw.x;
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
  static constexpr int kCount = 16 / sizeof(T);

 public:
  __device__ Tensor(uint64_t address, uint64_t count, bool vector)
      : base_(global<Word>(address)), count_(count), vector_(vector), words_(address % 4 == 0) {}

  // How many of the packs from `start` on, of `length`, are whole and aligned.
  __device__ uint32_t whole(uint64_t start, uint32_t length) const {
    const uint64_t end = count_ / kCount;
    if (!vector_ || start >= end) return 0;
    return static_cast<uint32_t>(min(static_cast<uint64_t>(length), end - start));
  }

  // Whole packs of an aligned tensor.
  __device__ Pack load_whole(uint64_t index) const { return load_pack(reinterpret_cast<const Pack*>(base_) + index); }
  __device__ void store_whole(uint64_t index, const Pack& pack) const {
    store_pack(reinterpret_cast<Pack*>(base_) + index, pack);
  }

  // Any pack; what lies beyond the end reads as 0 and is not written.
  __device__ Pack load_part(uint64_t index) const { return load_elements<kCount>(index * kCount); }
  __device__ void store_part(uint64_t index, const Pack& pack) const { store_elements<kCount>(index * kCount, pack); }

  // The place of LL packet `index` of the tensor, to be computed before it is used.
  struct Payload {
    uint64_t first;   // element
    uint64_t words;   // address
    uint32_t plain;   // 2 if it is whole, and moves a word at a time, else 0
  };
  __device__ Payload payload(uint64_t index) const {
    const uint64_t first = index * kPayload;
    const uint64_t words = reinterpret_cast<uint64_t>(base_) + index * PEERSUM_LL_PAYLOAD_BYTES;
    return Payload{first, words, words_ && first + kPayload <= count_ ? 2u : 0u};
  }

  // The payload of a packet, in the first words of a pack; what lies beyond the end reads as 0 and is not written.
  __device__ Pack load_payload(const Payload& place) const {
    if (place.plain == 0) return load_elements<kPayload>(place.first);
    Pack pack{};
#pragma unroll
    for (int i = 0; i < kPayloadWords; i++) pack.words[i] = load_plain(place.words + 4 * i);
    return pack;
  }
  __device__ void store_payload(const Payload& place, const Pack& pack) const {
    if (place.plain == 0) {
      store_elements<kPayload>(place.first, pack);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPayloadWords; i++) store_plain(place.words + 4 * i, pack.words[i]);
  }
  __device__ Pack load_payload(uint64_t index) const { return load_payload(payload(index)); }
  __device__ void store_payload(uint64_t index, const Pack& pack) const { store_payload(payload(index), pack); }

 private:
  static constexpr int kPayload = PEERSUM_LL_PAYLOAD_BYTES / sizeof(T);
  static constexpr int kPayloadWords = PEERSUM_LL_PAYLOAD_BYTES / 4;

  template <int kElements>
  __device__ Pack load_elements(uint64_t first) const {
    Pack pack{};
#pragma unroll
    for (int i = 0; i < kElements; i++) {
      if (first + i < count_) {
        pack.words[i * sizeof(T) / 4] |= static_cast<uint32_t>(base_[first + i]) << (i * sizeof(T) % 4 * 8);
      }
    }
    return pack;
  }
  template <int kElements>
  __device__ void store_elements(uint64_t first, const Pack& pack) const {
#pragma unroll
    for (int i = 0; i < kElements; i++) {
      if (first + i < count_) {
        base_[first + i] = static_cast<Word>(pack.words[i * sizeof(T) / 4] >> (i * sizeof(T) % 4 * 8));
      }
    }
  }

  Word* base_;
  uint64_t count_;
  bool vector_;
  bool words_;
};

// Moves packs first, first + step, ... below `length`: so many loads are under way before the first store. `load(i)`
// gives what `store(i, pack)` takes.
template <int kUnroll, typename Load, typename Store>
__device__ __forceinline__ void move_packs(uint32_t first, uint32_t length, uint32_t step, const Load& load,
                                           const Store& store) {
  for (uint32_t base = first; base < length; base += kUnroll * step) {
    decltype(load(base)) loaded[kUnroll];
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; u++) {
      if (u == 0 || base + u * step < length) loaded[u] = load(base + u * step);
    }
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; u++) {
      if (u == 0 || base + u * step < length) store(base + u * step, loaded[u]);
    }
  }
}

// The part of a strided loop that starts at or after `from`: where thread `first` of `step` goes on.
__device__ __forceinline__ uint32_t next_from(uint32_t first, uint32_t from, uint32_t step) {
  return from <= first ? first : first + (from - first + step - 1) / step * step;
}

// Moves packs of a tensor to `store(i, pack)`: whole ones many at a time, others one by one.
template <int kUnroll, typename T, typename Store>
__device__ __forceinline__ void read_packs(const Tensor<T>& tensor, uint64_t start, uint32_t length, uint32_t first,
                                           uint32_t step, const Store& store) {
  const uint32_t whole = tensor.whole(start, length);
  move_packs<kUnroll>(first, whole, step, [&](uint32_t i) { return tensor.load_whole(start + i); }, store);
  if (whole == length) return;
  for (uint32_t i = next_from(first, whole, step); i < length; i += step) store(i, tensor.load_part(start + i));
}

// Moves packs from `load(i)` into a tensor, likewise.
template <int kUnroll, typename T, typename Load>
__device__ __forceinline__ void write_packs(const Tensor<T>& tensor, uint64_t start, uint32_t length, uint32_t first,
                                            uint32_t step, const Load& load) {
  const uint32_t whole = tensor.whole(start, length);
  move_packs<kUnroll>(first, whole, step, load, [&](uint32_t i, const Pack& pack) { tensor.store_whole(start + i, pack); });
  if (whole == length) return;
  for (uint32_t i = next_from(first, whole, step); i < length; i += step) tensor.store_part(start + i, load(i));
}

}  // namespace peersum
