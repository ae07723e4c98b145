#!/usr/bin/env bash
# Builds the CPU wheel from the source distribution (scripts/build_wheel.sh), installs it into an empty environment, replays a
# trace with the command that it brings, imports it there without numpy, and decodes beside the oracle with numpy and nothing else. Builds the wheels of the engines' plug-ins too,
# and looks their entry points up as an engine does. Ends with a count.
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
check env -u PYTHONPATH "$environment/bin/folio" replay --requests 20 --quiet --json build/wheel/replay.json
check inside -c 'import folio, sys; assert "numpy" not in sys.modules; print(folio.__file__, folio.__version__)'
check inside -m pip install -q --disable-pip-version-check 'numpy>=1.26,<3'
check inside examples/python/decode.py

# The plug-ins are pure Python: their wheels hold every module of theirs, and the entry point names a function.
plugin_wheel() {  # DIRECTORY
  rm -rf "build/wheel/$1" && inside -m pip wheel -q --disable-pip-version-check --no-deps -w "build/wheel/$1" "integrations/$1" \
    && inside -m pip install -q --disable-pip-version-check --no-index --no-deps --force-reinstall "build/wheel/$1"/*.whl
}
entry_point() {  # GROUP PACKAGE
  inside - "$1" "$2" "integrations/${2//_/-}/$2" <<'END'
import importlib.metadata, inspect, pathlib, sys

group, package, sources = sys.argv[1:]
found = [one for one in importlib.metadata.entry_points(group=group) if one.name == "folio"]
assert len(found) == 1, f"{group} has {len(found)} entry points named folio"
function = found[0].load()
assert found[0].value == f"{package}:register" and not inspect.signature(function).parameters, found[0]
installed = pathlib.Path(inspect.getfile(function)).parent
assert "site-packages" in str(installed), installed
missing = {one.name for one in pathlib.Path(sources).glob("*.py")} - {one.name for one in installed.glob("*.py")}
assert not missing, f"the wheel of {package} lacks {missing}"
print(f"{package} {importlib.metadata.version(package)}: {found[0].value}")
END
}
check plugin_wheel folio-vllm
check plugin_wheel folio-sglang
check entry_point vllm.general_plugins folio_vllm
check entry_point sglang.srt.plugins folio_sglang
echo "checks: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
