#!/usr/bin/env python3
"""docs/seed_map.md has exactly one row for every symbol of docs/seed_symbols.txt, and names only what exists.

A row is `| symbol | Folio symbol | test |` below the heading of its document (`## 000 ...`). In the Folio column, what
stands in backticks must occur in the sources; "open" means that nothing stands for the symbol yet, and its test is `-`. In
the test column, what stands in backticks is Suite.Test of a GoogleTest (or the name of a ctest).
"""

import re
import sys

from sources import cpp_files, is_test, project_files, read, report

SYMBOLS = "docs/seed_symbols.txt"
MAP = "docs/seed_map.md"


def listed_symbols(problems):
    symbols = []
    for number, line in enumerate(read(SYMBOLS).splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\d{3}) (\S.*)", line)
        if match is None:
            problems.append(f"{SYMBOLS}:{number}: not 'document symbol': {line}")
        elif match.groups() in symbols:
            problems.append(f"{SYMBOLS}:{number}: twice: {line}")
        else:
            symbols.append(match.groups())
    return symbols


def mapped_rows(problems):
    """(document, symbol) -> (line, Folio symbol, test), in the order of the file."""
    rows, document = {}, None
    for number, line in enumerate(read(MAP).splitlines(), 1):
        heading = re.match(r"## (\d{3})\b", line)
        if heading:
            document = heading.group(1)
        elif document and line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) != 3 or not all(cells):
                problems.append(f"{MAP}:{number}: a row has three cells, none empty: {line}")
                continue
            key = (document, cells[0].strip("`"))
            if key in rows:
                problems.append(f"{MAP}:{number}: a second row for {key[1]}")
            rows[key] = (number, cells[1], cells[2])
    return rows


def known_tests(sources):
    names = set()
    for path, text in sources.items():
        if path.name == "CMakeLists.txt":
            names.update(re.findall(r"add_test\(NAME ([\w.]+)", text))
        elif is_test(path):
            names.update(".".join(pair) for pair in re.findall(r"\bTEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\s*\)", text))
            names.update(f"{suite}.{test}" for suite, test in re.findall(r"\bTYPED_TEST(?:_P)?\(\s*(\w+),\s*(\w+)\s*\)", text))
    return names


def check_cells(rows, sources, problems):
    code = "\n".join(text for path, text in sources.items() if path.name != "CMakeLists.txt")
    words = set(re.findall(r"\w+", code))
    tests = known_tests(sources)
    for (_, symbol), (number, folio, test) in rows.items():
        if folio.startswith("open"):
            if test != "-":
                problems.append(f"{MAP}:{number}: {symbol} is open, so its test is '-'")
            continue
        for name in re.findall(r"`([^`]+)`", folio):
            missing = [word for word in re.findall(r"\w+", name) if word not in words and not word.isdigit()]
            if "/" not in name and missing:
                problems.append(f"{MAP}:{number}: {symbol}: the sources do not know {', '.join(missing)}")
        for name in re.findall(r"`([^`]+)`", test):
            if name not in tests:
                problems.append(f"{MAP}:{number}: {symbol}: there is no test {name}")


def main():
    problems = []
    listed = listed_symbols(problems)
    rows = mapped_rows(problems)
    for document, symbol in listed:
        if (document, symbol) not in rows:
            problems.append(f"{MAP}: no row for {symbol} of document {document}")
    for key in rows:
        if key not in set(listed):
            problems.append(f"{MAP}:{rows[key][0]}: {key[1]} is not in {SYMBOLS}")
    sources = {path: read(path) for path in cpp_files()}
    sources.update({path: read(path) for path in project_files() if path.name == "CMakeLists.txt"})
    check_cells(rows, sources, problems)
    still_open = sum(1 for _, folio, _ in rows.values() if folio.startswith("open"))
    print(f"{len(rows)} symbols, {still_open} open")
    return report("seed map", problems)


if __name__ == "__main__":
    sys.exit(main())
