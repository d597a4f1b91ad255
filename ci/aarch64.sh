#!/usr/bin/env bash
# The host backend on 64-bit Arm, under QEMU: the loops by NEON beside those without, and calls of every algorithm. QEMU's
# threads are this machine's, which orders accesses that Arm may not, so of orders this says nothing: loom does
# (ci/models.sh). What is not there is installed where it can be, by apt as root and by rustup; else nothing is tested, which
# is said.
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu

missing=()
command -v aarch64-linux-gnu-gcc >/dev/null || missing+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
if [[ ${#missing[@]} != 0 ]]; then
  if ! { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive &&
    timeout 120 apt-get update -qq &&
    timeout 300 apt-get install -qqy --no-install-recommends -o DPkg::Lock::Timeout=120 "${missing[@]}" >/dev/null; }; then
    echo "nothing was tested: there is no ${missing[*]}, and it can not be installed here"
    exit
  fi
fi
if [[ ! -d $(rustc --print target-libdir --target $target) ]] && ! timeout 300 rustup target add $target; then
  echo "nothing was tested: this Rust has no standard library for $target, and it can not be installed here"
  exit
fi

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64-static -L /usr/aarch64-linux-gnu'
# A warning that only this target has is one that clippy's job does not see.
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS='-D warnings'
tests=(cargo test --package peersum --no-default-features --target $target)
"${tests[@]}" --no-run --lib --test host_results
# Left out is what takes long when every instruction is translated.
"${tests[@]}" --lib -- host:: --skip one_stale_line_in_a_thousand
"${tests[@]}" --test host_results -- every_ sums_
