#!/usr/bin/env bash
# Runs every fuzz target for some minutes and stops at the first crash, whose input stays in build/fuzz/crashes.
#
#   scripts/fuzz.sh [MINUTES [TARGET...]]
#
# New inputs are collected in build/fuzz/found/<target>. `scripts/fuzz.sh merge` adds a few of them, enough for all the code
# that they reach, to tests/fuzz/corpus.
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=${1:-5}
shift || true
scripts/install_deps.sh build checks
if [ $# -eq 0 ]; then
  mapfile -t targets < <(cd tests/fuzz && ls ./*_fuzz.cc | sed 's|\./||; s|_fuzz\.cc||')
else
  targets=("$@")
fi
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz -j "$(nproc)" --target "${targets[@]/#/fuzz_}"

mkdir -p build/fuzz/crashes
for target in "${targets[@]}"; do
  found=build/fuzz/found/$target
  mkdir -p "$found"
  if [ "$minutes" = merge ]; then
    build/fuzz/tests/fuzz/"fuzz_$target" -set_cover_merge=1 -use_counters=0 "tests/fuzz/corpus/$target" "$found"
    continue
  fi
  echo "=== $target: $minutes minute(s)"
  build/fuzz/tests/fuzz/"fuzz_$target" -max_total_time=$((minutes * 60)) -timeout=20 -rss_limit_mb=2048 -max_len=4096 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/crashes/$target-" "$found" "tests/fuzz/corpus/$target"
done
