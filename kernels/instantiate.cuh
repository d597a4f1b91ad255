// The kernels of one element type: peersum_<algorithm>_<type>_<reduction>_<world>.
#pragma once

#include "direct.cuh"
#include "one_shot.cuh"
#include "one_shot_ll.cuh"
#include "two_shot.cuh"
#include "two_shot_ll.cuh"

#define PEERSUM_KERNEL(algorithm, name, reduction, world, ...)                                              \
  extern "C" __global__ void __launch_bounds__(PEERSUM_MAX_THREADS, 1)                                      \
      peersum_##algorithm##_##name##_##reduction##_##world(const __grid_constant__ peersum_call call) {     \
    peersum::__VA_ARGS__(call);                                                                             \
  }

#define PEERSUM_ALGORITHMS(name, Type, reduction, Op, world)                                                \
  PEERSUM_KERNEL(one_shot, name, reduction, world, one_shot<Type, peersum::Op, world, false>)               \
  PEERSUM_KERNEL(two_shot, name, reduction, world, two_shot<Type, peersum::Op, world, false>)               \
  PEERSUM_KERNEL(one_shot_pull, name, reduction, world, one_shot<Type, peersum::Op, world, true>)           \
  PEERSUM_KERNEL(two_shot_pull, name, reduction, world, two_shot<Type, peersum::Op, world, true>)           \
  PEERSUM_KERNEL(one_shot_ll, name, reduction, world, one_shot_ll<Type, peersum::Op, world>)                \
  PEERSUM_KERNEL(two_shot_ll, name, reduction, world, two_shot_ll<Type, peersum::Op, world>)                \
  PEERSUM_KERNEL(one_shot_direct, name, reduction, world, direct<Type, peersum::Op, world, false>)           \
  PEERSUM_KERNEL(two_shot_direct, name, reduction, world, direct<Type, peersum::Op, world, true>)

#define PEERSUM_REDUCTIONS(name, Type, world)                                                               \
  PEERSUM_ALGORITHMS(name, Type, sum, Sum, world)                                                           \
  PEERSUM_ALGORITHMS(name, Type, extreme, Extreme, world)

#define PEERSUM_INSTANTIATE(name, Type)                                                                     \
  PEERSUM_REDUCTIONS(name, Type, 2)                                                                         \
  PEERSUM_REDUCTIONS(name, Type, 3)                                                                         \
  PEERSUM_REDUCTIONS(name, Type, 4)                                                                         \
  PEERSUM_REDUCTIONS(name, Type, 5)                                                                         \
  PEERSUM_REDUCTIONS(name, Type, 6)                                                                         \
  PEERSUM_REDUCTIONS(name, Type, 7)                                                                         \
  PEERSUM_REDUCTIONS(name, Type, 8)
