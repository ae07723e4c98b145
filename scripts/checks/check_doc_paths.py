#!/usr/bin/env python3
"""Paths that the documents name exist: relative links, and what stands in backticks and begins with a directory of ours.

tests/seed_map/seed_map.md is left out (check_seed_map.py reads it), and so are placeholders like src/kernels/cpu/<family>/.
"""

import pathlib
import re
import sys

from sources import ROOT, project_files, read, report

ROOTS = ("bench", "bindings", "cmake", "docs", "examples", "include", "scripts", "src", "tests", "tools")
PATH = re.compile(r"`((?:%s)/[\w./-]*)`" % "|".join(ROOTS))
LINK = re.compile(r"\]\(([^)#:]+)\)")


def main():
    problems = []
    for path in project_files():
        if path.suffix != ".md" or path == pathlib.Path("tests/seed_map/seed_map.md"):
            continue
        for number, line in enumerate(read(path).splitlines(), 1):
            for name in PATH.findall(line):
                if not (ROOT / name).exists():
                    problems.append(f"{path}:{number}: there is no {name}")
            for name in LINK.findall(line):
                if not (ROOT / path.parent / name).exists():
                    problems.append(f"{path}:{number}: the link to {name} leads nowhere")
    return report("document paths", problems)


if __name__ == "__main__":
    sys.exit(main())
