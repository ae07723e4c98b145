"""Folio: one plan a step, one run a layer."""

import folio
import torch

from programs import Refused


class Folio:
    """Over the caches as they lie (NHD)."""

    name = "folio"
    kv_format = "strided"
    takes_fp8 = True

    def __init__(self, device):
        self.context = folio.Context.cuda(0) if device == "cuda" else folio.Context.cpu(
            num_threads=torch.get_num_threads())

    def prepare(self, problem):
        row = problem.row
        config = folio.AttentionConfig(
            num_q_heads=row.q_heads, num_kv_heads=row.kv_heads, head_dim_qk=row.dim, head_dim_v=row.dim_v,
            page_size=row.page_size, window_left=row.window - 1 if row.window else -1, kv_format=self.kv_format,
            kv="float8_e4m3fn" if row.fp8 else "bfloat16",
            features=["soft_cap"] if row.soft_cap else [])
        try:
            op = folio.prepare(self.context, config, self._options(problem))
        except folio.Error as error:
            raise Refused(str(error)) from error
        if self.kv_format == "cpu_packed" and row.page_size < 16:
            raise Refused("packed pages have 16 tokens or more")
        buffer, workspace = folio.make_plan_buffer(op), self._workspace(folio.workspace_size(op), problem)
        folio.init_workspace(op, workspace)
        planned = self._planner(op, problem, buffer)
        table = folio.csr_table(problem.page_ids, problem.page_indptr.to(problem.device))
        layers = [folio.AttentionArgs(problem.q, problem.out, [folio.SegmentArgs(self._view(row, cache), table)],
                                      sm_scale=problem.sm_scale, logits_soft_cap=row.soft_cap)
                  for cache in problem.caches]

        def run(layer):
            folio.run(planned(), layers[layer], workspace)
            return problem.out

        run.kept = op, buffer, table
        return run

    def _options(self, problem):
        return folio.PrepareOptions()

    def _planner(self, op, problem, buffer):
        """The plan of a call: one for all of them."""
        batch = folio.BatchView(problem.cu_q.numpy(), [folio.KvSegment(problem.kv_lens.numpy())])
        plan = folio.plan(op, batch, buffer)
        return lambda: plan

    def _workspace(self, size, problem):
        if problem.device.type == "cpu":
            return folio.Workspace(size)
        return folio.Workspace(torch.empty(size, dtype=torch.uint8, device=problem.device))

    def _view(self, row, cache):
        return folio.make_nhd_view(*cache)


class FolioDeviceLengths(Folio):
    """Lengths on the GPU, as the functions of flash_attn get them: planned there, once in a graph."""

    name = "folio_device_lengths"

    def __init__(self, device):
        if device != "cuda":
            raise RuntimeError("lengths lie on a GPU")
        super().__init__(device)

    def _options(self, problem):
        row = problem.row
        return folio.PrepareOptions(bounds=folio.GraphBounds(
            max_requests=len(row.q_lens), max_tokens=sum(row.q_lens), max_q_len=max(row.q_lens),
            max_kv_len=max(row.kv_lens)))

    def _planner(self, op, problem, buffer):
        row, cu_q, lengths = problem.row, problem.cu_q.to(problem.device), problem.kv_lens.to(problem.device)
        plans = {}  # by whether they are a graph's

        def planned():
            captured = torch.cuda.is_current_stream_capturing()
            if captured not in plans:
                batch = folio.BatchView(cu_q, [folio.KvSegment(lengths)], num_tokens=sum(row.q_lens),
                                        max_q_len=max(row.q_lens), max_kv_len=max(row.kv_lens))
                plans.clear()  # they share a buffer
                plans[captured] = folio.plan(op, batch, buffer)
            return plans[captured]

        return planned


class FolioPacked(Folio):
    """Over caches in the CPU's own layout, which Folio writes."""

    name = "folio_packed"
    kv_format = "cpu_packed"

    def __init__(self, device):
        if device != "cpu":
            raise RuntimeError("packed caches are the CPU's")
        super().__init__(device)

    def _view(self, row, cache):
        pages = cache[0].shape[0]
        k = torch.empty(pages, row.kv_heads, row.page_size, row.dim, dtype=cache[0].dtype)
        v = torch.empty(pages, row.kv_heads, row.page_size // 2, row.dim_v, 2, dtype=cache[0].dtype)
        view = folio.make_cpu_packed_view(k, v)
        slots = torch.arange(pages * row.page_size)
        folio.write_kv_cache(self.context, folio.CacheWriteArgs(*(each.flatten(0, 1) for each in cache), slots, view))
        return view
