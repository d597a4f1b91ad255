#!/usr/bin/env bash
# The checked-in bindings are what kernels/layout.h gives.
set -euo pipefail
cd "$(dirname "$0")/.."
eval "$(ci/toolchain.sh)"
# As `cargo xtask` does, but with what ci/test.sh has built.
cargo build --workspace --bin xtask
CARGO_MANIFEST_DIR=$PWD/xtask "${CARGO_TARGET_DIR:-target}/debug/xtask" bindings --check
