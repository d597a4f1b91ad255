// The kernels for f16.
#include "instantiate.cuh"

PEERSUM_INSTANTIATE(f16, __half)
