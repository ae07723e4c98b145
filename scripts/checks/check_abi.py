#!/usr/bin/env python3
"""The C API's binary interface is the one of tests/abi/*.txt: declarations, layouts of structs, exported functions.

Declarations (with the values of enumerators) and layouts are clang's reading of folio/c/folio.h and folio/c/backends.h. With
BUILD_DIR, its libfolio.so and libfolio_backends.so must export every function that is declared, and no other function of C.

A difference is either a mistake or a decision. One that breaks programs (a field moved, a function gone or changed) needs a new
minor version before 1.0, which is in the soname; one that only adds needs none. Then `check_abi.py --update` writes the file anew.

usage: check_abi.py [--update] [BUILD_DIR]
"""

import difflib
import os
import pathlib
import re
import subprocess
import sys

from sources import ROOT, report

# Each library's header and baseline. The backends' header includes the core's, whose part is not repeated.
HEADERS = {"libfolio.so": ("folio/c/folio.h", "folio_c.txt"), "libfolio_backends.so": ("folio/c/backends.h", "folio_backends_c.txt")}
CLANG = os.environ.get("CLANG", "clang")


def clang(header, *options):
    return subprocess.run([CLANG, "-std=c11", f"-I{ROOT / 'include'}", *options, "-xc", "-"], input=f'#include "{header}"\n',
                          check=True, capture_output=True, text=True).stdout


def declarations(header):
    """The header's own declarations, one a line."""
    found, text, depth = [], "", 0
    for piece in re.split(r"([{};])", clang(header, "-E", "-P")):
        depth += {"{": 1, "}": -1}.get(piece, 0)
        text += piece
        if piece == ";" and depth == 0:
            line = re.sub(r"\s+", " ", text).strip()
            line = line.replace('__attribute__((visibility("default"))) ', "").replace(" ;", ";")
            if re.search(r"\b(folio|FOLIO)_", line):
                found.append(line)
            text = ""
    return found


def layouts(header):
    """Offsets of every field of every struct of the header, and sizes: a text a struct."""
    blocks = clang(header, "-fsyntax-only", "-Xclang", "-fdump-record-layouts-complete").split("*** Dumping AST Record Layout\n")
    return ["\n".join(line.rstrip() for line in block.strip("\n").splitlines() if "|" in line)
            for block in blocks if re.match(r"\s*0 \| struct folio_", block)]


def exported_functions(library):
    listing = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines()
            if line.split()[-2] in "TWi" and not line.split()[-1].startswith("_Z")}


def problems_of(name, header, baseline, known, update, build):
    """What is wrong with one library's interface. `known`: what the headers before it have, which is added to."""
    lines = [line for line in [*declarations(header), "", *layouts(header)] if line not in known or not line]
    known |= set(lines)
    text = "\n".join([f"# include/{header}, as scripts/checks/check_abi.py writes it", "", *lines, ""])
    path = ROOT / "tests" / "abi" / baseline
    if update:
        path.write_text(text, encoding="utf-8")
    problems = list(difflib.unified_diff(path.read_text(encoding="utf-8").splitlines(), text.splitlines(), "baseline", header,
                                         lineterm="", n=0))
    if build:
        library = pathlib.Path(build) / "src" / name
        functions = {match.group(1) for line in lines if (match := re.search(r"\b(folio_\w+)\([^*]", line))
                     and not line.startswith("typedef")}
        exported = exported_functions(library)
        problems += [f"{library}: does not export {function}" for function in sorted(functions - exported)]
        problems += [f"{library}: exports {function}, which {header} does not declare"
                     for function in sorted(exported - functions)]
    return problems


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--update"]
    problems, known = [], set()
    for name, (header, baseline) in HEADERS.items():
        problems += problems_of(name, header, baseline, known, "--update" in sys.argv, arguments[0] if arguments else None)
    return report("abi", problems)


if __name__ == "__main__":
    sys.exit(main())
