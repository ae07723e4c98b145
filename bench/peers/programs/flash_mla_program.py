"""FlashMLA: decodes of MLA over pages of 64."""

from flash_mla import flash_mla_with_kvcache, get_mla_metadata

from programs import Refused


class FlashMla:
    name = "flash_mla"

    def __init__(self, device):
        if device != "cuda":
            raise RuntimeError("FlashMLA runs on GPUs")

    def prepare(self, problem):
        row = problem.row
        if not row.mla or row.page_size != 64:
            raise Refused("MLA over pages of 64 alone")
        requests, q_len = len(row.q_lens), row.q_lens[0]
        lens = problem.kv_lens.to(problem.device)
        metadata, splits = get_mla_metadata(lens, q_len * row.q_heads, 1)
        q = problem.q.view(requests, q_len, row.q_heads, row.dim)

        def run(layer):
            out, _ = flash_mla_with_kvcache(q, problem.caches[layer][0], problem.block_table, lens, 512, metadata, splits,
                                            softmax_scale=problem.sm_scale, causal=True)
            return out.view(problem.out.shape)

        return run
