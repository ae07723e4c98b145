"""Merges of attention states, and shared prefixes in levels (flashinfer.cascade)."""

import numpy as np
import torch

from .. import _folio as folio
from . import arguments
from .plans import Batch, context_of, device_of
from .wrapper import (Wrapper, check_buffers, check_indices, fill_buffers, graph_bounds, lengths_of_pages, rows_of,
                      state_problem)


def merge_state(v_a, s_a, v_b, s_b):
    """(V, S) of two states: outputs [tokens, heads, head_dim], LSE [tokens, heads], base 2. One whose LSE is -inf is
    empty."""
    v, s = torch.empty_like(v_a), torch.empty(s_a.shape, dtype=torch.float32, device=s_a.device)
    a, b = (folio.AttentionStateView(out, lse.to(torch.float32), "two") for out, lse in ((v_a, s_a), (v_b, s_b)))
    folio.merge_state(context_of(device_of(v_a)), a, b, v, folio.LseView(s, "two"))
    return v, s


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    """Merges (v_other, s_other) into (v, s), float32 LSE, for the tokens whose mask [tokens] is true; None: all."""
    other = folio.AttentionStateView(v_other, s_other.to(torch.float32), "two")
    mask = None if mask is None else mask.to(torch.uint8)
    folio.merge_state_in_place(context_of(device_of(v)), v, folio.LseView(s, "two"), other, mask)


def merge_states(v, s):
    """(V, S) of several states a token: v [tokens, states, heads, head_dim], s [tokens, states, heads], base 2."""
    tokens, _, heads, dim = v.shape
    out = torch.empty((tokens, heads, dim), dtype=v.dtype, device=v.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=v.device)
    states = folio.AttentionStatesView(v, s.to(torch.float32), "two")
    folio.merge_states(context_of(device_of(v)), states, out, folio.LseView(lse, "two"))
    return out, lse


def groups_of(tokens, requests):
    """Bounds of a level's rows, in tokens, as bounds in requests. Empty requests at a bound go to the later row."""
    at = np.searchsorted(requests, tokens, side="left")
    at[-1] = len(requests) - 1
    if (at >= len(requests)).any() or (requests[at] != tokens).any():
        row = int(np.flatnonzero(requests[np.minimum(at, len(requests) - 1)] != tokens)[0])
        raise ValueError(f"qo_indptr[{row}] is {tokens[row]}, which is within a request of the last level")
    return at.astype(np.int32)


class MultiLevelCascadeAttentionWrapper(Wrapper):
    """Prefixes that requests share, in levels: level 0 is shared by most queries, the last one is each request's own.

    One launch and no merges by the caller. Row r of a level is shared by the tokens from qo_indptr_arr[level][r] on. A
    request's keys are those of its rows, level after level. With a window positions count in that whole sequence.
    """

    def __init__(self, num_levels, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
                 qo_indptr_buf_arr=None, paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None,
                 paged_kv_last_page_len_buf_arr=None):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._num_levels = num_levels
        self._buffers = None
        if use_cuda_graph:
            self._buffers = list(zip(qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr,
                                     paged_kv_last_page_len_buf_arr))
            if len(self._buffers) != num_levels:
                raise ValueError(f"there are buffers of {len(self._buffers)} levels; num_levels is {num_levels}")
            for level, buffers in enumerate(self._buffers):
                check_buffers(self.device, {f"buffer {i} of level {level}": buffer for i, buffer in enumerate(buffers)})
        self._rows = None

    def plan(self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads,
             num_kv_heads, head_dim, page_size, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
             sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None,
             q_data_type="float16", kv_data_type=None):
        """Plans a step: for each level its rows of tokens and the rows' pages. causal is of the last level."""
        lists = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        if any(len(each) != self._num_levels for each in lists):
            raise ValueError(f"plan was given {[len(each) for each in lists]} levels; the wrapper has {self._num_levels}")
        if pos_encoding_mode == "ALIBI":
            raise NotImplementedError("pos_encoding_mode is ALIBI; cascades are offered with NONE and ROPE_LLAMA")
        host = arguments.to_host(*qo_indptr_arr, *paged_kv_indptr_arr, *paged_kv_last_page_len)
        tokens, indptr, last = (host[i::1][:self._num_levels] for i in range(0, 3 * self._num_levels, self._num_levels))
        requests = tokens[-1]
        problem = state_problem(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim, page_size=page_size,
            causal=causal, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            q_data_type=q_data_type, kv_data_type=kv_data_type)
        positions_count = window_left >= 0 or pos_encoding_mode == "ROPE_LLAMA"
        segments, tables = [], []
        for level in range(self._num_levels):
            lens = lengths_of_pages(indptr[level], last[level], page_size)
            own = level == self._num_levels - 1
            if tokens[level][0] != 0 or tokens[level][-1] != requests[-1]:
                raise ValueError(f"qo_indptr_arr[{level}] is from {tokens[level][0]} to {tokens[level][-1]}; the last level's "
                                 f"is from 0 to {requests[-1]}")
            if len(lens) != len(tokens[level]) - 1:
                raise ValueError(f"qo_indptr_arr[{level}] has {len(tokens[level]) - 1} rows, its pages {len(lens)}")
            groups = None if own else groups_of(tokens[level], requests)
            if positions_count:
                segments.append(folio.KvSegment(lens, group_indptr=groups))
            else:  # all keys of shared levels are visible, wherever they stand
                segments.append(folio.KvSegment(lens, group_indptr=groups, first_pos=np.zeros(len(lens), np.int32),
                                                mask="as_config" if own else "all_visible"))
            tables.append(self._take_level(level, indptr[level], *(each[level] for each in lists)))
        bounds = None
        if self._buffers:
            self._rows = self._rows or int(requests[-1])
            most = sum(len(buffers[2]) for buffers in self._buffers) * page_size
            bounds = graph_bounds(self.device, True, len(requests) - 1, self._rows, self._rows, most,
                                  self._num_levels - 1)
        batch = Batch(requests, segments, tables, int(requests[-1]), bounds=bounds)
        self._adopt(problem, batch)

    begin_forward = plan

    def _take_level(self, level, host_indptr, qo_indptr, indptr, indices, last_page_len):
        check_indices(f"paged_kv_indices_arr[{level}]", indices, host_indptr)
        if self._buffers:
            if len(qo_indptr) != len(self._buffers[level][0]):
                raise ValueError(f"qo_indptr_arr[{level}] has {len(qo_indptr)} entries, its buffer "
                                 f"{len(self._buffers[level][0])}; in the form for graphs they must be equal")
            names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
            tensors = zip(self._buffers[level], (qo_indptr, indptr, indices, last_page_len))
            fill_buffers(**{f"{name}[{level}]": pair for name, pair in zip(names, tensors)})
            return folio.csr_table(self._buffers[level][2], self._buffers[level][1])
        own = indptr if indptr.device == self.device else host_indptr
        return folio.csr_table(arguments.on_device(indices, self.device), arguments.on_device(own, self.device))

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffers=None):
        super().reset_workspace_buffer(float_workspace_buffer)

    def run(self, q, paged_kv_cache):
        """Attention of one layer: q [tokens, heads, head_dim]; out likewise."""
        return self._attend(q, arguments.cache_of(paged_kv_cache))

    forward = run


class _SharedPrefixWrapper(Wrapper):
    """A prefix that all requests share, given as tensors, in front of each request's pages."""

    def _begin(self, cu_q, indptr, indices, last_page_len, host_indptr, host_last, given):
        self._prefix_problem = None
        self._given = given
        self._cu_q = cu_q
        self._unique = lengths_of_pages(host_indptr, host_last, given["page_size"])
        own = indptr if indptr.device == self.device else host_indptr
        self._table = folio.csr_table(arguments.on_device(indices, self.device), arguments.on_device(own, self.device))
        self._prefix_len = None

    def _forward(self, q, k_shared, v_shared, unique_kv_cache, **changes):
        if self._given is None:
            raise folio.InvalidArgument("there is no plan: call begin_forward before forward")
        k, v = arguments.token_major(k_shared, self._hnd), arguments.token_major(v_shared, self._hnd)
        cache = arguments.cache_of(unique_kv_cache)
        given = {**self._given, "q_data_type": q.dtype,
                 "kv_data_type": (cache[0] if type(cache) is tuple else cache).dtype, "ragged": True, **changes}
        problem = state_problem(**given)
        if (self._prefix_len, self._prefix_problem) != (k.shape[0], problem):
            self._plan_prefix(problem, k.shape[0])
        return self._attend(q, cache, (k, v))

    def _plan_prefix(self, problem, prefix_len):
        """The prefix's length is first known here; layers of one step have the same."""
        rows = 1 if len(self._unique) else 0
        shared = folio.KvSegment(np.full(rows, prefix_len, np.int32), source="ragged", mask="all_visible",
                                 group_indptr=np.array([0, len(self._unique)][:rows + 1], np.int32),
                                 first_pos=np.zeros(rows, np.int32))
        unique = folio.KvSegment(self._unique, first_pos=np.full(len(self._unique), prefix_len, np.int32))
        offsets = arguments.on_device(rows_of([prefix_len] * rows), self.device)
        batch = Batch(self._cu_q, [shared, unique], [offsets, self._table], int(self._cu_q[-1]))
        self._adopt(problem, batch)
        self._prefix_len, self._prefix_problem = prefix_len, problem


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decodes behind one prefix that all requests share."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        super().__init__(float_workspace_buffer, kv_layout)

    def begin_forward(self, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads,
                      head_dim, page_size, data_type="float16"):
        """Takes the requests' own pages. data_type is a hint: q's and the cache's count."""
        indptr, last = arguments.to_host(unique_kv_indptr, unique_kv_last_page_len)
        given = dict(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim, page_size=page_size,
                     causal=True)
        self._begin(np.arange(len(last) + 1, dtype=np.int32), unique_kv_indptr, unique_kv_indices,
                    unique_kv_last_page_len, indptr, last, given)

    def forward(self, q, k_shared, v_shared, unique_kv_cache):
        """q: [requests, heads, head_dim]; k_shared, v_shared: [prefix_len, kv heads, head_dim], with HND heads
        first."""
        return self._forward(q, k_shared, v_shared, unique_kv_cache)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefills behind one prefix that all requests share."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        super().__init__(float_workspace_buffer, kv_layout)

    def begin_forward(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
                      num_kv_heads, head_dim, page_size):
        """Takes the requests' rows of q and their own pages."""
        cu_q, indptr, last = arguments.to_host(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        given = dict(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim, page_size=page_size)
        self._begin(cu_q, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, indptr, last, given)

    def forward(self, q, k_shared, v_shared, unique_kv_cache, causal=False, use_fp16_qk_reduction=False, sm_scale=None,
                rope_scale=None, rope_theta=None):
        """As the decode wrapper's; causal is among a request's own keys. rope_scale and rope_theta have no use without
        a position encoding, which this wrapper does not have: they are refused."""
        arguments.refuse("this wrapper has no position encoding", rope_scale=rope_scale, rope_theta=rope_theta)
        return self._forward(q, k_shared, v_shared, unique_kv_cache, causal=causal, sm_scale=sm_scale)
