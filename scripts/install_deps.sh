#!/usr/bin/env bash
# Installs what Folio needs beyond a compiler, on Debian and its relatives, and only what is missing.
#
#   scripts/install_deps.sh [build] [bench] [checks]
#
#   build   (default) to build and run the library, the command-line tool and the tests
#   bench   the micro-benchmarks
#   checks  what continuous integration uses besides: clang and its tools, coverage, a compiler cache
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
    missing+=(libcli11-dev libfmt-dev nlohmann-json3-dev libgtest-dev libgmock-dev)
    return
  fi
  need_header CLI/CLI.hpp libcli11-dev
  need_header fmt/format.h libfmt-dev
  need_header nlohmann/json.hpp nlohmann-json3-dev
  need_header gtest/gtest.h libgtest-dev
  need_header gmock/gmock.h libgmock-dev
}

need_bench() { need_header benchmark/benchmark.h libbenchmark-dev; }

need_checks() {
  need_command python3 python3
  need_command clang++ clang
  need_command clang-format clang-format
  need_command clang-tidy clang-tidy
  need_command gcovr gcovr
  need_command ccache ccache
}

[ $# -gt 0 ] || set -- build
for group in "$@"; do
  case "$group" in
    build | bench | checks) "need_$group" ;;
    *) echo "install_deps.sh: there is no group '$group'; the groups are build, bench and checks" >&2; exit 2 ;;
  esac
done

if [ ${#missing[@]} -eq 0 ]; then exit 0; fi

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

echo "install_deps.sh: installing ${missing[*]}"
# A fresh machine has no package lists at all, an old one stale ones: refresh them in both cases, and only then.
if ! apt-cache show "${missing[@]}" >/dev/null 2>&1; then
  apt update
  install
else
  install || { apt update && install; }
fi
