#!/usr/bin/env bash
# Gathers what ci/gpu.sh needs into one folder that can be taken to a machine with GPUs and no Rust.
# usage: ci/gpu-pack.sh FOLDER        (needs nvcc, see ci/toolchain.sh; PEERSUM_CUDA_ARCHS=90 makes it quick and small)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: ci/gpu-pack.sh FOLDER}
export PEERSUM_REQUIRE_NVCC=1
mkdir -p "$folder"
# In one call, so that the kernels are compiled once.
messages=$(cargo build --release --message-format json-render-diagnostics --package peersum --package peersum-cli \
  --bin peersum --test cuda --test links --bench all_reduce)
executable() { sed -n "s/.*\"name\":\"$1\".*\"executable\":\"\([^\"]*\)\".*/\1/p" <<< "$messages" | tail -n 1; }
cp "$(executable peersum)" "$folder/peersum"
cp "$(executable cuda)" "$folder/cuda_tests"
cp "$(executable links)" "$folder/links_tests"
cp "$(executable all_reduce)" "$folder/bench"
strip "$folder"/{peersum,cuda_tests,links_tests,bench}
cp ci/gpu.sh "$folder/gpu.sh"
du -sh "$folder"
