"""A step's lengths, of the arguments that say them in each function.

Every `of_` function is the `make` of attend(): (q, k, v, rules, sources, facts) -> Lengths. On a GPU it enqueues what it
computes, so that a graph computes it anew. Its `names` say of the core's words which arguments they are here.
"""

import torch

from .arguments import lengths as checked
from .arguments import require_tensor
from .new_tokens import NewTokens
from .plans import Lengths


def of_box(q, k, v, rules, sources, facts):
    """q [batch, seqlen_q, ...] and k [batch, seqlen_k, ...], every request being full."""
    batch, seqlen_q = q.shape[:2]
    seqlen_k = k.shape[1]
    _require_batch("k", k.shape[0], batch)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"folio.flash_attn: k is {list(k.shape)}, v {list(v.shape)}; they differ in head_dim alone")
    return Lengths(
        cu_q=_steps(batch, seqlen_q, q.device),
        kv_len=_full(batch, seqlen_k, q.device),
        table=_steps(batch, seqlen_k, q.device),
        num_tokens=batch * seqlen_q,
        max_q_len=max(seqlen_q, 1),
        max_kv_len=max(seqlen_k, 1),
    )


of_box.names = {}


def of_strided_box(q, k, v, rules, sources, facts):
    """The same where K or V lies so that no one stride covers its tokens: every request is a page."""
    box = of_box(q, k, v, rules, sources, facts)
    return box._replace(table=torch.arange(q.shape[0], dtype=torch.int32, device=q.device)[:, None])


of_strided_box.names = {}


def of_ranges(q, k, v, rules, sources, facts):
    """flash_attn_varlen_func: queries at cu_seqlens_q, keys at cu_seqlens_k or in pages.

    sources: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table. facts: max_seqlen_q, max_seqlen_k, the shapes
    of k and v. q and k may be [batch, seqlen, ...] too, where they have no cu_seqlens.
    """
    cu_q, cu_k, used_q, used_k, table = sources
    max_q, max_k, *_ = facts
    device = q.device
    if cu_q is None:
        batch = q.shape[0]
        cu_q = _steps(batch, q.shape[1], device)
        max_q = q.shape[1] if max_q is None else max_q
    else:
        batch = cu_q.shape[0] - 1
        cu_q = checked(cu_q, "cu_seqlens_q", batch + 1, device)
    tokens = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    if cu_k is not None:
        cu_k = checked(cu_k, "cu_seqlens_k", batch + 1, device)
    if used_k is not None:
        kv_len = checked(used_k, "seqused_k", batch, device)
    elif cu_k is not None:
        kv_len = cu_k[1:] - cu_k[:-1]
    elif table is None:
        kv_len = _full(batch, k.shape[1], device)
    else:
        raise ValueError("folio.flash_attn: block_table is given without seqused_k or cu_seqlens_k: no length is known")
    if table is not None:
        _require_rows(table, batch, device)
        capacity = table.shape[1] * k.shape[1]
    elif cu_k is not None:
        capacity, table = k.shape[0], cu_k
    else:
        _require_batch("k", k.shape[0], batch)
        capacity, table = k.shape[1], _steps(batch, k.shape[1], device)
    longest_q = tokens if max_q is None else max_q
    longest_k = capacity if max_k is None else min(max_k, capacity)
    found = Lengths(cu_q, kv_len, table, tokens, max(longest_q, 1), max(longest_k, 1))
    return found if used_q is None else _with_unused_queries(found, checked(used_q, "seqused_q", batch, device), q)


of_ranges.names = {"cu_q": "cu_seqlens_q", "kv_len": "seqused_k, or of cu_seqlens_k", "max_q_len": "max_seqlen_q",
                   "max_kv_len": "max_seqlen_k, or what keys have room for", "ragged.indptr": "cu_seqlens_k"}


def _with_unused_queries(found, used, q):
    """Twice the requests: each one's used queries, and the others of it, which see no key."""
    begin, end = found.cu_q[:-1], found.cu_q[1:]
    _refuse_on_cpu((used < 0) | (used > end - begin), "seqused_q", used, "a request has as many queries or more")
    middle = torch.minimum(begin + used.clamp(min=0), end)
    cu_q = torch.cat([torch.stack([begin, middle], 1).reshape(-1), end[-1:]])
    kv_len = torch.stack([found.kv_len, torch.zeros_like(found.kv_len)], 1).reshape(-1)
    paged = found.table.dim() == 2
    rows = found.table.repeat_interleave(2, 0) if paged else _offsets_twice(found.table)
    longest = found.num_tokens if q.dim() == 3 else q.shape[1]  # the unused part may be all of them
    return found._replace(cu_q=cu_q, kv_len=kv_len, table=rows, max_q_len=max(longest, 1), rows=2)


def _offsets_twice(offsets):
    return torch.cat([torch.stack([offsets[:-1], offsets[1:]], 1).reshape(-1), offsets[-1:]])


def of_cache(q, k_cache, v_cache, rules, sources, facts):
    """flash_attn_with_kvcache: the cache's lengths, with what is appended.

    sources: cache_seqlens, page_table, cu_seqlens_q, cache_batch_idx, cu_seqlens_k_new, rotary_seqlens, rotary_cos,
    rotary_sin, cache_leftpad. facts: cache_seqlens where it is an int, tokens appended a request or None, all of them, max_seqlen_q.
    """
    lens, table, cu_q, batch_idx, cu_new, rotary_lens, cos, sin, leftpad = sources
    same_len, new_len, num_new, max_q = facts
    device = q.device
    if cu_q is None:
        batch, longest = q.shape[:2]
        tokens = batch * longest
        cu_q = _steps(batch, longest, device)
    else:
        batch, tokens = cu_q.shape[0] - 1, q.shape[0]
        longest = tokens if max_q is None else max_q
        cu_q = checked(cu_q, "cu_seqlens_q", batch + 1, device)
    table, capacity, pages = _cache_rows(table, batch_idx, batch, k_cache, device)
    if lens is not None:
        cached = checked(lens, "cache_seqlens", batch, device)
    else:
        cached = _full(batch, capacity if same_len is None else same_len, device)
    kv_len, appended = cached, None
    if new_len is not None:
        grown = _full(batch, new_len, device)
        offsets = _steps(batch, new_len, device)
        wrong = cached < 0  # what is wrong gets a negative length, which plans refuse
        if cu_new is not None:
            offsets = checked(cu_new, "cu_seqlens_k_new", batch + 1, device)
            grown = offsets[1:] - offsets[:-1]
            beyond = (grown < 0) | (offsets[:-1] < 0) | (offsets[1:] > num_new)
            _refuse_on_cpu(beyond, "cu_seqlens_k_new", offsets, f"it ascends from 0 to at most {num_new}, the tokens of k")
            wrong |= beyond
        base = cached if rotary_lens is None else checked(rotary_lens, "rotary_seqlens", batch, device)
        appended = NewTokens.of(table, k_cache.shape[1], capacity, cached, offsets, num_new, base)
        if cos is not None:
            # A chunk is a local mask too.
            moves = (rules.causal or rules.window_left >= 0 or rules.window_right >= 0 or rules.attention_chunk > 0)
            appended.set_rotary(cos, sin, cu_q, tokens, capacity, moves, q.shape[-1])
            q_len = cu_q[1:] - cu_q[:-1]
            turned = torch.maximum(grown, q_len if moves else q_len.clamp(max=1))
            beyond = (cached >= 0) & (turned > 0) & ((base < 0) | (base + turned > cos.shape[0]))
            _refuse_on_cpu(beyond, "rotary_seqlens" if rotary_lens is not None else "cache_seqlens", base,
                           f"rotary_cos has the angles of {cos.shape[0]} positions, which its requests' tokens go beyond")
            wrong |= beyond
        kv_len = torch.where(wrong, cached.clamp(max=-1), cached + grown)
    start = None if leftpad is None else checked(leftpad, "cache_leftpad", batch, device)
    return Lengths(cu_q, kv_len, table, tokens, max(longest, 1), max(capacity, 1), 1, appended, start, pages)


of_cache.names = {"cu_q": "cu_seqlens_q", "kv_len": "cache_seqlens, with what is appended", "max_q_len": "max_seqlen_q",
                  "max_kv_len": "what the cache has room for"}


def _refuse_on_cpu(wrong, name, tensor, why):
    """What a GPU computes nobody looks at: what is wrong there is replaced by what plans refuse, or cut off."""
    if wrong.device.type == "cpu" and wrong.any():
        raise ValueError(f"folio.flash_attn: {name} is {tensor.tolist()}; {why}")


def _cache_rows(table, batch_idx, batch, k_cache, device):
    """(page ids [batch, columns], tokens that a row has room for, sequences that a cache without table must have).

    A cache without table has a page a sequence.
    """
    if batch_idx is not None:
        batch_idx = checked(batch_idx, "cache_batch_idx", batch, device)
        rows = k_cache.shape[0] if table is None else table.shape[0]
        _refuse_on_cpu((batch_idx < 0) | (batch_idx >= rows), "cache_batch_idx", batch_idx, f"there are {rows} sequences")
    if table is not None:
        require_tensor(table, "the page table")
        if batch_idx is not None:
            table = table.index_select(0, batch_idx)
        _require_rows(table, batch, device)
        return table, table.shape[1] * k_cache.shape[1], 0
    if batch_idx is None:
        return torch.arange(batch, dtype=torch.int32, device=device)[:, None], k_cache.shape[1], batch
    return batch_idx[:, None], k_cache.shape[1], 0


def _steps(count, step, device):
    if not step:
        return _full(count + 1, 0, device)
    return torch.arange(0, count * step + 1, step, dtype=torch.int32, device=device)


def _full(count, value, device):
    return torch.full((count,), value, dtype=torch.int32, device=device)


def _require_batch(name, given, batch):
    if given != batch:
        raise ValueError(f"folio.flash_attn: {name} has {given} sequences, q {batch}")


def _require_rows(table, batch, device):
    require_tensor(table, "the page table")
    if table.dim() != 2 or table.shape[0] != batch or table.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"folio.flash_attn: the page table is {table.dtype} {list(table.shape)}; it must be int32 [{batch}, pages]"
        )
    if table.device != device:
        raise ValueError(f"folio.flash_attn: the page table lies on {table.device}, q on {device}")
