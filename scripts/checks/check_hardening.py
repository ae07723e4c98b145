#!/usr/bin/env python3
"""Built libraries and programs are hardened as cmake/FolioHardening.cmake says, as far as ELF files tell.

Every one is position-independent, binds at load, has read-only relocations and a stack that is not executable, and calls the stack
protector; of the core's objects without kernels each with x86-64 instructions allows control-flow enforcement.

usage: check_hardening.py BUILD_DIR
"""

import pathlib
import subprocess
import sys

from sources import report

FILES = ("src/libfolio.so", "src/libfolio_backends.so", "src/libfolio_testing.so", "tools/folio")


def readelf(*arguments):
    return subprocess.run(["readelf", "-W", *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def problems_of(path):
    dynamic, headers, symbols = readelf("-d", path), readelf("-hl", path), readelf("--dyn-syms", path)
    stack = next(line for line in headers.splitlines() if "GNU_STACK" in line)
    expected = {"immediate binding (-z now)": "NOW" in dynamic, "read-only relocations (-z relro)": "GNU_RELRO" in headers,
                "position-independent code": "DYN" in headers, "a stack without execution": "RWE" not in stack,
                "a stack protector": "__stack_chk_fail" in symbols}
    return [f"{path}: lacks {what}" for what, there in expected.items() if not there]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build = pathlib.Path(sys.argv[1])
    problems = []
    for path in (build / name for name in FILES):
        problems += problems_of(path) if path.exists() else [f"{path}: not built"]
    for path in sorted((build / "src/core").rglob("*.o")):
        if "X86-64" in readelf("-h", path) and "IBT, SHSTK" not in readelf("-n", path):
            problems.append(f"{path}: lacks control-flow protection (-fcf-protection)")
    return report("hardening", problems)


if __name__ == "__main__":
    sys.exit(main())
