"""Batches of prefills and decodes together, with sinks, and with spans seen from both sides (flashinfer.attention)."""

import functools

import numpy as np
import torch

from .. import _folio as folio
from . import arguments, masks
from .plans import Bounds, Plans, op_of, rounded_bound
from .prefill import BatchPrefillWithPagedKVCacheWrapper
from .wrapper import Wrapper, check_indices, check_pages, make_batch, state_problem


class BatchAttention(Wrapper):
    """Prefills and decodes in one plan, over a paged cache.

    device: where the tensors will be, "cuda" or "cpu". The original's limits on heads of 256 do not hold here.
    """

    def __init__(self, kv_layout="NHD", device="cuda"):
        super().__init__(torch.empty(0, device=device), kv_layout)

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
             page_size, causal=False, sm_scale=None, logits_soft_cap=None, q_data_type=torch.bfloat16,
             kv_data_type=torch.bfloat16, use_profiler=False):
        """Plans a step: qo_indptr [requests + 1], kv_indptr [requests + 1] in pages, kv_indices, kv_len_arr [requests]
        in tokens. use_profiler is a hint."""
        cu_q, indptr, lens = arguments.to_host(qo_indptr, kv_indptr, kv_len_arr)
        if len(lens) != len(indptr) - 1:
            raise ValueError(f"kv_len_arr has {len(lens)} entries, kv_indptr {len(indptr)}")
        check_pages(lens, indptr, page_size)
        check_indices("kv_indices", kv_indices, indptr)
        problem = state_problem(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
            page_size=page_size, causal=causal, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type, kv_data_type=kv_data_type)
        own = kv_indptr if kv_indptr.device == self.device else indptr
        table = folio.csr_table(arguments.on_device(kv_indices, self.device), arguments.on_device(own, self.device))
        self._adopt(problem, make_batch(cu_q, lens, [table]))

    def run(self, q, kv_cache, out=None, lse=None, k_scale=None, v_scale=None, logits_soft_cap=0.0,
            profiler_buffer=None, kv_cache_sf=None, sinks=None):
        """(out, lse [tokens, heads], base 2). logits_soft_cap: 0, or plan's. sinks: float32 [heads]. profiler_buffer is
        a hint."""
        arguments.refuse(arguments.NO_NVFP4, kv_cache_sf=kv_cache_sf)
        if self._problem is not None and logits_soft_cap not in (0.0, None, self._problem.scales.cap):
            raise ValueError(f"logits_soft_cap is {logits_soft_cap}; plan was given {self._problem.scales.cap}")
        return self._attend(q, arguments.cache_of(kv_cache), k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
                            return_lse=True, sinks=sinks)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The paged prefill wrapper, whose run takes (sink, sm_scale) behind the cache.

    Arguments of the constructor that plan repeats are checked there: dtypes, head dimensions and the window.
    """

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
                 custom_mask_buf=None, mask_indptr_buf=None, backend="auto", pos_encoding_mode="NONE",
                 use_fp16_qk_reduction=False, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, head_dim_qk=128,
                 head_dim_vo=128, window_left=-1):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
                         paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend)
        self._sink_variant = True
        self._made_for = dict(pos_encoding_mode=pos_encoding_mode, q=arguments.torch_dtype(q_data_type),
                              kv=arguments.torch_dtype(kv_data_type), head_dim_qk=head_dim_qk, head_dim_v=head_dim_vo,
                              windowed=window_left >= 0)

    def _adopt(self, problem, batch, lens=None):
        kind = problem.kind
        planned = dict(pos_encoding_mode=self._given["pos_encoding_mode"], q=kind.q, kv=kind.kv,
                       head_dim_qk=kind.head_dim_qk, head_dim_v=kind.head_dim_v, windowed=kind.window_left >= 0)
        for name, made in self._made_for.items():
            if planned[name] != made:
                raise ValueError(f"{name} is {planned[name]} in plan; the wrapper was made for {made}")
        super()._adopt(problem, batch, lens)


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The paged prefill wrapper with a causal mask and, for each query, a range of keys that it sees in both
    directions.

    A key is visible if it is causal and in the causal window, or in the query's range and its window. Ranges become
    spans: on a CPU a batch is planned again when they change. On a GPU each run plans there, waiting for nothing, and a
    CUDA graph has the plan inside: replays read the ranges and, after plan, the lengths of their moment.

    Keys between a query's causal keys and its range need bits, q_len * kv_len / 8 bytes a request. A CPU makes them
    where they are needed. On a GPU such a range is an error that a later call raises (masks.ApartReport).
    """

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
                 pos_encoding_mode="NONE", q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, o_data_type=None,
                 head_dim_qk=128, head_dim_vo=128):
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(f"pos_encoding_mode must be 'NONE' for this wrapper, got {pos_encoding_mode!r}")
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
                         paged_kv_indices_buf, paged_kv_last_page_len_buf)
        q = arguments.torch_dtype(q_data_type)
        self._made_for = dict(q_data_type=q, kv_data_type=arguments.torch_dtype(kv_data_type),
                              o_data_type=arguments.torch_dtype(o_data_type, q), head_dim_qk=head_dim_qk,
                              head_dim_vo=head_dim_vo)
        self._bounds = None  # of a GPU's plans outside of graphs: they grow with the largest batch
        self._limits = self._ahead = self._kv_lens = None  # masks.token_places and lengths, on the device
        self._ranges = None  # a CPU's: those that the present batch was planned for
        self._bits = {}  # by windows: their mask, where it is not one interval a query
        self._report = masks.ApartReport(self.device) if self.device.type == "cuda" else None

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
             pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
             q_data_type=None, kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None,
             token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, max_token_per_sequence=None,
             max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False):
        """The paged wrapper's plan, without what says a mask: windows are run's. Left out, dtypes and head_dim_vo are
        the constructor's; given, they must be the same."""
        given = dict(q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
                     head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo)
        for name, value in given.items():
            value = arguments.torch_dtype(value) if name.endswith("type") else value
            if value is not None and value != self._made_for[name]:
                raise ValueError(f"{name}={value} does not match the value this wrapper was constructed with "
                                 f"({self._made_for[name]}).")
        masked = dict(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, prefix_len_ptr=prefix_len_ptr,
                      token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
                      causal=causal or None, window_left=None if window_left == -1 else window_left,
                      token_pos_in_items_len=token_pos_in_items_len or None,
                      pos_encoding_mode=None if pos_encoding_mode == "NONE" else pos_encoding_mode)
        for name, value in masked.items():
            if value is not None:
                raise ValueError(f"{name} is not supported: the mask is causal and run's bidirectional_ranges")
        if self._report is not None:
            self._report.check()
        super().plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
                     head_dim_qk, page_size, self._made_for["head_dim_vo"], causal=True, sm_scale=sm_scale,
                     logits_soft_cap=logits_soft_cap, q_data_type=self._made_for["q_data_type"],
                     kv_data_type=self._made_for["kv_data_type"], o_data_type=self._made_for["o_data_type"],
                     max_token_per_sequence=max_token_per_sequence, max_sequence_kv=max_sequence_kv,
                     fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv)

    begin_forward = plan

    def _adopt(self, problem, batch, lens=None):
        kind = problem.kind._replace(features=(*problem.kind.features, "spans"), span_window_left=-1)
        problem = problem._replace(kind=kind)
        places = masks.token_places(*lens, batch.num_tokens)
        if self.device.type == "cpu":
            self._limits, self._ahead = places
            self._ranges, self._bits = None, {}
            super()._adopt(problem, batch, lens)
            return
        self._problem = None
        q_lens, kv_lens = lens
        self._limits, self._ahead, self._kv_lens = (
            self._on_device(fixed, values) for fixed, values in zip(
                (self._limits, self._ahead, self._kv_lens), (*places, torch.from_numpy(kv_lens.astype(np.int32)))))
        bounds = batch.bounds
        if bounds is None:
            needed = Bounds(*map(rounded_bound, (len(q_lens), batch.num_tokens, q_lens.max(initial=0),
                                                 kv_lens.max(initial=0))))
            bounds = needed if self._bounds is None else Bounds(*map(max, needed, self._bounds))
            if bounds != self._bounds or self._plans.is_full:
                self._plans = Plans(self.device)
            self._bounds = bounds
        op_of(self.device, kind, bounds)  # what it refuses, plan refuses
        self._plans.begin(batch._replace(cu_q=arguments.on_device(self._qo_indptr_buf, self.device),
                                         segments=[folio.KvSegment(self._kv_lens)], bounds=bounds,
                                         max_q_len=bounds.max_q_len, max_kv_len=bounds.max_kv_len))
        self._problem, self._lens = problem, lens

    def _on_device(self, fixed, values):
        """Values on the device: in the form for graphs in the memory that a captured run reads."""
        if fixed is None or not self._use_cuda_graph:
            return values.to(self.device, non_blocking=True)
        return fixed.copy_(values, non_blocking=True)

    def _take_ranges(self, ranges, causal_window_left, range_window_left):
        """Gives the batch these ranges as spans. Returns bits where the mask needs them, otherwise None."""
        windows = causal_window_left, range_window_left
        if self.device.type == "cuda":
            self._report.check()
            spans = masks.spans_of(ranges, self._limits)
            self._report.add(masks.are_apart(spans, self._ahead, *windows))
            self._plans.amend(spans=spans)
            return None
        if self._ranges is None or not torch.equal(ranges, self._ranges):
            spans = masks.spans_of(ranges, self._limits)
            some = bool((spans[:, 0] < spans[:, 1]).any())
            if some or self._plans.batch.spans is not None:
                self._plans.amend(spans=spans if some else None)
            self._ranges, self._bits = ranges.clone(), {}
        if windows not in self._bits:
            spans = masks.spans_of(ranges, self._limits)
            apart = bool(masks.are_apart(spans, self._ahead, *windows).any())
            self._bits[windows] = masks.range_bits(ranges, *windows, *self._lens) if apart else None
        return self._bits[windows]

    def run(self, q, paged_kv_cache, bidirectional_ranges, causal_window_left=-1, range_window_left=-1, q_scale=None,
            k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, enable_pdl=None, kv_cache_sf=None):
        """Attention of one layer. bidirectional_ranges: int32 [tokens, 2], the first and the last key of each query's
        range among its request's, (-1, -1) for none. causal_window_left keeps that many keys before a query and itself,
        below 0 all; range_window_left keeps that many keys of a range from the query on backwards, 0 and less all."""
        arguments.refuse(arguments.NO_NVFP4, kv_cache_sf=kv_cache_sf)
        if (bidirectional_ranges.dtype != torch.int32 or tuple(bidirectional_ranges.shape) != (q.shape[0], 2)
                or bidirectional_ranges.device != q.device):
            raise ValueError(f"bidirectional_ranges is {bidirectional_ranges.dtype} {tuple(bidirectional_ranges.shape)} on "
                             f"{bidirectional_ranges.device}; it must be torch.int32 {(q.shape[0], 2)} on {q.device}")
        if self._problem is None:
            raise ValueError("plan() must be called before run().")
        rows = self._plans.batch.num_tokens
        if q.shape[0] < rows or q.device != self.device:
            raise ValueError(f"q has {q.shape[0]} rows on {q.device}; plan was given {rows} on {self.device}")
        # What is beyond all keys is no window.
        causal = int(causal_window_left) if 0 <= causal_window_left < masks.NO_KEY else -1
        reach = int(range_window_left) if 0 < range_window_left < masks.NO_KEY else 0
        bits = self._take_ranges(bidirectional_ranges[:rows], causal, reach)
        kind = self._problem.kind
        if bits is None:
            kind = kind._replace(window_left=causal, span_window_left=reach - 1)
        else:
            kind = kind._replace(mask="custom", features=kind.features[:-1], span_window_left=0)
        return self._attend(q, arguments.cache_of(paged_kv_cache), q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                            out=out, lse=lse, return_lse=return_lse, problem=self._problem._replace(kind=kind), mask=bits)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(self, q, paged_kv_cache, bidirectional_ranges, causal_window_left=-1, range_window_left=-1,
                q_scale=None, k_scale=None, v_scale=None, enable_pdl=None, kv_cache_sf=None):
        """run of earlier versions."""
        return self.run(q, paged_kv_cache, bidirectional_ranges, causal_window_left, range_window_left, q_scale,
                        k_scale, v_scale, kv_cache_sf=kv_cache_sf)

    def forward_return_lse(self, q, paged_kv_cache, bidirectional_ranges, causal_window_left=-1, range_window_left=-1,
                           q_scale=None, k_scale=None, v_scale=None, enable_pdl=None, kv_cache_sf=None):
        """run_return_lse of earlier versions."""
        return self.run(q, paged_kv_cache, bidirectional_ranges, causal_window_left, range_window_left, q_scale,
                        k_scale, v_scale, return_lse=True, kv_cache_sf=kv_cache_sf)
