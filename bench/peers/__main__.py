"""Folio beside its peers, from Python, in one run: speedup = t_peer / t_folio.

    python bench/peers [--device cuda] [--rows 'decode*' 'mixed*'] [--programs folio,flashinfer_fa2] [--json FILE]

Every program runs in a process of its own, on the same tensors. A row begins with a check: each program's output, into
memory of NaNs, is compared with float64. Then programs are timed in turn, each round in another order. A cell is the
median of the rounds' ratios, with the least and the largest. Programs that are not installed are named and left out;
nothing is built here. `read` reads the row's pages, `gemm` does as many operations as it has: Folio's shares of both stand
beside its time.
"""

import argparse
import fnmatch
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys

from programs import programs
from rows import ROWS

HERE = pathlib.Path(__file__).resolve().parent
YARDSTICKS = ("read", "gemm")


class Worker:
    """A program's process."""

    def __init__(self, name, options):
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), name, options.device, options.clock, str(options.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)})

    def answer(self):
        """The next answer: the first one says whether the program is ready."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": f"ended with status {self.process.wait()}"}

    def send(self, **request):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the answer says so

    def ask(self, **request):
        self.send(**request)
        return self.answer()


def prepare_row(workers, index, at_once):
    """Every worker's answer, in their order."""
    if not at_once:
        return [worker.ask(row=index) for worker in workers]
    for worker in workers:
        worker.send(row=index)
    return [worker.answer() for worker in workers]


def time_row(workers, answers, rounds):
    """Microseconds of every round by program, what each said of the row, and why the others have no time."""
    said, without = {}, {}
    for worker, answer in zip(workers, answers):
        if "bytes" in answer:
            said[worker.name] = answer
        else:
            without[worker.name] = answer
    timed = [worker for worker in workers if worker.name in said]
    times = {worker.name: [] for worker in timed}
    for number in range(rounds + 2):  # the first two are not counted
        for worker in random.sample(timed, len(timed)):
            answer = worker.ask(time=True)
            if "us" not in answer:
                without[worker.name] = answer
                times.pop(worker.name, None)
                timed = [each for each in timed if each is not worker]
            elif number >= 2:
                times[worker.name].append(answer["us"] * said[worker.name]["factor"])
    return times, said, without


def ratios(times, name, to="folio"):
    return [theirs / ours for theirs, ours in zip(times[name], times[to])]


def cell(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def print_row(row, times, said, without):
    if "folio" not in times:
        print(f"| {row.name} | folio: {next(iter(without.get('folio', {'failed': ''}).values()))} |", flush=True)
        return
    cells = [row.name, f"{statistics.median(times['folio']):.1f}"]
    for yardstick in YARDSTICKS:
        cells.append(f"{statistics.median(ratios(times, yardstick)):.2f}" if yardstick in times else "")
    peers = [f"{name} {cell(ratios(times, name))}" for name in times if name not in ("folio", *YARDSTICKS)]
    wrong = [f"{name} WRONG by {answer['wrong']:.2g}" for name, answer in without.items() if "wrong" in answer]
    print("| " + " | ".join([*cells, "; ".join(peers + wrong)]) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(prog="bench/peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", nargs="+", default=["*"], help="patterns of rows' names")
    parser.add_argument("--programs", help="with commas between; all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each program, on a CPU")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                        help="cpu: CPU time of a program's threads, for busy machines")
    parser.add_argument("--json", type=pathlib.Path, help="a file for every round's times")
    parser.add_argument("--verbose", action="store_true", help="show what the programs print")
    options = parser.parse_args()
    names = options.programs.split(",") if options.programs else list(programs())
    unknown = [name for name in names if name not in programs()]
    if unknown:
        parser.error(f"no program {unknown[0]!r}; there are {', '.join(programs())}")
    chosen = [i for i, row in enumerate(ROWS)
              if options.device in row.on and any(fnmatch.fnmatch(row.name, pattern) for pattern in options.rows)]
    if not chosen:
        parser.error(f"no row of {options.device} is named {' or '.join(map(repr, options.rows))}")
    workers = []
    for worker in [Worker(name, options) for name in names]:
        state = worker.answer()
        if "ready" in state:
            workers.append(worker)
        else:
            print(f"without {worker.name}: {next(iter(state.values()))}", file=sys.stderr)
    print("| row | folio, us | of the read | of the GEMM | speedup = t_peer / t_folio: median (least-largest) |")
    print("|---|---|---|---|---|")
    results = []
    for index in chosen:
        # On a GPU one after the other: a peer may try its kernels before it chooses one.
        answers = prepare_row(workers, index, at_once=options.device == "cpu")
        times, said, without = time_row(workers, answers, options.rounds)
        print_row(ROWS[index], times, said, without)
        results.append({"row": ROWS[index].name, "us": times, "said": said, "without": without})
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "clock": options.clock,
                                            "threads": options.threads, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
