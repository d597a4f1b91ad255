#!/usr/bin/env bash
# The host backend under loom, which tries all interleavings of a small case, and shuttle, which tries many of larger ones.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
for model in loom shuttle; do
  # A target folder for each: cargo would build everything anew for every change of the flags.
  export RUSTFLAGS="--cfg $model" CARGO_TARGET_DIR="$target/$model"
  tests=(cargo test --release --package peersum --lib --no-default-features "${model}_")
  # A filter that matches nothing would pass too.
  listed=$("${tests[@]}" -- --list)
  if [[ $listed != *': test'* ]]; then
    echo "no test is named ${model}_*" >&2
    exit 1
  fi
  "${tests[@]}"
done
