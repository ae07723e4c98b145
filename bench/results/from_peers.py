#!/usr/bin/env python3
"""A results file from what `python bench/peers --json FILE` wrote: medians and ranges of all rounds.

    bench/results/from_peers.py FILE... --name h200_decode --title 'Decode on one H200' --machine 'one NVIDIA H200' \\
        --commit 3d7e5bb8 --settings 'bfloat16, pages of 16' --command 'python bench/peers ...' [--unit ms]

Several FILEs are runs of different rows or programs; where two have the same row, the later one's programs are added to
it. Then `bench/results/page.py --write`.
"""

import argparse
import datetime
import json
import pathlib
import statistics

HERE = pathlib.Path(__file__).resolve().parent
YARDSTICKS = {"read": "of a read", "gemm": "of the GEMM"}
UNITS = {"us": 1, "ms": 1000}


def significant(value):
    return float(f"{value:.4g}")


def rows_of(runs, unit):
    """Row name -> what the file holds of it; and every program in the order of its first appearance."""
    rows, programs = {}, []
    for run in runs:
        for result in run["results"]:
            times = result["us"]
            if "folio" not in times:
                continue
            row = rows.setdefault(result["row"], {"row": result["row"],
                                                  "folio": significant(statistics.median(times["folio"]) / UNITS[unit])})
            for name in times:
                if name == "folio":
                    continue
                ratios = [round(theirs / ours, 2) for theirs, ours in zip(times[name], times["folio"])]
                middle = round(statistics.median(ratios), 2)
                row[name] = middle if name in YARDSTICKS else [middle, min(ratios), max(ratios)]
                if name not in programs:
                    programs.append(name)
    return rows, sorted(programs, key=lambda name: name not in YARDSTICKS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    for name in ("name", "title", "machine", "commit", "settings"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--command", action="append", required=True, dest="commands")
    parser.add_argument("--unit", choices=UNITS, default="us", help="of Folio's times")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    options = parser.parse_args()
    rows, programs = rows_of([json.loads(path.read_text()) for path in options.files], options.unit)
    if not rows:
        parser.error("no row has a time of Folio's")
    data = {key: getattr(options, key) for key in ("title", "date", "machine", "commit", "commands", "settings")}
    data["columns"] = {"row": "batch", "folio": f"Folio, {options.unit}",
                       **{name: YARDSTICKS.get(name, name) for name in programs}}
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows.values())
    path = HERE / f"{options.name}.json"
    path.write_text(json.dumps(data, indent=2)[:-2] + f',\n  "rows": [\n{lines}\n  ]\n}}\n')
    print(f"wrote {path}; titles of programs stand in its columns")


if __name__ == "__main__":
    main()
