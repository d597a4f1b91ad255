// Reductions in f32, in rank order, with one rounding: the same bits on every rank, whatever the algorithm.
#pragma once

#include "vector.cuh"

namespace peersum {

// Sum and average.
struct Sum {
  __device__ static float combine(float left, float right, uint32_t) { return __fadd_rn(left, right); }
  // The quotient in f32, correctly rounded. The product in f64 lies within 2^-52 of it, relatively, and a quotient of a
  // 24-bit significand by 3, 5, 6 or 7 is never that near to the middle of two floats. A division would be a call.
  template <int N>
  __device__ static float finish(float sum, uint32_t op) {
    return op == PEERSUM_AVERAGE ? __double2float_rn(__dmul_rn(static_cast<double>(sum), 1.0 / N)) : sum;
  }
};

// Max and min. A NaN wins; +0 is greater than -0.
struct Extreme {
  __device__ static float combine(float left, float right, uint32_t op) {
    float result;
    if (op == PEERSUM_MAX) {
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(left), "f"(right));
    } else {
      asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(left), "f"(right));
    }
    return result;
  }
  template <int N>
  __device__ static float finish(float extreme, uint32_t) {
    return extreme;
  }
};

template <typename Op>
struct IsSum {
  static constexpr bool kValue = false;
};
template <>
struct IsSum<Sum> {
  static constexpr bool kValue = true;
};

// Reduces the first kWords words of one pack of every rank; packs[r] is rank r's.
template <typename T, typename Op, int N, int kWords = 4>
__device__ __forceinline__ Pack reduce(const Pack (&packs)[N], uint32_t op) {
  constexpr int kInWord = Elements<T>::kInWord;
  Pack result{};
#pragma unroll
  for (int word = 0; word < kWords; word++) {
    float total[kInWord];
    Elements<T>::widen(packs[0].words[word], total);
#pragma unroll
    for (int rank = 1; rank < N; rank++) {
      float values[kInWord];
      Elements<T>::widen(packs[rank].words[word], values);
#pragma unroll
      for (int i = 0; i < kInWord; i++) total[i] = Op::combine(total[i], values[i], op);
    }
#pragma unroll
    for (int i = 0; i < kInWord; i++) total[i] = Op::template finish<N>(total[i], op);
    result.words[word] = Elements<T>::narrow(total);
  }
  return result;
}

}  // namespace peersum
