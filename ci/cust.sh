#!/usr/bin/env bash
# The adapters for cust compile. DOCS_RS lets cust's own build script do without a CUDA toolkit.
set -euo pipefail
cd "$(dirname "$0")/.."
DOCS_RS=1 cargo clippy --package peersum --features cust -- -D warnings
