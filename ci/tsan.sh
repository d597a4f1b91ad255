#!/usr/bin/env bash
# The host backend under ThreadSanitizer, with threads as ranks; and copies of the library whose flags order nothing, which it
# must report. Rust's own library is not instrumented: what it reports of the last reference to a thread's innards is left
# out (ci/tsan.suppressions). Packets are atomics all through, so of them it says nothing: loom does (ci/models.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
if [[ ! -f $(rustc --print sysroot)/lib/rustlib/$host/lib/librustc-stable_rt.tsan.a ]]; then
  echo "this Rust has no ThreadSanitizer: nothing was tested"
  exit
fi
target=${CARGO_TARGET_DIR:-$PWD/target}/tsan
# The sanitizers are no stable option yet; nothing that ships is built so.
export RUSTC_BOOTSTRAP=1 CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=$target
export RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer"
export TSAN_OPTIONS="suppressions=$PWD/ci/tsan.suppressions exitcode=66"

# In the folder of a workspace: the exit code of the run, 66 if a race was reported.
races() {
  (cd "$1" && cargo build --quiet --profile test --target "$host" --package races)
  local code=0
  timeout 300 "$target/$host/debug/races" >"$target/races.out" 2>&1 || code=$?
  return $code
}

code=0
races . || code=$?
if [[ $code != 0 ]]; then
  cat "$target/races.out"
  echo "exit code $code"
  exit 1
fi
tail -1 "$target/races.out"

for order in Release Acquire; do
  mutant=$(mktemp -d)
  git ls-files -z | xargs -0 cp --parents -t "$mutant"
  # All but the fences, which have no relaxed form.
  sed -i "/fence(/!s/Ordering::$order\b/Ordering::Relaxed/" "$mutant"/src/host/*.rs
  code=0
  races "$mutant" || code=$?
  rm -rf "$mutant"
  if [[ $code != 66 ]] || ! grep -q 'peersum::host' "$target/races.out"; then
    tail -50 "$target/races.out"
    echo "with no $order it should have reported a race, and ended with $code"
    exit 1
  fi
  echo "with no $order: $(grep -c 'WARNING: ThreadSanitizer: data race' "$target/races.out") races are reported"
done
