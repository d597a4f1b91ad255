#!/usr/bin/env bash
# The real NCCL, which needs no GPU to be loaded, to tell its version, and to decline: the oldest that is served, the first with
# windows, and the newest that was tried. From PyPI, into the folder of ci/toolchain.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${PEERSUM_TOOLS:-$HOME/.cache/peersum-tools}
ci/toolchain.sh > /dev/null # for its pip
# What ci/test.sh has built: with fewer targets selected, more would be compiled again.
tests=$(cargo test --workspace --no-run --message-format json-render-diagnostics |
  sed -n 's/.*"kind":\["lib"\].*"name":"peersum".*"executable":"\([^"]*\)".*/\1/p')
for package in nvidia-nccl-cu12==2.18.3 nvidia-nccl-cu12==2.27.3 nvidia-nccl-cu13==2.32.3; do
  folder=$tools/$package
  # Moved there when it is whole.
  if [[ ! -d $folder ]]; then
    rm -rf "$folder.partial"
    "$tools/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$folder.partial" \
      --platform manylinux1_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_27_x86_64 "$package"
    "$tools/bin/python" -m zipfile -e "$folder.partial"/*.whl "$folder.partial"
    rm "$folder.partial"/*.whl
    mv "$folder.partial" "$folder"
  fi
  PEERSUM_TEST_NCCL=$folder/nvidia/nccl/lib "$tests" --nocapture the_real_library
done
