"""What the builder and the implementation meet in an engine, small and on the CPU; and attention in float64."""

import math
from types import SimpleNamespace

import torch
from folio_vllm.builder import FolioMetadataBuilder
from folio_vllm.impl import FolioAttentionImpl
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 64, 32
Q_LENS, KV_LENS = [1, 7, 40, 1], [70, 7, 53, 1]  # a decode, a prefill, a chunk of one, a first token
CPU = torch.device("cpu")


def engine(dtype=torch.float32, **additional):
    """What of a VllmConfig the builder reads."""
    return SimpleNamespace(
        additional_config={"folio": additional}, speculative_config=None,
        model_config=SimpleNamespace(dtype=dtype, max_model_len=512),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64, max_num_encoder_input_tokens=96),
        compilation_config=SimpleNamespace(static_forward_context={}, max_cudagraph_capture_size=None))


def layer_of(dtype=torch.float32, scale=(1.0, 1.0), **settings):
    """An attention layer with its implementation; scale is K's and V's, numbers or lists of one a KV head."""
    settings = {"num_heads": HEADS, "head_size": DIM, "scale": DIM**-0.5, "num_kv_heads": KV_HEADS} | settings
    k_scale, v_scale = (torch.tensor(value, dtype=torch.float32) for value in scale)
    return SimpleNamespace(impl=FolioAttentionImpl(**settings), _k_scale=k_scale, _v_scale=v_scale)


def builder_of(layers, dtype=torch.float32, cache_dtype=None, page_size=PAGE, config=None, **additional):
    config = config or engine(dtype, **additional)
    names = [f"model.layers.{i}.attn" for i in range(len(layers))]
    config.compilation_config.static_forward_context.update(zip(names, layers))
    spec = FullAttentionSpec(block_size=page_size, num_kv_heads=layers[0].impl.num_kv_heads,
                             head_size=layers[0].impl.head_size, dtype=cache_dtype or dtype)
    return FolioMetadataBuilder(spec, names, config, CPU)


class Step:
    """Requests whose pages lie scattered in a cache, with all their keys and values."""

    def __init__(self, dtype=torch.float32, q_lens=Q_LENS, kv_lens=KV_LENS, shared_pages=0, padding=3, causal=True):
        generator = torch.Generator().manual_seed(1)
        self.q_lens, self.kv_lens, self.causal = q_lens, kv_lens, causal
        columns = max(math.ceil(length / PAGE) for length in kv_lens) + 1
        pages = torch.randperm(len(q_lens) * columns, generator=generator).to(torch.int32).view(-1, columns)
        pages[:, :shared_pages] = pages[:1, :shared_pages]
        self.table, self.num_pages, self.padding = pages, pages.numel(), padding
        self.tokens = sum(q_lens)
        self.q = torch.randn(self.tokens + padding, HEADS, DIM, generator=generator).to(dtype)
        self.k, self.v = ([torch.randn(length, KV_HEADS, DIM, generator=generator).to(dtype) for length in kv_lens]
                          for _ in range(2))
        for tensors in (self.k, self.v):
            for tensor in tensors:
                tensor[:shared_pages * PAGE] = tensors[0][:shared_pages * PAGE]

    def cache(self, dtype):
        """[blocks, KV heads, block_size, 2 head_size], with what nobody may read in it."""
        cache = torch.full((self.num_pages, KV_HEADS, PAGE, 2 * DIM), float("nan"), dtype=torch.float32).to(dtype)
        return cache.view(torch.uint8) if cache.element_size() == 1 else cache

    def slots(self, table=None):
        table = self.table if table is None else table
        return torch.cat([table[r, torch.arange(length) // PAGE].long() * PAGE + torch.arange(length) % PAGE
                          for r, length in enumerate(self.kv_lens)])

    def common(self):
        starts = torch.tensor([0, *torch.tensor(self.q_lens).cumsum(0)], dtype=torch.int32)
        lens = torch.tensor(self.kv_lens, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(self.q_lens),
            num_actual_tokens=self.tokens + self.padding, max_query_len=max(self.q_lens), max_seq_len=max(self.kv_lens),
            block_table_tensor=self.table, slot_mapping=self.slots(), causal=self.causal)

    def write(self, layer, cache):
        layer.impl.do_kv_cache_update(layer, torch.cat(self.k), torch.cat(self.v), cache, self.slots())

    def run(self, layer, cache, metadata):
        out = torch.full((self.tokens + self.padding, HEADS * DIM), 7.0).to(self.q.dtype)
        assert layer.impl.forward(layer, self.q, None, None, cache, metadata, out.view(-1, HEADS, DIM)) is not None
        assert torch.all(out[self.tokens:] == 7), "rows of padding were written"
        return out.view(-1, HEADS, DIM)[:self.tokens]

    def exact(self, impl, k=None, v=None):
        """(attention in float64, the bound of its error for these inputs)"""
        k, v, begin, outs, bounds = k or self.k, v or self.v, 0, [], []
        sinks = None if impl.sinks is None else impl.sinks.double()
        slopes = impl.alibi_slopes
        group = impl.num_heads // impl.num_kv_heads
        for r, length in enumerate(self.q_lens):
            q = self.q[begin:begin + length].double()
            if length == 0:
                continue
            keys, values = (t[r].double().repeat_interleave(group, dim=1) for t in (k, v))
            position = torch.arange(self.kv_lens[r] - length, self.kv_lens[r])[:, None]
            distance = position - torch.arange(len(keys))[None]
            logits = torch.einsum("qhd,khd->hqk", q, keys) * DIM**-0.5
            sums = torch.einsum("qhd,khd->hqk", q.abs(), keys.abs()) * DIM**-0.5
            if impl.logits_soft_cap:
                logits = impl.logits_soft_cap * torch.tanh(logits / impl.logits_soft_cap)
            if slopes is not None:
                logits = logits - slopes.double()[:, None, None] * distance.abs()
                sums = sums + slopes.double()[:, None, None] * distance.abs()
            causal = self.causal and impl.attn_type == AttentionType.DECODER
            hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
            if impl.sliding_window is not None:
                far = distance if causal else distance.abs()
                hidden = hidden | (far >= impl.sliding_window)
            logits = logits.masked_fill(hidden, float("-inf"))
            extra = logits if sinks is None else torch.cat([logits, sinks[:, None, None].expand(-1, length, 1)], dim=-1)
            p = torch.softmax(extra, dim=-1)[..., :len(keys)]
            outs.append(torch.einsum("hqk,khd->qhd", p, values))
            bounds.append(self._bound(sums, len(keys), values, outs[-1]))
            begin += length
        return torch.cat(outs), torch.cat(bounds)

    def _bound(self, sums, keys, values, out):
        """float32 sums of DIM products move a logit by DIM + 2 half units of their absolute sum, and p by twice that;
        sums over keys add as many again. Of 16-bit types p and out are rounded to them besides: bfloat16 is the
        coarser, and counts for both."""
        rounding = 2.0**-24
        p = 2 * (DIM + 2) * rounding * sums.amax() + (keys + 8) * rounding
        if self.q.dtype != torch.float32:
            p = p + 2.0**-8
        return p * values.abs().amax() + (0 if self.q.dtype == torch.float32 else 2.0**-8) * out.abs()


def assert_close(step, out, impl, k=None, v=None):
    exact, bound = step.exact(impl, k, v)
    excess = (out.double() - exact).abs() - bound
    assert torch.isfinite(out.double()).all()
    assert excess.max() <= 0, f"an output is off by {excess.max():.3g} more than rounding explains"
