"""Masks as rules: spans, attention chunks, requests that are not causal, left padding; against definitions by numpy."""

import folio
import numpy as np
import pytest

import problems
import test_masks


def refused(match):
    return pytest.raises(folio.InvalidArgument, match=match)


def make_problem():
    """Two requests: 7 and 16 queries, as many as they have keys."""
    return problems.make("float32", "prefill", seed=3)


def with_config(problem, **changes):
    fields = {name: getattr(problem.config, name) for name in (
        "num_q_heads", "num_kv_heads", "head_dim_qk", "head_dim_v", "q", "kv", "page_size", "mask", "window_left",
        "window_right", "features")}
    problem.config = folio.AttentionConfig(**{**fields, **changes})
    return problem


def visible(problem, rule):
    """One matrix [queries, keys] a request, of rule(request, query's position, keys' positions)."""
    seen = []
    for r, (q_len, kv_len) in enumerate(zip(problem.batch.q_len, problem.batch.kv_len)):
        keys = np.arange(kv_len)
        rows = [rule(r, p, keys) for p in range(kv_len - q_len, kv_len)]
        seen.append(np.array(rows, bool).reshape(q_len, kv_len))
    return seen


def check(problem, rule, **rules):
    view = folio.BatchView(problem.batch.cu_q, [folio.KvSegment(problem.batch.lengths)], **rules)
    op = folio.prepare(folio.Context.cpu(num_threads=2), problem.config)
    plan = folio.plan(op, view, folio.make_plan_buffer(op))
    out, lse = problem.outputs()
    args = problem.args(out, lse)
    folio.run(plan, args, folio.Workspace(folio.workspace_size(plan)))
    wanted = test_masks.exact(problem, visible(problem, rule))
    test_masks.assert_close(problem, out, lse, wanted)
    test_masks.assert_close(problem, out, lse, folio.reference_attention(problem.config, view, args))


def test_attention_chunks():
    problem = with_config(make_problem(), attention_chunk=5)
    check(problem, lambda r, p, keys: (keys <= p) & (keys // 5 == p // 5))


@pytest.mark.parametrize("kind", [list, np.array, lambda x: np.array(x, np.int32)])
def test_left_padding(kind):
    starts = [3, 0]
    problem = with_config(make_problem(), features="kv_start")
    check(problem, lambda r, p, keys: (keys <= p) & (keys >= starts[r]), kv_start=kind(starts))


def test_chunks_begin_behind_the_padding():
    problem = with_config(make_problem(), features="kv_start", attention_chunk=4)
    starts = [3, 2]
    check(problem, lambda r, p, keys: (keys <= p) & (keys >= starts[r]) &
          ((keys - starts[r]) // 4 == (p - starts[r]) // 4), kv_start=starts)


@pytest.mark.parametrize("kind", [list, np.array, lambda x: np.array(x, np.uint8)])
def test_requests_that_are_not_causal(kind):
    problem = with_config(make_problem(), features="request_causal", window_left=4, window_right=2)
    causal = [False, True]
    check(problem, lambda r, p, keys: (keys >= p - 4) & (keys <= p + (0 if causal[r] else 2)), causal=kind(causal))


def image_spans(problem, images):
    """Each query's image, of a list of (begin, end) a request."""
    spans = []
    for r, (q_len, kv_len) in enumerate(zip(problem.batch.q_len, problem.batch.kv_len)):
        for p in range(kv_len - q_len, kv_len):
            spans.append(next(([b, e] for b, e in images[r] if b <= p < e), [0, 0]))
    return spans


def in_one_image(images, p, keys):
    return sum(((keys >= b) & (keys < e) for b, e in images if b <= p < e), np.zeros(len(keys), bool))


IMAGES = [[(1, 4), (4, 6)], [(3, 13)]]


@pytest.mark.parametrize("kind", [list, np.array, lambda x: np.array(x, np.int32)])
def test_images_within_causal(kind):
    problem = with_config(make_problem(), features="spans")
    check(problem, lambda r, p, keys: (keys <= p) | in_one_image(IMAGES[r], p, keys),
          spans=kind(image_spans(problem, IMAGES)))


def test_a_window_clamps_images():
    problem = with_config(make_problem(), features="spans", window_left=3)
    check(problem, lambda r, p, keys: ((keys <= p) | in_one_image(IMAGES[r], p, keys)) & (keys >= p - 3),
          spans=image_spans(problem, IMAGES))


def test_a_window_on_both_sides_clamps_images():
    problem = with_config(make_problem(), features="spans", window_left=3, window_right=2)
    check(problem, lambda r, p, keys: ((keys <= p) | in_one_image(IMAGES[r], p, keys)) & (keys >= p - 3) &
          (keys <= p + 2), spans=image_spans(problem, IMAGES))


@pytest.mark.parametrize("reach", [-1, 5])
def test_images_go_beyond_the_window(reach):
    problem = with_config(make_problem(), features="spans", window_left=3, span_window_left=reach)
    far = 100 if reach < 0 else reach
    check(problem, lambda r, p, keys: ((keys <= p) & (keys >= p - 3)) |
          (in_one_image(IMAGES[r], p, keys) & (keys >= p - far)), spans=image_spans(problem, IMAGES))


def test_all_rules_together():
    problem = with_config(make_problem(), features=["spans", "kv_start", "request_causal"], attention_chunk=6,
                          window_left=4)
    starts, causal = [1, 0], [True, False]

    def rule(r, p, keys):
        within = (keys >= starts[r]) & ((keys - starts[r]) // 6 == (p - starts[r]) // 6)
        mask = (keys >= p - 4) & ((keys <= p) | (not causal[r]))
        return within & (mask | (in_one_image(IMAGES[r], p, keys) & (keys >= p)))

    check(problem, rule, kv_start=starts, causal=causal, spans=image_spans(problem, IMAGES))


def test_what_was_not_declared_is_refused():
    problem = make_problem()
    op = folio.prepare(folio.Context.cpu(), problem.config)
    buffer = folio.make_plan_buffer(op)
    segments = [folio.KvSegment(problem.batch.lengths)]
    tokens = sum(problem.batch.q_len)
    for name, value in {"kv_start": [0, 0], "causal": [True, True], "spans": [[0, 0]] * tokens}.items():
        with refused(f"{name} is given, but the op was prepared without"):
            folio.plan(op, folio.BatchView(problem.batch.cu_q, segments, **{name: value}), buffer)


def test_rules_that_need_a_causal_mask():
    problem = make_problem()
    for feature in ("spans", "request_causal"):
        with refused("needs MaskKind::kCausal"):
            folio.prepare(folio.Context.cpu(), with_config(problem, features=feature, mask="none").config)
    with refused("span_window_left is 3, but features lacks kSpans"):
        changed = with_config(problem, span_window_left=3, features=None, mask="causal")
        folio.prepare(folio.Context.cpu(), changed.config)
    with refused("attention_chunk is -1"):
        folio.prepare(folio.Context.cpu(), with_config(problem, attention_chunk=-1).config)


def test_arrays_of_the_wrong_shape():
    problem = make_problem()
    tokens = sum(problem.batch.q_len)

    def view(**rules):
        return folio.BatchView(problem.batch.cu_q, [folio.KvSegment(problem.batch.lengths)], **rules)

    with refused("kv_start has 3 entries"):
        view(kv_start=[0, 0, 0])
    with refused("causal has 1 entries"):
        view(causal=[True])
    with pytest.raises(TypeError, match=r"causal\[1\]: expected a bool, got 1"):
        view(causal=[True, 1])
    with refused("causal is int32; bool and uint8 are taken"):
        view(causal=np.zeros(2, np.int32))
    with refused(r"spans has shape \[\d+, 2\]"):
        view(spans=np.zeros((tokens - 1, 2), np.int32))
    with refused(r"spans has shape \[\d+, 3\]"):
        view(spans=np.zeros((tokens, 3), np.int32))
    with refused("must have 2 dimensions"):
        view(spans=np.zeros(2 * tokens, np.int32))
    with refused("it must be contiguous"):
        view(spans=np.zeros((tokens, 4), np.int32)[:, ::2])
