"""folio.flashinfer on a GPU: the same results as on a CPU's float64, and CUDA graphs whose plans follow."""

import functools
import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import folio  # noqa: E402: torch may be missing

try:
    folio.Context.cuda(0)
except folio.Error as error:
    pytest.skip(f"Folio has no GPU here: {error}", allow_module_level=True)

import flashinfer_reference as reference  # noqa: E402
from flashinfer_reference import Pages, assert_close, indptr, per_request, queries  # noqa: E402
from folio import flashinfer  # noqa: E402

GPU = torch.device("cuda", 0)
WORKSPACE = torch.empty(1 << 20, dtype=torch.uint8, device=GPU)
Q_LENS, KV_LENS = [3, 17, 1, 5], [200, 17, 90, 333]


def check(result, exact):
    parts = result if isinstance(result, tuple) else (result,)
    parts = tuple(part.cpu() for part in parts)
    assert_close(parts if len(parts) > 1 else parts[0], exact)


def pages_of(kv_lens=KV_LENS, page_size=16, **more):
    return Pages(kv_lens, page_size, dim=128, **more)


def on_gpu(*tensors):
    return tuple(tensor.to(GPU) for tensor in tensors)


RULES = [({}, {}), ({"window_left": 20}, {"window": 20}), ({"logits_soft_cap": 2.0}, {"cap": 2.0}),
         ({"pos_encoding_mode": "ALIBI"}, {"alibi": True}), ({"pos_encoding_mode": "ROPE_LLAMA"}, {"rope": {}})]


@pytest.mark.parametrize("given,rules", RULES)
@pytest.mark.parametrize("lengths_on", ["cpu", "cuda"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode(given, rules, lengths_on, page_size, dtype):
    pages = pages_of(page_size=page_size, dtype=dtype)
    q = queries(4, dim=128, dtype=dtype)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    tables = tuple(each.to(lengths_on) for each in (pages.indptr, pages.indices, pages.last))
    wrapper.plan(*tables, 8, 2, 128, page_size, q_data_type=dtype, **given)
    check(wrapper.run(q.to(GPU), pages.whole.to(GPU), return_lse=True), per_request(q, [1] * 4, pages, **rules))


def test_sinks_and_scales_on_the_gpu():
    pages = pages_of()
    q, sinks = queries(4, dim=128), torch.linspace(-1, 2, 8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*on_gpu(pages.indptr, pages.indices, pages.last), 8, 2, 128, 16)
    exact = per_request(q, [1] * 4, pages, sinks=sinks, scale=1.5 / math.sqrt(128), v_scale=2.0)
    scales = dict(q_scale=torch.tensor(3.0, device=GPU), k_scale=torch.tensor([0.5], device=GPU),
                  v_scale=torch.tensor(2.0, device=GPU))
    check(wrapper.run(q.to(GPU), pages.whole.to(GPU), sinks=sinks.to(GPU), return_lse=True, **scales), exact)


@pytest.mark.parametrize("given,rules", RULES)
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(given, rules, causal):
    pages = pages_of()
    q = queries(26, dim=128)
    exact = per_request(q, Q_LENS, pages, causal=causal, **rules)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*on_gpu(indptr(Q_LENS), pages.indptr, pages.indices, pages.last), 8, 2, 128, 16, causal=causal,
                 **given)
    check(wrapper.run(q.to(GPU), pages.whole.to(GPU), return_lse=True), exact)
    k, v = (torch.cat(each).to(GPU) for each in zip(*(pages.keys(r) for r in range(4))))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*on_gpu(indptr(Q_LENS), indptr(KV_LENS)), 8, 2, 128, causal=causal, **given)
    check(wrapper.run(q.to(GPU), k, v, return_lse=True), exact)
    one = flashinfer.single_prefill_with_kv_cache(q[3:20].to(GPU), *on_gpu(*pages.keys(1)), causal=causal,
                                                  return_lse=True, **given)
    check(one, reference.attend(q[3:20], *pages.keys(1), causal=causal, **rules))


def test_custom_masks():
    pages = pages_of()
    q = queries(26, dim=128)
    masks = [torch.rand(a, b) < 0.6 for a, b in zip(Q_LENS, KV_LENS)]
    flat = torch.cat([mask.reshape(-1) for mask in masks])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    tables = on_gpu(indptr(Q_LENS), pages.indptr, pages.indices, pages.last)
    wrapper.plan(*tables, 8, 2, 128, 16, custom_mask=flat.to(GPU))
    check(wrapper.run(q.to(GPU), pages.whole.to(GPU), return_lse=True), per_request(q, Q_LENS, pages, masks=masks))


def images():
    """Ranges that contain their queries, or none, of the batch of Q_LENS and KV_LENS."""
    ranges = torch.full((26, 2), -1, dtype=torch.int32)
    ranges[0] = torch.tensor([150, 199])
    ranges[3:8] = torch.tensor([0, 4])
    ranges[10:15] = torch.tensor([7, 11])
    return ranges


def visible(ranges, causal_window=-1, range_window=-1, q_lens=Q_LENS, kv_lens=KV_LENS):
    """FlashInfer's definition, one matrix [queries, keys] a request."""
    seen, row = [], 0
    for q_len, kv_len in zip(q_lens, kv_lens):
        p, key = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)[None]
        first, last = ranges[row:row + q_len].long().split(1, 1)
        causal = (key <= p) & (p - key <= causal_window if causal_window >= 0 else True)
        seen.append(causal | ((first <= key) & (key <= last) & (p - key < range_window if range_window > 0 else True)))
        row += q_len
    return seen


def make_ranges(*buffers):
    return flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(
        WORKSPACE, "NHD", bool(buffers), *buffers, q_data_type=torch.float16, kv_data_type=torch.float16)


@pytest.mark.parametrize("lengths_on", ["cpu", "cuda"])
@pytest.mark.parametrize("windows", [(-1, -1), (20, -1), (20, 7), (0, 60)])
def test_ranges(windows, lengths_on):
    wrapper = make_ranges()
    for seed, (q_lens, kv_lens) in enumerate(((Q_LENS, KV_LENS), ([1, 20, 2, 3], [5, 400, 3, 20]))):
        pages, q, ranges = pages_of(kv_lens, seed=seed), queries(26, dim=128), images()
        if seed:
            ranges = torch.full_like(ranges, -1)
            ranges[8:13] = torch.tensor([380, 391])  # positions 387 to 391
        tables = (each.to(lengths_on) for each in (indptr(q_lens), pages.indptr, pages.indices, pages.last))
        wrapper.plan(*tables, 8, 2, 128, 16)
        check(wrapper.run(q.to(GPU), pages.whole.to(GPU), ranges.to(GPU), *windows, return_lse=True),
              per_request(q, q_lens, pages, masks=visible(ranges, *windows, q_lens, kv_lens)))


def test_ranges_apart_from_their_queries_are_told():
    """Keys between a query and its range: found without waiting, raised by the next call, once."""
    pages, q = pages_of(), queries(26, dim=128)
    wrapper = make_ranges()
    wrapper.plan(*on_gpu(indptr(Q_LENS), pages.indptr, pages.indices, pages.last), 8, 2, 128, 16)
    ranges, cache = images().to(GPU), pages.whole.to(GPU)
    apart = ranges.clone()
    apart[4] = torch.tensor([9, 12])  # of the query at position 1
    wrapper.run(q.to(GPU), cache, ranges)
    wrapper.run(q.to(GPU), cache, apart)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="bidirectional_ranges of an earlier run had a range apart from its query"):
        wrapper.run(q.to(GPU), cache, ranges)
    check(wrapper.run(q.to(GPU), cache, ranges), per_request(q, Q_LENS, pages, masks=visible(images())))


def captured(run):
    """run() in a graph, after one run outside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 8)])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_graph_of_decodes(q_len, sinks):
    buffers = [torch.zeros(n, dtype=torch.int32, device=GPU) for n in (5, 64, 4)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, True, *buffers)
    first = pages_of([16, 3, 5, 9])
    cache = torch.zeros(66, 2, 16, 2, 128, dtype=torch.float16, device=GPU)
    q = torch.zeros(4 * q_len, 8, 128, dtype=torch.float16, device=GPU)
    device_sinks = None if sinks is None else sinks.to(GPU)

    def plan(pages):
        wrapper.plan(*on_gpu(pages.indptr, pages.indices, pages.last), 8, 2, 128, 16, q_len_per_req=q_len)

    plan(first)
    graph, (out, lse) = captured(lambda: wrapper.run(q, cache, return_lse=True, sinks=device_sinks))
    for seed, lens in enumerate(([16, 3, 5, 9], KV_LENS, [3, 3, 900, 50], [64, 64, 64, 64])):
        pages = pages_of(lens, seed=seed)
        plan(pages)
        cache[:len(pages.k)] = pages.whole.to(GPU)
        q.copy_(queries(4 * q_len, dim=128, seed=seed))
        graph.replay()
        check((out, lse), per_request(q.cpu(), [q_len] * 4, pages, causal=True, sinks=sinks))


@pytest.mark.parametrize("masked", [False, True])
def test_a_graph_of_prefills(masked):
    buffers = [torch.zeros(n, dtype=torch.int32, device=GPU) for n in (5, 5, 64, 4)]
    mask_buffer, offsets = torch.zeros(1 << 16, dtype=torch.uint8, device=GPU), torch.zeros(5, dtype=torch.int32,
                                                                                            device=GPU)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers, mask_buffer, offsets)
    cache = torch.zeros(66, 2, 16, 2, 128, dtype=torch.float16, device=GPU)
    q = torch.zeros(26, 8, 128, dtype=torch.float16, device=GPU)

    def plan(q_lens, pages):
        masks = [torch.rand(a, b) < 0.6 for a, b in zip(q_lens, pages.kv_lens)]
        given = {"custom_mask": torch.cat([mask.reshape(-1) for mask in masks]).to(GPU)} if masked else {"causal": True}
        wrapper.plan(*on_gpu(indptr(q_lens), pages.indptr, pages.indices, pages.last), 8, 2, 128, 16, **given)
        return {"masks": masks} if masked else {"causal": True}

    plan(Q_LENS, pages_of())
    graph, (out, lse) = captured(lambda: wrapper.run(q, cache, return_lse=True))
    for seed, (q_lens,
               kv_lens) in enumerate(((Q_LENS, KV_LENS), ([1, 1, 1, 1], [5, 400, 3, 20]), ([20, 2, 2, 2], [30] * 4))):
        pages = pages_of(kv_lens, seed=seed)
        rules = plan(q_lens, pages)
        cache[:len(pages.k)] = pages.whole.to(GPU)
        q.copy_(queries(26, dim=128, seed=seed))
        graph.replay()
        rows = sum(q_lens)
        check((out[:rows], lse[:rows]), per_request(q.cpu()[:rows], q_lens, pages, **rules))


def test_a_graph_of_ranges():
    """The plan is inside: replays read the ranges of their moment and, after plan, its lengths."""
    buffers = [torch.zeros(n, dtype=torch.int32, device=GPU) for n in (5, 5, 64, 4)]
    wrapper = make_ranges(*buffers)
    cache = torch.zeros(66, 2, 16, 2, 128, dtype=torch.float16, device=GPU)
    q = torch.zeros(26, 8, 128, dtype=torch.float16, device=GPU)
    ranges = torch.full((26, 2), -1, dtype=torch.int32, device=GPU)

    def plan(q_lens, pages):
        wrapper.plan(*on_gpu(indptr(q_lens), pages.indptr, pages.indices, pages.last), 8, 2, 128, 16)

    plan(Q_LENS, pages_of())
    graph, results = captured(lambda: [wrapper.run(q, cache, ranges, window, return_lse=True) for window in (-1, 20)])
    empty, other = torch.full((26, 2), -1, dtype=torch.int32), torch.full((26, 2), -1, dtype=torch.int32)
    other[:20] = torch.tensor([2, 29])  # positions 10 to 29
    for seed, (q_lens, kv_lens, now) in enumerate(((Q_LENS, KV_LENS, empty), (Q_LENS, KV_LENS, images()),
                                                   ([1, 1, 1, 1], [5, 400, 3, 20], empty),
                                                   ([20, 2, 2, 2], [30] * 4, other))):
        pages = pages_of(kv_lens, seed=seed)
        plan(q_lens, pages)
        cache[:len(pages.k)] = pages.whole.to(GPU)
        q.copy_(queries(26, dim=128, seed=seed))
        ranges.copy_(now)
        graph.replay()
        rows = sum(q_lens)
        for (out, lse), window in zip(results, (-1, 20)):
            check((out[:rows], lse[:rows]),
                  per_request(q.cpu()[:rows], q_lens, pages, masks=visible(now[:rows], window, -1, q_lens, kv_lens)))
    ranges[19] = torch.tensor([25, 26])  # the query at position 29 still sees them
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="had a range apart from its query"):  # but not under the window of 20
        ranges[19] = torch.tensor([2, 4])
        graph.replay()
        torch.cuda.synchronize()
        plan(Q_LENS, pages_of())


def test_a_graph_of_dense_tables():
    """The plan is inside: lengths and tables change between replays, and Python is not called."""
    table = torch.zeros(4, 64, dtype=torch.int32, device=GPU)
    lens = torch.ones(4, dtype=torch.int32, device=GPU)
    cache = torch.zeros(66, 2, 2, 16, 128, dtype=torch.float16, device=GPU)
    q = torch.zeros(4, 8, 128, dtype=torch.float16, device=GPU)
    graph, out = captured(lambda: flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, WORKSPACE, table, lens, 1024,
                                                                               0.1))
    for seed, kv_lens in enumerate((KV_LENS, [1, 900, 5, 16])):
        pages = pages_of(kv_lens, layout="HND", seed=seed)
        cache[:len(pages.k)] = pages.whole.to(GPU)
        table[:, :pages.table.shape[1]] = pages.table.to(GPU)
        lens.copy_(torch.tensor(kv_lens))
        q.copy_(queries(4, dim=128, seed=seed))
        graph.replay()
        check(out, per_request(q.cpu(), [1] * 4, pages, scale=0.1))


def test_a_graph_of_one_sequence():
    q, k, v = on_gpu(queries(1, dim=128)[0], queries(50, heads=2, dim=128, seed=2),
                     queries(50, heads=2, dim=128, seed=3))
    graph, out = captured(lambda: flashinfer.single_decode_with_kv_cache(q, k, v))
    q.copy_(queries(1, dim=128, seed=9)[0])
    graph.replay()
    check(out, tuple(each[0] for each in reference.attend(q.cpu()[None], k.cpu(), v.cpu())))


def test_masks_of_drafts():
    """Planned from lengths that are read back, and so in no graph."""
    pages, q = pages_of(), queries(12, dim=128)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    words = torch.zeros(4, 3, 2, dtype=torch.int32)
    words[:, :, 0] = (tree * torch.tensor([1, 2, 4])).sum(1)
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    device = on_gpu(q, pages.whole, WORKSPACE, pages.table, lens)
    call = functools.partial(flashinfer.trtllm_batch_decode_with_kv_cache, *device, 333, 0.1, q_len_per_req=3,
                             kv_layout="NHD", mask=words.to(torch.uint16).to(GPU))
    masks = [torch.cat((torch.ones(3, n - 3, dtype=torch.bool), tree), 1) for n in KV_LENS]
    check(call(), per_request(q, [3] * 4, pages, masks=masks, scale=0.1))
    with pytest.raises(NotImplementedError, match="mask is given inside of a CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    torch.cuda.synchronize()


def test_drafts_of_mla_without_their_largest_number():
    pages = Pages(KV_LENS, 16, kv_heads=1, dim=576, dtype=torch.bfloat16)
    pages.v = pages.k[..., :512]
    q = queries(26, heads=16, dim=576, dtype=torch.bfloat16)
    call = on_gpu(q, pages.k[:, :, 0].clone(), WORKSPACE)
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        *call, 128, 512, 64, *on_gpu(pages.table, torch.tensor(KV_LENS)), 333, bmm1_scale=0.05,
        cum_seq_lens_q=indptr(Q_LENS).to(GPU))
    check(out, per_request(q, Q_LENS, pages, causal=True, scale=0.05))


def test_what_a_capture_refuses():
    pages = pages_of()
    q, k = on_gpu(queries(7, dim=128), queries(61, heads=2, dim=128))
    with pytest.raises(ValueError, match="make it once with the same shapes before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            flashinfer.single_prefill_with_kv_cache(q, k, k)
    torch.cuda.synchronize()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*on_gpu(pages.indptr, pages.indices, pages.last), 8, 2, 128, 16)
    cache, sinks = on_gpu(pages.whole, torch.zeros(8))
    with pytest.raises(ValueError, match="run it once with the same kinds of arguments"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            wrapper.run(q[:4], cache, sinks=sinks)
    torch.cuda.synchronize()


def test_nothing_waits():
    """fast_decode_plan with offsets on the host, run, appends, dense tables and ranges do not synchronise."""
    pages = pages_of(page_size=1)
    q = queries(4, dim=128).to(GPU)
    tables = on_gpu(pages.indptr, pages.indices, pages.last)
    cache, table, lens = on_gpu(pages.whole, pages.table, torch.tensor(KV_LENS, dtype=torch.int32))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    rows, places = flashinfer.get_batch_indices_positions(indptr([1] * 4).to(GPU), lens, 4)
    keys = queries(4, heads=2, dim=128).to(GPU)
    host = pages.indptr.clone()
    images_of, ranges = make_ranges(), torch.tensor([[0, 200]] * 4, dtype=torch.int32, device=GPU)

    def step():
        images_of.plan(indptr([1] * 4), pages.indptr, tables[1], pages.last, 8, 2, 128, 1)
        images_of.run(q, cache, ranges)
        flashinfer.fast_decode_plan(wrapper, *tables, 8, 2, 128, 1, global_override_indptr_cpu=host)
        wrapper.run(q, cache, return_lse=True, k_scale=torch.ones(1, device=GPU))
        flashinfer.get_batch_indices_positions(tables[0], lens, 4)
        flashinfer.append_paged_kv_cache(keys, keys, rows, places, cache, tables[1], tables[0], tables[2])
        flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, WORKSPACE, table, lens, 512, 0.1, kv_layout="NHD")

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("apart", [False, True])
def test_mla(apart):
    pages = Pages(KV_LENS, 16, kv_heads=1, dim=576, dtype=torch.bfloat16)
    pages.v = pages.k[..., :512]
    packed = pages.k[:, :, 0].clone().to(GPU)
    q = queries(26, heads=16, dim=576, dtype=torch.bfloat16)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    wrapper.plan(*on_gpu(indptr(Q_LENS), pages.indptr, pages.indices, torch.tensor(KV_LENS)), 16, 512, 64, 16, True,
                 1 / math.sqrt(192), torch.bfloat16, torch.bfloat16)
    halves = packed.split((512, 64), -1)
    halves = tuple(half.clone() for half in halves) if apart else halves
    result = wrapper.run(*q.to(GPU).split((512, 64), -1), *halves, return_lse=True)
    check(result, per_request(q, Q_LENS, pages, causal=True, scale=1 / math.sqrt(192)))


def test_cascades():
    pages = pages_of([64, 5, 9, 1])
    q_lens = [2, 3, 1]
    q = queries(6, dim=128)
    arrays = [[], [], [], []]
    for bounds, rows in (([0, 6], [0]), ([0, 2, 5, 6], [1, 2, 3])):
        counts = [int(pages.indptr[r + 1] - pages.indptr[r]) for r in rows]
        arrays[0].append(torch.tensor(bounds, dtype=torch.int32))
        arrays[1].append(indptr(counts))
        arrays[2].append(torch.cat([pages.indices[pages.indptr[r]:pages.indptr[r + 1]] for r in rows]))
        arrays[3].append(pages.last[rows])
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    wrapper.plan(*[list(on_gpu(*array)) for array in arrays], 8, 2, 128, 16, causal=False)
    parts, row = [], 0
    for r, q_len in enumerate(q_lens):
        keys = (torch.cat(each) for each in zip(pages.keys(0), pages.keys(r + 1)))
        parts.append(reference.attend(q[row:row + q_len], *keys))
        row += q_len
    check(wrapper.run(q.to(GPU), pages.whole.to(GPU)), tuple(torch.cat(each) for each in zip(*parts)))


def test_merges_rope_and_bits():
    q, k, v = queries(5, dim=128), queries(30, heads=2, dim=128, seed=2), queries(30, heads=2, dim=128, seed=3)
    parts = [reference.attend(q, k[a:b], v[a:b]) for a, b in ((0, 7), (7, 30))]
    states = [on_gpu(out.half(), lse.float()) for out, lse, _ in parts]
    check(flashinfer.merge_state(*states[0], *states[1]), reference.attend(q, k, v))
    stacked = tuple(torch.stack(each, 1) for each in zip(*states))
    check(flashinfer.merge_states(*stacked), reference.attend(q, k, v))
    positions = torch.arange(5) * 100
    turned = flashinfer.apply_rope_pos_ids(*on_gpu(q, k[:5]), positions.to(GPU))
    for got, x in zip(turned, (q, k[:5])):
        assert torch.allclose(got.cpu().double(), reference.turned(x, positions), atol=4e-3)
    bits = torch.rand(77) < 0.5
    assert torch.equal(flashinfer.packbits(bits.to(GPU), "little").cpu(), flashinfer.packbits(bits, "little"))


def test_sparse_blocks():
    offsets, blocks = torch.tensor([0, 2, 2, 4], dtype=torch.int32), torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    q, k, v = queries(24, dim=128), queries(48, heads=2, dim=128, seed=2), queries(48, heads=2, dim=128, seed=3)
    mask = torch.zeros(24, 48, dtype=torch.bool)
    for row, column in ((0, 2), (0, 0), (2, 1), (2, 2)):
        mask[row * 8:row * 8 + 8, column * 16:column * 16 + 16] = True
    wrapper = flashinfer.BlockSparseAttentionWrapper(WORKSPACE)
    wrapper.plan(*on_gpu(offsets, blocks), 24, 48, 8, 16, 8, 2, 128)
    check(wrapper.run(*on_gpu(q, k, v), return_lse=True), reference.attend(q, k, v, mask=mask))
