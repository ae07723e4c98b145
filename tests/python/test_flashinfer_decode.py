"""folio.flashinfer's decodes beside float64: the batch wrapper, its form for graphs, one sequence."""

import functools

import folio
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashinfer_reference as reference  # noqa: E402: torch may be missing
from flashinfer_reference import CPU, DTYPES, Pages, assert_close, per_request, queries  # noqa: E402
from folio import flashinfer  # noqa: E402

LENS = [20, 1, 16, 33]


def planned(pages, heads=8, dtype=torch.float16, workspace=CPU, make=flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            **rules):
    wrapper = make(workspace, pages.layout)
    wrapper.plan(pages.indptr, pages.indices, pages.last, heads, pages.k.shape[2], pages.k.shape[3], pages.page_size,
                 q_data_type=dtype, **rules)
    return wrapper


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_layouts_and_dtypes(dtype, layout, page_size):
    pages = Pages(LENS, page_size, dtype=dtype, layout=layout)
    q = queries(4, dtype=dtype)
    exact = per_request(q, [1] * 4, pages)
    wrapper = planned(pages, dtype=dtype)
    assert_close(wrapper.run(q, pages.whole, return_lse=True), exact)
    assert_close(wrapper.run_return_lse(q, pages.pair), exact)
    out, lse = torch.empty_like(q), torch.empty(4, 8)
    assert wrapper.run(q, pages.pair, out=out, lse=lse) is out
    assert_close((out, lse), exact)


@pytest.mark.parametrize("given,rules", [
    ({"window_left": 5}, {"window": 5}),
    ({"window_left": 0}, {"window": 0}),
    ({"logits_soft_cap": 2.0}, {"cap": 2.0}),
    ({"sm_scale": 0.3}, {"scale": 0.3}),
    ({"pos_encoding_mode": "ALIBI"}, {"alibi": True}),
    ({"pos_encoding_mode": "ROPE_LLAMA"}, {"rope": {}}),
    ({"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 1e3}, {"rope": {"scale": 2.0, "theta": 1e3}}),
    ({"fixed_split_size": 4}, {}), ({"disable_split_kv": True}, {}),
])
def test_what_plan_says(given, rules):
    pages = Pages(LENS)
    q = queries(4)
    assert_close(planned(pages, **given).run(q, pages.whole, return_lse=True), per_request(q, [1] * 4, pages, **rules))


def test_six_heads_of_alibi():
    pages = Pages(LENS, kv_heads=3)
    q = queries(4, heads=6)
    wrapper = planned(pages, heads=6, pos_encoding_mode="ALIBI")
    assert_close(wrapper.run(q, pages.whole, return_lse=True), per_request(q, [1] * 4, pages, alibi=True))


def test_scales_are_multiplied_once():
    pages = Pages(LENS)
    q = queries(4)
    exact = per_request(q, [1] * 4, pages, scale=0.125 * 3.0 * 0.5, v_scale=2.0)
    wrapper = planned(pages)
    assert_close(wrapper.run(q, pages.whole, q_scale=3.0, k_scale=0.5, v_scale=2.0, return_lse=True), exact)
    tensors = wrapper.run(q, pages.whole, q_scale=torch.tensor(3.0), k_scale=torch.tensor([0.5]),
                          v_scale=torch.tensor(2.0), return_lse=True)
    assert_close(tensors, exact)
    per_head = wrapper.run(q, pages.whole, k_scale=torch.tensor([1.5, 1.5]), v_scale=torch.tensor([2.0, 2.0]),
                           return_lse=True)
    assert_close(per_head, exact)


def test_sinks_are_run_time_arguments():
    pages = Pages(LENS)
    q, sinks = queries(4), torch.linspace(-1, 2, 8)
    wrapper, cache = planned(pages, window_left=7), pages.whole
    assert_close(wrapper.run(q, cache, return_lse=True, sinks=sinks),
                 per_request(q, [1] * 4, pages, sinks=sinks, window=7))
    assert_close(wrapper.run(q, cache, return_lse=True), per_request(q, [1] * 4, pages, window=7))
    other = sinks + 1.0  # as another layer has
    assert_close(wrapper.run(q, cache, return_lse=True, sinks=other),
                 per_request(q, [1] * 4, pages, sinks=other, window=7))
    parameter = torch.nn.Parameter(sinks)
    with torch.no_grad():
        assert_close(wrapper.run(q, cache, return_lse=True, sinks=parameter),
                     per_request(q, [1] * 4, pages, sinks=sinks, window=7))
    with pytest.raises(folio.InvalidArgument, match="grad"):
        wrapper.run(q, cache, sinks=parameter)
    with pytest.raises(NotImplementedError, match="sinks are given with pos_encoding_mode ALIBI"):
        planned(pages, pos_encoding_mode="ALIBI").run(q, pages.whole, sinks=sinks)


@pytest.mark.parametrize("given,rules", [
    ({}, {"causal": True}), ({"window_right": -1}, {}), ({"window_right": 1}, {"window_right": 1}),
    ({"is_causal": False}, {}), ({"window_left": 4}, {"causal": True, "window": 4}),
    ({"pos_encoding_mode": "ALIBI"}, {"causal": True, "alibi": True}),
    ({"pos_encoding_mode": "ALIBI", "window_right": -1}, {"alibi": True}),
])
def test_several_queries_a_request(given, rules):
    pages = Pages([20, 3, 16, 33])
    q = queries(12)
    wrapper = planned(pages, q_len_per_req=3, **given)
    assert_close(wrapper.run(q, pages.whole, return_lse=True), per_request(q, [3] * 4, pages, **rules))
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="does not match batch_size"):
        wrapper.run(q, pages.whole, q_len_per_req=2)
    with pytest.raises(ValueError, match="q has 4 rows; plan\\(\\) used 4 requests of q_len_per_req=3"):
        wrapper.run(q[:4], pages.whole)
    with pytest.raises(ValueError, match="request 1 has 2 keys; q_len_per_req is 3"):
        planned(Pages([20, 2]), q_len_per_req=3)


@pytest.mark.parametrize("backend", ["trtllm-gen", "cute-dsl"])
def test_queries_a_request_that_rows_of_q_say(backend):
    """With these two backends FlashInfer plans without the number of queries, and takes as many as q has."""
    pages = Pages([20, 4, 16, 33])
    wrapper = planned(pages, make=functools.partial(flashinfer.BatchDecodeWithPagedKVCacheWrapper, backend=backend),
                      window_left=5)
    for q_len in (3, 1, 4):
        q = queries(4 * q_len)
        exact = per_request(q, [q_len] * 4, pages, causal=True, window=5)
        assert_close(wrapper.run(q, pages.whole, return_lse=True), exact)
        with pytest.warns(DeprecationWarning):
            assert_close(wrapper.run(q, pages.whole, return_lse=True, q_len_per_req=q_len), exact)
    with pytest.raises(ValueError, match="request 1 has 4 keys; q_len_per_req is 5"):
        wrapper.run(queries(20), pages.whole)
    with pytest.raises(ValueError, match="q has 6 rows; plan\\(\\) used 4 requests of q_len_per_req=4"):
        wrapper.run(queries(6), pages.whole)
    assert_close(wrapper.run(q, pages.whole, return_lse=True), exact)


def test_requests_without_keys():
    pages = Pages([20, 0, 5])
    q = queries(3)
    out, lse = planned(pages).run(q, pages.whole, return_lse=True)
    assert not out[1].any() and bool((lse[1] == -float("inf")).all())
    assert_close((out, lse), per_request(q, [1] * 3, pages))


def test_fp8_caches_and_outputs():
    pages = Pages(LENS, dtype=torch.float8_e4m3fn)
    q = queries(4)
    wrapper = planned(pages, kv_data_type=torch.float8_e4m3fn)
    exact = per_request(q, [1] * 4, pages, scale=0.125 * 0.5, v_scale=2.0)
    assert_close(wrapper.run(q, pages.pair, k_scale=0.5, v_scale=2.0, return_lse=True), exact)
    out = planned(pages, kv_data_type="float8_e4m3fn", o_data_type=torch.float32).run(q, pages.pair)
    assert out.dtype == torch.float32


def test_fp8_queries_with_a_scale_for_each_head():
    """FlashInfer's fa3 takes (scale_q, scale_k, scale_v) behind the cache: of query heads, KV heads and KV heads."""
    pages = Pages(LENS, dtype=torch.float8_e4m3fn)
    q = queries(4).to(torch.float8_e4m3fn)
    scale_q, scale_k, scale_v = (torch.linspace(0.5, 2.0, n) for n in (8, 2, 2))
    wrapper = planned(pages, dtype=torch.float8_e4m3fn, kv_data_type=torch.float8_e4m3fn, o_data_type=torch.float16)
    out = wrapper.run(q, pages.pair, scale_q, scale_k, scale_v)
    pages.k, pages.v = pages.k.float() * scale_k[:, None], pages.v.float() * scale_v[:, None]
    want, _, size = per_request(q.float() * scale_q[:, None], [1] * 4, pages)
    # q times its scale is rounded to bfloat16: logits move by 2^-9 of the sum of |q k|.
    assert out.dtype == torch.float16 and bool(((out.double() - want).abs() <= 2.0 ** -5 * size).all())


def test_the_form_for_graphs():
    """On a CPU there are no graphs; the buffers and their rules are the same."""
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (5, 32, 4)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(CPU, *buffers)
    assert wrapper.is_cuda_graph_enabled
    for lens in ([5, 1, 2, 3], LENS):
        pages = Pages(lens)
        q = queries(4)
        wrapper.plan(pages.indptr, pages.indices, pages.last, 8, 2, 64, 16)
        assert torch.equal(buffers[1][:len(pages.indices)], pages.indices) and torch.equal(buffers[0], pages.indptr)
        assert_close(wrapper.run(q, pages.whole, return_lse=True), per_request(q, [1] * 4, pages))
    few = Pages([5, 1])
    with pytest.raises(ValueError, match="runtime batch size 2  mismatches the batch size set during initialization 4"):
        wrapper.plan(few.indptr, few.indices, few.last, 8, 2, 64, 16)
    longer = Pages([5, 2, 2, 3])
    with pytest.raises(ValueError, match="q_len_per_req is part of the frozen cudagraph shape"):
        wrapper.plan(longer.indptr, longer.indices, longer.last, 8, 2, 64, 16, q_len_per_req=2)
    many = Pages([16 * 20, 1, 1, 16 * 20])
    with pytest.raises(ValueError, match="allocated buffer: 42 entries for 32"):
        wrapper.plan(many.indptr, many.indices, many.last, 8, 2, 64, 16)
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer should be a torch.Tensor"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(CPU, use_cuda_graph=True)
    with pytest.raises(ValueError, match="must be contiguous torch.int32"):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(CPU, buffers[0].long(), *buffers[1:])


@pytest.mark.parametrize("page_size", [1, 16])
def test_fast_decode_plan(page_size):
    pages = Pages(LENS, page_size)
    q = queries(4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(CPU)
    wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    for host in (None, pages.indptr.clone()):
        wrapper.begin_forward(pages.indptr, pages.indices, pages.last, 8, 2, 64, page_size, q_data_type="float16",
                              window_left=6, global_override_indptr_cpu=host)
        assert_close(wrapper.run(q, pages.whole, return_lse=True), per_request(q, [1] * 4, pages, window=6))


def test_forward_of_earlier_versions():
    pages = Pages(LENS)
    q = queries(4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(CPU)
    wrapper.begin_forward(pages.indptr, pages.indices, pages.last, 8, 2, 64, 16, window_left=3)
    assert_close(wrapper.forward_return_lse(q, pages.whole, window_left=9), per_request(q, [1] * 4, pages, window=9))
    assert_close(wrapper.forward_return_lse(q, pages.whole, "ALIBI"), per_request(q, [1] * 4, pages, alibi=True))
    assert_close((wrapper.forward(q, pages.whole, logits_soft_cap=1.0, sm_scale=0.2)),
                 per_request(q, [1] * 4, pages, cap=1.0, scale=0.2))
    wrapper.end_forward()


def test_int64_and_views():
    pages = Pages(LENS)
    q = queries(4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(CPU, use_tensor_cores=True, backend="fa2")
    assert wrapper.use_tensor_cores
    wrapper.plan(pages.indptr.long(), pages.indices.long(), pages.last.long(), 8, 2, 64, 16)
    exact = per_request(q, [1] * 4, pages)
    assert_close(wrapper.run(q, pages.whole, return_lse=True), exact)
    wide = torch.zeros(4, 8, 96, dtype=torch.float16)
    wide[..., :64] = q
    assert_close(wrapper.run(wide[..., :64], pages.whole[:, :, :, :, :], return_lse=True), exact)
    assert wrapper.resolved_backend and wrapper.workspace_size(None) == (0, 0)
    wrapper.reset_workspace_buffer(torch.empty(8), torch.empty(8))
    with pytest.raises(folio.InvalidArgument, match="there is no plan"):
        wrapper.run(q, pages.whole)


def test_many_layers_of_many_caches():
    """Caches that are freed and made again, in as many steps: a layer of an earlier cache is never taken for a new
    one."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(CPU)
    for seed in range(6):
        pages = Pages(LENS, seed=seed)
        q = queries(4, seed=seed)
        if seed % 2 == 0:
            wrapper.plan(pages.indptr, pages.indices, pages.last, 8, 2, 64, 16)
            first = pages
        caches = [first.whole * 2 ** layer for layer in range(3)]
        for layer, cache in enumerate(caches):
            assert_close(wrapper.run(q, cache, return_lse=True, k_scale=0.5 ** layer, v_scale=0.5 ** layer),
                         per_request(q, [1] * 4, first))
        del caches


def test_runs_like_the_one_before():
    """A run like the plain one before is repeated without a second look; one with other arguments never is."""
    pages, others = Pages(LENS), Pages([7, 30, 2, 18], seed=9)
    q = queries(4)
    wrapper, exact = planned(pages), per_request(q, [1] * 4, pages)
    first, out = wrapper.run(q, pages.pair), torch.empty_like(q)
    assert_close(first, exact)
    assert wrapper.run(q, pages.pair, out=out) is out and torch.equal(out, first)
    assert torch.equal(wrapper.run(q, pages.whole), first) and torch.equal(wrapper.run(q, pages.pair), first)
    assert_close(wrapper.run(q, pages.pair, return_lse=True), exact)
    assert not torch.equal(wrapper.run(q, pages.pair, k_scale=0.5), first)
    assert torch.equal(wrapper.run(q, pages.pair), first)
    # The same memory and shapes, laid out in two ways.
    memory = [half.clone() for half in pages.pair]
    assert torch.equal(wrapper.run(q, tuple(memory)), first)
    for half, given in zip(memory, pages.pair):
        half.view(-1).copy_(given.transpose(1, 2).reshape(-1))
    heads_first = tuple(half.view(half.transpose(1, 2).shape).transpose(1, 2) for half in memory)
    assert torch.equal(wrapper.run(q, heads_first), first)
    with pytest.raises(ValueError, match="out is torch.float32"):
        wrapper.run(q, pages.pair, out=out.float())
    with pytest.raises(ValueError, match="dtype of q"):
        wrapper.run(q.bfloat16(), pages.pair)
    with pytest.raises(ValueError, match="dtype of k"):
        wrapper.run(q, tuple(half.bfloat16() for half in pages.pair))
    pages.last[:] = 1  # the next step has the same caches and other lengths
    shorter = planned(pages).run(q, pages.pair)
    wrapper.plan(pages.indptr, pages.indices, pages.last, 8, 2, 64, pages.page_size)
    assert torch.equal(wrapper.run(q, pages.pair), shorter) and not torch.equal(shorter, first)
    wrapper.plan(others.indptr, others.indices, others.last, 8, 2, 64, others.page_size)
    assert_close(wrapper.run(q, others.pair), per_request(q, [1] * 4, others))


def test_wrong_arguments():
    pages = Pages(LENS)
    q = queries(4)
    wrapper, cache = planned(pages), pages.whole
    wrapper.run(q, cache)
    for match, error, call in [
        ("dtype of q torch.bfloat16 does not match", ValueError, lambda: wrapper.run(q.bfloat16(), pages.whole)),
        ("dtype of k torch.bfloat16 does not match", ValueError, lambda: wrapper.run(q, pages.whole.bfloat16())),
        ("window_left is 3; plan was given -1", ValueError, lambda: wrapper.run(q, pages.whole, window_left=3)),
        ("kv_cache_sf is given", NotImplementedError, lambda: wrapper.run(q, pages.whole, kv_cache_sf=q)),
        ("skip_softmax", NotImplementedError,
         lambda: wrapper.run(q, pages.whole, skip_softmax_threshold_scale_factor=1.0)),
        ("out is torch.float32", ValueError, lambda: wrapper.run(q, pages.whole, out=torch.empty(4, 8, 64))),
        ("lse is torch.float16", ValueError, lambda: wrapper.run(q, pages.whole, lse=torch.empty(4, 8).half())),
        ("takes none, or", TypeError, lambda: wrapper.run(q, pages.whole, 1.0)),
        ("Invalid kv_layout", KeyError, lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(CPU, "DHN")),
        ("backend is 'tpu'", ValueError, lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(CPU, backend="tpu")),
        ("jit_args", NotImplementedError, lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(CPU, jit_args=["x"])),
        ("Invalid pos_encoding_mode", KeyError, lambda: planned(pages, pos_encoding_mode="XPOS")),
        ("seq_lens is", ValueError, lambda: planned(pages, seq_lens=torch.tensor([1, 2, 3, 4]))),
        ("is_causal is True; window_right is 2", ValueError,
         lambda: planned(pages, q_len_per_req=1, window_right=2, is_causal=True)),
        ("scale of the logits is 0", ValueError, lambda: planned(pages, sm_scale=0.0).run(q, pages.whole)),
        ("indices has 2 entries; its indptr ends at 7", ValueError,
         lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(CPU).plan(
             pages.indptr, pages.indices[:2], pages.last, 8, 2, 64, 16)),
        ("kv_data_type is torch.uint8", NotImplementedError, lambda: planned(pages, kv_data_type=torch.uint8)),
        ("paged_kv_cache has shape", ValueError, lambda: wrapper.run(q, pages.whole[:, :1])),
        ("grad", folio.InvalidArgument, lambda: wrapper.run(q.clone().requires_grad_(), pages.whole)),
        ("grad", folio.InvalidArgument, lambda: wrapper.run(q, cache.detach().requires_grad_())),
    ]:
        with pytest.raises(error, match=match):
            call()
    bad = pages.indices.clone()
    bad[1] = 99
    wrapper.plan(pages.indptr, bad, pages.last, 8, 2, 64, 16)
    with pytest.raises(folio.InvalidArgument, match="99"):
        wrapper.run(q, pages.whole)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("given,rules", [
    ({}, {}), ({"window_left": 4}, {"window": 4}), ({"logits_soft_cap": 1.5}, {"cap": 1.5}),
    ({"pos_encoding_mode": "ALIBI"}, {"alibi": True}), ({"pos_encoding_mode": "ROPE_LLAMA"}, {"rope": {}}),
    ({"q_scale": 2.0, "k_scale": 0.5, "v_scale": 3.0, "sm_scale": 0.1}, {"scale": 0.1, "v_scale": 3.0}),
    ({"use_tensor_cores": True}, {}),
])
def test_one_sequence(layout, given, rules):
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(8, 64, generator=generator), torch.randn(37, 2, 64, generator=generator), torch.randn(37, 2,
                                                                                                                64)
    exact = tuple(each[0] for each in reference.attend(q[None], k, v, **rules))
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    assert_close(flashinfer.single_decode_with_kv_cache(q, k, v, layout, return_lse=True, **given), exact)
    assert_close(flashinfer.single_decode_with_kv_cache(q, k, v, layout, **given), exact)
