"""Attention over a dense page table and lengths, without a plan of the caller's: the functions that FlashInfer names
after TensorRT-LLM and XQA.

Each call plans anew, because nothing says whether lengths have changed. On a GPU lengths stay there: the call waits for
nothing, and a CUDA graph may capture it with the plan inside, once it has run outside. The caller's largest lengths
bound the plan; a request beyond them gets zeros, and a later call raises.

Masks of drafts are planned from lengths on the host: on a GPU such a call reads them back, and no graph captures it.
"""

import collections
import threading

import numpy as np
import torch

from .. import _folio as folio
from . import arguments
from .plans import Batch, Bounds, Plans, current_stream, device_of, rounded_bound
from .wrapper import check_lens, lse_of, rows_of, scale_up, state_problem

MAX_KINDS = 16


class _Kept(threading.local):
    """A thread's plan buffers and workspaces, by what they are for; those that graphs captured stay."""

    def __init__(self):
        self.eager = collections.OrderedDict()
        self.captured = {}


_kept = _Kept()


def _plans_of(device, kind, bounds):
    key = (device, kind, bounds)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if key not in _kept.captured:
            stream = next((at for at in _kept.eager if at[:3] == key), None)
            if stream is None:
                raise folio.InvalidArgument("this call would allocate inside of a CUDA graph: make it once with the same "
                                            "shapes before the capture")
            _kept.captured[key] = _kept.eager.pop(stream)
        return _kept.captured[key]
    key += (current_stream(device),)
    plans = _kept.eager.get(key)
    if plans is None:
        plans = _kept.eager[key] = Plans(device)
        if len(_kept.eager) > MAX_KINDS:
            _kept.eager.popitem(last=False)
    _kept.eager.move_to_end(key)
    return plans


def _int32(lengths, device):
    """Lengths of any integer type, uint32 too, as int32 on the device."""
    if lengths.dtype == torch.uint32:
        lengths = lengths.view(torch.int32)
    return lengths.reshape(-1).to(device=device, dtype=torch.int32)


def attend(problem, query, cache, hnd, tables, seq_lens, max_seq_len, scales, *, q_len=None, cu_q=None, max_q_len=None,
           out=None, lse=None, return_lse=False, sinks=None, mask=None, base="two"):
    """Attention over pages tables [requests, columns].

    query: [tokens, heads, head_dim]; q_len a request, or offsets cu_q with the largest, max_q_len. mask: a bool
    [drafts, drafts] a request, over its last tokens. sinks: float32 [heads], or a list of one such tensor. Returns out,
    or (out, lse).
    """
    device = device_of(query)
    requests = seq_lens.shape[0]
    tokens, heads, _ = query.shape
    if tables.dim() != 2 or tables.shape[0] != requests:
        raise ValueError(f"block_tables has shape {tuple(tables.shape)}; it is [{requests}, pages] for {requests} seq_lens")
    if cu_q is None and tokens != requests * q_len:
        raise ValueError(f"query has {tokens} rows; {requests} requests of {q_len} queries have {requests * q_len}")
    if cu_q is not None and len(cu_q) != requests + 1:
        raise ValueError(f"cum_seq_lens_q has {len(cu_q)} entries; {requests} seq_lens need {requests + 1}")
    longest = int(q_len if max_q_len is None else max_q_len)
    most = min(int(max_seq_len), tables.shape[1] * problem.kind.page_size)
    kind = problem.kind
    if sinks is not None:
        if isinstance(sinks, (list, tuple)):
            if len(sinks) != 1:
                raise ValueError(f"sinks is a list of {len(sinks)} tensors; it is one tensor, or a list of one")
            sinks = sinks[0]
        sinks = arguments.plain(sinks).reshape(-1)
        kind = problem.with_sinks().kind
    if mask is not None:
        kind = kind._replace(mask="custom")
    if device.type == "cpu" or mask is not None:
        lens, offsets = arguments.to_host(_int32(seq_lens, device), None if cu_q is None else _int32(cu_q, device))
        if (lens > most).any():
            raise ValueError(f"max_seq_len is {max_seq_len} and block_tables holds {tables.shape[1]} pages; request "
                             f"{int(lens.argmax())} has {lens.max()} keys")
        offsets = rows_of([q_len] * requests) if cu_q is None else offsets
        bounds = None
    else:
        lens = _int32(seq_lens, device)
        offsets = (torch.arange(0, (requests + 1) * q_len, q_len, dtype=torch.int32, device=device) if cu_q is None
                   else _int32(cu_q, device))
        bounds = Bounds(requests, tokens, longest, rounded_bound(most))
    plans = _plans_of(device, kind, bounds)
    table = folio.dense_table(tables if tables.dtype == torch.int32 else tables.to(torch.int32))
    bits = tail = None
    if mask is not None:
        bits = torch.cat([arguments.pack_bits(one) for one in mask]
                         or [torch.empty(0, dtype=torch.uint8, device=device)])
        tail = np.array([len(one) for one in mask], np.int32)
    plans.begin(Batch(offsets, [folio.KvSegment(lens)], [table], tokens, max_q_len=longest if bounds else 0,
                      max_kv_len=bounds.max_kv_len if bounds else 0, bounds=bounds, mask_tail=tail))
    if out is None:
        out = torch.empty((tokens, heads, kind.head_dim_v), dtype=kind.out, device=query.device)
    wanted = None
    if return_lse or lse is not None:
        lse, wanted = lse_of(lse, "NH", tokens, heads, query.device)
    plans.run(kind, scales, query, out.view(tokens, heads, kind.head_dim_v), wanted, cache, hnd=hnd, mask=bits,
              sinks=sinks, base=base)
    plans.forget_layers()
    return (out, lse) if return_lse else out


def split_cache(kv_cache, hnd):
    """K and V of a pair, or of one tensor [pages, 1 or 2, ...], where 1 means that both are the same."""
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 5 and kv_cache.shape[1] == 1:
        return kv_cache[:, 0], kv_cache[:, 0]
    return arguments.split_cache(kv_cache, hnd)


def _problem(query, cache, hnd, out, out_dtype, window_left, causal=True):
    k, v = cache
    if isinstance(out_dtype, str) and out_dtype == "nvfp4" or out is not None and not isinstance(out, torch.Tensor):
        raise NotImplementedError("out_dtype is nvfp4; these functions write outputs of 8, 16 and 32 bits")
    dtype = out.dtype if out is not None else arguments.torch_dtype(out_dtype, query.dtype)
    if out is not None and out_dtype is not None and arguments.torch_dtype(out_dtype) != dtype:
        raise ValueError(f"out_dtype is {out_dtype}; out is {dtype}")
    return state_problem(num_qo_heads=query.shape[-2], num_kv_heads=k.shape[1] if hnd else k.shape[2],
                         head_dim_qk=query.shape[-1], head_dim_vo=v.shape[-1], page_size=k.shape[2] if hnd
                         else k.shape[1], causal=causal, window_left=window_left, sm_scale=1.0, q_data_type=query.dtype,
                         kv_data_type=k.dtype, o_data_type=dtype)


def _scales(problem, bmm1_scale, bmm2_scale):
    """bmm1_scale is all that q . k is multiplied by, bmm2_scale all that outputs are."""
    return scale_up(problem.scales, bmm1_scale, None, bmm2_scale)


def draft_mask(mask, requests, q_len, cu_q=None):
    """Bools [drafts, drafts] of each request, of XQA's bits: uint16, the first bit lowest, rows of whole 32 bits. With
    offsets cu_q, drafts of any numbers up to q_len: on a GPU the offsets are read back."""
    if mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError("mask is given inside of a CUDA graph, which is not offered: masks of drafts are planned "
                                  "from lengths on the host")
    width = (q_len + 31) // 32 * 2
    words = mask.reshape(-1, mask.shape[-1])
    lens = [q_len] * requests if cu_q is None else np.diff(arguments.to_host(_int32(cu_q, cu_q.device))[0]).tolist()
    if words.dtype != torch.uint16 or words.shape != (sum(lens), width):
        raise ValueError(f"mask is {mask.dtype} {tuple(mask.shape)}; it is torch.uint16 with {sum(lens)} rows of {width}")
    bits = words.to(torch.int32).unsqueeze(-1) >> torch.arange(16, dtype=torch.int32, device=mask.device)
    rows = (bits & 1).bool().flatten(-2)
    return [part[:, :n] for part, n in zip(rows.split(lens), lens)]


def trtllm_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
        window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND",
        enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None,
        skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None,
        return_lse=False, bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False,
        cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, bf16q_fp8kv_transform_mode=None, request_order=None,
        request_order_plan=None):
    """Decodes over block_tables [requests, pages], of seq_lens keys, max_seq_len at most.

    query: [requests * q_len_per_req, heads, head_dim], or any numbers with cum_seq_lens_q and max_q_len. kv_cache: (k,
    v), or one tensor [pages, 1 or 2, ...]. bmm1_scale multiplies logits, with 1 / sqrt(head_dim) and all else;
    bmm2_scale outputs. sinks: float32 [heads]. mask: bits over a request's drafts. lse: base 2, [tokens, heads].
    Hints: workspace_buffer, multi_ctas_kv_counter_buffer, enable_pdl, backend, bf16q_fp8kv_transform_mode,
    request_order, request_order_plan, and o_scale, which the original multiplies and divides by.
    """
    arguments.check_backend(backend)
    if bf16q_fp8kv_transform_mode not in (None, "k_only", "separate_kv"):
        raise ValueError(f"bf16q_fp8kv_transform_mode is {bf16q_fp8kv_transform_mode!r}; it is k_only or separate_kv")
    arguments.refuse(arguments.NO_SKIP, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
    arguments.refuse(arguments.NO_NVFP4, kv_cache_sf=kv_cache_sf, o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size)
    arguments.refuse("keys and values have one table", uses_shared_paged_kv_idx=not uses_shared_paged_kv_idx)
    arguments.refuse("heads have one table", enable_block_sparse_attention=enable_block_sparse_attention)
    arguments.refuse("shards of a context are KvSegment's in folio", causal_seqlens_kv_global=causal_seqlens_kv_global,
                     cp_world=cp_world != 1 or None, cp_rank=cp_rank != 0 or None)
    hnd = arguments.is_hnd(kv_layout)
    cache = split_cache(kv_cache, hnd)
    problem = _problem(query, cache, hnd, out, out_dtype, window_left)
    if bmm1_scale_log2 is not None:
        bmm1_scale = bmm1_scale_log2 * float(np.log(2.0))
    q_len = q_len_per_req or 1
    if (cum_seq_lens_q is None) != (max_q_len is None):
        raise ValueError("cum_seq_lens_q and max_q_len are given together")
    if mask is not None:
        mask = draft_mask(mask, seq_lens.shape[0], max_q_len or q_len, cum_seq_lens_q)
    flat = query.reshape(-1, *query.shape[-2:])
    result = attend(problem, flat, cache, hnd, block_tables, seq_lens, max_seq_len,
                    _scales(problem, bmm1_scale, bmm2_scale), q_len=q_len, cu_q=cum_seq_lens_q, max_q_len=max_q_len,
                    out=out, lse=lse, return_lse=return_lse, sinks=sinks, mask=mask)
    if out is None and query.dim() != 3:
        shape = (*query.shape[:-1], problem.kind.head_dim_v)
        return (result[0].view(shape), result[1]) if return_lse else result.view(shape)
    return result


def xqa_batch_decode_with_kv_cache(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len,
                                   bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None, sinks=None,
                                   kv_layout="NHD", enable_pdl=None, q_len_per_req=1, o_scale=1.0, mask=None,
                                   kv_cache_sf=None, q_cu_seq_lens=None):
    """trtllm_batch_decode_with_kv_cache with XQA's defaults. q_cu_seq_lens: offsets of drafts of any numbers, up to
    q_len_per_req."""
    return trtllm_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left,
        out, sinks=sinks, kv_layout=kv_layout, enable_pdl=enable_pdl, q_len_per_req=q_len_per_req, o_scale=o_scale,
        mask=mask, kv_cache_sf=kv_cache_sf, cum_seq_lens_q=q_cu_seq_lens, max_q_len=None if q_cu_seq_lens is None
        else q_len_per_req)


def trtllm_batch_context_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
        batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None,
        o_sf_vec_size=None, kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True, lse=None,
        return_lse=False, multi_ctas_kv_counter_buffer=None, use_fp16_softmax=None, uses_spcompress=None,
        backend="trtllm-gen"):
    """Prefills over block_tables [batch_size, pages]: query [tokens, heads, head_dim], request r's rows from
    cum_seq_lens_q[r] on. The rest is trtllm_batch_decode_with_kv_cache's. cum_seq_lens_kv repeats seq_lens and is not
    read; use_fp16_softmax is a permission that nothing here needs."""
    arguments.check_backend(backend)
    arguments.refuse(arguments.NO_SKIP, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                     uses_spcompress=uses_spcompress)
    arguments.refuse(arguments.NO_NVFP4, kv_cache_sf=kv_cache_sf, o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size)
    arguments.refuse("keys and values have one table", uses_shared_paged_kv_idx=not uses_shared_paged_kv_idx)
    if seq_lens.shape[0] != batch_size:
        raise ValueError(f"batch_size is {batch_size}; seq_lens has {seq_lens.shape[0]} entries")
    hnd = arguments.is_hnd(kv_layout)
    cache = split_cache(kv_cache, hnd)
    problem = _problem(query, cache, hnd, out, out_dtype, window_left, causal)
    return attend(problem, query, cache, hnd, block_tables, seq_lens, max_kv_len,
                  _scales(problem, bmm1_scale, bmm2_scale), cu_q=cum_seq_lens_q, max_q_len=max_q_len, out=out, lse=lse,
                  return_lse=return_lse, sinks=sinks)


def _check_mirror(name, lens, requests, rows, most):
    """Lengths that repeat others on a CPU, against what they must add up to."""
    if lens is None:
        return
    lens = arguments.to_host(lens)[0]
    if lens.shape != (requests,) or lens.sum() != rows or lens.max(initial=0) > most:
        raise ValueError(f"{name} has {len(lens)} entries that add up to {lens.sum()}, {lens.max(initial=0)} at most; "
                         f"there are {requests} requests, {rows} rows and at most {most} a request")


def trtllm_ragged_attention_deepseek(
        query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale,
        batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse,
        attention_sinks=None, skip_softmax_threshold_scale_factor=None, out=None, lse=None,
        sage_attn_sfs=(None, None, None, None), num_elts_per_sage_attn_blk=(0, 0, 0, 0), backend="trtllm-gen",
        q_seq_lens_cpu=None, kv_seq_lens_cpu=None, use_fp16_softmax=None, uses_spcompress=None,
        skip_all_rows_active_check=True):
    """Prefills over ragged keys [kv tokens, kv heads, head_dim_qk] and values, as DeepSeek's without absorption:
    request r's rows of q and k begin at cum_seq_lens_q[r] and cum_seq_lens_kv[r]. Lengths on a GPU stay there.
    q_seq_lens_cpu and kv_seq_lens_cpu repeat them and are held against the rows of query and key. seq_lens repeats those
    of keys, and is read on a CPU alone. o_sf_scale must be 1 or less, none; skip_all_rows_active_check is a hint."""
    arguments.check_backend(backend)
    arguments.refuse(arguments.NO_SKIP, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                     uses_spcompress=uses_spcompress)
    if any(each is not None for each in sage_attn_sfs) or any(num_elts_per_sage_attn_blk):
        raise NotImplementedError("sage_attn_sfs is given; block scales of q, k and v are not read here")
    if o_sf_scale is not None and o_sf_scale > 0 and o_sf_scale != 1.0:
        raise NotImplementedError(f"o_sf_scale is {o_sf_scale}; NVFP4 outputs are not written here")
    device = device_of(query)
    for name, offsets in (("cum_seq_lens_q", cum_seq_lens_q), ("cum_seq_lens_kv", cum_seq_lens_kv)):
        if len(offsets) != batch_size + 1:
            raise ValueError(f"{name} has {len(offsets)} entries; batch_size is {batch_size}")
    _check_mirror("q_seq_lens_cpu", q_seq_lens_cpu, batch_size, query.shape[0], max_q_len)
    _check_mirror("kv_seq_lens_cpu", kv_seq_lens_cpu, batch_size, key.shape[0], max_kv_len)
    problem = state_problem(
        num_qo_heads=query.shape[1], num_kv_heads=key.shape[1], head_dim_qk=query.shape[2], head_dim_vo=value.shape[2],
        causal=is_causal, window_left=window_left, sm_scale=1.0, q_data_type=query.dtype, kv_data_type=key.dtype,
        ragged=True, o_data_type=out.dtype if out is not None else torch.bfloat16 if query.dtype.itemsize == 1
        else query.dtype)
    kind = problem.kind
    tokens, heads, _ = query.shape
    if attention_sinks is not None:
        kind, attention_sinks = problem.with_sinks().kind, arguments.plain(attention_sinks).reshape(-1)
    offsets = _int32(cum_seq_lens_kv, device)
    if device.type == "cpu":
        host_q, host_kv, host_lens = arguments.to_host(cum_seq_lens_q, cum_seq_lens_kv, seq_lens)
        check_lens("seq_lens", host_lens, np.diff(host_kv), "cum_seq_lens_kv makes")
        batch = Batch(host_q, [folio.KvSegment(np.diff(host_kv), source="ragged")], [offsets], tokens)
    else:
        bounds = Bounds(batch_size, tokens, int(max_q_len), rounded_bound(max_kv_len))
        batch = Batch(_int32(cum_seq_lens_q, device), [folio.KvSegment(offsets.diff(), source="ragged")], [offsets],
                      tokens, max_q_len=int(max_q_len), max_kv_len=bounds.max_kv_len, bounds=bounds)
    plans = _plans_of(device, kind, batch.bounds)
    plans.begin(batch)
    if out is None:
        out = torch.empty((tokens, heads, kind.head_dim_v), dtype=kind.out, device=query.device)
    wanted = None
    if return_lse or lse is not None:
        lse, wanted = lse_of(lse, "NH", tokens, heads, query.device)
    plans.run(kind, _scales(problem, bmm1_scale, bmm2_scale), query, out, wanted, ragged=(key, value),
              sinks=attention_sinks)
    plans.forget_layers()
    return (out, lse) if return_lse else out
