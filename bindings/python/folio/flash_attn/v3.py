"""The functions as FlashAttention 3 (`flash_attn_interface`) has them: order, defaults and what is returned.

with_kvcache returns (out, LSE) where the LSE is asked for; the original adds its kernels' partial results.
"""

from torch import Tensor

from . import calls, combine
from .arguments import check_hints, per_layer, rules_of, unpacked
from .attend import again, remember
from .scheduler_metadata import get_scheduler_metadata

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """As folio.flash_attn.flash_attn_func. return_attn_probs: (out, LSE)."""
    check_hints(pack_gqa, None)
    rules = rules_of(softmax_scale, causal, window_size, softcap, num_splits, sm_margin, attention_chunk)
    found = calls.dense(q, k, v, rules, per_layer(None, None, q_descale, k_descale, v_descale), qv, return_attn_probs)
    return found if return_attn_probs else found[0]


def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """qkv [batch, seqlen, 3, heads, headdim], or [batch, seqlen, num_heads_q + 2 KV heads, headdim]."""
    if qkv.dim() == 5:
        q, k, v = unpacked(qkv, 2, "qkv", 3)
        if num_heads_q not in (None, qkv.shape[3]):
            raise ValueError(f"folio.flash_attn: num_heads_q is {num_heads_q}; qkv {list(qkv.shape)} has {qkv.shape[3]}")
    else:
        if (num_heads_q is None or qkv.dim() != 4 or not 0 < num_heads_q < qkv.shape[2]
                or (qkv.shape[2] - num_heads_q) % 2):
            raise ValueError(f"folio.flash_attn: qkv is {list(qkv.shape)}, num_heads_q {num_heads_q}; heads are those of "
                             "q, k and v")
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], 2)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
                           attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """As folio.flash_attn.flash_attn_varlen_func. return_attn_probs: (out, LSE)."""
    check_hints(pack_gqa, None)
    rules = rules_of(softmax_scale, causal, window_size, softcap, num_splits, sm_margin, attention_chunk)
    found = calls.ranges(q, k, v, rules, per_layer(None, None, q_descale, k_descale, v_descale), cu_seqlens_q,
                         cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, None, qv, return_attn_probs)
    return found if return_attn_probs else found[0]


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """As folio.flash_attn.flash_attn_combine."""
    return combine.flash_attn_combine(out_partial, lse_partial, out, out_dtype)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """As folio.flash_attn.flash_attn_with_kvcache."""
    layer_key = None  # as there; calling it instead would take a seventh longer
    if (
        k is None and v is None and qv is None and cu_seqlens_q is None and cache_batch_idx is None
        and cache_leftpad is None and pack_gqa is None and q_descale is None and k_descale is None
        and v_descale is None and rotary_cos is None and rotary_sin is None and scheduler_metadata is None
        and not (return_softmax_lse or attention_chunk or sm_margin)
        and type(window_size) is tuple
        and (type(cache_seqlens) is Tensor or cache_seqlens is None)  # a step keeps no number, whose id comes again
    ):
        layer_key = id(k_cache), id(v_cache), q.dtype, softmax_scale, causal, window_size, softcap, num_splits
        step_key = id(cache_seqlens), id(page_table), q.shape
        found = again(layer_key, step_key, q, k_cache, v_cache, True)
        if found is not None:
            return found
    check_hints(pack_gqa, scheduler_metadata)
    rules = rules_of(softmax_scale, causal, window_size, softcap, num_splits, sm_margin, attention_chunk)
    found = calls.cached(q, k_cache, v_cache, rules, per_layer(None, None, q_descale, k_descale, v_descale), k, v, qv,
                         (rotary_cos, rotary_sin), rotary_interleaved, cache_seqlens, cache_batch_idx, page_table,
                         cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, return_softmax_lse,
                         leftpad=cache_leftpad)
    if layer_key is not None:
        remember(layer_key, step_key, True)
    return found if return_softmax_lse else found[0]
