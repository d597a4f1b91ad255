#!/usr/bin/env bash
# All tests, as the README says.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --workspace
