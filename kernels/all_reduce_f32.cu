// The kernels for f32.
#include "instantiate.cuh"

PEERSUM_INSTANTIATE(f32, float)
