#!/usr/bin/env bash
# Every check that reads the sources and, where BUILD_DIR is given and built, its objects. Ends with a count.
#
#   run_all.sh [BUILD_DIR]
set -uo pipefail
cd "$(dirname "$0")/../.."
build=${1:-}

passed=0
failed=0
check() {
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $*"; fi
}

check scripts/checks/check_includes.py
check scripts/checks/check_file_length.py
check scripts/checks/check_wording.py
check scripts/checks/check_links.py
check scripts/checks/check_spelling.py
check scripts/checks/check_sentences.py
check scripts/checks/check_decisions.py
check scripts/checks/check_changelog.py
check bench/results/page.py
check scripts/checks/check_format.sh
check scripts/checks/check_stable_abi.py
check tests/mutations/mutate.py --applies
check tests/mutations/python_mutate.py --applies
if [ -n "$build" ] && [ -f "$build/compile_commands.json" ]; then
  check scripts/checks/check_weak_symbols.py "$build"
  check scripts/checks/check_abi.py "$build"
  check scripts/checks/check_hardening.py "$build"
  check tests/seed_map/check_seed_map.py "$build"
else
  check tests/seed_map/check_seed_map.py
fi
echo "checks: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
