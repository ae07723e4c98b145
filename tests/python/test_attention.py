"""Folio and its oracle against an independent numpy program."""

import folio
import numpy as np
import pytest

import paged_attention
import problems

RULES = {
    "causal": {},
    "all keys": {"causal": False},
    "window": {"window": (5, -1)},
    "both sides": {"causal": False, "window": (6, 2)},
    "cap": {"cap": 3.0},
    "alibi": {"slopes": True},
    "sinks": {"sinks": True},
    "everything": {"window": (9, -1), "cap": 4.0, "slopes": True, "sinks": True},
}


@pytest.mark.parametrize("dtype", problems.DTYPES)
@pytest.mark.parametrize("batch", problems.BATCHES)
@pytest.mark.parametrize("rules", RULES)
def test_run_matches_numpy(dtype, batch, rules):
    problem = problems.make(dtype, batch, **RULES[rules])
    problems.assert_close(problem, *problems.run(problem), problem.exact())


@pytest.mark.parametrize("dtype", problems.DTYPES)
@pytest.mark.parametrize("rules", RULES)
def test_oracle_matches_numpy(dtype, rules):
    problem = problems.make(dtype, "mixed", **RULES[rules])
    out, lse = folio.reference_attention(problem.config, problem.batch_view(), problem.args(None))
    exact_out, exact_lse, magnitude = problem.exact()
    # The scale is a float32 in both; everything else is float64, so its eps times the terms bounds the difference.
    rules_scale = np.float32(problem.rules.sm_scale)
    rounding = np.abs(np.float64(rules_scale) / problem.rules.sm_scale - 1)
    logits = problems.logit_error(problem) / np.finfo(np.float32).eps
    allowed = 2 * logits * (rounding + np.finfo(np.float64).eps) + 100 * np.finfo(np.float64).eps
    assert np.all(np.abs(out - exact_out) <= allowed * (magnitude + 1))
    assert np.all(np.abs(lse - exact_lse)[np.isfinite(exact_lse)] <= allowed)
    assert np.array_equal(np.isneginf(lse), np.isneginf(exact_lse))


@pytest.mark.parametrize("q_heads,kv_heads", [(1, 1), (8, 1), (6, 3), (16, 2)])
def test_groups_of_heads(q_heads, kv_heads):
    problem = problems.make("bfloat16", "mixed", q_heads=q_heads, kv_heads=kv_heads)
    problems.assert_close(problem, *problems.run(problem), problem.exact())


def test_a_wrong_rule_is_noticed():
    problem = problems.make("float32", "mixed", window=(5, -1))
    result = problems.run(problem)
    problem.rules.left = 6
    with pytest.raises(AssertionError):
        problems.assert_close(problem, *result, problem.exact())


def test_no_visible_key_gives_zero_and_minus_infinity_or_the_sink():
    for sinks in (False, True):
        problem = problems.make("float32", "decode", sinks=sinks)
        problem.batch.kv_len = [0, 0, 0]
        out, lse = problems.run(problem)
        assert np.all(out == 0)
        if sinks:
            np.testing.assert_array_almost_equal_nulp(lse, np.broadcast_to(problem.rules.sinks, lse.shape), 1)
        else:
            assert np.all(np.isneginf(lse))


def test_lse_in_base_two():
    problem = problems.make("float32", "mixed")
    out, lse = problem.outputs()
    problems.run(problem, out=out, lse=folio.LseView(lse, folio.LseBase.TWO))
    lse *= np.float32(np.log(2.0))
    problems.assert_close(problem, out, lse, problem.exact())


def test_dense_tables_and_hnd_caches():
    problem = problems.make("float32", "mixed")
    columns = max(map(len, problem.batch.pages)) + 3
    table = np.full((len(problem.batch.pages), columns), -1, np.int32)
    for row, pages in zip(table, problem.batch.pages):
        row[2:2 + len(pages)] = pages
    k, v = (np.ascontiguousarray(half.transpose(0, 2, 1, 3)) for half in (problem.k, problem.v))
    segment = folio.SegmentArgs(folio.make_hnd_view(k, v), folio.dense_table(table, first_column=2))
    problem.segment = lambda: segment
    problems.assert_close(problem, *problems.run(problem), problem.exact())


def test_packed_caches():
    problem = problems.make("bfloat16", "mixed")
    pages, page_size, heads, dim_v = problem.v.shape
    k = np.ascontiguousarray(problem.k.transpose(0, 2, 1, 3))
    pairs = problem.v.reshape(pages, page_size // 2, 2, heads, dim_v)
    v = np.ascontiguousarray(pairs.transpose(0, 3, 1, 4, 2))
    table = folio.csr_table(problem.batch.page_ids, problem.batch.page_indptr)
    segment = folio.SegmentArgs(folio.make_cpu_packed_view(k, v), table)
    problem.segment = lambda: segment
    problem.config.kv_format = folio.KvFormat.CPU_PACKED
    problems.assert_close(problem, *problems.run(problem), problem.exact())


def test_prefix_and_ragged_tokens_in_two_segments():
    problem = problems.make("float32", "prefill")
    q_len, prefix = problem.batch.q_len, [4, 10]
    whole = [(paged_attention.keys_of(problem.k, pages, length), paged_attention.keys_of(problem.v, pages, length))
             for pages, length in zip(problem.batch.pages, problem.batch.kv_len)]
    rest = [length - before for length, before in zip(problem.batch.kv_len, prefix)]
    k, v = (np.concatenate([keys[half][before:] for keys, before in zip(whole, prefix)]).astype(np.float32)
            for half in (0, 1))
    indptr = np.cumsum([0, *rest]).astype(np.int32)
    segments = [
        folio.KvSegment(np.array(prefix, np.int32)),
        folio.KvSegment(np.array(rest, np.int32), source=folio.KvSource.RAGGED, first_pos=np.array(prefix, np.int32)),
    ]
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    plan = folio.plan(op, folio.BatchView(problem.batch.cu_q, segments), folio.make_plan_buffer(op))
    out, lse = problem.outputs()
    args = folio.AttentionArgs(problem.q, out, [problem.segment(),
                                                folio.SegmentArgs(ragged=folio.RaggedKvView(k, v, indptr))], lse=lse)
    workspace = folio.Workspace(folio.workspace_size(plan))
    folio.run(plan, args, workspace)
    assert sum(q_len) == plan.num_tokens
    problems.assert_close(problem, out, lse, problem.exact())


def test_merging_two_states():
    first, second = (problems.make("float32", "decode", seed=seed) for seed in (1, 2))
    (a, a_lse), (b, b_lse) = problems.run(first), problems.run(second)
    context = folio.Context.cpu(num_threads=1)
    state = folio.AttentionStateView(b, b_lse)
    weights = np.exp(np.stack([a_lse, b_lse]).astype(np.float64))
    expected = (weights[..., None] * np.stack([a, b])).sum(0) / weights.sum(0)[..., None]
    bound = 16 * np.finfo(np.float32).eps * (np.abs(a) + np.abs(b)) * (1 + np.abs(a_lse) + np.abs(b_lse))[..., None]
    many, many_lse = np.empty_like(a), np.empty_like(a_lse)
    states = folio.AttentionStatesView(np.stack([a, b], 1), np.stack([a_lse, b_lse], 1))
    folio.merge_states(context, states, many, many_lse)
    assert np.all(np.abs(many - expected) <= bound)
    folio.merge_state(context, folio.AttentionStateView(a, a_lse), state, a, a_lse)  # in place
    assert np.all(np.abs(a - expected) <= bound)
    assert np.all(np.abs(a_lse - np.log(weights.sum(0))) <= 16 * np.finfo(np.float32).eps * (1 + np.abs(a_lse)))
    with pytest.raises(folio.InvalidArgument, match="all but their last"):
        folio.AttentionStateView(b, b_lse[:1])


def turned(vectors, positions, theta, scale):
    """Rotary embedding of NeoX halves in float64: vectors [n, heads, dim] at positions [n]."""
    half = vectors.shape[2] // 2
    angles = np.asarray(positions)[:, None, None] / scale * theta ** (-np.arange(half) / half)
    first, second = vectors[..., :half].astype(np.float64), vectors[..., half:].astype(np.float64)
    return np.concatenate([first * np.cos(angles) - second * np.sin(angles),
                           first * np.sin(angles) + second * np.cos(angles)], axis=2)


def test_rotary_embedding_in_the_kernel():
    problem = problems.make("float32", "mixed")
    problem.config.features = "rope_llama"
    rope = folio.RopeArgs(theta=500.0, scale=2.0)
    op = folio.prepare(folio.Context.cpu(num_threads=2), problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    out, lse = problem.outputs()
    folio.run(plan, problem.args(out, lse, rope=rope), folio.Workspace(folio.workspace_size(plan)))
    batch, q, k = problem.batch, problem.q.astype(np.float64), problem.k.astype(np.float64)
    positions = np.concatenate([np.arange(kv_len - q_len, kv_len) for q_len, kv_len in zip(batch.q_len, batch.kv_len)])
    q = turned(q, positions, rope.theta, rope.scale)
    for kv_len, pages in zip(batch.kv_len, batch.pages):
        for i, page in enumerate(pages):
            k[page] = turned(k[page], i * 16 + np.arange(16), rope.theta, rope.scale)
    exact = paged_attention.attention(q, k, problem.v, batch, problem.rules)
    # Turning rounds a component of q and of k by about 4 eps of its vector; logit_error counts dim + 4 = 36 of such.
    problems.assert_close(problem, out, lse, (exact[0], exact[1], exact[2] * (1 + 8 / 36)))
    with pytest.raises(AssertionError):
        problems.assert_close(problem, out, lse, problem.exact())
    problem.config.features = None
    with pytest.raises(folio.InvalidArgument, match="rope"):
        plain = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
        plan = folio.plan(plain, problem.batch_view(), folio.make_plan_buffer(plain))
        folio.run(plan, problem.args(out, lse, rope=rope), folio.Workspace(folio.workspace_size(plan)))


def test_merging_in_place_where_a_mask_says_so():
    first, second = (problems.make("float32", "decode", seed=seed) for seed in (1, 2))
    (a, a_lse), (b, b_lse) = problems.run(first), problems.run(second)
    context = folio.Context.cpu(num_threads=1)
    both, both_lse = np.empty_like(a), np.empty_like(a_lse)
    folio.merge_state(context, folio.AttentionStateView(a, a_lse), folio.AttentionStateView(b, b_lse), both, both_lse)
    mask = np.array([0, 3, 0], np.uint8)
    out, lse = a.copy(), a_lse.copy()
    folio.merge_state_in_place(context, out, lse, folio.AttentionStateView(b, b_lse), mask)
    chosen = mask.astype(bool)
    assert np.array_equal(out, np.where(chosen[:, None, None], both, a))
    assert np.array_equal(lse, np.where(chosen[:, None], both_lse, a_lse))
    for bad, message in [(mask[:2], "mask has 2 entries; there are 3 tokens"), (mask.astype(np.int8), "mask is int8")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            folio.merge_state_in_place(context, out, lse, folio.AttentionStateView(b, b_lse), bad)
    with pytest.raises(TypeError, match="lse: expected a value, got None"):
        folio.merge_state_in_place(context, out, None, folio.AttentionStateView(b, b_lse))


def test_log_sum_exps_with_flashinfers_alibi():
    context = folio.Context.cpu(num_threads=1)
    lse = np.random.default_rng(1).standard_normal((5, 2)).astype(np.float32)
    slopes, first_pos, cu_q = np.array([0.5, 0.25], np.float32), [7, 0, 3], [0, 2, 2, 4]
    before, position = lse.copy(), np.array([7, 7, 3, 3])
    folio.shift_alibi_lse(context, lse, cu_q, first_pos, slopes)
    expected = before[:4] + slopes.astype(np.float64) * position[:, None] / np.log(2)
    np.testing.assert_array_almost_equal_nulp(lse[:4], expected.astype(np.float32), 1)
    assert np.array_equal(lse[4], before[4])
    after = lse.copy()
    for given, message in [((lse, [0, 6], [1], slopes), r"cu_q\[1\] is 6"),
                           ((lse, [0, 2], [1], slopes[:1]), "slopes has 1"),
                           ((lse, [0, 2], [1, 2], slopes), "cu_q has 2 entries, first_pos 2"),
                           ((lse.T, [0, 2], [1], slopes), "contiguous|slopes")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            folio.shift_alibi_lse(context, *given)
    assert np.array_equal(lse, after)
