"""The builder and the implementation over CPU tensors, without an engine: against attention in float64."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import folio_vllm  # noqa: E402
from folio.backends.layer_kinds import PreparedKind, context_of  # noqa: E402
from folio_vllm.context import graph_bounds  # noqa: E402
from stand_ins import CPU, DIM, HEADS, KV_HEADS, PAGE, Step, assert_close, builder_of, engine, layer_of  # noqa: E402
from vllm.v1.attention.backend import AttentionType  # noqa: E402

SETTINGS = {
    "plain": {}, "window": {"sliding_window": 9}, "window of one": {"sliding_window": 1},
    "soft cap": {"logits_soft_cap": 3.0}, "alibi": {"alibi_slopes": [2.0**-i for i in range(1, HEADS + 1)]},
    "sinks": {"sinks": torch.linspace(-2, 2, HEADS).to(torch.bfloat16)},
    "all of them": {"sliding_window": 30, "logits_soft_cap": 5.0, "alibi_slopes": [0.1] * HEADS,
                    "sinks": torch.ones(HEADS, dtype=torch.float16)}}


@pytest.mark.parametrize("kv_format", ["strided", "cpu_packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_mixed_step(settings, dtype, kv_format):
    if kv_format == "cpu_packed" and dtype == torch.float32:
        pytest.skip("packed pages are of 16 bits and fp8")
    step, layer = Step(dtype), layer_of(**settings)
    builder, cache = builder_of([layer], dtype, kv_format=kv_format), step.cache(dtype)
    step.write(layer, cache)
    assert_close(step, step.run(layer, cache, builder.build(0, step.common())), layer.impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [(0.5, 2.0), ([0.5, 0.25], [1.0, 2.0])], ids=["per tensor", "per head"])
def test_fp8_caches(cache_dtype, dtype, scale):
    step, layer = Step(dtype), layer_of(kv_cache_dtype=cache_dtype, scale=scale)
    builder, cache = builder_of([layer], dtype, torch.uint8), step.cache(torch.float8_e5m2)
    cache.fill_(0x7F)  # NaN in both
    fp8 = torch.float8_e5m2 if cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
    step.write(layer, cache)

    def stored(tensors, scales):
        return [(t.float() / scales.reshape(-1, 1)).to(fp8).float() * scales.reshape(-1, 1) for t in tensors]

    k, v = stored(step.k, layer._k_scale), stored(step.v, layer._v_scale)
    assert_close(step, step.run(layer, cache, builder.build(0, step.common())), layer.impl, k, v)


def test_a_cache_in_any_order_of_dimensions():
    """CUDA's default order is [blocks, block_size, KV heads, ...]; a block may be followed by another layer's."""
    step, layer = Step(), layer_of()
    builder = builder_of([layer])
    memory = torch.full((step.num_pages, 2, PAGE, KV_HEADS, 2 * DIM), float("nan"))
    cache = memory[:, 1].transpose(1, 2)
    step.write(layer, cache)
    assert_close(step, step.run(layer, cache, builder.build(0, step.common())), layer.impl)
    assert torch.isnan(memory[:, 0]).all()


def test_one_plan_serves_all_layers_of_a_step():
    step, layers = Step(), [layer_of() for _ in range(3)] + [layer_of(sliding_window=9)]
    builder = builder_of(layers)
    before = folio_vllm.counts()
    metadata = builder.build(0, step.common())
    assert len(metadata.plans) == 2, "one plan for the layers without a window, one for those with it"
    assert folio_vllm.counts()["plans"] - before.get("plans", 0) == 2
    for layer in layers:
        cache = step.cache(torch.float32)
        step.write(layer, cache)
        assert_close(step, step.run(layer, cache, metadata), layer.impl)
    after = folio_vllm.counts()
    assert after["layers"] - before.get("layers", 0) == 4 and after["plans"] - before.get("plans", 0) == 2


def test_steps_follow_each_other():
    """Chunked prefill: a prompt in chunks of 20, then decodes, in one cache."""
    whole = Step(q_lens=[1], kv_lens=[64], padding=0)
    layer = layer_of()
    builder, cache, outs, done = builder_of([layer]), whole.cache(torch.float32), [], 0
    everything = Step(q_lens=[64], kv_lens=[64], padding=0)
    everything.k, everything.v, everything.table = whole.k, whole.v, whole.table
    for length in (20, 20, 20, 1, 1, 1, 1):
        step = Step(q_lens=[length], kv_lens=[done + length], padding=0)
        step.table, step.q = whole.table, everything.q[done:done + length]
        layer.impl.do_kv_cache_update(layer, whole.k[0][done:done + length], whole.v[0][done:done + length], cache,
                                      whole.slots()[done:done + length])
        outs.append(step.run(layer, cache, builder.build(0, step.common())))
        done += length
    assert_close(everything, torch.cat(outs), layer.impl)


def test_another_groups_table_takes_the_plan_along():
    step, layers = Step(), [layer_of(), layer_of()]
    first, second = builder_of(layers[:1]), builder_of(layers[1:])
    metadata = first.build(0, step.common())
    other = Step()
    other.table = torch.flip(step.table, dims=[0])
    before = folio_vllm.counts()["plans"]
    moved = second.update_block_table(metadata, other.table, other.slots())
    assert folio_vllm.counts()["plans"] == before and moved.plans == metadata.plans
    cache = step.cache(torch.float32)
    other.write(layers[1], cache)
    assert_close(other, other.run(layers[1], cache, moved), layers[1].impl)


def test_a_table_for_layers_of_another_kind_is_planned():
    step, plain, window = Step(), layer_of(), layer_of(sliding_window=9)
    metadata = builder_of([plain]).build(0, step.common())
    moved = builder_of([window]).update_block_table(metadata, step.table, step.slots())
    assert len(metadata.plans) == 1 and len(moved.plans) == 2
    cache = step.cache(torch.float32)
    step.write(window, cache)
    assert_close(step, step.run(window, cache, moved), window.impl)


def test_drafts_plan_again_in_place():
    step, layer = Step(q_lens=[1, 1], kv_lens=[40, 50], padding=0), layer_of()
    builder, cache = builder_of([layer]), step.cache(torch.float32)
    common = step.common()
    common.seq_lens -= 10
    metadata = builder.build_for_drafting(common, draft_index=0)
    step.write(layer, cache)
    common.seq_lens += 10
    builder.update_draft_decode_metadata(metadata)
    assert_close(step, step.run(layer, cache, metadata), layer.impl)


def test_capture_builds_as_a_step_does():
    step, layer = Step(), layer_of()
    builder, cache = builder_of([layer]), step.cache(torch.float32)
    step.write(layer, cache)
    assert_close(step, step.run(layer, cache, builder.build_for_cudagraph_capture(step.common())), layer.impl)


def test_requests_of_padding():
    """Graphs pad requests: no tokens, no keys, page 0."""
    step = Step(q_lens=[1, 1, 0, 0], kv_lens=[40, 50, 0, 0], padding=2)
    layer = layer_of()
    builder, cache = builder_of([layer]), step.cache(torch.float32)
    step.write(layer, cache)
    assert_close(step, step.run(layer, cache, builder.build(0, step.common())), layer.impl)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_shared_prefixes(settings):
    step, layer = Step(q_lens=[1, 1, 9], kv_lens=[70, 99, 64], shared_pages=2), layer_of(**settings)
    cache = step.cache(torch.float32)
    plain = builder_of([layer])
    step.write(layer, cache)
    assert plain.build(0, step.common()).num_shared_pages == 0, "nobody asked for it"
    for builder, told in ((plain, 2 * PAGE), (builder_of([layer], cascade=True), 0)):
        metadata = builder.build(told, step.common())
        assert metadata.num_shared_pages == 2 and len(metadata.tables) == 2
        assert_close(step, step.run(layer, cache, metadata), layer.impl)
    other = Step(q_lens=[1, 1, 9], kv_lens=[70, 99, 64])
    moved = builder.update_block_table(metadata, other.table, other.slots())
    assert moved.num_shared_pages == 0
    other.write(layer, cache)
    assert_close(other, other.run(layer, cache, moved), layer.impl)


def test_a_prefix_that_requests_do_not_have():
    builder = builder_of([layer_of()])
    for length in (PAGE // 2, 2 * PAGE):
        with pytest.raises(ValueError, match="whole pages of 32 tokens that every request has"):
            builder.build(length, Step(kv_lens=[70, 40, 53, 64]).common())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER])
@pytest.mark.parametrize("causal", [False, True])
def test_encoder_layers(attn_type, window, causal):
    """They see both ways, whatever the step's decoder layers do."""
    step = Step(q_lens=[5, 40, 1], kv_lens=[5, 40, 1], padding=0, causal=causal)
    layer = layer_of(attn_type=attn_type, sliding_window=window)
    metadata = builder_of([layer]).build(0, step.common())
    out = torch.empty(step.tokens, HEADS, DIM)
    layer.impl.do_kv_cache_update(layer, torch.cat(step.k), torch.cat(step.v), torch.empty(0), step.slots())
    layer.impl.forward(layer, step.q, torch.cat(step.k), torch.cat(step.v), torch.empty(0), metadata, out)
    assert_close(step, out, layer.impl)


@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_DECODER])
@pytest.mark.parametrize("window", [None, 12])
def test_masks_that_are_not_causal(attn_type, window):
    """Of decoders that see both ways, and of cross attention; a window is then as wide on both sides."""
    step = Step(q_lens=[3, 1, 8], kv_lens=[40, 33, 8], causal=False)
    layer = layer_of(attn_type=attn_type, sliding_window=window)
    builder, cache = builder_of([layer]), step.cache(torch.float32)
    step.write(layer, cache)
    assert_close(step, step.run(layer, cache, builder.build(0, step.common())), layer.impl)


def test_a_layer_that_shares_anothers_cache():
    step, layers = Step(), [layer_of(), layer_of(kv_sharing_target_layer_name="model.layers.0.attn")]
    metadata, cache = builder_of(layers).build(0, step.common()), step.cache(torch.float32)
    step.write(layers[0], cache)
    assert_close(step, step.run(layers[1], cache, metadata), layers[1].impl)


def test_slots_that_are_left_out():
    step, layer = Step(q_lens=[1], kv_lens=[33], padding=0), layer_of()
    builder_of([layer])
    cache = torch.zeros(step.num_pages, KV_HEADS, PAGE, 2 * DIM)
    slots = torch.full((33,), -1)
    slots[5] = 40
    layer.impl.do_kv_cache_update(layer, step.k[0], step.v[0], cache, slots)
    assert torch.equal(cache[1, :, 8, :DIM], step.k[0][5]) and torch.equal(cache[1, :, 8, DIM:], step.v[0][5])
    assert cache.count_nonzero() == 2 * KV_HEADS * DIM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_are_loaded_again(dtype):
    step, sinks = Step(), torch.zeros(HEADS, dtype=dtype)
    layer = layer_of(sinks=sinks)
    builder, cache = builder_of([layer]), step.cache(torch.float32)
    step.write(layer, cache)
    metadata = builder.build(0, step.common())
    for value in (0.0, 2.0):
        sinks.fill_(value)
        assert_close(step, step.run(layer, cache, metadata), layer.impl)


def test_the_profiling_run_gives_zeros():
    layer, out = layer_of(), torch.ones(4, HEADS, DIM)
    assert layer.impl.forward(layer, out, out, out, torch.empty(0), None, out) is out and not out.any()


def test_batch_invariance():
    """A request's bits do not depend on who else is in the step."""
    alone = Step(torch.bfloat16, q_lens=[1], kv_lens=[70], padding=0)
    crowd = Step(torch.bfloat16)
    layer, outs = layer_of(), []
    builder = builder_of([layer], torch.bfloat16, determinism="batch_invariant")
    for step in (alone, crowd):
        step.k[0], step.v[0], step.q[:1] = crowd.k[0], crowd.v[0], crowd.q[:1]
        cache = step.cache(torch.bfloat16)
        step.write(layer, cache)
        outs.append(step.run(layer, cache, builder.build(0, step.common()))[0])
    assert torch.equal(*outs)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_bounds_for_every_step_of_an_engine(settings):
    """CUDA's plans have bounds; the same code plans with them here."""
    step, layer = Step(), layer_of(**settings)
    builder, cache = builder_of([layer]), step.cache(torch.float32)
    kind = layer.impl.kind(causal=True)
    builder._prepared[kind] = prepared = PreparedKind(kind, context_of(CPU), CPU, bounds=graph_bounds(engine()))
    workspace = prepared.workspace
    step.write(layer, cache)
    assert_close(step, step.run(layer, cache, builder.build(0, step.common())), layer.impl)
    assert prepared.workspace is workspace, "captured graphs would keep the old workspace's address"
    with pytest.raises(ValueError, match="9"):
        builder.build(0, Step(q_lens=[1] * 9, kv_lens=[5] * 9).common())  # one request more than max_num_seqs


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "fp8", "scale": (0.5, 2.0)}], ids=["plain", "fp8"])
def test_a_cache_that_moves(settings):
    """A layer is bound once; another cache, and scales that are measured later, are taken up."""
    fp8, layer = bool(settings), layer_of(**settings)
    builder = builder_of([layer], cache_dtype=torch.uint8 if fp8 else None)
    for seed in (0.0, 1.0):
        step = Step()
        step.k, step.v = [tensor + seed for tensor in step.k], [tensor - seed for tensor in step.v]
        cache = step.cache(torch.float8_e5m2 if fp8 else torch.float32)
        if fp8:
            cache.fill_(0x7F)
            layer._k_scale.fill_(0.5 + seed)

        def stored(tensors, scale):
            return [(t / scale).to(torch.float8_e4m3fn).float() * scale for t in tensors] if fp8 else tensors

        step.write(layer, cache)
        k, v = stored(step.k, layer._k_scale), stored(step.v, layer._v_scale)
        assert_close(step, step.run(layer, cache, builder.build(0, step.common())), layer.impl, k, v)
