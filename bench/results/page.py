#!/usr/bin/env python3
"""The tables of docs/performance.md, and the table of speeds of the project's README, made from the files
bench/results/*.json (README.md says what stands in them).

    bench/results/page.py            checks that the pages and the files agree
    bench/results/page.py --write    writes the tables into the pages; a file that docs/performance.md does not know comes last

A table stands between the lines `<!-- results: NAME -->` and `<!-- end of results -->`, NAME being the file's. README's, between
`<!-- speeds -->` and `<!-- end of speeds -->`, has a row for each of SPEEDS.
"""

import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "performance.md"
README = HERE.parents[1] / "README.md"
FIELDS = {"title": str, "date": str, "machine": str, "commit": str, "commands": list, "settings": str, "columns": dict,
          "rows": list}
PLACE = re.compile(r"<!-- results: (\w+) -->\n.*?<!-- end of results -->\n", re.DOTALL)
SPEEDS_PLACE = re.compile(r"(?<=<!-- speeds -->\n).*?(?=<!-- end of speeds -->\n)", re.DOTALL)
SPEEDS_COLUMNS = ["row", "Folio", "FlashInfer 0.7.2", "FlashAttention-3, dense", "other", "record of"]
# README's rows: what is measured, the file, its record, the column of Folio's time and its unit, and where the other
# columns are found. "other" also has the name of what is compared.
SPEEDS = [
    ("decode, H200", "h200_decode", "64x4096", ("folio", "us"), {"FlashInfer 0.7.2": "flashinfer_fa2"}),
    ("decode, H200", "h200_decode", "skewed: 1 of 65,536, 63 of 512", ("folio", "us"), {"FlashInfer 0.7.2": "flashinfer_fa2"}),
    ("MLA decode, H200", "h200_mla", "64x4096, 128 heads", ("folio", "us"),
     {"FlashInfer 0.7.2": "flashinfer_mla", "other": ("FlashMLA", "flash_mla")}),
    ("prefill, H200", "h200_prefill", "1x16384", ("folio", "us"),
     {"FlashInfer 0.7.2": "flashinfer_fa3", "FlashAttention-3, dense": "flash_attn_3_dense", "other": ("cuDNN", "torch_sdpa")}),
    ("prefill, H200", "h200_prefill", "32x256", ("folio", "us"),
     {"FlashInfer 0.7.2": "flashinfer_fa3", "FlashAttention-3, dense": "flash_attn_3_dense", "other": ("cuDNN", "torch_sdpa")}),
    ("decode, two H200", "h200_ranks_decode", "1x1048576, in graphs", ("peer", "us"), {"other": ("one H200", "s_peer")}),
    ("decode, AMX, 16 threads", "amx_decode", "64x4096", ("folio", "ms"), {"other": ("vLLM", "vllm_cpu")}),
    ("prefill, AMX, 16 threads", "amx_prefill", "1x4096", ("folio", "ms"), {"other": ("vLLM", "vllm_cpu")}),
]


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


def speeds(results):
    """README's table, and what it names that no file has."""
    lines, problems = ["| " + " | ".join(SPEEDS_COLUMNS) + " |", "|---" * len(SPEEDS_COLUMNS) + "|"], []
    for what, name, record, (time_key, unit), keys in SPEEDS:
        row = next((row for row in results.get(name, {}).get("rows", []) if row["row"] == record), {})
        wanted = [time_key, *(key[1] if isinstance(key, tuple) else key for key in keys.values())]
        if missing := [key for key in wanted if key not in row]:
            problems.append(f"README.md: bench/results/{name}.json has no record {record!r} with {', '.join(missing)}")
            continue
        said = f"{results[name]['columns'][time_key]}; {results[name]['settings']}"
        if not re.search(rf"(,|times in) {unit}\b", said):
            problems.append(f"README.md: the column {time_key} of bench/results/{name}.json does not say that it is in {unit}")
        cells = {"row": f"{what}: {record}", "Folio": f"{cell(row[time_key])} {unit}",
                 "record of": f"[{name}](bench/results/{name}.json)"}
        for column, key in keys.items():
            program, key = key if isinstance(key, tuple) else ("", key)
            ratio = row[key][0] if isinstance(row[key], list) else row[key]
            cells[column] = f"{program} {ratio:.2f}".strip()
        lines.append("| " + " | ".join(cells.get(column, "") for column in SPEEDS_COLUMNS) + " |")
    return "\n".join(lines) + "\n", problems


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
    page, readme = PAGE.read_text(), README.read_text()
    new, unknown = written(page, results)
    problems += [f"docs/performance.md: there is no bench/results/{name}.json" for name in unknown]
    table, missing = speeds(results)
    problems += missing
    new_readme, places = SPEEDS_PLACE.subn(lambda _: table, readme)
    if places != 1:
        problems.append("README.md: the lines <!-- speeds --> and <!-- end of speeds --> are missing")
    if "--write" in sys.argv[1:] and not problems:
        PAGE.write_text(new)
        README.write_text(new_readme)
    else:
        for path, same in (("docs/performance.md", new == page), ("README.md", new_readme == readme)):
            if not same:
                problems.append(f"{path}: its tables are not those of bench/results: bench/results/page.py --write")
    for problem in problems:
        print(problem)
    print(f"performance page: {len(problems)} problem(s)" if problems else f"performance page: ok, {len(results)} tables and README's")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
