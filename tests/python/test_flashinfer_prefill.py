"""folio.flashinfer's prefills beside float64: pages, ragged keys, one sequence, masks, and what stands on them."""

import folio
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashinfer_reference as reference  # noqa: E402: torch may be missing
from flashinfer_reference import CPU, DTYPES, Pages, assert_close, indptr, per_request, queries  # noqa: E402
from folio import flashinfer  # noqa: E402

Q_LENS, KV_LENS = [3, 17, 1, 5], [20, 17, 9, 33]

RULES = [
    ({}, {}), ({"causal": True}, {"causal": True}),
    ({"causal": True, "window_left": 4}, {"causal": True, "window": 4}), ({"window_left": 4}, {"window": 4}),
    ({"causal": True, "logits_soft_cap": 2.0}, {"causal": True, "cap": 2.0}),
    ({"sm_scale": 0.3, "use_fp16_qk_reduction": True}, {"scale": 0.3}),
    ({"causal": True, "pos_encoding_mode": "ALIBI"}, {"causal": True, "alibi": True}),
    ({"pos_encoding_mode": "ALIBI"}, {"alibi": True}),
    ({"causal": True, "pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0}, {"causal": True, "rope": {"scale": 2.0}}),
    ({"causal": True, "fixed_split_size": 8}, {"causal": True}),
]


def planned(pages, q_lens=Q_LENS, heads=8, dtype=torch.float16, wrapper=None, **rules):
    wrapper = wrapper or flashinfer.BatchPrefillWithPagedKVCacheWrapper(CPU, pages.layout)
    wrapper.plan(indptr(q_lens), pages.indptr, pages.indices, pages.last, heads, pages.k.shape[2], pages.k.shape[3],
                 pages.page_size, q_data_type=dtype, **rules)
    return wrapper


def ragged(pages):
    return tuple(torch.cat(each) for each in zip(*(pages.keys(r) for r in range(len(pages.kv_lens)))))


@pytest.mark.parametrize("given,rules", RULES)
def test_rules(given, rules):
    pages = Pages(KV_LENS)
    q = queries(26)
    exact = per_request(q, Q_LENS, pages, **rules)
    assert_close(planned(pages, **given).run(q, pages.whole, return_lse=True), exact)
    k, v = ragged(pages)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(CPU)
    wrapper.plan(indptr(Q_LENS), indptr(KV_LENS), 8, 2, 64, **given)
    assert_close(wrapper.run(q, k, v, return_lse=True), exact)
    single = {name: value for name, value in given.items() if name != "fixed_split_size"}
    one = flashinfer.single_prefill_with_kv_cache(q[3:20], *pages.keys(1), return_lse=True, **single)
    assert_close(one, reference.attend(q[3:20], *pages.keys(1), **rules))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_layouts_and_dtypes(dtype, layout, page_size):
    pages = Pages(KV_LENS, page_size, dtype=dtype, layout=layout)
    q = queries(26, dtype=dtype)
    exact = per_request(q, Q_LENS, pages, causal=True)
    wrapper = planned(pages, dtype=dtype, causal=True)
    assert_close(wrapper.run_return_lse(q, pages.whole), exact)
    out, lse = torch.empty_like(q), torch.empty(26, 8)
    assert wrapper.run(q, pages.pair, out=out, lse=lse) is out
    assert_close((out, lse), exact)
    k, v = ragged(pages)
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(CPU, layout)
    wrapper.plan(indptr(Q_LENS), indptr(KV_LENS), 8, 2, 64, causal=True, q_data_type=dtype)
    assert_close(wrapper.run_return_lse(q, k, v), exact)
    k, v = (x.transpose(0, 1).contiguous() if layout == "HND" else x for x in pages.keys(3))
    assert_close(flashinfer.single_prefill_with_kv_cache_return_lse(q[21:], k, v, causal=True, kv_layout=layout),
                 reference.attend(q[21:], *pages.keys(3), causal=True))


def test_bases_and_layouts_of_the_lse():
    pages = Pages(KV_LENS)
    q = queries(26)
    wrapper = planned(pages, causal=True, pos_encoding_mode="ALIBI")
    out, sums = wrapper.run(q, pages.whole, return_lse=True)
    for base, factor in (("log2", 1.0), ("ln", 0.6931471805599453)):
        for layout in ("NH", "HN"):
            again, lse = wrapper.run(q, pages.whole, return_lse=True, lse_base=base, lse_layout=layout)
            assert lse.is_contiguous() and torch.equal(again, out)
            assert torch.allclose(lse if layout == "NH" else lse.T, sums * factor, rtol=2e-6, atol=2e-6)
            given = torch.empty_like(lse)
            wrapper.run(q, pages.whole, lse=given, lse_base=base, lse_layout=layout)
            assert torch.equal(given, lse)
    with pytest.raises(ValueError, match="lse_base must be one of"):
        wrapper.run(q, pages.whole, return_lse=True, lse_base="e")
    for more in ({"return_lse": True}, {}):
        with pytest.raises(ValueError, match="lse_layout must be one of"):
            wrapper.run(q, pages.whole, lse_layout="TH", **more)
    with pytest.raises(ValueError, match="must be contiguous"):
        wrapper.run(q, pages.whole, lse=torch.empty(26, 8).T, lse_layout="HN")


def test_heads_of_two_sizes_and_views():
    pages = Pages(KV_LENS, dim=96, dim_v=64)
    q = queries(26, dim=96)
    wrapper = planned(pages, head_dim_vo=64, causal=True, o_data_type=torch.float32)
    out, lse = wrapper.run(q, pages.pair, return_lse=True)
    assert out.dtype == torch.float32
    assert_close((out, lse), per_request(q, Q_LENS, pages, causal=True), torch.float16)
    wide = torch.zeros(26, 8, 3, 96, dtype=torch.float16)
    wide[:, :, 1] = q
    assert_close(wrapper.run(wide[:, :, 1], pages.pair, return_lse=True), (per_request(q, Q_LENS, pages, causal=True)),
                 torch.float16)


@pytest.mark.parametrize("window", [-1, 6])
def test_custom_masks(window):
    pages = Pages(KV_LENS)
    q = queries(26)
    generator = torch.Generator().manual_seed(5)
    masks = [torch.rand(a, b, generator=generator) < 0.6 for a, b in zip(Q_LENS, KV_LENS)]
    masks[0][1] = False  # a row without keys
    flat = torch.cat([mask.reshape(-1) for mask in masks])
    exact = per_request(q, Q_LENS, pages, masks=masks, window=window)
    entries = indptr([a * b for a, b in zip(Q_LENS, KV_LENS)])
    packed, _ = flashinfer.segment_packbits(flat, entries, bitorder="little")
    k, v = ragged(pages)
    for given in ({"custom_mask": flat}, {"packed_custom_mask": packed}, {"custom_mask": flat, "causal": True}):
        assert_close(planned(pages, window_left=window, **given).run(q, pages.whole, return_lse=True), exact)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(CPU)
        wrapper.plan(indptr(Q_LENS), indptr(KV_LENS), 8, 2, 64, window_left=window, **given)
        assert_close(wrapper.run(q, k, v, return_lse=True), exact)
    for given in ({"custom_mask": masks[1]},
                  {"packed_custom_mask": flashinfer.packbits(masks[1].reshape(-1), "little")}):
        one = flashinfer.single_prefill_with_kv_cache(q[3:20], *pages.keys(1), window_left=window, return_lse=True,
                                                      **given)
        assert_close(one, reference.attend(q[3:20], *pages.keys(1), mask=masks[1], window=window))
    sinks = torch.linspace(-1, 1, 8)
    assert_close(planned(pages, custom_mask=flat).run(q, pages.whole, return_lse=True, sinks=sinks),
                 per_request(q, Q_LENS, pages, masks=masks, sinks=sinks))
    with pytest.raises(ValueError, match="the mask has 3 entries"):
        planned(pages, custom_mask=flat[:3])
    with pytest.raises(ValueError, match="packed_custom_mask is torch.uint8 with 2 entries"):
        planned(pages, packed_custom_mask=packed[:2])


def test_items_behind_a_prefix():
    q_lens, kv_lens, prefixes = [8, 6], [20, 11], [12, 5]
    places = [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 0, 1, 2, 0]]
    padded = torch.tensor([row + [0] * (9 - len(row)) for row in places], dtype=torch.int32).to(torch.uint16)
    pages = Pages(kv_lens)
    q = queries(14)
    masks = []
    for q_len, kv_len, prefix, place in zip(q_lens, kv_lens, prefixes, places):
        mask = torch.zeros(q_len, kv_len, dtype=torch.bool)
        for i in range(q_len):
            p = kv_len - q_len + i
            for key in range(p + 1):
                mask[i, key] = p < prefix or key < prefix or p - place[p - prefix] < key
        masks.append(mask)
    wrapper = planned(pages, q_lens, causal=True,
                      prefix_len_ptr=torch.tensor(prefixes, dtype=torch.int32).to(torch.uint32),
                      token_pos_in_items_ptr=padded.reshape(-1), token_pos_in_items_len=9,
                      max_item_len_ptr=torch.tensor([3, 2], dtype=torch.int32).to(torch.uint16))
    assert_close(wrapper.run(q, pages.whole, return_lse=True), per_request(q, q_lens, pages, masks=masks))
    with pytest.raises(NotImplementedError, match="max_item_len_ptr is given"):
        planned(pages, q_lens, max_item_len_ptr=torch.tensor([3, 2]))


def test_scales_sinks_and_variants():
    pages = Pages(KV_LENS)
    q, sinks = queries(26), torch.linspace(-1, 2, 8)
    exact = per_request(q, Q_LENS, pages, causal=True, scale=0.125 * 1.5, v_scale=2.0)
    wrapper = planned(pages, causal=True)
    assert_close(wrapper.run(q, pages.whole, q_scale=3.0, k_scale=0.5, v_scale=2.0, return_lse=True), exact)
    exact = per_request(q, Q_LENS, pages, causal=True, sinks=sinks)
    assert_close(wrapper.run(q, pages.whole, sinks=sinks, return_lse=True), exact)
    jit_args = ["name", *[torch.float16] * 3, torch.int32, 64, 64, ["sink"], ["float"], ["sm_scale"], ["double"],
                "AttentionSink", "source"]
    variant = planned(pages, causal=True,
                      wrapper=flashinfer.BatchPrefillWithPagedKVCacheWrapper(CPU, jit_args=jit_args))
    exact = per_request(q, Q_LENS, pages, causal=True, sinks=sinks, scale=0.2)
    assert_close(variant.run(q, pages.whole, sinks, 0.2, return_lse=True), exact)
    own = planned(pages, causal=True, wrapper=flashinfer.BatchAttentionWithAttentionSinkWrapper(
        CPU, q_data_type=torch.float16, kv_data_type=torch.float16, head_dim_qk=64, head_dim_vo=64))
    assert_close(own.run(q, pages.whole, sinks, 0.2, return_lse=True), exact)
    k, v = ragged(pages)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(CPU, jit_args=jit_args)
    wrapper.plan(indptr(Q_LENS), indptr(KV_LENS), 8, 2, 64, causal=True)
    assert_close(wrapper.run(q, k, v, sinks, 0.2, return_lse=True), exact)
    with pytest.raises(TypeError, match="takes \\(sink, sm_scale\\)"):
        wrapper.run(q, k, v, sinks)
    with pytest.raises(ValueError, match="head_dim_qk is 64 in plan; the wrapper was made for 128"):
        planned(pages, wrapper=flashinfer.BatchAttentionWithAttentionSinkWrapper(CPU, q_data_type=torch.float16,
                                                                                kv_data_type=torch.float16))


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_fp8_queries_with_scales_of_heads(kv_heads):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(n, h, 64, generator=generator).to(torch.float8_e4m3fn)
               for n, h in ((5, 8), (30, kv_heads), (30, kv_heads)))
    scale_q, scale_k, scale_v = (torch.linspace(0.5, 2.0, n) for n in (8, kv_heads, kv_heads))
    exact = reference.attend(q.float() * scale_q[:, None], k.float() * scale_k[:, None], v.float() * scale_v[:, None],
                             causal=True)
    out = flashinfer.single_prefill_with_kv_cache(q, k, v, scale_q, scale_k, scale_v, torch.float16, causal=True)
    assert out.dtype == torch.float16
    # q times its scale is rounded to bfloat16 where heads share keys: logits move by 2^-9 of the sum of |q k|.
    if kv_heads == 8:
        assert_close(out, exact)
    else:
        assert bool(((out.double() - exact[0]).abs() <= 2.0 ** -5 * exact[2]).all())
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(CPU)
    wrapper.plan(indptr([5]), indptr([30]), 8, kv_heads, 64, causal=True, q_data_type=torch.float8_e4m3fn,
                 o_data_type=torch.float16)
    assert torch.equal(wrapper.run(q, k, v, scale_q, scale_k, scale_v), out)
    wrapper.plan(indptr([5]), indptr([30]), 8, kv_heads, 64, causal=True, q_data_type=torch.float8_e4m3fn)
    out = wrapper.run(q, k, v, scale_q, scale_k, scale_v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flashinfer.single_prefill_with_kv_cache(q, k, v, scale_q, scale_k, scale_v, causal=True))


def test_padding_and_empty_requests():
    pages = Pages([20, 0, 33])
    q = queries(12)
    wrapper = planned(pages, [3, 2, 5], causal=True)
    out = torch.full((12, 8, 64), 7.0, dtype=torch.float16)
    wrapper.run(q, pages.whole, out=out)  # the last two rows are padding
    assert bool((out[10:] == 7).all()) and not out[3:5].any()
    assert_close(out[:10], per_request(q[:10], [3, 2, 5], pages, causal=True))
    assert not wrapper.run(q, pages.whole)[10:].any()  # in an output of the wrapper's they are zeros
    with pytest.raises(ValueError, match="q has 9 rows; plan was given 10"):
        wrapper.run(q[:9], pages.whole)
    more = Pages([3])  # more queries than keys: the first see nothing
    result = planned(more, [5], causal=True).run(q[:5], more.whole, return_lse=True)
    assert_close(result, per_request(q[:5], [5], more, causal=True))


def test_the_form_for_graphs():
    pages = Pages(KV_LENS)
    q = queries(26)
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (5, 5, 32, 4)]
    mask_buffer, mask_offsets = torch.zeros(4096, dtype=torch.uint8), torch.zeros(5, dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(CPU, "NHD", True, *buffers, mask_buffer, mask_offsets)
    assert_close(planned(pages, wrapper=wrapper, causal=True).run(q, pages.whole),
                 per_request(q, Q_LENS, pages, causal=True))
    flat = torch.rand(sum(a * b for a, b in zip(Q_LENS, KV_LENS))) < 0.5
    planned(pages, wrapper=wrapper, custom_mask=flat)
    bits = sum(-(-a * b // 8) for a, b in zip(Q_LENS, KV_LENS))
    assert mask_offsets[-1] == bits and bool(mask_buffer[:bits].any()) and not bool(mask_buffer[bits:].any())
    with pytest.raises(ValueError, match="total number of rows in qo_indptr 27"):
        planned(pages, [4, 17, 1, 5], wrapper=wrapper)
    with pytest.raises(ValueError, match="runtime batch size 2 mismatches the batch size 4"):
        planned(Pages([9, 9]), [1, 1], wrapper=wrapper)
    ragged_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(CPU, "NHD", True,
                                                                     *[b.clone() for b in buffers[:2]])
    ragged_wrapper.plan(indptr(Q_LENS), indptr(KV_LENS), 8, 2, 64, causal=True)
    assert_close(ragged_wrapper.run(q, *ragged(pages)), per_request(q, Q_LENS, pages, causal=True))


def test_what_was_run_is_planned_again_with_the_next_mask(monkeypatch):
    """In the form for graphs, as a captured run never asks: a mask's run with sinks, too."""
    monkeypatch.setattr(flashinfer.prefill, "graph_bounds", lambda *_: flashinfer.plans.Bounds(4, 26, 26, 64))
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (5, 5, 32, 4)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(CPU, "NHD", True, *buffers,
                                                             torch.zeros(4096, dtype=torch.uint8))
    pages, q, sinks = Pages(KV_LENS), queries(26), torch.zeros(8)
    steps = []
    for seed in range(2):
        flat = torch.rand(sum(a * b for a, b in zip(Q_LENS, KV_LENS))) < 0.5
        planned(pages, wrapper=wrapper, custom_mask=flat)
        if seed == 0:
            wrapper.run(q, pages.whole), wrapper.run(q, pages.whole, sinks=sinks)
        steps.append([each.step for each in wrapper._plans._planned.values()])
    assert len(steps[0]) == len(steps[1]) == 2 and not any(a is b for a, b in zip(*steps))


def test_forward_of_earlier_versions():
    pages = Pages(KV_LENS)
    q = queries(26)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(CPU)
    wrapper.begin_forward(indptr(Q_LENS), pages.indptr, pages.indices, pages.last, 8, 2, 64, 16)
    assert_close(wrapper.forward_return_lse(q, pages.whole, causal=True), per_request(q, Q_LENS, pages, causal=True))
    assert_close(wrapper.forward(q, pages.whole, window_left=4, sm_scale=0.2),
                 per_request(q, Q_LENS, pages, window=4, scale=0.2))
    assert_close(wrapper.forward_return_lse(q, pages.whole, pos_encoding_mode="ALIBI"),
                 per_request(q, Q_LENS, pages, alibi=True))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(CPU)
    wrapper.begin_forward(indptr(Q_LENS), indptr(KV_LENS), 8, 2, 64)
    assert_close(wrapper.forward_return_lse(q, *ragged(pages), causal=True), per_request(q, Q_LENS, pages, causal=True))


def test_results_that_other_requests_do_not_change():
    pages = Pages(KV_LENS)
    q = queries(26)
    whole = planned(pages, causal=True, disable_split_kv=True).run(q, pages.whole)
    alone = Pages(KV_LENS[:1])
    alone.k[alone.rows[0]], alone.v[alone.rows[0]] = pages.keys(0)
    assert torch.equal(planned(alone, [3], causal=True, disable_split_kv=True).run(q[:3], alone.whole), whole[:3])


def test_wrong_arguments():
    pages = Pages(KV_LENS)
    q = queries(26)
    wrapper = planned(pages)
    k, v = ragged(pages)
    for match, error, call in [
        ("uniform_q_len is 3; request 1 has 17", ValueError, lambda: planned(pages, uniform_q_len=3)),
        ("max_token_per_sequence is 4", ValueError, lambda: planned(pages, max_token_per_sequence=4)),
        ("max_sequence_kv is 4", ValueError, lambda: planned(pages, max_sequence_kv=4)),
        ("seq_lens_q is", ValueError, lambda: planned(pages, seq_lens_q=torch.tensor([1, 2, 3, 4]))),
        ("qo_indptr has 3 requests, paged_kv_indptr 4", ValueError, lambda: planned(pages, Q_LENS[:3])),
        ("qo_indptr is .0, 3, 1, 9.", ValueError, lambda: planned(pages, [3, -2, 8, 17])),
        ("token_pos_in_items_len is given", NotImplementedError, lambda: planned(pages, token_pos_in_items_len=4)),
        ("ALIBI with a window", NotImplementedError, lambda: planned(pages, pos_encoding_mode="ALIBI", window_left=3)),
        ("uses_spcompress is given", NotImplementedError, lambda: wrapper.run(q, pages.whole, uses_spcompress=True)),
        ("variant_owns_mask is given", NotImplementedError,
         lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(CPU, variant_owns_mask=True)),
        ("kv_cache_sf is given", NotImplementedError,
         lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, kv_cache_sf=(k, v))),
        ("v_indptr is given", NotImplementedError, lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(CPU).plan(
            indptr(Q_LENS), indptr(KV_LENS), 8, 2, 64, v_indptr=indptr(KV_LENS))),
        ("q has shape", ValueError, lambda: flashinfer.single_prefill_with_kv_cache(q[0], k, v)),
        ("custom_mask is torch.float32; it is bool", ValueError,
         lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=torch.zeros(26, len(k)))),
        ("grad", folio.InvalidArgument,
         lambda: flashinfer.single_prefill_with_kv_cache(q, k.clone().requires_grad_(), v)),
    ]:
        with pytest.raises(error, match=match):
            call()
