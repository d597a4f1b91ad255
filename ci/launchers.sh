#!/usr/bin/env bash
# Ranks that real launchers start: right sums, exit codes, jobs beside each other, and the command's own measurement. What
# is not there is installed where it can be, by apt as root and by pip into the folder of ci/toolchain.sh, and else left out,
# which is said.
# usage: ci/launchers.sh [openmpi|mpich|impi|slurm|torchrun]...
# By default all but torchrun, whose PyTorch is large, and slow to start.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${PEERSUM_TOOLS:-$HOME/.cache/peersum-tools}/launchers
work=$(mktemp -d)
ran=() left_out=()

cargo test --workspace --no-run # which ci/test.sh has built
target=${CARGO_TARGET_DIR:-target}
peersum=$PWD/$target/debug/peersum ranks=$PWD/$target/debug/examples/ranks
[[ $target == /* ]] && peersum=$target/debug/peersum ranks=$target/debug/examples/ranks

updated=
# Debian's packages, where they can be had.
by_apt() {
  [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || return 1
  export DEBIAN_FRONTEND=noninteractive
  [[ $updated ]] || timeout 120 apt-get update -qq || return 1
  updated=yes
  timeout 300 apt-get install -qqy --no-install-recommends -o DPkg::Lock::Timeout=120 "$@" >/dev/null
}

# PyPI's, in a folder of its own: the launchers have names in common.
by_pip() {
  [[ -f $tools/$1/installed ]] && return
  rm -rf "${tools:?}/$1"
  python3 -m venv "$tools/$1" && timeout 300 "$tools/$1/bin/pip" install -q --disable-pip-version-check "$2" &&
    touch "$tools/$1/installed"
}

# run_NAME RANKS PROGRAM...: runs the program by that launcher, not for ever.
have_openmpi() { command -v mpirun.openmpi >/dev/null || by_apt openmpi-bin; }
run_openmpi() {
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    timeout 60 mpirun.openmpi --oversubscribe -np "$@"
}
version_openmpi() { mpirun.openmpi --version | sed -n '1s/.*) /Open MPI /p'; }

have_mpich() { by_pip mpich mpich==5.0.2; }
run_mpich() { timeout 60 "$tools/mpich/bin/mpiexec" -n "$@"; }
version_mpich() { "$tools/mpich/bin/mpichversion" | sed -n 's/^MPICH Version: */MPICH /p'; }

have_impi() { by_pip impi impi-rt==2021.18.1; }
run_impi() { PATH=$tools/impi/bin:$PATH timeout 60 mpiexec.hydra -n "$@"; }
version_impi() { PATH=$tools/impi/bin:$PATH mpiexec.hydra --version | head -1; }

# One node of a cluster of its own, at ports of its own.
slurm_started=
have_slurm() {
  command -v srun slurmctld slurmd munged >/dev/null || by_apt slurm-wlm munge || return 1
  [[ $(id -u) == 0 ]] || return 1
  local host ports
  host=$(hostname -s)
  ports=($(python3 -c 'import socket
sockets = [socket.socket() for _ in range(2)]
[s.bind(("127.0.0.1", 0)) for s in sockets]
print(*[s.getsockname()[1] for s in sockets])'))
  chmod 755 "$work" && mkdir -p "$work"/slurm/{spool,state}
  (umask 077 && head -c 1024 /dev/urandom >"$work/key")
  slurm_started=yes
  munged --force --key-file "$work/key" --socket "$work/munge" --pid-file "$work/munged.pid" \
    --log-file "$work/munged.log" --seed-file "$work/seed"
  export SLURM_CONF=$work/slurm/slurm.conf
  cat >"$SLURM_CONF" <<CONF
ClusterName=peersum
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge
StateSaveLocation=$work/slurm/state
SlurmdSpoolDir=$work/slurm/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
CONF
  slurmctld -f "$SLURM_CONF" && slurmd -f "$SLURM_CONF"
  for _ in $(seq 50); do
    [[ $(sinfo --noheader --format=%T 2>/dev/null) == idle ]] && return
    sleep 0.2
  done
  return 1
}
run_slurm() { timeout 60 srun --quiet --overcommit --oversubscribe -n "$@"; }
version_slurm() { srun --version; }

have_torchrun() {
  local python
  for python in python3 /usr/bin/python3; do
    "$python" -c 'import torch.distributed.run' 2>/dev/null && torch=$python && return
  done
  by_apt python3-torch && torch=/usr/bin/python3
}
# Debian's, of Python 3.11, can't do without redirections.
run_torchrun() {
  timeout 60 "$torch" -m torch.distributed.run --no_python -r 1 -t 1 --master_port $((20000 + RANDOM % 10000)) --nproc_per_node "$@"
}
version_torchrun() { "$torch" -c 'import torch; print("torchrun of PyTorch", torch.__version__)'; }

# Only of processes that this script started.
finish() {
  if [[ $slurm_started ]]; then
    for daemon in slurmd slurmctld munged; do
      [[ -f $work/$daemon.pid ]] && kill "$(<"$work/$daemon.pid")" 2>/dev/null
    done
    sleep 1
  fi
  rm -rf "$work"
}
trap finish EXIT

fail() {
  echo "$1: $2" >&2
  cat "$work/out" >&2
  exit 1
}

# Every rank prints the right sum, and the job ends in peace.
sums() { # LAUNCHER RANKS OUTPUT PROGRAM...
  local launcher=$1 count=$2 out=$3 rank
  shift 3
  "run_$launcher" "$count" "$@" >"$out" 2>&1 || return
  for ((rank = 0; rank < count; rank++)); do
    grep -q "rank $rank of $count: the sum is $((count * (count - 1) / 2))\$" "$out" || return
  done
}

check() {
  local launcher=$1 out=$work/out jobs=() job
  for count in 2 4; do
    sums "$launcher" $count "$out" "$ranks" || fail "$launcher" "$count ranks don't come to their sum"
  done
  # Through scripts ranks have no parent in common; MPICH then needs the secret.
  PEERSUM_SECRET=$RANDOM$RANDOM sums "$launcher" 2 "$out" sh -c '"$0"; exit $?' "$ranks" || fail "$launcher" "wrapped ranks fail"
  # Jobs at once. Slurm's share the node's cores.
  for job in 1 2; do
    sums "$launcher" $((job + 1)) "$work/job$job" "$ranks" &
    jobs+=($!)
  done
  for job in 1 2; do
    wait "${jobs[job - 1]}" || { cat "$work/job$job" >"$out"; fail "$launcher" "two jobs at once: the one of $((job + 1)) ranks"; }
  done
  "run_$launcher" 4 "$peersum" perf --backend host -b 1K -e 16K -n 3 --compare all >"$out" 2>&1 || fail "$launcher" "perf fails"
  [[ $(grep -c 'nRanks 4 ' "$out") == 1 ]] && grep -q 'processes, one for each rank' "$out" &&
    grep -q 'Out of bounds values : 0 OK' "$out" || fail "$launcher" "perf does not print one table of 4 processes"
  if "run_$launcher" 2 "$peersum" perf --backend host -e 1K -n 2 --inject-fault 1:1024 >"$out" 2>&1; then
    fail "$launcher" "a wrong element is no failure"
  fi
  grep -q 'Out of bounds values : 1 FAILED' "$out" || fail "$launcher" "the wrong element is not told"
}

launchers=("$@")
[[ $# == 0 ]] && launchers=(openmpi mpich impi slurm)
for launcher in "${launchers[@]}"; do
  started=$SECONDS
  if "have_$launcher" >"$work/out" 2>&1; then
    check "$launcher"
    ran+=("$("version_$launcher") ($((SECONDS - started)) s)")
  else
    left_out+=("$launcher")
    cat "$work/out"
  fi
done
printf 'ran: %s\n' "${ran[@]}"
[[ ${#left_out[@]} == 0 ]] || printf 'left out, since it can not be had here: %s\n' "${left_out[@]}"
[[ ${#ran[@]} != 0 ]] || { echo 'no launcher could be had: nothing was tested'; [[ $# == 0 ]]; }
