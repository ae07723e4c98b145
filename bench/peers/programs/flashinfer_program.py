"""FlashInfer's wrappers, planned once: one class for each of its kernels."""

import flashinfer
import torch

from programs import Refused
from programs.paged_prefill_wrapper import PagedPrefillWrapper


class FlashInferProgram:
    def __init__(self, device):
        if device != "cuda":
            raise RuntimeError("FlashInfer runs on GPUs")
        self.workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=device)


class FlashInferWrapper(FlashInferProgram, PagedPrefillWrapper):
    library = flashinfer


class FlashInferFa2(FlashInferWrapper):
    name = "flashinfer_fa2"
    backend = "fa2"


class FlashInferFa3(FlashInferWrapper):
    name = "flashinfer_fa3"
    backend = "fa3"


class FlashInferXqa(FlashInferProgram):
    """XQA: decodes and verification over a table of pages."""

    name = "flashinfer_xqa"

    def prepare(self, problem):
        row = problem.row
        if row.kind != "decode" or row.mla or row.soft_cap or len(set(row.q_lens)) > 1:
            raise Refused("decodes of equal numbers of tokens alone")
        lens = problem.kv_lens.to(problem.device)

        def run(layer):
            return flashinfer.decode.xqa_batch_decode_with_kv_cache(
                problem.q, problem.caches[layer], self.workspace, problem.block_table, lens, max(row.kv_lens),
                bmm1_scale=problem.sm_scale, window_left=row.window - 1 if row.window else -1, out=problem.out,
                kv_layout="NHD", q_len_per_req=row.q_lens[0])

        return run


class FlashInferMla(FlashInferProgram):
    name = "flashinfer_mla"

    def prepare(self, problem):
        row = problem.row
        if not row.mla:
            raise Refused("MLA alone")
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(self.workspace, backend="fa3")
        on = {"device": problem.device}
        wrapper.plan(problem.cu_q.to(**on), problem.page_indptr.to(**on), problem.page_ids, problem.kv_lens.to(**on),
                     row.q_heads, 512, 64, row.page_size, True, problem.sm_scale, torch.bfloat16, torch.bfloat16)
        q = problem.q.split([512, 64], -1)
        layers = [cache[0][:, :, 0].split([512, 64], -1) for cache in problem.caches]

        def run(layer):
            return wrapper.run(*q, *layers[layer], out=problem.out)

        return run


class FlashInferCudnn(FlashInferProgram):
    """cuDNN's paged attention through FlashInfer's functions."""

    name = "flashinfer_cudnn"

    def prepare(self, problem):
        row = problem.row
        if row.mla or row.soft_cap or row.window or row.kind == "decode" and max(row.q_lens) > 1:
            raise Refused("plain decodes and prefills alone")
        on = {"device": problem.device}
        q_lens = torch.tensor(row.q_lens, dtype=torch.int32, **on).view(-1, 1, 1, 1)
        kv_lens = problem.kv_lens.to(**on).view(-1, 1, 1, 1)
        layers = [[cache.transpose(1, 2) for cache in caches] for caches in problem.caches]  # [pages, heads, tokens, dim]
        if row.kind == "decode":
            def run(layer):
                return flashinfer.decode.cudnn_batch_decode_with_kv_cache(
                    problem.q, *layers[layer], problem.sm_scale, self.workspace, max_sequence_kv=max(row.kv_lens),
                    actual_seq_lens_kv=kv_lens, block_tables=problem.block_table, out=problem.out)
        else:
            def run(layer):
                return flashinfer.prefill.cudnn_batch_prefill_with_kv_cache(
                    problem.q, *layers[layer], problem.sm_scale, self.workspace, max_token_per_sequence=max(row.q_lens),
                    max_sequence_kv=max(row.kv_lens), actual_seq_lens_q=q_lens, actual_seq_lens_kv=kv_lens,
                    block_tables=problem.block_table, causal=True, return_lse=False, out=problem.out,
                    is_cuda_graph_compatible=True)[0]
        return run
