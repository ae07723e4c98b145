#!/usr/bin/env python3
"""Host time of a layer's calls from Python, in microseconds: what the Python module adds to the C++ calls.

The heads are tiny, so that attention costs little. An empty batch does no attention at all: its calls are what Python,
the borrowed arrays and the checks cost. Each figure is the least of many repetitions, on one thread. On a GPU calls are
enqueued: the figures are the host's, whatever the GPU does meanwhile.

    python_call.py [--library torch] [--device cuda] [--requests 0 1 32] [--context-length 16]
"""

import argparse
import time

import folio
import numpy as np

PAGE_SIZE, DIM = 16, 8


def least(function, repetitions, finish, calls=200):
    """The least time of one call, in microseconds. `finish` waits for what the calls have enqueued."""
    best = float("inf")
    for _ in range(repetitions):
        finish()
        start = time.perf_counter_ns()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter_ns() - start)
    return best / calls / 1000


class Problem:
    """A decode batch of one layer. `array` makes arrays of numpy's where calls take theirs."""

    def __init__(self, requests, length, array, context):
        self.array = array
        self.context = context
        pages = -(-length // PAGE_SIZE)
        config = folio.AttentionConfig(num_q_heads=1, num_kv_heads=1, head_dim_qk=DIM, head_dim_v=DIM, q="float32",
                                       kv="float32", page_size=PAGE_SIZE)
        self.op = folio.prepare(self.context, config)
        self.buffer = folio.make_plan_buffer(self.op)
        self.k_cache, self.v_cache = (self.zeros(max(requests * pages, 1), PAGE_SIZE, 1, DIM) for _ in range(2))
        self.q, self.out, self.k, self.v = (self.zeros(requests, 1, DIM) for _ in range(4))
        self.ids = array(np.arange(requests * pages, dtype=np.int32))
        self.offsets = array(np.arange(requests + 1, dtype=np.int32) * np.int32(pages))
        self.slots = array(np.arange(requests, dtype=np.int64) * pages * PAGE_SIZE)
        self.cu_q = np.arange(requests + 1, dtype=np.int32)
        self.lengths = np.full(requests, length, np.int32)
        size = folio.workspace_size(self.op) + 256
        on_host = context.device.type == folio.DeviceType.CPU
        self.workspace = folio.Workspace(size if on_host else array(np.zeros(size, np.uint8)))
        folio.init_workspace(self.op, self.workspace)
        self.plan = self.make_plan()
        self.layer = folio.Layer(self.op, self.make_cache())
        self.step = self.make_step()

    def zeros(self, *shape):
        return self.array(np.zeros(shape, np.float32))

    def make_plan(self):
        return folio.plan(self.op, folio.BatchView(self.cu_q, [folio.KvSegment(self.lengths)]), self.buffer)

    def make_step(self):
        table = folio.csr_table(self.ids, self.offsets)
        return folio.Step(self.plan, table, self.workspace, slot_mapping=self.slots)

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
        if not isinstance(self.q, np.ndarray):
            yield from self.operators()

    def replan(self):
        self.plan = self.make_plan()

    def operators(self):
        import torch

        import folio.torch
        from folio.flash_attn import flash_attn_with_kvcache

        self.replan()
        step = self.make_step()
        requests = self.q.shape[0]
        if requests:
            q, table = self.q[:, None], self.ids.view(requests, -1)
            lengths = self.array(self.lengths)
            yield "layer(step, q, empty_like(q))", lambda: self.layer(step, self.q, torch.empty_like(self.q))
            yield "flash_attn_with_kvcache", lambda: flash_attn_with_kvcache(
                q, self.k_cache, self.v_cache, cache_seqlens=lengths, block_table=table, causal=True)
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
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda needs torch")
    options.add_argument("--requests", type=int, nargs="+", default=[0, 1, 32])
    options.add_argument("--context-length", type=int, default=PAGE_SIZE, help="keys of a request")
    options.add_argument("--repetitions", type=int, default=20)
    given = options.parse_args()
    array, finish, context = np.asarray, lambda: None, folio.Context.cpu(num_threads=1)
    if given.library == "torch":
        import torch

        def array(values):
            return torch.from_numpy(values).to(given.device)

    if given.device == "cuda":
        if given.library != "torch":
            options.error("--device cuda needs --library torch")
        finish, context = torch.cuda.synchronize, folio.Context.cuda(0)
    columns = []
    for requests in given.requests:
        problem = Problem(requests, given.context_length, array, context)
        columns.append({what: least(function, given.repetitions, finish) for what, function in problem.calls()})
    print(f"{given.library} on {given.device}, {given.context_length} keys a request; us a call, least of "
          f"{given.repetitions}")
    print("| requests | " + " | ".join(map(str, given.requests)) + " |")
    print("|---|" + "---:|" * len(columns))
    for what in columns[-1]:
        print(f"| {what} | " + " | ".join(f"{column[what]:.2f}" if what in column else "" for column in columns) + " |")


if __name__ == "__main__":
    main()
