"""FlashInfer's wrappers as C++ has them, on Folio, beside numpy in float64."""

import folio
import numpy as np
import pytest
from folio.backends import flashinfer
from folio.backends.flashinfer import WrapperPages, WrapperPlanOptions

import paged_attention
from backend_steps import DTYPES, Engine

CONTEXT = folio.Context.cpu(num_threads=2)


def options(dtype, **changes):
    return WrapperPlanOptions(**{"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 16,
                                 "causal": True, "q_data_type": dtype, **changes})


def pages_of(engine, names, first=0, last=None):
    """A CSR table of the requests' pages [first, last) of their lists."""
    lists = [engine.requests[name].pages[first:last] for name in names]
    lens = [min(len(engine.requests[name].k), (last or 10**6) * 16) - first * 16 for name in names]
    indptr = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    return WrapperPages(indptr, sum(lists, []), [(n - 1) % 16 + 1 if n else 0 for n in lens])


def cache_of(engine):
    """Every request's keys and values in its pages: [pages, 2, page_size, heads, dim]."""
    cache = np.full((engine.num_pages, 2, 16, engine.kv_heads, engine.dim), np.nan, np.float32)
    for request in engine.requests.values():
        for position in range(len(request.k)):
            place = request.pages[position // 16]
            cache[place, 0, position % 16] = request.k[position]
            cache[place, 1, position % 16] = request.v[position]
    return cache.astype(engine.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes,rules", [
    ({}, {}),
    ({"window_left": 6}, {"left": 6}),
    ({"logits_soft_cap": 3.0}, {"cap": 3.0}),
    ({"causal": False}, {"causal": False}),
])
def test_paged_prefills(dtype, changes, rules):
    engine = Engine(dtype)
    engine.step({"a": 40, "b": 3})
    step = engine.step({"a": 5, "b": 20})
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(context=CONTEXT)
    wrapper.plan(step.query_start_loc, pages_of(engine, "ab"), options(dtype, **changes))
    cache = cache_of(engine)
    out = wrapper.run(step.q, cache)
    engine.assert_close(step, out, engine.rules(**rules))
    halves = wrapper.run(step.q, (cache[:, 0], cache[:, 1]))
    assert np.array_equal(np.asarray(halves, np.float64), np.asarray(out, np.float64))
    assert wrapper.kernel_name and wrapper.workspace_size >= 0


def test_head_major_layouts_sinks_and_lse():
    engine = Engine()
    engine.step({"a": 40, "b": 3})
    step = engine.step({"a": 5, "b": 20})
    sinks = np.linspace(-1.0, 2.0, 4, dtype=np.float32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper("hnd", context=CONTEXT)
    wrapper.plan(step.query_start_loc, pages_of(engine, "ab"), options("float32", sinks=True))
    cache = np.ascontiguousarray(cache_of(engine).transpose(0, 1, 3, 2, 4))
    lse = np.empty((25, 4), np.float32)
    out = np.empty_like(step.q)
    assert wrapper.run(step.q, cache, out, lse=lse, sinks=sinks) is out
    rules = engine.rules(sinks=sinks)
    engine.assert_close(step, out, rules)
    one = engine.requests["b"]
    exact = paged_attention.row(step.q[-1, 3].astype(np.float64), one.k[:, 1].astype(np.float64),
                                one.v[:, 1].astype(np.float64), rules, 22, 3)[1]
    assert abs(lse[-1, 3] * np.log(2.0) - exact) < 1e-5
    with pytest.raises(folio.InvalidArgument, match="sinks were planned for"):
        wrapper.run(step.q, cache)
    with pytest.raises(folio.InvalidArgument, match="sinks has 3 entries"):
        wrapper.run(step.q, cache, sinks=sinks[:3])
    with pytest.raises(folio.InvalidArgument, match="lse is float32"):
        wrapper.run(step.q, cache, sinks=sinks, lse=lse[:4])


def test_custom_masks():
    engine = Engine()
    engine.step({"a": 12})
    step = engine.step({"a": 5})
    mask = engine.random.random((5, 17)) < 0.5
    mask[:, 0] = True
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(context=CONTEXT)
    outputs = []
    for given in ({"custom_mask": mask.ravel()},
                  {"packed_custom_mask": np.packbits(mask.ravel(), bitorder="little")}):
        wrapper.plan(step.query_start_loc, pages_of(engine, "a"), options("float32"), **given)
        outputs.append(wrapper.run(step.q, cache_of(engine)))
    assert np.array_equal(*outputs)
    one = engine.requests["a"]
    for token in range(5):
        seen = np.flatnonzero(mask[token])
        for head in range(4):
            exact, _, magnitude = paged_attention.row(
                step.q[token, head].astype(np.float64), one.k[seen, head // 2].astype(np.float64),
                one.v[seen, head // 2].astype(np.float64), engine.rules(causal=False), 0, head)
            assert np.all(np.abs(outputs[0][token, head] - exact) <= 1e-5 * (magnitude + 1))


def test_ragged_prefills():
    engine = Engine("bfloat16")
    step = engine.step({"a": 5, "b": 20})
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(context=CONTEXT)
    wrapper.plan(step.query_start_loc, step.query_start_loc, options("bfloat16"))
    engine.assert_close(step, wrapper.run(step.q, step.k, step.v), engine.rules())
    with pytest.raises(folio.InvalidArgument, match="k must be .* with at least 25 tokens"):
        wrapper.run(step.q, step.k[:24], step.v)


def test_decodes_and_the_form_for_graphs():
    engine = Engine()
    engine.step({"a": 40, "b": 3})
    plain = flashinfer.BatchDecodeWithPagedKVCacheWrapper(context=CONTEXT)
    fixed = flashinfer.BatchDecodeWithPagedKVCacheWrapper(fixed_batch_size=2, max_num_pages=16, context=CONTEXT)
    assert fixed.is_cuda_graph_enabled and fixed.fixed_batch_size == 2 and not plain.is_cuda_graph_enabled
    for _ in range(3):
        step = engine.step({"a": 1, "b": 1})
        plain.plan(pages_of(engine, "ab"), options("float32"))
        flashinfer.fast_plan_decode(fixed, pages_of(engine, "ab"), options("float32"))
        for wrapper in (plain, fixed):
            engine.assert_close(step, wrapper.run(step.q, cache_of(engine)), engine.rules())
    with pytest.raises(folio.InvalidArgument, match="The batch size should be fixed in cudagraph mode"):
        flashinfer.fast_plan_decode(fixed, pages_of(engine, "a"), options("float32"))
    with pytest.raises(folio.InvalidArgument, match="both given"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(fixed_batch_size=2)


def test_cascades():
    engine = Engine(num_pages=128)
    engine.step({"root": 70})
    for name in "abc":
        engine.fork("root", name, 64)
    engine.step({"a": 3, "b": 9, "c": 1})
    step = engine.step({"a": 2, "b": 1, "c": 4})
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, context=CONTEXT)
    shared = WrapperPages([0, 4], engine.requests["a"].pages[:4], [16])
    wrapper.plan([[0, 7], step.query_start_loc], [shared, pages_of(engine, "abc", 4)], options("float32"))
    engine.assert_close(step, wrapper.run(step.q, cache_of(engine)), engine.rules())
    with pytest.raises(folio.InvalidArgument, match="qo_indptr_arr has 1 levels"):
        wrapper.plan([step.query_start_loc], [shared], options("float32"))


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    engine = Engine("float16")
    engine.step({"a": 40, "b": 3})
    step = engine.step({"a": 1, "b": 1})
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(context=CONTEXT)
    wrapper.plan(pages_of(engine, "ab"), options(torch.float16))
    out = wrapper.run(torch.from_numpy(step.q), torch.from_numpy(cache_of(engine)))
    assert isinstance(out, torch.Tensor)
    engine.assert_close(step, out.numpy(), engine.rules())


def test_what_is_refused():
    engine = Engine()
    step = engine.step({"a": 20})
    cache = cache_of(engine)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(context=CONTEXT)
    with pytest.raises(folio.InvalidArgument):
        wrapper.run(step.q, cache)  # before any plan
    with pytest.raises(folio.InvalidArgument, match="last_page_len"):
        wrapper.plan(step.query_start_loc, WrapperPages([0, 2], [1, 2], [17]), options("float32"))
    with pytest.raises(TypeError, match="num_qo_heads"):
        WrapperPlanOptions(num_kv_heads=2, head_dim_qk=64)
    wrapper.plan(step.query_start_loc, WrapperPages([0, 2], [1, 99], [4]), options("float32"))
    with pytest.raises(folio.InvalidArgument, match="page indices are from 0 to 99; paged_kv_cache has 64 pages"):
        wrapper.run(step.q, cache)
    wrapper.plan(step.query_start_loc, pages_of(engine, "a"), options("float32"))
    with pytest.raises(folio.InvalidArgument, match="q is|query|q "):
        wrapper.run(step.q[:3], cache)
    with pytest.raises(TypeError, match="paged_kv_cache: expected one tensor"):
        wrapper.run(step.q, (cache,))
    engine.assert_close(step, wrapper.run(step.q, cache), engine.rules())
