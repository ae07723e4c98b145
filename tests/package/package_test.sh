#!/usr/bin/env bash
# The tests of the installed package, one function each; tests/package/CMakeLists.txt sets the environment.
set -euo pipefail

prefix() { echo "$WORK/$1"; }

# install_package KIND...: each kind into a prefix of its own, then the prefix moved, as packagers do.
install_package() {
  local kind component
  for kind in "$@"; do
    rm -rf "$WORK/staged" "$(prefix "$kind")"
    for component in "$kind" "backends-$kind" "testing-$kind" development nccl; do  # the last: nothing where it is not built
      "$CMAKE" --install "$BUILD" --prefix "$WORK/staged" --component "$component" >/dev/null
    done
    mv "$WORK/staged" "$(prefix "$kind")"
  done
}

# headers KIND: the installed headers compile, together and twice, without warnings; those of the C API as C11 too, each alone.
# (That each C++ header compiles alone is scripts/checks/check_clang.py's.)
headers() {
  local include header unit="$WORK/all_headers"
  include=$(prefix "$1")/include
  (cd "$include" && find folio -name '*.hpp' -o -name '*.h' | sort) > "$WORK/headers"
  [ -s "$WORK/headers" ] || { echo "no header is installed"; exit 1; }
  sed 's/.*/#include "&"/' "$WORK/headers" "$WORK/headers" > "$unit.cc"
  "$CXX" -std=c++20 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror -I "$include" \
    -fsyntax-only "$unit.cc"
  while read -r header; do
    printf '#include "%s"\n#include "%s"\nint main(void) { return 0; }\n' "$header" "$header" > "$unit.c"
    "$CC" -std=c11 -Wall -Wextra -Wpedantic -Wstrict-prototypes -Werror -I "$include" -fsyntax-only "$unit.c" ||
      { echo "$header does not compile alone as C11"; exit 1; }
  done < <(grep '\.h$' "$WORK/headers")
  echo "$(wc -l < "$WORK/headers") headers compile"
}

# exports_of LIBRARY SYMBOL NAMES: LIBRARY.so has a versioned SONAME and exports SYMBOL, and nothing but what matches NAMES.
exports_of() {
  local library foreign
  library=$(prefix shared)/$LIBDIR/$1.so
  readelf -d "$library" | grep -qE "SONAME.*$1\.so\.[0-9]+\.[0-9]+\]" || { echo "$1: no versioned SONAME"; exit 1; }
  "$NM" -D --defined-only --demangle "$library" | awk '$2 != "A" {$1 = ""; $2 = ""; print}' > "$WORK/versioned"
  if grep -vE '@@FOLIO_[0-9]+\.[0-9]+$' "$WORK/versioned"; then echo "$1: symbols without a version"; exit 1; fi
  sed 's/@@FOLIO_[0-9.]*$//' "$WORK/versioned" > "$WORK/exports"
  grep -q "$2" "$WORK/exports" || { echo "$1: $2 is not exported"; exit 1; }
  foreign=$(grep -vE "^ *((typeinfo|typeinfo name|vtable|VTT|guard variable) for |non-virtual thunk to )?$3" \
    "$WORK/exports" || true)
  if [ -n "$foreign" ]; then echo "$1 exports, but should not:"; echo "$foreign"; exit 1; fi
  echo "$1: $(wc -l < "$WORK/exports") symbols are exported"
}

# exports: each library exports its own part of Folio; the core has no word of the other two.
exports() {
  exports_of libfolio 'folio::v0::version()' 'folio(::|_)'
  if grep -E 'folio::v0::(backends|verify)::' "$WORK/exports"; then echo "libfolio exports other libraries' symbols"; exit 1; fi
  exports_of libfolio_backends 'folio::v0::backends::' 'folio(::v0::(backends::|Error$)|_)'
  exports_of libfolio_testing 'folio::v0::verify::reference_row' 'folio::v0::(verify::|Error$)'
}

# configure KIND DIRECTORY [ARGUMENTS...]: configures the consumer against the installation of that kind.
configure() {
  local kind=$1 directory=$2 c_api=OFF nccl=OFF
  shift 2
  if [ -f "$(prefix "$kind")/$LIBDIR/libfolio_nccl.a" ]; then nccl=ON; fi
  if [ -f "$(prefix "$kind")/include/folio/c/folio.h" ]; then c_api=ON; fi
  "$CMAKE" -S "$CONSUMER" -B "$directory" -G "$GENERATOR" -DCMAKE_BUILD_TYPE=Release -DFOLIO_HAS_C_API=$c_api \
    -DFOLIO_HAS_NCCL=$nccl \
    -DCMAKE_PREFIX_PATH="$(prefix "$kind")" -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX" -DFOLIO_KIND="$kind" "$@"
}

# refusals KIND: versions and components that are not there are refused, with the reason.
refusals() {
  local directory="$WORK/refusals" text
  rm -rf "$directory"
  mkdir -p "$directory"
  for request in '9.0' '0.0' 'COMPONENTS shared static' 'COMPONENTS teleport'; do
    printf 'cmake_minimum_required(VERSION 3.22)\nproject(refused LANGUAGES CXX)\nfind_package(folio %s REQUIRED)\n' \
      "$request" > "$directory/CMakeLists.txt"
    if text=$("$CMAKE" -S "$directory" -B "$directory/build" -G "$GENERATOR" -DCMAKE_CXX_COMPILER="$CXX" \
      -DCMAKE_PREFIX_PATH="$(prefix "$1")" 2>&1); then
      echo "find_package(folio $request) succeeded"
      exit 1
    fi
    grep -q 'folio' <<< "$text" || { echo "find_package(folio $request) failed for another reason: $text"; exit 1; }
  done
}

# find_package KIND: the consumer builds and runs.
find_package() {
  local directory="$WORK/consumer-$1" program
  rm -rf "$directory"
  configure "$1" "$directory"
  "$CMAKE" --build "$directory"
  for program in "$directory"/consumer_*; do
    if [ -f "$program" ] && [ -x "$program" ]; then "$program"; fi
  done
}

# subproject WAY: the consumer that builds Folio along configures, and finds its cache, settings and targets as they should be.
# scripts/checks/check_consumers.sh builds it too.
subproject() {
  local directory="$WORK/subproject-$1"
  rm -rf "$directory"
  "$CMAKE" -S "$CONSUMER/subproject" -B "$directory" -G "$GENERATOR" -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX" \
    -DFOLIO_BY="$1" -DFOLIO_DIRECTORY="$CONSUMER/../.."
}

# program KIND: what is installed as the program needs nothing but the system's and Folio's own libraries, and runs.
program() {
  local foreign
  "$CMAKE" --install "$BUILD" --prefix "$(prefix "$1")" --component tools >/dev/null
  foreign=$(readelf -d "$(prefix "$1")/bin/folio" | sed -nE 's/.*NEEDED.*\[(.*)\]/\1/p' |
    grep -vE '^lib(folio|folio_backends|folio_testing|fmt|stdc\+\+|gcc_s|c|m|emulated_cudart)\.so|^ld-linux' || true)
  if [ -n "$foreign" ]; then echo "the program needs $foreign"; exit 1; fi
  "$(prefix "$1")/bin/folio" info >/dev/null
}

# pkg_config KIND: the consumer builds from a plain compiler command and runs.
pkg_config() {
  local kind=$1 root program="$WORK/pkg-config-$1" mode=()
  root=$(prefix "$kind")
  if [ "$kind" = static ]; then mode=(--static); fi
  export PKG_CONFIG_PATH="$root/$LIBDIR/pkgconfig"
  # shellcheck disable=SC2046  # flags are words
  "$CXX" -std=c++20 "$CONSUMER/consumer.cc" -o "$program" $(pkg-config "${mode[@]}" --cflags --libs folio)
  LD_LIBRARY_PATH="$root/$LIBDIR" "$program"
  # shellcheck disable=SC2046
  "$CXX" -std=c++20 "$CONSUMER/backends_consumer.cc" -o "$program-backends" \
    $(pkg-config "${mode[@]}" --cflags --libs folio-backends folio-testing)
  LD_LIBRARY_PATH="$root/$LIBDIR" "$program-backends"
  if [ -f "$root/include/folio/c/folio.h" ]; then
    # shellcheck disable=SC2046
    "$CC" -std=c11 "$CONSUMER/consumer.c" -o "$program-c" $(pkg-config "${mode[@]}" --cflags --libs folio)
    LD_LIBRARY_PATH="$root/$LIBDIR" "$program-c"
    # shellcheck disable=SC2046
    "$CC" -std=c11 "$CONSUMER/backends_consumer_c.c" -o "$program-backends-c" \
      $(pkg-config "${mode[@]}" --cflags --libs folio-backends)
    LD_LIBRARY_PATH="$root/$LIBDIR" "$program-backends-c"
  fi
  if [ "$kind" = static ] && readelf -d "$program" "$program-backends" | grep -q 'NEEDED.*libfolio'; then
    echo "the static consumer needs the shared library"
    exit 1
  fi
}

"$@"
