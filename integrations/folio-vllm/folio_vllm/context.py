"""Where Folio runs in a worker of vLLM: its CPUs, its context, and the bounds of what an engine schedules."""

import os
import re

import folio
from folio.backends import layer_kinds

# How vLLM's CPU workers are told their CPUs: libgomp's, Intel's and OpenMP's own variable.
_CPU_LISTS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")


def worker_cpus(environment=os.environ):
    """The CPUs that vLLM bound this worker's OpenMP threads to. Empty: they are not bound."""
    for name in _CPU_LISTS:
        text = environment.get(name, "")
        if name == "KMP_AFFINITY":
            listed = re.search(r"proclist=\[([\d,\s]+)\]", text)
            text = listed.group(1) if listed else ""
        if re.fullmatch(r"[\d,\s{}]+", text):
            return {int(number) for number in re.findall(r"\d+", text)}
    return set()


def context_of(device, num_threads=0):
    """The context of a torch device, with the worker's CPUs."""
    return layer_kinds.context_of(device, num_threads, worker_cpus())


def graph_bounds(vllm_config):
    """Bounds of every batch that this engine schedules, so that captured graphs stay valid. Dummy runs count too: their
    lengths are those of the tokens of a step."""
    scheduler = vllm_config.scheduler_config
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    tokens = max(scheduler.max_num_batched_tokens, captured)
    encoder = getattr(scheduler, "max_num_encoder_input_tokens", 0) or 0
    return folio.GraphBounds(max_requests=max(scheduler.max_num_seqs, captured), max_tokens=tokens, max_q_len=tokens,
                             max_kv_len=max(vllm_config.model_config.max_model_len, tokens, encoder))
