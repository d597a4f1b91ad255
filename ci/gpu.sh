#!/usr/bin/env bash
# The whole run on a machine with GPUs, correctness first: the tests, by threads and by processes, compute-sanitizer; then what
# the machine is, its links and hops; the latency of every size, the tuning, and what it chooses beside NCCL.
# Nothing else may use the GPUs meanwhile: ranks wait for each other on them.
# usage: gpu.sh RESULTS [CALLS]       (beside the binaries of ci/gpu-pack.sh; CALLS with new data each, default 1000)
# NCCL is that of the folder nccl beside this script, if there is one, or the system's.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
results=${1:?usage: gpu.sh RESULTS [CALLS]} calls=${2:-1000}
mkdir -p "$results"
export CUDA_DEVICE_MAX_CONNECTIONS=32 PEERSUM_REQUIRE_GPU=1 NCCL_NVLS_ENABLE=0 NCCL_MULTI_RANK_GPU_ENABLE=1
nccl=()
if [[ -d $here/nccl ]]; then
  nccl=(--nccl-library "$here/nccl")
  export PEERSUM_TEST_NCCL=$here/nccl PEERSUM_REQUIRE_NCCL=1
fi
failed=()

job() { # NAME SECONDS COMMAND...: output into a file, its last lines here
  local name=$1 seconds=$2 status=0
  shift 2
  echo "== $name"
  timeout "$seconds" "$@" > "$results/$name.log" 2>&1 || status=$?
  tail -n 2 "$results/$name.log"
  if ((status)); then
    failed+=("$name ($status)")
    grep -E "panicked|FAILED|ERROR" -A3 "$results/$name.log" | head -n 20
  fi
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$results/devices.csv"
devices=$(wc -l < "$results/devices.csv")

PEERSUM_TEST_CALLS=$calls job tests_data 240 "$here/cuda_tests" --test-threads=1 data:: symmetric::every
PEERSUM_TEST_CALLS=100 job tests 240 "$here/cuda_tests" --test-threads=1 edges:: failures:: faults:: graphs:: overlap:: stress:: values:: \
  symmetric::a_ symmetric::memory symmetric::offsets symmetric::the_ symmetric::typed
job tests_nccl 120 "$here/cuda_tests" --test-threads=1 nccl::
if command -v nvidia-cuda-mps-control > /dev/null; then # several processes on a device run at the same time only by MPS
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  nvidia-cuda-mps-control -d && sleep 1
  PEERSUM_TEST_KILLS=40 job tests_processes 120 "$here/cuda_tests" --test-threads=1 processes:: --skip the_tests_of_threads
  PEERSUM_TEST_CALLS=20 job tests_by_processes 150 "$here/cuda_tests" --test-threads=1 --nocapture processes::the_tests_of_threads
  echo quit | timeout 10 nvidia-cuda-mps-control
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
for overlap in late off; do
  PEERSUM_TEST_OVERLAP=$overlap PEERSUM_TEST_CALLS=20 job "tests_overlap_$overlap" 120 "$here/cuda_tests" --test-threads=1 data:: graphs:: stress:: symmetric::
done
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck initcheck synccheck; do
    # The driver's "not found" is no error here: a kernel is looked for in several images.
    PEERSUM_TEST_CALLS=5 job "$tool" 60 compute-sanitizer --error-exitcode 9 --report-api-errors no --tool $tool \
      "$here/cuda_tests" --test-threads=1 values::every values::sums edges::no_elements_is symmetric::typed edges::messages
  done
fi

devices_of() { # RANKS: a device for each, an equal share of the ranks on each device
  local ranks=$1 rank
  for ((rank = 0; rank < ranks; rank++)); do echo $((rank * (devices < ranks ? devices : ranks) / ranks)); done | paste -sd,
}

job topo 20 "$here/peersum" topo --html "$results/topo.html"
timeout 20 "$here/peersum" doctor > "$results/doctor.txt" 2>&1 # whose findings are no failure of this run
timeout 20 "$here/peersum" topo --json > "$results/topo.json"
pair=$(devices_of 2)
job p2p 120 "$here/peersum" p2p --devices "$( ((devices > 1)) && seq -s, 0 $((devices - 1)) || echo 0,0)"
job probe 60 "$here/peersum" probe --devices "$pair" -o "$results/probe.json"

: > "$results/perf.txt"
for ranks in 2 4 8; do
  list=$(devices_of $ranks)
  for size in 8K 16K 32K 64K 128K 256K 512K 1M 4M 16M 64M; do
    case $size in 4M | 16M | 64M) iterations=20 ;; *) iterations=100 ;; esac
    for registered in 0 2; do # tensors anywhere, and in symmetric memory
      timeout 30 "$here/peersum" perf -g $ranks --devices "$list" -d bfloat16 -b $size -e $size -G 10 -n $iterations \
        --table none -R $registered -J "$results/perf_${ranks}_${size}_$registered.json" >> "$results/perf.txt" 2>&1 ||
        failed+=("perf $ranks $size -R $registered")
    done
  done
done
grep -E "nRanks|^ +[0-9]|ERROR|WRONG" "$results/perf.txt" | sed 's/minBytes.*//' | cut -c1-120
for ranks in 2 4 8; do
  list=$(devices_of $ranks)
  job "tune_$ranks" 300 "$here/peersum" tune --devices "$list" --output "$results/table.toml" "${nccl[@]}" \
    --samples "$results/tune_$ranks.csv" --plot "$results/tune_$ranks.svg"
  for registered in 0 2; do
    job "compare_${ranks}_$registered" 120 "$here/peersum" perf --devices "$list" -d bfloat16 -f 2 -n 50 -R $registered \
      --table "$results/table.toml" "${nccl[@]}" --compare nccl --plot "$results/compare_${ranks}_$registered.svg" \
      -J "$results/compare_${ranks}_$registered.json"
  done
done

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "all passed"
