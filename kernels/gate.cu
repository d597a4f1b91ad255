// The gate before a call of NCCL: one round of flags, by one block of a warp. NCCL would wait for ever for a rank that doesn't
// come, or comes with another call; here it is told, or named, by the deadline.
#include "round.cuh"

namespace peersum {

template <int N>
__device__ __forceinline__ void gate(const peersum_call& call) {
  Block<N> block(call);
  block.prepare();
  begin_call(call);
  block.begin();
  block.next_round();
  if (block.pass_gate()) block.finish();
}

}  // namespace peersum

#define PEERSUM_GATE(world)                                                                                \
  extern "C" __global__ void __launch_bounds__(32) peersum_gate_##world(const __grid_constant__ peersum_call call) { \
    peersum::gate<world>(call);                                                                            \
  }

PEERSUM_GATE(2)
PEERSUM_GATE(3)
PEERSUM_GATE(4)
PEERSUM_GATE(5)
PEERSUM_GATE(6)
PEERSUM_GATE(7)
PEERSUM_GATE(8)
