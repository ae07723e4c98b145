"""What flash_attn's functions say, written out in float64, one request at a time; and three-wise test cases."""

import itertools
import math
import random

import torch

EPS32 = 2.0**-24
ROUNDING = {torch.float32: EPS32, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}


def attention(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, sinks=None, qv=None, chunk=0):
    """(out [queries, heads, head_dim], lse [heads, queries]) of one request: q [queries, heads, head_dim], k, v [keys, ...]."""
    q, k, v = q.double(), k.double(), v.double()
    queries, heads, dim = q.shape
    keys, group = k.shape[0], heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if scale is None:
        scale = (dim + (0 if qv is None else v.shape[-1])) ** -0.5
    logits = torch.einsum("qhd,khd->hqk", q, k)
    if qv is not None:
        logits = logits + torch.einsum("qhd,khd->hqk", qv.double(), v)
    logits = logits * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    here = torch.arange(queries, device=q.device)[:, None] + keys - queries  # the key that a query stands at
    there = torch.arange(keys, device=q.device)[None, :]
    if slopes is not None:
        logits = logits - slopes.double()[:, None, None] * (here - there).abs()
    left, right = window
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        hidden |= there > here
    elif right >= 0:
        hidden |= there > here + right
    if left >= 0:
        hidden |= there < here - left
    if chunk:
        hidden |= there // chunk != here // chunk
    logits = logits.masked_fill(hidden, -math.inf)
    every = logits if sinks is None else torch.cat([logits, sinks.double()[:, None, None].expand(heads, queries, 1)], -1)
    lse = torch.logsumexp(every, -1) if every.shape[-1] else torch.full((heads, queries), -math.inf, device=q.device).double()
    p = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return torch.einsum("hqk,khd->qhd", p, v), lse


def rotated(x, cos, sin, positions, interleaved):
    """x [tokens, heads, head_dim], token i turned by the angles of positions[i]; rounded to its dtype."""
    half = cos.shape[1]
    out = x.double().clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[positions, i].double()[:, None], sin[positions, i].double()[:, None]
        out[..., a] = x[..., a].double() * c - x[..., b].double() * s
        out[..., b] = x[..., a].double() * s + x[..., b].double() * c
    return out.to(x.dtype)


def tolerances(dtype, out_dtype, dim, keys, v):
    """(of an output, of an LSE). p is rounded to the dtype or to bfloat16, the output to its own; the rest is float32.

    A logit errs by some (dim + 8) float32 roundings of terms below 8 here; p by as much, relatively. Sums have `keys`
    terms more.
    """
    most = float(v.double().abs().max()) if v.numel() else 0.0
    p = ROUNDING[torch.bfloat16 if dtype is torch.float8_e4m3fn else dtype]
    logit = 8 * (dim + 8) * EPS32
    return most * (p + ROUNDING[out_dtype] + 2 * logit + 2 * (keys + 8) * EPS32), 2 * logit + (keys + 8) * EPS32


def require_close(got, exact, tolerance, what=""):
    finite = exact.isfinite()
    assert torch.equal(got.isfinite(), finite), what
    assert torch.equal(got[~finite].double(), exact[~finite]), what
    worst = (got.double() - exact)[finite].abs().max().item() if finite.any() else 0.0
    assert worst <= tolerance, f"{what}: {worst} > {tolerance}"


def three_wise(parameters, seed=1, tries=30):
    """Cases in which every three values of different parameters meet. `parameters`: {name: values}."""
    names = list(parameters)
    chosen = random.Random(seed)
    missing = {
        frozenset(zip(three, values))
        for three in itertools.combinations(names, 3)
        for values in itertools.product(*(range(len(parameters[name])) for name in three))
    }
    cases = []
    while missing:
        best, covered = None, set()
        for _ in range(tries):
            fixed = dict(chosen.choice(sorted(sorted(some) for some in itertools.islice(missing, 8))))
            case = {name: fixed.get(name, chosen.randrange(len(parameters[name]))) for name in names}
            found = {some for some in map(frozenset, itertools.combinations(case.items(), 3)) if some in missing}
            if best is None or len(found) > len(covered):
                best, covered = case, found
        missing -= covered
        cases.append({name: parameters[name][index] for name, index in best.items()})
    return cases
