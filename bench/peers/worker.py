"""One program in a process of its own: idle threads of one library must not disturb another.

Reads requests, a line of JSON each: {"row": index} or {"time": true}. Answers likewise.
"""

import importlib
import json
import os
import sys

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what libraries print is not an answer

import torch  # noqa: E402
from problem import Problem  # noqa: E402
from programs import Refused, programs  # noqa: E402
from rows import ROWS  # noqa: E402
from timing import CpuTimer, GpuTimer  # noqa: E402

LARGEST_ERROR = 1e-2  # relative norm, bfloat16


def prepare(program, row, device, clock):
    if row.fp8 and not getattr(program, "takes_fp8", False):
        raise Refused("it is compared over bfloat16 caches alone")
    problem = Problem(row, device)
    run = program.prepare(problem)
    answer = {"bytes": problem.cache_bytes, "flops": row.flops(), "factor": getattr(run, "factor", 1.0)}
    out = run(0)
    if out is not None:
        answer["error"] = problem.error(out)
        if not answer["error"] < getattr(program, "largest_fp8_error" if row.fp8 else "largest_error", LARGEST_ERROR):
            return None, {"wrong": answer["error"]}
    layers = len(problem.caches)
    return GpuTimer(run, layers) if device == "cuda" else CpuTimer(run, layers, clock), answer


def main(name, device, clock, threads):
    torch.set_num_threads(threads)
    module, kind = programs()[name]
    try:
        program = getattr(importlib.import_module(f"programs.{module}"), kind)(device)
    except (ImportError, RuntimeError, OSError) as error:
        answers.write(json.dumps({"unavailable": f"{type(error).__name__}: {error}"}) + "\n")
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    timer = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "row" in request:
                timer = None
                timer, answer = prepare(program, ROWS[request["row"]], device, clock)
            else:
                answer = {"us": timer()}
        except Refused as reason:
            answer = {"refused": str(reason)}
        except Exception as error:  # a peer's failure ends its row, not the comparison
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
