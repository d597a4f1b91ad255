#!/usr/bin/env bash
# Installs what the kernels and the bindings are built with, into a folder outside of the repository, and prints the
# variables that lead there:
#
#   eval "$(ci/toolchain.sh)"
#
# PEERSUM_TOOLS names the folder, $HOME/.cache/peersum-tools if unset. What is already there is kept. A toolkit that was
# installed otherwise serves as well: see the variables in README.md.
set -euo pipefail

tools=${PEERSUM_TOOLS:-$HOME/.cache/peersum-tools}
# libclang's version is pinned because bindgen's output, and so the check that the bindings are fresh, may follow it.
packages=(
  'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*'
  'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-cuobjdump==13.*' 'nvidia-cuda-nvdisasm==13.*' 'libclang==18.1.1'
)
# Written last, so that a folder of an interrupted or of another installation is not taken for this one.
stamp=$tools/installed
if [[ ! -f $stamp || $(<"$stamp") != "${packages[*]}" ]]; then
  {
    # Debian keeps venv in a package of its own.
    if ! python3 -c 'import ensurepip' 2>/dev/null && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
      apt-get update -q && apt-get install -qy --no-install-recommends python3 python3-venv
    fi
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
    echo "${packages[*]}" >"$stamp"
  } >&2
fi

site=("$tools"/lib/python3*/site-packages)
printf 'export PEERSUM_NVCC=%q\n' "${site[0]}/nvidia/cu13/bin/nvcc"
printf 'export LIBCLANG_PATH=%q\n' "${site[0]}/clang/native"
