"""folio.flashinfer's causal masks with ranges seen from both sides, beside float64."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402: torch may be missing
from flashinfer_reference import CPU, Pages, assert_close, indptr, per_request, queries  # noqa: E402
from folio import flashinfer  # noqa: E402
from folio.flashinfer import masks  # noqa: E402

Q_LENS, KV_LENS = [3, 17, 1, 5], [20, 17, 9, 33]


def visible(ranges, causal_window, range_window, q_lens=Q_LENS, kv_lens=KV_LENS):
    """FlashInfer's definition, one matrix [queries, keys] a request."""
    seen, row = [], 0
    for q_len, kv_len in zip(q_lens, kv_lens):
        p, key = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)[None]
        first, last = ranges[row:row + q_len].long().split(1, 1)
        causal = (key <= p) & (p - key <= causal_window if causal_window >= 0 else True)
        within = (first <= key) & (key <= last) & (p - key < range_window if range_window > 0 else True)
        seen.append(causal | within)
        row += q_len
    return seen


def images():
    """Ranges that contain their queries, or none."""
    ranges = torch.full((26, 2), -1, dtype=torch.int32)
    ranges[3:8] = torch.tensor([0, 4])  # of the second request: its first keys see one another
    ranges[10:15] = torch.tensor([7, 11])
    ranges[22] = torch.tensor([3, 32])
    return ranges


def make(*buffers, **more):
    given = dict(q_data_type=torch.float16, kv_data_type=torch.float16, head_dim_qk=64, head_dim_vo=64, **more)
    return flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(CPU, "NHD", bool(buffers), *buffers, **given)


def plan(wrapper, pages, q_lens=Q_LENS, **more):
    wrapper.plan(indptr(q_lens), pages.indptr, pages.indices, pages.last, 8, 2, 64, 16, **more)
    return wrapper


@pytest.mark.parametrize("causal_window", [-1, 4, 0])
@pytest.mark.parametrize("range_window", [-1, 3])
def test_ranges_in_both_directions(causal_window, range_window, monkeypatch):
    """Such ranges are spans of the core: no bits are made."""
    monkeypatch.setattr(masks, "range_bits", None)
    pages, q, ranges = Pages(KV_LENS), queries(26), images()
    exact = per_request(q, Q_LENS, pages, masks=visible(ranges, causal_window, range_window))
    wrapper = plan(make(), pages)
    assert_close(wrapper.run(q, pages.whole, ranges, causal_window, range_window, return_lse=True), exact)
    assert_close(wrapper.run_return_lse(q, pages.whole, ranges, causal_window, range_window), exact)
    assert_close(wrapper.forward(q, pages.whole, ranges, causal_window, range_window), exact)
    strided = torch.zeros(26, 4, dtype=torch.int32)
    strided[:, ::2] = ranges
    assert_close(wrapper.run(q, pages.whole, strided[:, ::2], causal_window, range_window), exact)


@pytest.mark.parametrize("seed", range(6))
def test_any_ranges(seed):
    """Ranges that lie anywhere, and more queries than keys."""
    generator = torch.Generator().manual_seed(seed)
    q_lens, kv_lens = [3, 17, 1, 5, 0], [20, 9, 9, 33, 7]
    pages, q = Pages(kv_lens), queries(26)
    ranges = torch.randint(-3, 40, (26, 2), generator=generator, dtype=torch.int32)
    ranges[::5] = torch.tensor([0, 2**31 - 1])
    wrapper = plan(make(), pages, q_lens)
    for causal_window in (-1, 0, 5, 2**31):
        for range_window in (-4, 0, 1, 7, 2**31):
            seen = visible(ranges, causal_window, range_window, q_lens, kv_lens)
            assert_close(wrapper.run(q, pages.whole, ranges, causal_window, range_window, return_lse=True),
                         per_request(q, q_lens, pages, masks=seen))


def test_which_ranges_are_apart_from_their_queries():
    """Just those that the core's one interval a query would not show as they are."""
    q_len, kv_len = 9, 6  # positions -3 to 5
    limits, ahead = masks.token_places(np.array([q_len]), np.array([kv_len]), q_len + 1)
    positions = torch.arange(kv_len - q_len, kv_len)
    found = 0
    for first in range(-2, 9):
        for last in range(-2, 9):
            ranges = torch.tensor([[first, last]] * (q_len + 1), dtype=torch.int32)
            spans = masks.spans_of(ranges, limits)
            for causal_window in (-1, 0, 1, 3):
                for range_window in (0, 1, 2, 4):
                    apart = masks.are_apart(spans, ahead, causal_window, range_window)
                    seen = visible(ranges[:-1], causal_window, range_window, [q_len], [kv_len])[0]
                    for p, keys, is_apart in zip(positions.tolist(), seen, apart.tolist()):
                        begin, end = max(first, 0), min(last + 1, kv_len)
                        begin = max(begin, p - range_window + 1) if range_window > 0 else begin
                        shown = range(max(0, p - causal_window) if causal_window >= 0 else 0, p + 1)
                        if begin < end:
                            shown = range(min(begin, shown.start), max(end, shown.stop))
                        wrong = any(not keys[key] for key in shown)
                        assert wrong == is_apart, (first, last, causal_window, range_window, p)
                        found += wrong
                    assert not apart[-1]  # padding
    assert found > 100


def test_ranges_that_change():
    """Within a step, in place and from layer to layer; the next step begins without any."""
    pages, q, ranges = Pages(KV_LENS), queries(26), images()
    wrapper = plan(make(), pages)
    for change in ("none", "first", "apart", "none", "second"):
        ranges[:] = -1
        if change in ("first", "second"):
            ranges[3:8] = torch.tensor([0, 4] if change == "first" else [1, 6])
        elif change == "apart":
            ranges[3] = torch.tensor([9, 11])
        for causal_window in (-1, 3):
            assert_close(wrapper.run(q, pages.whole, ranges, causal_window, return_lse=True),
                         per_request(q, Q_LENS, pages, masks=visible(ranges, causal_window, -1)))
    longer = Pages([40, 17, 9, 33], seed=3)
    plan(wrapper, longer)
    assert_close(wrapper.run(q, longer.whole, ranges),
                 per_request(q, Q_LENS, longer, masks=visible(ranges, -1, -1, kv_lens=longer.kv_lens)))


def test_the_form_for_graphs():
    pages, q, ranges = Pages(KV_LENS), queries(26), images()
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (5, 5, 32, 4)]
    wrapper = plan(make(*buffers), pages)
    assert wrapper.is_cuda_graph_enabled and torch.equal(buffers[0], indptr(Q_LENS))
    exact = per_request(q, Q_LENS, pages, masks=visible(ranges, 4, -1))
    assert_close(wrapper.run(q, pages.whole, ranges, 4, return_lse=True), exact)
    q_lens = [3, 2, 1, 5]  # the rows behind are padding
    plan(wrapper, pages, q_lens)
    exact = per_request(q[:11], q_lens, pages, masks=visible(ranges[:11], 4, -1, q_lens))
    out = wrapper.run(q, pages.whole, ranges, 4)
    assert_close(out[:11], exact)
    assert not out[11:].any()
    with pytest.raises(ValueError, match="batch size should be fixed"):
        plan(wrapper, Pages(KV_LENS[:3]), Q_LENS[:3])


def test_soft_caps_scales_and_splits():
    pages, q, ranges = Pages(KV_LENS), queries(26), images()
    wrapper = plan(make(o_data_type=torch.float32), pages, logits_soft_cap=2.0, sm_scale=0.1, disable_split_kv=True)
    exact = per_request(q, Q_LENS, pages, masks=visible(ranges, -1, -1), cap=2.0, scale=0.2, v_scale=3.0)
    out = torch.empty(26, 8, 64)
    assert wrapper.run(q, pages.whole, ranges, q_scale=4.0, k_scale=0.5, v_scale=3.0, out=out) is out
    assert_close(out, exact, torch.float16)


def test_wrong_arguments():
    pages, q, ranges = Pages(KV_LENS), queries(26), images()
    wrapper = plan(make(), pages)
    for match, call in [
        ("causal is not supported", lambda: plan(wrapper, pages, causal=True)),
        ("window_left is not supported", lambda: plan(wrapper, pages, window_left=4)),
        ("custom_mask is not supported", lambda: plan(wrapper, pages, custom_mask=torch.ones(3))),
        ("head_dim_vo=128 does not match", lambda: plan(wrapper, pages, head_dim_vo=128)),
        ("q_data_type=torch.bfloat16 does not match", lambda: plan(wrapper, pages, q_data_type=torch.bfloat16)),
        ("qo_indptr is .1, 4, 21, 22. .*it must begin with 0",
         lambda: wrapper.plan(indptr(Q_LENS) + 1, pages.indptr, pages.indices, pages.last, 8, 2, 64, 16)),
        ("paged_kv_indices has 5 entries; its indptr ends at 8",
         lambda: wrapper.plan(indptr(Q_LENS), pages.indptr, pages.indices[:5], pages.last, 8, 2, 64, 16)),
    ]:
        with pytest.raises((ValueError, TypeError), match=match):
            call()
    plan(wrapper, pages)
    for match, call in [
        ("bidirectional_ranges is torch.int64", lambda: wrapper.run(q, pages.whole, ranges.long())),
        (r"bidirectional_ranges is torch.int32 \(25, 2\)", lambda: wrapper.run(q, pages.whole, ranges[:25])),
        ("q has 25 rows on cpu; plan was given 26", lambda: wrapper.run(q[:25], pages.whole, ranges[:25])),
        (r"plan\(\) must be called before", lambda: make().run(q, pages.whole, ranges)),
        ("qo_indptr_buf should be a torch.Tensor", lambda: make(None, None, None, None)),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
