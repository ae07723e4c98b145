#!/usr/bin/env bash
# Compiles CUDA sources as they are published, with every optimisation: nvcc accepts them, and ptxas serializes no wgmma. (`make test`
# compiles them quickly where there is no GPU.) Nothing without a CUDA compiler.
#
#   scripts/checks/check_cuda.sh [--tenth]      (--tenth: every tenth source, by date: ten days take all)
set -euo pipefail
cd "$(dirname "$0")/../.."

if ! command -v "${CUDACXX:-nvcc}" >/dev/null; then
  echo "there is no CUDA compiler here: left out"
  exit 0
fi
step=1
if [ "${1:-}" = --tenth ]; then step=10; fi
export CUDAARCHS=${CUDAARCHS:-80}  # Hopper's kernels name theirs
cmake --preset release -B build/cuda-kernels -DFOLIO_CUDA=ON -DFOLIO_CUDA_QUICK=OFF -DFOLIO_BUILD_TESTS=OFF -DFOLIO_BUILD_TOOLS=OFF \
  -DFOLIO_BUILD_EXAMPLES=OFF -DFOLIO_BUILD_PYTHON=OFF -DFOLIO_MPI=OFF >/dev/null
mapfile -t objects < <(ninja -C build/cuda-kernels -t targets all | sed -nE 's/^([^:]*\.cu\.o): .*/\1/p' | sort |
  awk -v step="$step" -v day="$(($(date +%s) / 86400))" 'NR % step == day % step')
ninja -C build/cuda-kernels -j "$(nproc)" "${objects[@]}"
echo "${#objects[@]} CUDA source(s) compiled"
