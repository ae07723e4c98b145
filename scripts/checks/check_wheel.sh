#!/usr/bin/env bash
# Builds the CPU wheel from the source distribution (scripts/build_wheel.sh), installs it into an empty environment, imports it
# there without numpy, and decodes beside the oracle with numpy and nothing else. Ends with a count.
#
#   check_wheel.sh [PYTHON]
set -uo pipefail
cd "$(dirname "$0")/../.."

passed=0
failed=0
check() {
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $*"; fi
}

environment=build/wheel/empty
inside() { env -u PYTHONPATH "$environment/bin/python" "$@"; }

check scripts/build_wheel.sh cpu "$@"
wheel=$(ls -t build/dist/folio_attention-*.whl | head -n 1)
check "${1:-build/python/bin/python}" -m venv --clear "$environment"
# --no-index: a dependency would have to be fetched, and would be named.
check inside -m pip install -q --disable-pip-version-check --no-index "$wheel"
check inside -c 'import folio, sys; assert "numpy" not in sys.modules; print(folio.__file__, folio.__version__)'
check inside -m pip install -q --disable-pip-version-check 'numpy>=1.26,<3'
check inside examples/python/decode.py
echo "checks: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
