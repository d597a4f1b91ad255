#!/usr/bin/env bash
# The checked-in bindings are what kernels/layout.h gives.
set -euo pipefail
cd "$(dirname "$0")/.."
eval "$(ci/toolchain.sh)"
cargo xtask bindings --check
