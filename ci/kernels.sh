#!/usr/bin/env bash
# The kernels compile for all architectures without a warning, and their machine code keeps its contract (tests/sass).
set -euo pipefail
cd "$(dirname "$0")/.."
eval "$(ci/toolchain.sh)"
unset PEERSUM_CUDA_ARCHS
export PEERSUM_REQUIRE_NVCC=1 NVCC_APPEND_FLAGS='--Werror all-warnings'
cargo test --workspace --test sass
