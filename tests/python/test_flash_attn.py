"""folio.flash_attn's attention against flash_attn_reference, every argument with every two others."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import flash_attn_reference as reference  # noqa: E402
from folio.flash_attn import (  # noqa: E402
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    v3,
)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
FP8 = torch.float8_e4m3fn

RULES = {
    "causal": [False, True],
    "window": [(-1, -1), (3, 0), (2, 2), (-1, 1), (0, -1)],
    "softcap": [0.0, 3.0],
    "alibi": [None, "heads", "one row"],
    "sink": [False, True],
    "scale": [None, 0.3],
    "chunk": [0, 1, 6],
    "splits": [0, 1, 3],
    "dims": [(64, 64), (32, 32), (64, 32)],
    "heads": [(4, 4), (4, 2), (3, 1)],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
}


class Rules:
    """The arguments that every function has, of a case; and the reference's."""

    def __init__(self, case, device):
        heads = case["heads"][0]
        self.slopes = torch.rand(heads, device=device) if case["alibi"] else None
        self.sinks = torch.randn(heads, device=device) if case["sink"] else None
        self.given = dict(
            softmax_scale=case["scale"],
            causal=case["causal"],
            window_size=case["window"],
            softcap=case["softcap"],
            num_splits=case["splits"],
            attention_chunk=case["chunk"],
            learnable_sink=None if self.sinks is None else self.sinks.to(case["dtype"]),
            alibi_slopes=self.slopes[None] if case["alibi"] == "one row" else self.slopes,
        )
        if self.sinks is not None:
            self.sinks = self.given["learnable_sink"].float()
        self.exact = dict(
            scale=case["scale"],
            causal=case["causal"],
            window=case["window"],
            softcap=case["softcap"],
            slopes=self.slopes,
            sinks=self.sinks,
            chunk=case["chunk"],
        )


def check(got, lse, q, k, v, rules, dim, what):
    """One request's rows against the reference."""
    exact, exact_lse = reference.attention(q, k, v, **rules.exact)
    of_out, of_lse = reference.tolerances(q.dtype, got.dtype, dim, k.shape[0], v)
    reference.require_close(got, exact, of_out, what)
    if lse is not None:
        assert lse.dtype == torch.float32
        reference.require_close(lse, exact_lse, of_lse, what)


@pytest.mark.parametrize("device", DEVICES)
def test_func(device):
    parameters = {**RULES, "queries": [1, 7, 20], "keys": [1, 9, 20], "layout": ["plain", "packed", "heads first"]}
    cases = reference.three_wise(parameters)
    assert len(cases) > 40
    for number, case in enumerate(cases):
        torch.manual_seed(number)
        (heads, kv_heads), (dim, dim_v) = case["heads"], case["dims"]
        make = dict(device=device, dtype=case["dtype"])
        q = torch.randn(3, case["queries"], heads, dim, **make)
        if case["layout"] == "packed":
            k, v = torch.randn(3, case["keys"], 2, kv_heads, dim, **make).unbind(2)
            v = v[..., :dim_v]
        elif case["layout"] == "heads first":
            q = torch.randn(3, heads, case["queries"], dim, **make).transpose(1, 2)
            k = torch.randn(3, kv_heads, case["keys"], dim, **make).transpose(1, 2)
            v = torch.randn(3, kv_heads, case["keys"], dim_v, **make).transpose(1, 2)
        else:
            k = torch.randn(3, case["keys"], kv_heads, dim, **make)
            v = torch.randn(3, case["keys"], kv_heads, dim_v, **make)
        rules = Rules(case, device)
        out, lse, nothing = flash_attn_func(q, k, v, **rules.given, return_attn_probs=True)
        assert out.shape == (3, case["queries"], heads, dim_v) and out.dtype == q.dtype and nothing.numel() == 0
        assert lse.shape == (3, heads, case["queries"]) and lse.is_contiguous()
        for r in range(3):
            check(out[r], lse[r], q[r], k[r], v[r], rules, dim, f"{number} {case}")
        alone = flash_attn_func(q, k, v, **rules.given)
        assert torch.equal(alone, out) and torch.equal(flash_attn_func(q, k, v, **rules.given), out)


def lengths(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(values, device):
    return lengths([0, *torch.tensor(values).cumsum(0).tolist()], device)


@pytest.mark.parametrize("device", DEVICES)
def test_varlen(device):
    parameters = {
        **RULES,
        "keys": ["cu", "cu used", "pages cu", "pages used"],
        "used_q": [False, True],
        "page_size": [1, 16, 24],
        "lens": [([1, 1, 1], [33, 1, 16]), ([7, 0, 16], [7, 5, 30]), ([5, 3, 2], [2, 40, 0])],
    }
    for number, case in enumerate(reference.three_wise(parameters)):
        torch.manual_seed(number)
        (heads, kv_heads), (dim, dim_v) = case["heads"], case["dims"]
        make = dict(device=device, dtype=case["dtype"])
        q_lens, k_lens = case["lens"]
        room_q = [n + (3 if case["used_q"] else 0) for n in q_lens]
        paged, used_k = case["keys"].startswith("pages"), case["keys"].endswith("used")
        room_k = [n + (4 if used_k and not paged else 0) for n in k_lens]
        q = torch.randn(sum(room_q), heads, dim, **make)
        given = dict(cu_seqlens_q=offsets(room_q, device), max_seqlen_q=max(room_q), max_seqlen_k=max(k_lens))
        if case["used_q"]:
            given["seqused_q"] = lengths(q_lens, device)
        if used_k:
            given["seqused_k"] = lengths(k_lens, device)
        if paged:
            size = case["page_size"]
            columns = 40 // size + 1
            k = torch.randn(3 * columns + 2, size, kv_heads, dim, **make)
            v = torch.randn(3 * columns + 2, size, kv_heads, dim_v, **make)
            table = torch.randperm(3 * columns + 2)[: 3 * columns].view(3, columns).int().to(device)
            keys = [k[table[r].long()].flatten(0, 1)[: k_lens[r]] for r in range(3)]
            values = [v[table[r].long()].flatten(0, 1)[: k_lens[r]] for r in range(3)]
            for r in range(3):
                table[r, -(-k_lens[r] // size) :] = -1  # never read
            given["block_table" if number % 2 else "page_table"] = table
            if not used_k:
                given["cu_seqlens_k"] = offsets(k_lens, device)
        else:
            k = torch.randn(sum(room_k), kv_heads, dim, **make)
            v = torch.randn(sum(room_k), kv_heads, dim_v, **make)
            begin = offsets(room_k, "cpu").tolist()
            keys = [k[begin[r] :][: k_lens[r]] for r in range(3)]
            values = [v[begin[r] :][: k_lens[r]] for r in range(3)]
            given["cu_seqlens_k"] = offsets(room_k, device)
        rules = Rules(case, device)
        out, lse = flash_attn_varlen_func(q, k, v, **given, **rules.given, return_softmax_lse=True)
        assert out.shape == (sum(room_q), heads, dim_v) and lse.shape == (heads, sum(room_q))
        begin = offsets(room_q, "cpu").tolist()
        for r in range(3):
            rows = slice(begin[r], begin[r] + q_lens[r])
            check(out[rows], lse[:, rows], q[rows], keys[r], values[r], rules, dim, f"{number} {case}")
        assert torch.equal(flash_attn_varlen_func(q, k, v, **given, **rules.given), out)


CACHES = {
    **{name: RULES[name] for name in ("window", "causal", "alibi", "sink", "heads", "dtype")},
    "softcap": [0.0, 3.0],
    "dims": [(64, 64), (64, 32)],
    "splits": [0, 2],
    "page_size": [None, 1, 16, 24],
    "batch_idx": [False, True],
    "lens": ["tensor", "int", "int64"],
    "queries": [1, 4, "varlen"],
    "new": [None, 1, 3, "varlen"],
    "rotary": [None, ("neighbours", 64), ("halves", 32)],
    "rotary_seqlens": [False, True],
    "scale": [None],
    "chunk": RULES["chunk"],
    "leftpad": [False, True],
}


@pytest.mark.parametrize("device", DEVICES)
def test_with_kvcache(device):
    for number, case in enumerate(reference.three_wise(CACHES)):
        torch.manual_seed(number)
        run_cache_case(number, case, device)


def run_cache_case(number, case, device):
    (heads, kv_heads), (dim, dim_v) = case["heads"], case["dims"]
    make = dict(device=device, dtype=case["dtype"])
    batch, capacity = 3, 48
    rows = 5 if case["batch_idx"] else batch
    chosen = torch.randperm(rows)[:batch] if case["batch_idx"] else torch.arange(batch)
    cached = [7, 7, 7] if case["lens"] == "int" else [0 if case["new"] else 1, 37, 20]
    given = dict(cache_seqlens=7 if case["lens"] == "int" else lengths(cached, device))
    if case["lens"] == "int64":
        given["cache_seqlens"] = given["cache_seqlens"].long()
    if case["batch_idx"]:
        given["cache_batch_idx"] = chosen.int().to(device)
    if case["page_size"] is None:
        k_cache = torch.randn(rows, capacity, kv_heads, dim, **make)
        v_cache = torch.randn(rows, capacity, kv_heads, dim_v, **make)
        tokens = lambda cache, r: cache[chosen[r]]  # noqa: E731
    else:
        size = case["page_size"]
        columns = capacity // size
        k_cache = torch.randn(rows * columns, size, kv_heads, dim, **make)
        v_cache = torch.randn(rows * columns, size, kv_heads, dim_v, **make)
        table = torch.randperm(rows * columns).view(rows, columns)
        given["page_table"] = table.int().to(device) if case["batch_idx"] else table[chosen].int().to(device)
        tokens = lambda cache, r: cache[table[chosen[r]].to(device)].flatten(0, 1)  # noqa: E731

    # Queries and new tokens.
    q_lens = [2, 4, 1] if case["queries"] == "varlen" else [case["queries"]] * batch
    q = torch.randn(sum(q_lens), heads, dim, **make)
    if case["queries"] == "varlen":
        given.update(cu_seqlens_q=offsets(q_lens, device), max_seqlen_q=4)
    new_lens = [0] * batch
    k = v = None
    if case["new"]:
        new_lens = [3, 1, 2] if case["new"] == "varlen" else [case["new"]] * batch
        k, v = torch.randn(sum(new_lens), kv_heads, dim, **make), torch.randn(sum(new_lens), kv_heads, dim_v, **make)
        if case["new"] == "varlen":
            given.update(k=k, v=v, cu_seqlens_k_new=offsets(new_lens, device))
        else:
            given.update(k=k.view(batch, -1, kv_heads, dim), v=v.view(batch, -1, kv_heads, dim_v))
    rules = Rules(case, device)

    # What the reference sees.
    exact_q, exact_k = q, k
    if case["new"] and case["rotary"]:
        kind, rotary_dim = case["rotary"]
        angles = torch.rand(64, rotary_dim // 2, device=device) * 2 * math.pi
        cos, sin = angles.cos().to(case["dtype"]), angles.sin().to(case["dtype"])
        given.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=kind == "neighbours")
        base = cached
        if case["rotary_seqlens"]:
            base = [n // 2 for n in cached]
            given["rotary_seqlens"] = lengths(base, device)
        moves = case["causal"] or case["window"] != (-1, -1) or case["chunk"]
        at_k = [base[r] + i for r in range(batch) for i in range(new_lens[r])]
        at_q = [base[r] + (i if moves else 0) for r in range(batch) for i in range(q_lens[r])]
        exact_q = reference.rotated(q, cos, sin, at_q, kind == "neighbours")
        exact_k = reference.rotated(k, cos, sin, at_k, kind == "neighbours")
    starts = [0] * batch
    if case["leftpad"]:
        starts = [min(n, 3 * r) for r, n in enumerate(cached)]
        given["cache_leftpad"] = lengths(starts, device)
    expected = []
    first = 0
    for r in range(batch):
        keys, values = tokens(k_cache, r).clone(), tokens(v_cache, r).clone()
        end = cached[r] + new_lens[r]
        if case["new"]:
            keys[cached[r] : end] = exact_k[first : first + new_lens[r]]
            values[cached[r] : end] = v[first : first + new_lens[r]]
        first += new_lens[r]
        expected.append((keys, values, end))

    shaped = q if case["queries"] == "varlen" else q.view(batch, -1, heads, dim)
    out, lse = flash_attn_with_kvcache(shaped, k_cache, v_cache, **given, **rules.given, return_softmax_lse=True)
    assert out.shape == (*shaped.shape[:-1], dim_v) and out.dtype == q.dtype
    if case["queries"] == "varlen":
        assert lse.shape == (heads, sum(q_lens))
    else:
        assert lse.shape == (batch, heads, case["queries"])
        lse = lse.transpose(0, 1).flatten(1)
    out = out.reshape(sum(q_lens), heads, dim_v)
    first = 0
    # A rotated component may be rounded the other way, which moves its logits by as much.
    turned = 4 * reference.ROUNDING[case["dtype"]] if exact_q is not q else 0.0
    for r, (keys, values, end) in enumerate(expected):
        what = f"{number} {case}"
        assert torch.equal(tokens(v_cache, r), values), what
        reference.require_close(tokens(k_cache, r), keys.double(), turned * 4, what)
        mine = slice(first, first + q_lens[r])
        first += q_lens[r]
        seen = slice(starts[r], end)
        exact, exact_lse = reference.attention(exact_q[mine], keys[seen], values[seen], **rules.exact)
        of_out, of_lse = reference.tolerances(q.dtype, out.dtype, dim, end, values[:end])
        most = float(values.double().abs().max())
        reference.require_close(out[mine], exact, of_out + turned * 8 * most, what)
        reference.require_close(lse[:, mine], exact_lse, of_lse + turned * 8, what)


@pytest.mark.parametrize("device", DEVICES)
def test_which_keys_a_query_sees(device):
    """Chunks and windows over left-padded keys, by FlashAttention-3's definition: rows and keys count from the first key
    that is no padding. q = 0 makes all visible keys equally likely, V = 1 shows which they are."""
    keys = 8
    eye = torch.eye(keys, device=device).view(1, keys, 1, keys)
    k_cache, v_cache = torch.randn(2, keys, 1, keys, device=device), torch.cat([eye, eye])
    windows = [(-1, -1), (1, 0), (2, 1), (-1, 2), (0, -1)]
    for chunk, queries, window, causal in itertools.product((0, 1, 3, 5, 8), (1, 4, 8), windows, (False, True)):
        q = torch.zeros(2, queries, 1, keys, device=device)
        used, pads = [7, 6], [2, 5]  # the second request has one key, and with 4 or 8 queries rows before all keys
        out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths(used, device), causal=causal,
                                           cache_leftpad=lengths(pads, device), window_size=window,
                                           attention_chunk=chunk, return_softmax_lse=True)
        left, right = window[0], 0 if causal else window[1]
        for r in range(2):
            wanted = torch.zeros(queries, keys, dtype=torch.bool)
            for i in range(queries):
                row = i + (used[r] - pads[r]) - queries
                for key in range(used[r] - pads[r]):
                    seen = (left < 0 or key >= row - left) and (right < 0 or key <= row + right)
                    if chunk:
                        begin = row - row % chunk
                        seen = seen and begin <= key < begin + chunk
                    wanted[i, key + pads[r]] = seen
            what = f"{chunk} {queries} {window} {causal} {r}"
            assert torch.equal(out[r, :, 0].cpu() > 0, wanted), what
            count = wanted.sum(1).double()
            reference.require_close(lse[r, 0].cpu(), count.log(), 8 * reference.EPS32, what)


@pytest.mark.parametrize("device", DEVICES)
def test_a_chunk_turns_queries_like_a_window(device):
    """Rotary positions of q go on with attention_chunk alone, as they do with a window; the left padding counts in them."""
    torch.manual_seed(9)
    q, k, v = (torch.randn(1, 3, 1, 32, device=device) for _ in range(3))
    angles = torch.rand(16, 16, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    caches = [torch.randn(2, 1, 16, 1, 32, device=device).unbind(0)]
    caches += [tuple(half.clone() for half in caches[0]) for _ in range(2)]
    given = dict(cache_seqlens=lengths([9], device), cache_leftpad=lengths([2], device))
    turned = [reference.rotated(x[0], cos, sin, [9, 10, 11], True)[None] for x in (q, k)]
    plain = flash_attn_with_kvcache(turned[0], *caches[0], turned[1], v, attention_chunk=5, **given)
    rotary = dict(rotary_cos=cos, rotary_sin=sin)
    out = flash_attn_with_kvcache(q, *caches[1], k, v, attention_chunk=5, **rotary, **given)
    tolerance = 64 * reference.tolerances(q.dtype, q.dtype, 32, 12, v)[0]
    reference.require_close(out, plain.double(), tolerance)
    reference.require_close(caches[1][0], caches[0][0].double(), 1e-6)
    whole = flash_attn_with_kvcache(q, *caches[2], k, v, **rotary, **given)  # without a local mask: all at the first
    first = reference.rotated(q[0], cos, sin, [9, 9, 9], True)
    exact, _ = reference.attention(first, caches[2][0][0, 2:12], caches[2][1][0, 2:12])
    reference.require_close(whole[0], exact, tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_descales_of_fp8(device):
    """Strides of 0, 1 and more; the output of fp8 queries is bfloat16."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, n, h, 64, device=device).to(FP8) for n, h in ((5, 4), (9, 2), (9, 2)))
    one = torch.rand(1, device=device) + 0.5
    forms = [one.expand(2, 2), one.new_tensor([[0.5], [2.0]]).expand(2, 2), torch.rand(2, 2, device=device) + 0.5]
    forms.append((torch.rand(2, 2, device=device) + 0.5).t())
    forms.append((torch.rand(2, 4, device=device) + 0.5)[:, ::2])
    for form in forms:
        scales = dict(q_descale=form, k_descale=forms[2], v_descale=form)
        out, lse = v3.flash_attn_func(q, k, v, causal=True, **scales, return_attn_probs=True)
        assert out.dtype == torch.bfloat16
        for r in range(2):
            wide_q = q[r].double() * form[r].double().repeat_interleave(2)[None, :, None]
            wide_k, wide_v = (t[r].double() * s[r].double()[None, :, None] for t, s in ((k, forms[2]), (v, form)))
            exact, exact_lse = reference.attention(wide_q, wide_k, wide_v, causal=True)
            # On a GPU FP8 MMA rounds p to e4m3 and sums with 13 bits.
            loose = device == "cuda"
            of_out = reference.tolerances(FP8, torch.bfloat16, 64, 9, wide_v)[0]
            of_out += (2.0**-4 + 2.0**-6) * float(wide_v.abs().max()) if loose else 0.0
            reference.require_close(out[r], exact, of_out)
            reference.require_close(lse[r], exact_lse, 0.1 if loose else 1e-4)
    narrow, given = q.bfloat16(), dict(q_descale=forms[2], k_descale=forms[2], v_descale=forms[2])
    plain = v3.flash_attn_func(narrow, k.bfloat16(), v.bfloat16())
    assert torch.equal(v3.flash_attn_func(narrow, k.bfloat16(), v.bfloat16(), **given), plain)  # of fp8 tensors alone


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_keys_are_appended_as_they_are(device):
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, 2, 2, 64, device=device).to(FP8) for _ in range(3))
    k_cache, v_cache = (torch.randn(2, 16, 2, 64, device=device).to(FP8) for _ in range(2))
    scale = torch.full((2, 2), 0.5, device=device)
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths([3, 9], device), k_descale=scale,
                            q_descale=scale, v_descale=scale)
    for r, begin in enumerate((3, 9)):
        assert torch.equal(k_cache[r, begin : begin + 2].view(torch.uint8), k[r].view(torch.uint8))
        assert torch.equal(v_cache[r, begin : begin + 2].view(torch.uint8), v[r].view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("v_first", [True, False])
def test_qv_of_a_latent_cache(device, v_first):
    """k and v as neighbouring slices of one buffer, read in place; dense ones that lie apart are copied."""
    torch.manual_seed(5)
    make = dict(device=device, dtype=torch.bfloat16)
    buffer = torch.randn(6, 16, 1, 64 + 256, **make)
    latent, rope = (buffer[..., :256], buffer[..., 256:]) if v_first else (buffer[..., 64:], buffer[..., :64])
    q, qv = torch.randn(2, 3, 4, 64, **make), torch.randn(2, 3, 4, 256, **make)
    table, lens = torch.tensor([[0, 3], [5, 1]], device=device).int(), lengths([20, 9], device)
    new = torch.randn(2, 3, 1, 64, **make), torch.randn(2, 3, 1, 256, **make)
    before = buffer.clone()
    out, lse = flash_attn_with_kvcache(q, rope, latent, *new, cache_seqlens=lens, page_table=table, qv=qv, causal=True,
                                       return_softmax_lse=True)
    for r, n in enumerate((20, 9)):
        pages = table[r].long()
        k, v = rope[pages].flatten(0, 1)[: n + 3], latent[pages].flatten(0, 1)[: n + 3]
        assert torch.equal(k[n:], new[0][r]) and torch.equal(v[n:], new[1][r])
        exact, exact_lse = reference.attention(q[r], k, v, causal=True, qv=qv[r])
        of_out, of_lse = reference.tolerances(q.dtype, out.dtype, 320, n + 3, v)
        reference.require_close(out[r], exact, of_out)
        reference.require_close(lse[r], exact_lse, of_lse)
    assert not torch.equal(before, buffer)
    k, v = torch.randn(2, 9, 1, 64, **make), torch.randn(2, 9, 1, 256, **make)
    out = flash_attn_func(q, k, v, qv=qv)
    for r in range(2):
        exact, _ = reference.attention(q[r], k[r], v[r], qv=qv[r])
        reference.require_close(out[r], exact, reference.tolerances(q.dtype, out.dtype, 320, 9, v)[0])
    with pytest.raises(NotImplementedError, match="lie apart"):
        flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=5)


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_a_part_of_keys(device):
    """One buffer for both, as of a latent cache: what is appended is written once."""
    torch.manual_seed(10)
    buffer, q = torch.randn(2, 16, 1, 48, device=device), torch.randn(2, 3, 4, 48, device=device)
    new, apart = torch.randn(2, 3, 1, 48, device=device), buffer[..., 8:40].clone()
    k_cache = buffer.clone()
    given = dict(cache_seqlens=lengths([5, 12], device), causal=True)
    out = flash_attn_with_kvcache(q, buffer, buffer[..., 8:40], new, new[..., 8:40], **given)
    wanted = flash_attn_with_kvcache(q, k_cache, apart, new, new[..., 8:40], **given)
    assert torch.equal(buffer, k_cache) and torch.allclose(out, wanted, atol=1e-5)


def test_qv_of_neighbours_in_other_memory():
    """v ends where k begins, but they are two buffers."""
    memory = bytearray(2 * 64 * 4)
    v, k = (torch.frombuffer(memory, dtype=torch.float32, count=64, offset=at).view(1, 1, 1, 64) for at in (0, 256))
    v.copy_(torch.randn(1, 1, 1, 64))
    out = flash_attn_func(torch.randn(1, 1, 2, 64), k, v, qv=torch.randn(1, 1, 2, 64))
    assert torch.equal(out, v.expand(1, 1, 2, 64))


@pytest.mark.parametrize("device", DEVICES)
def test_heads_of_any_size(device):
    torch.manual_seed(6)
    q, k, v = torch.randn(2, 4, 2, 59, device=device), torch.randn(2, 6, 2, 59, device=device), torch.randn(2, 6, 2, 37, device=device)
    for _ in range(2):
        out, lse = flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
        assert torch.equal(flash_attn_func(q, k, v, causal=True), out) and out.shape == (2, 4, 2, 37)
        for r in range(2):
            exact, exact_lse = reference.attention(q[r], k[r], v[r], causal=True)
            reference.require_close(out[r], exact, reference.tolerances(q.dtype, out.dtype, 64, 6, v)[0])
            reference.require_close(lse[r], exact_lse, reference.tolerances(q.dtype, out.dtype, 64, 6, v)[1])


@pytest.mark.parametrize("device", DEVICES)
def test_packed(device):
    torch.manual_seed(7)
    qkv = torch.randn(2, 6, 3, 2, 32, device=device)
    q, k, v = qkv.unbind(2)
    plain = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), plain)
    assert torch.equal(v3.flash_attn_qkvpacked_func(qkv.flatten(2, 3), causal=True, num_heads_q=2), plain)
    assert torch.equal(flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), plain)
    cu = offsets([6, 6], device)
    flat = flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 6, causal=True)
    assert torch.allclose(flat.view_as(plain), plain, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_do(device):
    q, k = torch.randn(2, 3, 2, 32, device=device), torch.randn(2, 0, 2, 32, device=device)
    out, lse = flash_attn_func(q, k, k, return_softmax_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    assert flash_attn_func(q[:, :0], q, q).shape == (2, 0, 2, 32)
    assert flash_attn_func(q[:0], q[:0], q[:0]).shape == (0, 3, 2, 32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lead", [(5,), (2, 5), (2, 1)])
def test_combine(device, lead):
    torch.manual_seed(8)
    # Not contiguous, as test programs of FlashAttention's have them.
    parts = torch.randn(7, *lead, 3, 64, device=device).transpose(-3, -2).contiguous().transpose(-3, -2)[:4]
    lses = torch.randn(4, *lead[:-1], 6, lead[-1], device=device).transpose(-1, -2)[..., :3]
    lses[2:, 0] = -math.inf
    out, lse = flash_attn_combine(parts, lses, out_dtype=torch.float16)
    exact_lse = torch.logsumexp(lses.double(), 0)
    exact = (torch.exp(lses.double() - exact_lse)[..., None] * parts.double()).sum(0)
    assert out.dtype == torch.float16 and out.shape == parts.shape[1:] and lse.shape == lses.shape[1:]
    most = float(parts.abs().max())
    reference.require_close(out, exact, most * (2.0**-11 + 32 * reference.EPS32))
    reference.require_close(lse, exact_lse, 64 * reference.EPS32)
    again = torch.empty_like(out)
    assert flash_attn_combine(parts, lses, again)[0] is again and torch.equal(again, out)
