#!/usr/bin/env bash
# No warnings of rustc and clippy, with the CUDA backend and without.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo clippy --workspace --all-targets -- -D warnings
cargo clippy --package peersum --all-targets --no-default-features -- -D warnings
