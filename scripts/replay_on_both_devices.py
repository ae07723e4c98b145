#!/usr/bin/env python3
"""Replays traces through every backend on the CPU and on the first GPU, and compares what they computed.

Every run checks its own sampled rows against the float64 oracle; beside that, the rows that both devices sampled are
compared within what roundings allow (compare_samples.py). Prints a table, one row a trace and backend. Exit code 1 for a
wrong row, a leaked page, a run that failed, or devices that disagree; 77 without a GPU (what a test that was skipped
returns).
"""

import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile

SKIPPED = 77
HEAD = "trace | backend | device | kernel | requests | rows | wrong | share of allowed | leaks | digest | seconds"


def replay(arguments, trace, backend, device, directory):
    samples = directory / f"{trace.stem}.{backend}.{device}.txt"
    command = [arguments.folio, "replay", str(trace), "--backend", backend, "--device", device, "--layers", "1"]
    command += ["--dump-samples", str(samples), "--quiet", "--json", "-", "--requests", str(arguments.requests)]
    if device == "cpu":
        command += ["--threads", str(arguments.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        report = None
    return done, report, samples


def row_of(trace, backend, device, report):
    checks = report["checks"]
    cells = [trace.stem, backend, device, report["attention"]["kernel"], report["requests"]["finished"], checks["rows"]]
    cells += [checks["failures"], f"{checks['worst_share_of_allowed']:.2f}", report["pages"]["leaked"]]
    cells += [checks["digest"], f"{report['times']['wall_s']:.1f}"]
    return " | ".join(str(cell) for cell in cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folio", help="the program")
    parser.add_argument("traces", nargs="+", type=pathlib.Path)
    parser.add_argument("--backends", default="none,flashinfer,flash_attn,token_pool")
    parser.add_argument("--requests", type=int, default=0, help="of each trace only the first; 0 = all")
    parser.add_argument("--threads", type=int, default=2, help="of a run on the CPU")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()

    probe = subprocess.run([arguments.folio, "info", "--device", "cuda"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        print(f"no GPU: {probe.stderr.strip()}")
        sys.exit(SKIPPED)
    compare = pathlib.Path(__file__).with_name("compare_samples.py")
    failures = []
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        directory = pathlib.Path(name)
        cases = [(trace, backend) for trace in arguments.traces for backend in arguments.backends.split(",")]
        # The long ones, those of the CPU, begin first.
        runs = {
            (case, device): pool.submit(replay, arguments, *case, device, directory)
            for device in ("cpu", "cuda")
            for case in cases
        }
        print(HEAD)
        for case in cases:
            samples = []
            for device in ("cpu", "cuda"):
                done, report, path = runs[case, device].result()
                label = f"{case[0].stem}, {case[1]}, {device}"
                if report is None:
                    failures.append(f"{label}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
                    continue
                print(row_of(*case, device, report), flush=True)
                if done.returncode != 0 or report["checks"]["failures"] or report["pages"]["leaked"]:
                    failures.append(f"{label}: {report['checks']['first_failure'] or 'pages leaked'}")
                samples.append(path)
            if len(samples) < 2:
                continue
            both = subprocess.run([sys.executable, compare, *samples], capture_output=True, text=True, check=False)
            print(f"{case[0].stem} | {case[1]} | both: {(both.stdout + both.stderr).strip()}", flush=True)
            if both.returncode != 0:
                failures.append(f"{case[0].stem}, {case[1]}: the devices disagree")
    for failure in failures:
        print(f"failed: {failure}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
