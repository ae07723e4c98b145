#!/usr/bin/env python3
"""The C API's binary interface is the one of tests/abi/folio_c.txt: declarations, layouts of structs, exported functions.

Declarations (with the values of enumerators) and layouts are clang's reading of include/folio/c/folio.h. With BUILD_DIR, its
libfolio.so must export every function that is declared, and no other function of C.

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

BASELINE = ROOT / "tests" / "abi" / "folio_c.txt"
CLANG = os.environ.get("CLANG", "clang")
SOURCE = '#include "folio/c/folio.h"\n'


def clang(*options):
    return subprocess.run([CLANG, "-std=c11", f"-I{ROOT / 'include'}", *options, "-xc", "-"], input=SOURCE, check=True,
                          capture_output=True, text=True).stdout


def declarations():
    """The header's own declarations, one a line."""
    found, text, depth = [], "", 0
    for piece in re.split(r"([{};])", clang("-E", "-P")):
        depth += {"{": 1, "}": -1}.get(piece, 0)
        text += piece
        if piece == ";" and depth == 0:
            line = re.sub(r"\s+", " ", text).strip()
            line = line.replace('__attribute__((visibility("default"))) ', "").replace(" ;", ";")
            if re.search(r"\b(folio|FOLIO)_", line):
                found.append(line)
            text = ""
    return found


def layouts():
    """Offsets of every field of every struct of the header, and sizes."""
    blocks = clang("-fsyntax-only", "-Xclang", "-fdump-record-layouts-complete").split("*** Dumping AST Record Layout\n")
    return [line.rstrip() for block in blocks if re.match(r"\s*0 \| struct folio_", block)
            for line in block.strip("\n").splitlines() if "|" in line]


def exported_functions(library):
    listing = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines()
            if line.split()[-2] in "TWi" and not line.split()[-1].startswith("_Z")}


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--update"]
    declared = declarations()
    text = "\n".join(["# include/folio/c/folio.h, as scripts/checks/check_abi.py writes it", "", *declared, "", *layouts(), ""])
    if "--update" in sys.argv:
        BASELINE.parent.mkdir(exist_ok=True)
        BASELINE.write_text(text, encoding="utf-8")
    problems = list(difflib.unified_diff(BASELINE.read_text(encoding="utf-8").splitlines(), text.splitlines(), "baseline",
                                         "folio.h", lineterm="", n=0))
    if arguments:
        library = pathlib.Path(arguments[0]) / "src" / "libfolio.so"
        functions = {match.group(1) for line in declared if (match := re.search(r"\b(folio_\w+)\([^*]", line))
                     and not line.startswith("typedef")}
        exported = exported_functions(library)
        problems += [f"{library}: does not export {name}" for name in sorted(functions - exported)]
        problems += [f"{library}: exports {name}, which folio.h does not declare" for name in sorted(exported - functions)]
    return report("abi", problems)


if __name__ == "__main__":
    sys.exit(main())
