#!/usr/bin/env python3
"""One name per concept, no leftovers, and nothing in the library that prints, ends the process or reads its environment.

docs/glossary.md has the names; CONTRIBUTING.md says why.
"""

import re
import sys

from sources import CPP_SUFFIXES, code_only, cpp_files, is_test, project_files, read, report

# A unit of the KV cache is a page. "Block" is left to CTAs, mask blocks, the 16 values that share a scale in NVFP4,
# vLLM's words where it is named, and backends/.
BLOCK_FOR_PAGE = re.compile(
    r"block[_ ]?(table|size|id|manager|pool)s?\b|(kv|cache|num|free)[_ ]?blocks?\b"
    r"|tokens? per block", re.IGNORECASE)
NOT_A_PAGE = re.compile(r"CTA|cuda block|blockIdx|block_?idx\.|vLLM|nvfp4", re.IGNORECASE)

# Assembled, so that this file does not contain what it looks for.
LEFTOVER = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")

FORBIDDEN_CALL = re.compile(
    r"(?<![\w.>])(?:std::|::)?(printf|fprintf|vprintf|vfprintf|puts|fputs|putchar|perror|abort|exit|_exit|_Exit|quick_exit"
    r"|terminate|assert|getenv|secure_getenv|setenv|putenv|system)\s*\(|\bstd::(cout|cerr|clog|cin)\b")

VAGUE_NAME = re.compile(r"(^|_)(utils?|helpers?|misc|stuff)(_|$)")


def in_core(path):
    return path.parts[0] in ("src", "include") and "backends" not in path.parts


def main():
    problems = []
    for path in project_files():
        if any(VAGUE_NAME.search(part.split(".")[0]) for part in path.parts):
            problems.append(f"{path}: name the file for what it holds, not 'utils' or the like")
        if path.suffix in CPP_SUFFIXES | {".py", ".sh", ".cmake", ".md", ".txt"}:
            for number, line in enumerate(read(path).splitlines(), 1):
                if LEFTOVER.search(line):
                    problems.append(f"{path}:{number}: no unfinished work in the tree: {line.strip()}")
    for path in cpp_files():
        text = read(path)
        for number, line in enumerate(text.splitlines(), 1):
            if in_core(path) and BLOCK_FOR_PAGE.search(line) and not NOT_A_PAGE.search(line):
                problems.append(f"{path}:{number}: a unit of the KV cache is called a page here: {line.strip()}")
            if re.search(r"\bnamespace\s+(\w+::)*utils?\b", line):
                problems.append(f"{path}:{number}: a namespace is named for what it holds")
        if path.parts[0] != "src" or is_test(path):
            continue
        original = text.splitlines()
        for number, line in enumerate(code_only(text).splitlines(), 1):
            found = FORBIDDEN_CALL.search(line)
            if not found or re.match(r"\s*#", line):
                continue
            name = found.group(1) or f"std::{found.group(2)}"
            if name.endswith("getenv") and "FOLIO_FORCE_KERNEL" in original[number - 1]:
                continue
            problems.append(f"{path}:{number}: the library does not call {name}: {original[number - 1].strip()}")
    return report("wording", problems)


if __name__ == "__main__":
    sys.exit(main())
