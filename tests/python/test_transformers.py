"""transformers over Folio: tiny random models against transformers' own eager attention.

    scripts/install_deps.sh python-engines && make test    # or pytest on this file
    FOLIO_TEST_DEVICE=cuda pytest test_transformers.py      # on a GPU, with CUDA graphs
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/install_deps.sh python-engines")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import folio  # noqa: E402: after the skips
import folio.integrations.transformers as integration  # noqa: E402
import tiny_models  # noqa: E402
from folio.integrations.transformers.cache import PageLayout  # noqa: E402

integration.register()
transformers.logging.set_verbosity_error()

DEVICE = tiny_models.DEVICE
ON_GPU = DEVICE.type == "cuda"
LENGTHS = [23, 5, 14]
DECODES = 64


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def model(request):
    return tiny_models.make(request.param)


def bound(model, expected, run):
    """How far float32 logits may lie from eager's, `expected`, for the roundings of attention alone.

    A logit of attention is a sum of D products, wrong by at most (D + 2) u times its terms; p is then wrong by as much
    relatively, and an output, a sum of K terms, by (2 (D + 2) S + 2 K + 16) u of the largest |v|: for Folio and for
    eager. What an error of the outputs becomes in the logits is measured: outputs are moved by 2^-12 of the largest
    |v|.
    """
    moved = tiny_models.Perturbed("perturbed", 2.0**-12)
    amplification = (run("perturbed") - expected).abs().max().item() / moved.epsilon
    dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
    rounding = (2 * (dim + 2) * moved.largest_score + 2 * moved.most_keys + 16) * 2.0**-24
    return 2 * amplification * rounding


@pytest.mark.parametrize("side", ["left", "right"])
def test_prefill_and_decodes_with_padding(model, side):
    sequences = tiny_models.prompts(LENGTHS)

    def run(implementation):
        return tiny_models.forced_logits(model, implementation, sequences, side, DECODES)

    eager = run("eager")
    allowed = bound(model, eager, run)
    assert (run("folio") - eager).abs().max() <= allowed < 0.01 * eager.abs().max()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(model, cache):
    for prompt in tiny_models.prompts([12, 30]):
        expected, logits = tiny_models.greedy(model, "eager", prompt, 24)
        tokens, _ = tiny_models.greedy(model, "folio", prompt, 24, cache_implementation=cache)
        tiny_models.assert_same_tokens(tokens, expected, logits)


@pytest.mark.skipif(not integration.CONTINUOUS_BATCHING, reason="continuous batching needs transformers 5.17")
@pytest.mark.parametrize("use_async_batching", [False, True] if ON_GPU else [False])
@pytest.mark.parametrize("use_cuda_graph", [False, True] if ON_GPU else [False])
def test_generate_batch_equals_sequential_generation(model, use_cuda_graph, use_async_batching):
    """Chunked prefill (32 tokens a step, a prompt of 70), shared prefixes, rolling windows, requests that end."""
    if use_cuda_graph and model.config.model_type == "gpt_oss":
        pytest.skip("torch's grouped_mm copies float32 experts' offsets to the host, which no capture allows")
    shared = tiny_models.prompts([40], seed=5)[0]
    sequences = [*tiny_models.prompts([3, 70, 18, 7]), *(shared + tail for tail in tiny_models.prompts([4, 9], seed=6))]
    alone = [tiny_models.greedy(model, "eager", prompt, 16) for prompt in sequences]
    model.set_attn_implementation("folio")
    integration.reset_statistics()
    rules = transformers.GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=127, pad_token_id=0)
    answers = model.generate_batch(
        inputs=sequences,
        generation_config=rules,
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            block_size=16,
            num_blocks=96,
            max_batch_tokens=32,
            use_cuda_graph=use_cuda_graph,
            use_async_batching=use_async_batching,
        ),
        progress_bar=False,
    )
    ordered = [answers[name].generated_tokens for name in sorted(answers, key=lambda name: int(name.split("_")[-1]))]
    assert len(ordered) == len(sequences)
    for tokens, (expected, logits) in zip(ordered, alone):
        stopped = expected.index(127) + 1 if 127 in expected else len(expected)
        tiny_models.assert_same_tokens(tokens, expected[:stopped], logits)
    done = integration.statistics()
    if use_cuda_graph:
        assert 0 < done["layer_calls"]  # replays are not counted
        return
    layers = model.config.num_hidden_layers
    assert done["layer_calls"] == sum(done["kernels"].values()) and done["layer_calls"] % layers == 0
    groups = 1 if getattr(model.config, "layer_types", None) is None else len(set(model.config.layer_types))
    assert done["plans"] <= groups * done["layer_calls"] // layers
    assert done["plans"] + done["shared_plans"] == done["layer_calls"]


@pytest.mark.parametrize("side", ["left", "none"])
def test_pages_of_folio_as_cache(model, side, monkeypatch):
    """Pages against eager over transformers' own cache. Left padding is not stored and needs no mask bits."""
    sequences = tiny_models.prompts(LENGTHS if side == "left" else [23, 23])
    bits = []
    monkeypatch.setattr(PageLayout, "custom_mask", lambda self, device: bits.append(self.visible.bits))
    caches = []

    def run(implementation):
        cache = integration.FolioCache() if implementation == "folio" else None
        caches.append(cache)
        return tiny_models.forced_logits(model, implementation, sequences, "left", 20, cache=cache)

    eager = run("eager")
    assert (run("folio") - eager).abs().max() <= bound(model, eager, run) < 0.01 * eager.abs().max()
    kinds = len(set(getattr(model.config, "layer_types", None) or ["full_attention"]))
    assert len(bits) == 21 * kinds, "asked once a step and kind of layers, not once a layer"
    assert all(given is None for given in bits)
    assert [layer.left_padding.tolist() for layer in caches[1].layers] == [[23 - len(row) for row in sequences]] * 2


def test_packed_pages_for_16_bit_models():
    """The packed format is a matter of memory: tokens equal those over transformers' own cache, kernel for kernel."""
    model = tiny_models.make("llama").bfloat16()
    cache = integration.FolioCache()
    prompt = tiny_models.prompts([40])[0]
    tokens, logits = tiny_models.greedy(model, "folio", prompt, 24, past_key_values=cache)
    expected, _ = tiny_models.greedy(model, "folio", prompt, 24)
    layer = cache.layers[0]
    config = folio.AttentionConfig(num_q_heads=2, num_kv_heads=2, head_dim_qk=16, head_dim_v=16)
    advice = folio.recommended_kv_format(config, folio.Context.cuda(0) if ON_GPU else folio.Context.cpu())
    assert (layer.kv_format, layer.page_size) == (advice.format, advice.page_size)
    assert layer.length == 40 + 23 and layer.capacity >= layer.length
    tiny_models.assert_same_tokens(tokens, expected, logits, nearly=0.05)  # logits of bfloat16 have steps of 2^-8


def test_caches_are_cropped_reordered_and_refused_elsewhere():
    model = tiny_models.make("mistral")
    prompt = torch.tensor(tiny_models.prompts([20]), device=DEVICE).repeat(2, 1)
    options = dict(do_sample=False, max_new_tokens=30, pad_token_id=0, num_beams=3)
    model.set_attn_implementation("eager")
    expected = model.generate(prompt, **options)
    model.set_attn_implementation("folio")
    assert torch.equal(model.generate(prompt, past_key_values=integration.FolioCache(), **options), expected)
    with torch.no_grad():
        cache = integration.FolioCache()
        first = model(prompt, past_key_values=cache).logits
        cache.crop(-8)
        assert cache.get_seq_length() == 12
        again = model(prompt[:, 12:], past_key_values=cache).logits
        assert torch.allclose(again, first[:, 12:], atol=1e-5)
        with pytest.raises(ValueError, match="the cache holds 2 sequences; 1 were given"):
            model(prompt[:1], past_key_values=cache)
        with pytest.raises(NotImplementedError, match="not offloaded"):
            cache.layers[0].offload()


@torch.no_grad()
def test_what_pages_cannot_show_is_refused():
    model = tiny_models.make("llama")
    ids, mask = tiny_models.pad(tiny_models.prompts([9, 4]), "left")
    cache = integration.FolioCache()
    model.set_attn_implementation("folio")
    model(ids, attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="shows keys that were padding"):
        model(ids[:, :1], attention_mask=torch.ones(2, 10, device=DEVICE), past_key_values=cache)
    holes = torch.cat([mask, torch.ones(2, 1, dtype=torch.long, device=DEVICE)], 1)
    holes[0, 2] = holes[1, 7] = 0  # bits, over the keys that are stored
    logits = {}
    for implementation, cache in (("folio", integration.FolioCache()), ("eager", transformers.DynamicCache())):
        model.set_attn_implementation(implementation)
        model(ids, attention_mask=mask, past_key_values=cache)
        logits[implementation] = model(ids[:, :1], attention_mask=holes, past_key_values=cache).logits
    assert torch.allclose(logits["folio"], logits["eager"], atol=1e-5)
    with pytest.raises(RuntimeError, match='a FolioCache needs attn_implementation="folio"'):
        cache = integration.FolioCache()
        for _ in range(2):
            model(ids[:, :1], past_key_values=cache)


def test_an_encoder():
    torch.manual_seed(1)
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=128
    )
    encoder = transformers.BertModel(config).eval().to(DEVICE)
    sequences = tiny_models.prompts(LENGTHS)
    for side in ("left", "right"):
        ids, mask = tiny_models.pad(sequences, side)
        states = {}
        for implementation in ("eager", "folio"):
            encoder.set_attn_implementation(implementation)
            with torch.no_grad():
                states[implementation] = encoder(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        # 2 layers of float32 sums of at most 64 terms over normalised states, each of size up to 4
        assert (states["folio"] - states["eager"]).abs().max() < 2 * 64 * 4 * 2.0**-24 * 4


def test_sequences_packed_into_one_row():
    """Positions that begin again begin a new sequence: transformers makes a block-diagonal mask, Folio bits."""
    model = tiny_models.make("llama")
    parts = tiny_models.prompts([9, 5, 12])
    ids = torch.tensor([sum(parts, [])], device=DEVICE)
    positions = torch.cat([torch.arange(len(part), device=DEVICE) for part in parts])[None]
    model.set_attn_implementation("folio")
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits[0]
        alone = torch.cat([model(torch.tensor([part], device=DEVICE)).logits[0] for part in parts])
    assert torch.allclose(packed, alone, atol=1e-5)
