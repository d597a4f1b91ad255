#!/usr/bin/env bash
# Gathers what ci/gpu.sh needs into one folder that can be taken to a machine with GPUs and no Rust.
# usage: ci/gpu-pack.sh FOLDER        (needs nvcc, see ci/toolchain.sh; PEERSUM_CUDA_ARCHS=90 makes it quick and small)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: ci/gpu-pack.sh FOLDER}
export PEERSUM_REQUIRE_NVCC=1
mkdir -p "$folder"
cargo build --release --package peersum-cli
target=${CARGO_TARGET_DIR:-target}
cp "$target/release/peersum" "$folder/peersum"
executable() { "$@" 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p'; }
cp "$(executable cargo test --release --package peersum --test cuda --no-run)" "$folder/cuda_tests"
cp "$(executable cargo bench --package peersum --bench all_reduce --no-run)" "$folder/bench"
strip "$folder"/{peersum,cuda_tests,bench}
cp ci/gpu.sh "$folder/gpu.sh"
du -sh "$folder"
