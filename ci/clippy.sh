#!/usr/bin/env bash
# No warnings of rustc and clippy, with the CUDA backend and without.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo clippy --workspace --all-targets -- -D warnings
# tests/models has a script of its own.
cargo clippy --workspace --exclude models --all-targets --no-default-features -- -D warnings
