// The kernels for bf16.
#include "instantiate.cuh"

PEERSUM_INSTANTIATE(bf16, __nv_bfloat16)
