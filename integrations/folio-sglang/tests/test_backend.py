"""The backend over SGLang's pools, batches and layers on a CPU, with a stand-in for its ModelRunner: against attention in
float64."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import folio_sglang  # noqa: E402
from folio_sglang.backend import FolioAttentionBackend  # noqa: E402
from folio_sglang.threads import parse_cpus  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

HEADS, KV_HEADS, DIM, CONTEXT = 6, 2, 64, 128


def layer_of(number=0, k_scale=None, v_scale=None, **settings):
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, number, **settings)
    if k_scale is not None:
        layer.k_scale, layer.v_scale = torch.tensor(k_scale), torch.tensor(v_scale)
        layer.k_scale_float, layer.v_scale_float = k_scale, v_scale
    return layer


class Model(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)


class Engine:
    """A runner's pools and model, with requests whose tokens lie scattered in the pool."""

    def __init__(self, layers, dtype=torch.float32, kv_dtype=None, page_size=1, **config):
        self.page_size, self.dtype = page_size, dtype
        pool = MHATokenToKVPool(size=512, page_size=page_size, dtype=kv_dtype or dtype, head_num=KV_HEADS,
                                head_dim=DIM, layer_num=len(layers), device="cpu", enable_memory_saver=False)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.view(torch.uint8).fill_(0xFF)  # NaN in every type: what nobody may read
        self.runner = SimpleNamespace(
            device="cpu", dtype=dtype, token_to_kv_pool=pool, model=Model(layers),
            req_to_token_pool=ReqToTokenPool(8, CONTEXT, "cpu", False), spec_algorithm=SpeculativeAlgorithm.NONE,
            model_config=SimpleNamespace(**{"attention_arch": AttentionArch.MHA, "is_encoder_decoder": False} | config))
        generator = torch.Generator().manual_seed(3)
        self.generator = generator
        pages = 1 + torch.randperm(512 // page_size, generator=generator)[:8 * (CONTEXT // page_size)]
        slots = (pages[:, None] * page_size + torch.arange(page_size)).view(-1)[:8 * (512 // 8)].view(8, -1)
        self.slots = slots  # [requests, 64]
        self.runner.req_to_token_pool.req_to_token[1:9, :slots.shape[1]] = slots.to(torch.int32)
        shape = (8, slots.shape[1])
        self.k, self.v = (torch.randn(*shape, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
        self.q = torch.randn(*shape, HEADS, DIM, generator=generator).to(dtype)

    def batch(self, mode, queries, keys, rows=None, padding=0, **others):
        """A ForwardBatch whose request i is row rows[i] of the pool: its last queries[i] of keys[i] tokens are new."""
        rows = list(range(len(keys))) if rows is None else rows
        new = [(r, slice(length - q, length)) for r, q, length in zip(rows, queries, keys)]
        drafts = queries[0] if mode == ForwardMode.TARGET_VERIFY else 0
        lens = torch.tensor([length - drafts for length in keys])
        batch = ForwardBatch(
            forward_mode=mode, batch_size=len(keys), input_ids=torch.zeros(sum(queries), dtype=torch.int64),
            req_pool_indices=torch.tensor(rows) + 1, seq_lens=lens, seq_lens_cpu=lens.clone(),
            out_cache_loc=torch.cat([self.slots[r, s] for r, s in new]), seq_lens_sum=int(lens.sum()), **others)
        if mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(queries), list(queries)
        self.new, self.queries, self.keys, self.rows = new, queries, keys, rows
        self.inputs = [torch.cat([t[r, s] for r, s in new]) for t in (self.q, self.k, self.v)]
        if padding:
            self.inputs[0] = torch.cat([self.inputs[0], torch.full((padding, HEADS, DIM), 9.0, dtype=self.dtype)])
        return batch

    def fill(self, layer, batch):
        """What earlier steps have written."""
        for row, length, q in zip(self.rows, self.keys, self.queries):
            old = slice(0, length - q)
            if length > q:
                where = self.slots[row, old]
                scales = [] if layer.k_scale is None else [layer.k_scale, layer.v_scale]
                self.runner.token_to_kv_pool.set_kv_buffer(layer, where, self.k[row, old].clone(),
                                                           self.v[row, old].clone(), *scales)

    def exact(self, layer, sinks=None):
        """(attention in float64 of the batch's new tokens, the bound of its error)"""
        outs, bounds, causal = [], [], layer.attn_type == AttentionType.DECODER
        for row, length, q_len in zip(self.rows, self.keys, self.queries):
            q = self.q[row, length - q_len:length].double()
            k, v = (self.stored(t[row, :length], s) for t, s in ((self.k, layer.k_scale), (self.v, layer.v_scale)))
            distance = torch.arange(length - q_len, length)[:, None] - torch.arange(length)[None]
            logits = torch.einsum("qhd,khd->hqk", q, k) * layer.scaling
            sums = torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) * layer.scaling
            if layer.logit_cap:
                logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
            hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
            if layer.sliding_window_size > -1:
                hidden = hidden | ((distance if causal else distance.abs()) > layer.sliding_window_size)
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, q_len, 1)], dim=-1)
            out = torch.einsum("hqk,khd->qhd", torch.softmax(logits, dim=-1)[..., :length], v)
            # float32 sums move a logit by DIM + 2 half units of their absolute sum and p by twice that; bfloat16 rounds
            # p and out besides.
            p = 2 * (DIM + 2) * 2.0**-24 * sums.amax() + (length + 8) * 2.0**-24
            rounding = 0.0 if self.dtype == torch.float32 else 2.0**-8
            outs.append(out)
            bounds.append((p + rounding) * v.abs().amax() + rounding * out.abs())
        return torch.cat(outs), torch.cat(bounds)

    def stored(self, tensor, scale):
        kv_dtype = self.runner.token_to_kv_pool.dtype
        scale = 1.0 if scale is None else scale.to(self.dtype)
        tensor = (tensor / scale).to(kv_dtype).double() * scale if kv_dtype != self.dtype else tensor.double()
        return tensor.repeat_interleave(HEADS // KV_HEADS, dim=1)

    def check(self, backend, layer, batch, sinks=None, **others):
        if sinks is not None:
            others["sinks"] = sinks
        out = backend.forward(*self.inputs, layer, batch, **others)
        exact, bound = self.exact(layer, sinks)
        tokens = len(exact)
        assert out.shape == (len(self.inputs[0]), HEADS * DIM) and not out[tokens:].any()
        excess = (out[:tokens].view(-1, HEADS, DIM).double() - exact).abs() - bound
        assert torch.isfinite(out).all() and excess.max() <= 0, f"off by {excess.max():.3g} more than rounding explains"


SETTINGS = {"plain": {}, "window": {"sliding_window_size": 7}, "soft cap": {"logit_cap": 3.0},
            "both": {"sliding_window_size": 20, "logit_cap": 5.0}}
BATCHES = {"decode": (ForwardMode.DECODE, [1, 1, 1], [50, 1, 33]),
           "extend": (ForwardMode.EXTEND, [7, 30, 1], [7, 55, 40]),
           "mixed": (ForwardMode.MIXED, [12, 1, 1], [12, 44, 64])}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_step(settings, batch, dtype, page_size):
    layer = layer_of(**settings)
    engine = Engine([layer], dtype, page_size=page_size)
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(*batch, rows=[5, 0, 3])
    engine.fill(layer, batch)
    backend.init_forward_metadata(batch)
    engine.check(backend, layer, batch)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_fp8_pools(batch, fp8):
    layer = layer_of(k_scale=0.5, v_scale=2.0)
    engine = Engine([layer], torch.bfloat16, fp8, page_size=16)
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(*batch)
    engine.fill(layer, batch)
    backend.init_forward_metadata(batch)
    keys = engine.inputs[1].clone()
    engine.check(backend, layer, batch)
    assert torch.equal(engine.inputs[1], keys), "the caller's keys were divided by their scale"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_in_the_models_dtype(dtype):
    layer, sinks = layer_of(), torch.linspace(-2, 2, HEADS).to(dtype)
    engine = Engine([layer], dtype)
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(ForwardMode.DECODE, [1, 1], [20, 41])
    engine.fill(layer, batch)
    backend.init_forward_metadata(batch)
    engine.check(backend, layer, batch, sinks=sinks)
    sinks.fill_(3.0)  # weights may be loaded again
    engine.check(backend, layer, batch, sinks=sinks)


def test_encoder_layers_see_both_ways():
    layer = layer_of(attn_type=AttentionType.ENCODER_ONLY)
    engine = Engine([layer])
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(ForwardMode.EXTEND, [5, 33], [5, 33])
    backend.init_forward_metadata(batch)
    engine.check(backend, layer, batch)


def test_one_plan_serves_all_layers_of_a_step(monkeypatch):
    import folio
    plans, plan = [], folio.plan
    monkeypatch.setattr(folio, "plan", lambda *args: plans.append(args) or plan(*args))
    layers = [layer_of(i) for i in range(3)] + [layer_of(3, sliding_window_size=5)]
    engine = Engine(layers)
    backend = FolioAttentionBackend(engine.runner)
    for mode, queries, keys in BATCHES.values():
        batch = engine.batch(mode, queries, keys)
        backend.init_forward_metadata(batch)
        plans.clear()
        for layer in layers:
            engine.fill(layer, batch)
            engine.check(backend, layer, batch)
        assert len(plans) == 2, "one for the layers without a window, one for those with it"


def test_what_lies_in_the_pool_is_not_written():
    layer = layer_of()
    engine = Engine([layer])
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(ForwardMode.DECODE, [1], [30])
    engine.fill(layer, batch)
    where = engine.slots[0, 29:30]
    engine.runner.token_to_kv_pool.set_kv_buffer(layer, where, engine.inputs[1], engine.inputs[2])
    q, k, v = engine.inputs
    backend.init_forward_metadata(batch)
    engine.inputs = [q, torch.full_like(k, float("nan")), v]
    engine.check(backend, layer, batch, save_kv_cache=False)
    engine.inputs = [q, None, None]
    engine.check(backend, layer, batch)


@pytest.mark.parametrize("k_scale", [None, 0.5])
def test_buffers_that_move(k_scale):
    """A layer is bound once; buffers that the pool allocates again, and other scales, are taken up."""
    layer = layer_of(k_scale=k_scale, v_scale=k_scale)
    engine = Engine([layer], torch.bfloat16, None if k_scale is None else torch.float8_e4m3fn)
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(*BATCHES["decode"])
    pool = engine.runner.token_to_kv_pool
    for first, scale in ((True, k_scale), (False, k_scale), (False, 2.0)):
        if k_scale is not None:
            layer.k_scale, layer.k_scale_float = torch.tensor(scale), scale
        engine.fill(layer, batch)
        backend.init_forward_metadata(batch)
        engine.check(backend, layer, batch)
        if first:
            pool.k_buffer, pool.v_buffer = ([torch.zeros_like(one) for one in half]
                                            for half in (pool.k_buffer, pool.v_buffer))
            engine.k += 1
            engine.inputs[1] += 1


@pytest.fixture
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)  # torch then fills what torch.empty returns
    yield
    torch.use_deterministic_algorithms(False)


def test_rows_of_padding_are_zeros(uninitialised_memory_is_nan):
    layer = layer_of()
    engine = Engine([layer])
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(*BATCHES["extend"], padding=4)
    engine.fill(layer, batch)
    backend.init_forward_metadata(batch)
    engine.check(backend, layer, batch)


def test_idle_steps():
    layer = layer_of()
    engine = Engine([layer])
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(ForwardMode.DECODE, [1], [5])
    batch.forward_mode = ForwardMode.IDLE
    backend.init_forward_metadata(batch)
    assert backend.forward(*engine.inputs, layer, batch).shape == (1, HEADS * DIM)


def test_lengths_that_lie_on_the_device_alone():
    layer = layer_of()
    engine = Engine([layer])
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(*BATCHES["extend"])
    batch.seq_lens_cpu = batch.extend_seq_lens_cpu = None
    engine.fill(layer, batch)
    backend.init_forward_metadata(batch)
    engine.check(backend, layer, batch)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_captured_decodes(settings, page_size):
    """The hooks in the order of SGLang's graph runner. A replay refills what the captured step reads: the same plan
    object runs on new lengths after the in-graph hook, which a graph would replay."""
    layer = layer_of(**settings)
    engine = Engine([layer], page_size=page_size)
    backend = FolioAttentionBackend(engine.runner)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    batch = engine.batch(ForwardMode.DECODE, [1] * 4, [fill] * 4)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = backend.forward_metadata
    addresses = [tensor.data_ptr() for tensor in (captured.cu_q, captured.kv_lens, backend._graph_table)]
    for keys in ([50, 3, 33, fill], [9, 64, 1, 17]):
        batch = engine.batch(ForwardMode.DECODE, [1] * 4, keys, rows=[6, 2, 0, 7])
        engine.fill(layer, batch)
        backend.init_forward_metadata_out_graph(batch)
        assert backend.forward_metadata is captured
        backend.init_forward_metadata_in_graph(batch)
        assert len(captured.steps) == 1
        engine.check(backend, layer, batch)
    assert addresses == [tensor.data_ptr() for tensor in (captured.cu_q, captured.kv_lens, backend._graph_table)]


def verified(engine, drafts, keys, rows):
    return engine.batch(ForwardMode.TARGET_VERIFY, [drafts] * len(keys), keys, rows=rows,
                        spec_info=SimpleNamespace(num_tokens_per_req=drafts, custom_mask=None))


@pytest.mark.parametrize("captured", [False, True])
def test_chains_of_drafts_are_verified(captured):
    layer = layer_of()
    engine = Engine([layer])
    engine.runner.spec_algorithm = SpeculativeAlgorithm.EAGLE
    backend = FolioAttentionBackend(engine.runner, draft_tree_width=1)
    assert backend.verify_mask is None
    if captured:
        backend.init_cuda_graph_state(max_bs=2, max_num_tokens=8)
        backend.init_forward_metadata_out_graph(verified(engine, 4, [5, 5], [0, 1]), in_capture=True)
    batch = verified(engine, 4, [44, 20], [3, 1])
    engine.fill(layer, batch)
    if captured:
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(batch)
    else:
        backend.init_forward_metadata(batch)
    engine.check(backend, layer, batch)


def test_replays_that_were_not_captured():
    engine = Engine([layer_of()])
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(ForwardMode.DECODE, [1], [5])
    with pytest.raises(RuntimeError, match="init_cuda_graph_state comes before"):
        backend.init_forward_metadata_out_graph(batch)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    with pytest.raises(NotImplementedError, match="a replay of 1 requests of 1 tokens, which was not captured"):
        backend.init_forward_metadata_out_graph(batch)
    with pytest.raises(NotImplementedError, match="captured batches of mode EXTEND"):
        backend.init_forward_metadata_out_graph(engine.batch(*BATCHES["extend"]))


REFUSED_LAYERS = {
    "cross attention": {"is_cross_attention": True}, "temperatures or positions": {"use_irope": True},
    "decoders that see both ways": {"attn_type": AttentionType.DECODER_BIDIRECTIONAL},
    "logit capping by sigmoid": {"logit_cap": 3.0, "logit_capping_method": "sigmoid"}}


@pytest.mark.parametrize("what", REFUSED_LAYERS)
def test_layers_that_are_refused_at_construction(what):
    with pytest.raises(NotImplementedError, match=f"folio-sglang does not offer {what}"):
        FolioAttentionBackend(Engine([layer_of(**REFUSED_LAYERS[what])]).runner)


def test_engines_that_are_refused():
    for config, what in (({"attention_arch": AttentionArch.MLA}, "latent attention"),
                         ({"is_encoder_decoder": True}, "cross attention")):
        with pytest.raises(NotImplementedError, match=what):
            FolioAttentionBackend(Engine([layer_of()], **config).runner)
    runner = Engine([layer_of()]).runner
    with pytest.raises(NotImplementedError, match="context parallelism"):
        FolioAttentionBackend(runner, context_parallel_size=2)
    for algorithm, width in ((SpeculativeAlgorithm.EAGLE, 4), (SpeculativeAlgorithm.NGRAM, 1)):
        runner.spec_algorithm = algorithm
        with pytest.raises(NotImplementedError, match="speculation with trees"):
            FolioAttentionBackend(runner, draft_tree_width=width)
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    runner.token_to_kv_pool = SimpleNamespace()
    with pytest.raises(NotImplementedError, match="a KV pool of SimpleNamespace"):
        FolioAttentionBackend(runner)


def test_calls_that_are_refused():
    layer = layer_of()
    engine = Engine([layer])
    backend, batch = FolioAttentionBackend(engine.runner), engine.batch(ForwardMode.DECODE, [1], [5])
    with pytest.raises(RuntimeError, match="init_forward_metadata comes before"):
        backend.forward(*engine.inputs, layer, batch)
    with pytest.raises(NotImplementedError, match="attention with k_rope"):
        backend.forward(*engine.inputs, layer, batch, k_rope=torch.zeros(1))
    batch.forward_mode = ForwardMode.DRAFT_EXTEND_V2
    with pytest.raises(NotImplementedError, match="batches of mode DRAFT_EXTEND_V2"):
        backend.init_forward_metadata(batch)


@pytest.mark.needs_sglang
def test_sglang_knows_the_backend(monkeypatch):
    import sglang.srt.runtime_context as context
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    folio_sglang.register()
    folio_sglang.register()
    assert ATTENTION_BACKEND_CHOICES.count("folio") == 1
    monkeypatch.setattr(context, "get_exec", lambda: SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=True)))
    monkeypatch.setattr(context, "get_spec", lambda: SimpleNamespace(speculative_eagle_topk=None))
    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    backend = ATTENTION_BACKENDS["folio"](Engine([layer_of()]).runner)
    assert isinstance(backend, FolioAttentionBackend) and backend.determinism == "batch_invariant"


def test_lists_of_cpus():
    assert parse_cpus("0-3,8") == (0, 1, 2, 3, 8) and parse_cpus("5") == (5,)
