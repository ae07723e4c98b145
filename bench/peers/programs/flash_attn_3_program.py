"""FlashAttention-3: as its hopper/ directory installs it, or its dense forward kernels alone (the wheel fa3-fwd)."""

import torch

from programs import Refused
from programs.paged_kvcache_call import PagedKvCacheCall

try:
    import flash_attn_interface as library
except ImportError:
    import fa3_fwd_interface as library


class FlashAttn3(PagedKvCacheCall):
    """Over paged caches."""

    name = "flash_attn_3"
    library = library

    def __init__(self, device):
        if device != "cuda":
            raise RuntimeError("FlashAttention-3 runs on GPUs")
        if library.__name__ == "fa3_fwd_interface":
            raise RuntimeError("fa3-fwd has no kernels for paged caches")


class FlashAttn3Dense:
    """Over keys and values gathered beforehand, one request behind the other."""

    name = "flash_attn_3_dense"

    def __init__(self, device):
        if device != "cuda":
            raise RuntimeError("FlashAttention-3 runs on GPUs")

    def prepare(self, problem):
        row = problem.row
        if row.mla:
            raise Refused("MLA is not timed with it")
        layers = []
        for layer in range(len(problem.caches)):
            dense = [problem.keys_and_values(request, layer) for request in range(len(row.q_lens))]
            layers.append([torch.cat([each[i] for each in dense]) for i in (0, 1)])
        cu_q = problem.cu_q.to(problem.device)
        cu_k = torch.tensor([0, *row.kv_lens]).cumsum(0).to(torch.int32).to(problem.device)
        window = (row.window - 1 if row.window else -1, 0 if row.window else -1)

        def run(layer):
            out = library.flash_attn_varlen_func(
                problem.q, *layers[layer], cu_q, cu_k, max(row.q_lens), max(row.kv_lens),
                softmax_scale=problem.sm_scale, causal=True, window_size=window, softcap=row.soft_cap)
            return out[0] if isinstance(out, tuple) else out

        return run
