#!/usr/bin/env python3
"""seed_map.md has exactly one row for every symbol of seed_symbols.txt, and names only what exists and runs.

A row is `| symbol | Folio symbol | test |` below the heading of its document (`## 000 ...`). In the Folio column, what
stands in backticks must occur in the sources; "open" means that nothing stands for the symbol yet, and its test is `-`. In
the test column, what stands in backticks is Suite.Test of a GoogleTest (or the name of a ctest); only "none" has `-`.

With BUILD_DIR, its test programs are asked too: they must list every test of the map, and of each row's tests one at least
must run on this machine's CPU, not be skipped.

usage: check_seed_map.py [BUILD_DIR]
"""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts" / "checks"))

from sources import cpp_files, is_test, project_files, read, report  # noqa: E402

SYMBOLS = "tests/seed_map/seed_symbols.txt"
MAP = "tests/seed_map/seed_map.md"


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


def named_tests(cell):
    return re.findall(r"`([^`]+)`", cell)


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
        if not named_tests(test) and not (test == "-" and folio.startswith("none")):
            problems.append(f"{MAP}:{number}: {symbol}: names no test")
        for name in re.findall(r"`([^`]+)`", folio):
            missing = [word for word in re.findall(r"\w+", name) if word not in words and not word.isdigit()]
            if "/" not in name and missing:
                problems.append(f"{MAP}:{number}: {symbol}: the sources do not know {', '.join(missing)}")
        for name in named_tests(test):
            if name not in tests:
                problems.append(f"{MAP}:{number}: {symbol}: there is no test {name}")


def plain_name(suite, test):
    """Suite.Test of `Prefix/Suite/0.Test/3`, as the map has it."""
    parts = [part for part in suite.split("/") if not part.isdigit()]
    return f"{parts[-1]}.{test.split('/')[0]}"


def listed_tests(program):
    """Suite.Test -> the full names that the program's --gtest_list_tests has for it."""
    listing = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    names, suite = {}, None
    for line in listing.splitlines():
        word = line.split("#")[0].strip()
        if line.startswith("  ") and suite:
            names.setdefault(plain_name(suite, word), []).append(f"{suite}.{word}")
        elif re.fullmatch(r"\S+\.", word):
            suite = word[:-1]
    return names


def tests_that_run(program, wanted):
    """Of the wanted tests those of which this program runs one at least to its end. What fails ran too: ctest tells of it."""
    full_names = [name for plain, names in listed_tests(program).items() if plain in wanted for name in names]
    if not full_names:
        return set()
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results.json"
        subprocess.run([program, "--gtest_filter=" + ":".join(full_names), f"--gtest_output=json:{results}"], cwd=folder,
                       env={**os.environ, "FOLIO_TEST_DEVICE": ""}, capture_output=True, check=False)
        suites = json.loads(results.read_text())["testsuites"] if results.exists() else []
    return {plain_name(suite["name"], test["name"]) for suite in suites for test in suite["testsuite"]
            if test.get("result") == "COMPLETED"}


def check_programs(rows, build, problems):
    programs = sorted(str(path) for path in pathlib.Path(build).resolve().rglob("folio_*_test") if os.access(path, os.X_OK)
                      and path.is_file())
    if not programs:
        problems.append(f"{build}: no test programs: build first")
        return
    wanted = {name for _, _, test in rows.values() for name in named_tests(test)}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        listed = {name for names in pool.map(listed_tests, programs) for name in names}
        run = {name for names in pool.map(lambda program: tests_that_run(program, wanted), programs) for name in names}
    for (_, symbol), (number, _, test) in rows.items():
        names = named_tests(test)
        for name in names:
            if re.match(r"[A-Z]", name) and name not in listed:
                problems.append(f"{MAP}:{number}: {symbol}: no test program lists {name}")
        if names and not run.intersection(names) and all(name in listed for name in names):
            problems.append(f"{MAP}:{number}: {symbol}: on a CPU every test is skipped: {', '.join(names)}")


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
    if len(sys.argv) > 1:
        check_programs(rows, sys.argv[1], problems)
    still_open = sum(1 for _, folio, _ in rows.values() if folio.startswith("open"))
    print(f"{len(rows)} symbols, {still_open} open")
    return report("seed map", problems)


if __name__ == "__main__":
    sys.exit(main())
