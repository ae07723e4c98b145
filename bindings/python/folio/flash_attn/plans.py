"""Ops, and the steps planned with them: what a stateless call finds again.

A step is found by the objects that its lengths are, by their versions and addresses, by shapes, and on a GPU by stream
and capture. It keeps these objects, so none of their ids or addresses can come to mean another tensor. Tensors of
inference mode have no version: what is planned from them is used by one call.

On a CPU lengths are read when a step is planned. On a GPU they are never read by the host: plans are made there, within
bounds that are rounded up, so that few ops are prepared. Under capture the graph has the plan in it.
"""

import ctypes
import functools
import threading
from collections import OrderedDict
from typing import NamedTuple

import folio
import torch


class OpKey(NamedTuple):
    """What an op is prepared for, beside bounds."""

    device: torch.device
    threads: int
    num_q_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    q: torch.dtype
    kv: torch.dtype
    out: torch.dtype
    page_size: int  # 0: keys are ragged
    causal: bool
    window_left: int
    window_right: int
    soft_cap: bool
    alibi: bool
    sinks: bool
    num_splits: int
    sm_margin: int
    attention_chunk: int
    left_padded: bool

    def config(self):
        wanted = {"soft_cap": self.soft_cap, "alibi": self.alibi, "sinks": self.sinks, "kv_start": self.left_padded}
        return folio.AttentionConfig(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v,
            q=self.q,
            kv=self.kv,
            ragged_kv=self.kv,
            out=self.out,
            page_size=self.page_size or 16,
            mask=folio.MaskKind.CAUSAL if self.causal else folio.MaskKind.NONE,
            window_left=self.window_left,
            window_right=-1 if self.causal else self.window_right,
            attention_chunk=self.attention_chunk,
            features=[name for name, is_wanted in wanted.items() if is_wanted],
        )

    def prepare(self, bounds):
        context = context_of(self.device, self.threads)
        workers = 0
        if self.sm_margin:
            workers = context.concurrency - self.sm_margin
            if workers < 1:
                raise ValueError(f"folio.flash_attn: sm_margin is {self.sm_margin}; {self.device} has {context.concurrency}")
        options = folio.PrepareOptions(
            bounds=None if bounds is None else folio.GraphBounds(**bounds._asdict()),
            num_workers=workers,
            max_kv_splits=self.num_splits,
            allow_fp8_mma=self.q == torch.float8_e4m3fn,  # who gives fp8 queries asks for it
        )
        return folio.prepare(context, self.config(), options)


class Bounds(NamedTuple):
    max_requests: int
    max_tokens: int
    max_q_len: int
    max_kv_len: int

    @classmethod
    def around(cls, *sizes):
        """Powers of two, so that steps of similar sizes share an op."""
        return cls(*(1 << max(size - 1, 0).bit_length() for size in sizes))


class Lengths(NamedTuple):
    """A step's lengths: int32 tensors on q's device, and what the host knows of them."""

    cu_q: torch.Tensor
    kv_len: torch.Tensor
    table: torch.Tensor  # page ids [requests, columns], or the offsets [requests + 1] of ragged keys
    num_tokens: int
    max_q_len: int
    max_kv_len: int
    rows: int = 1  # requests that one of the caller's becomes: 2 where queries lie between those of seqused_q
    new_tokens: object = None  # a new_tokens.NewTokens, where keys are appended
    kv_start: torch.Tensor | None = None  # [requests]: keys before it are padding
    pages: int = 0  # that a cache must have, where the ids are not the caller's page table

    def batch(self, paged):
        source = folio.KvSource.PAGED if paged else folio.KvSource.RAGGED
        return folio.BatchView(
            self.cu_q,
            [folio.KvSegment(self.kv_len, source=source)],
            num_tokens=self.num_tokens,
            max_q_len=self.max_q_len,
            max_kv_len=self.max_kv_len,
            kv_start=self.kv_start,
        )


class Step:
    """A planned step. `tensors` are what it was planned from, in the state that `state` says."""

    __slots__ = ("tensors", "versions", "addresses", "shapes", "planner", "place", "lengths", "step", "short_keys",
                 "checks")

    def __init__(self, tensors, planner, place, lengths, step):
        self.tensors = tensors
        self.planner = planner
        self.place = place
        self.lengths = lengths
        self.step = step
        self.short_keys = []
        self.versions = [t._version for t in tensors] if not any(t.is_inference() for t in tensors) else None
        self.addresses = [t.data_ptr() for t in tensors]
        self.shapes = [t.shape for t in tensors]
        self.checks = tuple(zip(tensors, self.versions or (), self.addresses))

    def is_current(self):
        """Whether what it was planned from is as it was then."""
        tensors = self.tensors
        return (
            not any(t.is_inference() for t in tensors)  # which `.data` may have made of it
            and [t._version for t in tensors] == self.versions
            and [t.data_ptr() for t in tensors] == self.addresses
            and [t.shape for t in tensors] == self.shapes
        )


class Planner:
    """An op with the plan buffers of one stream, eager or captured. The family has the steps that they hold."""

    KEPT_STEPS = 8

    def __init__(self, op, device, stream, captured, family, buffers):
        self.op = op
        self._place = device, stream
        self.captured = captured  # no buffer can be made: memory of a GPU is not allocated then
        self._family = family
        self._buffers = buffers  # of no step
        self._held = OrderedDict()  # key of a step: the step and its buffer

    def plan(self, key, place, lengths, tensors):
        """A new step, which `key` finds if its tensors have versions. The oldest one's buffer may be reused."""
        self._release(key)
        buffer = self._take()
        step = None
        try:
            plan = folio.plan(self.op, lengths.batch(self._family.paged), buffer)
            step = Step(tensors, self, place, lengths, folio.Step(plan, [lengths.table], self._workspace()))
        finally:
            if step is None or step.versions is None:
                self._buffers.append(buffer)
            else:
                self._held[key] = step, buffer
                self._family.steps[key] = step
        return step

    def release(self):
        for key in list(self._held):
            self._release(key)

    def check(self):
        for buffer in (*self._buffers, *(buffer for _, buffer in self._held.values())):
            folio.check_plans(buffer)

    def _release(self, key):
        if key in self._held:
            step, buffer = self._held.pop(key)
            if self._family.steps.get(key) is step:  # else one of another planner replaced it
                del self._family.steps[key]
            for short in step.short_keys:
                if self._family.short.get(short) is step:
                    del self._family.short[short]
            self._buffers.append(buffer)

    def _take(self):
        if not self._buffers:
            if not self.captured and len(self._held) < self.KEPT_STEPS:
                return folio.make_plan_buffer(self.op)
            self._release(next(iter(self._held)))
        return self._buffers.pop()

    def _workspace(self):
        """None on a CPU, where it is the plan buffer's. A capture's memory is its graph's, as torch has it."""
        device, stream = self._place
        if device.type == "cpu":
            return None
        size = max(folio.workspace_size(self.op), 256)
        scratch = {} if self.captured else _families.scratch
        held, workspace = scratch.get((device, stream), (0, None))
        if held < size:
            workspace = folio.Workspace(torch.empty(size, dtype=torch.uint8, device=device))
            folio.init_workspace(self.op, workspace)
            scratch[device, stream] = size, workspace
        return workspace


class Family:
    """The ops of one key, by bounds; their planners, by stream and capture; and the steps that these hold."""

    KEPT_PLANNERS = 64

    def __init__(self, key):
        self.key = key
        self.paged = key.page_size > 0
        self.steps = {}
        self.short = {}  # the same steps, by what a call's arguments are before they are brought to one form
        self._ops = {}
        self._planners = OrderedDict()
        self._spare = {}  # bounds: a buffer for the next capture, made outside of one

    def plan(self, key, place, lengths, tensors):
        return self._planner(place, lengths).plan(key, place, lengths, tensors)

    def check(self):
        for planner in self._planners.values():
            planner.check()

    def forget(self):
        for planner in self._planners.values():
            planner.release()

    def _planner(self, place, lengths):
        bounds = None
        stream, capture = place or (0, 0)
        if place is not None:
            requests = lengths.kv_len.shape[0]
            bounds = Bounds.around(requests, lengths.num_tokens, lengths.max_q_len, lengths.max_kv_len)
        at = bounds, stream, capture != 0
        planner = self._planners.get(at)
        if planner is None:
            planner = self._planners[at] = self._make_planner(bounds, stream, capture != 0)
        self._planners.move_to_end(at)
        if bounds is not None and not capture and bounds not in self._spare:
            self._spare[bounds] = folio.make_plan_buffer(planner.op)
        return planner

    def _make_planner(self, bounds, stream, captured):
        op = self._ops.get(bounds)
        if captured and op is None:
            raise RuntimeError(
                "folio.flash_attn: a step of these shapes must run once before it is captured: ops are prepared then"
            )
        if captured and bounds not in self._spare:
            raise RuntimeError(
                "folio.flash_attn: a second stream captures a step of these shapes; run the step once between the two"
            )
        if op is None:
            op = self._ops[bounds] = self.key.prepare(bounds)
            self._forget_oldest()
        buffers = [self._spare.pop(bounds)] if captured else []
        return Planner(op, self.key.device, stream, captured, self, buffers)

    def _forget_oldest(self):
        """Bounds that no capture has: graphs keep the address of a plan."""
        if len(self._planners) < self.KEPT_PLANNERS:
            return
        captured = {bounds for bounds, _, is_captured in self._planners if is_captured}
        oldest = next((at for at in self._planners if at[0] not in captured), None)
        if oldest is not None:
            for at in [at for at in self._planners if at[0] == oldest[0]]:
                self._planners.pop(at).release()
            self._ops.pop(oldest[0])
            self._spare.pop(oldest[0], None)


class _Families(threading.local):
    """Per thread, so that no two threads share a plan's buffer or a workspace."""

    def __init__(self):
        self.of = {}
        self.scratch = {}  # (device, stream): (bytes, workspace)


_families = _Families()


def family_of(key):
    family = _families.of.get(key)
    if family is None:
        family = _families.of[key] = Family(key)
    return family


def forget_plans():
    """Lets every later call of this thread plan anew. Graphs that were captured keep their plans."""
    for family in _families.of.values():
        family.forget()


def check_plans():
    """Raises folio.InvalidArgument if the GPU met lengths that it could not plan, in a call or in a graph's replay.

    Such requests get zeros. The next call with the same shapes raises too; a graph's replay raises here alone. Waits for
    nothing: it knows what the GPU has done so far.
    """
    for family in _families.of.values():
        family.check()


@functools.cache
def context_of(device, threads):
    if device.type == "cuda":
        return folio.Context.cuda(device.index)
    if device.type != "cpu":
        raise ValueError(f"folio.flash_attn: q lies on {device}; Folio runs on CPUs and CUDA GPUs")
    return folio.Context.cpu(num_threads=threads)


def place_of(device_index):
    """(stream, capture) of a call on that GPU; capture is 0 where its work is not captured."""
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    return stream, _capture(stream) if torch._C._cuda_isCurrentStreamCapturing() else 0


@functools.cache
def _driver():
    return ctypes.CDLL("libcuda.so.1")


def _capture(stream):
    """The number of the capture that the stream is in: no two of a process have the same."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if code or number.value == 0:
        raise RuntimeError(f"folio.flash_attn: the stream's capture is not known: cuStreamGetCaptureInfo says {code}")
    return number.value
