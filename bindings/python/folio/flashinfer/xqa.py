"""FlashInfer's XQA functions, which write outputs of the caller's (flashinfer.xqa)."""

import math

import torch

from . import arguments, dense
from .wrapper import scale_up, state_problem


def _times(a, b):
    return a * b if not isinstance(a, torch.Tensor) or not isinstance(b,
                                                                      torch.Tensor) else a.reshape(-1) * b.reshape(-1)


def xqa(q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, num_kv_heads, page_size,
        sinks=None, q_scale=1.0, kv_scale=1.0, sliding_win_size=0, kv_layout="NHD", sm_count=None, enable_pdl=None,
        rcp_out_scale=1.0, q_seq_len=1, mask=None, *, q_cu_seq_lens=None, k_sf_cache=None, v_sf_cache=None):
    """Decodes over page_table [requests, pages] and seq_lens [requests, 1], into output.

    q and output: [requests, 1, heads, head_dim], with drafts [requests, 1, q_seq_len, heads, head_dim], or with
    q_cu_seq_lens [tokens, heads, head_dim]. Logits are q . k * q_scale * kv_scale / sqrt(head_dim), outputs times
    kv_scale and rcp_out_scale. sliding_win_size: keys that a query sees, with its own; 0 is all. mask: uint16 bits over
    drafts. sinks: float32, one a head. Hints: workspace_buffer, semaphores, sm_count, enable_pdl.
    """
    arguments.refuse(arguments.NO_NVFP4, k_sf_cache=k_sf_cache, v_sf_cache=v_sf_cache)
    hnd = arguments.is_hnd(kv_layout)
    cached_heads, tokens = (k_cache.shape[1], k_cache.shape[2]) if hnd else (k_cache.shape[2], k_cache.shape[1])
    if cached_heads != num_kv_heads or tokens != page_size:
        raise ValueError(f"num_kv_heads is {num_kv_heads} and page_size {page_size}; the cache has {cached_heads} and {tokens}")
    if q.dim() != 3 and q.shape[1] != 1:
        raise NotImplementedError(f"q has a beam width of {q.shape[1]}; it is offered with 1")
    if output.shape != q.shape:
        raise ValueError(f"output has shape {tuple(output.shape)}; q has {tuple(q.shape)}")
    flat = q.reshape(-1, *q.shape[-2:])
    head_dim = q.shape[-1]
    problem = state_problem(
        num_qo_heads=q.shape[-2], num_kv_heads=num_kv_heads, head_dim_qk=head_dim, head_dim_vo=v_cache.shape[-1],
        page_size=page_size, causal=True, window_left=sliding_win_size - 1 if sliding_win_size > 0 else -1,
        sm_scale=1.0 / math.sqrt(head_dim), q_data_type=q.dtype, kv_data_type=k_cache.dtype, o_data_type=output.dtype)
    requests = seq_lens.shape[0]
    if mask is not None:
        mask = dense.draft_mask(mask, requests, q_seq_len, q_cu_seq_lens)
    scales = scale_up(problem.scales, q_scale, kv_scale, _times(kv_scale, rcp_out_scale))
    dense.attend(problem, flat, (k_cache, v_cache), hnd, page_table, seq_lens, page_table.shape[-1] * page_size, scales,
                 q_len=q_seq_len, cu_q=q_cu_seq_lens, max_q_len=None if q_cu_seq_lens is None else q_seq_len,
                 out=output, sinks=sinks, mask=mask)


def xqa_mla(q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, page_size, q_scale=1.0,
            kv_scale=1.0, sm_count=None, enable_pdl=None):
    """xqa for MLA: q [requests, 1, heads, 576], k_cache [pages, page_size, 1, 576], v_cache its first 512 components,
    output [requests, 1, heads, 512]. Logits are q . k * q_scale * kv_scale: the softmax's own scale is in q_scale."""
    if k_cache.dim() == 2:  # [tokens, 576]
        k_cache, v_cache = (cache.unflatten(0, (-1, page_size)) for cache in (k_cache, v_cache))
    if k_cache.dim() == 3:
        k_cache, v_cache = k_cache.unsqueeze(2), v_cache.unsqueeze(2)
    dim_v = output.shape[-1]
    if k_cache.shape[1] != page_size or k_cache.shape[2] != 1:
        raise ValueError(f"page_size is {page_size}; the cache is {tuple(k_cache.shape)}")
    flat = q.reshape(-1, *q.shape[-2:])
    problem = state_problem(
        num_qo_heads=q.shape[-2], num_kv_heads=1, head_dim_qk=q.shape[-1], head_dim_vo=dim_v, page_size=page_size,
        causal=True, sm_scale=1.0, q_data_type=q.dtype, kv_data_type=k_cache.dtype, o_data_type=output.dtype)
    dense.attend(problem, flat, (k_cache, v_cache[..., :dim_v]), False, page_table, seq_lens,
                 page_table.shape[-1] * page_size, scale_up(problem.scales, q_scale, kv_scale, kv_scale), q_len=1,
                 out=output)
