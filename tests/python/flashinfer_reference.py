"""Attention in torch's float64 as FlashInfer defines it, and small problems for the tests of folio.flashinfer."""

import math

import torch

CPU = torch.zeros(0)  # in place of a workspace: it says the device
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def slopes(heads):
    whole = 2 ** int(math.log2(heads))
    values = [2.0 ** (-8.0 * (h + 1) / whole) for h in range(whole)]
    return torch.tensor(values + [2.0 ** (-4.0 * (2 * h + 1) / whole) for h in range(heads - whole)],
                        dtype=torch.float64)


def turned(x, positions, scale=1.0, theta=1e4, interleave=False, rotary_dim=None):
    """x [tokens, heads, dim] with a rotary embedding, halves against each other."""
    dim = rotary_dim or x.shape[-1]
    angles = positions.double()[:, None] / scale * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    part, result = x[..., :dim].double(), x.double().clone()
    first, second = (part[..., ::2], part[..., 1::2]) if interleave else part.chunk(2, -1)
    a, b = first * cos - second * sin, second * cos + first * sin
    result[..., :dim] = torch.stack((a, b), -1).flatten(-2) if interleave else torch.cat((a, b), -1)
    return result


def attend(q, k, v, *, causal=False, window=-1, window_right=-1, cap=0.0, scale=None, sinks=None, alibi=False,
           mask=None, rope=None, v_scale=1.0):
    """(out [q_len, heads, dim], LSE base 2 [q_len, heads], the sum of p |v|), float64. ALiBi counts rows from 0."""
    q, k, v = q.double(), k.double(), v.double() * v_scale
    q_len, heads, dim = q.shape
    kv_len = k.shape[0]
    rows, keys = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)[None, :]
    if rope is not None:
        q, k = turned(q, rows[:, 0], **rope), turned(k, keys[0], **rope)
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * (1 / math.sqrt(dim) if scale is None else scale)
    if cap > 0:
        logits = cap * torch.tanh(logits / cap)
    if alibi:
        logits = logits + slopes(heads)[:, None, None] * (keys - (rows - rows.min()) if q_len else keys)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if mask is not None:
        seen = mask.clone()
    elif causal:
        seen &= keys <= rows
    if window >= 0:
        seen &= keys >= rows - window
    if window_right >= 0:
        seen &= keys <= rows + window_right
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None, None].expand(heads, q_len, 1)), -1)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[..., None])[..., :kv_len]
    out, size = torch.einsum("hqk,khd->qhd", p, v), torch.einsum("hqk,khd->qhd", p, v.abs())
    return out, (lse / math.log(2)).T, size


def assert_close(result, exact, dtype=None):
    """out, or (out, lse). 16-bit kernels round p and the output: some eps of the sum of p |v|. LSE are sums in
    float32."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    want, sums, size = exact
    eps = 2.0 ** -20 if (dtype or out.dtype) == torch.float32 else 2.0 ** -7
    assert out.shape == want.shape, (out.shape, want.shape)
    assert bool(((out.double() - want).abs() <= eps * size + 1e-6).all()), float(((out.double() - want).abs() - eps * size).max())
    if lse is not None:
        assert lse.shape == sums.shape and lse.dtype == torch.float32
        finite = sums.isfinite()
        assert torch.equal(lse.isfinite(), finite)
        assert bool(((lse.double() - sums).abs()[finite] <= 2.0 ** -16 * (8 + sums.abs()[finite])).all())


class Pages:
    """Requests whose keys lie in shuffled pages; what no request owns is NaN."""

    def __init__(self, kv_lens, page_size=16, kv_heads=2, dim=64, dtype=torch.float16, layout="NHD", dim_v=None,
                 seed=0):
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-n // page_size) for n in kv_lens]
        total = sum(counts) + 2
        ids = torch.randperm(total, generator=generator)[:sum(counts)].to(torch.int32)
        self.page_size, self.layout, self.kv_lens = page_size, layout, kv_lens
        self.indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()] if counts else [0], dtype=torch.int32)
        self.indices = ids
        self.last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in kv_lens], dtype=torch.int32)
        k = torch.full((total, page_size, kv_heads, dim), math.nan)
        v = torch.full((total, page_size, kv_heads, dim_v or dim), math.nan)
        self.rows = []
        for r, n in enumerate(kv_lens):
            own = [(int(ids[self.indptr[r] + t // page_size]), t % page_size) for t in range(n)]
            page, place = torch.tensor([a for a, _ in own], dtype=torch.long), torch.tensor([b for _, b in own],
                                                                                            dtype=torch.long)
            k[page, place] = torch.randn(n, kv_heads, dim, generator=generator)
            v[page, place] = torch.randn(n, kv_heads, dim_v or dim, generator=generator)
            self.rows.append((page, place))
        self.k, self.v = k.to(dtype), v.to(dtype)

    def keys(self, r):
        """(k, v) of a request, [kv_len, kv heads, dim]."""
        return self.k[self.rows[r]], self.v[self.rows[r]]

    @property
    def pair(self):
        return (self.k, self.v) if self.layout == "NHD" else (self.k.transpose(1, 2).contiguous(),
                                                               self.v.transpose(1, 2).contiguous())

    @property
    def whole(self):
        return torch.stack(self.pair, 1)

    @property
    def table(self):
        """A dense table [requests, columns]."""
        counts = self.indptr.diff()
        table = torch.zeros(len(self.kv_lens), max(int(counts.max()), 1), dtype=torch.int32)
        for r, n in enumerate(counts.tolist()):
            table[r, :n] = self.indices[self.indptr[r]:self.indptr[r] + n]
        return table


def queries(rows, heads=8, dim=64, dtype=torch.float16, seed=1):
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def per_request(q, q_lens, pages, **rules):
    """attend of every request, one after the other."""
    parts, row = [], 0
    masks = rules.pop("masks", None)
    for r, q_len in enumerate(q_lens):
        mine = dict(rules, mask=masks[r]) if masks else rules
        parts.append(attend(q[row:row + q_len], *pages.keys(r), **mine))
        row += q_len
    return tuple(torch.cat(each) for each in zip(*parts))


def indptr(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
