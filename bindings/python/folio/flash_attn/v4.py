"""The functions as FlashAttention 4 (`flash_attn.cute`) has them: order, defaults and what is returned.

Attention returns (out, LSE), the LSE None unless return_lse. With qv the LSE has its heads last.
"""

from . import calls
from .arguments import check_hints, per_layer, refuse, rules_of
from .combine import combine as _combine
from .scheduler_metadata import metadata_of, require_batch

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
):
    """As folio.flash_attn.flash_attn_func."""
    refuse(gather_kv_indices=gather_kv_indices, score_mod=score_mod,
           score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
           block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd)
    check_hints(pack_gqa, None)
    rules = rules_of(softmax_scale, causal, window_size, softcap, num_splits)
    return _returned(*calls.dense(q, k, v, rules, per_layer(None, learnable_sink), qv, return_lse), qv)


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
):
    """As folio.flash_attn.flash_attn_varlen_func. q, k and v may be [batch, seqlen, heads, headdim] too.

    min_seqlen_k belongs to gather_kv_indices; alone it is a lower bound that nothing needs. So it is in the original.
    """
    refuse(gather_kv_indices=gather_kv_indices, score_mod=score_mod, mask_mod=mask_mod,
           block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
           seqlen_k_per_split=seqlen_k_per_split)
    check_hints(pack_gqa, None if disable_scheduler_metadata else scheduler_metadata)
    rules = rules_of(softmax_scale, causal, window_size, softcap, num_splits)
    return _returned(*calls.ranges(q, k, v, rules, per_layer(None, learnable_sink), cu_seqlens_q, cu_seqlens_k,
                                   max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, page_table, qv, return_lse), qv)


def _returned(out, lse, qv):
    return out, lse if lse is None or qv is None else lse.transpose(-1, -2)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None,
                       virtual_batch_idx=None, return_lse=True):
    """As folio.flash_attn.flash_attn_combine; the LSE is None unless return_lse."""
    refuse(cu_seqlens=cu_seqlens, seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    out, lse = _combine(out_partial, lse_partial, out, out_dtype)
    return out, lse if return_lse else None


def get_scheduler_metadata(
    max_seqlen_q,
    max_seqlen_k,
    nheads,
    nheads_kv,
    headdim,
    num_splits,
    headdim_v=None,
    pack_gqa=None,
    causal=False,
    window_size_left=None,
    window_size_right=None,
    seqlen_k_new=0,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    leftpad_k=None,
    seqlen_k_per_split=None,
):
    """As folio.flash_attn.get_scheduler_metadata, of a step's lengths. No attention of this version takes leftpad_k."""
    refuse(seqlen_k_per_split=seqlen_k_per_split)
    check_hints(pack_gqa, None)
    rules_of(None, causal, (window_size_left, window_size_right), 0.0, num_splits)
    sizes = [(t, less) for t, less in ((cu_seqlens_q, 1), (cu_seqlens_k, 1), (seqused_q, 0), (seqused_k, 0))
             if t is not None]
    if not sizes or len({t.shape[0] - less for t, less in sizes}) != 1:
        raise ValueError("folio.flash_attn: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k: at least one is needed, "
                         "all of one batch")
    tensor, less = sizes[0]
    batch = tensor.shape[0] - less
    require_batch(batch, 0, seqused_q=seqused_q, seqused_k=seqused_k, leftpad_k=leftpad_k)
    require_batch(batch, 1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, cu_seqlens_k_new=cu_seqlens_k_new)
    return metadata_of(tensor, batch, max_seqlen_q, max_seqlen_k + seqlen_k_new, nheads, nheads_kv, headdim, headdim_v)
