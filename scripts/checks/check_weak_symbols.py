#!/usr/bin/env python3
"""Objects compiled for a newer instruction set define no symbol that the linker could share with the rest of the library.

A weak (inline, template) symbol exists in many objects and the linker keeps any one of them: if it keeps the AVX-512 copy,
an old CPU that never chose the AVX-512 kernel meets an illegal instruction. So whatever such an object defines weakly must
be named after its instruction set: it lies in a namespace or carries a template argument of that name.

usage: check_weak_symbols.py BUILD_DIR
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys

from sources import ROOT, report

# Flags that let the compiler use instructions which not every x86-64 or AArch64 CPU has.
ISA_FLAG = re.compile(r"^-m(arch=|avx|sse[34]|sse4|fma|f16c|bmi|amx|popcnt|lzcnt|movbe)")
ISA_NAME = re.compile(r"\b(x86_64_)?(v[234])\b|_v[234]\b|\b(\w+_)?(avx2|avx512\w*|amx\w*|neon\w+)\b", re.IGNORECASE)


def object_of(entry):
    words = shlex.split(entry["command"]) if "command" in entry else entry["arguments"]
    path = pathlib.Path(entry.get("output") or words[words.index("-o") + 1])
    return words, path if path.is_absolute() else pathlib.Path(entry["directory"]) / path


def shared_symbols(path):
    """Demangled names of the weak ('W', 'V'; 'u' = unique) symbols that an object defines."""
    listing = subprocess.run(["nm", "--demangle", "--defined-only", str(path)], check=True, capture_output=True, text=True)
    for line in listing.stdout.splitlines():
        match = re.match(r"[0-9a-fA-F]*\s+([WVu])\s+(.*)", line)
        if match:
            yield match.group(2)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    database = pathlib.Path(sys.argv[1]) / "compile_commands.json"
    if not database.exists():
        sys.exit(f"weak symbols: {database} is missing: build first")
    problems, seen = [], 0
    for entry in json.loads(database.read_text()):
        words, path = object_of(entry)
        if not any(ISA_FLAG.match(word) for word in words):
            continue
        source = pathlib.Path(entry["file"]).relative_to(ROOT)
        if source.parts[0] == "src" and source.parts[:3] != ("src", "kernels", "cpu"):
            problems.append(f"{source}: in src/, only kernels/cpu may be compiled with instruction-set flags")
            continue
        if not path.exists():
            problems.append(f"{path}: not built")
            continue
        seen += 1
        for symbol in shared_symbols(path):
            if not ISA_NAME.search(symbol.split("(")[0]):
                problems.append(f"{source} ({path.parent.name}): weak symbol outside its own namespace: {symbol}")
    print(f"{seen} object(s) compiled with instruction-set flags")
    return report("weak symbols", problems)


if __name__ == "__main__":
    sys.exit(main())
