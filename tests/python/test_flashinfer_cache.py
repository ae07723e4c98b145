"""folio.flashinfer's functions over caches and states: appends, rotary embeddings, bits, merges, concatenation."""

import folio
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashinfer_reference as reference  # noqa: E402: torch may be missing
from flashinfer_reference import DTYPES, Pages, assert_close, indptr, queries  # noqa: E402
from folio import flashinfer  # noqa: E402


def test_lengths_and_positions():
    pages = Pages([20, 0, 33, 16])
    assert flashinfer.get_seq_lens(pages.indptr, pages.last, 16).tolist() == [20, 0, 33, 16]
    assert flashinfer.get_seq_lens(pages.indptr, torch.ones(4, dtype=torch.int32), 16).tolist() == [17, 0, 33, 1]
    rows, places = flashinfer.get_batch_indices_positions(indptr([2, 0, 3, 1]), torch.tensor([20, 0, 33, 16]), 8)
    assert rows.tolist() == [0, 0, 2, 2, 2, 3, -1, -1] and places.tolist() == [18, 19, 30, 31, 32, 15, -1, -1]
    assert rows.dtype == places.dtype == torch.int32
    given = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    result = flashinfer.get_batch_indices_positions(indptr([2, 0, 3, 1]), torch.tensor([20, 0, 33, 16]), 8, *given)
    assert result[0] is given[0] and torch.equal(given[0], rows) and torch.equal(given[1], places)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
@pytest.mark.parametrize("whole", [True, False])
def test_append(layout, dtype, whole):
    pages = Pages([20, 3, 33], layout=layout)
    shape = (len(pages.k), 16, 2, 64) if layout == "NHD" else (len(pages.k), 2, 16, 64)
    cache = torch.zeros(shape[0], 2, *shape[1:]).to(dtype)
    lens = torch.tensor([20, 3, 33])
    rows, places = flashinfer.get_batch_indices_positions(indptr([4, 3, 20]), lens, 29)
    k, v = (torch.randn(29, 2, 64, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    target = cache if whole else (cache[:, 0], cache[:, 1])
    flashinfer.append_paged_kv_cache(k, v, rows, places, target, pages.indices, pages.indptr, pages.last, layout)
    expected = torch.zeros(shape[0], 2, *shape[1:])
    for i, (row, place) in enumerate(zip(rows.tolist(), places.tolist())):
        if row < 0:
            continue
        page = pages.indices[pages.indptr[row] + place // 16]
        for half, x in enumerate((k, v)):
            if layout == "NHD":
                expected[page, half, place % 16] = x[i].float()
            else:
                expected[page, half, :, place % 16] = x[i].float()
    assert torch.equal(cache.float(), expected)


def test_append_of_mla():
    pages = Pages([20, 3])
    ckv, kpe = torch.zeros(len(pages.k), 16, 512), torch.zeros(len(pages.k), 16, 64)
    rows, places = flashinfer.get_batch_indices_positions(indptr([2, 3]), torch.tensor([20, 3]), 5)
    a, b = torch.randn(5, 512), torch.randn(5, 64)
    for given in ((ckv, kpe), (ckv, None), (None, kpe)):
        ckv.zero_(), kpe.zero_()
        flashinfer.append_paged_mla_kv_cache(a, b, rows, places, *given, pages.indices, pages.indptr, pages.last)
        for i, (row, place) in enumerate(zip(rows.tolist(), places.tolist())):
            page = pages.indices[pages.indptr[row] + place // 16]
            assert torch.equal(ckv[page, place % 16], a[i] if given[0] is not None else torch.zeros(512))
            assert torch.equal(kpe[page, place % 16], b[i] if given[1] is not None else torch.zeros(64))
    with pytest.raises(ValueError, match="both None"):
        flashinfer.append_paged_mla_kv_cache(a, b, rows, places, None, None, pages.indices, pages.indptr, pages.last)


def test_an_append_beyond_the_cache_writes_nothing():
    pages = Pages([20])
    cache = torch.zeros(2, 2, 16, 2, 64)
    with pytest.raises(folio.InvalidArgument):
        flashinfer.append_paged_kv_cache(torch.ones(2, 2, 64), torch.ones(2, 2, 64), torch.zeros(2, dtype=torch.int32),
                                         torch.tensor([0, 17]), cache, torch.tensor([0, 7]), torch.tensor([0, 2]),
                                         pages.last)
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 32])
def test_rope(dtype, interleave, rotary_dim):
    q, k = queries(9, dtype=dtype), queries(9, heads=2, dtype=dtype, seed=2)
    offsets, at = torch.tensor([100, 7], dtype=torch.int32), indptr([5, 4])
    positions = torch.tensor([100, 101, 102, 103, 104, 7, 8, 9, 10])
    bound = 2.0 ** {torch.float32: -18, torch.float16: -9,
                    torch.bfloat16: -6}[dtype]  # angles of 104 radians in float32

    def check(pair, **rule):
        for result, x in zip(pair, (q, k)):
            exact = reference.turned(x, positions, interleave=interleave, rotary_dim=rotary_dim, **rule)
            assert result.dtype == dtype
            assert bool(((result.double() - exact).abs() <= bound * (1 + exact.abs()) * (4 if dtype == torch.float32
                                                                                         else 1)).all())
            if rotary_dim:
                assert torch.equal(result[..., rotary_dim:], x[..., rotary_dim:])

    given = dict(rotary_dim=rotary_dim, interleave=interleave)
    check(flashinfer.apply_rope(q, k, at, offsets, rope_scale=2.0, rope_theta=1e5, **given), scale=2.0, theta=1e5)
    check(flashinfer.apply_rope_pos_ids(q, k, positions.int(), **given))
    for function, place in ((flashinfer.apply_rope_inplace, (at, offsets)),
                            (flashinfer.apply_rope_pos_ids_inplace, (positions.int(),))):
        copies = q.clone(), k.clone()
        assert function(*copies, *place, **given) is None
        check(copies)


def test_rope_of_llama31():
    """Against the published rule, wave by wave."""
    q, k = queries(6, dtype=torch.float32), queries(6, heads=2, dtype=torch.float32, seed=2)
    positions = torch.tensor([0, 1, 50, 400, 7, 8])
    scale, low, high, old, theta = 8.0, 1.0, 4.0, 64, 1e4
    frequencies = []
    for i in range(32):
        f = theta ** (-2 * i / 64)
        wave = 2 * np.pi / f
        smooth = (old / wave - low) / (high - low)
        frequencies.append(f if wave < old / high else f / scale if wave > old / low
                           else (1 - smooth) * f / scale + smooth * f)
    angles = positions.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)

    def exact(x):
        a, b = x.double().chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    given = dict(rope_scale=scale, rope_theta=theta, low_freq_factor=low, high_freq_factor=high, old_context_len=old)
    results = [flashinfer.apply_llama31_rope_pos_ids(q, k, positions, **given)]
    copies = q.clone(), k.clone()
    flashinfer.apply_llama31_rope_pos_ids_inplace(*copies, positions, **given)
    results.append(copies)
    for pair in results:
        for result, x in zip(pair, (q, k)):
            assert torch.allclose(result.double(), exact(x), atol=3e-4)  # 400 radians in float32
    row = flashinfer.apply_llama31_rope(q[2:3], k[2:3], indptr([1]), torch.tensor([50]), **given)
    assert torch.equal(row[0], results[0][0][2:3])
    copies = q[2:3].clone(), k[2:3].clone()
    flashinfer.apply_llama31_rope_inplace(*copies, indptr([1]), torch.tensor([50]), **given)
    assert torch.equal(copies[1], row[1])


@pytest.mark.parametrize("is_neox", [True, False])
def test_rope_with_a_cache_of_angles(is_neox):
    q, k = queries(5, dtype=torch.float32), queries(5, heads=2, dtype=torch.float32, seed=2)
    angles = torch.arange(64).double()[:, None] * 1e4 ** (-torch.arange(0, 32, 2).double() / 32)
    table = torch.cat((angles.cos(), angles.sin()), -1).float()
    positions = torch.tensor([3, 60, 0, 7, 8])
    flat = q.reshape(5, -1), k.reshape(5, -1)
    result = flashinfer.apply_rope_with_cos_sin_cache(positions, *flat, 64, table, is_neox)
    for got, x in zip(result, (q, k)):
        exact = reference.turned(x, positions, interleave=not is_neox, rotary_dim=32)
        assert torch.allclose(got.double(), exact.reshape(5, -1), atol=1e-5)
    copies = flat[0].clone(), flat[1].clone()
    flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, *copies, 64, table, is_neox)
    assert torch.equal(copies[0], result[0]) and torch.equal(copies[1], result[1])
    with pytest.raises(ValueError, match="cos_sin_cache should be float32"):
        flashinfer.apply_rope_with_cos_sin_cache(positions, *flat, 64, table.double())
    with pytest.raises(ValueError, match="rotary_dim is 33"):
        flashinfer.apply_rope_pos_ids(q, k, positions, rotary_dim=33)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rope_into_fp8(dtype, mla, layout):
    q_rope, q_nope = queries(5, dim=32), queries(5, dim=64, seed=2)
    k_rope, k_nope = (queries(5, heads=1 if mla else 2, dim=dim, seed=3) for dim in (32, 64))
    if mla:
        k_rope, k_nope = k_rope[:, 0], k_nope[:, 0]
    angles = torch.arange(64).double()[:, None] * 1e4 ** (-torch.arange(0, 32, 2).double() / 32)
    table = torch.cat((angles.cos(), angles.sin()), -1).float()
    positions = torch.tensor([3, 4, 60, 61, 62])
    args = (q_rope, k_rope, q_nope, k_nope)
    scales = dict(quant_scale_q=300.0, quant_scale_kv=0.5)  # the first saturates e4m3
    results = flashinfer.rope_quantize_fp8(*args, table, positions, quantize_dtype=dtype, **scales)
    limit, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    for result, x, scale, turn in zip(results, args, (300.0, 0.5, 300.0, 0.5), (True, True, False, False)):
        heads = x if x.dim() == 3 else x[:, None]
        exact = (reference.turned(heads, positions) if turn else heads.double()).reshape(x.shape) * scale
        exact = exact.clamp(-limit, limit)
        assert result.dtype == dtype
        assert bool(((result.double() - exact).abs() <= exact.abs() * eps / 2 + torch.finfo(dtype).smallest_normal * 2).all())
    again = flashinfer.mla_rope_quantize_fp8(*args, table, positions, q_rope_out=torch.empty_like(results[0]), **scales)
    assert torch.equal(again[0].float(), results[0].float()) and again[3].dtype == dtype
    pages = Pages([20, 63])
    rows, places = torch.tensor([0, 0, 1, 1, -1]), torch.tensor([3, 4, 60, 61, -1])
    if mla:
        caches = tuple(torch.zeros(len(pages.k), 16, dim).to(dtype) for dim in (64, 32))
        wanted = results[3], results[1]
        v = None
    else:
        v = queries(5, heads=2, dim=96, seed=4)
        shape = (len(pages.k), 16, 2, 96) if layout == "NHD" else (len(pages.k), 2, 16, 96)
        caches = tuple(torch.zeros(shape).to(dtype) for _ in range(2))
        wanted = torch.cat((results[1].float(), results[3].float()), -1), (v.float() * 0.5).to(dtype)
    q = flashinfer.rope_quantize_fp8_append_paged_kv_cache(*args, v, table, positions, caches, pages.indices,
                                                           pages.indptr, rows, places, quantize_dtype=dtype,
                                                           kv_layout=layout, **scales)
    assert torch.equal(q[0].float(), results[0].float()) and torch.equal(q[1].float(), results[2].float())
    for cache, want in zip(caches, wanted):
        cache = cache.float() if mla or layout == "NHD" else cache.float().transpose(1, 2)
        for i in range(4):
            at = pages.indices[pages.indptr[rows[i]] + places[i] // 16], places[i] % 16
            assert torch.equal(cache[at], want[i].float())
            cache[at] = 0
        assert not cache.any()
    with pytest.raises(ValueError, match="page_size is 8; the cache has pages of 16"):
        flashinfer.rope_quantize_fp8_append_paged_kv_cache(*args, v, table, positions, caches, pages.indices,
                                                           pages.indptr, rows, places, quantize_dtype=dtype,
                                                           kv_layout=layout, page_size=8)


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("bits", [0, 1, 8, 13, 64])
def test_packbits(bitorder, bits):
    x = torch.rand(bits, generator=torch.Generator().manual_seed(bits)) < 0.5
    assert np.array_equal(flashinfer.packbits(x, bitorder).numpy(), np.packbits(x.numpy(), bitorder=bitorder))
    assert torch.equal(flashinfer.packbits(x.int() * 6, bitorder), flashinfer.packbits(x, bitorder))
    lengths = [bits, 0, 5]
    y = torch.cat((x, torch.tensor([True, False, True, True, False])))
    packed, offsets = flashinfer.segment_packbits(y, indptr(lengths), bitorder)
    parts = [np.packbits(part, bitorder=bitorder) for part in np.split(y.numpy(), np.cumsum(lengths)[:-1])]
    assert np.array_equal(packed.numpy(), np.concatenate(parts))
    assert offsets.tolist() == np.cumsum([0, *map(len, parts)]).tolist() and offsets.dtype == torch.int32
    with pytest.raises(ValueError, match="bitorder must be"):
        flashinfer.packbits(x, "middle")


@pytest.mark.parametrize("dtype", DTYPES)
def test_merges(dtype):
    q, k, v = queries(5), queries(30, heads=2, seed=2), queries(30, heads=2, seed=3)
    bounds = [(0, 7), (7, 8), (8, 30), (30, 30)]  # the last state is empty
    states = [reference.attend(q, k[a:b], v[a:b]) for a, b in bounds]
    outs = torch.stack([state[0] for state in states], 1).to(dtype)
    sums = torch.stack([state[1] for state in states], 1).float()
    exact = reference.attend(q, k, v)
    assert_close(flashinfer.merge_states(outs, sums), exact)
    merged = outs[:, 0].contiguous(), sums[:, 0].contiguous()
    for i in range(1, 4):
        merged = flashinfer.merge_state(*merged, outs[:, i].contiguous(), sums[:, i].contiguous())
    assert_close(merged, exact)
    own, lse = outs[:, 0].clone(), sums[:, 0].clone()
    before = own.clone(), lse.clone()
    mask = torch.tensor([True, False, True, True, False])
    flashinfer.merge_state_in_place(own, lse, outs[:, 2].contiguous(), sums[:, 2].contiguous(), mask)
    both = flashinfer.merge_state(*before, outs[:, 2].contiguous(), sums[:, 2].contiguous())
    for got, merged, old in zip((own, lse), both, before):
        assert torch.equal(got[mask], merged[mask]) and torch.equal(got[~mask], old[~mask])
    flashinfer.merge_state_in_place(*before, outs[:, 2].contiguous(), sums[:, 2].contiguous())
    assert torch.equal(before[0], both[0])
    empty = torch.zeros(2, 8, 64, dtype=dtype), torch.full((2, 8), -float("inf"))
    out, lse = flashinfer.merge_state(*empty, *empty)
    assert not out.any() and bool((lse == -float("inf")).all())


def test_concat_mla_k():
    k, nope, rope = torch.zeros(5, 4, 192), torch.randn(5, 4, 128), torch.randn(5, 1, 64)
    flashinfer.concat_mla_k(k, nope, rope)
    assert torch.equal(k, torch.cat((nope, rope.expand(5, 4, 64)), -1))
    with pytest.raises(ValueError, match="k has shape"):
        flashinfer.concat_mla_k(k[..., :190], nope, rope)
