"""What every function here stands on: ops by configuration, and the plans, steps and layers of one batch.

FlashInfer's callers plan once a step and run once a layer, as Folio's do. They say more at `run` than Folio's: the
cache, sinks and scales. So a batch is kept as its lengths, and planned for each kind of attention that it is run with.
"""

import functools
import itertools
from typing import NamedTuple

import torch

from .. import _folio as folio
from .arguments import split_cache

MAX_LENGTH = 2**31 - 4096  # of keys, as KvSegment says


class Kind(NamedTuple):
    """What picks an op: the fields of folio.AttentionConfig, hashable."""

    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    q: torch.dtype
    kv: torch.dtype
    out: torch.dtype
    page_size: int = 16
    mask: str = "none"
    window_left: int = -1
    window_right: int = -1
    features: tuple = ()
    determinism: str = "run_to_run"
    ragged_kv: torch.dtype = None  # of ragged keys, where there are any
    span_window_left: int = 0  # with the feature spans


class Bounds(NamedTuple):
    """folio.GraphBounds, hashable: with them a GPU's plans keep their addresses."""

    max_requests: int
    max_tokens: int
    max_q_len: int
    max_kv_len: int
    max_shared_levels: int = 0


class Batch(NamedTuple):
    """One step's lengths on the host (on a device with `bounds` only) and what all of its layers read."""

    cu_q: object  # [requests + 1]
    segments: list  # of folio.KvSegment
    tables: list  # one a segment: folio.PageTableView, or offsets of a ragged one
    num_tokens: int
    q_first_pos: object = None
    max_q_len: int = 0
    max_kv_len: int = 0
    bounds: object = None
    mask_tail: object = None  # [requests]: the last keys that a custom mask is of; None: all
    spans: object = None  # [num_tokens, 2], for kinds with the feature spans; None: all empty


class Scales(NamedTuple):
    """What a layer multiplies by: numbers, or float32 tensors of one or, for keys and values, as many as KV heads."""

    sm: float
    cap: float = 0.0
    k: object = 1.0
    v: object = 1.0
    rope: tuple = (1.0, 1e4)  # scale, theta
    tensors: bool = False  # k or v is one: compared by its memory, not by its values


def rounded_bound(length):
    """A length rounded up, so that growing sequences do not prepare an op each."""
    return min(max(64, 1 << (int(length) - 1).bit_length()), MAX_LENGTH)


@functools.cache
def context_of(device):
    """The one folio.Context of a torch device."""
    return folio.Context.cpu() if device.type == "cpu" else folio.Context.cuda(device.index)


def device_of(tensor):
    """A tensor's device with its index. Refuses those that Folio has no kernels for."""
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise folio.InvalidArgument(f"the tensors lie on {device}; Folio has kernels for CPUs and CUDA GPUs")
    return device


@functools.lru_cache(maxsize=256)
def op_of(device, kind, bounds):
    """The op of a configuration. Ops are immutable, so that all wrappers of the process share them."""
    options = folio.PrepareOptions(bounds=folio.GraphBounds(**bounds._asdict()) if bounds else None)
    return folio.prepare(context_of(device), folio.AttentionConfig(**kind._asdict()), options)


def current_stream(device):
    """torch's stream for a plan, whose lengths lie on the host and name none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _scale(value):
    if not isinstance(value, torch.Tensor):
        return value
    per_head = value.dim() == 1 and value.numel() > 1
    return folio.Scale(data=value.detach().reshape(-1).to(torch.float32).contiguous(),
                       granularity="per_head" if per_head else "per_tensor")


def _key(value):
    """A scale or a tensor as a part of a key: the layer that the key finds keeps the memory."""
    return (value.data_ptr(), value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value


def hash_of(scales):
    """Scales as a part of a key."""
    return scales._replace(k=_key(scales.k), v=_key(scales.v)) if scales.tensors else scales


def _key_of_layer(rest, cache):
    """`rest` and where a cache lies, a tensor or two: the layer that the key finds keeps the memory."""
    if type(cache) is tuple:
        k, v = cache
        return (rest, k.data_ptr(), v.data_ptr(), k.shape, v.shape, k.stride(), v.stride(),
                k.requires_grad or v.requires_grad)
    return rest, cache.data_ptr(), cache.shape, cache.stride(), cache.requires_grad


class _Planned:
    """The batch, planned for one kind."""

    __slots__ = ("op", "buffer", "workspace", "bytes", "step", "number", "mask")

    def __init__(self, op):
        self.op = op
        self.buffer = folio.make_plan_buffer(op)
        self.workspace = None
        self.bytes = 0
        self.step = None
        self.number = -1
        self.mask = None


class Plans:
    """A wrapper's present batch, what was planned for it, and the layers that ran in it.

    Caches of the layers that ran since the last-but-one batch are kept alive; `clear` lets go of them. On a GPU the
    workspace is memory of torch, as large as the plan says.
    """

    MAX_LAYERS = 1024
    MAX_KINDS = 8

    def __init__(self, device):
        self.device = device
        self.context = context_of(device)
        self._batch = None
        self._number = 0
        self._planned = {}
        self._layers = {}
        self._old_layers = {}
        self._latest = (None, None, None)  # kind, mask and what they are planned as
        self._plain = None  # what `again` repeats
        self._numbers = {}  # (op, scales): a number in their place in keys of layers
        self._counter = itertools.count()

    @property
    def batch(self):
        return self._batch

    @property
    def is_full(self):
        """Whether the batches so far were planned for more kinds than are worth keeping."""
        return len(self._planned) > self.MAX_KINDS

    def clear(self):
        """Forgets everything but the configuration's ops."""
        self.__init__(self.device)

    def forget_layers(self):
        """Lets go of caches, sinks and scales."""
        self._layers, self._old_layers = {}, {}

    def begin(self, batch, mask=None):
        """Takes the next step's batch. What the batch before was planned for is planned at once where bounds are
        fixed, since a captured run never asks; otherwise when it is run. mask: bits of its custom mask. Spans are
        planned inside of a capture."""
        self._batch = batch
        self._number += 1
        self._latest = (None, None, None)
        self._plain = None
        self._old_layers, self._layers = self._layers, {}
        if batch.bounds is None and self.is_full:
            self._planned.clear()
        if batch.bounds is not None:
            for kind, bounds in list(self._planned):
                custom = kind.mask == "custom"
                if bounds == batch.bounds and "spans" not in kind.features and (mask is not None or not custom):
                    self.step(kind, mask if custom else None)

    def amend(self, **changes):
        """Changes fields of the present batch, within the step: runs after this are planned anew."""
        self._batch = self._batch._replace(**changes)
        self._number += 1
        self._latest = (None, None, None)
        self._plain = None

    def step(self, kind, mask=None):
        """The batch, planned for this kind; now, if it is not yet. mask: packed bits of a custom mask."""
        latest = self._latest
        if latest[0] is kind and latest[1] is mask:
            return latest[2]
        planned = self._find(kind, mask)
        self._latest = (kind, mask, planned)
        return planned

    def _find(self, kind, mask):
        batch = self._batch
        if batch is None:
            raise folio.InvalidArgument("there is no plan: call plan before run")
        key = (kind, batch.bounds)
        planned = self._planned.get(key)
        if planned is not None and planned.number == self._number and planned.mask is mask:
            return planned
        on_host = not isinstance(batch.cu_q, torch.Tensor)
        if (self.device.type == "cuda" and (on_host or planned is None)
                and torch.cuda.is_current_stream_capturing()):
            raise folio.InvalidArgument("this batch would be planned inside of a CUDA graph: run it once with the same "
                                        "kinds of arguments before the capture")
        if planned is None:
            planned = _Planned(op_of(self.device, kind, batch.bounds))
        custom = None
        if kind.mask == "custom":
            tail = batch.mask_tail
            custom = folio.CustomMask() if tail is None else folio.CustomMask(scope="tail", tail_len=tail)
        view = folio.BatchView(batch.cu_q, batch.segments, num_tokens=batch.num_tokens, q_first_pos=batch.q_first_pos,
                               max_q_len=batch.max_q_len, max_kv_len=batch.max_kv_len, custom_mask=custom,
                               spans=batch.spans if "spans" in kind.features else None)
        stream = current_stream(self.device)
        plan = folio.plan(planned.op, view, planned.buffer, stream)
        if self.device.type == "cuda":
            self._grow(planned, plan, batch, stream)
        planned.step = folio.Step(plan, batch.tables, planned.workspace, custom_mask=mask)
        planned.number = self._number
        planned.mask = mask
        self._planned[key] = planned
        return planned

    def _grow(self, planned, plan, batch, stream):
        needed = folio.workspace_size(planned.op if batch.bounds else plan)
        if planned.workspace is not None and planned.bytes >= needed:
            return
        planned.bytes = max(needed, folio.workspace_size(planned.op))
        planned.workspace = folio.Workspace(torch.empty(planned.bytes, dtype=torch.uint8, device=self.device))
        folio.init_workspace(planned.op, planned.workspace, stream)

    def layer(self, op, cache, scales, sinks, slopes, hnd):
        """The folio.Layer of a cache (None, a tensor of both halves, or k and v), made at its first run in a step."""
        if sinks is None and slopes is None and not scales.tensors:
            rest = self._number_of(op, scales)
        else:
            rest = (op, hash_of(scales), _key(sinks), _key(slopes))
        key = (rest,) if cache is None else _key_of_layer(rest, cache)
        layer = self._known(key)
        if layer is None:
            layer = self._make_layer(op, cache, scales, sinks, slopes, hnd)
            if len(self._layers) >= self.MAX_LAYERS:
                self._layers.clear()
            self._layers[key] = layer
        return layer

    def _known(self, key):
        """The layer of this key that ran in this step or in the one before, or None."""
        layer = self._layers.get(key)
        if layer is None:
            layer = self._old_layers.pop(key, None)
            if layer is not None:
                self._layers[key] = layer
        return layer

    def _number_of(self, op, scales):
        number = self._numbers.get((op, scales))
        if number is None:
            if len(self._numbers) >= self.MAX_LAYERS:
                self._numbers.clear()
            number = self._numbers[op, scales] = next(self._counter)
        return number

    def remember_plain(self, kind, scales, q, out):
        """The run that just was is one for `again` to repeat."""
        planned = self._latest[2]
        self._plain = (planned.step, self._number_of(planned.op, scales), q.dtype, q.shape, kind.kv, out.dtype, out.shape)

    def again(self, q, cache, out):
        """Attention of a run that has a step, queries, a cache and an output like those of the step's last plain one.

        Returns out, or None where anything may be different: then nothing has happened.
        """
        plain = self._plain
        if plain is None:
            return None
        step, number, q_dtype, q_shape, kv_dtype, out_dtype, out_shape = plain
        first = cache[0] if type(cache) is tuple and len(cache) == 2 else cache
        if (type(first) is not torch.Tensor or first.dtype != kv_dtype or q.dtype != q_dtype or q.shape != q_shape
                or (out is not None and (out.dtype != out_dtype or out.shape != out_shape))):
            return None
        layer = self._known(_key_of_layer(number, cache))
        if layer is None:
            return None
        if out is None:
            if out_shape == q_shape and out_dtype == q_dtype:
                out = torch.empty_like(q, memory_format=torch.contiguous_format)  # twice as fast as by its shape
            else:
                out = q.new_empty(out_shape, dtype=out_dtype)
        layer(step, q, out)
        return out

    @staticmethod
    def _make_layer(op, cache, scales, sinks, slopes, hnd):
        if isinstance(scales.sm, float) and scales.sm == 0.0:
            raise ValueError("the scale of the logits is 0 (sm_scale or bmm1_scale, times q_scale); it must not be")
        view = None
        if cache is not None:
            view = (folio.make_hnd_view if hnd else folio.make_nhd_view)(*split_cache(cache, hnd))
        k_scale, v_scale = _scale(scales.k), _scale(scales.v)
        return folio.Layer(op, view, sm_scale=scales.sm, logits_soft_cap=scales.cap, sinks=sinks, alibi_slopes=slopes,
                           k_scale=k_scale, v_scale=v_scale, ragged_k_scale=k_scale, ragged_v_scale=v_scale,
                           rope=folio.RopeArgs(scale=scales.rope[0], theta=scales.rope[1]))

    def run(self, kind, scales, q, out, lse=None, cache=None, ragged=None, *, hnd=False, mask=None, sinks=None,
            slopes=None, base="two"):
        """Attention of one layer over the present batch, into `out` and, where it is given, `lse` [tokens, heads]."""
        planned = self.step(kind, mask)
        layer = self.layer(planned.op, cache, scales, sinks, slopes, hnd)
        layer(planned.step, q, out, None if lse is None else folio.LseView(lse, base), ragged)
