#!/usr/bin/env bash
# The whole run on a machine with GPUs, some eight minutes for two numbers of ranks, correctness first: the tests, by threads
# and by processes, and compute-sanitizer; then what the machine is, its links and hops; the tuning, and what it chooses
# beside NCCL and all other algorithms, in graphs and eager; the benches. Everything lands in one folder: logs, JSON, CSV
# and SVG.
# Nothing else may use the GPUs meanwhile: ranks wait for each other on them.
# usage: gpu.sh RESULTS [CALLS]       (beside the binaries of ci/gpu-pack.sh; CALLS with new data each, default 50)
# NCCL is that of the folder nccl beside this script, if there is one, or the system's. WORLDS are the numbers of ranks that
# are measured: by default those that have a device each, or 2, 4 and 8 on one device. SKIP names jobs to leave out.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
results=${1:?usage: gpu.sh RESULTS [CALLS]} calls=${2:-50}
mkdir -p "$results"
# A switch that sums is not touched: neither here nor by what is compared.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export CUDA_DEVICE_MAX_CONNECTIONS=32 PEERSUM_REQUIRE_GPU=1 NCCL_MULTI_RANK_GPU_ENABLE=1
nccl=()
if [[ -d $here/nccl ]]; then
  nccl=(--nccl-library "$here/nccl")
  export PEERSUM_TEST_NCCL=$here/nccl PEERSUM_REQUIRE_NCCL=1
fi
failed=()

job() { # NAME SECONDS COMMAND...: output into a file, its last lines here
  local name=$1 seconds=$2 status=0 began=$SECONDS
  shift 2
  [[ " ${SKIP:-} " != *" $name "* ]] || return 0
  timeout "$seconds" "$@" > "$results/$name.log" 2>&1 || status=$?
  echo "== $name: $((SECONDS - began)) s, $( ((status)) && echo "FAILED ($status)" || echo passed)"
  grep -E "^test result" "$results/$name.log" | tail -n 1
  if ((status)); then
    failed+=("$name ($status)")
    grep -E "panicked|FAILED|ERROR" -A3 "$results/$name.log" | head -n 20
  fi
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$results/devices.csv"
devices=$(wc -l < "$results/devices.csv")
case $devices in
  1) worlds=${WORLDS:-2 4 8} ;;
  2) worlds=${WORLDS:-2} ;;
  3 | 4) worlds=${WORLDS:-$(seq -s' ' 3 "$devices")} ;;
  *) worlds=${WORLDS:-$(seq -s' ' 5 "$devices")} ;;
esac
devices_of() { # RANKS: a device for each, an equal share of the ranks on each device
  local ranks=$1 rank
  for ((rank = 0; rank < ranks; rank++)); do echo $((rank * (devices < ranks ? devices : ranks) / ranks)); done | paste -sd,
}

tests=("$here/cuda_tests" --test-threads=1)
PEERSUM_TEST_CALLS=$calls job tests_data 120 "${tests[@]}" data:: symmetric::every packets::
PEERSUM_TEST_CALLS=30 job tests 150 "${tests[@]}" edges:: failures:: faults:: graphs:: kinds:: overlap:: stress:: values:: \
  symmetric::a_ symmetric::memory symmetric::offsets symmetric::the_ symmetric::typed
PEERSUM_TEST_CALLS=30 job tests_nccl 60 "${tests[@]}" nccl::
if ((devices > 1)); then # a process for each device
  PEERSUM_TEST_PARTS=$devices PEERSUM_TEST_CALLS=20 job tests_by_processes 120 "${tests[@]}" --nocapture processes::the_tests_of_threads
fi
if command -v nvidia-cuda-mps-control > /dev/null; then # several processes on a device run at the same time only by MPS
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  nvidia-cuda-mps-control -d && sleep 1
  job tests_processes 90 "${tests[@]}" processes:: --skip the_tests_of_threads --skip processes_are_killed
  ((devices > 1)) || PEERSUM_TEST_CALLS=20 job tests_by_processes 120 "${tests[@]}" --nocapture processes::the_tests_of_threads
  echo quit | timeout 10 nvidia-cuda-mps-control
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
# What a killed process leaves to the others of its device under MPS is undefined (NVIDIA's manual), so not there.
PEERSUM_TEST_KILLS=${KILLS:-12} job tests_kills $((20 + 6 * ${KILLS:-12})) "${tests[@]}" --nocapture processes::processes_are_killed
for overlap in late off; do
  PEERSUM_TEST_OVERLAP=$overlap PEERSUM_TEST_CALLS=10 job "tests_overlap_$overlap" 60 "${tests[@]}" data:: stress::sizes
done
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck initcheck synccheck; do
    # The driver's "not found" is no error here: a kernel is looked for in several images.
    PEERSUM_TEST_CALLS=5 job "$tool" 60 compute-sanitizer --error-exitcode 9 --report-api-errors no --tool $tool \
      "${tests[@]}" values::every values::sums edges::no_elements_is symmetric::typed edges::messages
  done
fi

peersum=$here/peersum
PEERSUM_COMMAND=$peersum job tests_links 120 "$here/links_tests"
job topo 20 "$peersum" topo --html "$results/topo.html"
timeout 20 "$peersum" topo --json > "$results/topo.json"
timeout 20 "$peersum" doctor > "$results/doctor.txt" 2>&1 # whose findings are no failure of this run
all=$( ((devices > 1)) && seq -s, 0 $((devices - 1)) || echo 0,0)
job p2p 60 "$peersum" p2p --devices "$all" --html "$results/p2p.html"
job probe 60 "$peersum" probe --devices "$all" -o "$results/probe.json"
job paths 240 "$peersum" paths --devices "$all" -f 4 "${nccl[@]}" --html "$results/paths.html"

for ranks in $worlds; do
  list=$(devices_of "$ranks")
  job "tune_$ranks" 100 "$peersum" tune --devices "$list" --output "$results/table.toml" "${nccl[@]}" \
    --samples "$results/tune_$ranks.csv" --plot "$results/tune_$ranks.svg"
  for registered in 0 2; do # tensors anywhere, and in symmetric memory
    perf=("$peersum" perf --devices "$list" -d bfloat16 -f 2 -R $registered --table "$results/table.toml" "${nccl[@]}")
    name=${ranks}_$registered
    job "short_$name" 60 "${perf[@]}" -b 1K -e 4M -n 50 --compare all --limits "$results/probe.json" \
      -J "$results/short_$name.json" --plot "$results/short_$name.svg"
    job "long_$name" 60 "${perf[@]}" -b 8M -e 512M -n 10 -G 3 --compare all -J "$results/long_$name.json" --plot "$results/long_$name.svg"
    job "eager_$name" 60 "${perf[@]}" -b 1K -e 4M -n 200 --timing queued --compare nccl -J "$results/eager_$name.json"
    job "eager_long_$name" 60 "${perf[@]}" -b 8M -e 512M -n 10 --timing queued --compare nccl -J "$results/eager_long_$name.json"
  done
  # The benches take what perf does, by criterion: once is enough.
  if [[ -x $here/bench && $ranks == "${worlds##* }" ]]; then
    PEERSUM_TABLE=$results/table.toml PEERSUM_BENCH_DEVICES=$list CRITERION_HOME=$results/criterion_$ranks \
      LD_LIBRARY_PATH=$here/nccl job "bench_$ranks" 60 "$here/bench" --bench --noplot
  fi
done

du -sh "$results" | cut -f1
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "all passed in $SECONDS s"
