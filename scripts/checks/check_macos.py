#!/usr/bin/env python3
"""The libraries compile for macOS on Apple silicon: nothing in them takes Linux or ELF for granted.

zig's clang compiles them, with the headers of macOS and libc++ that it brings (pip install ziglang; this Python has it, or
build/macos has an environment with it). Nothing is linked or run. The sources are those of the libraries in
BUILD_DIR/compile_commands.json, less the kernels of x86-64 and of CUDA.

usage: check_macos.py BUILD_DIR
"""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

from check_clang import clang_command
from sources import report

LIBRARY = re.compile(r"/src/(?!.*_test\.dir/)(?!.*_emulated\.dir/)")
X86 = re.compile(r"kernels_(avx2|avx512|amx)\.dir/|collective_v\d|/cuda/|_cuda\.dir/|/mpi/|/nccl/|folio_nccl")
X86_OPTION = re.compile(r"^(-m|-fcf-protection|-U_FORTIFY|-D_FORTIFY|-Werror)")
TARGET = "aarch64-macos.13.0"
ENVIRONMENT = pathlib.Path("build/macos")


def zig():
    """The program, of this Python or of an environment that is made for it."""
    where = "import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), 'zig'))"
    for python in (sys.executable, ENVIRONMENT / "bin/python"):
        if os.path.exists(python):
            done = subprocess.run([python, "-c", where], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    subprocess.run([ENVIRONMENT / "bin/pip", "install", "-q", "--disable-pip-version-check", "ziglang==0.17.1"], check=True)
    return zig()


def problem_of(compiler, entry):
    words = clang_command(entry)
    options = [word for word in words[1:] if word != "-fsyntax-only" and not X86_OPTION.match(word)]
    language = "cc" if words[0].endswith("clang") else "c++"
    command = [compiler, language, "-target", TARGET, *options, "-O0", "-w", "-c", "-o", os.devnull]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{' '.join(command)}\n{done.stderr}"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    database = pathlib.Path(sys.argv[1]) / "compile_commands.json"
    if not database.exists():
        sys.exit(f"macOS: {database} is missing: configure first")
    entries = []
    for entry in json.loads(database.read_text()):
        output = "/" + entry.get("output", entry["command"].partition(" -o ")[2].split(" ")[0])
        if clang_command(entry) and LIBRARY.search(output) and not X86.search(output) and not X86.search(entry["file"]):
            entries.append(entry)
    compiler = zig()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = [problem for problem in pool.map(lambda entry: problem_of(compiler, entry), entries) if problem]
    print(f"{len(entries)} source(s) compiled for {TARGET}")
    return report("macOS", problems if entries else ["no sources"])


if __name__ == "__main__":
    sys.exit(main())
