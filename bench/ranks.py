#!/usr/bin/env python3
"""Context parallelism on the GPUs of one host: decode and prefill over one and over several of them, beside the simulator.

    bench/ranks.py --ranks 2,4 --json FILE [--folio build/release/tools/folio] [--only TEXT] [--seconds 60]

Runs `folio bench --ranks` case by case. FILE is written after every case, so that whatever ends the script early leaves the
cases before it. A case that takes longer than --seconds is stopped, and noted. Efficiency = t_one / (ranks * t_ranks), of the same
rounds; `simulated` is what `folio bench --simulate` makes of one GPU's own time and the links' rates.
"""

import argparse
import json
import pathlib
import subprocess
import sys

HEADS = ["--num-q-heads", "64", "--num-kv-heads", "8", "--head-dim", "128", "--kv-format", "strided-nhd"]
BATCHES = {"decode 1x1048576": (1, 1 << 20), "decode 1x4194304": (1, 1 << 22), "decode 8x131072": (8, 1 << 17),
           "decode 64x8192": (64, 8192)}
EXCHANGES = {"peer memory": ["--transport", "peer"], "NCCL, a2a": ["--transport", "group", "--dcp-comm", "a2a"],
             "NCCL, ag_rs": ["--transport", "group", "--dcp-comm", "ag_rs"]}
PROMPTS = {"prefill 1x131072": (1 << 17, 5), "prefill 1x524288": (1 << 19, 2)}  # new tokens, rounds


def cases():
    """Name and arguments of every case, without the number of ranks; and whether the simulator knows it."""
    for batch, (requests, kv_len) in BATCHES.items():
        shape = ["--sweep", "decode", "--batch", str(requests), "--kv-len", str(kv_len), "--rounds", "5", *HEADS]
        for exchange, arguments in EXCHANGES.items():
            yield f"{batch}, in graphs, {exchange}", [*shape, "--graph", *arguments], exchange != "peer memory"
            yield f"{batch}, eager, {exchange}", [*shape, *arguments], False
    for prompt, (tokens, rounds) in PROMPTS.items():
        yield prompt, ["--sweep", "prefill", "--pcp", "--q-len", str(tokens), "--kv-len", str(tokens), "--rounds", str(rounds),
                       *HEADS], True


def simulated(arguments):
    """The same without --transport, which only real ranks have."""
    kept = list(arguments)
    if "--transport" in kept:
        at = kept.index("--transport")
        del kept[at:at + 2]
    return [*kept, "--simulate"]


def bench(folio, arguments, ranks, seconds):
    """The one case of `folio bench`'s JSON, or why there is none."""
    command = [folio, "bench", "--device", "cuda", *arguments, "--ranks", str(ranks), "--json", "-", "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"stopped": f"after {seconds:g} s"}
    if done.returncode != 0:
        return {"stopped": done.stderr.strip() or f"exit status {done.returncode}"}
    return json.loads(done.stdout)["cases"][0]


def measure(options, name, arguments, has_model, ranks):
    result = {"case": name, "ranks": ranks, "command": " ".join(["folio bench --device cuda", *arguments, "--ranks", str(ranks)])}
    case = bench(options.folio, arguments, ranks, options.seconds)
    if "stopped" in case:
        return {**result, **case}
    one, many = case["one_rank_s"]["median"], case["layer_s"]["median"]
    result |= {"one_ms": one * 1e3, "ranks_ms": many * 1e3, "speedup": one / many, "efficiency": case["efficiency"]["median"],
               "spread": [case["layer_s"]["min"] * 1e3, case["layer_s"]["max"] * 1e3]}
    if has_model:
        model = bench(options.folio, simulated(arguments), ranks, options.seconds)
        result["simulated_ms"] = None if "stopped" in model else model["layer_s"]["median"] * 1e3
    return result


def line(result):
    head = f"{result['case']:<44}{result['ranks']:>3}"
    if "stopped" in result:
        return f"{head}  {result['stopped']}"
    model = result.get("simulated_ms")
    return (f"{head}{result['one_ms']:>10.3f}{result['ranks_ms']:>10.3f}{result['speedup']:>7.2f}{result['efficiency']:>7.0%}"
            f"{'' if model is None else f'{model:10.3f}'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", required=True, help="numbers of GPUs, as 2,4,8")
    parser.add_argument("--json", required=True, type=pathlib.Path, help="written after every case")
    parser.add_argument("--folio", default="build/release/tools/folio", help="the program")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--seconds", type=float, default=60, help="most time of a case's run, and of its simulation")
    options = parser.parse_args()
    ranks = [int(number) for number in options.ranks.split(",")]
    chosen = [case for case in cases() if options.only in case[0]]
    if not chosen:
        parser.error(f"no case has '{options.only}' in its name")
    print(f"{'case':<44}{'':>3}{'one, ms':>10}{'ranks':>10}{'':>7}{'':>7}{'simulated':>10}")
    results = []
    for number in ranks:
        for name, arguments, has_model in chosen:
            results.append(measure(options, name, arguments, has_model, number))
            options.json.write_text(json.dumps({"results": results}, indent=1) + "\n")
            print(line(results[-1]), flush=True)
    return 1 if any("stopped" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
