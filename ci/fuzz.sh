#!/usr/bin/env bash
# The parsers that read bytes from outside, under libFuzzer, so many seconds each. With the flags of cargo-fuzz, which
# it needs not, and without a sanitizer, which would need a nightly Rust: the parsers have no unsafe code.
# usage: ci/fuzz.sh [SECONDS] [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
host=$(rustc -vV | sed -n 's/^host: //p')
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-../target}/fuzz
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
  -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions"
cargo build --release --target "$host"
seconds=${1:-60}
[ $# -lt 2 ] && set -- "$seconds" messages topologies results machines reports kept
for parsers in "${@:2}"; do
  # What is found goes to the first folder, so not to the seeds.
  found=$(mktemp -d)
  seeds=$(find "seeds/$parsers" -maxdepth 0 2>/dev/null || true)
  "$CARGO_TARGET_DIR/$host/release/$parsers" "$found" ${seeds:+"$seeds"} \
    -max_total_time="$seconds" -max_len=6000 -rss_limit_mb=512 -malloc_limit_mb=16
  rm -r "$found"
done
