#!/usr/bin/env python3
"""The tables of docs/performance.md, made from the files bench/results/*.json (README.md says what stands in them).

    bench/results/page.py            checks that the page and the files agree
    bench/results/page.py --write    writes the tables into the page; a file that the page does not know comes last

A table stands between the lines `<!-- results: NAME -->` and `<!-- end of results -->`, NAME being the file's.
"""

import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "performance.md"
FIELDS = {"title": str, "date": str, "machine": str, "commit": str, "commands": list, "settings": str, "columns": dict,
          "rows": list}
PLACE = re.compile(r"<!-- results: (\w+) -->\n.*?<!-- end of results -->\n", re.DOTALL)


def problems_of(data):
    """What is wrong with a file's contents."""
    for name, kind in FIELDS.items():
        if not isinstance(data.get(name), kind) or not data[name]:
            yield f"{name} is missing, empty or not a {kind.__name__}"
    for name in data.keys() - FIELDS.keys():
        yield f"no field is called {name}"
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(data.get("date"))):
        yield "date is not YYYY-MM-DD"
    for row in data.get("rows") or []:
        for key, value in row.items():
            if key not in (data.get("columns") or {}):
                yield f"row {row.get('row')!r} has {key}, which columns does not name"
            if isinstance(value, list) and not (len(value) == 3 and value[1] <= value[0] <= value[2]):
                yield f"row {row.get('row')!r}: {key} is not [median, least, largest]: {value}"


def cell(value):
    if isinstance(value, list):
        return "{:.2f} ({:.2f}-{:.2f})".format(*value)
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(data):
    lines = ["| " + " | ".join(data["columns"].values()) + " |", "|---" * len(data["columns"]) + "|"]
    lines += ["| " + " | ".join(cell(row.get(key, "")) for key in data["columns"]) + " |" for row in data["rows"]]
    return "\n".join(lines)


def section(name, data):
    return "\n".join([f"<!-- results: {name} -->", table(data), "",
                      f"{data['date']}, commit {data['commit']}. Machine: {data['machine']}. Rows: {data['settings']}.", "",
                      "```sh", *data["commands"], "```", "<!-- end of results -->", ""])


def read_results(folder):
    """Name -> contents of every file, and what is wrong with them."""
    results, problems = {}, []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            problems.append(f"bench/results/{path.name}: {error}")
            continue
        wrong = list(problems_of(data))
        problems += [f"bench/results/{path.name}: {each}" for each in wrong]
        if not wrong:
            results[path.stem] = data
    return results, problems


def written(page, results):
    """The page with its tables as the files have them, and the names of places that no file fills."""
    unknown = [name for name in PLACE.findall(page) if name not in results]
    page = PLACE.sub(lambda place: section(place[1], results[place[1]]) if place[1] in results else place[0], page)
    for name in sorted(results.keys() - set(PLACE.findall(page))):
        page += f"\n## {results[name]['title']}\n\n{section(name, results[name])}"
    return page, unknown


def main():
    results, problems = read_results(HERE)
    page = PAGE.read_text()
    new, unknown = written(page, results)
    problems += [f"docs/performance.md: there is no bench/results/{name}.json" for name in unknown]
    if "--write" in sys.argv[1:] and not problems:
        PAGE.write_text(new)
    elif new != page:
        problems.append("docs/performance.md: its tables are not those of bench/results: bench/results/page.py --write")
    for problem in problems:
        print(problem)
    print(f"performance page: {len(problems)} problem(s)" if problems else f"performance page: ok, {len(results)} tables")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
