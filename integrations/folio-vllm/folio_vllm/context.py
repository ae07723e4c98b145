"""One Folio context per process and device."""

import functools
import os
import re

import folio
import torch

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


@functools.cache
def _cpu_context(num_threads):
    """OpenMP binds the thread that we run in to one CPU, which threads that it starts would inherit: Folio's threads
    start with all of the worker's CPUs."""
    cpus = worker_cpus()
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return folio.Context.cpu(num_threads=num_threads)
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        return folio.Context.cpu(num_threads=num_threads)
    finally:
        os.sched_setaffinity(0, own)


@functools.cache
def _cuda_context(index):
    return folio.Context.cuda(index)


def context_of(device, num_threads=0):
    """The context of a torch device. Raises folio.Error where this build of Folio does not have it."""
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu_context(num_threads or torch.get_num_threads())
    if device.type == "cuda":
        return _cuda_context(torch.cuda.current_device() if device.index is None else device.index)
    raise NotImplementedError(f"folio-vllm serves CPUs and CUDA devices, not {device.type}")
