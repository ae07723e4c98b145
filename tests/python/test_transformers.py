"""transformers over Folio: tiny random models against transformers' own eager attention.

    scripts/install_deps.sh python-engines && make test    # or pytest on this file
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/install_deps.sh python-engines")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import folio.integrations.transformers as integration  # noqa: E402: after the skips
import tiny_models  # noqa: E402

integration.register()
transformers.logging.set_verbosity_error()

LENGTHS = [23, 5, 14]
DECODES = 64


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def model(request):
    return tiny_models.make(request.param)


def bound(model, expected, run):
    """How far float32 logits may lie from eager's, `expected`, for the roundings of attention alone.

    A logit of attention is a sum of D products, wrong by at most (D + 2) u times its terms; p is then wrong by as much
    relatively, and an output, a sum of K terms, by (2 (D + 2) S + 2 K + 16) u of the largest |v|: for Folio and for
    eager. What an error of the outputs becomes in the logits is measured: outputs are moved by 2^-12 of the largest |v|.
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


def test_generate_batch_equals_sequential_generation(model):
    """Chunked prefill (32 tokens a step, a prompt of 70), prefix sharing, rolling windows, requests coming and going."""
    shared = tiny_models.prompts([40], seed=5)[0]
    sequences = [*tiny_models.prompts([3, 70, 18, 7]), *(shared + tail for tail in tiny_models.prompts([4, 9], seed=6))]
    alone = [tiny_models.greedy(model, "eager", prompt, 16) for prompt in sequences]
    model.set_attn_implementation("folio")
    integration.reset_statistics()
    answers = model.generate_batch(
        inputs=sequences,
        generation_config=transformers.GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=127, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            block_size=16, num_blocks=96, max_batch_tokens=32
        ),
        progress_bar=False,
    )
    ordered = [answers[name].generated_tokens for name in sorted(answers, key=lambda name: int(name.split("_")[-1]))]
    assert len(ordered) == len(sequences)
    for tokens, (expected, logits) in zip(ordered, alone):
        stopped = expected.index(127) + 1 if 127 in expected else len(expected)
        tiny_models.assert_same_tokens(tokens, expected[:stopped], logits)
    done = integration.statistics()
    layers = model.config.num_hidden_layers
    assert done["layer_calls"] == sum(done["kernels"].values()) and done["layer_calls"] % layers == 0
    groups = 1 if getattr(model.config, "layer_types", None) is None else len(set(model.config.layer_types))
    assert done["plans"] <= groups * done["layer_calls"] // layers
    assert done["plans"] + done["shared_plans"] == done["layer_calls"]
