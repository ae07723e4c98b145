"""Layers that agree in what decides a kernel share an op, a plan a step and a workspace."""

import functools
import os
from dataclasses import dataclass
from typing import NamedTuple

import folio
import torch


@functools.cache
def _cpu_context(cpus):
    """SGLang binds the thread that we run in to one CPU, which threads that it starts would inherit: Folio's threads
    start with all of the worker's CPUs."""
    if not cpus:
        return folio.Context.cpu(num_threads=torch.get_num_threads())
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        return folio.Context.cpu(num_threads=torch.get_num_threads())
    finally:
        os.sched_setaffinity(0, own)


@functools.cache
def _cuda_context(index):
    return folio.Context.cuda(index)


def context_of(device, cpus=()):
    """The context of a torch device; `cpus` are those that a CPU worker is bound to, none where it is not."""
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu_context(tuple(cpus))
    if device.type == "cuda":
        return _cuda_context(torch.cuda.current_device() if device.index is None else device.index)
    raise NotImplementedError(f"folio-sglang serves CPUs and CUDA devices, not {device.type}")


@dataclass(frozen=True)
class LayerKind:
    """What decides a layer's op."""

    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    q: torch.dtype
    kv: torch.dtype
    page_size: int
    mask: str
    window_left: int
    window_right: int
    features: tuple

    def config(self, determinism):
        return folio.AttentionConfig(
            num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v, q=self.q, kv=self.kv, page_size=self.page_size, mask=self.mask,
            window_left=self.window_left, window_right=self.window_right, features=self.features,
            determinism=determinism)


class StepPlan(NamedTuple):
    """One step's plan of a kind of layers, and the scratch memory of its runs."""

    plan: folio.AttentionPlan
    workspace: folio.Workspace


class PreparedKind:
    """An op with its plan buffer and its workspace. With bounds, plans are made from lengths on the device, and neither
    the plan's image nor the workspace ever moves: that is for captured graphs."""

    def __init__(self, kind, determinism, context, device, bounds=None):
        self.device, self.bounds = torch.device(device), bounds
        self.op = folio.prepare(context, kind.config(determinism), folio.PrepareOptions(bounds=bounds))
        self.buffer = folio.make_plan_buffer(self.op)
        self._allocate(folio.workspace_size(self.op))

    def _allocate(self, size):
        size = max(size, 256)
        memory = size if self.device.type == "cpu" else torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.workspace = folio.Workspace(memory)
        folio.init_workspace(self.op, self.workspace)

    def plan(self, cu_q, kv_lens, num_tokens):
        """A plan of int32 lengths: cu_q [requests + 1], kv_lens [requests]; the host's, or with bounds the device's."""
        segments = [folio.KvSegment(kv_lens)]
        if self.bounds is None:
            batch = folio.BatchView(cu_q, segments, num_tokens=num_tokens)
        else:
            batch = folio.BatchView(cu_q, segments, num_tokens=num_tokens, max_q_len=self.bounds.max_q_len,
                                    max_kv_len=self.bounds.max_kv_len)
        plan = folio.plan(self.op, batch, self.buffer)
        if self.bounds is None and folio.workspace_size(plan) > self.workspace.bytes:
            self._allocate(folio.workspace_size(plan))
        return StepPlan(plan, self.workspace)
