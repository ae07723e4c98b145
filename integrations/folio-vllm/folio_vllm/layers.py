"""Layers that agree in what decides a kernel share an op, a plan a step and a workspace."""

from dataclasses import dataclass
from typing import NamedTuple

import folio
import torch

from .context import context_of
from .counts import count


@dataclass(frozen=True)
class LayerKind:
    """What decides a layer's op. `source` is "paged", or "ragged" for encoder layers, whose keys are not cached."""

    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    q: torch.dtype
    kv: torch.dtype
    source: str
    page_size: int
    kv_format: str
    mask: str
    window_left: int
    window_right: int
    features: tuple

    def config(self, determinism):
        return folio.AttentionConfig(
            num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v, q=self.q, kv=self.kv, kv_format=self.kv_format, page_size=self.page_size,
            mask=self.mask, window_left=self.window_left, window_right=self.window_right, features=self.features,
            determinism=determinism)


class StepPlan(NamedTuple):
    """One step's plan of a kind of layers, and the scratch memory of its runs."""

    plan: folio.AttentionPlan
    workspace: folio.Workspace
    kernel_name: str


def graph_bounds(vllm_config):
    """Bounds of every batch that this engine schedules, so that captured graphs stay valid. Dummy runs count too: their
    lengths are those of the tokens of a step."""
    scheduler = vllm_config.scheduler_config
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    tokens = max(scheduler.max_num_batched_tokens, captured)
    encoder = getattr(scheduler, "max_num_encoder_input_tokens", 0) or 0
    return folio.GraphBounds(max_requests=max(scheduler.max_num_seqs, captured), max_tokens=tokens, max_q_len=tokens,
                             max_kv_len=max(vllm_config.model_config.max_model_len, tokens, encoder))


class PreparedKind:
    """An op with its plan buffer and its workspace. With bounds, which CUDA needs, neither the plan's image nor the
    workspace ever moves: plans are made on the device, and captured graphs read what later steps plan."""

    def __init__(self, kind, options, device, bounds):
        self.device = torch.device(device)
        self.bounds = bounds
        choice = folio.PrepareOptions(bounds=bounds, force_kernel=options.force_kernel)
        self.op = folio.prepare(context_of(device, options.num_threads), kind.config(options.determinism), choice)
        self.kernel_name = self.op.kernel_name
        self.buffer = folio.make_plan_buffer(self.op)
        self._allocate(folio.workspace_size(self.op))

    def _allocate(self, size):
        size = max(size, 256)
        memory = size if self.device.type == "cpu" else torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.workspace = folio.Workspace(memory)
        folio.init_workspace(self.op, self.workspace)

    def plan(self, cu_q, segments, num_tokens):
        """A plan of lengths that lie on this device: cu_q int32 [requests + 1], segments of folio.KvSegment."""
        if self.bounds is None:
            batch = folio.BatchView(cu_q, segments, num_tokens=num_tokens)
        else:
            batch = folio.BatchView(cu_q, segments, num_tokens=num_tokens, max_q_len=self.bounds.max_q_len,
                                    max_kv_len=self.bounds.max_kv_len)
        plan = folio.plan(self.op, batch, self.buffer)
        count("plans")
        if self.bounds is None and folio.workspace_size(plan) > self.workspace.bytes:
            self._allocate(folio.workspace_size(plan))
        return StepPlan(plan, self.workspace, self.kernel_name)
