#!/usr/bin/env bash
# For machines with a GPU, where continuous integration does not run: builds the release preset's CUDA tests, runs them,
# runs the small ones under compute-sanitizer, and measures what calls cost. Ends with `gpu_check: passed`, or the names of
# the steps that failed. Logs go to LOGS (build/gpu-logs).
set -uo pipefail
cd "$(dirname "$0")/.."

jobs=${JOBS:-$(nproc)}
build=build/release
logs=${LOGS:-build/gpu-logs}
mkdir -p "$logs"
failures=()

# step NAME COMMAND...: runs it and keeps its log; a failure does not stop the others.
step() {
  local name=$1 begin=$SECONDS
  shift
  echo "=== $name: $*"
  if "$@" >"$logs/$name.log" 2>&1; then
    tail -n 25 "$logs/$name.log"
  else
    tail -n 60 "$logs/$name.log"
    failures+=("$name")
  fi
  echo "--- $name: $((SECONDS - begin)) s"
}

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv || exit 1
nvcc --version | tail -n 2

step configure cmake --preset release -DFOLIO_CUDA=ON -DFOLIO_BUILD_BENCHMARKS=ON
step build cmake --build "$build" -j "$jobs" --target folio_cuda_tests folio_cuda_bench folio_cli
if [ "${#failures[@]}" -ne 0 ]; then echo "gpu_check: failed: ${failures[*]}"; exit 1; fi

step bench "$build/bench/folio_cuda_bench"
step conformance "$build/tests/conformance/conformance_cuda_test" --gtest_filter='*/0'
step tests scripts/run_tests.sh --test-dir "$build" -L cuda -j 8

# sanitize TOOL PROGRAM ARGUMENTS...: something short under one of compute-sanitizer's tools.
sanitize() {
  step "$1-$(basename "$2")" timeout 180 compute-sanitizer --tool "$1" --error-exitcode 9 "${@:2}"
}
for tool in memcheck racecheck; do
  sanitize "$tool" "$build/tests/cuda/cuda_test" --gtest_filter='-*AThousand*:*EagerStepsEqual*:*ADeadDevice*'
  sanitize "$tool" "$build/src/scheduler/cuda/folio_scheduler_cuda_test" --gtest_filter='-*RandomBatches*:*Microseconds*'
done
# Conformance cases are too long for racecheck, which takes minutes for a few.
sanitize memcheck "$build/tools/folio" verify --device cuda --random 12 --seed 5

# A whole trace through every backend: exit code 1 for a row that the oracle calls wrong.
for backend in none flashinfer flash_attn token_pool; do
  step "replay-$backend" "$build/tools/folio" replay examples/traces/mooncake_excerpt.jsonl --device cuda --quiet --json - \
    --backend "$backend"
done

if [ "${#failures[@]}" -ne 0 ]; then echo "gpu_check: failed: ${failures[*]}"; exit 1; fi
echo "gpu_check: passed"
