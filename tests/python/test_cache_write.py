"""Writing a paged cache, and attending over what was written."""

import folio
import ml_dtypes
import numpy as np
import pytest

import problems

PAGES, PAGE_SIZE, HEADS, DIM = 5, 16, 2, 32


def tokens(count, element=np.float32, seed=3):
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal((count, HEADS, DIM)).astype(element) for _ in range(2))


@pytest.mark.parametrize("element", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tokens_go_to_their_slots_and_nowhere_else(element):
    k, v = tokens(20, element)
    slots = np.random.default_rng(4).permutation(PAGES * PAGE_SIZE)[:20].astype(np.int64)
    slots[7] = -1
    caches = [np.full((PAGES, PAGE_SIZE, HEADS, DIM), 7, element) for _ in range(2)]
    expected = [cache.copy() for cache in caches]
    for half, given in zip(expected, (k, v)):
        half.reshape(-1, HEADS, DIM)[np.delete(slots, 7)] = np.delete(given, 7, axis=0)
    folio.write_kv_cache(folio.Context.cpu(num_threads=2), folio.CacheWriteArgs(k, v, slots, folio.make_nhd_view(*caches)))
    for cache, wanted in zip(caches, expected):
        assert np.array_equal(cache.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("element,largest", [(ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)])
def test_fp8_caches_hold_rounded_quotients(element, largest):
    k, v = tokens(16)
    k[0, 0, 0] = 1e9
    cache = folio.make_nhd_view(*(np.zeros((1, PAGE_SIZE, HEADS, DIM), element) for _ in range(2)))
    stored = [np.zeros((1, PAGE_SIZE, HEADS, DIM), np.uint8) for _ in range(2)]
    named = folio.float8_e4m3fn if element == ml_dtypes.float8_e4m3fn else folio.float8_e5m2
    cache = folio.make_nhd_view(*stored, dtype=named)
    assert cache.dtype == named
    scale = np.array([0.5, 0.25], np.float32)
    per_head = folio.Scale(data=scale, granularity=folio.ScaleGranularity.PER_HEAD)
    args = folio.CacheWriteArgs(k, v, np.arange(16, dtype=np.int64), cache, k_scale=per_head, v_scale=2.0)
    folio.write_kv_cache(folio.Context.cpu(num_threads=1), args)
    for half, quotient in zip(stored, (k / scale[:, None], v / np.float32(2.0))):
        expected = np.clip(quotient, -largest, largest).astype(element)
        assert np.array_equal(half[0], expected.view(np.uint8))


def test_written_tokens_are_attended_over():
    problem = problems.make("bfloat16", "mixed")
    exact = problem.exact()
    source = [half.reshape(-1, *half.shape[2:]) for half in (problem.k, problem.v)]
    used = np.concatenate([
        np.array([pages[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(length)], np.int64)
        for pages, length in zip(problem.batch.pages, problem.batch.kv_len)])
    rows = [half[used] for half in source]
    problem.k, problem.v = (np.full_like(half, np.nan) for half in (problem.k, problem.v))
    folio.write_kv_cache(folio.Context.cpu(num_threads=2),
                         folio.CacheWriteArgs(*rows, used, folio.make_nhd_view(problem.k, problem.v)))
    problems.assert_close(problem, *problems.run(problem), exact)


def test_values_inside_keys():
    k, _ = tokens(16)
    memory = np.zeros((1, PAGE_SIZE, HEADS, DIM), np.float32)
    cache = folio.make_nhd_view(memory, memory[..., :16])
    folio.write_kv_cache(folio.Context.cpu(num_threads=1),
                         folio.CacheWriteArgs(k, None, np.arange(16, dtype=np.int64), cache))
    assert cache.head_dim_v == 16 and np.array_equal(memory[0], k)


def test_refusals():
    k, v = tokens(3)
    memory = [np.zeros((PAGES, PAGE_SIZE, HEADS, DIM), np.float32) for _ in range(2)]
    cache, context = folio.make_nhd_view(*memory), folio.Context.cpu(num_threads=1)
    slots = np.array([0, 1, PAGES * PAGE_SIZE], np.int64)
    with pytest.raises(folio.InvalidArgument, match=r"slot_mapping\[2\] is 80"):
        folio.write_kv_cache(context, folio.CacheWriteArgs(k, v, slots, cache))
    assert not memory[0].any()
    with pytest.raises(folio.InvalidArgument, match="k has 3 tokens for 4 slots"):
        folio.write_kv_cache(context, folio.CacheWriteArgs(k, v, np.arange(4), cache))
    with pytest.raises(folio.InvalidArgument, match="num_slots is 5; slot_mapping has 4"):
        folio.CacheWriteArgs(k, v, np.arange(4), cache, num_slots=5)
    with pytest.raises(folio.InvalidArgument, match="the cache is not fp8"):
        folio.write_kv_cache(context, folio.CacheWriteArgs(k, v, np.arange(3), cache, k_scale=2.0))
    short = folio.Scale(data=np.ones(1, np.float32), granularity=folio.ScaleGranularity.PER_HEAD)
    with pytest.raises(folio.InvalidArgument, match="k_scale.data has 1 heads; there are 2"):
        folio.CacheWriteArgs(k, v, np.arange(3), cache, k_scale=short)
    flag = np.zeros(1, np.int32)
    with pytest.raises(folio.InvalidArgument, match="status"):  # a CPU raises instead
        folio.write_kv_cache(context, folio.CacheWriteArgs(k, v, np.arange(3), cache, status=flag))
    with pytest.raises(folio.InvalidArgument, match=r"status is int64 \[1\]; it is one int32"):
        folio.CacheWriteArgs(k, v, np.arange(3), cache, status=flag.astype(np.int64))
    assert not memory[0].any() and not flag.any()


def int8_cache(layout):
    """Arrays of int8 and their scales, with the view over them."""
    order = [0, 1, 2, 3] if layout == "nhd" else [0, 2, 1, 3]
    shape = np.array([PAGES, PAGE_SIZE, HEADS, DIM])[order]
    k, v = (np.zeros(shape, np.int8) for _ in range(2))
    scales = [np.full(shape[:3], np.nan, np.float32) for _ in range(2)]
    make = folio.make_nhd_view if layout == "nhd" else folio.make_hnd_view
    cache = make(k, v, k_token_scales=scales[0], v_token_scales=scales[1])
    token_major = [half if layout == "nhd" else half.swapaxes(1, 2) for half in (k, v, *scales)]
    return cache, token_major


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_int8_caches_have_a_scale_for_each_token_and_head(layout):
    context = folio.Context.cpu(num_threads=2)
    k, v = tokens(20)
    v[3, 1] = 0
    slots = np.random.default_rng(4).permutation(PAGES * PAGE_SIZE)[:20].astype(np.int64)
    cache, arrays = int8_cache(layout)
    assert cache.dtype == folio.int8
    folio.write_kv_cache(context, folio.CacheWriteArgs(k, v, slots, cache))
    for half, scales, given in zip(arrays[:2], arrays[2:], (k, v)):
        wanted = np.abs(given).max(axis=-1) / np.float32(127)
        assert np.array_equal(scales[slots // PAGE_SIZE, slots % PAGE_SIZE], wanted)
        divisor = np.where(wanted > 0, wanted, np.float32(1))[..., None]
        assert np.array_equal(half[slots // PAGE_SIZE, slots % PAGE_SIZE], np.rint(given / divisor).astype(np.int8))

    config = folio.AttentionConfig(num_q_heads=4, num_kv_heads=HEADS, head_dim_qk=DIM, head_dim_v=DIM,
                                   q=folio.float32, kv=np.int8, page_size=PAGE_SIZE)
    op = folio.prepare(context, config)
    k, v = tokens(37, seed=5)
    pages = np.array([3, 0, 4], np.int32)
    slots = (pages[np.arange(37) // PAGE_SIZE] * PAGE_SIZE + np.arange(37) % PAGE_SIZE).astype(np.int64)
    folio.write_kv_cache(context, folio.CacheWriteArgs(k, v, slots, cache))
    q = np.random.default_rng(6).standard_normal((1, 4, DIM)).astype(np.float32)
    out = np.empty_like(q)
    plan = folio.plan(op, folio.BatchView([0, 1], [folio.KvSegment([37])]), folio.make_plan_buffer(op))
    segment = folio.SegmentArgs(cache, folio.dense_table(pages[None]))
    folio.run(plan, folio.AttentionArgs(q, out, [segment]), folio.Workspace(folio.workspace_size(op)))
    stored = [half[pages].reshape(-1, HEADS, DIM)[:37] * scales[pages].reshape(-1, HEADS, 1)[:37].astype(np.float64)
              for half, scales in zip(arrays[:2], arrays[2:])]
    gathered = [np.empty((37, HEADS, DIM), np.float32) for _ in range(2)]
    folio.gather_kv(context, cache, folio.dense_table(pages[None]), [37], *gathered)
    for half, exact in zip(gathered, stored):
        np.testing.assert_array_equal(half, exact.astype(np.float32))
    for head in range(4):
        logits = stored[0][:, head // 2] @ q[0, head].astype(np.float64) / np.sqrt(DIM)
        p = np.exp(logits - logits.max())
        np.testing.assert_allclose(out[0, head], p / p.sum() @ stored[1][:, head // 2], atol=1e-5)


def test_int8_refusals():
    k, v = (np.zeros((PAGES, PAGE_SIZE, HEADS, DIM), np.int8) for _ in range(2))
    scales = [np.ones((PAGES, PAGE_SIZE, HEADS), np.float32) for _ in range(2)]
    with pytest.raises(folio.InvalidArgument, match="k_token_scales.data is null"):
        folio.make_nhd_view(k, v)
    with pytest.raises(folio.InvalidArgument, match="it must be that of k without the head dimension"):
        folio.make_hnd_view(k, v, k_token_scales=scales[0], v_token_scales=scales[1][:2])
    with pytest.raises(folio.InvalidArgument, match="k_token_scales is float16; it must be float32"):
        folio.make_nhd_view(k, v, k_token_scales=scales[0].astype(np.float16), v_token_scales=scales[1])
    with pytest.raises(folio.InvalidArgument, match="k_token_scales are given, but the cache is float32"):
        folio.make_nhd_view(*(half.astype(np.float32) for half in (k, v)), k_token_scales=scales[0])
    cache = folio.make_nhd_view(k, v, k_token_scales=scales[0], v_token_scales=scales[1])
    new = tokens(1)
    with pytest.raises(folio.InvalidArgument, match="int8 caches have a scale for each token and KV head"):
        folio.write_kv_cache(folio.Context.cpu(), folio.CacheWriteArgs(*new, [0], cache, k_scale=2.0))
    scales[1].flags.writeable = False
    cache = folio.make_nhd_view(k, v, k_token_scales=scales[0], v_token_scales=scales[1])
    with pytest.raises(folio.InvalidArgument, match="v_token_scales is read-only"):
        folio.CacheWriteArgs(*new, [0], cache)
    config = dict(num_q_heads=2, num_kv_heads=2, head_dim_qk=DIM, head_dim_v=DIM, page_size=PAGE_SIZE)
    with pytest.raises(folio.Error, match="q is int8, which is a type of paged caches"):
        folio.prepare(folio.Context.cpu(), folio.AttentionConfig(q=folio.int8, kv=folio.int8, **config))


def ds_mla_rows(tokens, seed):
    """Rows of fp8_ds_mla as FlashMLA documents them, and the keys that they hold, in float64."""
    random = np.random.default_rng(seed)
    latents = (100 * random.standard_normal((tokens, 512))).astype(ml_dtypes.float8_e4m3fn)
    scales = random.uniform(0.005, 0.02, (tokens, 4)).astype(np.float32)
    rope = random.standard_normal((tokens, 64)).astype(ml_dtypes.bfloat16)
    rows = np.concatenate([latents.view(np.uint8), scales.view(np.uint8), rope.view(np.uint8)], axis=1)
    keys = np.concatenate([latents.astype(np.float64) * np.repeat(scales.astype(np.float64), 128, axis=1),
                           rope.astype(np.float64)], axis=1)
    return rows, keys


def test_decode_over_rows_of_ds_mla():
    heads, lengths = 4, [37, 1]
    rows, keys = ds_mla_rows(64, 5)
    queries = np.random.default_rng(6).standard_normal((2, heads, 576)).astype(ml_dtypes.bfloat16)
    config = folio.AttentionConfig(num_q_heads=heads, num_kv_heads=1, head_dim_qk=576, head_dim_v=512,
                                   q=folio.bfloat16, kv=folio.float8_e4m3fn, out=folio.float32, page_size=16,
                                   kv_format="fp8_ds_mla")
    op = folio.prepare(folio.Context.cpu(num_threads=2), config)
    assert op.kv_dtype == folio.float32
    plan = folio.plan(op, folio.BatchView([0, 1, 2], [folio.KvSegment(lengths)]), folio.make_plan_buffer(op))
    for shape in ((4, 16, 656), (4, 16, 1, 656)):
        out = np.empty((2, heads, 512), np.float32)
        segment = folio.SegmentArgs(folio.make_fp8_ds_mla_view(rows.reshape(shape)),
                                    folio.dense_table([[2, 0, 1], [3, -1, -1]]))
        workspace = folio.Workspace(folio.workspace_size(op))
        folio.run(plan, folio.AttentionArgs(queries, out, [segment]), workspace)
        for request, pages in enumerate([[2, 0, 1], [3]]):
            seen = keys.reshape(4, 16, 576)[pages].reshape(-1, 576)[:lengths[request]]
            logits = queries[request].astype(np.float64) @ seen.T / 24.0
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            np.testing.assert_allclose(out[request], p / p.sum(axis=1, keepdims=True) @ seen[:, :512], atol=2e-5)


def test_rows_of_ds_mla_get_scales_of_their_own():
    rows = np.zeros((2, 8, 656), np.uint8)
    _, keys = ds_mla_rows(5, 7)
    cache = folio.make_fp8_ds_mla_view(rows)
    args = folio.CacheWriteArgs(keys.reshape(5, 1, 576).astype(np.float32), None, [0, 9, 3, -1, 15], cache)
    folio.write_kv_cache(folio.Context.cpu(), args)
    written = rows.reshape(16, 656)[[0, 9, 3, 15]]
    wanted = keys[[0, 1, 2, 4]].astype(np.float32)
    scales = np.ascontiguousarray(written[:, 512:528]).view(np.float32)
    np.testing.assert_array_equal(scales, np.abs(wanted[:, :512]).reshape(4, 4, 128).max(axis=2) / np.float32(448))
    latents = np.ascontiguousarray(written[:, :512]).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_allclose(latents * np.repeat(scales, 128, axis=1), wanted[:, :512], rtol=0.0626, atol=1e-4)
    for shape, change in (((2, 8, 655), "656"), ((2, 8, 2, 656), "656"), ((16, 656), "656")):
        with pytest.raises(folio.InvalidArgument, match=change):
            folio.make_fp8_ds_mla_view(np.zeros(shape, np.uint8))
