"""Rotary embeddings (flashinfer.rope), in torch's operators: float32 arithmetic, one rounding.

q: [tokens, heads, head_dim], k: [tokens, kv heads, head_dim]. The first rotary_dim components are turned: halves
against each other, or with interleave neighbours. The functions that end in _inplace write q and k.
"""

import math

import torch

from . import page


def _turn(x, cos, sin, rotary_dim, interleave, out=None):
    """x [tokens, heads, dim] turned by angles [tokens, rotary_dim / 2], into `out` or a new tensor."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    part = x[..., :rotary_dim].to(torch.float32)
    if interleave:
        first, second = part[..., 0::2], part[..., 1::2]
    else:
        first, second = part.chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(turned, -1).flatten(-2) if interleave else torch.cat(turned, -1)
    if out is None:
        return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), -1)
    out[..., :rotary_dim].copy_(turned)
    return out


def _frequencies(rotary_dim, rope_theta, device):
    return rope_theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim)


def _llama31(frequencies, rope_scale, low_freq_factor, high_freq_factor, old_context_len):
    """Llama 3.1: long waves are slowed down, short ones are not, those between are mixed."""
    turns = frequencies * (old_context_len / (2 * math.pi))
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope_scale)


def _positions(indptr, offsets, tokens):
    """offsets[r] + i for the i-th token of request r."""
    at = torch.arange(tokens, dtype=torch.int32, device=indptr.device)
    row = torch.searchsorted(indptr[1:].contiguous().to(torch.int32), at,
                             right=True).clamp(max=max(len(offsets) - 1, 0))
    return at - indptr[row] + offsets[row]


def _apply(q, k, positions, rotary_dim, interleave, frequencies, in_place):
    rotary_dim = q.shape[-1] if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= q.shape[-1]:
        raise ValueError(f"rotary_dim is {rotary_dim}; it must be even, and at most head_dim, {q.shape[-1]}")
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies(rotary_dim)
    cos, sin = angles.cos(), angles.sin()
    return tuple(_turn(x, cos, sin, rotary_dim, interleave, x if in_place else None) for x in (q, k))


def _plain(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, in_place):
    return _apply(q, k, positions, rotary_dim, interleave,
                  lambda dim: _frequencies(dim, rope_theta, q.device) / rope_scale, in_place)


def _of_llama31(q, k, positions, rotary_dim, interleave, rope_scale, rope_theta, low, high, old, in_place):
    return _apply(q, k, positions, rotary_dim, interleave,
                  lambda dim: _llama31(_frequencies(dim, rope_theta, q.device), rope_scale, low, high, old), in_place)


def apply_rope(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """(q, k) turned. Request r has the tokens from indptr[r] on, at positions from offsets[r] on; rope_scale divides
    positions."""
    return _plain(q, k, _positions(indptr, offsets, len(q)), rotary_dim, interleave, rope_scale, rope_theta, False)


def apply_rope_inplace(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """apply_rope in place."""
    _plain(q, k, _positions(indptr, offsets, len(q)), rotary_dim, interleave, rope_scale, rope_theta, True)


def apply_rope_pos_ids(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """(q, k) turned; pos_ids [tokens]."""
    return _plain(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, False)


def apply_rope_pos_ids_inplace(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """apply_rope_pos_ids in place."""
    _plain(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, True)


def apply_llama31_rope(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5,
                       low_freq_factor=1, high_freq_factor=4, old_context_len=8192):
    """apply_rope with Llama 3.1's frequencies."""
    return _of_llama31(q, k, _positions(indptr, offsets, len(q)), rotary_dim, interleave, rope_scale, rope_theta,
                       low_freq_factor, high_freq_factor, old_context_len, False)


def apply_llama31_rope_inplace(q, k, indptr, offsets, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5,
                               low_freq_factor=1, high_freq_factor=4, old_context_len=8192):
    """apply_llama31_rope in place."""
    _of_llama31(q, k, _positions(indptr, offsets, len(q)), rotary_dim, interleave, rope_scale, rope_theta,
                low_freq_factor, high_freq_factor, old_context_len, True)


def apply_llama31_rope_pos_ids(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5,
                               low_freq_factor=1, high_freq_factor=4, old_context_len=8192):
    """apply_rope_pos_ids with Llama 3.1's frequencies."""
    return _of_llama31(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor,
                       old_context_len, False)


def apply_llama31_rope_pos_ids_inplace(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=8, rope_theta=5e5,
                                       low_freq_factor=1, high_freq_factor=4, old_context_len=8192):
    """apply_llama31_rope_pos_ids in place."""
    _of_llama31(q, k, pos_ids, rotary_dim, interleave, rope_scale, rope_theta, low_freq_factor, high_freq_factor,
                old_context_len, True)


def _with_cache(positions, query, key, head_size, cos_sin_cache, is_neox, in_place):
    cos, sin = _angles(cos_sin_cache, positions)
    rotary_dim = cos_sin_cache.shape[-1]
    results = []
    for x in (query, key):
        heads = x.unflatten(-1, (-1, head_size)) if x.dim() == 2 else x
        out = _turn(heads, cos, sin, rotary_dim, not is_neox, heads if in_place else None)
        results.append(x if in_place else out.reshape(x.shape))
    return tuple(results)


def apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    """(query, key) turned, each [tokens, heads * head_size]. cos_sin_cache: float32 [positions, rotary_dim], cosines in
    front of sines. is_neox: halves against each other."""
    return _with_cache(positions, query, key, head_size, cos_sin_cache, is_neox, False)


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    """apply_rope_with_cos_sin_cache in place."""
    _with_cache(positions, query, key, head_size, cos_sin_cache, is_neox, True)


def _quantized(x, dtype, scale, out):
    """x * scale in fp8, saturated."""
    limit = torch.finfo(dtype).max
    stored = (x.to(torch.float32) * scale).clamp(-limit, limit).to(dtype)
    return stored if out is None else out.copy_(stored)


def _turn_halves(rope, nope, cos, sin, is_neox, dtype, scale, rope_out, nope_out):
    """The turned and the other components of q or k, in fp8; k of MLA has no dimension of heads."""
    heads = rope if rope.dim() == 3 else rope.unsqueeze(1)
    turned = _turn(heads.to(torch.float32), cos, sin, rope.shape[-1], not is_neox).reshape(rope.shape)
    if nope is None:
        nope = rope.new_empty((*rope.shape[:-1], 0))
    return _quantized(turned, dtype, scale, rope_out), _quantized(nope, dtype, scale, nope_out)


def _fp8_of(quantize_dtype, *outs):
    dtype = quantize_dtype or next((out.dtype for out in outs if out is not None), torch.float8_e4m3fn)
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"quantize_dtype is {dtype}; it must be torch.float8_e4m3fn or torch.float8_e5m2")
    return dtype


def _angles(cos_sin_cache, pos_ids):
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError(f"cos_sin_cache should be float32, got {cos_sin_cache.dtype}")
    return cos_sin_cache[pos_ids.long()].chunk(2, -1)


def rope_quantize_fp8(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None,
                      quant_scale_q=1.0, quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None, q_nope_out=None,
                      k_nope_out=None, enable_pdl=False, backend="cuda"):
    """(q_rope, k_rope, q_nope, k_nope) in fp8, times their scales; the first two are turned before.

    q: [tokens, heads, .]; k: [tokens, kv heads, .], or [tokens, .] of MLA. The parts that are not turned may be None.
    quantize_dtype: that of the outputs that are given, else e4m3. enable_pdl and backend are hints.
    """
    if backend not in ("cuda", "cutile"):
        raise ValueError(f"Unsupported backend for rope_quantize_fp8: {backend!r}; expected 'cuda' or 'cutile'.")
    cos, sin = _angles(cos_sin_cache, pos_ids)
    dtype = _fp8_of(quantize_dtype, q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    q = _turn_halves(q_rope, q_nope, cos, sin, is_neox, dtype, quant_scale_q, q_rope_out, q_nope_out)
    k = _turn_halves(k_rope, k_nope, cos, sin, is_neox, dtype, quant_scale_kv, k_rope_out, k_nope_out)
    return q[0], k[0], q[1], k[1]


def mla_rope_quantize_fp8(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=True, quantize_dtype=None,
                          quant_scale_q=1.0, quant_scale_kv=1.0, q_rope_out=None, k_rope_out=None, q_nope_out=None,
                          k_nope_out=None, enable_pdl=False):
    """rope_quantize_fp8 by an earlier name."""
    return rope_quantize_fp8(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype,
                             quant_scale_q, quant_scale_kv, q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl)


def rope_quantize_fp8_append_paged_kv_cache(
        q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, paged_kv_cache, kv_indices, kv_indptr, batch_indices,
        positions, is_neox=True, quantize_dtype=None, quant_scale_q=1.0, quant_scale_kv=1.0, page_size=16,
        kv_layout="NHD", q_rope_out=None, q_nope_out=None, enable_pdl=False):
    """rope_quantize_fp8, whose keys go to their requests' pages, with v [tokens, kv heads, head_dim] times
    quant_scale_kv.

    paged_kv_cache: (k, v) of fp8, a key being its turned components in front of the others; or of MLA, where v is None,
    (ckv, kpe). Returns (q_rope, q_nope). Negative positions are left out. enable_pdl is a hint.
    """
    cos, sin = _angles(cos_sin_cache, pos_ids)
    dtype = _fp8_of(quantize_dtype, q_rope_out, q_nope_out)
    if len(paged_kv_cache) != 2 or any(cache.dtype != dtype for cache in paged_kv_cache):
        raise ValueError(f"paged_kv_cache must be two tensors of {dtype}")
    mla = k_rope.dim() == 2
    if mla != (v is None):
        raise ValueError("v is given for MLA, or missing for other attention")
    tokens_at = 2 if kv_layout == "HND" and not mla else 1
    if paged_kv_cache[0].shape[tokens_at] != page_size:
        raise ValueError(f"page_size is {page_size}; the cache has pages of {paged_kv_cache[0].shape[tokens_at]}")
    q = _turn_halves(q_rope, q_nope, cos, sin, is_neox, dtype, quant_scale_q, q_rope_out, q_nope_out)
    turned, others = _turn_halves(k_rope, k_nope, cos, sin, is_neox, dtype, quant_scale_kv, None, None)
    place = batch_indices, positions
    if mla:
        page.append_paged_mla_kv_cache(others, turned, *place, *paged_kv_cache, kv_indices, kv_indptr, None)
    else:
        keys = torch.cat((turned.view(torch.uint8), others.view(torch.uint8)), -1).view(dtype)
        page.append_paged_kv_cache(keys, _quantized(v, dtype, quant_scale_kv, None), *place, tuple(paged_kv_cache),
                                   kv_indices, kv_indptr, None, kv_layout)
    return q
