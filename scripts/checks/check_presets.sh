#!/usr/bin/env bash
# Builds the presets that continuous integration builds in no other stage, and runs something of each.
#
#   scripts/checks/check_presets.sh [--today | PRESET...]     (all of them without arguments; --today: one, by date)
set -euo pipefail
cd "$(dirname "$0")/../.."

all_presets=(dev cpu-only bench aarch64 fuzz asan-ubsan emulated-gpu)
presets=("${all_presets[@]}")
case "${1:-}" in
  --today) presets=("${presets[$(($(date +%s) / 86400 % ${#presets[@]}))]}") ;;
  ?*) presets=("$@") ;;
esac

# configure PRESET [OPTION...]: with a compiler cache where there is one; release's objects serve cpu-only and bench.
configure() {
  local launcher=()
  if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DFOLIO_CACHE_TESTS=OFF); fi
  cmake --preset "$1" "${launcher[@]}" "${@:2}" >/dev/null
}

# build PRESET [TARGET...]
build() {
  local preset=$1
  shift
  cmake --build --preset "$preset" -j "$(nproc)" ${1:+--target "$@"}
}

# The libraries, the command-line tool and two test programs: one of the smallest layer and one of the outermost.
libraries_and_two_tests() {
  build "$1" folio_cli folio_core_test folio_capi_test
  build/"$1"/src/core/folio_core_test --gtest_brief=1
  build/"$1"/tests/capi/folio_capi_test --gtest_brief=1
  build/"$1"/tools/folio info >/dev/null
}

for preset in "${presets[@]}"; do
  echo "=== preset $preset"
  case "$preset" in
    bench)
      scripts/install_deps.sh bench
      configure bench -DFOLIO_CUDA=OFF
      build bench
      build/bench/bench/folio_scheduler_bench --benchmark_min_time=0.001 >/dev/null
      ;;
    aarch64)
      scripts/install_deps.sh aarch64
      configure aarch64
      # What depends on the instruction set: conversions, threads, kernels, and the library as a whole.
      tests=(folio_core_test folio_platform_test folio_kernels_generic_cache_test folio_kernels_generic_combine_test
        folio_kernels_inventory_test folio_capi_test conformance_quick_test)
      build aarch64 "${tests[@]}"
      # Without forks of a process with threads: QEMU has locks of its own, and a child in which one is held hangs.
      GTEST_FILTER='-*Fork*' scripts/run_tests.sh --preset aarch64 -j "$(nproc)" -R "^($(IFS='|' && echo "${tests[*]}"))([.][0-9]+)?$"
      ;;
    emulated-gpu)
      if [ ! -e "${CUDA_HOME:-/usr/local/cuda}/include/cuda_runtime.h" ] && ! command -v nvcc >/dev/null; then
        echo "there is no CUDA toolkit, whose headers the emulated GPU needs: left out"
        continue
      fi
      configure emulated-gpu
      build emulated-gpu cuda_functions_test cuda_test
      if ninja -C build/emulated-gpu -t query folio_nccl_test >/dev/null 2>&1; then
        build emulated-gpu folio_nccl_test
      fi
      export FOLIO_EMULATED_GPUS=2
      built='^(cuda_test|cuda_functions_test|folio_nccl_test)([.][0-9]+)?$'
      GTEST_FILTER='CudaTest*:TokenPool*:Types*:NcclGroup*:Worlds/NcclGroup*' \
        scripts/run_tests.sh --preset emulated-gpu -j "$(nproc)" -R "$built"
      FOLIO_EMULATED_CAPABILITY=90 GTEST_FILTER='*AFewReplays*' scripts/run_tests.sh --preset emulated-gpu -R '^cuda_test'
      ;;
    fuzz)
      configure fuzz
      # A quarter of the targets, by date; the coverage build runs all of them, without clang's guidance.
      mapfile -t targets < <(ls tests/fuzz/corpus | awk -v day="$(($(date +%s) / 86400 / ${#all_presets[@]}))" 'NR % 4 == day % 4 {print "fuzz_" $0}')
      build fuzz "${targets[@]}"
      for target in build/fuzz/tests/fuzz/fuzz_*; do
        if [ -f "$target" ] && [ -x "$target" ]; then "$target" -runs=0 "tests/fuzz/corpus/${target##*/fuzz_}" 2>/dev/null; fi
      done
      ;;
    *)
      configure "$preset" -DFOLIO_CUDA=OFF
      libraries_and_two_tests "$preset"
      ;;
  esac
done
echo "presets built: ${presets[*]}"
