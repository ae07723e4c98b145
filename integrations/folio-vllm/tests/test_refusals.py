"""What is refused and with which words; options; what vLLM's registry and selector get to know."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import folio  # noqa: E402
import folio_vllm  # noqa: E402
from folio_vllm.backend import FolioCpuBackend, FolioCudaBackend  # noqa: E402
from folio_vllm.cache import CacheLayout, scale_of, with_regular_strides  # noqa: E402
from folio_vllm.context import graph_bounds, worker_cpus  # noqa: E402
from folio_vllm.options import Options, options_of  # noqa: E402
from stand_ins import DIM, KV_HEADS, PAGE, Q_LENS, Step, builder_of, engine, layer_of  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import AttentionType  # noqa: E402

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


def test_dimensions_of_one_element_get_regular_strides():
    memory = torch.arange(8 * 4096)
    for heads, strides in ((1, (4096, 3, 128, 1)), (2, (8192, 4096, 128, 1))):
        odd = memory.as_strided((4, heads, 32, 128), strides)
        regular = with_regular_strides(odd)
        assert regular.data_ptr() == odd.data_ptr() and torch.equal(regular, odd)
        assert regular.stride() == (4096 * heads, 4096, 128, 1)


@pytest.mark.needs_vllm
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


@pytest.mark.needs_vllm
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
