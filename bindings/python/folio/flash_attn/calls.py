"""What all versions' functions come down to: one call for each way in which keys lie."""

import torch
import torch.nn.functional as F

from . import lengths
from .absorbed import absorb
from .arguments import plain, require_tensor, whole
from .attend import attend, remember_nothing
from .new_tokens import NewKv


def dense(q, k, v, rules, arrays, qv=None, with_lse=False, out=None):
    """q [batch, seqlen_q, heads, head_dim], k and v [batch, seqlen_k, KV heads, head_dim]: (out, LSE or None)."""
    k, v = _keys(k, "k"), _keys(v, "v")
    if qv is not None:
        q, k, v, rules = _absorbed(q, qv, k, v, rules)
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"folio.flash_attn: q is {list(q.shape)}, k {list(k.shape)}; they are [batch, seqlen, heads, headdim]")
    if (q.shape[-1] | v.shape[-1]) % 8:
        return _padded(dense, q, k, v, rules, arrays, with_lse, out)
    lse = _box_lse(q) if with_lse else None
    paged = not (_joins(k) and _joins(v))
    make = lengths.of_strided_box if paged else lengths.of_box
    out = attend(q, k, v, rules, arrays, make, (), (k.shape[:2], v.shape[:2]), paged, out, lse)
    return out, _heads_first(lse, q)


def ranges(q, k, v, rules, arrays, cu_q, cu_k, max_q, max_k, used_q=None, used_k=None, table=None, qv=None,
           with_lse=False, out=None):
    """Requests one after the other: q [total_q, heads, head_dim], k and v likewise or in pages: (out, LSE or None)."""
    if table is None:
        k, v = _keys(k, "k"), _keys(v, "v")
    else:
        _require_cache(k, v)
    if qv is not None:
        q, k, v, rules = _absorbed(q, qv, k, v, rules, copies=table is None)
    _require_form("q", q, cu_q, "cu_seqlens_q")
    if table is None:
        _require_form("k", k, cu_k, "cu_seqlens_k")
    if (q.shape[-1] | v.shape[-1]) % 8 and table is None:
        return _padded(ranges, q, k, v, rules, arrays, with_lse, out, cu_q, cu_k, max_q, max_k, used_q, used_k)
    lse = None
    if with_lse:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if q.dim() == 3 else _box_lse(q)
    sources = cu_q, cu_k, used_q, used_k, table
    facts = _bound(max_q, "max_seqlen_q"), _bound(max_k, "max_seqlen_k")
    if table is None and not (_joins(k) and _joins(v)):
        k, v = k.contiguous(), v.contiguous()
    tokens_first = lse.t() if lse is not None and q.dim() == 3 else lse
    paged = table is not None
    make = lengths.of_ranges
    out = attend(q, k, v, rules, arrays, make, sources, (*facts, k.shape[:-2], v.shape[:-2]), paged, out,
                 tokens_first)
    return out, lse if q.dim() == 3 else _heads_first(lse, q)


def cached(q, k_cache, v_cache, rules, arrays, new_k=None, new_v=None, qv=None, rotary=(None, None), interleaved=True,
           lens=None, batch_idx=None, table=None, cu_q=None, cu_new=None, max_q=None, rotary_lens=None, with_lse=False,
           out=None, leftpad=None):
    """Attention over a cache [sequences, capacity, ...], or [pages, page_size, ...] with a table: (out, LSE or None)."""
    same_len = None
    if lens is not None and not isinstance(lens, torch.Tensor):
        lens, same_len = None, whole(lens, "cache_seqlens", "an int or an int32 tensor")
    _require_cache(k_cache, v_cache)
    _require_form("q", q, cu_q, "cu_seqlens_q")
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    new = _new(batch, k_cache, v_cache, new_k, new_v, cu_new, lens is None and same_len is None, interleaved)
    cos, sin = rotary
    if (cos is None) != (sin is None):
        raise ValueError("folio.flash_attn: rotary_cos and rotary_sin are given together, or neither")
    if new is None:
        if cos is not None:
            raise ValueError("folio.flash_attn: rotary_cos is given without k and v: nothing is rotated without new keys")
        cu_new = rotary_lens = None
    if new is not None and qv is None:
        new = _without_shared_v(new, k_cache, v_cache, cos)
    if qv is not None:
        if cos is not None:
            raise NotImplementedError("folio.flash_attn: rotary_cos is given with qv; rotate q and k before the call")
        absorbed = _absorb(q, qv, k_cache, v_cache, False)
        q, k_cache, v_cache, rules = *absorbed[:3], _scaled(rules, q, qv)
        if new is not None:
            new = NewKv(absorbed.of_new(new.k, new.v), None, True)
    lse = None
    if with_lse:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if q.dim() == 3 else _box_lse(q)
    sources = lens, table, cu_q, batch_idx, cu_new, rotary_lens, cos, sin, leftpad
    new_len = num_new = None
    if new is not None:
        new_len, num_new = (0, new.k.shape[0]) if cu_new is not None else (new.k.shape[1], new.k.shape[0] * new.k.shape[1])
    facts = same_len, new_len, num_new, _bound(max_q, "max_seqlen_q")
    tokens_first = lse.t() if lse is not None and q.dim() == 3 else lse
    out = attend(q, k_cache, v_cache, rules, arrays, lengths.of_cache, sources, facts, True, out, tokens_first, new,
                 leftpad is not None)
    return out, lse if q.dim() == 3 else _heads_first(lse, q)


def _new(batch, k_cache, v_cache, k, v, cu_new, no_lens, interleaved):
    """What is appended, or None."""
    if k is None and v is None:
        return None
    if k is None or v is None:
        raise ValueError("folio.flash_attn: k and v are given together, or neither")
    if no_lens:
        raise ValueError("folio.flash_attn: k and v are given without cache_seqlens: where they go is not known")
    _require_form("k", k, cu_new, "cu_seqlens_k_new")
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if tensor.dtype != cache.dtype or tensor.shape[-2:] != cache.shape[-2:] or tensor.device != cache.device:
            raise ValueError(f"folio.flash_attn: {name} is {tensor.dtype} {list(tensor.shape)}, its cache {cache.dtype} "
                             f"{list(cache.shape)}; dtype, heads and headdim are the same")
    if k.shape[:-2] != v.shape[:-2] or (cu_new is None and k.shape[0] != batch):
        raise ValueError(f"folio.flash_attn: k is {list(k.shape)}, v {list(v.shape)}, for {batch} requests: as many tokens "
                         "of as many requests are appended to both caches")
    return NewKv(plain(k, "k"), plain(v, "v"), bool(interleaved))


def _without_shared_v(new, k_cache, v_cache, cos):
    """The same, without v where v_cache is a part of k_cache: k has it then."""
    begin = _place_in_row(k_cache, v_cache)
    if begin is None:
        return new
    if cos is not None or begin != _place_in_row(new.k, new.v):
        raise ValueError("folio.flash_attn: v_cache is a part of k_cache; v must be the same part of k, and rotary_cos "
                         "left out")
    return new._replace(v=None)


def _place_in_row(k, v):
    """Where in k's rows v lies, in elements; None where it does not."""
    if k.stride() != v.stride() or k.dtype != v.dtype:
        return None
    begin = (v.data_ptr() - k.data_ptr()) // k.element_size()
    return begin if 0 <= begin <= k.shape[-1] - v.shape[-1] else None


def _bound(given, name):
    return None if given is None else whole(given, name)


def _require_cache(k_cache, v_cache):
    if k_cache.dim() != 4:
        raise ValueError(f"folio.flash_attn: the cache is {list(k_cache.shape)}; it has four dimensions")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError("folio.flash_attn: the last dimension of the cache is not contiguous; it is not copied")


def _keys(tensor, name):
    return plain(tensor, name) if tensor.requires_grad or tensor.stride(-1) != 1 else tensor


def _require_form(name, tensor, cu, cu_name):
    if cu is not None:
        require_tensor(cu, cu_name)
    rank, shape = (4, "[batch, seqlen, heads, headdim]") if cu is None else (3, "[total, heads, headdim]")
    if tensor.dim() != rank:
        given = "without" if cu is None else "with"
        raise ValueError(f"folio.flash_attn: {name} is {list(tensor.shape)}; {given} {cu_name} it must be {shape}")


def _joins(tensor):
    """Whether one stride covers all tokens."""
    if tensor.is_contiguous() or tensor.dim() == 3:
        return True
    batch, tokens = tensor.shape[:2]
    return batch <= 1 or tokens <= 1 or tensor.stride(0) == tokens * tensor.stride(1)


def _absorb(q, qv, k, v, copies):
    return absorb(plain(q, "q"), plain(qv, "qv"), k, v, copies)


def _absorbed(q, qv, k, v, rules, copies=True):
    absorbed = _absorb(q, qv, k, v, copies)
    return *absorbed[:3], _scaled(rules, q, qv)


def _scaled(rules, q, qv):
    """The scale that is left out is that of a key of both parts."""
    if rules.softmax_scale is not None:
        return rules
    return rules._replace(softmax_scale=(q.shape[-1] + qv.shape[-1]) ** -0.5)


def _padded(call, q, k, v, rules, arrays, with_lse, out, *rest):
    """Heads whose size is no multiple of 8, filled with zeros."""
    width = v.shape[-1]
    if rules.softmax_scale is None:
        rules = rules._replace(softmax_scale=q.shape[-1] ** -0.5)
    if out is not None and out.shape != (*q.shape[:-1], width):
        raise ValueError(f"folio.flash_attn: out is {list(out.shape)}; it must be {[*q.shape[:-1], width]}")
    q, k, v = (F.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, v))
    result, lse = call(q, k, v, rules, arrays, *rest, with_lse=with_lse)
    remember_nothing()
    result = result[..., :width]
    return (result.contiguous() if out is None else out.copy_(result)), lse


def _box_lse(q):
    return q.new_empty((q.shape[0] * q.shape[1], q.shape[2]), dtype=torch.float32)


def _heads_first(lse, q):
    return None if lse is None else lse.view(*q.shape[:3]).transpose(1, 2).contiguous()
