"""vLLM's FlashInfer backend on Folio, over steps of a small engine, beside numpy in float64."""

import folio
import ml_dtypes
import numpy as np
import pytest
from folio import backends
from folio.backends.flashinfer import (
    FlashInferBackend,
    FlashInferFacts,
    FlashInferImpl,
    FlashInferMetadataBuilder,
    FlashInferOptions,
    KernelDispatch,
)

from backend_steps import DTYPES, RULES, SCHEDULES, Engine, layer_arguments

CONTEXT = folio.Context.cpu(num_threads=2)


def make_layer(engine, dtype, rules, **changes):
    given = {**layer_arguments(rules), "model_dtype": dtype, "context": CONTEXT, **changes}
    return FlashInferImpl(engine.q_heads, engine.dim, rules.sm_scale, engine.kv_heads, **given)


def engine_config(engine, dtype, **changes):
    model = backends.ModelConfig(dtype=dtype, num_attention_heads=engine.q_heads, num_kv_heads=engine.kv_heads)
    return backends.EngineConfig(model=model, **changes)


def make_builder(engine, dtype, layers, options=None, config=None, stored=None, **changes):
    spec = backends.AttentionSpec(page_size=engine.page_size, num_kv_heads=engine.kv_heads, head_size=engine.dim,
                                  dtype=stored or dtype)
    named = {f"model.layers.{i}.attn": layer for i, layer in enumerate(layers)}
    return FlashInferMetadataBuilder(spec, named, config or engine_config(engine, dtype),
                                     options or FlashInferOptions(), **changes)


def make_cache(engine, dtype):
    shape = FlashInferBackend.get_kv_cache_shape(engine.num_pages, engine.page_size, engine.kv_heads, engine.dim)
    return np.full(shape, np.nan).astype(dtype)  # what is not written may not be read


def run_step(step, builder, layers, caches, prefix=0, layer=None):
    metadata = builder.build(prefix, backends.CommonAttentionMetadata(**step.batch_arguments()))
    outputs = []
    for impl, cache in zip(layers, caches):
        out = np.full(step.q.shape, np.nan).astype(step.q.dtype)
        assert impl.forward(layer, step.q, step.k, step.v, cache, metadata, out) is out  # it writes the cache too
        outputs.append(out)
    return metadata, outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_steps_of_one_layer(dtype, name):
    engine = Engine(dtype)
    rules = engine.rules(**RULES[name])
    layer = make_layer(engine, dtype, rules)
    builder = make_builder(engine, dtype, [layer])
    cache = make_cache(engine, engine.dtype)
    for schedule in SCHEDULES:
        step = engine.step(schedule)
        metadata, (out,) = run_step(step, builder, [layer], [cache])
        decodes = sum(count == 1 for count in schedule.values())
        assert (metadata.num_decodes, metadata.num_prefills) == (decodes, len(schedule) - decodes)
        engine.assert_close(step, out, rules)


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_block_table_kernels_give_the_same(name):
    engine = Engine("bfloat16")
    rules = engine.rules(**RULES[name])
    layer = make_layer(engine, "bfloat16", rules)
    config = engine_config(engine, "bfloat16", use_block_table_kernels=True)
    builder = make_builder(engine, "bfloat16", [layer], config=config)
    assert builder.use_trtllm_decode_attention
    cache = make_cache(engine, engine.dtype)
    for schedule in SCHEDULES:
        step = engine.step(schedule)
        metadata, (out,) = run_step(step, builder, [layer], [cache])
        assert metadata.decode_use_trtllm or metadata.prefill_use_trtllm
        engine.assert_close(step, out, rules)


def test_layers_with_windows_of_their_own_share_a_builder():
    engine = Engine("float16")
    rules = [engine.rules(left=4), engine.rules(), engine.rules(left=17, cap=5.0)]
    layers = [make_layer(engine, "float16", one) for one in rules]
    builder = make_builder(engine, "float16", layers)
    caches = [make_cache(engine, engine.dtype) for _ in layers]
    for schedule in SCHEDULES:
        step = engine.step(schedule)
        _, outputs = run_step(step, builder, layers, caches)
        for out, one in zip(outputs, rules):
            engine.assert_close(step, out, one)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    engine = Engine("bfloat16")
    rules = engine.rules()
    layer = make_layer(engine, torch.bfloat16, rules)
    builder = make_builder(engine, torch.bfloat16, [layer])
    cache = torch.zeros(FlashInferBackend.get_kv_cache_shape(64, 16, 2, 64), dtype=torch.bfloat16)
    for schedule in SCHEDULES:
        step = engine.step(schedule)
        q, k, v = (torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)
                   for values in (step.q, step.k, step.v))
        arguments = {name: torch.from_numpy(values) for name, values in step.batch_arguments().items()}
        metadata = builder.build(0, backends.CommonAttentionMetadata(**arguments))
        out = torch.empty_like(q)
        assert layer.forward(None, q, k, v, cache, metadata, out) is out
        engine.assert_close(step, out.float().numpy().astype(engine.dtype), rules)


@pytest.mark.parametrize("mode", ["off", "heuristic", "auto"])
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_shared_prefixes(mode, name):
    engine = Engine(num_pages=128)
    rules = engine.rules(**RULES[name])
    layer = make_layer(engine, "float32", rules)
    builder = make_builder(engine, "float32", [layer], FlashInferOptions(cascade=mode))
    cache = make_cache(engine, np.float32)
    run_step(engine.step({"root": 300}), builder, [layer], [cache])
    for i in range(6):
        engine.fork("root", f"r{i}", 288)
    for count in (3, 1):
        step = engine.step({f"r{i}": count for i in range(6)})
        metadata, (out,) = run_step(step, builder, [layer], [cache], 288 if mode == "heuristic" else 0)
        if mode == "off":
            assert not metadata.use_cascade
        elif mode == "heuristic":
            assert metadata.use_cascade and metadata.common_prefix_len == 288
        elif name == "causal":
            assert metadata.use_cascade and metadata.num_cascade_levels >= 1
        engine.assert_close(step, out, rules)


def test_reorder_puts_decodes_in_front():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    builder = make_builder(engine, "float32", [layer])
    assert builder.reorder_batch_threshold == 1
    order = ["prefill", "decode", "extend"]

    def swap(i, j):
        order[i], order[j] = order[j], order[i]

    assert builder.reorder_batch([9, 1, 4], [0, 8, 3], swap)
    assert order == ["decode", "extend", "prefill"]
    assert not builder.reorder_batch([1, 4, 9], [8, 3, 0], swap)


def test_page_tables_in_flashinfers_form():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    builder = make_builder(engine, "float32", [layer])
    step = engine.step({"a": 5, "b": 33})
    metadata = builder.build(0, backends.CommonAttentionMetadata(**step.batch_arguments()))
    indptr, indices, last_page_len, seq_lens = builder.paged_kv_arrays(metadata)
    pages = [engine.requests[name].pages for name in step.names]
    assert indptr.tolist() == [0, 1, 4] and indices.tolist() == sum(pages, [])
    assert last_page_len.tolist() == [5, 1] and seq_lens.tolist() == [5, 33]
    other = make_builder(engine, "float32", [layer])
    with pytest.raises(folio.InvalidArgument, match="another builder's"):
        other.paged_kv_arrays(metadata)


def test_sinks_are_read_again_when_weights_have_been_loaded():
    engine = Engine()
    sinks = np.zeros(4, np.float32)
    layer = make_layer(engine, "float32", engine.rules(), sinks=sinks)
    builder = make_builder(engine, "float32", [layer])
    cache = make_cache(engine, np.float32)
    sinks[:] = [3.0, -2.0, 1.0, 0.5]
    step = engine.step(SCHEDULES[0])
    _, (out,) = run_step(step, builder, [layer], [cache])
    engine.assert_close(step, out, engine.rules(sinks=np.zeros(4)))
    layer.process_weights_after_loading()
    step = engine.step(SCHEDULES[1])
    _, (out,) = run_step(step, builder, [layer], [cache])
    engine.assert_close(step, out, engine.rules(sinks=sinks))
    layer.set_sinks(np.array([1, 2, 3, 4], ml_dtypes.bfloat16))
    step = engine.step({"a": 1, "b": 1})
    _, (out,) = run_step(step, builder, [layer], [cache])
    engine.assert_close(step, out, engine.rules(sinks=np.array([1.0, 2.0, 3.0, 4.0])))
    with pytest.raises(folio.InvalidArgument, match="Expected 4, but got 3"):
        layer.set_sinks(np.zeros(3, np.float32))
    with pytest.raises(folio.InvalidArgument, match="constructed without sinks"):
        make_layer(engine, "float32", engine.rules()).set_sinks(sinks)


def test_fp8_queries_and_outputs_and_what_the_log_is_told():
    engine = Engine("bfloat16")
    rules = engine.rules()
    layer = make_layer(engine, "bfloat16", rules)
    lines = []
    builder = make_builder(engine, "bfloat16", [layer], FlashInferOptions(cascade="auto"),
                           log=lambda level, text: lines.append((level, text)))
    cache = make_cache(engine, engine.dtype)
    step = engine.step({"root": 300})
    run_step(step, builder, [layer], [cache])
    for i in range(6):
        engine.fork("root", f"r{i}", 288)
    step = engine.step({f"r{i}": 1 for i in range(6)})
    metadata = builder.build(0, backends.CommonAttentionMetadata(**step.batch_arguments()))
    assert metadata.use_cascade and not lines
    out = np.zeros(step.q.shape, np.uint8)
    layer.forward(None, step.q, step.k, step.v, cache, metadata, out, output_scale=0.125)
    exact, _ = engine.exact(step, rules)
    error = np.abs(out.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 0.125 - exact)
    half_ulp = 0.5 * float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).eps)
    assert np.all(error <= (half_ulp + 2.0**-7) * np.abs(exact) + 0.125 * 2.0**-10 + 2.0**-7 * np.abs(step.v).max())
    assert len(lines) == 1 and lines[0][0] == backends.LogLevel.WARNING
    layer.forward(None, step.q, step.k, step.v, cache, metadata, out, output_scale=0.125)
    assert len(lines) == 1  # once


def test_the_cache_is_written_before_march_2026_only():
    engine = Engine("float16")
    hopper = backends.ComputeDevice(platform="cuda", capability=backends.DeviceCapability(9, 0))
    for profile, written in (("native", True), ("vllm_2026_03", False)):
        assert FlashInferBackend.forward_includes_kv_cache_update(profile) == written
    dispatch = KernelDispatch(profile="vllm_2025_12", device=hopper, has_module=lambda name: False)
    assert not dispatch.has_flashinfer() and dispatch.query("trtllm_attention")[0] is False
    with pytest.raises(folio.InvalidArgument, match="the layer's profile is native"):
        make_layer(engine, "float16", engine.rules(), dispatch=dispatch)
    with pytest.raises(folio.InvalidArgument, match="probe|asks"):
        KernelDispatch(has_nvcc=lambda: True)


def test_what_is_refused_leaves_everything_as_it_was():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    builder = make_builder(engine, "float32", [layer])
    cache = make_cache(engine, np.float32)
    step = engine.step(SCHEDULES[0])
    metadata, (out,) = run_step(step, builder, [layer], [cache])
    before, kept = out.copy(), cache.copy()
    q, k, v = step.q, step.k, step.v + 1
    refused = {
        "query has shape": (None, q[:, :2], k, v, cache, metadata, out),
        "key has shape": (None, q, k[:3], v, cache, metadata, out),
        "the cache has 2 pages": (None, q, k, v, cache[:2], metadata, out),
        "kv_cache": (None, q, k, v, cache.astype(np.float64), metadata, out),
        "output is read-only": (None, q, k, v, cache, metadata, np.broadcast_to(out[:1], out.shape)),
        "only fp8 caches have scales": (backends.AttentionLayerScales(k=2.0), q, k, v, cache, metadata, out),
        "attn_metadata: expected": (None, q, k, v, cache, 3, out),
        "Output tensor must be provided": (None, q, k, v, cache, metadata),
    }
    for message, arguments in refused.items():
        with pytest.raises((folio.Error, TypeError), match=message):
            layer.forward(*arguments)
    assert np.array_equal(out, before) and np.array_equal(cache, kept, equal_nan=True)
    builder.build(0, backends.CommonAttentionMetadata(**step.batch_arguments()))
    with pytest.raises(folio.Error) as refusal:
        layer.forward(None, q, k, v, cache, metadata, out)
    assert refusal.value.code == folio.ErrorCode.STALE_PLAN
    with pytest.raises(folio.Error, match="not implemented for FlashInferImpl"):
        make_layer(engine, "float32", engine.rules(), attn_type="encoder")
    with pytest.raises(folio.Error, match="causal"):
        builder.build(0, backends.CommonAttentionMetadata(**step.batch_arguments(), causal=False))


def test_what_the_backend_says_of_itself():
    assert FlashInferBackend.get_name() == "FLASHINFER"
    assert FlashInferBackend.get_name("vllm_2025_07") == "FLASHINFER_VLLM_V1"
    assert FlashInferBackend.get_impl_cls() is FlashInferImpl
    assert FlashInferBackend.get_builder_cls() is FlashInferMetadataBuilder
    assert FlashInferBackend.get_kv_cache_shape(4, 16, 2, 64) == (4, 2, 16, 2, 64)
    assert FlashInferBackend.get_kv_cache_stride_order("hnd") == (0, 1, 3, 2, 4)
    assert FlashInferBackend.get_supported_head_sizes("vllm_2025_12") == [64, 128, 256]
    assert FlashInferBackend.get_fp8_dtype_for_flashinfer("fp8_e5m2") == folio.float8_e5m2
    blackwell = backends.ComputeDevice(platform="cuda", capability=backends.DeviceCapability(10, 0))
    facts = FlashInferFacts(profile="vllm_2025_12", device=blackwell)
    assert FlashInferBackend.get_required_kv_cache_layout(facts) == backends.KvCacheLayout.HND
    layout = backends.resolve_kv_cache_layout(required="hnd", configured="nhd")
    assert layout == (backends.KvCacheLayout.HND, backends.KvCacheLayoutSource.REQUIRED, True)
    assert not FlashInferBackend.supports_attn_type("encoder")
