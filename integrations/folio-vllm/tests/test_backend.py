"""The builder and the implementation over CPU tensors, without an engine: against attention in float64."""

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("vllm", reason="vllm is not installed")

import folio  # noqa: E402
import folio_vllm  # noqa: E402
from folio_vllm.backend import FolioCpuBackend, FolioCudaBackend  # noqa: E402
from folio_vllm.builder import FolioMetadataBuilder  # noqa: E402
from folio_vllm.cache import CacheLayout, scale_of  # noqa: E402
from folio_vllm.context import worker_cpus  # noqa: E402
from folio_vllm.impl import FolioAttentionImpl  # noqa: E402
from folio_vllm.layers import graph_bounds  # noqa: E402
from folio_vllm.options import Options, options_of  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 64, 32
Q_LENS, KV_LENS = [1, 7, 40, 1], [70, 7, 53, 1]  # a decode, a prefill, a chunk of one, a first token
CPU = torch.device("cpu")


def engine(dtype=torch.float32, **additional):
    """What of a VllmConfig the builder reads."""
    return SimpleNamespace(
        additional_config={"folio": additional}, speculative_config=None,
        model_config=SimpleNamespace(dtype=dtype, max_model_len=512),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64, max_num_encoder_input_tokens=96),
        compilation_config=SimpleNamespace(static_forward_context={}, max_cudagraph_capture_size=None))


def layer_of(dtype=torch.float32, scale=(1.0, 1.0), **settings):
    """An attention layer with its implementation; scale is K's and V's, numbers or lists of one a KV head."""
    settings = {"num_heads": HEADS, "head_size": DIM, "scale": DIM**-0.5, "num_kv_heads": KV_HEADS} | settings
    k_scale, v_scale = (torch.tensor(value, dtype=torch.float32) for value in scale)
    return SimpleNamespace(impl=FolioAttentionImpl(**settings), _k_scale=k_scale, _v_scale=v_scale)


def builder_of(layers, dtype=torch.float32, cache_dtype=None, page_size=PAGE, config=None, **additional):
    config = config or engine(dtype, **additional)
    names = [f"model.layers.{i}.attn" for i in range(len(layers))]
    config.compilation_config.static_forward_context.update(zip(names, layers))
    spec = FullAttentionSpec(block_size=page_size, num_kv_heads=layers[0].impl.num_kv_heads,
                             head_size=layers[0].impl.head_size, dtype=cache_dtype or dtype)
    return FolioMetadataBuilder(spec, names, config, CPU)


class Step:
    """Requests whose pages lie scattered in a cache, with all their keys and values."""

    def __init__(self, dtype=torch.float32, q_lens=Q_LENS, kv_lens=KV_LENS, shared_pages=0, padding=3, causal=True):
        generator = torch.Generator().manual_seed(1)
        self.q_lens, self.kv_lens, self.causal = q_lens, kv_lens, causal
        columns = max(math.ceil(length / PAGE) for length in kv_lens) + 1
        pages = torch.randperm(len(q_lens) * columns, generator=generator).to(torch.int32).view(-1, columns)
        pages[:, :shared_pages] = pages[:1, :shared_pages]
        self.table, self.num_pages, self.padding = pages, pages.numel(), padding
        self.tokens = sum(q_lens)
        self.q = torch.randn(self.tokens + padding, HEADS, DIM, generator=generator).to(dtype)
        self.k, self.v = ([torch.randn(length, KV_HEADS, DIM, generator=generator).to(dtype) for length in kv_lens]
                          for _ in range(2))
        for tensors in (self.k, self.v):
            for tensor in tensors:
                tensor[:shared_pages * PAGE] = tensors[0][:shared_pages * PAGE]

    def cache(self, dtype):
        """[blocks, KV heads, block_size, 2 head_size], with what nobody may read in it."""
        cache = torch.full((self.num_pages, KV_HEADS, PAGE, 2 * DIM), float("nan"), dtype=torch.float32).to(dtype)
        return cache.view(torch.uint8) if cache.element_size() == 1 else cache

    def slots(self, table=None):
        table = self.table if table is None else table
        return torch.cat([table[r, torch.arange(length) // PAGE].long() * PAGE + torch.arange(length) % PAGE
                          for r, length in enumerate(self.kv_lens)])

    def common(self):
        starts = torch.tensor([0, *torch.tensor(self.q_lens).cumsum(0)], dtype=torch.int32)
        lens = torch.tensor(self.kv_lens, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(self.q_lens),
            num_actual_tokens=self.tokens + self.padding, max_query_len=max(self.q_lens), max_seq_len=max(self.kv_lens),
            block_table_tensor=self.table, slot_mapping=self.slots(), causal=self.causal)

    def write(self, layer, cache):
        layer.impl.do_kv_cache_update(layer, torch.cat(self.k), torch.cat(self.v), cache, self.slots())

    def run(self, layer, cache, metadata):
        out = torch.full((self.tokens + self.padding, HEADS * DIM), 7.0).to(self.q.dtype)
        assert layer.impl.forward(layer, self.q, None, None, cache, metadata, out.view(-1, HEADS, DIM)) is not None
        assert torch.all(out[self.tokens:] == 7), "rows of padding were written"
        return out.view(-1, HEADS, DIM)[:self.tokens]

    def exact(self, impl, k=None, v=None):
        """(attention in float64, the bound of its error for these inputs)"""
        k, v, begin, outs, bounds = k or self.k, v or self.v, 0, [], []
        sinks = None if impl.sinks is None else impl.sinks.double()
        slopes = impl.alibi_slopes
        group = impl.num_heads // impl.num_kv_heads
        for r, length in enumerate(self.q_lens):
            q = self.q[begin:begin + length].double()
            if length == 0:
                continue
            keys, values = (t[r].double().repeat_interleave(group, dim=1) for t in (k, v))
            position = torch.arange(self.kv_lens[r] - length, self.kv_lens[r])[:, None]
            distance = position - torch.arange(len(keys))[None]
            logits = torch.einsum("qhd,khd->hqk", q, keys) * impl.scale
            sums = torch.einsum("qhd,khd->hqk", q.abs(), keys.abs()) * impl.scale
            if impl.logits_soft_cap:
                logits = impl.logits_soft_cap * torch.tanh(logits / impl.logits_soft_cap)
            if slopes is not None:
                logits = logits - slopes.double()[:, None, None] * distance.abs()
                sums = sums + slopes.double()[:, None, None] * distance.abs()
            causal = self.causal and impl.attn_type == AttentionType.DECODER
            hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
            if impl.sliding_window is not None:
                far = distance if causal else distance.abs()
                hidden = hidden | (far >= impl.sliding_window)
            logits = logits.masked_fill(hidden, float("-inf"))
            extra = logits if sinks is None else torch.cat([logits, sinks[:, None, None].expand(-1, length, 1)], dim=-1)
            p = torch.softmax(extra, dim=-1)[..., :len(keys)]
            outs.append(torch.einsum("hqk,khd->qhd", p, values))
            bounds.append(self._bound(sums, len(keys), values, outs[-1]))
            begin += length
        return torch.cat(outs), torch.cat(bounds)

    def _bound(self, sums, keys, values, out):
        """float32 sums of DIM products move a logit by DIM + 2 half units of their absolute sum, and p by twice that;
        sums over keys add as many again. Of 16-bit types p and out are rounded to them besides: bfloat16 is the
        coarser, and counts for both."""
        rounding = 2.0**-24
        p = 2 * (DIM + 2) * rounding * sums.amax() + (keys + 8) * rounding
        if self.q.dtype != torch.float32:
            p = p + 2.0**-8
        return p * values.abs().amax() + (0 if self.q.dtype == torch.float32 else 2.0**-8) * out.abs()


def assert_close(step, out, impl, k=None, v=None):
    exact, bound = step.exact(impl, k, v)
    excess = (out.double() - exact).abs() - bound
    assert torch.isfinite(out.double()).all()
    assert excess.max() <= 0, f"an output is off by {excess.max():.3g} more than rounding explains"


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
    with pytest.raises(KeyError):  # the first group's metadata knows nothing of a window
        step.run(builder_with_window(), cache, metadata)


def builder_with_window():
    layer = layer_of(sliding_window=4)
    builder_of([layer])
    return layer


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
def test_encoder_layers(attn_type, window):
    step = Step(q_lens=[5, 40, 1], kv_lens=[5, 40, 1], padding=0, causal=False)
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


def test_weights_that_are_loaded_again():
    step, sinks = Step(), torch.zeros(HEADS, dtype=torch.bfloat16)
    layer = layer_of(sinks=sinks)
    builder, cache = builder_of([layer]), step.cache(torch.float32)
    step.write(layer, cache)
    sinks.fill_(2.0)
    layer.impl.process_weights_after_loading(torch.float32)
    assert_close(step, step.run(layer, cache, builder.build(0, step.common())), layer.impl)


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


REFUSED = {
    "a KV cache of int8_per_token_head": {"kv_cache_dtype": "int8_per_token_head"},
    "head_size 100": {"head_size": 100}, "head_size 640": {"head_size": 640},
    "attention of type 'sideways'": {"attn_type": "sideways"}, "layers with block_m": {"block_m": 3}}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_at_construction(what):
    with pytest.raises(NotImplementedError, match=f"folio-vllm does not offer {what}"):
        layer_of(**REFUSED[what])


@pytest.mark.parametrize("settings, message", [
    ({"num_heads": 5}, "num_heads is 5; it must be a multiple of num_kv_heads, 2"),
    ({"sinks": torch.zeros(3)}, "sinks has 3 entries; there are 6 heads"),
    ({"sliding_window": 0}, "sliding_window is 0")])
def test_values_that_no_layer_has(settings, message):
    with pytest.raises(ValueError, match=message):
        layer_of(**settings)


@pytest.mark.parametrize("settings", [{"is_mm_prefix_lm": True}, {"rswa_window": 128}])
def test_models_that_are_refused(monkeypatch, settings):
    config = engine()
    vars(config.model_config).update(settings)
    config.parallel_config = SimpleNamespace(decode_context_parallel_size=1)
    monkeypatch.setattr("folio_vllm.impl.get_current_vllm_config_or_none", lambda: config)
    with pytest.raises(NotImplementedError, match="prefix-LM" if "is_mm_prefix_lm" in settings else "R-SWA"):
        layer_of()


def test_steps_that_are_refused():
    builder, step = builder_of([layer_of()]), Step()
    step_common = step.common()
    step_common.causal = torch.ones(len(Q_LENS), dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="masks that differ between the requests"):
        builder.build(0, step_common)
    step_common.causal, step_common.mm_req_doc_ranges = True, {0: [(0, 4)]}
    with pytest.raises(NotImplementedError, match="prefix-LM"):
        builder.build(0, step_common)
    layer = layer_of()
    builder = builder_of([layer])
    with pytest.raises(NotImplementedError, match="quantised with attention"):
        layer.impl.forward(layer, step.q, None, None, None, None, step.q, output_scale=torch.ones(1))
    with pytest.raises(ValueError, match=r"kv_cache is \[4, 2, 16, 128\]; this layer's is \[blocks, 2, 32, 128\]"):
        step.run(layer, torch.zeros(4, 2, 16, 128), builder.build(0, step.common()))


def test_a_layer_of_another_backend_in_the_group():
    with pytest.raises(TypeError, match="its implementation is SimpleNamespace"):
        builder_of([layer_of(), SimpleNamespace(impl=SimpleNamespace())])


def test_a_model_that_no_kernel_takes():
    with pytest.raises(folio.Error):
        builder_of([layer_of()], force_kernel="no-such-kernel")


@pytest.mark.parametrize("given, message", [
    ({"determinsm": "none"}, "has determinsm; it takes cascade, determinism"),
    ({"determinism": "always"}, "determinism is 'always'"), ({"cascade": 1}, "cascade is 1; it takes bool"),
    ({"kv_format": "nhd"}, "kv_format is 'nhd'"), ({"num_threads": -1}, "num_threads is -1"),
    ({"cascade": True, "determinism": "batch_invariant"}, "is not offered")])
def test_options_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        options_of(engine(**given))


def test_vllms_batch_invariance_is_followed(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert options_of(engine()).determinism == "batch_invariant"
    assert options_of(engine(determinism="schedule_invariant")).determinism == "schedule_invariant"
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    assert options_of(engine()) == Options()


@pytest.mark.parametrize("environment, cpus", [
    ({}, set()), ({"GOMP_CPU_AFFINITY": "0 2 4"}, {0, 2, 4}), ({"OMP_PLACES": "{0,1,2}"}, {0, 1, 2}),
    ({"OMP_PLACES": "cores"}, set()), ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[3,5]"}, {3, 5})])
def test_the_workers_cpus(environment, cpus):
    assert worker_cpus(environment) == cpus


def test_bounds_of_graphs():
    config = engine()
    config.compilation_config.max_cudagraph_capture_size = 72
    bounds = graph_bounds(config)
    assert (bounds.max_requests, bounds.max_tokens, bounds.max_q_len, bounds.max_kv_len) == (72, 72, 72, 512)


def test_scales_that_are_neither_one_nor_one_a_head():
    with pytest.raises(ValueError, match="3 k scales; Folio takes 1 or 2"):
        scale_of(layer_of(scale=([1.0, 2.0, 3.0], 1.0)), "k", KV_HEADS)


def test_packed_pages_need_a_heads_tokens_side_by_side():
    layout = CacheLayout(KV_HEADS, DIM, DIM, PAGE, torch.bfloat16, "cpu_packed")
    with pytest.raises(ValueError, match="packed pages need the layout LBHNC"):
        layout.view(torch.zeros(4, PAGE, KV_HEADS, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2))


def test_vllm_knows_the_backends():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    folio_vllm.register()
    folio_vllm.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is FolioCpuBackend
    assert AttentionBackendEnum.CUSTOM.get_class() is FolioCudaBackend
    for backend in (FolioCpuBackend, FolioCudaBackend):
        assert AttentionBackendEnum[backend.get_name()].get_class() is backend


def reasons(backend, **changes):
    asked = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
             "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": True,
             "device_capability": DeviceCapability(9, 0), "attn_type": AttentionType.DECODER,
             "has_sliding_window": True, "use_non_causal": True, "use_batch_invariant": True,
             "use_kv_connector": True} | changes
    return backend.validate_configuration(**asked)


@pytest.mark.parametrize("backend", [FolioCpuBackend, FolioCudaBackend])
def test_what_vllm_may_ask_for(backend):
    assert reasons(backend) == []
    for kv_cache_dtype in ("float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"):
        assert reasons(backend, kv_cache_dtype=kv_cache_dtype) == []
    for attn_type in AttentionType:
        assert reasons(backend, attn_type=attn_type) == []
    for change in ({"head_size": 100}, {"kv_cache_dtype": "nvfp4"}, {"block_size": 24}, {"use_mla": True},
                   {"use_sparse": True}, {"use_mm_prefix": True}, {"use_pcp": True}, {"use_dcp": True},
                   {"use_rswa": True}):
        assert len(reasons(backend, **change)) == 1, change
    assert reasons(FolioCudaBackend, dtype=torch.float32) and reasons(FolioCudaBackend,
                                                                      device_capability=DeviceCapability(7, 5))
