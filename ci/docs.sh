#!/usr/bin/env bash
# Documentation without warnings. Its examples run with the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps
