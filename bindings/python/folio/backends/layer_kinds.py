"""For engines' plug-ins in Python: layers that agree in what decides a kernel share an op, a plan a step and a workspace.

A plug-in describes each layer of its engine by a LayerKind, keeps a PreparedKind for each kind, plans once a step and
kind, and binds the step's tables once (`PreparedKind.step`). A layer then costs one call of a folio.Layer.

This module needs torch; `folio.backends` itself does not.
"""

import functools
import os
from dataclasses import dataclass

import torch

import folio

SMALLEST_WORKSPACE = 256


@dataclass(frozen=True)
class LayerKind:
    """What decides a layer's op, in the words of folio.AttentionConfig. `source` is "paged", or "ragged" for layers whose
    keys are not cached. Kinds are keys of dictionaries: equal ones share everything."""

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
    source: str = "paged"
    kv_format: str = "strided"

    def __post_init__(self):
        object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))  # once: a layer's call looks its kind up

    def __hash__(self):
        return self._hash

    def config(self, determinism):
        return folio.AttentionConfig(
            num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v, q=self.q, kv=self.kv, kv_format=self.kv_format, page_size=self.page_size,
            mask=self.mask, window_left=self.window_left, window_right=self.window_right, features=self.features,
            determinism=determinism)


class PreparedKind:
    """An op with its plan buffer and its workspace. With bounds, plans are made from lengths on the device, and neither
    the plan's image nor the workspace ever moves: captured graphs read what later steps plan."""

    def __init__(self, kind, context, device, determinism="run_to_run", bounds=None, force_kernel=""):
        """Raises what folio.prepare raises where no kernel takes the kind."""
        self.kind, self.device, self.bounds = kind, torch.device(device), bounds
        choice = folio.PrepareOptions(bounds=bounds, force_kernel=force_kernel)
        self.op = folio.prepare(context, kind.config(determinism), choice)
        self.kernel_name = self.op.kernel_name
        self.buffer = folio.make_plan_buffer(self.op)
        self._allocate(folio.workspace_size(self.op))

    def _allocate(self, size):
        size = max(size, SMALLEST_WORKSPACE)
        memory = size if self.device.type == "cpu" else torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.workspace = folio.Workspace(memory)
        folio.init_workspace(self.op, self.workspace)

    def plan(self, cu_q, segments, num_tokens):
        """A plan of int32 lengths: cu_q [requests + 1], segments of folio.KvSegment; the host's, or with bounds the
        device's. The buffer's plan before it becomes stale."""
        if self.bounds is None:
            batch = folio.BatchView(cu_q, segments, num_tokens=num_tokens)
        else:
            batch = folio.BatchView(cu_q, segments, num_tokens=num_tokens, max_q_len=self.bounds.max_q_len,
                                    max_kv_len=self.bounds.max_kv_len)
        plan = folio.plan(self.op, batch, self.buffer)
        if self.bounds is None and folio.workspace_size(plan) > self.workspace.bytes:
            self._allocate(folio.workspace_size(plan))
        return plan

    def step(self, plan, tables):
        """What the layers of this kind share in one step. tables: as folio.Step takes them, one a segment of the plan.
        On a CPU they are copied here. On a GPU kernels read them when they run, in captured graphs too."""
        return folio.Step(plan, tables, self.workspace)


class BoundLayers:
    """The folio.Layers of one attention layer of a model, by the prepared kind that it attends with. `memory` is whatever
    compares equal as long as the engine gives the same cache and scales: addresses. A folio.Layer keeps what it is
    bound to, so nothing else can get these addresses."""

    def __init__(self):
        self._bound = {}

    def find(self, prepared, memory):
        """The layer, or None where it has to be bound first, or anew."""
        known = self._bound.get(prepared)
        return known[1] if known is not None and known[0] == memory else None

    def add(self, prepared, memory, layer):
        self._bound[prepared] = memory, layer
        return layer

    def clear(self):
        self._bound.clear()


@functools.cache
def _cpu_context(num_threads, cpus):
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


def context_of(device, num_threads=0, cpus=()):
    """The context of a torch device: one a process. On a CPU it has num_threads, 0 being torch's. cpus: the worker's.
    Engines bind the thread that we run in to one CPU, which threads that it starts would inherit; Folio's start with
    all of these. Raises NotImplementedError for other devices, folio.Error where this build does not have it."""
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu_context(num_threads or torch.get_num_threads(), tuple(sorted(cpus)))
    if device.type == "cuda":
        return _cuda_context(torch.cuda.current_device() if device.index is None else device.index)
    raise NotImplementedError(f"Folio serves CPUs and CUDA devices, not {device.type}")
