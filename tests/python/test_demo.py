"""folio.demo with the real model: its tokens are those of torch's sdpa. Skipped without the packages it names."""

import folio.demo as demo
import pytest


def test_missing_packages_are_named_in_one_sentence(monkeypatch):
    monkeypatch.setattr(demo, "NEEDED", ("numpy", "no_such_package"))
    said = demo.main([])
    assert said.startswith("folio.demo needs no_such_package: pip install ") and "\n" not in said


@pytest.fixture(scope="module")
def loaded():
    if missing := demo.missing_packages():
        pytest.skip(f"{', '.join(missing)} not installed: scripts/install_deps.sh python-engines")
    from folio.integrations import transformers as integration

    integration.register()
    return *demo.load(), integration


def test_the_answer_equals_sdpas(loaded):
    tokenizer, model, integration = loaded
    model.set_attn_implementation("sdpa")
    expected = demo.answer(tokenizer, model, demo.QUESTION)
    model.set_attn_implementation("folio")
    assert demo.answer(tokenizer, model, demo.QUESTION) == expected
    cache = integration.FolioCache()
    assert demo.answer(tokenizer, model, demo.QUESTION, cache=cache) == expected
    assert cache.get_seq_length() > len(expected) and "Paris" in tokenizer.decode(expected)


def test_serving_equals_sdpa_one_by_one(loaded):
    """Greedy tokens may part where rounding decides; then sdpa's two best logits lie within 1e-3 of one another."""
    import tiny_models

    tokenizer, model, integration = loaded
    if not integration.CONTINUOUS_BATCHING:
        pytest.skip("continuous batching needs transformers 5.17")
    integration.reset_statistics()
    model.set_attn_implementation("folio")
    answers, facts = demo.serve(tokenizer, model, demo.VISITORS, demo.NOTES, new_tokens=12)
    shared = len(tokenizer(demo.NOTES).input_ids) // 16 * 16
    assert facts["prefix tokens reused"] >= shared * (len(demo.VISITORS) - 1)
    did = integration.statistics()
    assert did["plans"] == did["layer_calls"] // 30 and did["tokens_written"] % 30 == 0
    for question, tokens in zip(demo.VISITORS, answers):
        prompt = tokenizer(demo.prompt_of(question, demo.NOTES)).input_ids
        expected, logits = tiny_models.greedy(model, "sdpa", prompt, 12)
        tiny_models.assert_same_tokens(tokens, expected[: len(tokens)], logits, nearly=1e-3)
