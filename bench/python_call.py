#!/usr/bin/env python3
"""Host time of a layer's calls from Python, in microseconds: what the Python module adds to the C++ calls.

The heads are tiny, so that attention costs little. An empty batch does no attention at all: its calls are what Python,
the borrowed arrays and the checks cost. Each figure is the least of many repetitions, on one thread.

    python_call.py [--library torch] [--requests 0 1 32] [--context-length 16]
"""

import argparse
import time

import folio
import numpy as np

PAGE_SIZE, DIM = 16, 8


def least(function, repetitions, calls=500):
    """The least time of one call, in microseconds."""
    best = float("inf")
    for _ in range(repetitions):
        start = time.perf_counter_ns()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter_ns() - start)
    return best / calls / 1000


class Problem:
    """A decode batch of one layer, with arrays of one library."""

    def __init__(self, requests, length, library):
        self.array = library
        pages = -(-length // PAGE_SIZE)
        self.context = folio.Context.cpu(num_threads=1)
        config = folio.AttentionConfig(num_q_heads=1, num_kv_heads=1, head_dim_qk=DIM, head_dim_v=DIM, q="float32",
                                       kv="float32", page_size=PAGE_SIZE)
        self.op = folio.prepare(self.context, config)
        self.buffer = folio.make_plan_buffer(self.op)
        self.k_cache, self.v_cache = (self.zeros(max(requests * pages, 1), PAGE_SIZE, 1, DIM) for _ in range(2))
        self.q, self.out, self.k, self.v = (self.zeros(requests, 1, DIM) for _ in range(4))
        self.ids = library(np.arange(requests * pages, dtype=np.int32))
        self.offsets = library(np.arange(requests + 1, dtype=np.int32) * np.int32(pages))
        self.slots = library(np.arange(requests, dtype=np.int64) * pages * PAGE_SIZE)
        self.cu_q = library(np.arange(requests + 1, dtype=np.int32))
        self.lengths = library(np.full(requests, length, np.int32))
        self.workspace = folio.Workspace(max(folio.workspace_size(self.op), 256))
        folio.init_workspace(self.op, self.workspace)
        self.plan = self.make_plan()
        self.layer = folio.Layer(self.op, self.make_cache())
        self.step = self.make_step()

    def zeros(self, *shape):
        return self.array(np.zeros(shape, np.float32))

    def make_plan(self):
        return folio.plan(self.op, folio.BatchView(self.cu_q, [folio.KvSegment(self.lengths)]), self.buffer)

    def make_step(self):
        return folio.Step(self.plan, folio.csr_table(self.ids, self.offsets), slot_mapping=self.slots)

    def make_cache(self):
        return folio.make_nhd_view(self.k_cache, self.v_cache)

    def make_args(self):
        segment = folio.SegmentArgs(self.make_cache(), folio.csr_table(self.ids, self.offsets))
        return folio.AttentionArgs(self.q, self.out, [segment])

    def calls(self):
        """(what, function) of each figure."""
        args = self.make_args()
        yield "TensorView of q", lambda: folio.TensorView(self.q)
        yield "views of a layer", self.make_args
        yield "run, views made before", lambda: folio.run(self.plan, args, self.workspace)
        yield "views and run", lambda: folio.run(self.plan, self.make_args(), self.workspace)
        yield "layer(step, q, out)", lambda: self.layer(self.step, self.q, self.out)
        yield "write_kv_cache with views", lambda: folio.write_kv_cache(
            self.context, folio.CacheWriteArgs(self.k, self.v, self.slots, self.make_cache()))
        yield "layer.write(step, k, v)", lambda: self.layer.write(self.step, self.k, self.v)
        yield "once a step: folio.Step", self.make_step
        yield "once a step: batch and plan", self.replan
        if self.array is not np.asarray:
            yield from self.operators()

    def replan(self):
        self.plan = self.make_plan()

    def operators(self):
        import torch

        import folio.torch

        plan = self.make_plan()
        step = folio.Step(plan, folio.csr_table(self.ids, self.offsets), slot_mapping=self.slots)
        module = folio.torch.Attention()
        module.bind(self.layer)
        with torch.inference_mode(), folio.torch.use(step):
            yield "torch.ops.folio.attention", lambda: torch.ops.folio.attention.default(
                self.q, self.out, module.token, module.name)
            yield "torch.ops.folio.write", lambda: torch.ops.folio.write.default(
                self.k, self.v, module.token, module.name)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--library", choices=["numpy", "torch"], default="numpy", help="whose arrays")
    options.add_argument("--requests", type=int, nargs="+", default=[0, 1, 32])
    options.add_argument("--context-length", type=int, default=PAGE_SIZE, help="keys of a request")
    options.add_argument("--repetitions", type=int, default=20)
    given = options.parse_args()
    library = np.asarray
    if given.library == "torch":
        import torch

        library = torch.from_numpy
    columns = []
    for requests in given.requests:
        problem = Problem(requests, given.context_length, library)
        columns.append({what: least(function, given.repetitions) for what, function in problem.calls()})
    print(f"{given.library}, {given.context_length} keys a request; us a call, least of {given.repetitions}")
    print("| requests | " + " | ".join(map(str, given.requests)) + " |")
    print("|---|" + "---:|" * len(columns))
    for what in columns[0]:
        print(f"| {what} | " + " | ".join(f"{column[what]:.2f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
