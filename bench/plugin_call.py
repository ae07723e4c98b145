#!/usr/bin/env python3
"""Host time of one layer's calls through folio-vllm, in microseconds: what the plug-in adds to python_call.py's figures.

One decode request of 16 keys and small heads, on one thread, so that attention costs little. Uses the plug-in's own
stand-ins for the engine: neither vLLM nor a model is needed. Each figure is the least of many repetitions.

    PYTHONPATH=...:integrations/folio-vllm plugin_call.py
"""

import argparse
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "integrations" / "folio-vllm" / "tests"))

import conftest  # noqa: E402, F401: a stand-in for vLLM where it is not installed
from python_call import least  # noqa: E402
from stand_ins import HEADS, Step, builder_of, layer_of  # noqa: E402

CASES = {"float32": {}, "sinks in bfloat16": {"sinks": torch.zeros(HEADS, dtype=torch.bfloat16)},
         "fp8 cache": {"kv_cache_dtype": "fp8"}}


def measure(settings, repetitions):
    step = Step(q_lens=[1], kv_lens=[16], padding=0)
    layer = layer_of(**settings)
    cache_dtype = torch.uint8 if "kv_cache_dtype" in settings else None
    builder = builder_of([layer], cache_dtype=cache_dtype, num_threads=1)
    cache = step.cache(torch.float8_e4m3fn if cache_dtype else torch.float32)
    step.write(layer, cache)
    common, slots = step.common(), step.slots()[:1]
    metadata = builder.build(0, common)
    out = torch.empty_like(step.q)
    k, v = (tensor[0][:1].contiguous() for tensor in (step.k, step.v))

    def forward():
        layer.impl.forward(layer, step.q, k, v, cache, metadata, out)

    def write():
        layer.impl.do_kv_cache_update(layer, k, v, cache, slots)

    def least_of(function, calls):
        return least(function, repetitions, lambda: None, calls)

    with torch.inference_mode():
        return (least_of(forward, 500), least_of(write, 500), least_of(lambda: builder.build(0, common), 100))


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=20)
    given = options.parse_args()
    torch.set_num_threads(1)
    print("| folio-vllm | forward | do_kv_cache_update | once a step: build |\n|---|---:|---:|---:|")
    for name, settings in CASES.items():
        print(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in measure(settings, given.repetitions)) + " |")


if __name__ == "__main__":
    main()
