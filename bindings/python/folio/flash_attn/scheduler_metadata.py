"""get_scheduler_metadata: FlashAttention's way to plan a step ahead of its layers.

Folio plans a step in its first layer's call, and the others find the plan. So the metadata holds no schedule. It says
what it was made for, in a tensor that engines may copy, slice and hand on like the original's.
"""

import torch

from .arguments import check_hints, lengths, rules_of


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """An int32 tensor [8] on the lengths' device: batch and sizes of the step. It waits for nothing.

    Arguments are checked as the attention call checks them. The call that gets the result needs it for nothing.
    """
    check_hints(pack_gqa, None)
    rules_of(None, causal, window_size, 0.0, num_splits, sm_margin, attention_chunk)
    require_batch(batch_size, 0, cache_seqlens=cache_seqlens, cache_leftpad=cache_leftpad)
    require_batch(batch_size, 1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
    if page_size is not None and page_size < 1:
        raise ValueError(f"folio.flash_attn: page_size is {page_size}; it is None or a number of tokens")
    return metadata_of(cache_seqlens, batch_size, max_seqlen_q, max_seqlen_k + max_seqlen_k_new, num_heads_q,
                       num_heads_kv, headdim, headdim_v)


def require_batch(batch, more, **given):
    for name, tensor in given.items():
        if tensor is not None:
            lengths(tensor, name, batch + more, tensor.device)


def metadata_of(lengths, batch, max_seqlen_q, max_seqlen_k, heads, kv_heads, headdim, headdim_v):
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"folio.flash_attn: num_heads_q is {heads}; a multiple of num_heads_kv {kv_heads} is needed")
    facts = [1, batch, max_seqlen_q, max_seqlen_k, heads, kv_heads, headdim, headdim if headdim_v is None else headdim_v]
    return torch.tensor(facts, dtype=torch.int32).to(lengths.device, non_blocking=True)
