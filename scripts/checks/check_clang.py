#!/usr/bin/env python3
"""clang accepts every C and C++ source of a build, with the build's own warnings as errors, and every public header as the
only include of a source, twice.

Nothing is compiled: clang parses, instantiates templates and reports. The sources and their options are those of
BUILD_DIR/compile_commands.json, less what only gcc knows. CUDA sources are nvcc's.

usage: check_clang.py [--fifth] BUILD_DIR [PART_OF_A_PATH...]

--fifth: every fifth source and header, by date: five days take all.
"""

import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

from sources import report

# Options that only gcc knows, and those that name what is written.
GCC_ONLY = re.compile(r"^(--param=|-fprofile-|--coverage$|-Winvalid-pch$|-fmax-|-fno-tree-|-mtls-dialect=|-M[DTF]*$)")
INCLUDE = pathlib.Path(__file__).resolve().parents[2] / "include"
WITH_VALUE = {"-o", "-MF", "-MT"}
COMPILERS = {"c": os.environ.get("CLANG", "clang"), "cc": os.environ.get("CLANGXX", "clang++")}


def clang_command(entry):
    """What clang is asked for one entry; None for a source that is not its own."""
    language = entry["file"].rsplit(".", 1)[-1]
    if language not in {"c", "cc", "cxx", "cpp"}:
        return None
    words = shlex.split(entry["command"]) if "command" in entry else list(entry["arguments"])
    first = next(i for i, word in enumerate(words) if word.startswith("-"))  # behind the compiler and its launcher
    kept, skip = [], False
    for i, word in enumerate(words[first:], first):
        if skip:
            skip = False
        elif word in WITH_VALUE:
            skip = True
        elif word == "-include" and words[i + 1].endswith("cmake_pch.hxx"):
            skip = True
        elif word != "-c" and not GCC_ONLY.match(word):
            kept.append(word)
    return [COMPILERS["c" if language == "c" else "cc"], "-fsyntax-only", "-Wno-unknown-warning-option", *kept]


def header_commands(header):
    """What clang is asked for a public header: as C++20, and those of the C API as C11 too."""
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", str(INCLUDE)]
    twice = ["-include", str(header), "-include", str(header), "/dev/null"]
    yield [COMPILERS["cc"], "-fsyntax-only", "-std=c++20", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", *warnings,
           "-x", "c++", *twice]
    if header.suffix == ".h":
        yield [COMPILERS["c"], "-fsyntax-only", "-std=c11", "-Wstrict-prototypes", *warnings, "-x", "c", *twice]


def problem_of(command, directory):
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{' '.join(command)}\n{done.stderr}"


def main():
    arguments = sys.argv[1:]
    step = 1
    if arguments[:1] == ["--fifth"]:
        arguments, step = arguments[1:], 5
    if not arguments:
        sys.exit(__doc__)
    database = pathlib.Path(arguments[0]) / "compile_commands.json"
    if not database.exists():
        sys.exit(f"clang: {database} is missing: configure first")
    parts = arguments[1:]
    wanted = lambda file: not parts or any(part in file for part in parts)
    entries = [entry for entry in json.loads(database.read_text()) if clang_command(entry) and wanted(entry["file"])]
    headers = [header for header in sorted(INCLUDE.rglob("*.h*")) if wanted(str(header))]
    first = datetime.date.today().toordinal() % step
    entries, headers = entries[first::step], headers[first::step]
    commands = [(clang_command(entry), entry["directory"]) for entry in entries]
    commands += [(command, None) for header in headers for command in header_commands(header)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = [problem for problem in pool.map(problem_of, *zip(*commands)) if problem]
    print(f"{len(entries)} source(s) and {len(headers)} header(s) given to {COMPILERS['cc']}")
    return report("clang", problems)


if __name__ == "__main__":
    sys.exit(main())
