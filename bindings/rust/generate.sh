#!/usr/bin/env bash
# Writes the C headers' declarations in Rust: src/ffi.rs, or the file that is named. Needs bindgen (Debian's package bindgen)
# and rustfmt. The file is under version control: users of the crate need no libclang, and a change of the headers shows in
# a diff. `check.sh` compares.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
output=${1:-$root/bindings/rust/src/ffi.rs}
# Enumerators are 32-bit integers, as the fields that take them; bits of features are unsigned.
{
  echo '// The declarations of folio/c/folio.h, written by bindings/rust/generate.sh.'
  bindgen --no-layout-tests --ctypes-prefix std::os::raw --size_t-is-usize --no-rustfmt-bindings \
    --allowlist-function 'folio_.*' --allowlist-type 'folio_.*' --allowlist-var 'FOLIO_.*' --blocklist-item 'FOLIO_C_.*_H_' \
    --no-prepend-enum-name "$root/include/folio/c/folio.h" -- -std=c11 "-I$root/include" |
    sed -E -e '/^\/\* automatically generated/d' -e 's/pub type (_bindgen_ty_[0-9]+|__u?int[0-9]+_t) = [^;]*;//g' \
      -e 's/(FOLIO_FEATURE_[A-Z_]+) ?: ?_bindgen_ty_[0-9]+/\1: u32/g' -e 's/: ?_bindgen_ty_[0-9]+/: i32/g'
} | rustfmt --edition 2021 --config max_width=120 >"$output"
