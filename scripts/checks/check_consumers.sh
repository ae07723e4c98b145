#!/usr/bin/env bash
# Builds and runs projects that take Folio in each way that is offered besides `make install`: as a subproject by add_subdirectory
# and by FetchContent, as a Conan package, and as a port of vcpkg. Ends with a count. Kernels are compiled without much
# optimisation: what is looked at is that everything is found. (tests/package looks at the installed package.)
#
#   scripts/checks/check_consumers.sh [--today | [subproject] [conan] [vcpkg]]   (all of them without arguments; --today: one, by date)
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
work=$root/build/consumers
mkdir -p "$work"
quick=(-DFOLIO_KERNEL_COMPILE_OPTIONS=-O1 -DFOLIO_SOURCES_TOGETHER=16)
if command -v ccache >/dev/null; then
  quick+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$root}
fi

passed=0
failed=0
check() {
  echo "=== $*"
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $*"; fi
}

run_programs() {  # DIRECTORY
  local program
  for program in "$1"/consumer_*; do
    if [ -f "$program" ] && [ -x "$program" ]; then "$program" || return; fi
  done
}

subproject() {  # WAY
  local build=$work/$1
  cmake -S tests/consumer/subproject -B "$build" -G Ninja -DFOLIO_BY="$1" -DFOLIO_DIRECTORY="$root" -DCMAKE_BUILD_TYPE=Release \
    "${quick[@]}" >/dev/null &&
    cmake --build "$build" -j "$(nproc)" && run_programs "$build"
}

conan() {
  local environment=$work/conan-environment
  if ! "$environment/bin/conan" --version >/dev/null 2>&1; then
    python3 -m venv "$environment" && "$environment/bin/pip" install -q --disable-pip-version-check 'conan>=2,<3' || return
  fi
  export CONAN_HOME=$work/conan-home
  "$environment/bin/conan" profile detect --force >/dev/null &&
    "$environment/bin/conan" create packaging/conan --no-remote -s compiler.cppstd=20 --build=missing \
      -c tools.cmake.cmaketoolchain:generator=Ninja -c tools.cmake.cmake_layout:test_folder="$work/conan-test" \
      -c "tools.cmake.cmaketoolchain:extra_variables={'FOLIO_KERNEL_COMPILE_OPTIONS': '-O1'}"
}

vcpkg_port() {
  local packages=$work/vcpkg options
  if command -v vcpkg >/dev/null; then
    vcpkg install folio --overlay-ports=packaging/vcpkg --x-install-root="$packages" --classic || return
    packages=$packages/$(ls "$packages" | grep -m 1 -- -linux)
  else
    echo "there is no vcpkg here: its functions have stand-ins (scripts/checks/vcpkg_port.cmake)"
    options=$(IFS=';' && echo "${quick[*]}")
    cmake -DPACKAGES="$packages" -DVCPKG_LIBRARY_LINKAGE=static "-DEXTRA_OPTIONS=$options" -P scripts/checks/vcpkg_port.cmake || return
  fi
  cmake -S tests/consumer -B "$work/vcpkg-consumer" -G Ninja -DCMAKE_PREFIX_PATH="$packages" -DFOLIO_KIND=static -DFOLIO_HAS_C_API=ON \
    -DCMAKE_BUILD_TYPE=Release >/dev/null &&
    cmake --build "$work/vcpkg-consumer" && run_programs "$work/vcpkg-consumer"
}

ways=(subproject conan vcpkg)
case "${1:-}" in
  --today) ways=("${ways[$(($(date +%s) / 86400 % ${#ways[@]}))]}") ;;
  ?*) ways=("$@") ;;
esac
for way in "${ways[@]}"; do
  case "$way" in
    subproject)
      check subproject add_subdirectory
      check subproject fetch_content
      ;;
    conan) check conan ;;
    vcpkg) check vcpkg_port ;;
    *) echo "check_consumers.sh: there is no way '$way'; the ways are subproject, conan and vcpkg" >&2; exit 2 ;;
  esac
done
echo "checks: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
