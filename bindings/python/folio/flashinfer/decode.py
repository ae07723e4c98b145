"""Batches of decodes over paged caches (flashinfer.decode)."""

import functools
import warnings

import numpy as np

from .. import _folio as folio
from . import arguments
from .dense import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from .mla import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from .page import get_seq_lens
from .single import single_decode_with_kv_cache
from .wrapper import (Wrapper, check_buffers, check_indices, check_jit, check_lens, fill_buffers, graph_bounds,
                      lengths_of_pages, make_batch, state_problem, variant_args)
from .xqa import xqa, xqa_mla

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "fast_decode_plan",
           "get_seq_lens", "single_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache",
           "trtllm_batch_decode_with_kv_cache_mla", "xqa", "xqa_batch_decode_with_kv_cache",
           "xqa_batch_decode_with_kv_cache_mla", "xqa_mla"]

ROWS_SAY_QUERIES = ("trtllm-gen", "cute-dsl")


def _state(*, num_qo_heads, num_kv_heads, head_dim, page_size, q_len_per_req, window_right, **rest):
    return state_problem(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim,
                         page_size=page_size, causal=window_right == 0 or q_len_per_req == 1, window_right=window_right,
                         one_query=q_len_per_req == 1, **rest)


def _check_queries(q_len, kv_lens):
    short = np.flatnonzero((kv_lens < q_len) & (kv_lens > 0))
    if len(short):
        raise ValueError(f"request {short[0]} has {kv_lens[short[0]]} keys; q_len_per_req is {q_len}")


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Decodes: every request has q_len_per_req queries, its last tokens, over a paged cache.

    The form for graphs (use_cuda_graph=True) has the caller's three buffers: every plan copies into them, and has as
    many requests as paged_kv_last_page_len_buffer. use_tensor_cores is a hint, and so is backend, but for one thing:
    with trtllm-gen and cute-dsl run takes any number of queries a request, as the rows of q say, and plans again where
    plan was told another. jit_args: only the variant AttentionSink, whose run takes (sink, sm_scale).
    """

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
                 paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
                 backend="auto", jit_args=None):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._use_tensor_cores = use_tensor_cores
        self._sink_variant = check_jit(jit_args)
        buffers = {"paged_kv_indptr_buffer": paged_kv_indptr_buffer, "paged_kv_indices_buffer": paged_kv_indices_buffer,
                   "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer}
        if use_cuda_graph:
            check_buffers(self.device, buffers)
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError(f"The size of paged_kv_indptr_buffer should be batch_size + 1, {self._fixed_batch_size + 1}; "
                                 f"it is {len(paged_kv_indptr_buffer)}")
        else:
            self._fixed_batch_size = 0
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self._q_len_per_req = None

    @property
    def use_tensor_cores(self):
        """As the constructor was told; a hint."""
        return self._use_tensor_cores

    @property
    def resolved_backend(self):
        """The kernel of the present plan, by Folio's name."""
        if self._problem is None:
            raise folio.InvalidArgument("there is no plan: call plan first")
        return self._plans.step(self._problem.kind, self._mask).op.kernel_name

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
             pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
             o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True,
             block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, *,
             window_right=0, is_causal=None):
        """Plans a step.

        indptr [requests + 1], indices, last_page_len [requests]: the requests' pages, on a CPU or the GPU; lengths on a
        GPU are read back. The last page of a request has last_page_len tokens. window_right: keys behind a query that
        it sees, -1 for all; more than one query and 0 is causal. is_causal=False is -1. non_blocking is a hint;
        block_tables repeats what indices say and is not read. seq_lens must agree with the pages.
        """
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        if is_causal and window_right != 0:
            raise ValueError(f"is_causal is True; window_right is {window_right}, which shows keys behind a query")
        if is_causal is False and window_right == 0:
            window_right = -1
        given = dict(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
                     q_len_per_req=q_len_per_req, window_right=window_right, pos_encoding_mode=pos_encoding_mode,
                     window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
                     kv_data_type=kv_data_type, o_data_type=o_data_type, sm_scale=sm_scale, rope_scale=rope_scale,
                     rope_theta=rope_theta, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv)
        self._plan(given, indptr, indices, last_page_len, arguments.to_host(indptr, last_page_len, seq_lens))

    begin_forward = plan

    def _plan(self, given, indptr, indices, last_page_len, on_host):
        """on_host: indptr, last_page_len and seq_lens (or None), numpy."""
        host_indptr, last, lens = on_host
        if given["q_len_per_req"] < 1:
            raise ValueError(f"q_len_per_req must be >= 1, got {given['q_len_per_req']}")
        problem = _state(**given)
        kv_lens = lengths_of_pages(host_indptr, last, given["page_size"])
        check_lens("seq_lens", lens, kv_lens)
        check_indices("indices", indices, host_indptr)
        _check_queries(given["q_len_per_req"], kv_lens)
        self._take_pages(indptr, indices, last_page_len, host_indptr, len(last), given["q_len_per_req"])
        self._plan_queries(problem, given, kv_lens)

    def _plan_queries(self, problem, given, kv_lens):
        """Plans given's queries over the pages that were taken."""
        requests, q_len = len(kv_lens), given["q_len_per_req"]
        cu_q = np.arange(0, (requests + 1) * q_len, q_len, dtype=np.int32)
        bounds = graph_bounds(self.device, self._use_cuda_graph, requests, requests * q_len, q_len,
                              len(self._paged_kv_indices_buf) * given["page_size"])
        table = folio.csr_table(self._paged_kv_indices_buf, self._paged_kv_indptr_buf)
        self._given = given
        self._adopt(problem, make_batch(cu_q, kv_lens, [table], bounds), (np.full(requests, q_len), kv_lens))
        self._q_len_per_req = q_len

    def _take_pages(self, indptr, indices, last_page_len, host_indptr, requests, q_len_per_req):
        if not self._use_cuda_graph:
            device_indptr = indptr if indptr.device == self.device else host_indptr
            self._paged_kv_indptr_buf = arguments.on_device(device_indptr, self.device)
            self._paged_kv_indices_buf = arguments.on_device(indices, self.device)
            self._paged_kv_last_page_len_buf = last_page_len
            return
        if requests != self._fixed_batch_size:
            raise ValueError(f"The batch size should be fixed in cudagraph mode, the runtime batch size {requests}  "
                             f"mismatches the batch size set during initialization {self._fixed_batch_size}")
        if self._q_len_per_req is not None and self._q_len_per_req != q_len_per_req:
            raise ValueError("q_len_per_req is part of the frozen cudagraph shape: this wrapper was planned with "
                             f"{self._q_len_per_req}, got {q_len_per_req}. Use a separate wrapper per q_len_per_req.")
        fill_buffers(indptr=(self._paged_kv_indptr_buf, indptr), indices=(self._paged_kv_indices_buf, indices),
                     last_page_len=(self._paged_kv_last_page_len_buf, last_page_len))

    def workspace_size(self, *args, **kwargs):
        """(bytes of the float workspace, of the int workspace) that plan with these arguments would need from the
        caller: none, since a wrapper's workspace is its own."""
        return 0, 0

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
            return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None,
            skip_softmax_threshold_scale_factor=None, kv_cache_sf=None):
        """Attention of one layer.

        q: [requests * q_len_per_req, heads, head_dim]. paged_kv_cache: (k, v) or one tensor. Scales are numbers or, on
        a GPU, float32 tensors. sinks: float32 [heads]. Returns out, or (out, lse [tokens, heads], base 2); out and lse
        that are given are written. enable_pdl is a hint.
        """
        if (not (args or return_lse) and q_scale is None and k_scale is None and v_scale is None and lse is None
                and window_left is None and sinks is None and q_len_per_req is None
                and skip_softmax_threshold_scale_factor is None and kv_cache_sf is None):
            done = self._plans.again(q, paged_kv_cache, out)
            if done is not None:
                return done
        arguments.refuse(arguments.NO_SKIP, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        arguments.refuse(arguments.NO_NVFP4, kv_cache_sf=kv_cache_sf)
        if q_len_per_req is not None:
            warnings.warn("Passing `q_len_per_req` to BatchDecodeWithPagedKVCacheWrapper.run() is deprecated; pass it to "
                          "plan()", DeprecationWarning, stacklevel=2)
        if self._problem is not None:
            self._check_requests(q.shape[0], q_len_per_req)
        cache = arguments.cache_of(paged_kv_cache)
        sinks, sm_scale, (q_scale, k_scale, v_scale) = variant_args(self._sink_variant, args, sinks,
                                                                    (q_scale, k_scale, v_scale))
        return self._attend(q, cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
                            return_lse=return_lse, window_left=window_left, sinks=sinks, sm_scale=sm_scale)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _check_requests(self, rows, q_len_per_req):
        requests = self._plans.batch.num_tokens // self._q_len_per_req
        if q_len_per_req is not None and rows != requests * q_len_per_req:
            raise ValueError(f"q.shape[0] ({rows}) does not match batch_size * q_len_per_req ({requests} * {q_len_per_req} "
                             f"= {requests * q_len_per_req}).")
        if rows == self._plans.batch.num_tokens:
            return
        if self._backend in ROWS_SAY_QUERIES and not self._use_cuda_graph and requests and rows and rows % requests == 0:
            given, kv_lens = {**self._given, "q_len_per_req": rows // requests}, self._lens[1]
            _check_queries(given["q_len_per_req"], kv_lens)
            self._plan_queries(_state(**given), given, kv_lens)
        else:
            raise ValueError(f"q has {rows} rows; plan() used {requests} requests of q_len_per_req={self._q_len_per_req}; "
                             "re-plan with the matching q_len_per_req.")

    def forward(self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None,
                window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, *,
                return_lse=False):
        """run of earlier versions, whose arguments stand in place of plan's."""
        problem = self._changed(_state, pos_encoding_mode=pos_encoding_mode, window_left=window_left,
                                logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale,
                                rope_theta=rope_theta)
        return self._attend(q, arguments.cache_of(paged_kv_cache), q_scale=q_scale, k_scale=k_scale,
                            v_scale=v_scale, return_lse=return_lse, problem=problem)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper in the form for graphs."""

    def __init__(self, workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout="NHD",
                 use_tensor_cores=False):
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer,
                         last_page_len_buffer)


def fast_decode_plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                     pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type=None,
                     kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
                     non_blocking=True, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
                     global_override_indptr_cpu=None):
    """plan of a decode wrapper, with lengths from global_override_indptr_cpu, a copy of indptr on the host, where it is
    given: then a page size of 1 reads nothing back from a GPU."""
    given = dict(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
                 q_len_per_req=q_len_per_req, window_right=0, pos_encoding_mode=pos_encoding_mode,
                 window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type or data_type
                 or "float16", kv_data_type=kv_data_type or data_type,
                 o_data_type=(self._given or {}).get("o_data_type"), sm_scale=sm_scale, rope_scale=rope_scale,
                 rope_theta=rope_theta, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv)
    if page_size == 1 and global_override_indptr_cpu is not None:
        host_indptr = arguments.to_host(global_override_indptr_cpu)[0]
        on_host = host_indptr, np.minimum(np.diff(host_indptr), 1), None
    else:
        host_indptr = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
        on_host = arguments.to_host(host_indptr, last_page_len, None)
    self._plan(given, indptr, indices, last_page_len, on_host)
