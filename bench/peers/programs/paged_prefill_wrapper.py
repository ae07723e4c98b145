"""BatchPrefillWithPagedKVCacheWrapper, planned once: FlashInfer's, and Folio's drop-in for it."""

import torch

from programs import Refused


class PagedPrefillWrapper:
    """A program whose `library` has FlashInfer's names."""

    library = None
    backend = "auto"

    def __init__(self, device):
        self.workspace = torch.zeros(512 << 20 if device == "cuda" else 0, dtype=torch.uint8, device=device)

    def prepare(self, problem):
        row = problem.row
        if row.mla:
            raise Refused("MLA has a wrapper of its own")
        options = {"causal": True, "sm_scale": problem.sm_scale, "q_data_type": torch.bfloat16,
                   "kv_data_type": torch.bfloat16, "window_left": row.window - 1 if row.window else -1,
                   "logits_soft_cap": row.soft_cap or None}
        wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend=self.backend)
        try:
            wrapper.plan(problem.cu_q, problem.page_indptr, problem.page_ids, problem.last_page_len, row.q_heads,
                         row.kv_heads, row.dim, row.page_size, **options)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise Refused(str(error)) from error

        def run(layer):
            return wrapper.run(problem.q, problem.caches[layer], out=problem.out)

        return run
