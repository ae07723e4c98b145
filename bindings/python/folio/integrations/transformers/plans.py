"""Ops, their plans and their scratch memory: made once, shared by all layers of all models of a thread."""

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass

import folio
import torch

from .arguments import scale_of, sinks_of

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_counts = Counter()
_counts_lock = threading.Lock()


def count(**what):
    with _counts_lock:
        _counts.update(what)


def statistics():
    """What the integration did since reset_statistics(), as a dict of numbers.

    layer_calls: attention of one layer. plans: plans made; shared_plans: layer calls that took a plan made before.
    tokens_written: tokens that Folio wrote into caches, a layer each. kernels: layer calls by kernel name. Of a CUDA
    graph its capture is counted, its replays are not.
    """
    with _counts_lock:
        totals = {name: _counts[name] for name in ("layer_calls", "plans", "shared_plans", "tokens_written")}
        totals["kernels"] = {
            name.removeprefix("kernel:"): number for name, number in _counts.items() if name.startswith("kernel:")
        }
    return totals


def reset_statistics():
    with _counts_lock:
        _counts.clear()


@dataclass(frozen=True)
class OpKey:
    """What an op is prepared for."""

    device: torch.device
    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    q: torch.dtype
    kv: torch.dtype
    mask: folio.MaskKind
    window_left: int = -1
    soft_cap: bool = False
    sinks: bool = False
    page_size: int = 16
    kv_format: folio.KvFormat = folio.KvFormat.STRIDED
    bounds: tuple | None = None  # of GraphBounds: max_requests, max_tokens, max_q_len, max_kv_len

    def config(self):
        for name in ("q", "kv"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(f"{name} is {getattr(self, name)}; Folio takes float32, float16 and bfloat16 models")
        wanted = {"soft_cap": self.soft_cap, "sinks": self.sinks}
        return folio.AttentionConfig(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v,
            q=self.q,
            kv=self.kv,
            mask=self.mask,
            window_left=self.window_left,
            features=[name for name, is_wanted in wanted.items() if is_wanted],
            page_size=self.page_size,
            kv_format=self.kv_format,
        )


class Planned:
    """A plan, whatever its maker keeps with it, and the step that binds it to tables: made by whoever knows them."""

    def __init__(self, buffer, plan, facts):
        self.buffer, self.plan, self.facts = buffer, plan, facts
        self.step = None


class Op:
    """A prepared op with its workspace, the plans it made last, each in a buffer of its own, and layers without a cache."""

    KEPT_PLANS = 16

    def __init__(self, key):
        self.op = folio.prepare(context_of(key.device), key.config(), _options(key))
        self.kernel = self.op.kernel_name
        size = max(folio.workspace_size(self.op), 256)
        if key.device.type == "cuda":
            size = torch.empty(size, dtype=torch.uint8, device=key.device)
        self.workspace = folio.Workspace(size)
        folio.init_workspace(self.op, self.workspace)
        self.layers = {}
        self._plans = OrderedDict()

    def plan(self, key, make):
        """The Planned of a step: what `key` names, or what make() -> (BatchView, facts) describes.

        Keys hold every length that the plan depends on, so what is found is never another step's.
        """
        found = self._plans.get(key)
        if found is not None:
            self._plans.move_to_end(key)
            count(shared_plans=1)
            return found
        batch, facts = make()
        full = len(self._plans) >= self.KEPT_PLANS
        buffer = self._plans.popitem(last=False)[1].buffer if full else folio.make_plan_buffer(self.op)
        planned = self._plans[key] = Planned(buffer, folio.plan(self.op, batch, buffer), facts)
        count(plans=1)
        return planned

    def layer(self, layers, cache, scaling, softcap, s_aux):
        """The folio.Layer of a cache, kept in `layers`. Sinks are read when it is made, so one with sinks is not kept:
        weights may be loaded again."""
        key = (self, scaling, softcap)
        layer = layers.get(key) if s_aux is None else None
        if layer is None:
            layer = folio.Layer(
                self.op,
                cache,
                sm_scale=scale_of(scaling),
                logits_soft_cap=float(softcap or 0.0),
                sinks=sinks_of(s_aux),
            )
            if s_aux is None:
                layers[key] = layer
        return layer

    def counted(self):
        """Counts a layer's call."""
        count(**{"layer_calls": 1, "kernel:" + self.kernel: 1})


class _Prepared(threading.local):
    """Per thread, so that no two threads share a workspace or a plan's buffer."""

    def __init__(self):
        self.ops = {}


_prepared = _Prepared()
_contexts = {}


def op_of(key):
    """The op of a key, on the current stream; prepared where it is asked for first."""
    stream = torch.cuda.current_stream(key.device).cuda_stream if key.device.type == "cuda" else torch.get_num_threads()
    ops = _prepared.ops
    if (key, stream) not in ops:
        if key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("folio: a step must run once on its stream before it is captured: ops are prepared then")
        ops[key, stream] = Op(key)
    return ops[key, stream]


def context_of(device):
    """Folio's context of a torch device; a CPU's has as many threads as torch has now."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model is on {device}; Folio runs on CPUs and CUDA GPUs")
    index = torch.get_num_threads() if device.type == "cpu" else device.index or 0
    if (device.type, index) not in _contexts:
        make = folio.Context.cuda(index) if device.type == "cuda" else folio.Context.cpu(num_threads=index)
        _contexts[device.type, index] = make
    return _contexts[device.type, index]


def _options(key):
    if key.bounds is None:
        return folio.PrepareOptions()
    names = ("max_requests", "max_tokens", "max_q_len", "max_kv_len")
    return folio.PrepareOptions(bounds=folio.GraphBounds(**dict(zip(names, key.bounds))))
