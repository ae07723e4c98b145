"""One layer's attention over vLLM's cache: refusals at construction, cache writes, and the run of the step's plan."""

from typing import NamedTuple

import folio
import torch
from folio.backends.layer_kinds import BoundLayers, LayerKind, PreparedKind
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from .cache import CACHE_DTYPES, FP8, CacheLayout, scale_of
from .counts import count
from .options import options_of

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def refuse(what):
    raise NotImplementedError(f"folio-vllm does not offer {what}")


class KindStep(NamedTuple):
    """One step of the layers of a kind."""

    prepared: PreparedKind
    step: folio.Step


class FolioAttentionImpl(AttentionImpl):
    """vLLM's AttentionImpl. Its builder binds it once, when sizes of pages are known (`bind`), and gives it `writer`, the
    prepared kind whose layer writes the cache."""

    can_return_lse_for_decode = False
    supports_dcp = False
    supports_pcp = False
    supports_quant_query_input = False

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
                 kv_sharing_target_layer_name=None, sinks=None, **others):
        """Raises NotImplementedError for what is not offered, ValueError for what no layer has."""
        if others:
            refuse(f"layers with {', '.join(sorted(others))}")
        if attn_type not in (*ENCODERS, AttentionType.DECODER, AttentionType.ENCODER_DECODER):
            refuse(f"attention of type {attn_type!r}")
        if kv_cache_dtype not in CACHE_DTYPES:
            refuse(f"a KV cache of {kv_cache_dtype}; it takes {', '.join(CACHE_DTYPES)}")
        if attn_type in ENCODERS and kv_cache_dtype in FP8:
            kv_cache_dtype = "auto"  # an encoder layer has no cache
        if head_size % 8 != 0 or not 0 < head_size <= 576:
            refuse(f"head_size {head_size}; it takes multiples of 8 up to 576")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_heads is {num_heads}; it must be a multiple of num_kv_heads, {num_kv_heads}")
        if sinks is not None and sinks.numel() != num_heads:
            raise ValueError(f"sinks has {sinks.numel()} entries; there are {num_heads} heads")
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window is {sliding_window}; a window holds 1 token or more")
        if self.dcp_world_size > 1 or self.pcp_world_size > 1:
            refuse("context parallelism")
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        if model is not None and getattr(model, "is_mm_prefix_lm", False):
            refuse("spans of image tokens that see each other (prefix-LM masks)")
        if model is not None and getattr(model, "rswa_window", None) is not None:
            refuse("reference sliding windows (R-SWA)")
        self.options = None if config is None else options_of(config)

        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.logits_soft_cap = float(scale), float(logits_soft_cap or 0.0)
        self.sliding_window = sliding_window
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.is_encoder = attn_type in ENCODERS
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._sinks32 = None
        self._bound = BoundLayers()
        self.layout = self.writer = None

    def features(self):
        wanted = (("soft_cap", self.logits_soft_cap != 0.0), ("alibi", self.alibi_slopes is not None),
                  ("sinks", self.sinks is not None))
        return tuple(name for name, declared in wanted if declared)

    def kind(self, causal):
        """What decides this layer's op. Needs `bind`. A window is [p - w + 1, p] under a causal mask, and as wide on
        both sides without one."""
        left = -1 if self.sliding_window is None else self.sliding_window - 1
        causal = causal and self.attn_type == AttentionType.DECODER
        return LayerKind(
            num_q_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim_qk=self.layout.head_dim_qk,
            head_dim_v=self.layout.head_dim_v, q=self._q_dtype, kv=self.layout.dtype,
            source="ragged" if self.is_encoder else "paged", page_size=self.layout.page_size,
            kv_format=self.layout.kv_format, mask="causal" if causal else "none", window_left=left,
            window_right=-1 if causal else left, features=self.features())

    def bind(self, layout: CacheLayout, q_dtype, device, options):
        """Tells the layer how its cache lies, and puts what kernels read as float32 onto the device."""
        self.layout, self._q_dtype, self.options = layout, q_dtype, options
        self.kinds = {causal: self.kind(causal) for causal in (True, False)}
        self._bound.clear()
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(device)
        if self.sinks is not None and self._sinks32 is None:
            self._sinks32 = torch.empty(self.num_heads, dtype=torch.float32, device=device)

    def _refresh_sinks(self):
        """Into float32 at an address that captured graphs keep. Each time, also in a graph: weights may be loaded
        again."""
        if self.sinks is not None and self.sinks.dtype != torch.float32:
            self._sinks32.copy_(self.sinks.detach())

    def _bind_layer(self, op, layer, kv_cache):
        scales = {}
        if self.kv_cache_dtype in FP8:
            scales = {f"{name}_scale": scale_of(layer, name, self.num_kv_heads) for name in ("k", "v")}
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks.detach() if sinks.dtype == torch.float32 else self._sinks32
        return folio.Layer(op, None if self.is_encoder else self.layout.view(kv_cache), sm_scale=self.scale,
                           logits_soft_cap=self.logits_soft_cap, alibi_slopes=self.alibi_slopes, sinks=sinks, **scales)

    def _layer(self, prepared, layer, kv_cache):
        """This layer's folio.Layer for an op: bound again where the engine gives another cache or other scales."""
        if self.is_encoder:
            memory = None
        elif self.kv_cache_dtype in FP8:
            memory = (kv_cache.data_ptr(), kv_cache.shape[0], layer._k_scale.data_ptr(), layer._v_scale.data_ptr())
        else:
            memory = (kv_cache.data_ptr(), kv_cache.shape[0])
        bound = self._bound.find(prepared, memory)
        return bound or self._bound.add(prepared, memory, self._bind_layer(prepared.op, layer, kv_cache))

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """Writes the step's keys and values, [tokens, KV heads, head_size], into their slots. A negative slot is
        skipped. key and value may be padded: there are as many tokens as slots."""
        if self.is_encoder or kv_cache.numel() == 0:
            return
        count("writes")
        self._layer(self.writer, layer, kv_cache).write(slot_mapping, key, value)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
                output_block_scale=None):
        """Attention of query [tokens, heads, head_size] into output, which is returned. Rows of padding are left as
        they are. Without metadata, which is vLLM's profiling run, output becomes zeros."""
        if output_scale is not None or output_block_scale is not None:
            refuse("outputs that are quantised with attention")
        if attn_metadata is None:
            return output.zero_()
        prepared, step = attn_metadata.steps[self.kinds[attn_metadata.causal]]
        count("layers")
        count("kernel " + prepared.kernel_name)
        tokens, rows = attn_metadata.num_actual_tokens, output.shape[0]
        heads = output if output.dim() == 3 else output.view(rows, self.num_heads, self.layout.head_dim_v)
        if rows != tokens:
            heads = heads[:tokens]
        if query.shape[0] != tokens:
            query = query[:tokens]
        self._refresh_sinks()
        attend = self._layer(prepared, layer, kv_cache)
        if self.is_encoder:
            attend(step, query, heads, ragged=(key[:tokens], value[:tokens]))
        else:
            attend(step, query, heads)
        return output
