"""flash_attn_with_kvcache over pages: FlashAttention-3's, and Folio's drop-in for it."""

import torch

from programs import Refused


class PagedKvCacheCall:
    """A program whose `library` has FlashAttention-3's names."""

    library = None

    def prepare(self, problem):
        row = problem.row
        if row.mla:
            raise Refused("MLA is not timed with it")
        lens, cu_q = (each.to(problem.device) for each in (problem.kv_lens, problem.cu_q))
        window = (row.window - 1 if row.window else -1, 0 if row.window else -1)
        metadata = self.library.get_scheduler_metadata(
            batch_size=len(row.q_lens), max_seqlen_q=max(row.q_lens), max_seqlen_k=max(row.kv_lens),
            num_heads_q=row.q_heads, num_heads_kv=row.kv_heads, headdim=row.dim, cache_seqlens=lens,
            qkv_dtype=torch.bfloat16, cu_seqlens_q=cu_q, page_size=row.page_size, causal=True, window_size=window,
            has_softcap=row.soft_cap > 0)

        def run(layer):
            return self.library.flash_attn_with_kvcache(
                problem.q, *problem.caches[layer], cache_seqlens=lens, page_table=problem.block_table, cu_seqlens_q=cu_q,
                max_seqlen_q=max(row.q_lens), softmax_scale=problem.sm_scale, causal=True, window_size=window,
                softcap=row.soft_cap, scheduler_metadata=metadata)

        return run
