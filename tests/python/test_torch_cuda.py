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
    assert view.where == folio.Where.DEVICE
    problems.assert_close(problem, *run(problem, view, bounds=bounds), problem.exact())


def test_streams_are_taken_as_they_come():
    problem = problems.make("bfloat16", "decode", dim_qk=64, dim_v=64)
    stream = torch.cuda.Stream()
    exact = problem.exact()
    for given in (stream, stream.cuda_stream, None):
        problems.assert_close(problem, *run(problem, problem.batch_view(), stream=given), exact)


def prepared(problem, bounds=None):
    """(plan from a batch, arguments, q, out, lse, workspace) with everything of a layer on the GPU."""
    op = folio.prepare(CONTEXT, problem.config, folio.PrepareOptions(bounds=bounds))
    like, like_lse = problem.outputs()
    q, out, lse = to_gpu(problem.q), to_gpu(like), to_gpu(like_lse)
    table = folio.csr_table(to_gpu(problem.batch.page_ids), to_gpu(problem.batch.page_indptr))
    args = folio.AttentionArgs(q, out, [folio.SegmentArgs(make_cache(problem), table)], lse=lse,
                               sm_scale=problem.rules.sm_scale)
    workspace = folio.Workspace(torch.zeros(max(folio.workspace_size(op), 256), dtype=torch.uint8, device=DEVICE))
    folio.init_workspace(op, workspace)
    torch.cuda.synchronize()
    return op, args, (q, out, lse), workspace


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_stream_left_out_is_torchs_current_one(where):
    """q, and on the device the lengths, are right only after the side stream has slept."""
    problem = problems.make("bfloat16", "mixed", dim_qk=64, dim_v=64)
    bounds = folio.GraphBounds(max_requests=8, max_tokens=64, max_q_len=32, max_kv_len=64)
    op, args, (q, out, lse), workspace = prepared(problem, bounds)
    right, lengths = q.clone(), to_gpu(problem.batch.lengths)
    late = torch.zeros_like(lengths)
    q.zero_()
    batch = problem.batch_view()
    if where == "device":
        batch = folio.BatchView(to_gpu(problem.batch.cu_q), [folio.KvSegment(late)],
                                num_tokens=int(problem.batch.cu_q[-1]), max_q_len=max(problem.batch.q_len),
                                max_kv_len=max(problem.batch.kv_len))
    buffer = folio.make_plan_buffer(op)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        assert folio.current_stream([q]) == side.cuda_stream
        assert folio.current_stream() == side.cuda_stream  # of the process
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        q.copy_(right)
        late.copy_(lengths)
        folio.run(folio.plan(op, batch, buffer), args, workspace)
        result, result_lse = out.clone(), lse.clone()
    side.synchronize()
    problems.assert_close(problem, to_numpy(result, problem.outputs()[0]), result_lse.cpu().numpy(), problem.exact())


def test_a_graph_of_torchs_captures_plan_write_and_run():
    problem = problems.make("bfloat16", "decode", dim_qk=64, dim_v=64)
    bounds = folio.GraphBounds(max_requests=8, max_tokens=64, max_q_len=32, max_kv_len=64)
    op, args, (q, out, lse), workspace = prepared(problem, bounds)
    batch, buffer = device_batch(problem), folio.make_plan_buffer(op)
    folio.run(folio.plan(op, batch, buffer), args, workspace)  # warm
    torch.cuda.synchronize()
    new = torch.randn(1, 2, 64, device=DEVICE).to(torch.bfloat16)
    cache = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    write = folio.CacheWriteArgs(new, new, torch.tensor([5], device=DEVICE), folio.make_nhd_view(cache, cache.clone()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        folio.write_kv_cache(CONTEXT, write)
        folio.run(folio.plan(op, batch, buffer), args, workspace)
    like, _ = problem.outputs()
    for _ in range(2):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        cache.zero_()
        graph.replay()
        torch.cuda.synchronize()
        problems.assert_close(problem, to_numpy(out, like), lse.cpu().numpy(), problem.exact())
        assert torch.equal(cache[0, 5], new[0])


def test_merges_follow_the_current_stream():
    a, b = (torch.zeros(64, 8, 64, device=DEVICE) for _ in range(2))
    lse, out = torch.zeros(64, 8, device=DEVICE), torch.empty(64, 8, 64, device=DEVICE)
    states = torch.zeros(64, 2, 8, 64, device=DEVICE)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        a.fill_(1)
        b.fill_(3)
        folio.merge_state(CONTEXT, folio.AttentionStateView(a, lse), folio.AttentionStateView(b, lse), out)
        first = out.clone()
        states.fill_(5)
        view = folio.AttentionStatesView(states, torch.zeros(64, 2, 8, device=DEVICE))
        folio.merge_states(CONTEXT, view, out)
        second = out.clone()
    side.synchronize()
    assert torch.all(first == 2) and torch.all(second == 5)


def test_arrays_of_cupy_have_its_stream():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    side = torch.cuda.Stream()
    array, tensor = cupy.zeros((2, 3), cupy.float32), torch.zeros(2, 3, device=DEVICE)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert folio.current_stream([array]) == stream.ptr
        with torch.cuda.stream(side), pytest.raises(folio.InvalidArgument, match="give the one that is meant"):
            folio.current_stream([array, tensor])
    with torch.cuda.stream(side):
        assert folio.current_stream([array]) == cupy.cuda.get_current_stream(0).ptr


def test_a_request_beyond_the_bounds_is_reported():
    problem = problems.make("bfloat16", "decode", dim_qk=64, dim_v=64)
    bounds = folio.GraphBounds(max_requests=8, max_tokens=64, max_q_len=32, max_kv_len=40)
    op, args, (_, out, _), workspace = prepared(problem, bounds)
    lengths, buffer = to_gpu(problem.batch.lengths), folio.make_plan_buffer(op)
    batch = folio.BatchView(to_gpu(problem.batch.cu_q), [folio.KvSegment(lengths)], num_tokens=3, max_q_len=1,
                            max_kv_len=40)
    folio.check_plans(buffer)
    lengths[1] = 41
    folio.run(folio.plan(op, batch, buffer), args, workspace)
    torch.cuda.synchronize()
    assert not out[1].any()
    with pytest.raises(folio.InvalidArgument, match="request 1"):
        folio.check_plans(buffer)
    folio.check_plans(buffer)  # said once


def test_page_ids_are_checked_where_the_context_asks_for_it():
    """Behind the cache lies a copy of a page of its own: a run without the check would be right, and say nothing."""
    problem = problems.make("bfloat16", "decode", dim_qk=64, dim_v=64)
    exact, num_pages, page = problem.exact(), len(problem.k), problem.batch.pages[1][0]
    k, v = (torch.cat([to_gpu(pages), to_gpu(pages[page:page + 1])]) for pages in (problem.k, problem.v))
    problem.batch.pages[1][0] = num_pages
    table = folio.csr_table(to_gpu(problem.batch.page_ids), to_gpu(problem.batch.page_indptr))
    op = folio.prepare(folio.Context.cuda(0, validate_tables=True), problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    like, like_lse = problem.outputs()
    q, out, lse = to_gpu(problem.q), to_gpu(like), to_gpu(like_lse)
    workspace = folio.Workspace(torch.zeros(max(folio.workspace_size(op), 256), dtype=torch.uint8, device=DEVICE))
    folio.init_workspace(op, workspace)

    def run_over(count):
        segment = folio.SegmentArgs(folio.make_nhd_view(k[:count], v[:count]), table)
        folio.run(plan, folio.AttentionArgs(q, out, [segment], lse=lse, sm_scale=problem.rules.sm_scale), workspace)
        torch.cuda.synchronize()

    with pytest.raises(folio.InvalidArgument, match=f"request 1: .* is page {num_pages}; the cache has {num_pages} "):
        run_over(num_pages)
    assert out.isnan().all() and lse.isnan().all()
    run_over(num_pages + 1)
    problems.assert_close(problem, to_numpy(out, like), lse.cpu().numpy(), exact)


def test_sizes_of_ragged_offsets_are_checked():
    problem = problems.make("bfloat16", "prefill", dim_qk=64, dim_v=64)
    op = folio.prepare(CONTEXT, problem.config)
    segment = folio.KvSegment(problem.batch.lengths, source=folio.KvSource.RAGGED)
    plan = folio.plan(op, folio.BatchView(problem.batch.cu_q, [segment]), folio.make_plan_buffer(op))
    q, out = to_gpu(problem.q), to_gpu(problem.outputs()[0])
    keys = torch.zeros(23, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    ragged = folio.RaggedKvView(keys, keys.clone(), torch.tensor([0, 7], dtype=torch.int32, device=DEVICE))
    workspace = folio.Workspace(torch.zeros(folio.workspace_size(op) + 256, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(folio.InvalidArgument, match="has 2 entries; the plan's 2 rows need one more"):
        folio.run(plan, folio.AttentionArgs(q, out, [folio.SegmentArgs(ragged=ragged)]), workspace)


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


def test_int64_tensors_are_converted_on_the_current_stream():
    problem = problems.make("bfloat16", "mixed", dim_qk=64, dim_v=64)
    bounds = folio.GraphBounds(max_requests=8, max_tokens=64, max_q_len=32, max_kv_len=64)
    op, _, (q, out, lse), workspace = prepared(problem, bounds)
    side = torch.cuda.Stream()
    late = [torch.zeros(len(array), dtype=torch.int64, device=DEVICE) for array in (
        problem.batch.cu_q, problem.batch.lengths, problem.batch.page_ids, problem.batch.page_indptr)]
    right = [to_gpu(array).long() for array in (
        problem.batch.cu_q, problem.batch.lengths, problem.batch.page_ids, problem.batch.page_indptr)]
    buffer, cache = folio.make_plan_buffer(op), make_cache(problem)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for here, there in zip(late, right):
            here.copy_(there)
        cu_q, lengths, ids, indptr = late
        batch = folio.BatchView(cu_q, [folio.KvSegment(lengths)], num_tokens=int(problem.batch.cu_q[-1]),
                                max_q_len=max(problem.batch.q_len), max_kv_len=max(problem.batch.kv_len))
        args = folio.AttentionArgs(q, out, [folio.SegmentArgs(cache, folio.csr_table(ids, indptr))], lse=lse,
                                   sm_scale=problem.rules.sm_scale)
        folio.run(folio.plan(op, batch, buffer), args, workspace)
    side.synchronize()
    problems.assert_close(problem, to_numpy(out, problem.outputs()[0]), lse.cpu().numpy(), problem.exact())


def test_bool_masks_are_packed_on_the_gpu():
    random = torch.Generator(device=DEVICE).manual_seed(1)
    masks = [torch.rand(shape, generator=random, device=DEVICE) < 0.5 for shape in ((3, 9), (0, 4), (2, 8), (5, 3))]
    packed = folio.pack_custom_mask(masks)
    assert packed.device == DEVICE and packed.dtype == torch.uint8
    wanted = np.concatenate([np.packbits(mask.cpu().numpy(), axis=None, bitorder="little") for mask in masks])
    assert np.array_equal(packed.cpu().numpy(), wanted)


def test_the_token_pools_tables_and_drafts_on_a_gpu():
    token_pool = pytest.importorskip("folio.backends.token_pool")
    faults = token_pool.DeviceFaults(CONTEXT)
    pool = token_pool.DeviceReqToTokenPool(3, 8, CONTEXT)
    rows = pool.alloc(2)
    pool.write(int(rows[0]), 0, [5, 6, 7])
    on_gpu = lambda values, dtype=torch.int32: torch.tensor(values, dtype=dtype, device=DEVICE)
    pool.write_batch(on_gpu([1, 2, 0], torch.int64), on_gpu([8, 30, 0], torch.int64), ends=on_gpu([4, 1, 1]),
                     faults=faults)
    entries = torch.from_dlpack(pool.entries)
    assert entries.tolist() == [[0] * 8, [5, 6, 7, 8, 0, 0, 0, 0], [30] + [0] * 7, [0] * 8]
    entries[2, 1] = 31  # what an engine writes itself counts
    branches = token_pool.DraftBranches(topk=1, num_steps=1)
    indptr, indices = on_gpu([[0] * 3]), on_gpu([[0] * 8])
    token_pool.generate_draft_decode_kv_indices(pool.entries, on_gpu([1, 2]), on_gpu([3, 1]), branches, 1,
                                                kv_indptr=indptr, kv_indices=indices, faults=faults)
    assert indptr.tolist() == [[0, 4, 6]] and indices.tolist() == [[5, 6, 7, 8, 30, 31, 0, 0]]
    parents, positions = on_gpu([[-1, 0, 0, 1]]), on_gpu([[0] * 4])
    token_pool.draft_tree_positions(parents, on_gpu([9]), positions=positions, faults=faults)
    assert positions.tolist() == [[9, 10, 10, 11]]
    mask = on_gpu([0] * 16, torch.uint8)
    token_pool.fill_tree_mask("qlen_only", parents, on_gpu([9]), 4, mask=mask, faults=faults)
    assert mask.reshape(4, 4).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    inputs = token_pool.GraphInputs(4, context=CONTEXT)
    for where in (on_gpu, lambda values, dtype=None: values):
        batch = token_pool.ForwardBatch(forward_mode="decode", req_pool_indices=where([1, 2]), seq_lens=where([4, 2]),
                                        out_cache_loc=where([8, 31], torch.int64))
        padded = inputs.pad(batch, 3)
        assert torch.from_dlpack(padded.seq_lens).tolist() == [4, 2, 1]
        assert torch.from_dlpack(padded.out_cache_loc).tolist() == [8, 31, 0]
        assert padded.seq_lens_sum == (-1 if where is on_gpu else 7)
    torch.cuda.synchronize()
    faults.check()
    with pytest.raises(folio.InvalidArgument, match="faults is None"):
        pool.write_batch(on_gpu([1]), on_gpu([8]), ends=on_gpu([1]))
    pool.write_batch(on_gpu([7]), on_gpu([8]), ends=on_gpu([1]), faults=faults)
    torch.cuda.synchronize()
    with pytest.raises(folio.InvalidArgument, match="request 0 has row 7"):
        faults.check()
