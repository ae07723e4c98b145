#!/usr/bin/env python3
"""Source files stay short enough to be read whole: 800 lines at most, and beyond 500 they are named."""

import sys

from sources import CPP_SUFFIXES, project_files, read, report

LIMIT = 800
QUESTION = 500


def main():
    problems = []
    for path in project_files():
        if path.suffix not in CPP_SUFFIXES | {".py", ".sh", ".cmake"} and path.name != "CMakeLists.txt":
            continue
        lines = read(path).count("\n")
        if lines > LIMIT:
            problems.append(f"{path}: {lines} lines; the limit is {LIMIT}")
        elif lines > QUESTION:
            print(f"{path}: {lines} lines: could it be two files?")
    return report("file length", problems)


if __name__ == "__main__":
    sys.exit(main())
