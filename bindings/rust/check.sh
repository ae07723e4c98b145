#!/usr/bin/env bash
# Formatting, clippy, tests and the example of the crate, against the libfolio that PREFIX has (an installation), or that
# pkg-config finds. Says what it leaves out where cargo or bindgen is not there.
#
#   bindings/rust/check.sh [PREFIX]
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v cargo >/dev/null; then
  echo "rust: skipped, there is no cargo"
  exit 0
fi
if [ $# -gt 0 ]; then
  PKG_CONFIG_PATH=$(echo "$1"/lib*/pkgconfig):${PKG_CONFIG_PATH:-}
  export PKG_CONFIG_PATH
fi
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}

if command -v bindgen >/dev/null && command -v rustfmt >/dev/null; then
  written=$(mktemp)
  trap 'rm -f "$written"' EXIT
  ./generate.sh "$written"
  diff -u src/ffi.rs "$written" || { echo "src/ffi.rs is not what the headers say; run bindings/rust/generate.sh"; exit 1; }
else
  echo "rust: src/ffi.rs is not compared with the headers, bindgen or rustfmt is not there"
fi
if cargo fmt --version >/dev/null 2>&1; then
  cargo fmt --check
else
  echo "rust: formatting is not looked at, there is no rustfmt"
fi
if cargo clippy --version >/dev/null 2>&1; then
  cargo clippy --offline --quiet --all-targets -- -D warnings
else
  echo "rust: lints are not looked at, there is no clippy"
fi
cargo test --offline --quiet
cargo run --offline --quiet --example decode
