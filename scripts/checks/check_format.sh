#!/usr/bin/env bash
# All C and C++ sources are as clang-format 14 (Debian 12's) leaves them; `check_format.sh --fix` makes them so.
set -euo pipefail
cd "$(dirname "$0")/../.."

formatter=
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null 2>&1 && "$candidate" --version | grep -q 'version 14\.'; then
    formatter=$candidate
    break
  fi
done
if [ -z "$formatter" ]; then
  echo "format: needs clang-format 14; other versions format differently" >&2
  exit 1
fi

mode=(--dry-run -Werror)
if [ "${1:-}" = --fix ]; then mode=(-i); fi
mapfile -t files < <(git ls-files --cached --others --exclude-standard '*.hpp' '*.cc' '*.h' '*.c' '*.cu' '*.cuh')
"$formatter" "${mode[@]}" "${files[@]}"
echo "format: ok"
