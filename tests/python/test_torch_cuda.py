"""torch tensors on a GPU: decode and prefill over them in place, cache writes, lengths on the device, refusals."""

import folio
import numpy as np
import pytest

import problems

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
try:
    CONTEXT = folio.Context.cuda(0)
except folio.Error as error:
    pytest.skip(f"Folio has no GPU here: {error}", allow_module_level=True)

DEVICE = torch.device("cuda", 0)


def to_gpu(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("uint16").copy()).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(array.copy()).to(DEVICE)


def to_numpy(tensor, like):
    if like.dtype.name == "bfloat16":
        return tensor.view(torch.uint16).cpu().numpy().view(like.dtype)
    return tensor.cpu().numpy()


def make_cache(problem):
    return folio.make_nhd_view(to_gpu(problem.k), to_gpu(problem.v))


def run(problem, batch, stream=None, bounds=None):
    """As problems.run, with everything that a layer needs on the GPU."""
    op = folio.prepare(CONTEXT, problem.config, folio.PrepareOptions(bounds=bounds))
    buffer = folio.make_plan_buffer(op)
    plan = folio.plan(op, batch, buffer, stream=stream)
    like, like_lse = problem.outputs()
    q, out, lse = to_gpu(problem.q), to_gpu(like), to_gpu(like_lse)
    table = folio.csr_table(to_gpu(problem.batch.page_ids), to_gpu(problem.batch.page_indptr))
    args = folio.AttentionArgs(q, out, [folio.SegmentArgs(make_cache(problem), table)], lse=lse,
                               sm_scale=problem.rules.sm_scale)
    workspace = folio.Workspace(torch.zeros(max(folio.workspace_size(op), 256), dtype=torch.uint8, device=DEVICE))
    folio.init_workspace(op, workspace, stream=stream)
    torch.cuda.synchronize()  # the inputs were copied on torch's stream
    folio.run(plan, args, workspace, stream=stream)
    torch.cuda.synchronize()
    assert folio.TensorView(out).data == out.data_ptr()
    return to_numpy(out, like), lse.cpu().numpy()


def device_batch(problem):
    cu_q, lengths = to_gpu(problem.batch.cu_q), to_gpu(problem.batch.lengths)
    return folio.BatchView(cu_q, [folio.KvSegment(lengths)], num_tokens=int(problem.batch.cu_q[-1]),
                           max_q_len=max(problem.batch.q_len), max_kv_len=max(problem.batch.kv_len))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("batch", problems.BATCHES)
def test_run_matches_numpy(dtype, batch):
    problem = problems.make(dtype, batch, dim_qk=64, dim_v=64)
    problems.assert_close(problem, *run(problem, problem.batch_view()), problem.exact())


@pytest.mark.parametrize("batch", problems.BATCHES)
def test_lengths_on_the_device(batch):
    problem = problems.make("bfloat16", batch, dim_qk=64, dim_v=64)
    bounds = folio.GraphBounds(max_requests=8, max_tokens=64, max_q_len=32, max_kv_len=64)
    view = device_batch(problem)
    assert view.where == folio.Where.kDevice
    problems.assert_close(problem, *run(problem, view, bounds=bounds), problem.exact())


def test_streams_are_taken_as_they_come():
    problem = problems.make("bfloat16", "decode", dim_qk=64, dim_v=64)
    stream = torch.cuda.Stream()
    exact = problem.exact()
    for given in (stream, stream.cuda_stream, None):
        problems.assert_close(problem, *run(problem, problem.batch_view(), stream=given), exact)


def test_cache_write():
    keys, values = (torch.randn(20, 2, 64, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    slots = torch.randperm(80, device=DEVICE)[:20]
    torch.cuda.synchronize()
    folio.write_kv_cache(CONTEXT, folio.CacheWriteArgs(keys, values, slots, folio.make_nhd_view(k, v)))
    torch.cuda.synchronize()
    assert torch.equal(k.view(80, 2, 64)[slots], keys) and torch.equal(v.view(80, 2, 64)[slots], values)


def test_arrays_of_the_other_device_are_refused():
    problem = problems.make("bfloat16", "decode", dim_qk=64, dim_v=64)
    op = folio.prepare(CONTEXT, problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    with pytest.raises(folio.InvalidArgument, match="q lies on the CPU; the context is CUDA device 0"):
        folio.run(plan, problem.args(*problem.outputs()), folio.Workspace(np.zeros(256, np.uint8)))
    host = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    host_plan = folio.plan(host, problem.batch_view(), folio.make_plan_buffer(host))
    outputs = problem.outputs()
    problem.q = to_gpu(problem.q)
    with pytest.raises(folio.InvalidArgument, match="q lies on CUDA device 0; the context is the CPU"):
        folio.run(host_plan, problem.args(*outputs), folio.Workspace(folio.workspace_size(host)))
