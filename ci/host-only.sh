#!/usr/bin/env bash
# The library and all its tests build without the CUDA backend. The long tests of the host backend, which is the same with
# it and without, run in ci/test.sh alone.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --package peersum --no-default-features --no-run
cargo test --package peersum --no-default-features --lib --test host_failures --test host_faults --test host_results
cargo test --package peersum --no-default-features --doc
