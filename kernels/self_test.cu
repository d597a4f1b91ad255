// What the calls of a group's self-test carry, and a look at what came: src/self_test.rs says what it is for, and has the
// same function for the host.
#include "memory.cuh"

namespace peersum {

static_assert(PEERSUM_MAX_RANKS <= 8, "a digit for each rank, and no more than fit an f32's significand");

// Eight octal digits that depend on both.
__device__ __forceinline__ uint32_t digits(uint32_t call, uint64_t element) {
  uint32_t bits = static_cast<uint32_t>(element) * 0x9e3779b1u ^ (1u + call) * 0x85ebca6bu;
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  return (bits ^ (bits >> 16)) >> 8;
}

}  // namespace peersum

// A rank contributes its digit.
extern "C" __global__ void peersum_trial_fill(float* tensor, uint64_t count, uint32_t call, uint32_t rank) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    tensor[i] = static_cast<float>(peersum::digits(call, i) & (7u << (3 * rank)));
  }
}

// The sum has those of all ranks. What has not is counted.
extern "C" __global__ void peersum_trial_check(const float* tensor, uint64_t count, uint32_t call, uint32_t world,
                                               uint32_t* wrong) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  const uint32_t mask = (1u << (3 * world)) - 1;
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    if (tensor[i] != static_cast<float>(peersum::digits(call, i) & mask)) atomicAdd(wrong, 1u);
  }
}
