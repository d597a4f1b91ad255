#!/usr/bin/env bash
# The library's documentation, with all features as docs.rs would build it, without warnings. Its examples run with the
# tests. DOCS_RS lets cust's build script do without a CUDA toolkit.
set -euo pipefail
cd "$(dirname "$0")/.."
DOCS_RS=1 RUSTDOCFLAGS='-D warnings' cargo doc --package peersum --all-features --no-deps
