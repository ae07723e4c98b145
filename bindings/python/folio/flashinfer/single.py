"""Attention of one sequence: `single_decode_with_kv_cache` and `single_prefill_with_kv_cache`.

Both have no plan. Here the plan is kept with the lengths that it was made for, so that a model's layers share it.
"""

import collections
import threading

import numpy as np
import torch

from .. import _folio as folio
from . import arguments
from .plans import Batch, Plans, current_stream, device_of
from .wrapper import LOG2_E, dequantized_queries, lse_of, rows_of, scale_up, state_problem

MAX_SHAPES = 32


class _Shapes(threading.local):
    """A thread's plans, by the lengths and the stream that they are for."""

    def __init__(self):
        self.plans = collections.OrderedDict()
        self.captured = {}  # what CUDA graphs read stays, and is not run outside of them


_shapes = _Shapes()


def _plans_of(device, qo_len, kv_len, far):
    shape = (device, qo_len, kv_len, far)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if shape not in _shapes.captured:
            made = next((key for key in _shapes.plans if key[:4] == shape), None)
            if made is None:
                raise folio.InvalidArgument("this call would be planned inside of a CUDA graph: make it once with the same "
                                            "shapes before the capture")
            _shapes.captured[shape] = _shapes.plans.pop(made)
        return _shapes.captured[shape]
    key = (*shape, current_stream(device))
    plans = _shapes.plans.get(key)
    if plans is not None:
        _shapes.plans.move_to_end(key)
        return plans
    plans = Plans(device)
    q_first_pos = np.array([kv_len], np.int32) if far else None
    cu_q, kv_lens = rows_of([qo_len]), np.array([kv_len], np.int32)
    offsets = arguments.on_device(rows_of([kv_len]), device)
    plans.begin(Batch(cu_q, [folio.KvSegment(kv_lens, source="ragged")], [offsets], qo_len, q_first_pos))
    _shapes.plans[key] = plans
    if len(_shapes.plans) > MAX_SHAPES:
        _shapes.plans.popitem(last=False)
    return plans


def _attend(problem, q, k, v, scales, return_lse, mask=None, hnd=False):
    """q [qo_len, heads, dim]; k, v of the layout. out, or (out, lse)."""
    device = device_of(q)
    k, v = arguments.token_major(k, hnd), arguments.token_major(v, hnd)
    kind = problem.kind
    out = torch.empty((*q.shape[:2], kind.head_dim_v), dtype=kind.out, device=q.device)
    lse, wanted = lse_of(None, "NH", q.shape[0], q.shape[1], q.device) if return_lse else (None, None)
    slopes = arguments.alibi_slopes(q.shape[1], q.device) if problem.alibi else None
    plans = _plans_of(device, q.shape[0], k.shape[0], problem.far_queries)
    plans.run(kind, scales, q, out, wanted, ragged=(k, v), mask=mask, slopes=slopes)
    if return_lse and problem.alibi:
        first = k.shape[0] if problem.far_queries else k.shape[0] - q.shape[0]
        lse += slopes * (first * LOG2_E)
    return (out, lse) if return_lse else out


def _heads(k, hnd):
    return k.shape[0] if hnd else k.shape[1]


def single_decode_with_kv_cache(q, k, v, kv_layout="NHD", pos_encoding_mode="NONE", use_tensor_cores=False,
                                q_scale=None, k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None,
                                sm_scale=None, rope_scale=None, rope_theta=None, return_lse=False):
    """One query of one sequence.

    q: [heads, head_dim]. k, v: [kv_len, kv heads, head_dim], or with HND heads first. Returns out [heads, head_dim];
    with return_lse (out, lse [heads], base 2). use_tensor_cores is a hint.
    """
    hnd = arguments.is_hnd(kv_layout)
    if q.dim() != 2:
        raise ValueError(f"q has shape {tuple(q.shape)}; it is [heads, head_dim]")
    problem = state_problem(
        num_qo_heads=q.shape[0], num_kv_heads=_heads(k, hnd), head_dim_qk=q.shape[1], head_dim_vo=v.shape[-1],
        causal=True, pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q.dtype, kv_data_type=k.dtype,
        one_query=True, ragged=True)
    result = _attend(problem, q.unsqueeze(0), k, v, scale_up(problem.scales, q_scale, k_scale, v_scale), return_lse,
                     hnd=hnd)
    return tuple(each.squeeze(0) for each in result) if return_lse else result.squeeze(0)


def single_prefill_with_kv_cache(q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None,
                                 packed_custom_mask=None, causal=False, kv_layout="NHD", pos_encoding_mode="NONE",
                                 use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
                                 rope_scale=None, rope_theta=None, backend="auto", return_lse=False, kv_cache_sf=None,
                                 k_scale=None, v_scale=None):
    """Several queries of one sequence, its last tokens.

    q: [qo_len, heads, head_dim]. k, v: [kv_len, kv heads, head_dim], or with HND heads first. scale_q, scale_k,
    scale_v: float32 [heads] of fp8 tensors. custom_mask: bool [qo_len, kv_len], in place of causal; packed_custom_mask:
    its bits, the first one lowest. Returns out [qo_len, heads, head_dim]; with return_lse (out, lse [qo_len, heads],
    base 2). use_fp16_qk_reduction is a permission that nothing here needs; backend is a hint.
    """
    arguments.check_backend(backend)
    arguments.refuse(arguments.NO_NVFP4, kv_cache_sf=kv_cache_sf)
    hnd = arguments.is_hnd(kv_layout)
    if q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; it is [qo_len, heads, head_dim]")
    kv_len = k.shape[1] if hnd else k.shape[0]
    mask = mask_bits(custom_mask, packed_custom_mask, [q.shape[0] * kv_len])
    q, scale_q = dequantized_queries(q, scale_q, _heads(k, hnd))
    out_type = o_dtype or (torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
    problem = state_problem(
        num_qo_heads=q.shape[1], num_kv_heads=_heads(k, hnd), head_dim_qk=q.shape[2], head_dim_vo=v.shape[-1],
        causal=causal, custom_mask=mask is not None, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
        logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        q_data_type=q.dtype, kv_data_type=k.dtype, o_data_type=out_type, ragged=True)
    scales = scale_up(problem.scales, scale_q, _both(scale_k, k_scale), _both(scale_v, v_scale))
    return _attend(problem, q, k, v, scales, return_lse, mask, hnd)


def single_prefill_with_kv_cache_return_lse(*args, **kwargs):
    """single_prefill_with_kv_cache with return_lse=True."""
    return single_prefill_with_kv_cache(*args, **{**kwargs, "return_lse": True})


def _both(a, b):
    return b if a is None else a if b is None else a * b


def mask_bits(custom_mask, packed_custom_mask, lengths):
    """The bits of a batch's custom masks, or None. lengths: entries of each request. Packed bits come before bools."""
    if packed_custom_mask is not None:
        needed = sum((n + 7) // 8 for n in lengths)
        if packed_custom_mask.dtype != torch.uint8 or packed_custom_mask.numel() < needed:
            raise ValueError(f"packed_custom_mask is {packed_custom_mask.dtype} with {packed_custom_mask.numel()} entries; "
                             f"the batch needs {needed} of torch.uint8")
        return packed_custom_mask.reshape(-1)[:needed]
    if custom_mask is None:
        return None
    if custom_mask.dtype.is_floating_point:  # one that is added to logits means the opposite
        raise ValueError(f"custom_mask is {custom_mask.dtype}; it is bool, true where a key is visible")
    if len(lengths) == 1:
        if custom_mask.numel() != lengths[0]:
            raise ValueError(f"custom_mask has {custom_mask.numel()} entries; the batch needs {lengths[0]}")
        return arguments.pack_bits(custom_mask)
    return arguments.pack_segments(custom_mask, lengths)[0]
