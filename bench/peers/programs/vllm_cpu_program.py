"""vLLM's attention on a CPU: the kernels below its backend CPU_ATTN."""

import torch

from programs import Refused

BLOCK = 128  # vLLM's own choice on a CPU; its fastest kernels take multiples of 32


class VllmCpu:
    """Over caches of vLLM's layout, [blocks, kv_heads, 2 * BLOCK, dim], K before V, which vLLM writes."""

    name = "vllm_cpu"
    takes_fp8 = True
    largest_fp8_error = 5e-2  # 2.4e-2 seen

    def __init__(self, device):
        if device != "cpu":
            raise RuntimeError("its kernels are the CPU's")
        from vllm import _custom_ops
        from vllm.v1.attention.backends import cpu_attn

        if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
            raise RuntimeError("vLLM is installed without its CPU kernels")
        self.ops, self.isa_of = _custom_ops, cpu_attn._get_attn_isa
        torch.cpu._init_amx()  # the kernel's leave to use tiles, which an engine has from its matrix products

    def prepare(self, problem):
        row = problem.row
        if row.mla:
            raise Refused("MLA has a kernel of its own")
        kv_dtype = self._kv_dtype(row)
        isa = self.isa_of(torch.bfloat16, BLOCK, row.dim, kv_dtype)
        counts = [-(-length // BLOCK) for length in row.kv_lens]
        blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2)).to(torch.int32)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for request, ids in enumerate(blocks.split(counts)):
            table[request, :len(ids)] = ids
        caches = [self._cache(problem, layer, blocks, counts, isa) for layer in range(len(problem.caches))]
        window = row.window if row.window else -1
        schedule = self.ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(counts), num_heads=row.q_heads, num_kv_heads=row.kv_heads, head_dim=row.dim,
            seq_lens=problem.kv_lens, dtype=torch.bfloat16, query_start_loc=problem.cu_q, causal=True,
            sliding_window_size=window, isa=isa, enable_kv_split=True)

        def run(layer):
            k, v = caches[layer]
            self.ops.cpu_attention_with_kv_cache(
                query=problem.q, key_cache=k, value_cache=v, output=problem.out, query_start_loc=problem.cu_q,
                seq_lens=problem.kv_lens, scale=problem.sm_scale, causal=True, alibi_slopes=None,
                sliding_window=window, block_table=table, softcap=row.soft_cap, scheduler_metadata=schedule,
                s_aux=None, kv_cache_dtype=kv_dtype)
            return problem.out

        return run

    def _kv_dtype(self, row):
        return "fp8_e4m3" if row.fp8 else "auto"

    def _cache(self, problem, layer, blocks, counts, isa):
        row = problem.row
        dtype = torch.uint8 if row.fp8 else torch.bfloat16
        cache = torch.empty(len(blocks), row.kv_heads, 2 * BLOCK, row.dim, dtype=dtype)
        k, v = cache.chunk(2, dim=2)
        for request, ids in enumerate(blocks.split(counts)):
            slots = (ids.long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:row.kv_lens[request]]
            keys, values = (each.to(torch.bfloat16).contiguous() for each in problem.keys_and_values(request, layer))
            self.ops.cpu_attn_reshape_and_cache(keys, values, k, v, slots, isa, kv_cache_dtype=self._kv_dtype(row))
        return k, v
