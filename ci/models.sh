#!/usr/bin/env bash
# The host backend under loom, which tries all interleavings of a small case, and shuttle, which tries many of larger ones.
set -euo pipefail
cd "$(dirname "$0")/.."
for model in loom shuttle; do
  tests=(cargo test --release --package models --lib --no-default-features --features "$model" "${model}_")
  # A filter that matches nothing would pass too.
  listed=$("${tests[@]}" -- --list)
  if [[ $listed != *': test'* ]]; then
    echo "no test is named ${model}_*" >&2
    exit 1
  fi
  "${tests[@]}"
done
