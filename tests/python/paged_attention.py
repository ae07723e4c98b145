"""Paged attention in numpy float64, straight from the definitions: an independent second opinion on Folio and its oracle.

It knows one paged segment, page tables as lists, causal masks, windows, soft caps, ALiBi, sinks and grouped heads.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Batch:
    """Requests as lists: how many queries, how many keys, which pages."""

    q_len: list
    kv_len: list
    pages: list

    @property
    def cu_q(self):
        return np.cumsum([0, *self.q_len]).astype(np.int32)

    @property
    def lengths(self):
        return np.array(self.kv_len, np.int32)

    @property
    def page_indptr(self):
        return np.cumsum([0, *map(len, self.pages)]).astype(np.int32)

    @property
    def page_ids(self):
        return np.array([page for pages in self.pages for page in pages], np.int32)


@dataclasses.dataclass
class Rules:
    """What is computed from the logits. A window side of -1 is open; a cap of 0 is off."""

    sm_scale: float
    causal: bool = True
    left: int = -1
    right: int = -1
    cap: float = 0.0
    slopes: np.ndarray | None = None
    sinks: np.ndarray | None = None


def keys_of(cache, pages, length):
    """A request's rows [length, heads, dim] out of a cache [pages, page_size, heads, dim]."""
    page_size = cache.shape[1]
    return np.array([cache[pages[t // page_size], t % page_size] for t in range(length)], np.float64).reshape(
        length, *cache.shape[2:])


def visible(rules, query, keys):
    seen = np.ones(keys.shape, bool)
    if rules.causal:
        seen &= keys <= query
    if rules.left >= 0:
        seen &= keys >= query - rules.left
    if rules.right >= 0:
        seen &= keys <= query + rules.right
    return seen


def row(q, k, v, rules, query, head):
    """One (token, head): its output, its LSE in base e, and the sum of |weight * value| that bounds its rounding."""
    positions = np.arange(len(k))
    seen = visible(rules, query, positions)
    logits = (k[seen] @ q) * rules.sm_scale
    if rules.cap:
        logits = rules.cap * np.tanh(logits / rules.cap)
    if rules.slopes is not None:
        logits = logits - float(rules.slopes[head]) * np.abs(query - positions[seen])
    everything = logits if rules.sinks is None else np.append(logits, float(rules.sinks[head]))
    if everything.size == 0:
        return np.zeros(v.shape[1]), -np.inf, np.zeros(v.shape[1])
    top = everything.max()
    lse = top + np.log(np.exp(everything - top).sum())
    weights = np.exp(logits - lse)
    return weights @ v[seen], lse, weights @ np.abs(v[seen])


def attention(q, k_cache, v_cache, batch, rules):
    """(out, lse, magnitude) for q [tokens, q heads, dim] and caches [pages, page_size, kv heads, dim]."""
    tokens, q_heads = q.shape[:2]
    group = q_heads // k_cache.shape[2]
    out = np.zeros((tokens, q_heads, v_cache.shape[3]))
    magnitude = np.zeros_like(out)
    lse = np.full((tokens, q_heads), -np.inf)
    token = 0
    for q_len, kv_len, pages in zip(batch.q_len, batch.kv_len, batch.pages):
        k, v = keys_of(k_cache, pages, kv_len), keys_of(v_cache, pages, kv_len)
        for i in range(q_len):
            for head in range(q_heads):
                rows = k[:, head // group], v[:, head // group]
                out[token, head], lse[token, head], magnitude[token, head] = row(
                    q[token, head].astype(np.float64), *rows, rules, kv_len - q_len + i, head)
            token += 1
    return out, lse, magnitude
