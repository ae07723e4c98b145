#!/usr/bin/env python3
"""Host time of a layer's decode through each of Folio's Python APIs, in microseconds, and through the originals where these
are installed: what a drop-in costs beside Folio's own calls.

bfloat16, 32 query heads over 8 KV heads of 128, pages of 16. On a GPU calls are enqueued: the figures are the host's.
Each is the least of many repetitions. Plans are made before, as for the layers of a step behind its first.

    drop_in_call.py [--device cuda] [--requests 1 32] [--context-length 16]
"""

import argparse
import importlib
import sys

import folio
import folio.flash_attn
import folio.flash_attn.v3
import folio.flashinfer
import torch
from python_call import least

Q_HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16


class Batch:
    """Decodes of equal lengths over consecutive pages."""

    def __init__(self, requests, length, device):
        on, pages = {"device": device}, -(-length // PAGE_SIZE)
        self.requests, self.device = requests, torch.device(device)
        self.indptr = torch.arange(requests + 1, dtype=torch.int32) * pages
        self.ids = torch.arange(requests * pages, dtype=torch.int32, **on)
        self.table = self.ids.view(requests, pages)
        self.lengths = torch.full((requests,), length, dtype=torch.int32)
        self.lengths_on_device = self.lengths.to(self.device)
        shape = requests * pages, PAGE_SIZE, KV_HEADS, DIM
        self.k_cache, self.v_cache = (torch.randn(shape, dtype=torch.bfloat16, **on) for _ in range(2))
        self.q = torch.randn(requests, Q_HEADS, DIM, dtype=torch.bfloat16, **on)
        self.out = torch.empty_like(self.q)


def layer(batch, out_is_given=True, lengths_on_device=False):
    """lengths_on_device: as flash_attn's functions get them. They are planned where they lie, within bounds."""
    on_gpu = batch.device.type == "cuda"
    context = folio.Context.cuda(0) if on_gpu else folio.Context.cpu(num_threads=1)
    config = folio.AttentionConfig(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_v=DIM,
                                   page_size=PAGE_SIZE)
    cu_q, lengths, options, sizes = torch.arange(batch.requests + 1, dtype=torch.int32), batch.lengths, None, {}
    if lengths_on_device:
        cu_q, lengths = cu_q.to(batch.device), batch.lengths_on_device
        sizes = {"max_q_len": 1, "max_kv_len": batch.table.shape[1] * PAGE_SIZE}
        options = folio.PrepareOptions(bounds=folio.GraphBounds(max_requests=batch.requests, max_tokens=batch.requests,
                                                                **sizes))
    op = folio.prepare(context, config, options or folio.PrepareOptions())
    size = folio.workspace_size(op) + 256
    workspace = folio.Workspace(torch.zeros(size, dtype=torch.uint8, device=batch.device) if on_gpu else size)
    folio.init_workspace(op, workspace)
    view = folio.BatchView(cu_q, [folio.KvSegment(lengths)], num_tokens=batch.requests, **sizes)
    plan = folio.plan(op, view, folio.make_plan_buffer(op))
    table = folio.csr_table(batch.ids, batch.indptr.to(batch.device))
    step, bound = folio.Step(plan, table, workspace), folio.Layer(op, folio.make_nhd_view(batch.k_cache, batch.v_cache))
    if out_is_given:
        return lambda: bound(step, batch.q, batch.out)
    return lambda: bound(step, batch.q, torch.empty_like(batch.q))


def wrapper(library, out_is_given=True):
    def call(batch):
        size = 128 << 20 if batch.device.type == "cuda" else 0
        workspace = torch.empty(size, dtype=torch.uint8, device=batch.device)
        made = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        last = (batch.lengths - 1) % PAGE_SIZE + 1
        made.plan(batch.indptr, batch.ids, last, Q_HEADS, KV_HEADS, DIM, PAGE_SIZE, q_data_type=torch.bfloat16,
                  kv_data_type=torch.bfloat16)
        if out_is_given:
            return lambda: made.run(batch.q, (batch.k_cache, batch.v_cache), out=batch.out)
        return lambda: made.run(batch.q, (batch.k_cache, batch.v_cache))

    return call


def kvcache_call(function, **names):
    def call(batch):
        q, table = batch.q[:, None], {names.get("table", "block_table"): batch.table}
        return lambda: function(q, batch.k_cache, batch.v_cache, cache_seqlens=batch.lengths_on_device, causal=True,
                                **table)

    return call


def calls():
    """(what, function(batch) -> call). Folio's own come first: the others are compared with them."""
    yield "folio.Layer", layer
    yield "folio.flashinfer, decode wrapper", wrapper(folio.flashinfer)
    if library := imported("flashinfer"):
        yield "FlashInfer, decode wrapper", wrapper(library)
    yield "folio.Layer and a new output", lambda batch: layer(batch, False)
    yield "folio.flashinfer, decode wrapper, new output", wrapper(folio.flashinfer, False)
    if library:
        yield "FlashInfer, decode wrapper, new output", wrapper(library, False)
    yield "folio.Layer, lengths on the device, new output", lambda batch: layer(batch, False, batch.device.type == "cuda")
    yield "folio.flash_attn.flash_attn_with_kvcache", kvcache_call(folio.flash_attn.flash_attn_with_kvcache)
    yield "folio.flash_attn.v3", kvcache_call(folio.flash_attn.v3.flash_attn_with_kvcache, table="page_table")
    if library := imported("flash_attn"):
        yield "flash_attn.flash_attn_with_kvcache", kvcache_call(library.flash_attn_with_kvcache)
    if library := imported("flash_attn_interface"):
        yield "FlashAttention-3", kvcache_call(library.flash_attn_with_kvcache, table="page_table")


def imported(name):
    """An original, or None."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"without {name}: {error}", file=sys.stderr)
        return None


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    options.add_argument("--context-length", type=int, default=PAGE_SIZE, help="keys of a request")
    options.add_argument("--repetitions", type=int, default=20)
    given = options.parse_args()
    torch.set_num_threads(1)
    finish = torch.cuda.synchronize if given.device == "cuda" else lambda: None
    batches = [Batch(requests, given.context_length, given.device) for requests in given.requests]
    print("| us a call, with requests | " + " | ".join(map(str, given.requests)) + " |")
    print("|---|" + "---:|" * len(batches))
    with torch.inference_mode():
        for what, function in calls():
            try:
                figures = [least(function(batch), given.repetitions, finish) for batch in batches]
            except Exception as error:  # an original's failure ends its row alone
                print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            print(f"| {what} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
