#!/usr/bin/env bash
# The library builds and passes its tests without the CUDA backend.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --package peersum --no-default-features
