"""Multi-head latent attention with absorbed projections over paged caches (flashinfer.mla).

Keys are [ckv | kpe], values the ckv part of the same memory. A cache of two tensors is read in place where they are the
two parts of one; otherwise the batch's pages are copied together before each run, O(keys).
"""

import dataclasses
import functools
import math
from typing import Optional

import numpy as np
import torch

from .. import _folio as folio
from . import arguments, dense
from .wrapper import (Wrapper, check_buffers, check_indices, check_lens, check_pages, fill_buffers, graph_bounds,
                      make_batch, state_problem)

LSE_MODES = {"none": None, "base2": "log2", "basee": "ln"}
OUTPUT_SCALES = ("none", "per-tensor")
SCALE_MODES = ("default", "kv-per-tensor", "bmm-scalar", "bmm-tensor")
LAYOUTS = (None, "packed", "split")
CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens")


@dataclasses.dataclass(frozen=True)
class MLAPlanMetadata:
    """A batch's lengths and pages, in CSR or as a dense table."""

    qo_indptr: Optional[torch.Tensor] = None
    kv_indptr: Optional[torch.Tensor] = None
    kv_indices: Optional[torch.Tensor] = None
    kv_len_arr: Optional[torch.Tensor] = None
    cum_seq_lens_q: Optional[torch.Tensor] = None
    block_tables: Optional[torch.Tensor] = None
    seq_lens: Optional[torch.Tensor] = None
    max_q_len: Optional[int] = None

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(cls, cum_seq_lens_q, block_tables, seq_lens, max_q_len=None):
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr, *, cum_seq_lens_q, block_tables, seq_lens,
             max_q_len=None):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


def _check_known(**given):
    for name, (value, known) in given.items():
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it is one of {tuple(known)}")


def joined(first, second):
    """[first | second] along the last dimension without a copy, or None where memory does not lie like that."""
    if second.shape[-1] == 0:
        return first
    if (first.stride() != second.stride() or first.dtype != second.dtype or first.shape[:-1] != second.shape[:-1]
            or first.stride(-1) != 1 or second.data_ptr() != first.data_ptr() + first.shape[-1] * first.element_size()
            or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()):
        return None
    return first.as_strided((*first.shape[:-1], first.shape[-1] + second.shape[-1]), first.stride())


def _cache_of(packed, width):
    """(k, v) [pages, page_size, 1, .] of a packed cache [pages, page_size, .], which may have a dimension of one
    head."""
    if packed.dim() == 4:
        packed = packed.squeeze(1)
    k = packed.unsqueeze(2)
    return k, k[..., :width]


class BatchMLAPagedAttentionWrapper(Wrapper):
    """MLA over paged caches. All dimensions are taken that are multiples of 8; backend is a hint.

    The form for graphs (use_cuda_graph=True) has the caller's four buffers, into which plans of CSR metadata are
    copied. Dense metadata stay where they are: lengths are planned at each run, on a GPU inside of a graph too.
    """

    def __init__(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
                 kv_len_arr=None, backend="auto"):
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, backend)
        self._qo_indptr_buf = qo_indptr
        self._kv_indptr_buf = kv_indptr
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf = kv_len_arr
        self._rows = None
        self._dense = None
        self._packed = None

    def plan(self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, head_dim_ckv=None,
             head_dim_kpe=None, page_size=None, causal=None, sm_scale=None, q_data_type=None, kv_data_type=None,
             use_profiler=False, *, metadata=None, cum_seq_lens_q=None, block_tables=None, seq_lens=None,
             max_q_len=None, query_layout=None, kv_cache_layout=None, lse_mode="none", output_dtype=None,
             output_scale="none", scale_mode="default", skip_softmax=False, enable_pdl=None, use_sinks=False):
        """Plans a step, of metadata or of its fields one by one.

        CSR: qo_indptr [requests + 1], kv_indptr [requests + 1] in pages, kv_indices, kv_len_arr [requests]. Dense:
        cum_seq_lens_q [requests + 1], block_tables [requests, pages], seq_lens [requests]. sm_scale: None is 1 /
        sqrt(head_dim_ckv / 4 + head_dim_kpe), that of DeepSeek's heads before absorption. lse_mode: what run returns.
        output_scale: whether run has an o_scale. Of metadata in both forms the lengths must agree, and block_tables are
        not read. use_profiler and enable_pdl are hints; query_layout, kv_cache_layout and scale_mode are known at run.
        """
        arguments.refuse(arguments.NO_SKIP, skip_softmax=skip_softmax or None)
        _check_known(lse_mode=(lse_mode, LSE_MODES), output_scale=(output_scale, OUTPUT_SCALES),
                     scale_mode=(scale_mode, SCALE_MODES), query_layout=(query_layout, LAYOUTS),
                     kv_cache_layout=(kv_cache_layout, LAYOUTS))
        flat = MLAPlanMetadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens,
                               max_q_len)
        if metadata is None:
            if qo_indptr is not None and cum_seq_lens_q is not None:
                raise ValueError("qo_indptr and cum_seq_lens_q are given; lengths and pages are taken in one form")
            metadata = flat
        elif any(getattr(flat, field.name) is not None for field in dataclasses.fields(flat)):
            raise ValueError("Both metadata object and flat metadata arguments were provided; only one may be supplied.")
        required = dict(num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size,
                        causal=causal, q_data_type=q_data_type, kv_data_type=kv_data_type)
        missing = [name for name, value in required.items() if value is None]
        if missing:
            raise TypeError(f"plan() missing required arguments: {', '.join(missing)}")
        if sm_scale is None:
            sm_scale = 1.0 / math.sqrt(head_dim_ckv // 4 + head_dim_kpe)
        out = arguments.torch_dtype(output_dtype, arguments.torch_dtype(q_data_type))
        problem = state_problem(num_qo_heads=num_heads, num_kv_heads=1, head_dim_qk=head_dim_ckv + head_dim_kpe,
                                head_dim_vo=head_dim_ckv, page_size=page_size, causal=causal, sm_scale=sm_scale,
                                q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=out)
        self._output_scale = output_scale
        self._use_sinks = use_sinks
        self._lse_base = LSE_MODES[lse_mode]
        self._widths = (head_dim_ckv, head_dim_kpe)
        self._packed = None
        form = CSR if metadata.qo_indptr is not None else DENSE
        missing = [name for name in form if getattr(metadata, name) is None]
        if 0 < len(missing) < len(form):
            raise TypeError(f"plan() missing required arguments: {', '.join(missing)}")
        if metadata.qo_indptr is not None:
            self._dense = None
            self._plan_csr(problem, metadata)
        elif metadata.cum_seq_lens_q is not None:
            self._dense = metadata
            longest = metadata.max_q_len
            if longest is None:
                longest = int(np.diff(arguments.to_host(metadata.cum_seq_lens_q)[0]).max(initial=0))
            self._longest = longest
            self._problem = problem
        else:
            raise TypeError("plan() requires metadata or flat metadata arguments.")

    def _plan_csr(self, problem, metadata):
        page_size = problem.kind.page_size
        cu_q, indptr, lens, dense_cu_q, dense_lens = arguments.to_host(
            metadata.qo_indptr, metadata.kv_indptr, metadata.kv_len_arr, metadata.cum_seq_lens_q, metadata.seq_lens)
        if len(cu_q) != len(lens) + 1 or len(indptr) < len(cu_q):
            raise ValueError(f"qo_indptr has {len(cu_q)} entries, kv_indptr {len(indptr)}, kv_len_arr {len(lens)}")
        indptr = indptr[:len(cu_q)]  # as in the original, more entries are not read
        kv_indptr = metadata.kv_indptr[:len(cu_q)]
        check_pages(lens, indptr, page_size)
        check_indices("kv_indices", metadata.kv_indices, indptr)
        check_lens("cum_seq_lens_q", dense_cu_q, cu_q, "qo_indptr is")
        check_lens("seq_lens", dense_lens, lens, "kv_len_arr is")
        if metadata.max_q_len is not None and np.diff(cu_q).max(initial=0) > metadata.max_q_len:
            raise ValueError(f"max_q_len is {metadata.max_q_len}; a request has {np.diff(cu_q).max()} queries")
        if self._use_cuda_graph and self._qo_indptr_buf is not None:
            check_buffers(self.device, {"qo_indptr": self._qo_indptr_buf, "kv_indptr": self._kv_indptr_buf,
                                        "kv_indices": self._kv_indices_buf, "kv_len_arr": self._kv_len_arr_buf})
            if len(lens) != len(self._kv_len_arr_buf):
                raise ValueError(f"The batch size should be fixed in cuda graph mode: kv_len_arr has {len(lens)} entries, "
                                 f"its buffer {len(self._kv_len_arr_buf)}")
            fill_buffers(qo_indptr=(self._qo_indptr_buf, metadata.qo_indptr),
                         kv_indptr=(self._kv_indptr_buf, kv_indptr),
                         kv_indices=(self._kv_indices_buf, metadata.kv_indices),
                         kv_len_arr=(self._kv_len_arr_buf, metadata.kv_len_arr))
            ids, offsets = self._kv_indices_buf, self._kv_indptr_buf
        elif self._use_cuda_graph:
            raise ValueError("use_cuda_graph is given without the buffers qo_indptr, kv_indptr, kv_indices, kv_len_arr")
        else:
            own = kv_indptr if kv_indptr.device == self.device else indptr
            ids, offsets = arguments.on_device(metadata.kv_indices, self.device), arguments.on_device(own, self.device)
        self._rows = self._rows or int(cu_q[-1])
        bounds = graph_bounds(self.device, self._use_cuda_graph, len(lens), self._rows, self._rows,
                              len(ids) * page_size)
        self._ids, self._host = ids[:int(indptr[-1])], (cu_q, indptr, lens)
        self._adopt(problem,
                    make_batch(cu_q, lens, [folio.csr_table(ids, offsets)], bounds, self._rows if bounds else None))

    def run(self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False,
            profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, query=None,
            kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None,
            skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None):
        """Attention of one layer.

        query: [tokens, heads, ckv + kpe], or the pair (q_nope, q_pe). kv_cache: [pages, page_size, ckv + kpe], or the
        pair (ckv_cache, kpe_cache). bmm1_scale stands in place of sm_scale, bmm2_scale multiplies outputs. ckv_scale
        and kpe_scale, in place of those two: of fp8 caches, numbers. o_scale: of an fp8 output, which is divided by it.
        kv_len with page_table: lengths and pages of this call, one query a request, in place of a plan's. Returns out,
        or (out, lse), base 2, or e where plan or return_lse_base_on_e say so. profiler_buffer is a hint.
        """
        arguments.refuse(arguments.NO_SKIP, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        arguments.refuse("scales are one a cache", ckv_scale_arr=ckv_scale_arr)
        if o_scale is not None and (out is None or out.dtype.itemsize != 1):
            raise ValueError("o_scale is given; out must be an fp8 tensor then")
        if o_scale is not None and not 0.0 < o_scale < math.inf:
            raise ValueError(f"o_scale must be a finite positive value, got {o_scale}")
        if (bmm1_scale is not None or bmm2_scale is not None) and (ckv_scale is not None or kpe_scale is not None):
            raise ValueError("ckv_scale or kpe_scale is given with bmm1_scale or bmm2_scale, which have all scales")
        planless = self._problem is None
        if planless:
            if page_table is None or kv_len is None:
                raise RuntimeError("BatchMLAPagedAttentionWrapper.run() called before plan().")
            first = q_nope if query is None else query[0] if isinstance(query, (tuple, list)) else query
            cached = ckv_cache if kv_cache is None else kv_cache[0] if isinstance(kv_cache, (tuple, list)) else kv_cache
            if first is None or cached is None:
                raise TypeError("run() takes query= or q_nope and q_pe, and kv_cache= or ckv_cache and kpe_cache")
            self._widths, self._lse_base, self._use_sinks = (512, 64), None, False
            problem = state_problem(num_qo_heads=first.shape[1], num_kv_heads=1, head_dim_qk=576, head_dim_vo=512,
                                    page_size=cached.shape[-2], causal=True, sm_scale=1.0 / math.sqrt(192),
                                    q_data_type=first.dtype, kv_data_type=cached.dtype)
        else:
            problem = self._problem
            if self._use_sinks != (sinks is not None):
                raise ValueError(f"sinks are {'not ' * (sinks is None)}given; plan was told use_sinks={self._use_sinks}")
            if self._output_scale == "per-tensor" and o_scale is None:
                raise ValueError("o_scale is not given; plan was told output_scale='per-tensor'")
            if self._dense is None and (kv_len is None) != (page_table is None):
                raise ValueError("kv_len and page_table are given together where plan was given kv_indices")
        q = self._join_query(query, q_nope, q_pe, ckv_scale, kpe_scale)
        packed, ids_are_places = self._join_cache(kv_cache, ckv_cache, kpe_cache, page_table)
        base = "ln" if return_lse_base_on_e else self._lse_base or "log2"
        if out is not None and out.dtype != problem.kind.out:
            problem = problem._replace(kind=problem.kind._replace(out=out.dtype))
        k_scale = ckv_scale
        v_scale = _product(ckv_scale, bmm2_scale, None if o_scale is None else 1.0 / o_scale)
        if page_table is not None or self._dense is not None:
            return self._run_dense(problem, q, packed, page_table, kv_len, ids_are_places, k_scale, v_scale, bmm1_scale,
                                   out, lse, return_lse, sinks, base)
        if ids_are_places:
            return self._packed_twin(problem)._attend(
                q, _cache_of(packed, self._widths[0]), k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
                return_lse=return_lse, sinks=sinks, sm_scale=bmm1_scale, base=base, problem=problem)
        return self._attend(q, _cache_of(packed, self._widths[0]), k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
                            return_lse=return_lse, sinks=sinks, sm_scale=bmm1_scale, base=base, problem=problem)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _join_query(self, query, q_nope, q_pe, ckv_scale, kpe_scale):
        """[q_nope | q_pe]. Where the halves of an fp8 cache have scales of their own, their ratio is q_pe's."""
        if (query is None) == (q_nope is None and q_pe is None):
            raise TypeError("run() takes query=, or q_nope and q_pe")
        if query is not None and not isinstance(query, (tuple, list)):
            if kpe_scale is None or kpe_scale == ckv_scale:
                return query
            query = query.split(self._widths, -1)
        q_nope, q_pe = query if query is not None else (q_nope, q_pe)
        if q_nope is None or q_pe is None:
            raise ValueError("q_nope and q_pe must both be provided.")
        self._check_dtypes("q_data_type", q_nope=q_nope, q_pe=q_pe)
        if kpe_scale is not None and kpe_scale != ckv_scale:
            q_pe = q_pe.to(torch.float32) * (kpe_scale / (1.0 if ckv_scale is None else ckv_scale))
            return torch.cat((q_nope, q_pe.to(q_nope.dtype)), -1)
        whole = joined(q_nope, q_pe)
        return torch.cat((q_nope, q_pe), -1) if whole is None else whole

    def _check_dtypes(self, planned, **halves):
        if self._problem is None:
            return
        wanted = self._problem.kind.q if planned == "q_data_type" else self._problem.kind.kv
        for name, half in halves.items():
            if half.dtype != wanted:
                raise ValueError(f"{name}.dtype is {half.dtype}; plan was given {planned}={wanted}")

    def _join_cache(self, kv_cache, ckv_cache, kpe_cache, page_table):
        """(a packed cache, whether its pages are the batch's own, one after the other)."""
        if (kv_cache is None) == (ckv_cache is None and kpe_cache is None):
            raise TypeError("run() takes kv_cache=, or ckv_cache and kpe_cache")
        if kv_cache is not None and not isinstance(kv_cache, (tuple, list)):
            return kv_cache, False
        ckv, kpe = kv_cache if kv_cache is not None else (ckv_cache, kpe_cache)
        if ckv is None or kpe is None:
            raise ValueError("ckv_cache and kpe_cache must both be provided.")
        self._check_dtypes("kv_data_type", ckv_cache=ckv, kpe_cache=kpe)
        whole = joined(ckv, kpe)
        if whole is not None:
            return whole, False
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError("ckv_cache and kpe_cache are not the two parts of one tensor; in a CUDA graph they must "
                                      "be")
        tables = page_table if page_table is not None else self._dense.block_tables if self._dense else self._ids
        ids = tables.reshape(-1).long().clamp(0, ckv.shape[0] - 1)
        return torch.cat((ckv[ids], kpe[ids]), -1), True

    def _packed_twin(self, problem):
        """This wrapper's batch over pages that were copied one after the other."""
        if self._packed is None:
            cu_q, indptr, lens = self._host
            places = arguments.on_device(np.arange(int(indptr[-1]), dtype=np.int32), self.device)
            table = folio.csr_table(places, arguments.on_device(indptr, self.device))
            self._packed = Wrapper(self._float_workspace_buffer)
            self._packed._adopt(problem, make_batch(cu_q, lens, [table]))
        return self._packed

    def _run_dense(self, problem, q, packed, page_table, kv_len, ids_are_places, k_scale, v_scale, bmm1_scale, out, lse,
                   return_lse, sinks, base):
        tables = self._dense.block_tables if page_table is None else page_table
        lens = self._dense.seq_lens if kv_len is None else kv_len
        tables, lens = tables.to(self.device), lens.to(self.device)
        if ids_are_places:
            tables = torch.arange(tables.numel(), dtype=torch.int32, device=self.device).view(tables.shape)
        scales = _scales_of(problem, k_scale, v_scale, bmm1_scale)
        cu_q = None if page_table is not None and self._dense is None else self._dense.cum_seq_lens_q.to(self.device)
        return dense.attend(problem, q, _cache_of(packed, self._widths[0]), False, tables, lens,
                            tables.shape[1] * problem.kind.page_size, scales, q_len=1, cu_q=cu_q,
                            max_q_len=None if cu_q is None else self._longest, out=out, lse=lse, return_lse=return_lse,
                            sinks=sinks, base=arguments.lse_base(base))


def _scales_of(problem, k_scale, v_scale, bmm1_scale):
    return dense.scale_up(problem.scales, None, k_scale, v_scale, bmm1_scale)


def _product(*factors):
    result = None
    for factor in factors:
        if factor is not None:
            result = factor if result is None else result * factor
    return result


def trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None,
        skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend="auto", is_var_seq=True,
        uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl="auto", kv_scale_format="auto",
        cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None, sparse_mla_top_k_lens=None,
        enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, use_fp16_softmax=None,
        return_lse_base=None):
    """MLA decodes over block_tables [requests, pages].

    query: [requests, q_len, heads, kv_lora_rank + qk_rope_head_dim], or [tokens, heads, .] with cum_seq_lens_q and
    max_q_len. kv_cache: [pages, (1,) page_size, kv_lora_rank + qk_rope_head_dim]. bmm1_scale multiplies logits, with
    the softmax's own scale; bmm2_scale outputs. lse: [tokens, heads], or as query [requests, q_len, heads].
    return_lse_base: basee or base2, which None is too. Out is [..., heads, kv_lora_rank]. sparse_mla_top_k, shards and
    skip-softmax are refused; the other arguments are hints.
    """
    arguments.check_backend("auto" if backend == "sparse" else backend)
    arguments.refuse(arguments.NO_SKIP, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
    arguments.refuse("lists of keys for each query are not read here", sparse_mla_top_k=sparse_mla_top_k or None,
                     sparse_mla_top_k_lens=sparse_mla_top_k_lens)
    arguments.refuse("keys and values have one table", uses_shared_paged_kv_idx=not uses_shared_paged_kv_idx)
    arguments.refuse("shards of a context are KvSegment's in folio", enable_dcp=enable_dcp,
                     causal_seqlens_kv_global=causal_seqlens_kv_global, cp_world=cp_world != 1 or None,
                     cp_rank=cp_rank != 0 or None)
    if return_lse_base not in (None, "basee", "base2"):
        raise ValueError(f"return_lse_base must be 'basee', 'base2', or None; got {return_lse_base!r}")
    if query.shape[-1] != kv_lora_rank + qk_rope_head_dim:
        raise ValueError(f"query has heads of {query.shape[-1]}; kv_lora_rank and qk_rope_head_dim make "
                         f"{kv_lora_rank + qk_rope_head_dim}")
    cache = _cache_of(kv_cache, kv_lora_rank)
    problem = state_problem(
        num_qo_heads=query.shape[-2], num_kv_heads=1, head_dim_qk=query.shape[-1], head_dim_vo=kv_lora_rank,
        page_size=cache[0].shape[1], causal=True, sm_scale=1.0, q_data_type=query.dtype, kv_data_type=kv_cache.dtype,
        o_data_type=out.dtype if out is not None else torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype)
    if max_q_len is not None and cum_seq_lens_q is None:
        raise ValueError("max_q_len is given without cum_seq_lens_q")
    q_len = query.shape[1] if query.dim() == 4 else 1
    flat = query.reshape(-1, *query.shape[-2:])
    if cum_seq_lens_q is not None and max_q_len is None:
        max_q_len = flat.shape[0]  # no request has more: nothing is read back
    given_lse = lse
    if lse is not None and lse.dim() == 3:
        lse = lse.view(-1, lse.shape[-1])
    result = dense.attend(problem, flat, cache, False, block_tables, seq_lens, max_seq_len,
                          dense.scale_up(problem.scales, bmm1_scale, None, bmm2_scale), q_len=q_len,
                          cu_q=cum_seq_lens_q, max_q_len=max_q_len, out=out, lse=lse, return_lse=return_lse,
                          sinks=sinks, base="e" if return_lse_base == "basee" else "two")
    if return_lse and given_lse is not None:
        result = result[0], given_lse
    if out is not None or query.dim() == 3:
        return result
    shape = (*query.shape[:-1], kv_lora_rank)
    return (result[0].view(shape), result[1]) if return_lse else result.view(shape)


def xqa_batch_decode_with_kv_cache_mla(query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank,
                                       qk_rope_head_dim, block_tables, seq_lens, max_seq_len, out=None, bmm1_scale=1.0,
                                       bmm2_scale=1.0, sinks=None, enable_pdl=None):
    """trtllm_batch_decode_with_kv_cache_mla with fewer arguments."""
    return trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, out=out, bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, sinks=sinks, enable_pdl=enable_pdl)
