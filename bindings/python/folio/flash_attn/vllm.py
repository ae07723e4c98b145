"""The functions as vLLM's fork of FlashAttention (`vllm.vllm_flash_attn`) has them: order, defaults, what is returned."""

from . import calls
from .arguments import check_hints, per_layer, refuse, rules_of
from .scheduler_metadata import get_scheduler_metadata as _get_scheduler_metadata

__all__ = ["flash_attn_varlen_func", "get_scheduler_metadata", "fa_version_unsupported_reason", "is_fa_version_supported"]

_VERSIONS = (2, 3, 4)


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits=0,
    fa_version=2,
    s_aux=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
):
    """As folio.flash_attn.flash_attn_varlen_func: out, or (out, LSE [heads, total_q]) with return_softmax_lse.

    fa_version 2, 3 or 4 run the same kernels and take the same arguments. return_attn_probs must be False: use
    return_softmax_lse.
    """
    refuse(dropout_p=dropout_p, return_attn_probs=return_attn_probs, cp_rank=cp_rank,
           cp_tot_seqused_k=cp_tot_seqused_k)
    if cp_world_size != 1:
        raise NotImplementedError(f"folio.flash_attn: cp_world_size is {cp_world_size}; keys divided over ranks are "
                                  "folio.KvShard's, not this API's: pass 1")
    reason = fa_version_unsupported_reason(fa_version)
    if reason:
        raise ValueError(reason)
    check_hints(None, scheduler_metadata)
    rules = rules_of(softmax_scale, causal, window_size, softcap, num_splits)
    found = calls.ranges(q, k, v, rules, per_layer(alibi_slopes, s_aux, q_descale, k_descale, v_descale), cu_seqlens_q,
                         cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, seqused_k, block_table, q_v, return_softmax_lse,
                         out)
    return found if return_softmax_lse else found[0]


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=None,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """As folio.flash_attn.get_scheduler_metadata."""
    return _get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim,
                                   cache_seqlens, qkv_dtype, headdim_v, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad,
                                   page_size, max_seqlen_k_new, causal, window_size, 0, has_softcap, num_splits,
                                   pack_gqa, sm_margin)


def is_fa_version_supported(fa_version, device=None):
    return fa_version_unsupported_reason(fa_version, device) is None


def fa_version_unsupported_reason(fa_version, device=None):
    if fa_version in _VERSIONS:
        return None
    return f"folio.flash_attn: fa_version is {fa_version}; offered are the calls of versions 2, 3 and 4"
