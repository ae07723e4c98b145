"""What the wrappers share: the problem that `plan` states, its batch, and `run`."""

import math
from typing import NamedTuple

import numpy as np
import torch

from .. import _folio as folio
from . import arguments
from .plans import MAX_LENGTH, Batch, Bounds, Kind, Plans, Scales, device_of

LOG2_E = math.log2(math.e)


class Problem(NamedTuple):
    """What `plan` says besides lengths and pages."""

    kind: Kind
    scales: Scales
    alibi: bool = False
    far_queries: bool = False  # queries stand behind all keys: ALiBi without a causal mask

    def with_sinks(self):
        if self.alibi:
            raise NotImplementedError("sinks are given with pos_encoding_mode ALIBI, which is not offered: FlashInfer "
                                      "counts its distances from the first query, so that a sink would weigh by length")
        return self._replace(kind=self.kind._replace(features=(*self.kind.features, "sinks")))


def state_problem(*, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, page_size=16, causal=False,
                  custom_mask=False, pos_encoding_mode="NONE", window_left=-1, window_right=-1, logits_soft_cap=None,
                  sm_scale=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
                  o_data_type=None, fixed_split_size=None, disable_split_kv=False, one_query=False, ragged=False):
    """A Problem of plan's arguments. one_query: no request has more, so that causal and non-causal are the same.

    fixed_split_size and disable_split_kv both ask for results that no other request changes: BATCH_INVARIANT. Splits
    have Folio's own fixed size then.
    """
    q = arguments.torch_dtype(q_data_type)
    kv = arguments.torch_dtype(kv_data_type, q)
    if kv == torch.uint8:
        raise NotImplementedError(f"kv_data_type is torch.uint8; {arguments.NO_NVFP4}")
    arguments.check_encoding(pos_encoding_mode)
    cap = logits_soft_cap or 0.0
    features = ()
    if cap > 0.0:
        features += ("soft_cap",)
    alibi = pos_encoding_mode == "ALIBI"
    far = alibi and not (causal or one_query) and not custom_mask or alibi and custom_mask
    if alibi:
        features += ("alibi",)
        if far and (window_left >= 0 or window_right >= 0):
            raise NotImplementedError("pos_encoding_mode is ALIBI with a window and without causal, which is not offered")
    if pos_encoding_mode == "ROPE_LLAMA":
        features += ("rope_llama",)
    invariant = fixed_split_size is not None and fixed_split_size > 0 or disable_split_kv
    mask = "custom" if custom_mask else "causal" if causal or (alibi and not far) else "none"
    kind = Kind(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk, q, kv,
                arguments.torch_dtype(o_data_type, q), page_size, mask, int(window_left),
                -1 if mask == "causal" else int(window_right), features, "batch_invariant" if invariant
                else "run_to_run", kv if ragged else None)
    scale = 1.0 / math.sqrt(head_dim_qk) if sm_scale is None else float(sm_scale)
    rope = (1.0 if rope_scale is None else float(rope_scale), 1e4 if rope_theta is None else float(rope_theta))
    return Problem(kind, Scales(scale, cap, rope=rope), alibi, far)


class Wrapper:
    """The base of the wrappers. Not for several threads at once.

    float_workspace_buffer says the device; its memory is not used. A wrapper's own workspace is as large as its plans
    say, and on a GPU memory of torch.
    """

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        arguments.check_backend(backend)
        self.device = device_of(float_workspace_buffer)
        self._float_workspace_buffer = float_workspace_buffer
        self._kv_layout = kv_layout
        self._hnd = arguments.is_hnd(kv_layout)
        self._use_cuda_graph = bool(use_cuda_graph)
        self._backend = backend
        self._plans = Plans(self.device)
        self._problem = None
        self._given = None  # plan's arguments, for the forward of earlier versions
        self._mask = None
        self._shift = None
        self._sink_problem = (None, None)  # a problem, and the same with sinks

    @property
    def is_cuda_graph_enabled(self):
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer=None):
        """Forgets plans and caches. The buffers' memory is not used (see the class)."""
        if device_of(float_workspace_buffer) != self.device:
            raise ValueError(f"float_workspace_buffer lies on {float_workspace_buffer.device}; the wrapper's on {self.device}")
        self._float_workspace_buffer = float_workspace_buffer
        self._plans.clear()
        self._problem = None

    def end_forward(self):
        """Nothing to do; earlier versions of FlashInfer wanted it."""

    def prewarm_paged_kv_stride_variant(self, variant="independent"):
        """Nothing to do: kernels take caches of all strides."""
        if variant not in ("independent", "shared", "runtime"):
            raise ValueError(f"variant is {variant!r}")

    def _adopt(self, problem, batch, lens=None):
        """Takes plan's problem and batch, and plans it. lens: (q_lens, kv_lens), numpy, for ALiBi."""
        if problem.alibi:
            batch = self._place_queries(problem, batch, *lens)
        self._problem = None
        self._plans.begin(batch, self._mask)
        self._lens = lens
        self._plans.step(problem.kind, self._mask)
        self._problem = problem

    def _place_queries(self, problem, batch, q_lens, kv_lens):
        """Positions for ALiBi. FlashInfer adds slope * (key - row), rows counted from a request's first query, and for
        keys on both sides; Folio -slope * |distance|. They differ by a number for each row, which only the LSE
        shows."""
        first = kv_lens if problem.far_queries else kv_lens - q_lens
        shift = torch.from_numpy(np.repeat(first, q_lens).astype(np.float32))
        shift = torch.nn.functional.pad(shift, (0, batch.num_tokens - len(shift)))
        if self._shift is None or batch.bounds is None:
            self._shift = shift.to(self.device)
        else:
            self._shift.copy_(shift)
        return batch._replace(q_first_pos=first.astype(np.int32)) if problem.far_queries else batch

    def _changed(self, state, **changes):
        """The problem of plan's arguments with some of forward's in place of them, for the batch that there is."""
        if self._given is None:
            raise folio.InvalidArgument("there is no plan: call plan (begin_forward) before forward")
        changes = {name: value for name, value in changes.items() if self._given.get(name) != value}
        if not changes:
            return self._problem
        problem = state(**{**self._given, **changes})
        if problem.alibi or self._problem.alibi:
            self._adopt(problem, self._plans.batch._replace(q_first_pos=None), self._lens)
        return problem

    def _attend(self, q, cache=None, ragged=None, *, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
                return_lse=False, base="log2", layout="NH", window_left=None, sinks=None, problem=None, sm_scale=None,
                mask=None):
        """run: attention of the present plan. Returns out, or (out, lse)."""
        own = problem is None
        if own:
            problem = self._problem
            if problem is None:
                raise folio.InvalidArgument("there is no plan: call plan before run")
        kind, scales, alibi, _ = problem
        if q.dtype != kind.q:
            raise ValueError(f"The dtype of q {q.dtype} does not match the q_data_type {kind.q} specified in plan function.")
        stored = (cache[0] if type(cache) is tuple else cache).dtype if cache is not None else ragged[0].dtype
        if stored != kind.kv:
            raise ValueError(f"The dtype of k {stored} does not match the kv_data_type {kind.kv} specified in plan function.")
        arguments.check_lse_layout(layout)
        if window_left is not None and window_left != kind.window_left:
            raise ValueError(f"window_left is {window_left}; plan was given {kind.window_left}")
        if sinks is not None:
            if self._sink_problem[0] is not problem:
                self._sink_problem = problem, problem.with_sinks()
            kind, sinks = self._sink_problem[1].kind, arguments.plain(sinks)
        if isinstance(q_scale, torch.Tensor):
            q, q_scale = dequantized_queries(q, q_scale, kind.num_kv_heads)
            kind = kind if q.dtype == kind.q else kind._replace(q=q.dtype)
        if q_scale is not None or k_scale is not None or v_scale is not None or sm_scale is not None:
            scales = scale_up(scales, q_scale, k_scale, v_scale, sm_scale)
        tokens, heads, _ = q.shape
        planned = self._plans.batch.num_tokens
        if tokens < planned:
            raise ValueError(f"q has {tokens} rows; plan was given {planned}")
        if out is None:
            out = torch.empty((tokens, heads, kind.head_dim_v), dtype=kind.out, device=q.device)
            if tokens > planned:
                out[planned:].zero_()
        elif out.shape != (tokens, heads, kind.head_dim_v) or out.dtype != kind.out:
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; it must be {kind.out} {(tokens, heads, kind.head_dim_v)}")
        wanted = None
        if return_lse or lse is not None:
            lse, wanted = lse_of(lse, layout, tokens, heads, q.device)
        into = out
        if tokens > planned:  # rows behind the batch's are padding
            q, into = q[:planned], out[:planned]
            wanted = None if wanted is None else wanted[:planned]
        self._plans.run(kind, scales, q, into, wanted, cache, ragged, hnd=self._hnd,
                        mask=self._mask if mask is None else mask, sinks=sinks,
                        slopes=arguments.alibi_slopes(heads, q.device) if alibi else None,
                        base=arguments.lse_base(base))
        if (own and cache is not None and ragged is None and wanted is None and not alibi and sinks is None
                and mask is None and scales is problem.scales and tokens == planned):
            self._plans.remember_plain(kind, scales, q, out)
        if alibi and wanted is not None:
            slopes = arguments.alibi_slopes(heads, q.device) * (LOG2_E if base == "log2" else 1.0)
            wanted += self._shift[:, None] * slopes
        return (out, lse) if return_lse else out


def lse_of(lse, layout, tokens, heads, device):
    """(the LSE to return, the same as [tokens, heads]), made where it is not given."""
    shape = (tokens, heads) if layout == "NH" else (heads, tokens)
    if lse is None:
        lse = torch.empty(shape, dtype=torch.float32, device=device)
    elif tuple(lse.shape) != shape or lse.dtype != torch.float32:
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}; it must be torch.float32 {shape}")
    elif layout == "HN" and not lse.is_contiguous():
        raise ValueError('lse for lse_layout="HN" must be contiguous')
    return lse, lse if layout == "NH" else lse.t()


def _number_or_tensor(scale, name):
    """A float, or a float32 tensor on a GPU, whose value nobody waits for."""
    if scale is None:
        return 1.0
    if isinstance(scale, torch.Tensor):
        if scale.device.type == "cpu" and scale.numel() == 1:
            return float(scale)
        if scale.dtype != torch.float32:
            raise ValueError(f"{name} is {scale.dtype}; scales in tensors are torch.float32")
        return scale.detach()
    return float(scale)


def scale_up(scales, q_scale, k_scale, v_scale, sm_scale=None):
    """A layer's Scales with those of a run. What multiplies q multiplies the logits: a number goes into sm_scale, a
    tensor into the keys' scale."""
    sm = scales.sm if sm_scale is None else float(sm_scale)
    q, k, v = (_number_or_tensor(scale, name) for scale, name in
               ((q_scale, "q_scale"), (k_scale, "k_scale"), (v_scale, "v_scale")))
    if isinstance(q, torch.Tensor):
        k, q = q.reshape(-1) * k, 1.0
    return scales._replace(sm=sm * q, k=k, v=v, tensors=isinstance(k, torch.Tensor) or isinstance(v, torch.Tensor))


def dequantized_queries(q, scale_q, num_kv_heads):
    """Queries and their scale as kernels take them: a scale for each query head, more of them than KV heads, is
    multiplied into q, which becomes bfloat16."""
    if isinstance(scale_q, torch.Tensor) and scale_q.numel() > 1 and scale_q.numel() != num_kv_heads:
        if scale_q.numel() != q.shape[1]:
            raise ValueError(f"scale_q has {scale_q.numel()} entries; q has {q.shape[1]} heads")
        return (q.to(torch.float32) * scale_q.reshape(1, -1, 1)).to(torch.bfloat16), None
    return q, scale_q


def lengths_of_pages(indptr, last_page_len, page_size):
    """Keys of every request, numpy."""
    return np.asarray(folio.seq_lens_from_paged(indptr, last_page_len, page_size))


def check_indices(name, indices, indptr):
    """Page ids must be as many as their offsets say: a GPU would read on behind them."""
    if len(indices) < indptr[-1]:
        raise ValueError(f"{name} has {len(indices)} entries; its indptr ends at {indptr[-1]}")


def check_pages(lens, indptr, page_size):
    """kv_len_arr, numpy, must fit into the requests' pages."""
    pages = np.diff(indptr)
    beyond = np.flatnonzero(lens > pages.astype(np.int64) * page_size)
    if len(beyond):
        at = int(beyond[0])
        raise ValueError(f"kv_len_arr[{at}] is {lens[at]}; its {pages[at]} pages hold {pages[at] * page_size}")


def rows_of(lengths):
    """Offsets [n + 1] of n lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def graph_bounds(device, use_cuda_graph, requests, tokens, q_len, kv_len, shared_levels=0):
    """Bounds of the form for graphs: a CPU has no graphs, and needs none."""
    if not use_cuda_graph or device.type == "cpu":
        return None
    return Bounds(requests, tokens, q_len, int(min(kv_len, MAX_LENGTH)), shared_levels)


def make_batch(cu_q, kv_len, tables, bounds=None, num_tokens=None, **segment):
    """A batch of one segment."""
    return Batch(cu_q, [folio.KvSegment(kv_len, **segment)], tables, int(cu_q[-1]) if num_tokens is None
                 else num_tokens, bounds=bounds)


def check_jit(jit_args, jit_kwargs=None):
    """FlashInfer compiles variants of its kernels. One of them is known by its name, attention sinks: True is
    returned."""
    if jit_args is None:
        return False
    if "AttentionSink" in jit_args:
        return True
    raise NotImplementedError("jit_args has the source of a kernel's variant, which Folio does not compile; sinks, soft "
                              "caps, windows and masks are arguments")


def variant_args(sink_variant, args, sinks, scales):
    """What stands behind the cache in run(q, cache, *args): (sink, sm_scale) of the variant AttentionSink, otherwise
    nothing or (scale_q, scale_k, scale_v). Returns sinks, sm_scale and the three scales."""
    if sink_variant:
        if len(args) not in (0, 2) or args and sinks is not None:
            raise TypeError(f"run has {len(args)} arguments behind the cache; the variant AttentionSink takes (sink, sm_scale)")
        return (*args, scales) if args else (sinks, None, scales)
    if not args:
        return sinks, None, scales
    if len(args) != 3 or any(scale is not None for scale in scales):
        raise TypeError(f"run has {len(args)} arguments behind the cache; it takes none, or (scale_q, scale_k, scale_v)")
    return sinks, None, args


def check_buffers(device, buffers):
    """The buffers of the form for graphs: all given, int32, on the device."""
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor):
            raise ValueError(f"{name} should be a torch.Tensor in cudagraph mode")
        if buffer.dtype != torch.int32 or buffer.device != device or not buffer.is_contiguous():
            raise ValueError(f"{name} is {buffer.dtype} on {buffer.device}; it must be contiguous torch.int32 on {device}")


def fill_buffers(**given):
    """Copies tensors to the front of their buffers, unless they are those: name=(buffer, tensor)."""
    for name, (buffer, tensor) in given.items():
        if len(tensor) > len(buffer):
            raise ValueError(f"The size of {name} should be less than or equal to the allocated buffer: {len(tensor)} "
                             f"entries for {len(buffer)}")
        if tensor.data_ptr() != buffer.data_ptr():
            buffer[:len(tensor)].copy_(tensor, non_blocking=True)


def check_lens(name, lens, kv_lens, others="the pages hold"):
    """Lengths that repeat what the pages say, or others, must say the same."""
    if lens is not None and not np.array_equal(lens.reshape(-1), kv_lens):
        raise ValueError(f"{name} is {lens.reshape(-1)[:4].tolist()} ...; {others} {kv_lens[:4].tolist()} ...")
