"""The CPUs that SGLang bound a worker's OpenMP threads to."""

import os

import torch


def parse_cpus(text):
    """(0, 1, 2, 3, 8) of "0-3,8"."""
    cpus = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def bound_cpus(runner):
    """Empty where nothing is bound, as on a GPU: bound threads may use one CPU each, and ours is one of them."""
    if torch.device(runner.device).type != "cpu" or len(os.sched_getaffinity(0)) >= torch.get_num_threads():
        return ()
    from sglang.srt.runtime_context import get_device, get_parallel
    from sglang.srt.utils.numa_utils import init_threads_binding

    parallel = get_parallel()
    return parse_cpus(init_threads_binding(numa_index=get_device().gpu_id,
                                           world_size=parallel.dp_size * parallel.tp_size * parallel.pp_size))
