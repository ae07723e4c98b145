"""A row's tensors, the same in every process, and the float64 answer for some of its rows."""

import math

import torch

# Between two uses of the same pages, more than any last-level cache holds passes.
BYTES_BETWEEN_USES = {"cuda": 320 << 20, "cpu": 400 << 20}


class Problem:
    """bfloat16, with fp8 caches where the row says so. q [tokens, q_heads, dim]; caches, a pair for each layer, [pages,
    page_size, kv_heads, dim]; of MLA, one latent tensor [pages, page_size, 1, 576] of which values are a part. Pages of a
    request lie scattered."""

    def __init__(self, row, device, seed=1):
        self.row, self.device = row, torch.device(device)
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // row.page_size) for length in row.kv_lens]
        self.num_pages = sum(counts)
        ids = torch.randperm(self.num_pages, generator=generator).to(torch.int32)
        self.page_indptr = torch.tensor([0] + counts).cumsum(0).to(torch.int32)
        self.cu_q = torch.tensor([0] + list(row.q_lens)).cumsum(0).to(torch.int32)
        self.kv_lens = torch.tensor(row.kv_lens, dtype=torch.int32)
        self.last_page_len = (self.kv_lens - 1) % row.page_size + 1
        self.page_ids = ids.to(self.device)
        self.block_table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for i, count in enumerate(counts):
            self.block_table[i, :count] = ids[self.page_indptr[i]:self.page_indptr[i] + count]
        self.block_table = self.block_table.to(self.device)
        self.sm_scale = 1.0 / math.sqrt(192 if row.mla else row.dim)
        shape = self.num_pages, row.page_size, row.kv_heads, row.dim
        self.cache_bytes = (1 if row.fp8 else 2) * math.prod(shape) * (1 if row.mla else 2)
        several = row.kind == "decode" and not row.in_cache
        layers = math.ceil(BYTES_BETWEEN_USES[self.device.type] / self.cache_bytes) if several else 1
        self.caches = []
        on_device = torch.Generator(self.device).manual_seed(seed)
        for _ in range(min(layers, 64)):
            k = torch.randn(shape, generator=on_device, device=self.device).to(torch.bfloat16)
            v = k[..., :512] if row.mla else torch.randn(shape, generator=on_device, device=self.device).to(
                torch.bfloat16)
            # One e4m3 code in sixteen is subnormal.
            self.caches.append(tuple((0.2 * x).to(torch.float8_e4m3fn) for x in (k, v)) if row.fp8 else (k, v))
        tokens = int(self.cu_q[-1])
        self.q = torch.randn(tokens, row.q_heads, row.dim, generator=on_device, device=self.device).to(torch.bfloat16)
        self.out = torch.full((tokens, row.q_heads, row.dim_v), math.nan, device=self.device, dtype=torch.bfloat16)

    def keys_and_values(self, request, layer=0):
        """Those of one request, [keys, kv_heads, dim], gathered."""
        ids = self.page_ids[self.page_indptr[request]:self.page_indptr[request + 1]].long()
        length = self.row.kv_lens[request]
        return [cache.view(torch.uint8 if self.row.fp8 else cache.dtype)[ids].flatten(0, 1)[:length].view(cache.dtype)
                for cache in self.caches[layer]]

    def error(self, out, layer=0, requests=4):
        """The relative norm of the error of some requests' first and last tokens, against float64."""
        row, worst = self.row, 0.0
        for request in sorted({*range(min(requests, len(row.q_lens))), len(row.q_lens) - 1}):
            k, v = (each.double() for each in self.keys_and_values(request, layer))
            for token in {0, row.q_lens[request] - 1}:
                at = int(self.cu_q[request]) + token
                end = row.kv_lens[request] - row.q_lens[request] + token + 1
                begin = max(0, end - row.window) if row.window else 0
                group = row.q_heads // row.kv_heads
                q = self.q[at].double().view(row.kv_heads, group, row.dim)
                logits = torch.einsum("hgd,khd->hgk", q, k[begin:end]) * self.sm_scale
                if row.soft_cap:
                    logits = row.soft_cap * torch.tanh(logits / row.soft_cap)
                exact = torch.einsum("hgk,khd->hgd", logits.softmax(-1), v[begin:end]).reshape(row.q_heads, row.dim_v)
                difference = out[at].double() - exact
                worst = max(worst, float(difference.norm() / exact.norm())) if not difference.isnan().any() else math.inf
        return worst
