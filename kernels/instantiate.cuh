// The kernels of one element type: peersum_<algorithm>_<type>_<reduction>_<world>.
#pragma once

#include "one_shot.cuh"
#include "two_shot.cuh"

#define PEERSUM_KERNEL(algorithm, body, pull, name, Type, reduction, Op, world)                                \
  extern "C" __global__ void __launch_bounds__(PEERSUM_MAX_THREADS, 1)                                         \
      peersum_##algorithm##_##name##_##reduction##_##world(const __grid_constant__ peersum_call call) {        \
    peersum::body<Type, peersum::Op, world, pull>(call);                                                       \
  }

#define PEERSUM_ALGORITHMS(name, Type, reduction, Op, world)                              \
  PEERSUM_KERNEL(one_shot, one_shot, false, name, Type, reduction, Op, world)             \
  PEERSUM_KERNEL(two_shot, two_shot, false, name, Type, reduction, Op, world)             \
  PEERSUM_KERNEL(one_shot_pull, one_shot, true, name, Type, reduction, Op, world)         \
  PEERSUM_KERNEL(two_shot_pull, two_shot, true, name, Type, reduction, Op, world)

#define PEERSUM_REDUCTIONS(name, Type, world)               \
  PEERSUM_ALGORITHMS(name, Type, sum, Sum, world)           \
  PEERSUM_ALGORITHMS(name, Type, extreme, Extreme, world)

#define PEERSUM_INSTANTIATE(name, Type) \
  PEERSUM_REDUCTIONS(name, Type, 2)     \
  PEERSUM_REDUCTIONS(name, Type, 3)     \
  PEERSUM_REDUCTIONS(name, Type, 4)     \
  PEERSUM_REDUCTIONS(name, Type, 5)     \
  PEERSUM_REDUCTIONS(name, Type, 6)     \
  PEERSUM_REDUCTIONS(name, Type, 7)     \
  PEERSUM_REDUCTIONS(name, Type, 8)
