"""flash_attn's functions on Folio's kernels, for inference, on CPUs and GPUs: a drop-in.

    from folio.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Positional arguments are those of FlashAttention 2, the package `flash_attn`; the arguments that versions 3 and 4 and
vLLM's fork add are taken by keyword. Where versions disagree in order or in what is returned, their own form is a module:

    folio.flash_attn.v3     FlashAttention 3, `flash_attn_interface`
    folio.flash_attn.v4     FlashAttention 4, `flash_attn.cute`
    folio.flash_attn.vllm   vLLM's fork, `vllm.vllm_flash_attn`

`install()` lets programs import all of them under the originals' names. docs/migration_flash_attn.md says for each
function what is the same, what is better and what is refused.

Plans are remembered by the tensors that lengths lie in and by these tensors' versions: all layers of a step share one.
Whoever writes into lengths behind torch's back (with numpy, a kernel of his own, a graph's replay, `.data`) calls
`forget_plans()` before the next call. Under CUDA graph capture the plan is part of the graph.
"""

import sys

from torch import Tensor as _Tensor

from . import calls as _calls
from .arguments import check_hints as _check_hints
from .arguments import one_of as _one_of
from .arguments import per_layer as _per_layer
from .arguments import refuse as _refuse
from .arguments import rules_of as _rules_of
from .arguments import unpacked as _unpacked
from .attend import again as _again
from .attend import remember as _remember
from .combine import flash_attn_combine
from .plans import check_plans, forget_plans
from .scheduler_metadata import get_scheduler_metadata

__all__ = [
    "check_plans",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "forget_plans",
    "get_scheduler_metadata",
    "install",
]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    attention_chunk=0,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    learnable_sink=None,
    s_aux=None,
    return_softmax_lse=False,
    out=None,
):
    """Attention of q [batch, seqlen_q, heads, headdim] over k, v [batch, seqlen_k, KV heads, headdim]: out, like q.

    Causal masks and windows are aligned to the last key. return_attn_probs: (out, LSE, an empty tensor), as in version
    2; return_softmax_lse: (out, LSE). LSE is float32 [batch, heads, seqlen_q], natural. learnable_sink, s_aux: one logit
    a head in the denominator. Raises ValueError for what does not fit, NotImplementedError for what is not offered.
    """
    layer_key = None
    if (
        qv is None and alibi_slopes is None and q_descale is None and k_descale is None
        and v_descale is None and learnable_sink is None and s_aux is None and pack_gqa is None
        and out is None
        and not (dropout_p or attention_chunk or return_attn_probs or return_softmax_lse or sm_margin)
        and type(window_size) is tuple
    ):
        layer_key = q.dtype, k.dtype, v.dtype, softmax_scale, causal, window_size, softcap, num_splits
        step_key = q.shape, k.shape, v.shape
        found = _again(layer_key, step_key, q, k, v, False)
        if found is not None:
            return found
    if dropout_p:
        _refuse(dropout_p=dropout_p)
    _check_hints(pack_gqa, None)
    arrays = _per_layer(alibi_slopes, _one_of("learnable_sink", learnable_sink, "s_aux", s_aux), q_descale, k_descale,
                        v_descale)
    rules = _rules_of(softmax_scale, causal, window_size, softcap, num_splits, sm_margin, attention_chunk)
    found = _calls.dense(q, k, v, rules, arrays, qv, return_attn_probs or return_softmax_lse, out)
    if layer_key is not None:
        _remember(layer_key, step_key, False)
    return _returned(q, *found, return_attn_probs, return_softmax_lse)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    page_table=None,
    seqused_q=None,
    seqused_k=None,
    qv=None,
    q_v=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    attention_chunk=0,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    learnable_sink=None,
    s_aux=None,
    scheduler_metadata=None,
    return_softmax_lse=False,
    out=None,
):
    """Attention of requests that follow one another: q [total_q, heads, headdim] at cu_seqlens_q [batch + 1].

    Keys are k, v [total_k, KV heads, headdim] at cu_seqlens_k, or with block_table (page_table) [batch, pages] a cache
    [pages, page_size, KV heads, headdim]. seqused_q, seqused_k [batch]: how many of them are used. max_seqlen_q and
    max_seqlen_k are upper bounds. With a block_table seqused_k comes before cu_seqlens_k. LSE is float32
    [heads, total_q]. Otherwise as flash_attn_func.
    """
    layer_key = None
    if (
        qv is None and q_v is None and alibi_slopes is None and q_descale is None and k_descale is None
        and v_descale is None and learnable_sink is None and s_aux is None and pack_gqa is None
        and out is None and page_table is None and seqused_q is None and scheduler_metadata is None
        and not (dropout_p or attention_chunk or return_attn_probs or return_softmax_lse or sm_margin)
        and type(window_size) is tuple
    ):
        paged = block_table is not None
        caches = (id(k), id(v)) if paged else (k.dtype, v.dtype)
        layer_key = caches, q.dtype, softmax_scale, causal, window_size, softcap, num_splits, None
        lengths = id(cu_seqlens_q), id(cu_seqlens_k), id(seqused_k), id(block_table)
        step_key = lengths, max_seqlen_q, max_seqlen_k, q.shape, k.shape, v.shape
        found = _again(layer_key, step_key, q, k, v, paged)
        if found is not None:
            return found
    if dropout_p:
        _refuse(dropout_p=dropout_p)
    _check_hints(pack_gqa, scheduler_metadata)
    arrays = _per_layer(alibi_slopes, _one_of("learnable_sink", learnable_sink, "s_aux", s_aux), q_descale, k_descale,
                        v_descale)
    rules = _rules_of(softmax_scale, causal, window_size, softcap, num_splits, sm_margin, attention_chunk)
    found = _calls.ranges(q, k, v, rules, arrays, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q,
                          seqused_k, _one_of("block_table", block_table, "page_table", page_table),
                          _one_of("qv", qv, "q_v", q_v), return_attn_probs or return_softmax_lse, out)
    if layer_key is not None:
        _remember(layer_key, step_key, paged)
    return _returned(q, *found, return_attn_probs, return_softmax_lse)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    page_table=None,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    attention_chunk=0,
    scheduler_metadata=None,
    pack_gqa=None,
    sm_margin=0,
    learnable_sink=None,
    s_aux=None,
    out=None,
):
    """Attention of q [batch, seqlen_q, heads, headdim] over a KV cache, which k and v are appended to first.

    The cache is [sequences, capacity, KV heads, headdim], rows chosen by cache_batch_idx, or with block_table
    (page_table) [pages, page_size, KV heads, headdim]. cache_seqlens: an int or int32 [batch], without the new tokens.
    k, v: [batch, seqlen_new, KV heads, headdim], or with cu_seqlens_k_new [total, KV heads, headdim]. rotary_cos,
    rotary_sin [positions, rotary_dim / 2] turn k and q from position cache_seqlens (rotary_seqlens) on; q at that
    position alone where the mask is neither causal nor a window nor a chunk. cache_leftpad [batch]: the first slots,
    which are padding; cache_seqlens counts them, and so do rotary positions. attention_chunk: a query sees the keys of
    its chunk alone; chunks of that many keys begin at the first key that is no padding. q may be [total_q, heads, headdim] with cu_seqlens_q.
    Returns out, or (out, LSE) with return_softmax_lse. Otherwise as flash_attn_varlen_func.
    """
    layer_key = None
    if (
        k is None and qv is None and cu_seqlens_q is None and cache_batch_idx is None
        and cache_leftpad is None and page_table is None and pack_gqa is None and out is None
        and alibi_slopes is None and learnable_sink is None and s_aux is None and q_descale is None
        and k_descale is None and v_descale is None and rotary_cos is None
        and not (return_softmax_lse or attention_chunk or sm_margin)
        and v is None and rotary_sin is None and scheduler_metadata is None
        and type(window_size) is tuple
        and (type(cache_seqlens) is _Tensor or cache_seqlens is None)  # a step keeps no number, whose id comes again
    ):
        layer_key = id(k_cache), id(v_cache), q.dtype, softmax_scale, causal, window_size, softcap, num_splits
        step_key = id(cache_seqlens), id(block_table), q.shape
        found = _again(layer_key, step_key, q, k_cache, v_cache, True)
        if found is not None:
            return found
    _check_hints(pack_gqa, scheduler_metadata)
    arrays = _per_layer(alibi_slopes, _one_of("learnable_sink", learnable_sink, "s_aux", s_aux), q_descale, k_descale,
                        v_descale)
    rules = _rules_of(softmax_scale, causal, window_size, softcap, num_splits, sm_margin, attention_chunk)
    found = _calls.cached(q, k_cache, v_cache, rules, arrays, k, v, qv, (rotary_cos, rotary_sin), rotary_interleaved,
                          cache_seqlens, cache_batch_idx, _one_of("block_table", block_table, "page_table", page_table),
                          cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, return_softmax_lse, out,
                          cache_leftpad)
    if layer_key is not None:
        _remember(layer_key, step_key, True)
    return found if return_softmax_lse else found[0]


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """flash_attn_func of qkv [batch, seqlen, 3, heads, headdim], read where it lies."""
    return flash_attn_func(*_unpacked(qkv, 2, "qkv", 3), dropout_p, softmax_scale, causal, window_size, softcap,
                           alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """flash_attn_func of kv [batch, seqlen_k, 2, KV heads, headdim], read where it lies."""
    return flash_attn_func(q, *_unpacked(kv, 2, "kv", 2), dropout_p, softmax_scale, causal, window_size, softcap,
                           alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """flash_attn_varlen_func of qkv [total, 3, heads, headdim], read where it lies."""
    return flash_attn_varlen_func(*_unpacked(qkv, 1, "qkv", 3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
                                  dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """flash_attn_varlen_func of kv [total_k, 2, KV heads, headdim], read where it lies."""
    return flash_attn_varlen_func(q, *_unpacked(kv, 1, "kv", 2), cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                  max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                                  deterministic, return_attn_probs)


def _returned(q, out, lse, return_attn_probs, return_softmax_lse):
    if return_attn_probs:
        return out, lse, q.new_empty(0)
    return (out, lse) if return_softmax_lse else out


def install():
    """Lets this process import Folio's functions under the originals' names.

    `flash_attn` and `flash_attn.flash_attn_interface` become this module, `flash_attn_interface` and
    `flash_attn_3.flash_attn_interface` version 3's form, `flash_attn.cute` and `flash_attn.cute.interface` version 4's.
    Raises RuntimeError if an original is imported already, since its importers would keep it.
    """
    from . import v3, v4

    here = sys.modules[__name__]
    names = {
        "flash_attn": here,
        "flash_attn.flash_attn_interface": here,
        "flash_attn_interface": v3,
        "flash_attn_3": v3,
        "flash_attn_3.flash_attn_interface": v3,
        "flash_attn.cute": v4,
        "flash_attn.cute.interface": v4,
    }
    for name, module in names.items():
        if sys.modules.get(name, module) is not module:
            raise RuntimeError(f"folio.flash_attn: {name} is imported already, from {sys.modules[name].__name__}")
    sys.modules.update(names)
    # `import a.b` reads b from a.
    here.flash_attn_interface, here.cute = here, v4
    v3.flash_attn_interface, v4.interface = v3, v4
