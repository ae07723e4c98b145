#!/usr/bin/env bash
# Formatting, vet and tests of the Go example, against the libfolio that PREFIX has (an installation), or that pkg-config
# finds. Says what it leaves out where go is not there.
#
#   bindings/go/check.sh [PREFIX]
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v go >/dev/null; then
  echo "go: skipped, there is no go"
  exit 0
fi
if [ $# -gt 0 ]; then
  PKG_CONFIG_PATH=$(echo "$1"/lib*/pkgconfig):${PKG_CONFIG_PATH:-}
  export PKG_CONFIG_PATH
fi
LD_LIBRARY_PATH=$(pkg-config --variable=libdir folio):${LD_LIBRARY_PATH:-}
export LD_LIBRARY_PATH GOFLAGS=-mod=mod GOPROXY=off
unformatted=$(gofmt -l .)
if [ -n "$unformatted" ]; then echo "gofmt would change: $unformatted"; exit 1; fi
go vet ./...
go test -count=1 ./...
