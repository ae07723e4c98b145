#!/usr/bin/env bash
# clang-tidy over the library's sources, with the checks of .clang-tidy.
#
#   run_clang_tidy.sh [--all] BUILD_DIR
#
# Without --all: the sources that the last commits touched (newest first, at most TIDY_LIMIT = 6), so that continuous
# integration stays quick. Tests are left out: GoogleTest's macros confuse it. BUILD_DIR needs a compile_commands.json.
set -euo pipefail
cd "$(dirname "$0")/../.."

all=false
if [ "${1:-}" = --all ]; then all=true; shift; fi
build=${1:?usage: run_clang_tidy.sh [--all] BUILD_DIR}
if [ ! -f "$build/compile_commands.json" ]; then
  echo "clang-tidy: $build/compile_commands.json is missing: configure first" >&2
  exit 1
fi

if $all; then
  mapfile -t files < <(git ls-files 'src/*.cc' 'tools/*.cc' | grep -vE '_test(_util)?\.cc$')
else
  mapfile -t files < <(git log --pretty=format: --name-only -m --first-parent -n 100 -- 'src/*.cc' 'tools/*.cc' |
    awk 'NF && !/_test(_util)?\.cc$/ && !seen[$0]++' |
    while read -r file; do if [ -f "$file" ]; then echo "$file"; fi; done | head -n "${TIDY_LIMIT:-6}")
fi
# Only what the build compiles can be analysed.
compiled=()
for file in "${files[@]}"; do
  if grep -q "/$file\"" "$build/compile_commands.json"; then compiled+=("$file"); fi
done
if [ ${#compiled[@]} -eq 0 ]; then echo "clang-tidy: nothing to analyse"; exit 0; fi

# gcc's precompiled headers are none of clang's; nor are the names of some of its warnings.
commands=$(mktemp -d)
trap 'rm -rf "$commands"' EXIT
sed -E 's# -Winvalid-pch##; s# -include [^ ]*cmake_pch\.hxx##' "$build/compile_commands.json" > "$commands/compile_commands.json"

printf '%s\n' "${compiled[@]}" | xargs -P "$(nproc)" -n 1 clang-tidy -p "$commands" --quiet --warnings-as-errors='*' \
  --extra-arg=-Wno-unknown-warning-option \
  2> >(grep -v 'warnings generated' >&2)
echo "clang-tidy: ok (${#compiled[@]} files)"
