"""Attention over blocks of keys, of one size or of many (flashinfer.sparse).

A row of blocks is a request, whose pages are the blocks that it sees.
"""

import functools
import math

import numpy as np
import torch

from .. import _folio as folio
from . import arguments
from .single import mask_bits
from .wrapper import Wrapper, make_batch, rows_of, state_problem

LARGEST_PAGE = 128


def convert_bsr_mask_layout(mask, indptr):
    """A mask [blocks, R, C] of a BSR matrix as a vector: row of blocks after row, in it row-major over all of its
    columns."""
    indptr = arguments.to_host(indptr)[0]
    parts = [mask[a:b].transpose(0, 1).reshape(-1) for a, b in zip(indptr[:-1], indptr[1:])]
    return torch.cat(parts) if parts else mask.reshape(-1)


class BlockSparseAttentionWrapper(Wrapper):
    """q [M, heads, head_dim] over k and v [N, kv heads, head_dim], of which each block of R rows sees some blocks of C
    keys: those of a BSR matrix. backend is a hint."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        super().__init__(float_workspace_buffer, "NHD", backend="auto" if backend.startswith("vsa_") else backend)

    def plan(self, indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, mask=None, packed_mask=None,
             causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None,
             rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type="float16",
             non_blocking=True, block_mask=None, kv_block_lens=None, q2k_indices=None, q2k_num=None, kv_splits=None,
             use_clc=None, q_scale=None, k_scale=None, v_scale=None):
        """Takes the matrix: indptr [ceil(M / R) + 1] and indices of its blocks' columns.

        mask: bool [blocks, R, C]; packed_mask: bits of it, as convert_bsr_mask_layout and segment_packbits make them.
        causal: query i sees keys up to i + N - M; a mask comes before it. o_data_type is that of outputs.
        use_fp16_qk_reduction is a permission that nothing here needs; non_blocking, kv_splits and use_clc are hints.
        """
        arguments.refuse("VariableBlockSparseAttentionWrapper takes blocks for each head", block_mask=block_mask,
                         q2k_indices=q2k_indices, q2k_num=q2k_num)
        arguments.refuse("blocks are whole", kv_block_lens=kv_block_lens)
        arguments.refuse("scales are run's", q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        arguments.refuse("there is no position encoding here", rope_scale=rope_scale, rope_theta=rope_theta)
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(f"pos_encoding_mode is {pos_encoding_mode}; keys of sparse blocks have no positions "
                                      "here: turn q and k before")
        if N % C:
            raise ValueError(f"N is {N}; it must be divisible by C, {C}")
        bsr, columns = arguments.to_host(indptr, indices)
        rows = len(bsr) - 1
        if rows != -(-M // R) or bsr[-1] > len(columns):
            raise ValueError(f"indptr has {rows} rows of blocks and ends at {bsr[-1]}; M and R make {-(-M // R)} rows, "
                             f"indices has {len(columns)} blocks")
        if len(columns) and not (0 <= columns.min() and columns.max() < N // C):
            raise ValueError(f"indices has the block {columns.min() if columns.min() < 0 else columns.max()}; N and C make "
                             f"{N // C}")
        cu_q = np.minimum(np.arange(rows + 1) * R, M).astype(np.int32)
        kv_lens = np.diff(bsr) * C
        lengths = [int(n) for n in np.diff(cu_q).astype(np.int64) * kv_lens]
        if mask is not None and packed_mask is None:
            mask = convert_bsr_mask_layout(mask, bsr)
        elif causal and packed_mask is None:
            mask = _causal(cu_q, bsr, columns, C, N - M).to(self.device)
        bits = mask_bits(mask, packed_mask, lengths)
        problem = state_problem(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim_qk=head_dim, page_size=C,
            custom_mask=bits is not None, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, q_data_type=q_data_type,
            kv_data_type=kv_data_type, o_data_type=o_data_type)
        table = folio.csr_table(arguments.on_device(columns, self.device), arguments.on_device(bsr, self.device))
        self._mask = None if bits is None else bits.to(self.device)
        self._rows_and_columns = (M, N, C)
        self._adopt(problem, make_batch(cu_q, kv_lens, [table]))

    begin_forward = plan

    def run(self, q, k, v, scale_q=None, scale_k=None, scale_v=None, out=None, lse=None, return_lse=False,
            enable_pdl=None, *, sm_scale=None):
        """out [M, heads, head_dim], or (out, lse [M, heads], base 2). Scales: of fp8 tensors, numbers or float32 [kv
        heads]. enable_pdl is a hint."""
        if self._problem is None:
            raise folio.InvalidArgument("there is no plan: call plan before run")
        rows, columns, width = self._rows_and_columns
        if q.shape[0] != rows or k.shape[0] != columns:
            raise ValueError(f"q has {q.shape[0]} rows, k {k.shape[0]}; plan was given {rows} and {columns}")
        cache = tuple(x.unflatten(0, (columns // width, width)) for x in (k, v))
        return self._attend(q, cache, q_scale=scale_q, k_scale=scale_k, v_scale=scale_v, out=out, lse=lse,
                            return_lse=return_lse, sm_scale=sm_scale)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(self, q, k, v, scale_q=None, scale_k=None, scale_v=None, pos_encoding_mode="NONE",
                use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None):
        """run of earlier versions: sm_scale stands in place of plan's, the others must be plan's."""
        arguments.refuse("there is no position encoding here", rope_scale=rope_scale, rope_theta=rope_theta,
                         pos_encoding_mode=None if pos_encoding_mode == "NONE" else pos_encoding_mode)
        _check_cap(self._problem, logits_soft_cap)
        return self.run(q, k, v, scale_q, scale_k, scale_v, sm_scale=sm_scale)


def _check_cap(problem, logits_soft_cap):
    if problem is not None and logits_soft_cap is not None and logits_soft_cap != problem.scales.cap:
        raise ValueError(f"logits_soft_cap is {logits_soft_cap}; plan was given {problem.scales.cap}")


def _causal(cu_q, bsr, columns, width, ahead):
    """The entries of a causal mask over the blocks' keys, as convert_bsr_mask_layout orders them."""
    parts = []
    for r in range(len(bsr) - 1):
        keys = (columns[bsr[r]:bsr[r + 1], None] * width + np.arange(width)).reshape(1, -1)
        parts.append((keys <= np.arange(cu_q[r], cu_q[r + 1])[:, None] + ahead).reshape(-1))
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, bool))


class VariableBlockSparseAttentionWrapper(Wrapper):
    """q [heads, qo_len, head_dim] over k and v [kv heads, kv_len, head_dim], in blocks of any sizes, which differ from
    KV head to KV head. backend is a hint."""

    def __init__(self, float_workspace_buffer, backend="auto"):
        super().__init__(float_workspace_buffer, "NHD", backend="auto" if backend == "cake_cute" else backend)

    def plan(self, block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False,
             pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None,
             rope_scale=None, rope_theta=None, non_blocking=True, q_data_type="float16", kv_data_type=None):
        """Takes the blocks: block_mask_map bool [kv heads, row blocks, column blocks], block_row_sz [kv heads, row
        blocks], block_col_sz [kv heads, column blocks]. causal: query i sees keys up to i + kv_len - qo_len.
        use_fp16_qk_reduction is a permission that nothing here needs; non_blocking is a hint."""
        if pos_encoding_mode != "NONE":
            raise NotImplementedError(f"pos_encoding_mode is {pos_encoding_mode}; keys of sparse blocks have no positions "
                                      "here: turn q and k before")
        arguments.refuse("there is no position encoding here", rope_scale=rope_scale, rope_theta=rope_theta)
        rows, columns = (arguments.to_host(each)[0].astype(np.int64) for each in (block_row_sz, block_col_sz))
        seen = block_mask_map.detach().cpu().numpy().astype(bool)
        heads, row_blocks, column_blocks = seen.shape
        if heads != num_kv_heads or rows.shape != (heads, row_blocks) or columns.shape != (heads, column_blocks):
            raise ValueError(f"block_mask_map has shape {seen.shape}, block_row_sz {rows.shape}, block_col_sz {columns.shape}; "
                             f"num_kv_heads is {num_kv_heads}")
        self._q_len, self._kv_len = int(rows[0].sum()), int(columns[0].sum())
        if (rows.sum(1) != self._q_len).any() or (columns.sum(1) != self._kv_len).any():
            raise ValueError("block_row_sz and block_col_sz must have the same sums in all heads")
        page = math.gcd(LARGEST_PAGE, *(int(n) for n in np.unique(columns)))
        starts = np.cumsum(columns, 1) - columns + np.arange(heads)[:, None] * self._kv_len
        h, r, c = seen.nonzero()
        pages = columns[h, c] // page
        within = np.arange(int(pages.sum())) - np.repeat(np.cumsum(pages) - pages, pages)
        ids = np.repeat(starts[h, c] // page, pages) + within
        kv_lens = (seen * columns[:, None, :]).sum(2).reshape(-1)
        cu_q = rows_of(rows.reshape(-1))
        bits = None
        if causal:
            bits = self._causal_bits(cu_q, kv_lens, ids, page, heads, row_blocks)
        problem = state_problem(
            num_qo_heads=num_qo_heads // num_kv_heads, num_kv_heads=1, head_dim_qk=head_dim, page_size=page,
            custom_mask=bits is not None, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale, q_data_type=q_data_type,
            kv_data_type=kv_data_type)
        table = folio.csr_table(arguments.on_device(ids.astype(np.int32), self.device),
                                arguments.on_device(rows_of(kv_lens // page), self.device))
        self._mask = None if bits is None else bits.to(self.device)
        self._heads = (num_qo_heads, num_kv_heads, page)
        self._adopt(problem, make_batch(cu_q, kv_lens.astype(np.int32), [table]))

    begin_forward = plan

    def _causal_bits(self, cu_q, kv_lens, ids, page, heads, row_blocks):
        parts, first = [], 0
        for request in range(heads * row_blocks):
            head = request // row_blocks
            mine = ids[first:first + kv_lens[request] // page]
            first += kv_lens[request] // page
            keys = (mine[:, None] * page + np.arange(page)).reshape(1, -1) - head * self._kv_len
            queries = np.arange(cu_q[request], cu_q[request + 1])[:, None] - head * self._q_len
            parts.append((keys <= queries + self._kv_len - self._q_len).reshape(-1))
        lengths = [len(part) for part in parts]
        return mask_bits(torch.from_numpy(np.concatenate(parts)), None, lengths)

    def run(self, q, k, v, out=None, lse=None, return_lse=False, enable_pdl=None, *, sm_scale=None):
        """out [heads, qo_len, head_dim], or (out, lse [heads, qo_len], base 2). k and v are contiguous. enable_pdl is a
        hint."""
        if self._problem is None:
            raise folio.InvalidArgument("there is no plan: call plan before run")
        num_qo_heads, num_kv_heads, page = self._heads
        group = num_qo_heads // num_kv_heads
        if q.shape[:2] != (num_qo_heads, self._q_len) or k.shape[:2] != (num_kv_heads, self._kv_len):
            raise ValueError(f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}; plan was given {num_qo_heads} heads of "
                             f"{self._q_len} queries, {num_kv_heads} of {self._kv_len} keys")
        rows = q.unflatten(0, (num_kv_heads, group)).transpose(1, 2).reshape(-1, group, q.shape[-1])
        cache = tuple(x.reshape(-1, page, 1, x.shape[-1]) for x in (k, v))
        result, sums = self._attend(rows, cache, return_lse=True, sm_scale=sm_scale)

        def heads_first(x):
            return x.unflatten(0, (num_kv_heads, self._q_len)).transpose(1, 2).flatten(0, 1)

        result, sums = heads_first(result), heads_first(sums)
        out = result.contiguous() if out is None else out.copy_(result)
        if lse is not None:
            lse.copy_(sums)
        return (out, sums.contiguous() if lse is None else lse) if return_lse else out

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(self, q, k, v, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, logits_soft_cap=None,
                sm_scale=None, rope_scale=None, rope_theta=None):
        """run of earlier versions: sm_scale stands in place of plan's, the others must be plan's."""
        arguments.refuse("there is no position encoding here", rope_scale=rope_scale, rope_theta=rope_theta,
                         pos_encoding_mode=None if pos_encoding_mode == "NONE" else pos_encoding_mode)
        _check_cap(self._problem, logits_soft_cap)
        return self.run(q, k, v, sm_scale=sm_scale)
