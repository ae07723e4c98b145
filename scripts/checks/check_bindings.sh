#!/usr/bin/env bash
# The Rust crate and the Go example against the library of BUILD_DIR, which is installed into it: formatting, lints, tests.
# Installs the compilers where a package index is reachable; without one of them its part is skipped, which is said. Ends
# with a count.
#
#   check_bindings.sh BUILD_DIR
set -uo pipefail
cd "$(dirname "$0")/../.."
build=$(realpath "$1")
prefix=$build/bindings/installed

passed=0
failed=0
check() {
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $*"; fi
}

scripts/install_deps.sh bindings || echo "bindings: not every compiler could be installed"
install_library() {
  local component
  for component in shared development; do cmake --install "$build" --prefix "$prefix" --component "$component" >/dev/null || return; done
}
check install_library
CARGO_TARGET_DIR=$build/bindings/cargo check bindings/rust/check.sh "$prefix"
GOCACHE=$build/bindings/go check bindings/go/check.sh "$prefix"
echo "checks: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
