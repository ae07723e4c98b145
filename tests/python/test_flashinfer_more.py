"""folio.flashinfer's cascades, MLA, BatchAttention, POD, sparse blocks and dense tables, beside float64."""

import math

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import flashinfer_reference as reference  # noqa: E402: torch may be missing
from flashinfer_reference import CPU, Pages, assert_close, indptr, per_request, queries  # noqa: E402
from folio import flashinfer  # noqa: E402

Q_LENS, KV_LENS = [3, 17, 1, 5], [20, 17, 9, 33]


def together(parts):
    return tuple(torch.cat(each) for each in zip(*parts))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [-1, 25])
@pytest.mark.parametrize("graphs", [False, True])
def test_cascades(causal, window, graphs):
    """Two requests share 32 keys, then each pair of its own 16; three levels in one cache."""
    pages = Pages([32, 16, 16, 5, 9, 1])  # one of level 0, two of level 1, three of level 2
    q_lens = [2, 3, 1]
    q = queries(6)
    levels = [([0, 6], [0]), ([0, 2, 6], [1, 2]), ([0, 2, 5, 6], [3, 4, 5])]
    chains = [[0, 1, 3], [0, 2, 4], [0, 2, 5]]
    arrays = [[], [], [], []]
    for bounds, rows in levels:
        counts = [int(pages.indptr[r + 1] - pages.indptr[r]) for r in rows]
        arrays[0].append(torch.tensor(bounds, dtype=torch.int32))
        arrays[1].append(indptr(counts))
        arrays[2].append(torch.cat([pages.indices[pages.indptr[r]:pages.indptr[r + 1]] for r in rows]))
        arrays[3].append(pages.last[rows])
    buffers = [[torch.zeros(len(x) + 3 * (i == 2), dtype=torch.int32) for x in array] for i, array in enumerate(arrays)]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, CPU, "NHD", graphs, *(buffers if graphs else []))
    wrapper.plan(*arrays, 8, 2, 64, 16, causal=causal, window_left=window)
    parts, row = [], 0
    for q_len, chain in zip(q_lens, chains):
        k, v = together(pages.keys(r) for r in chain)
        own = pages.kv_lens[chain[-1]]
        mask = None
        if causal:  # among the last level's keys
            keys = torch.arange(len(k))
            mask = keys[None] <= torch.arange(q_len)[:, None] + len(k) - q_len
            mask[:, :len(k) - own] = True
        parts.append(reference.attend(q[row:row + q_len], k, v, mask=mask, window=window))
        row += q_len
    assert_close(wrapper.run(q, pages.whole), together(parts))
    assert wrapper.is_cuda_graph_enabled is graphs
    with pytest.raises(ValueError, match=r"paged_kv_indices_arr\[2\] has 2 entries; its indptr ends at 3"):
        wrapper.plan(*arrays[:2], [*arrays[2][:2], arrays[2][2][:2]], arrays[3], 8, 2, 64, 16)
    if graphs:
        with pytest.raises(ValueError, match=r"qo_indptr_arr\[0\] has 3 entries, its buffer 2"):
            wrapper.plan([arrays[0][1]] * 2 + arrays[0][2:], [arrays[1][1]] * 2 + arrays[1][2:],
                         [arrays[2][1]] * 2 + arrays[2][2:], [arrays[3][1]] * 2 + arrays[3][2:], 8, 2, 64, 16)
        with pytest.raises(ValueError, match="there are buffers of 3 levels; num_levels is 2"):
            flashinfer.MultiLevelCascadeAttentionWrapper(2, CPU, "NHD", True, *buffers)
    with pytest.raises(ValueError, match="within a request of the last level"):
        arrays[0][1] = torch.tensor([0, 4, 6], dtype=torch.int32)
        wrapper.plan(*arrays, 8, 2, 64, 16)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_shared_prefixes(layout):
    pages = Pages(KV_LENS, layout=layout)
    k, v = queries(40, heads=2, seed=7), queries(40, heads=2, seed=8)
    shared = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(CPU, layout)
    wrapper.begin_forward(pages.indptr, pages.indices, pages.last, 8, 2, 64, 16)
    q = queries(26)
    parts = [reference.attend(q[r:r + 1], *(torch.cat(x) for x in zip((k, v), pages.keys(r)))) for r in range(4)]
    assert_close(wrapper.forward(q[:4], *shared, pages.whole), together(parts))
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(CPU, layout)
    wrapper.begin_forward(indptr(Q_LENS), pages.indptr, pages.indices, pages.last, 8, 2, 64, 16)
    parts, row = [], 0
    for r, q_len in enumerate(Q_LENS):
        parts.append(reference.attend(q[row:row + q_len], *(torch.cat(x) for x in zip((k, v), pages.keys(r))),
                                      causal=True, scale=0.2))
        row += q_len
    assert_close(wrapper.forward(q, *shared, pages.whole, causal=True, sm_scale=0.2), together(parts))
    shorter = tuple(x[:7] if layout == "NHD" else x[:, :7].contiguous() for x in shared)
    once = wrapper.forward(q, *shorter, pages.whole)
    parts, row = [], 0
    for r, q_len in enumerate(Q_LENS):
        parts.append(reference.attend(q[row:row + q_len], *(torch.cat(x) for x in zip((k[:7], v[:7]), pages.keys(r)))))
        row += q_len
    assert_close(once, together(parts))
    with pytest.raises(NotImplementedError, match="rope_scale is given"):
        wrapper.forward(q, *shared, pages.whole, rope_scale=2.0)


def mla_problem(q_lens, kv_lens, page_size=16, dtype=torch.float32):
    pages = Pages(kv_lens, page_size, kv_heads=1, dim=576, dtype=dtype)
    pages.v = pages.k[..., :512]
    packed = pages.k[:, :, 0].clone()
    q = queries(sum(q_lens), heads=4, dim=576, dtype=dtype)
    return pages, packed, q


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["packed", "adjacent", "apart", "swapped", "structural"])
def test_mla(causal, form):
    pages, packed, q = mla_problem(Q_LENS, KV_LENS)
    scale = 1 / math.sqrt(192)
    exact = per_request(q, Q_LENS, pages, causal=causal, scale=scale)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(CPU)
    fields = indptr(Q_LENS), pages.indptr, pages.indices, torch.tensor(KV_LENS, dtype=torch.int32)
    rest = dict(num_heads=4, head_dim_ckv=512, head_dim_kpe=64, page_size=16, causal=causal, sm_scale=scale,
                q_data_type=torch.float32, kv_data_type=torch.float32)
    if form == "structural":
        wrapper.plan(metadata=flashinfer.mla.MLAPlanMetadata.csr(*fields), lse_mode="basee", **rest)
    else:
        wrapper.plan(*fields, *rest.values())
    q_halves, halves = q.split((512, 64), -1), packed.split((512, 64), -1)
    if form == "packed":
        result = wrapper.run(query=q, kv_cache=packed, return_lse=True)
    elif form == "adjacent":
        result = wrapper.run(*q_halves, *halves, return_lse=True)
    elif form == "swapped":  # two parts of one tensor, the wrong way round
        other = torch.cat((halves[1], halves[0]), -1)
        result = wrapper.run(query=q, kv_cache=(other[..., 64:], other[..., :64]), return_lse=True)
    elif form == "apart":
        result = wrapper.run(*(x.clone() for x in q_halves), *(x.clone() for x in halves), return_lse=True)
    else:
        out, lse = wrapper.run(query=q_halves, kv_cache=halves, return_lse=True)
        result = out, lse / math.log(2)
    assert_close(result, exact)
    if form != "structural":
        _, natural = wrapper.run(query=q, kv_cache=packed, return_lse=True, return_lse_base_on_e=True)
        assert torch.allclose(natural / math.log(2), result[1], rtol=1e-5)
    with pytest.raises(ValueError, match="given with bmm1_scale or bmm2_scale"):
        wrapper.run(query=q, kv_cache=packed, bmm1_scale=0.5, ckv_scale=2.0)
    with pytest.raises(ValueError, match="kv_len and page_table are given together"):
        wrapper.run(query=q, kv_cache=packed, kv_len=torch.tensor(KV_LENS))
    with pytest.raises(ValueError, match="kv_len and page_table are given together"):
        wrapper.run(query=q, kv_cache=packed, page_table=pages.table)
    scaled = wrapper.run(query=q, kv_cache=packed, ckv_scale=0.5, kpe_scale=2.0, return_lse=True)
    for r, rows in enumerate(pages.rows):
        pages.k[rows[0], rows[1], :, :512] *= 0.5
        pages.k[rows[0], rows[1], :, 512:] *= 2.0
    exact = per_request(q, Q_LENS, pages, causal=causal, scale=scale)
    if form == "structural":
        scaled = scaled[0], scaled[1] / math.log(2)
    assert_close(scaled, exact)


def test_mla_forms_of_plan_and_graphs():
    pages, packed, q = mla_problem(Q_LENS, KV_LENS)
    exact = per_request(q, Q_LENS, pages, causal=True, scale=0.1)
    rest = dict(num_heads=4, head_dim_ckv=512, head_dim_kpe=64, page_size=16, causal=True, sm_scale=0.1,
                q_data_type=torch.float32, kv_data_type=torch.float32)
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(CPU)
    wrapper.plan(metadata=flashinfer.mla.MLAPlanMetadata.dense(indptr(Q_LENS), pages.table, lens), **rest)
    assert_close(wrapper.run(query=q, kv_cache=packed, return_lse=True), exact)
    apart = tuple(x.clone() for x in packed.split((512, 64), -1))
    assert_close(wrapper.run(query=q, kv_cache=apart, return_lse=True), exact)
    sinks = torch.linspace(-1, 1, 4)
    wrapper.plan(cum_seq_lens_q=indptr(Q_LENS), block_tables=pages.table, seq_lens=lens, use_sinks=True, **rest)
    assert_close(wrapper.run(query=q, kv_cache=packed, return_lse=True, sinks=sinks),
                 per_request(q, Q_LENS, pages, causal=True, scale=0.1, sinks=sinks))
    with pytest.raises(ValueError, match="sinks are not given; plan was told use_sinks=True"):
        wrapper.run(query=q, kv_cache=packed)
    both = flashinfer.mla.MLAPlanMetadata.dual
    fields = indptr(Q_LENS), pages.indptr, pages.indices, lens
    wrapper.plan(metadata=both(*fields, cum_seq_lens_q=indptr(Q_LENS), block_tables=pages.table, seq_lens=lens),
                 use_sinks=True, **rest)
    halves = torch.empty(26, 4, 512, dtype=torch.float16)
    assert wrapper.run(query=q, kv_cache=packed, out=halves, sinks=sinks) is halves
    result = wrapper.run(query=q, kv_cache=packed, return_lse=True, sinks=sinks)
    assert result[0].dtype == torch.float32
    assert_close(result, per_request(q, Q_LENS, pages, causal=True, scale=0.1, sinks=sinks))
    for match, more in [
        ("seq_lens is .21, 18, 10, 34. ...; kv_len_arr is", dict(
            metadata=both(*fields, cum_seq_lens_q=indptr(Q_LENS), block_tables=pages.table, seq_lens=lens + 1))),
        ("cum_seq_lens_q is .0, 1, 2, 3. ...; qo_indptr is", dict(
            metadata=both(*fields, cum_seq_lens_q=indptr([1] * 4), block_tables=pages.table, seq_lens=lens))),
        ("max_q_len is 4; a request has 17", dict(metadata=both(
            *fields, cum_seq_lens_q=indptr(Q_LENS), block_tables=pages.table, seq_lens=lens, max_q_len=4))),
        ("qo_indptr and cum_seq_lens_q are given", dict(
            qo_indptr=fields[0], kv_indptr=fields[1], kv_indices=fields[2], kv_len_arr=lens,
            cum_seq_lens_q=indptr(Q_LENS), block_tables=pages.table, seq_lens=lens)),
        ("kv_indices has 3 entries", dict(metadata=flashinfer.mla.MLAPlanMetadata.csr(
            *fields[:2], pages.indices[:3], lens))),
        ("scale_mode is 'tensor'; it is one of", dict(scale_mode="tensor")),
        ("output_scale is 'fp8'; it is one of", dict(output_scale="fp8")),
    ]:
        with pytest.raises(ValueError, match=match):
            wrapper.plan(**{**rest, **more})
    wrapper.plan(*fields, *rest.values(), output_scale="per-tensor")
    with pytest.raises(ValueError, match="o_scale is not given; plan was told output_scale"):
        wrapper.run(query=q, kv_cache=packed)
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (5, 5, 32, 4)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(CPU, True, *buffers)
    wrapper.plan(indptr(Q_LENS), pages.indptr, pages.indices, lens, *rest.values())
    assert torch.equal(buffers[3], lens)
    assert_close(wrapper.run(query=q, kv_cache=packed, return_lse=True), exact)
    assert_close(wrapper.run(query=q, kv_cache=apart, return_lse=True), exact)  # refused in a CUDA graph alone
    more = torch.cat((pages.indptr, pages.indptr[-1:] + 1))  # the original reads requests + 1 entries
    wrapper.plan(indptr(Q_LENS), more, pages.indices, lens, *rest.values())
    assert_close(wrapper.run(query=q, kv_cache=packed, return_lse=True), exact)
    with pytest.raises(ValueError, match="qo_indptr has 5 entries, kv_indptr 4, kv_len_arr 4"):
        wrapper.plan(indptr(Q_LENS), pages.indptr[:4], pages.indices, lens, *rest.values())
    with pytest.raises(ValueError, match="batch size should be fixed in cuda graph mode: kv_len_arr has 3 entries"):
        wrapper.plan(indptr(Q_LENS[:3]), pages.indptr[:4], pages.indices, lens[:3], *rest.values())
    with pytest.raises(ValueError, match="ckv_cache.dtype is torch.float16; plan was given kv_data_type=torch.float32"):
        wrapper.run(query=q, kv_cache=(apart[0].half(), apart[1]))
    with pytest.raises(RuntimeError, match="called before plan"):
        flashinfer.BatchMLAPagedAttentionWrapper(CPU).run(query=q, kv_cache=packed)
    planless = flashinfer.BatchMLAPagedAttentionWrapper(CPU, backend="cutlass")
    out = planless.run(query=q[:4], kv_cache=packed, kv_len=lens, page_table=pages.table)
    assert_close(out, per_request(q[:4], [1] * 4, pages, scale=1 / math.sqrt(192)))
    with pytest.raises(ValueError, match="kv_len_arr\\[1\\] is 40"):
        wrapper.plan(indptr(Q_LENS), pages.indptr, pages.indices, torch.tensor([20, 40, 9, 33]), *rest.values())
    for match, more in [("takes query=", {"q_pe": q}), ("takes kv_cache=", {"kpe_cache": packed})]:
        with pytest.raises(TypeError, match=match):
            wrapper.run(query=q, kv_cache=packed, **more)
    with pytest.raises(TypeError, match="missing required arguments: kv_indices, kv_len_arr"):
        wrapper.plan(indptr(Q_LENS), pages.indptr, **rest)
    with pytest.raises(TypeError, match="missing required arguments: num_heads"):
        wrapper.plan(indptr(Q_LENS), pages.indptr, pages.indices, lens)


def test_batch_attention():
    pages = Pages(KV_LENS)
    q, sinks = queries(26), torch.linspace(-1, 2, 8)
    wrapper = flashinfer.BatchAttention("NHD", "cpu")
    wrapper.plan(indptr(Q_LENS), pages.indptr, pages.indices, torch.tensor(KV_LENS), 8, 2, 64, 64, 16, causal=True,
                 logits_soft_cap=2.0, q_data_type=torch.float16, kv_data_type=torch.float16)
    assert_close(wrapper.run(q, pages.whole, logits_soft_cap=2.0), per_request(q, Q_LENS, pages, causal=True, cap=2.0))
    out, lse = torch.empty_like(q), torch.empty(26, 8)
    result = wrapper.run(q, pages.pair, out, lse, k_scale=torch.tensor(0.5), v_scale=torch.tensor(2.0), sinks=sinks)
    assert result[0] is out and result[1] is lse
    assert_close(result, per_request(q, Q_LENS, pages, causal=True, cap=2.0, scale=0.0625, v_scale=2.0, sinks=sinks))
    with pytest.raises(ValueError, match="logits_soft_cap is 3.0; plan was given 2.0"):
        wrapper.run(q, pages.whole, logits_soft_cap=3.0)
    with pytest.raises(ValueError, match=r"kv_len_arr\[1\] is 33; its 2 pages hold 32"):
        wrapper.plan(indptr(Q_LENS), pages.indptr, pages.indices, torch.tensor([20, 33, 9, 33]), 8, 2, 64, 64, 16)
    with pytest.raises(ValueError, match="kv_indices has 4 entries; its indptr ends at 8"):
        wrapper.plan(indptr(Q_LENS), pages.indptr, pages.indices[:4], torch.tensor(KV_LENS), 8, 2, 64, 64, 16)


def test_pod():
    pages = Pages(KV_LENS)
    q_p, k_p, v_p, q_d = queries(7), queries(30, heads=2, seed=2), queries(30, heads=2, seed=3), queries(4, seed=4)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(CPU)
    with pytest.raises(ValueError, match="there is no plan: call plan before run"):
        wrapper.run(q_p, k_p, v_p, q_d, pages.whole, window_left_d=3)
    wrapper.plan(pages.indptr, pages.indices, pages.last, 8, 2, 64, 16, window_left=9)
    prefill, decode = reference.attend(q_p, k_p, v_p, causal=True), per_request(q_d, [1] * 4, pages, window=9)
    out_p, out_d = wrapper.run(q_p, k_p, v_p, q_d, pages.whole, causal_p=True)
    assert_close(out_p, prefill), assert_close(out_d, decode)
    with_lse = wrapper.run(q_p, k_p, v_p, q_d, pages.whole, causal_p=True, return_lse_p=True, return_lse_d=True,
                           window_left_d=9)
    assert_close(with_lse[0], prefill), assert_close(with_lse[1], decode)
    with pytest.raises(ValueError, match="window_left_d is 3; the wrapper was planned with 9"):
        wrapper.run(q_p, k_p, v_p, q_d, pages.whole, window_left_d=3)
    batch = flashinfer.BatchPODWithPagedKVCacheWrapper(CPU)
    q = queries(26, seed=6)
    with pytest.raises(ValueError, match="there is no plan: call plan before run"):
        batch.run(q, pages.whole, q_d, pages.whole)
    batch.plan(indptr(Q_LENS), pages.indptr, pages.indices, pages.last, indptr([1] * 4), pages.indptr, pages.indices,
               pages.last, 8, 2, 64, 16)
    for causal in (True, False, True):
        (out_p, out_d), (lse_p, lse_d) = batch.run(q, pages.whole, q_d, pages.whole, causal_p=causal, v_scale=2.0,
                                                   return_lse=True)
        assert_close((out_p, lse_p), per_request(q, Q_LENS, pages, causal=causal))
        assert_close((out_d, lse_d), per_request(q_d, [1] * 4, pages, v_scale=2.0))
    flat = torch.rand(sum(a * b for a, b in zip(Q_LENS, KV_LENS))) < 0.7
    masks = [m.reshape(a, b) for m, a, b in zip(flat.split([a * b for a, b in zip(Q_LENS, KV_LENS)]), Q_LENS, KV_LENS)]
    batch.plan(indptr(Q_LENS), pages.indptr, pages.indices, pages.last, indptr([1] * 4), pages.indptr, pages.indices,
               pages.last, 8, 2, 64, 16)
    for _ in range(2):
        assert_close(batch.run(q, pages.whole, q_d, pages.whole, custom_mask_p=flat)[0],
                     per_request(q, Q_LENS, pages, masks=masks))
        flat.logical_not_()  # masks are views of it
    assert_close(batch.run(q, pages.whole, q_d, pages.whole)[0], per_request(q, Q_LENS, pages))


@pytest.mark.parametrize("masked", ["", "mask", "packed", "causal"])
def test_sparse_blocks(masked):
    m, n, rows, columns = 26, 48, 8, 16  # the last row of blocks is short
    offsets, blocks = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32), torch.tensor([2, 0, 0, 1, 2, 1],
                                                                                     dtype=torch.int32)
    q, k, v = queries(m), queries(n, heads=2, seed=2), queries(n, heads=2, seed=3)
    inner = torch.rand(6, rows, columns, generator=torch.Generator().manual_seed(1)) < 0.6
    mask = torch.zeros(m, n, dtype=torch.bool)
    for r in range(4):
        for at in range(int(offsets[r]), int(offsets[r + 1])):
            last, first = min(m, (r + 1) * rows), int(blocks[at]) * columns
            mask[r * rows:last, first:first + columns] = inner[at,
                                                               :last - r * rows] if "a" in masked and masked != "causal" else True
    if masked == "causal":
        mask &= torch.arange(n)[None] <= torch.arange(m)[:, None] + n - m
    given = {"mask": {"mask": inner}, "causal": {"causal": True}}.get(masked, {})
    if masked == "packed":
        m, mask = 32, torch.cat((mask, torch.zeros(6, n, dtype=torch.bool)))
        mask[26:, 16:32] = inner[5, 2:]
        q = queries(m)
        flat = flashinfer.sparse.convert_bsr_mask_layout(inner, offsets)
        given = {"packed_mask": flashinfer.segment_packbits(flat, offsets * rows * columns, bitorder="little")[0]}
    elif masked == "mask":
        m, mask = 32, torch.cat((mask, torch.zeros(6, n, dtype=torch.bool)))
        mask[26:, 16:32] = inner[5, 2:]
        q = queries(m)
    wrapper = flashinfer.BlockSparseAttentionWrapper(CPU)
    wrapper.plan(offsets, blocks, m, n, rows, columns, 8, 2, 64, **given)
    assert_close(wrapper.run(q, k, v, return_lse=True), reference.attend(q, k, v, mask=mask))
    assert_close(wrapper.forward(q, k, v, sm_scale=0.3), reference.attend(q, k, v, mask=mask, scale=0.3))
    for call in (wrapper.run, wrapper.forward):
        with pytest.raises(ValueError, match="q has 5 rows"):
            call(q[:5], k, v)
    with pytest.raises(ValueError, match="there is no plan"):
        flashinfer.BlockSparseAttentionWrapper(CPU).forward(q, k, v, logits_soft_cap=1.0)
    with pytest.raises(NotImplementedError, match="rope_theta is given"):
        wrapper.plan(offsets, blocks, m, n, rows, columns, 8, 2, 64, rope_theta=1e4)
    with pytest.raises(ValueError, match="indices has the block 3; N and C make 3"):
        wrapper.plan(offsets, blocks + 1, m, n, rows, columns, 8, 2, 64)
    with pytest.raises(NotImplementedError, match="block_mask is given"):
        wrapper.plan(offsets, blocks, m, n, rows, columns, 8, 2, 64, block_mask=mask)


@pytest.mark.parametrize("sizes", [[16, 32, 16], [5, 11, 3]])
@pytest.mark.parametrize("causal", [False, True])
def test_sparse_blocks_of_many_sizes(sizes, causal):
    heads = 2
    rows, columns = torch.tensor([[4, 9, 2], [9, 2, 4]]), torch.tensor([sizes, sizes[::-1]])
    seen = torch.tensor([[[1, 0, 1], [0, 0, 0], [1, 1, 1]], [[0, 1, 0], [1, 0, 0], [0, 1, 1]]]).bool()
    m, n = 15, sum(sizes)
    q, k, v = queries(8, heads=m), queries(heads, heads=n, seed=2), queries(heads, heads=n, seed=3)  # heads first
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(CPU)
    wrapper.plan(seen, rows, columns, 8, heads, 64, causal=causal)
    result = wrapper.run(q, k, v, return_lse=True)
    for head in range(heads):
        mask = seen[head].repeat_interleave(rows[head], 0).repeat_interleave(columns[head], 1)
        if causal:
            mask = mask & (torch.arange(n)[None] <= torch.arange(m)[:, None] + n - m)
        mine = slice(head * 4, head * 4 + 4)
        exact = reference.attend(q[mine].transpose(0, 1), k[head][:, None], v[head][:, None], mask=mask)
        assert_close((result[0][mine].transpose(0, 1), result[1][mine].T), exact)
    out, lse = torch.empty_like(q), torch.empty(8, m)
    assert wrapper.run(q, k, v, out, lse) is out and torch.equal(out, result[0]) and torch.equal(lse, result[1])
    assert torch.equal(wrapper.forward(q, k, v), out)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("given,rules", [
    ({}, {}), ({"window_left": 4}, {"window": 4}),
    ({"bmm1_scale": 0.3, "bmm2_scale": 2.0}, {"scale": 0.3, "v_scale": 2.0}),
])
def test_dense_tables(layout, given, rules):
    pages = Pages(KV_LENS, layout=layout)
    q, sinks = queries(4), torch.linspace(-1, 2, 8)
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    given, rules = {"bmm1_scale": 0.125, **given}, {"scale": 0.125, **rules}
    exact = per_request(q, [1] * 4, pages, **rules)
    call = (pages.whole, CPU, pages.table, lens, 33)
    decode = flashinfer.trtllm_batch_decode_with_kv_cache
    assert_close(decode(q, *call, kv_layout=layout, return_lse=True, **given), exact)
    out = torch.empty(4, 8, 64)
    assert decode(q, pages.pair, *call[1:], kv_layout=layout, out=out, **given) is out
    assert_close(out, exact, torch.float16)
    assert_close(flashinfer.xqa_batch_decode_with_kv_cache(q, *call, kv_layout=layout, sinks=sinks, **given),
                 per_request(q, [1] * 4, pages, sinks=sinks, **rules))
    q = queries(26)
    context = flashinfer.trtllm_batch_context_with_kv_cache(
        q, *call[:4], 17, 33, given["bmm1_scale"], given.get("bmm2_scale", 1.0), 4, indptr(Q_LENS), indptr(KV_LENS),
        given.get("window_left", -1), kv_layout=layout, return_lse=True, sinks=[sinks])
    assert_close(context, per_request(q, Q_LENS, pages, causal=True, sinks=sinks, **rules))
    assert_close(decode(q, *call, kv_layout=layout, cum_seq_lens_q=indptr(Q_LENS), max_q_len=17, **given),
                 per_request(q, Q_LENS, pages, causal=True, **rules))
    with pytest.raises(ValueError, match="max_seq_len is 20 .* request 3 has 33 keys"):
        decode(q[:4], pages.whole, CPU, pages.table, lens, 20, kv_layout=layout)


def test_dense_tables_with_drafts():
    pages = Pages([20, 17, 9, 33])
    q = queries(12)
    lens = torch.tensor(pages.kv_lens, dtype=torch.int32).to(torch.uint32)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    words = torch.zeros(4, 3, 2, dtype=torch.int32)
    words[:, :, 0] = (tree * torch.tensor([1, 2, 4])).sum(1)
    masks = [torch.cat((torch.ones(3, n - 3, dtype=torch.bool), tree), 1) for n in pages.kv_lens]
    call = (pages.whole, CPU, pages.table, lens, 33, 0.125)
    out = flashinfer.trtllm_batch_decode_with_kv_cache(q, *call, q_len_per_req=3, kv_layout="NHD",
                                                       mask=words.to(torch.uint16))
    assert_close(out, per_request(q, [3] * 4, pages, masks=masks))
    out = flashinfer.trtllm_batch_decode_with_kv_cache(q, *call, q_len_per_req=3, kv_layout="NHD")
    assert_close(out, per_request(q, [3] * 4, pages, causal=True))
    every = torch.zeros(4, 3, 2, dtype=torch.int32)
    every[:, :, 0] = 7  # drafts see one another, forwards too, whatever the window on the left
    ahead = [torch.ones(3, n, dtype=torch.bool) for n in pages.kv_lens]
    out = flashinfer.trtllm_batch_decode_with_kv_cache(q, *call, q_len_per_req=3, kv_layout="NHD", window_left=5,
                                                       mask=every.to(torch.uint16))
    assert_close(out, per_request(q, [3] * 4, pages, masks=ahead, window=5))
    drafts = [3, 0, 1, 2]  # of the tree's first rows
    rows = torch.cat([words[r, :n] for r, n in enumerate(drafts)]).to(torch.uint16)
    out = flashinfer.xqa_batch_decode_with_kv_cache(q[:6], *call, q_len_per_req=3, mask=rows,
                                                    q_cu_seq_lens=indptr(drafts))
    masks = [torch.cat((torch.ones(n, kv - n, dtype=torch.bool), tree[:n, :n]), 1) for n,
             kv in zip(drafts, pages.kv_lens)]
    assert_close(out, per_request(q[:6], drafts, pages, masks=masks))
    output = torch.empty(4, 1, 3, 8, 64, dtype=torch.float16)
    flashinfer.xqa(q.view(4, 1, 3, 8, 64), *pages.pair, pages.table, lens.view(4, 1), output, CPU, CPU, 2, 16,
                   q_scale=2.0, kv_scale=0.5, rcp_out_scale=3.0, sliding_win_size=8, q_seq_len=3,
                   sinks=torch.zeros(2, 4))
    assert_close(output.view(12, 8, 64), per_request(q, [3] * 4, pages, causal=True, window=7, v_scale=1.5,
                                                     sinks=torch.zeros(8)))
    for match, error, more in [
        ("mask is torch.int32", ValueError, {"mask": words}),
        ("query has 12 rows; 4 requests of 2", ValueError, {"q_len_per_req": 2}),
        ("kv_cache_sf is given", NotImplementedError, {"kv_cache_sf": (q, q)}),
        ("causal_seqlens_kv_global is given", NotImplementedError, {"causal_seqlens_kv_global": lens}),
        ("out_dtype is nvfp4", NotImplementedError, {"out_dtype": "nvfp4"}),
        ("given together", ValueError, {"max_q_len": 3}),
        ("cum_seq_lens_q has 4 entries; 4 seq_lens need 5", ValueError,
         {"max_q_len": 3, "cum_seq_lens_q": indptr([3] * 3)}),
        ("sinks is a list of 2 tensors", ValueError, {"sinks": [torch.zeros(8)] * 2}),
        ("scale of the logits is 0", ValueError, {"bmm1_scale": 0.0}),
        ("bf16q_fp8kv_transform_mode is 'both'", ValueError, {"bf16q_fp8kv_transform_mode": "both"}),
    ]:
        with pytest.raises(error, match=match):
            flashinfer.trtllm_batch_decode_with_kv_cache(q, *call[:-1], **{
                "bmm1_scale": 0.125, "q_len_per_req": 3, "kv_layout": "NHD", **more})


def test_dense_mla():
    pages, packed, q = mla_problem([2] * 4, KV_LENS)
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    exact = per_request(q, [2] * 4, pages, causal=True, scale=0.07, v_scale=2.0)
    query = q.view(4, 2, 4, 576)
    call = (query, packed.unsqueeze(1), CPU, 128, 512, 64, pages.table, lens, 33)
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(*call, bmm1_scale=0.07, bmm2_scale=2.0, return_lse=True)
    assert out.shape == (4, 2, 4, 512)
    assert_close((out.view(8, 4, 512), lse), exact)
    _, natural = flashinfer.trtllm_batch_decode_with_kv_cache_mla(*call, bmm1_scale=0.07, return_lse=True,
                                                                  return_lse_base="basee")
    assert torch.allclose(natural, lse * math.log(2), rtol=1e-5, atol=1e-5)
    assert torch.equal(flashinfer.xqa_batch_decode_with_kv_cache_mla(*call, bmm1_scale=0.07, bmm2_scale=2.0), out)
    given = torch.empty(4, 2, 4)
    _, same = flashinfer.trtllm_batch_decode_with_kv_cache_mla(*call, bmm1_scale=0.07, return_lse=True, lse=given)
    assert same is given and torch.equal(given.view(8, 4), lse)
    flat = flashinfer.trtllm_batch_decode_with_kv_cache_mla(q, *call[1:], bmm1_scale=0.07, bmm2_scale=2.0,
                                                            cum_seq_lens_q=indptr([2] * 4))
    assert torch.equal(flat, out.view(8, 4, 512))
    with pytest.raises(ValueError, match="max_q_len is given without cum_seq_lens_q"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(*call, max_q_len=2)
    output = torch.empty(4, 1, 4, 512)
    flashinfer.xqa_mla(q[:4].view(4, 1, 4, 576), packed, packed, pages.table, lens, output, CPU, CPU, 16, q_scale=0.02)
    assert_close(output.view(4, 4, 512), per_request(q[:4], [1] * 4, pages, scale=0.02))
    again = torch.empty_like(output)  # a cache of tokens
    tokens = packed.view(-1, 576)
    flashinfer.xqa_mla(q[:4].view(4, 1, 4, 576), tokens, tokens, pages.table, lens, again, CPU, CPU, 16, q_scale=0.02)
    assert torch.equal(again, output)
    with pytest.raises(NotImplementedError, match="sparse_mla_top_k is given"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(*call, sparse_mla_top_k=64)
    with pytest.raises(ValueError, match="query has heads of 576"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(query, packed, CPU, 128, 512, 32, *call[6:])


def test_ragged_keys_of_two_sizes():
    k, v = queries(sum(KV_LENS), heads=4, dim=192, seed=2), queries(sum(KV_LENS), heads=4, dim=128, seed=3)
    q, sinks = queries(26, heads=4, dim=192), torch.linspace(-1, 1, 4)
    out, lse = flashinfer.trtllm_ragged_attention_deepseek(
        q, k, v, CPU, torch.tensor(KV_LENS), 17, 33, 0.1, 2.0, -1, 4, -1, indptr(Q_LENS), indptr(KV_LENS), None, True,
        True, attention_sinks=sinks)
    parts = [reference.attend(a, b, c, causal=True, scale=0.1, v_scale=2.0, sinks=sinks)
             for a, b, c in zip(q.split(Q_LENS), k.split(KV_LENS), v.split(KV_LENS))]
    assert_close((out, lse), together(parts))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(CPU)
    wrapper.plan(indptr(Q_LENS), indptr(KV_LENS), 4, 4, 192, 128, causal=True, sm_scale=0.1)
    wrapper._sinks = sinks  # as vLLM gives them
    assert_close(wrapper.run(q, k, v, v_scale=2.0, return_lse=True), together(parts))
    for match, lens, requests, more in [
        ("cum_seq_lens_q has 5 entries; batch_size is 3", KV_LENS, 3, {}),
        ("seq_lens is .1, 2, 3, 4. ...; cum_seq_lens_kv makes", [1, 2, 3, 4], 4, {}),
        ("q_seq_lens_cpu has 4 entries that add up to 10", KV_LENS, 4, {"q_seq_lens_cpu": torch.tensor([1, 2, 3, 4])}),
        ("kv_seq_lens_cpu has 3 entries", KV_LENS, 4, {"kv_seq_lens_cpu": torch.tensor(KV_LENS[:3])}),
    ]:
        with pytest.raises(ValueError, match=match):
            flashinfer.trtllm_ragged_attention_deepseek(
                q, k, v, CPU, torch.tensor(lens), 17, 33, 0.1, 2.0, -1, requests, -1, indptr(Q_LENS), indptr(KV_LENS),
                None, True, True, **more)


def test_what_is_not_offered():
    with pytest.raises(AttributeError, match="folio.flashinfer has no mm_fp4: it has FlashInfer's attention"):
        flashinfer.mm_fp4  # noqa: B018
    assert not hasattr(flashinfer, "top_k_top_p_sampling_from_probs")
    with pytest.raises(ImportError):
        from folio.flashinfer import cutlass_fused_moe  # noqa: F401
