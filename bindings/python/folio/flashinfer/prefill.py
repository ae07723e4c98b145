"""Batches of prefills and appends, over pages and over ragged keys (flashinfer.prefill)."""

import functools

import numpy as np
import torch

from .. import _folio as folio
from . import arguments, masks
from .dense import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from .page import get_seq_lens
from .quantization import packbits, segment_packbits
from .single import mask_bits, single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from .wrapper import (Wrapper, check_buffers, check_indices, check_jit, check_lens, fill_buffers, graph_bounds,
                      lengths_of_pages, make_batch, state_problem, variant_args)

__all__ = ["BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper",
           "get_seq_lens", "packbits", "segment_packbits", "single_prefill_with_kv_cache",
           "single_prefill_with_kv_cache_return_lse", "trtllm_batch_context_with_kv_cache",
           "trtllm_ragged_attention_deepseek"]


class PrefillWrapper(Wrapper):
    """What the paged and the ragged wrapper share: queries, masks, run."""

    def __init__(self, float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, buffers, custom_mask_buf,
                 mask_indptr_buf):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._sink_variant = check_jit(jit_args)
        self._fixed_batch_size = 0
        self._max_total_num_rows = None
        if use_cuda_graph:
            check_buffers(self.device, buffers)
            self._fixed_batch_size = len(buffers["qo_indptr_buf"]) - 1
        self._custom_mask_buf = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf

    def _take_queries(self, qo_indptr, host_qo, uniform_q_len):
        """Checks queries' offsets and copies them to the buffer for graphs. Returns the lengths."""
        q_lens = np.diff(host_qo)
        if host_qo[0] != 0 or (q_lens < 0).any():
            raise ValueError(f"qo_indptr is {host_qo[:4].tolist()} ...; it must begin with 0 and not decrease")
        if uniform_q_len is not None and (q_lens != uniform_q_len).any():
            at = int(np.flatnonzero(q_lens != uniform_q_len)[0])
            raise ValueError(f"uniform_q_len is {uniform_q_len}; request {at} has {q_lens[at]} queries")
        if self._use_cuda_graph:
            if len(q_lens) != self._fixed_batch_size:
                raise ValueError(f"The batch size should be fixed during the lifecycle of the wrapper in cuda graph mode, "
                                 f"the runtime batch size {len(q_lens)} mismatches the batch size {self._fixed_batch_size} "
                                 "set during initialization.")
            rows = int(host_qo[-1])
            if self._max_total_num_rows is None:
                self._max_total_num_rows = rows
            elif rows > self._max_total_num_rows:
                raise ValueError(f"The total number of rows in qo_indptr {rows} in cuda graph mode cannot exceed the number "
                                 f"of rows set during initialization {self._max_total_num_rows}.")
            fill_buffers(qo_indptr=(self._qo_indptr_buf, qo_indptr))
        else:
            self._qo_indptr_buf = qo_indptr
        return q_lens

    def _take_mask(self, custom_mask, packed_custom_mask, q_lens, kv_lens):
        """Packs the batch's masks, into the buffer for graphs where there is one."""
        lengths = [int(n) for n in q_lens.astype(np.int64) * kv_lens]
        bits = mask_bits(custom_mask, packed_custom_mask, lengths)
        if bits is None or not self._use_cuda_graph:
            return None if bits is None else bits.to(self.device, non_blocking=True)
        if self._custom_mask_buf is None:
            raise ValueError("custom_mask_buf must be initialized with a torch.Tensor in cuda graph mode if we use custom "
                             "mask in attention computation.")
        if self._custom_mask_buf.dtype != torch.uint8 or len(self._custom_mask_buf) < len(bits):
            raise ValueError(f"custom_mask_buf is {self._custom_mask_buf.dtype} with {len(self._custom_mask_buf)} entries; "
                             f"the mask has {len(bits)} bytes")
        fill_buffers(custom_mask=(self._custom_mask_buf, bits))
        if self._mask_indptr_buf is not None:
            offsets = torch.from_numpy(masks.byte_offsets(lengths))
            fill_buffers(mask_indptr=(self._mask_indptr_buf, offsets))
        return self._custom_mask_buf[:len(bits)]

    def _plan_batch(self, given, table, host_qo, q_lens, kv_lens, mask, max_kv_len, **segment):
        self._ragged = bool(segment)
        problem = state_problem(custom_mask=mask is not None, one_query=bool((q_lens <= 1).all()), ragged=self._ragged,
                                **given)
        rows = self._max_total_num_rows
        bounds = graph_bounds(self.device, self._use_cuda_graph, len(q_lens), rows, rows, max_kv_len)
        batch = make_batch(host_qo, kv_lens, [table], bounds, rows if bounds else None, **segment)
        self._given, self._mask = given, mask
        self._adopt(problem, batch, (q_lens, kv_lens))

    def _run(self, q, cache, ragged, args, *, sinks, q_scale, k_scale, v_scale, lse_base, lse_layout, **rest):
        sinks, sm_scale, scales = variant_args(self._sink_variant, args, sinks, (q_scale, k_scale, v_scale))
        return self._attend(q, cache, ragged, sinks=sinks, sm_scale=sm_scale, q_scale=scales[0], k_scale=scales[1],
                            v_scale=scales[2], base=lse_base, layout=lse_layout, **rest)

    def _state_again(self, **given):
        """The problem of plan's arguments with forward's."""
        kind = self._problem.kind
        return state_problem(custom_mask=kind.mask == "custom", one_query=bool((self._lens[0] <= 1).all()),
                             ragged=self._ragged, **given)


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
    """Queries of any number a request, its last tokens, over a paged cache.

    The form for graphs (use_cuda_graph=True) has the caller's buffers; every plan has as many requests as
    qo_indptr_buf, and no more rows than the first one. backend is a hint. jit_args: only the variant AttentionSink,
    whose run takes (sink, sm_scale). variant_owns_mask belongs to variants that Folio does not compile.
    """

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
                 custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
                 variant_owns_mask=False):
        arguments.refuse("its kernels' variants are not compiled here", variant_owns_mask=variant_owns_mask)
        buffers = {"qo_indptr_buf": qo_indptr_buf, "paged_kv_indptr_buf": paged_kv_indptr_buf,
                   "paged_kv_indices_buf": paged_kv_indices_buf,
                   "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf}
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, buffers, custom_mask_buf,
                         mask_indptr_buf)
        self._qo_indptr_buf = qo_indptr_buf
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
             head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
             pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
             rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
             non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
             max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
             max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None):
        """Plans a step.

        qo_indptr [requests + 1]: the requests' rows of q. The pages are as in the decode wrapper. custom_mask: bool
        [sum of q_len * kv_len], request after request, in place of causal; packed_custom_mask: its bits, every request
        from a byte of its own, the first bit lowest. prefix_len_ptr and the three after non_blocking: scoring of
        several items behind a prefix, whose mask is made here. seq_lens, seq_lens_q, max_token_per_sequence and
        max_sequence_kv repeat what the offsets say and are held against them. use_fp16_qk_reduction is a permission
        that nothing here needs; non_blocking and block_tables are hints.
        """
        host_qo, indptr, last, lens, lens_q = arguments.to_host(qo_indptr, paged_kv_indptr, paged_kv_last_page_len,
                                                                seq_lens, seq_lens_q)
        kv_lens = lengths_of_pages(indptr, last, page_size)
        q_lens = self._take_queries(qo_indptr, host_qo, uniform_q_len)
        if len(q_lens) != len(kv_lens):
            raise ValueError(f"qo_indptr has {len(q_lens)} requests, paged_kv_indptr {len(kv_lens)}")
        check_indices("paged_kv_indices", paged_kv_indices, indptr)
        check_lens("seq_lens", lens, kv_lens)
        check_lens("seq_lens_q", lens_q, q_lens)
        check_most("max_token_per_sequence", max_token_per_sequence, q_lens)
        check_most("max_sequence_kv", max_sequence_kv, kv_lens)
        custom_mask = masks.with_items(custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr,
                                       token_pos_in_items_len, max_item_len_ptr, q_lens, kv_lens)
        if self._use_cuda_graph:
            fill_buffers(paged_kv_indptr=(self._paged_kv_indptr_buf, paged_kv_indptr),
                         paged_kv_indices=(self._paged_kv_indices_buf, paged_kv_indices),
                         paged_kv_last_page_len=(self._paged_kv_last_page_len_buf, paged_kv_last_page_len))
        else:
            own = paged_kv_indptr if paged_kv_indptr.device == self.device else indptr
            self._paged_kv_indptr_buf = arguments.on_device(own, self.device)
            self._paged_kv_indices_buf = arguments.on_device(paged_kv_indices, self.device)
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len
        mask = self._take_mask(custom_mask, packed_custom_mask, q_lens, kv_lens)
        given = dict(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk,
                     head_dim_vo=head_dim_vo, page_size=page_size, causal=causal, pos_encoding_mode=pos_encoding_mode,
                     window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale,
                     rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
                     fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv)
        table = folio.csr_table(self._paged_kv_indices_buf, self._paged_kv_indptr_buf)
        self._plan_batch(given, table, host_qo, q_lens, kv_lens, mask, len(self._paged_kv_indices_buf) * page_size)

    begin_forward = plan

    def workspace_size(self, *args, **kwargs):
        """(bytes of the float workspace, of the int workspace) that plan with these arguments would need from the
        caller: none, since a wrapper's workspace is its own."""
        return 0, 0

    def run(self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
            return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None,
            kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None):
        """Attention of one layer.

        q: [tokens, heads, head_dim]. paged_kv_cache: (k, v) or one tensor. Scales are numbers or, on a GPU, float32
        tensors: of one, for k and v also of as many as KV heads, for q of as many as heads. sinks: float32 [heads].
        lse_base: log2 or ln; lse_layout: NH, or HN for [heads, tokens]. Returns out, or (out, lse); those given are
        written. enable_pdl and use_fp16_softmax, a permission, are hints.
        """
        if (not (args or return_lse) and q_scale is None and k_scale is None and v_scale is None and lse is None
                and window_left is None and sinks is None and lse_base == "log2" and lse_layout == "NH"
                and kv_cache_sf is None and skip_softmax_threshold_scale_factor is None and uses_spcompress is None):
            done = self._plans.again(q, paged_kv_cache, out)
            if done is not None:
                return done
        arguments.refuse(arguments.NO_NVFP4, kv_cache_sf=kv_cache_sf)
        arguments.refuse(arguments.NO_SKIP, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                         uses_spcompress=uses_spcompress)
        return self._run(q, arguments.cache_of(paged_kv_cache), None, args, q_scale=q_scale, k_scale=k_scale,
                         v_scale=v_scale, out=out, lse=lse, return_lse=return_lse, lse_base=lse_base,
                         lse_layout=lse_layout, window_left=window_left, sinks=sinks)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
                k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None,
                rope_theta=None, *, return_lse=False):
        """run of earlier versions, whose arguments stand in place of plan's."""
        problem = self._changed(self._state_again, causal=causal, pos_encoding_mode=pos_encoding_mode,
                                window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
                                rope_scale=rope_scale, rope_theta=rope_theta)
        return self._attend(q, arguments.cache_of(paged_kv_cache), k_scale=k_scale, v_scale=v_scale,
                            return_lse=return_lse, problem=problem)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Queries of any number a request over keys and values of rows that stand one after the other.

    The form for graphs and jit_args are the paged wrapper's. backend is a hint.
    """

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                 kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None,
                 jit_kwargs=None, variant_owns_mask=False):
        arguments.refuse("its kernels' variants are not compiled here", variant_owns_mask=variant_owns_mask)
        buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, buffers, custom_mask_buf,
                         mask_indptr_buf)
        self._qo_indptr_buf = qo_indptr_buf
        self._kv_indptr_buf = kv_indptr_buf
        self._max_keys = None
        self._sinks = None  # vLLM sets it, since the original's run takes none

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
             packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
             window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None,
             q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None,
             token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None,
             disable_split_kv=False, seq_lens=None, seq_lens_q=None, max_token_per_sequence=None, max_sequence_kv=None,
             v_indptr=None, o_indptr=None, uniform_q_len=None):
        """Plans a step. kv_indptr [requests + 1]: the requests' rows of k and v. Outputs of fp8 queries are bfloat16
        where o_data_type does not say otherwise. The rest is the paged wrapper's.

        In the form for graphs the first plan's rows of k are the most that a request may have later.
        """
        arguments.refuse("values and outputs have the offsets of keys and queries", v_indptr=v_indptr,
                         o_indptr=o_indptr)
        if o_data_type is None and arguments.torch_dtype(q_data_type).itemsize == 1:
            o_data_type = torch.bfloat16
        host_qo, indptr, lens, lens_q = arguments.to_host(qo_indptr, kv_indptr, seq_lens, seq_lens_q)
        kv_lens = np.diff(indptr)
        q_lens = self._take_queries(qo_indptr, host_qo, uniform_q_len)
        if len(q_lens) != len(kv_lens):
            raise ValueError(f"qo_indptr has {len(q_lens)} requests, kv_indptr {len(kv_lens)}")
        check_lens("seq_lens", lens, kv_lens)
        check_lens("seq_lens_q", lens_q, q_lens)
        check_most("max_token_per_sequence", max_token_per_sequence, q_lens)
        check_most("max_sequence_kv", max_sequence_kv, kv_lens)
        custom_mask = masks.with_items(custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr,
                                       token_pos_in_items_len, max_item_len_ptr, q_lens, kv_lens)
        if self._use_cuda_graph:
            fill_buffers(kv_indptr=(self._kv_indptr_buf, kv_indptr))
            self._max_keys = self._max_keys or int(indptr[-1])
        else:
            own = kv_indptr if kv_indptr.device == self.device else indptr
            self._kv_indptr_buf = arguments.on_device(own, self.device)
        mask = self._take_mask(custom_mask, packed_custom_mask, q_lens, kv_lens)
        given = dict(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk,
                     head_dim_vo=head_dim_vo, causal=causal, pos_encoding_mode=pos_encoding_mode,
                     window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, rope_scale=rope_scale,
                     rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type,
                     fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv)
        self._plan_batch(given, self._kv_indptr_buf, host_qo, q_lens, kv_lens, mask, self._max_keys or 0,
                         source="ragged")

    begin_forward = plan

    def run(self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None,
            return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, kv_cache_sf=None, sinks=None):
        """Attention of one layer. k: [kv tokens, kv heads, head_dim_qk], v likewise; with HND heads first. o_scale:
        what outputs are multiplied by. The rest is the paged wrapper's."""
        arguments.refuse(arguments.NO_NVFP4, kv_cache_sf=kv_cache_sf)
        if o_scale is not None:
            v_scale = o_scale if v_scale is None else v_scale * o_scale
        ragged = arguments.token_major(k, self._hnd), arguments.token_major(v, self._hnd)
        return self._run(q, None, ragged, args, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
                         return_lse=return_lse, lse_base=lse_base, lse_layout=lse_layout,
                         sinks=self._sinks if sinks is None else sinks)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
                logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, *, return_lse=False):
        """run of earlier versions, whose arguments stand in place of plan's."""
        problem = self._changed(self._state_again, causal=causal, pos_encoding_mode=pos_encoding_mode,
                                window_left=window_left, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale,
                                rope_scale=rope_scale, rope_theta=rope_theta)
        ragged = arguments.token_major(k, self._hnd), arguments.token_major(v, self._hnd)
        return self._attend(q, None, ragged, return_lse=return_lse, problem=problem)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


def check_most(name, most, lengths):
    """A bound that the caller gives holds for every request."""
    if most is not None and len(lengths) and lengths.max() > most:
        raise ValueError(f"{name} is {most}; request {int(lengths.argmax())} has {lengths.max()}")
