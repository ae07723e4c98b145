"""torch: its scaled_dot_product_attention over dense keys, and the machine's limits as torch reaches them."""

import torch

from programs import Refused


class TorchSdpa:
    """Batches of equal lengths alone, since it takes no others without padding. Keys are gathered beforehand."""

    name = "torch_sdpa"

    def __init__(self, device):
        pass

    def prepare(self, problem):
        row = problem.row
        if len(set(row.q_lens)) > 1 or len(set(row.kv_lens)) > 1:
            raise Refused("lengths differ")
        if row.window or row.soft_cap or row.mla:
            raise Refused("windows, soft caps and MLA need a mask or a kernel of their own")
        requests, q_len, kv_len = len(row.q_lens), row.q_lens[0], row.kv_lens[0]
        q = problem.q.view(requests, q_len, row.q_heads, row.dim).transpose(1, 2)
        layers = []
        for layer in range(len(problem.caches)):
            dense = [problem.keys_and_values(request, layer) for request in range(requests)]
            layers.append([torch.stack([each[i] for each in dense]).transpose(1, 2) for i in (0, 1)])
        causal = q_len == kv_len
        mask = None
        if q_len > 1 and not causal:
            mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=problem.device).tril(kv_len - q_len)

        def run(layer):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, *layers[layer], attn_mask=mask, is_causal=causal, scale=problem.sm_scale, enable_gqa=True)
            return out.transpose(1, 2).reshape(problem.out.shape)

        return run


class Read:
    """Reads every page once. Its time is the least that a decode can take."""

    name = "read"
    takes_fp8 = True

    def __init__(self, device):
        pass

    def prepare(self, problem):
        words = [[cache.view(torch.int32) for cache in (caches[:1] if problem.row.mla else caches)]
                 for caches in problem.caches]

        def run(layer):
            for each in words[layer]:
                each.amax()

        return run


class Gemm:
    """A product of two bfloat16 matrices, with as many operations as the row has. Of float32 ones where a CPU has no
    AVX-512: torch takes some 300 times as long for bfloat16 ones there."""

    name = "gemm"
    takes_fp8 = True

    def __init__(self, device):
        self.size = 8192 if device == "cuda" else 2048
        slow = device == "cpu" and not torch.cpu._is_avx512_supported()
        self.dtype = torch.float32 if slow else torch.bfloat16

    def prepare(self, problem):
        size = self.size
        rows = max(128, round(problem.row.flops() / (2 * size * size)))
        a, b = (torch.randn(n, size, device=problem.device).to(self.dtype) for n in (rows, size))
        out = torch.empty(rows, size, device=problem.device, dtype=self.dtype)
        factor = problem.row.flops() / (2 * rows * size * size)

        def run(layer):
            torch.mm(a, b, out=out)

        run.factor = factor
        return run
