#!/usr/bin/env bash
# The formatting of all packages.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
