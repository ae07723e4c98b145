"""vLLM's FlashAttention backend on Folio, over steps of a small engine, beside numpy in float64."""

import copy
import pickle
import threading

import folio
import ml_dtypes
import numpy as np
import pytest
from folio import backends
from folio.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionFacts,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
    FlashAttentionOptions,
)

from backend_steps import DTYPES, RULES, SCHEDULES, Engine, layer_arguments

CONTEXT = folio.Context.cpu(num_threads=2)


def make_layer(engine, dtype, rules, **changes):
    given = {**layer_arguments(rules), "model_dtype": dtype, "context": CONTEXT, **changes}
    return FlashAttentionImpl(engine.q_heads, engine.dim, rules.sm_scale, engine.kv_heads, **given)


def engine_config(engine, dtype, **changes):
    model = backends.ModelConfig(dtype=dtype, num_attention_heads=engine.q_heads, num_kv_heads=engine.kv_heads)
    return backends.EngineConfig(model=model, **changes)


def make_builder(engine, dtype, layers, options=None, config=None, stored=None):
    spec = backends.AttentionSpec(page_size=engine.page_size, num_kv_heads=engine.kv_heads, head_size=engine.dim,
                                  dtype=stored or dtype)
    named = {f"model.layers.{i}.attn": layer for i, layer in enumerate(layers)}
    return FlashAttentionMetadataBuilder(spec, named, config or engine_config(engine, dtype),
                                         options or FlashAttentionOptions())


def make_cache(engine, dtype):
    shape = FlashAttentionBackend.get_kv_cache_shape(engine.num_pages, engine.page_size, engine.kv_heads, engine.dim)
    return np.full(shape, np.nan).astype(dtype)  # what is not written may not be read


def run_step(engine, step, builder, layers, caches, prefix=0, layer=None):
    batch = backends.CommonAttentionMetadata(**step.batch_arguments())
    metadata = builder.build(prefix, batch)
    outputs = []
    for impl, cache in zip(layers, caches):
        out = np.full(step.q.shape, np.nan).astype(step.q.dtype)
        impl.do_kv_cache_update(layer, step.k, step.v, cache, metadata.slot_mapping)
        assert impl.forward(layer, step.q, step.k, step.v, cache, metadata, out) is out
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
        metadata, (out,) = run_step(engine, step, builder, [layer], [cache])
        assert metadata.num_reqs == len(schedule) and metadata.num_actual_tokens == len(step.q)
        engine.assert_close(step, out, rules)


def test_a_wrong_rule_is_noticed():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules(left=6))
    step = engine.step(SCHEDULES[0])
    builder = make_builder(engine, "float32", [layer])
    _, (out,) = run_step(engine, step, builder, [layer], [make_cache(engine, np.float32)])
    with pytest.raises(AssertionError):
        engine.assert_close(step, out, engine.rules(left=7))


def test_layers_with_windows_of_their_own_share_a_builder():
    engine = Engine("bfloat16")
    rules = [engine.rules(left=4), engine.rules(), engine.rules(left=17, cap=5.0)]
    layers = [make_layer(engine, "bfloat16", one) for one in rules]
    builder = make_builder(engine, "bfloat16", layers)
    caches = [make_cache(engine, engine.dtype) for _ in layers]
    for schedule in SCHEDULES:
        step = engine.step(schedule)
        _, outputs = run_step(engine, step, builder, layers, caches)
        for out, one in zip(outputs, rules):
            engine.assert_close(step, out, one)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    engine = Engine("bfloat16")
    rules = engine.rules(left=9)
    layer = make_layer(engine, torch.bfloat16, rules)
    builder = make_builder(engine, torch.bfloat16, [layer])
    shape = FlashAttentionBackend.get_kv_cache_shape(engine.num_pages, engine.page_size, engine.kv_heads, engine.dim)
    cache = torch.zeros(shape, dtype=torch.bfloat16)
    for schedule in SCHEDULES:
        step = engine.step(schedule)
        q, k, v = (torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)
                   for values in (step.q, step.k, step.v))
        arguments = {name: torch.from_numpy(values) for name, values in step.batch_arguments().items()}
        metadata = builder.build(0, backends.CommonAttentionMetadata(**arguments))
        layer.do_kv_cache_update(None, k, v, cache, metadata.slot_mapping)
        out = torch.empty_like(q)
        assert layer.forward(None, q, k, v, cache, metadata, out) is out
        engine.assert_close(step, out.float().numpy().astype(engine.dtype), rules)


@pytest.mark.parametrize("integers", [list, lambda values: np.array(values, np.int64)])
def test_lengths_are_taken_as_lists_and_int64(integers):
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    builder = make_builder(engine, "float32", [layer])
    step = engine.step(SCHEDULES[0])
    batch = backends.CommonAttentionMetadata(
        query_start_loc=integers(step.query_start_loc.tolist()), seq_lens=integers(step.seq_lens),
        block_table_tensor=step.block_table.astype(np.int64), slot_mapping=integers(step.slots.tolist()))
    assert (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len) == (2, 26, 21, 21)
    metadata = builder.build(0, batch)
    cache, out = make_cache(engine, np.float32), np.empty_like(step.q)
    layer.do_kv_cache_update(None, step.k, step.v, cache, metadata.slot_mapping)
    layer.forward(None, step.q, step.k, step.v, cache, metadata, out)
    engine.assert_close(step, out, engine.rules())


@pytest.mark.parametrize("mode", ["off", "heuristic", "auto"])
@pytest.mark.parametrize("name", ["causal", "window", "everything"])
def test_shared_prefixes(mode, name):
    engine = Engine(num_pages=128)
    rules = engine.rules(**RULES[name])
    layer = make_layer(engine, "float32", rules)
    builder = make_builder(engine, "float32", [layer], FlashAttentionOptions(cascade=mode))
    cache = make_cache(engine, np.float32)
    run_step(engine, engine.step({"root": 300}), builder, [layer], [cache])
    for i in range(6):
        engine.fork("root", f"r{i}", 288)
    for count in (3, 1):
        step = engine.step({f"r{i}": count + (i == 1) for i in range(6)})
        metadata, (out,) = run_step(engine, step, builder, [layer], [cache], 288 if mode == "heuristic" else 0)
        if mode == "off":
            assert not metadata.use_cascade
        elif mode == "heuristic":
            assert metadata.use_cascade and metadata.common_prefix_len == 288
        elif name == "causal":
            assert metadata.use_cascade and metadata.num_cascade_levels >= 1
        engine.assert_close(step, out, rules)


class EngineLayer:
    """The scales of a layer as vLLM keeps them."""

    _q_scale_float = 1.0
    _k_scale_float = 0.5
    _v_scale_float = 0.25


@pytest.mark.parametrize("layer", [EngineLayer(), backends.AttentionLayerScales(k=0.5, v=0.25)])
def test_fp8_caches_with_scales(layer):
    def stored(scale):
        fp8 = ml_dtypes.float8_e4m3fn
        return lambda value: (value.astype(np.float32) / scale).astype(fp8).astype(np.float32) * scale

    engine = Engine("bfloat16")
    rules = engine.rules()
    impl = make_layer(engine, "bfloat16", rules, kv_cache_dtype="fp8")
    assert impl.kv_cache_dtype == folio.float8_e4m3fn
    config = engine_config(engine, "bfloat16", cache=backends.CacheConfig(cache_dtype="fp8"))
    builder = make_builder(engine, "bfloat16", [impl], config=config, stored="float8_e4m3fn")
    cache = np.zeros(FlashAttentionBackend.get_kv_cache_shape(64, 16, 2, 64), np.uint8)
    for schedule in SCHEDULES:
        step = engine.step(schedule)
        for name, q_len, seq_len in zip(step.names, step.q_lens, step.seq_lens):  # what the cache holds of them
            request = engine.requests[name]
            request.k = request.k.astype(np.float32)
            request.v = request.v.astype(np.float32)
            request.k[seq_len - q_len:] = stored(0.5)(request.k[seq_len - q_len:])
            request.v[seq_len - q_len:] = stored(0.25)(request.v[seq_len - q_len:])
        _, (out,) = run_step(engine, step, builder, [impl], [cache], layer=layer)
        engine.assert_close(step, out, rules)


def test_head_major_caches():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    config = engine_config(engine, "float32", cache=backends.CacheConfig(layout="hnd"))
    builder = make_builder(engine, "float32", [layer], config=config)
    order = FlashAttentionBackend.get_kv_cache_stride_order("hnd")
    shape = FlashAttentionBackend.get_kv_cache_shape(engine.num_pages, engine.page_size, engine.kv_heads, engine.dim)
    memory = np.full([shape[i] for i in order], np.nan, np.float32)
    cache = memory.transpose(np.argsort(order))
    assert cache.shape == shape and cache.strides[3] > cache.strides[2]
    for schedule in SCHEDULES:
        step = engine.step(schedule)
        _, (out,) = run_step(engine, step, builder, [layer], [cache])
        engine.assert_close(step, out, engine.rules())


def test_encoders_see_their_own_tokens_without_a_cache():
    engine = Engine()
    rules = engine.rules(causal=False)
    layer = make_layer(engine, "float32", rules, attn_type="encoder_only")
    builder = make_builder(engine, "float32", [layer])
    step = engine.step({"a": 5, "b": 21, "c": 1})
    batch = backends.CommonAttentionMetadata(query_start_loc=step.query_start_loc, seq_lens=step.seq_lens)
    metadata = builder.build(0, batch)
    assert metadata.attn_type == backends.AttentionType.ENCODER_ONLY
    out = np.empty_like(step.q)
    layer.do_kv_cache_update(None, step.k, step.v, None, [])  # there is nothing to write
    layer.forward(None, step.q, step.k, step.v, None, metadata, out)
    engine.assert_close(step, out, rules)


def test_the_same_step_in_another_groups_pages():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    builder = make_builder(engine, "float32", [layer])
    step = engine.step(SCHEDULES[0])
    metadata = builder.build(0, backends.CommonAttentionMetadata(**step.batch_arguments()))
    moved = np.where(step.block_table >= 0, engine.num_pages - 1 - step.block_table, -1).astype(np.int32)
    pages, offsets = step.slots // engine.page_size, step.slots % engine.page_size
    slots = (engine.num_pages - 1 - pages) * engine.page_size + offsets
    other = builder.update_block_table(metadata, moved, slots)
    assert other.block_table is moved and other.slot_mapping is slots
    for one in (metadata, other):
        cache, out = make_cache(engine, np.float32), np.empty_like(step.q)
        layer.do_kv_cache_update(None, step.k, step.v, cache, one.slot_mapping)
        layer.forward(None, step.q, step.k, step.v, cache, one, out)
        engine.assert_close(step, out, engine.rules())


def test_quantised_outputs():
    engine = Engine("bfloat16")
    rules = engine.rules()
    layer = make_layer(engine, "bfloat16", rules)
    builder = make_builder(engine, "bfloat16", [layer], FlashAttentionOptions(output_dtype="float8_e4m3fn"))
    cache = make_cache(engine, engine.dtype)
    step = engine.step(SCHEDULES[0])
    metadata = builder.build(0, backends.CommonAttentionMetadata(**step.batch_arguments()))
    assert metadata.output_data_type == folio.float8_e4m3fn
    layer.do_kv_cache_update(None, step.k, step.v, cache, metadata.slot_mapping)
    out = np.zeros(step.q.shape, np.uint8)
    with pytest.raises(folio.InvalidArgument, match="scale must be given"):
        layer.forward(None, step.q, step.k, step.v, cache, metadata, out)
    layer.forward(None, step.q, step.k, step.v, cache, metadata, out, output_scale=np.array([0.125], np.float32))
    exact, _ = engine.exact(step, rules)
    error = np.abs(out.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 0.125 - exact)
    half_ulp = 0.5 * float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).eps)
    assert np.all(error <= (half_ulp + 2.0**-7) * np.abs(exact) + 0.125 * 2.0**-10 + 2.0**-7 * np.abs(step.v).max())


def test_without_metadata_the_output_is_zero():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    out = np.full((3, 4, 64), 7.0, np.float32)
    assert layer.forward(None, out, None, None, None, None, out) is out
    assert np.all(out == 0)
    with pytest.raises(folio.InvalidArgument, match="Output tensor must be provided"):
        layer.forward(None, out, None, None, None, None)


def test_metadata_go_stale_and_keep_their_arrays():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    builder = make_builder(engine, "float32", [layer], FlashAttentionOptions(steps_in_flight=1))
    cache = make_cache(engine, np.float32)
    step = engine.step(SCHEDULES[0])
    first, (out,) = run_step(engine, step, builder, [layer], [cache])
    again = np.empty_like(out)
    step.block_table[:] = -1  # the step has read it
    layer.forward(None, step.q, step.k, step.v, cache, first, again)
    assert np.array_equal(out, again)
    run_step(engine, engine.step(SCHEDULES[1]), builder, [layer], [cache])
    with pytest.raises(folio.Error) as refusal:
        layer.forward(None, step.q, step.k, step.v, cache, first, again)
    assert refusal.value.code == folio.ErrorCode.STALE_PLAN


def test_layers_of_one_step_from_several_threads():
    engine = Engine("bfloat16", num_pages=256)
    layer = make_layer(engine, "bfloat16", engine.rules())
    builder = make_builder(engine, "bfloat16", [layer])
    cache = make_cache(engine, engine.dtype)
    step = engine.step({"a": 200, "b": 300})
    metadata, (expected,) = run_step(engine, step, builder, [layer], [cache])
    outputs = [np.empty_like(step.q) for _ in range(4)]
    threads = [threading.Thread(target=layer.forward, args=(None, step.q, step.k, step.v, cache, metadata, out))
               for out in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outputs:
        assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))


def changed(step, **changes):
    return {**step.batch_arguments(), **changes}


def refused_batches(step):
    table = step.block_table
    return {
        "a row of block_table has 1 pages": {"block_table": table[:, :1].copy()},
        "block_table has 1 rows": {"block_table": table[:1]},
        "seq_lens has 1 entries": {"seq_lens": [5]},
        "query_start_loc begins with 1": {"query_start_loc": [1, 5, 26]},
        "request 1 has a seq_len of 3": {"seq_lens": [5, 3]},
        "max_query_len is 4": {"max_query_len": 4},
        "slot_mapping has 27 entries": {"slot_mapping": list(range(16, 43))},
        r"positions 7 to 11": {"positions": [7, 8, 9, 10, 11, *range(21)]},
        "block_table is float32": {"block_table": table.astype(np.float32)},
        r"seq_lens\[1\]: expected an integer": {"seq_lens": [5, "x"]},
        "seq_lens_host lies|mm_req_doc_ranges are not taken": {"mm_req_doc_ranges": [(0, 1, 3)]},
    }


def test_batches_that_contradict_themselves_are_refused():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    builder = make_builder(engine, "float32", [layer])
    step = engine.step(SCHEDULES[0])
    for message, changes in refused_batches(step).items():
        with pytest.raises((folio.Error, TypeError), match=message):
            builder.build(0, backends.CommonAttentionMetadata(**changed(step, **changes)))
    with pytest.raises(folio.InvalidArgument, match="block_table and block_table_tensor are the same"):
        backends.CommonAttentionMetadata(**changed(step, block_table_tensor=step.block_table))
    with pytest.raises(TypeError, match="common_attn_metadata: expected"):
        builder.build(0, {})
    with pytest.raises(folio.InvalidArgument, match="common_prefix_len is 5"):
        builder.build(5, backends.CommonAttentionMetadata(**step.batch_arguments()))


def test_what_forward_refuses_leaves_everything_as_it_was():
    engine = Engine()
    layer = make_layer(engine, "float32", engine.rules())
    builder = make_builder(engine, "float32", [layer])
    cache = make_cache(engine, np.float32)
    step = engine.step(SCHEDULES[0])
    metadata, (out,) = run_step(engine, step, builder, [layer], [cache])
    before, kept = out.copy(), cache.copy()
    q, k, v = step.q, step.k, step.v
    frozen = out.copy()
    frozen.flags.writeable = False
    refused = {
        "Query dtype mismatch": (None, q.astype(np.float16), k, v, cache, metadata, out),
        "query has shape": (None, q[:, :2], k, v, cache, metadata, out),
        "output is read-only": (None, q, k, v, cache, metadata, frozen),
        "output has shape": (None, q, k, v, cache, metadata, out[:5]),
        "the cache has 2 pages": (None, q, k, v, cache[:, :2], metadata, out),
        "kv_cache is float64|kv_cache": (None, q, k, v, cache.astype(np.float64), metadata, out),
        "only fp8 caches have scales": (EngineLayer(), q, k, v, cache, metadata, out),
        "layer: expected None": ("layer", q, k, v, cache, metadata, out),
        "attn_metadata: expected": (None, q, k, v, cache, "metadata", out),
        "fused output quantization": (None, q, k, v, cache, metadata, out, 0.5),
    }
    for message, arguments in refused.items():
        with pytest.raises((folio.Error, TypeError), match=message):
            layer.forward(*arguments)
    for page in (-7, engine.num_pages):
        table = step.block_table.copy()
        table[1, 0] = page
        lost = builder.build(0, backends.CommonAttentionMetadata(**changed(step, block_table=table)))
        with pytest.raises(folio.InvalidArgument, match=rf"block_table\[1, 0\] is {page}; the cache has 64 pages"):
            layer.forward(None, q, k, v, cache, lost, out)
    slots = step.slots.copy()
    slots[3] = engine.num_pages * engine.page_size
    with pytest.raises(folio.InvalidArgument, match="slot"):
        layer.do_kv_cache_update(None, k, v, cache, slots)
    with pytest.raises(folio.InvalidArgument, match="key has shape"):
        layer.do_kv_cache_update(None, k[:3], v, cache, step.slots)
    assert np.array_equal(out, before) and np.array_equal(cache, kept, equal_nan=True)


def test_pages_that_no_window_reaches_may_be_given_away():
    engine = Engine()
    rules = engine.rules(left=6)
    layer = make_layer(engine, "float32", rules)
    builder = make_builder(engine, "float32", [layer])
    cache = make_cache(engine, np.float32)
    run_step(engine, engine.step({"a": 40}), builder, [layer], [cache])
    step = engine.step({"a": 1})  # its window begins in the third page
    step.block_table[0, :2] = [-1, 10**6]
    _, (out,) = run_step(engine, step, builder, [layer], [cache])
    engine.assert_close(step, out, rules)
    step.block_table[0, 2] = -1
    with pytest.raises(folio.InvalidArgument, match=r"block_table\[0, 2\] is -1"):
        run_step(engine, step, builder, [layer], [cache])


def test_layers_that_contradict_themselves_are_refused():
    engine = Engine()
    rules = engine.rules()
    for message, changes in {
            "alibi_slopes has 3 entries": {"alibi_slopes": [0.1, 0.2, 0.3]},
            "Sinks must have the same number of heads": {"sinks": np.zeros(3, np.float32)},
            "sliding_window is 0": {"sliding_window": 0},
            "fp9": {"kv_cache_dtype": "fp9"},
    }.items():
        with pytest.raises(folio.Error, match=message):
            make_layer(engine, "float32", rules, **changes)
    with pytest.raises((TypeError, folio.InvalidArgument), match="attn_type"):
        make_layer(engine, "float32", rules, attn_type="sideways")
    layer = make_layer(engine, "float32", rules)
    with pytest.raises(folio.InvalidArgument, match="layers is empty"):
        make_builder(engine, "float32", [])
    with pytest.raises(TypeError, match="layers: expected"):
        make_builder(engine, "float32", [layer, "layer"])


def test_what_the_backend_says_of_itself():
    assert FlashAttentionBackend.get_name() == FlashAttentionBackend().get_name() == "FLASH_ATTN"
    assert FlashAttentionBackend.get_impl_cls() is FlashAttentionImpl
    assert FlashAttentionBackend.get_builder_cls() is FlashAttentionMetadataBuilder
    assert FlashAttentionBackend.get_kv_cache_shape(4, 16, 2, 64) == (2, 4, 16, 2, 64)
    assert FlashAttentionBackend.get_kv_cache_stride_order() == (0, 1, 2, 3, 4)
    assert FlashAttentionBackend.get_kv_cache_stride_order("hnd", True) == (2, 4, 0, 1, 3, 5)
    assert FlashAttentionBackend.accept_output_buffer and not FlashAttentionBackend.forward_includes_kv_cache_update
    with pytest.raises(folio.InvalidArgument, match="Block size must be a multiple of 16"):
        FlashAttentionBackend.get_kv_cache_shape(4, 17, 2, 64, profile="vllm_2026_03")
    hopper = backends.ComputeDevice(platform="cuda", capability=backends.DeviceCapability(9, 0))
    facts = FlashAttentionFacts(profile="vllm_2026_03")
    assert FlashAttentionBackend.supported_dtypes("vllm_2026_03") == [folio.float16, folio.bfloat16]
    requirements = backends.AttentionRequirements(head_size=100, dtype="float32", device=hopper)
    reasons = FlashAttentionBackend.validate_configuration(requirements, facts)
    assert reasons[:2] == ["head_size not supported", "dtype not supported"]
    fits = backends.AttentionRequirements(head_size=64, dtype="float32")
    assert FlashAttentionBackend.validate_configuration(fits) == []
    chosen = backends.select_backend(fits, {"FLASH_ATTN": FlashAttentionBackend.capability(), "FLASHINFER": None})
    assert chosen.name == "FLASH_ATTN" and chosen.required_layout is None
    with pytest.raises(folio.InvalidArgument, match="head_size not supported"):
        backends.select_backend(requirements, {"FLASH_ATTN": FlashAttentionBackend.capability(facts)}, "FLASH_ATTN")


def test_configurations_are_plain_values():
    config = backends.EngineConfig(model=backends.ModelConfig(dtype="float16", num_attention_heads=8, num_kv_heads=2),
                                   determinism="batch_invariant")
    assert config.model.dtype == folio.float16 and config.determinism == folio.Determinism.BATCH_INVARIANT
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    other = copy.copy(config)
    other.model.max_model_len = 64
    assert other != config and config.model.max_model_len == 0 and "max_model_len=64" in repr(other)
    with pytest.raises(TypeError, match="page_length"):
        backends.AttentionSpec(page_length=16)
    with pytest.raises((TypeError, folio.InvalidArgument), match="cascade"):
        FlashAttentionOptions(cascade="sometimes")
    assert FlashAttentionOptions(output_dtype="float8_e4m3fn").output_dtype == folio.float8_e4m3fn
    assert FlashAttentionOptions().output_dtype is None
