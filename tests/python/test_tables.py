"""Lists made of lengths and page tables, copies of pages, and what is gathered from them, beside numpy."""

import folio
import ml_dtypes
import numpy as np
import pytest

CONTEXT = folio.Context.cpu(num_threads=2)
PAGE_SIZE = 4
LENS = [9, 0, 4, 1, 13]
COUNTS = [-(-length // PAGE_SIZE) for length in LENS]
PAGE_IDS = np.random.default_rng(1).permutation(20)[:sum(COUNTS)]
ROWS = [row.tolist() for row in np.split(PAGE_IDS, np.cumsum(COUNTS)[:-1])]
INDPTR = np.cumsum([0, *COUNTS])
TOKENS = [[row[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(length)] for row, length in zip(ROWS, LENS)]


def csr():
    return folio.csr_table(np.array(sum(ROWS, []), np.int32), INDPTR.astype(np.int32))


def dense():
    """The same rows from column 1 on, in the middle of an array that is wider."""
    wide = np.full((len(ROWS), 9), 1000, np.int32)
    for entries, row in zip(wide, ROWS):
        entries[2:2 + len(row)] = row
    return folio.dense_table(wide[:, 1:7], first_column=1)


@pytest.fixture(params=[csr, dense])
def table(request):
    return request.param()


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64])
def test_lengths(kind):
    lens = kind(LENS) if kind in (list, tuple) else np.array(LENS, kind)
    indptr, last = folio.paged_indptr(lens, PAGE_SIZE)
    assert indptr.dtype == last.dtype == np.int32
    assert indptr.tolist() == INDPTR.tolist() and last.tolist() == [1, 0, 4, 1, 1]
    assert folio.seq_lens_from_paged(indptr, last, PAGE_SIZE).tolist() == LENS
    assert folio.pages_for(9, PAGE_SIZE) == 3
    shard = folio.KvShard(world=3, rank=1, interleave=2)
    expected = [sum(p // 2 % 3 == 1 for p in range(length)) for length in LENS]
    assert folio.shard_lens(lens, shard).tolist() == expected
    assert [folio.shard_len(length, 3, 1, 2) for length in LENS] == expected


def test_forms_of_a_table(table):
    metadata = folio.to_csr(table, LENS, PAGE_SIZE)
    assert metadata.indptr.tolist() == INDPTR.tolist() and metadata.last_page_len.tolist() == [1, 0, 4, 1, 1]
    assert metadata.indices.tolist() == sum(ROWS, []) and "5 requests" in repr(metadata)
    for columns in (None, 4, 6):
        wide = folio.to_dense(table, LENS, PAGE_SIZE, columns, fill=-7)
        assert wide.shape == (5, columns or 4)
        assert wide.tolist() == [row + [-7] * (wide.shape[1] - len(row)) for row in ROWS]


def test_tokens_of_a_table(table):
    indptr, indices = folio.token_indices(table, LENS, PAGE_SIZE)
    assert indptr.tolist() == np.cumsum([0, *LENS]).tolist() and indices.tolist() == sum(TOKENS, [])
    _, offsets = folio.token_offsets(table, LENS, PAGE_SIZE, page_stride=2**33, token_stride=100)
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [slot // PAGE_SIZE * 2**33 + slot % PAGE_SIZE * 100 for slot in sum(TOKENS, [])]


def test_slots_of_tokens(table):
    rows, positions = [0, 4, 4, 2, 99, 0], [8, 12, 0, 3, -1, 5]
    slots = folio.slot_mapping(table, rows, positions, PAGE_SIZE)
    assert slots.dtype == np.int64
    assert slots.tolist() == [-1 if p < 0 else TOKENS[r][p] for r, p in zip(rows, positions)]
    shard = folio.KvShard(world=2, rank=1, interleave=2)  # a page of the table is 8 tokens of the sequence

    def sharded(row, p):
        if p // 2 % 2 != 1:
            return -1
        local = p // 4 * 2 + p % 2
        return ROWS[row][local // PAGE_SIZE] * PAGE_SIZE + local % PAGE_SIZE

    slots = folio.slot_mapping(table, [4] * 20, list(range(20)), PAGE_SIZE, shard)
    assert slots.tolist() == [sharded(4, p) for p in range(20)]


def test_pages_of_another_size():
    assert folio.expand_pages([3, 0, 5], 2).tolist() == [6, 7, 0, 1, 10, 11]


def outputs(table, lens):
    """The same lists by the forms that write into arrays of the caller's."""
    rows, pages, tokens = len(lens), sum(COUNTS), sum(lens)
    made = {name: np.full(size, -9, np.int32) for name, size in
            {"indptr": rows + 1, "last": rows, "lens": rows, "csr_indptr": rows + 1, "ids": pages + 2, "csr_last": rows,
             "token_indptr": rows + 1, "indices": tokens, "offset_indptr": rows + 1, "local": rows, "pages": 6}.items()}
    made.update(dense=np.full((rows, 5), -9, np.int32), offsets=np.full(tokens, -9), slots=np.full(2, -9))
    folio.paged_indptr(CONTEXT, lens, PAGE_SIZE, made["indptr"], made["last"])
    folio.seq_lens_from_paged(CONTEXT, made["indptr"], made["last"], PAGE_SIZE, made["lens"])
    folio.to_csr(CONTEXT, table, lens, PAGE_SIZE, made["csr_indptr"], made["ids"], made["csr_last"])
    folio.to_dense(CONTEXT, table, lens, PAGE_SIZE, made["dense"], fill=3)
    folio.token_indices(CONTEXT, table, lens, PAGE_SIZE, made["token_indptr"], made["indices"])
    folio.token_offsets(CONTEXT, table, lens, PAGE_SIZE, 64, 2, made["offset_indptr"], made["offsets"])
    folio.slot_mapping(CONTEXT, table, [0, 4], [8, 12], PAGE_SIZE, made["slots"])
    folio.shard_lens(CONTEXT, lens, folio.KvShard(world=2), made["local"])
    folio.expand_pages(CONTEXT, [3, 0, 5], 2, made["pages"])
    folio.validate(CONTEXT, table, lens, PAGE_SIZE, 20)
    return made


def test_results_in_arrays_of_the_caller(table):
    made = outputs(table, LENS)
    assert made["indptr"].tolist() == made["csr_indptr"].tolist() == INDPTR.tolist() and made["lens"].tolist() == LENS
    assert made["last"].tolist() == made["csr_last"].tolist() == [1, 0, 4, 1, 1]
    assert made["ids"].tolist() == sum(ROWS, []) + [-9, -9]
    assert made["dense"].tolist() == [row + [3] * (5 - len(row)) for row in ROWS]
    assert made["token_indptr"].tolist() == made["offset_indptr"].tolist() == np.cumsum([0, *LENS]).tolist()
    assert made["indices"].tolist() == sum(TOKENS, [])
    assert made["offsets"].tolist() == [slot // PAGE_SIZE * 64 + slot % PAGE_SIZE * 2 for slot in sum(TOKENS, [])]
    assert made["slots"].tolist() == [TOKENS[0][8], TOKENS[4][12]] and made["pages"].tolist() == [6, 7, 0, 1, 10, 11]
    assert made["local"].tolist() == [(length + 1) // 2 for length in LENS]


def test_refusals_of_lists(table):
    for call, message in [
            (lambda: folio.to_csr(table, [*LENS, 1], PAGE_SIZE), "6 lengths for a table of 5 rows"),
            (lambda: folio.to_csr(table, [33], PAGE_SIZE), "row 0 needs 9 pages"),
            (lambda: folio.token_indices(table, [0, 0, 2**31 - 1], PAGE_SIZE), "row 2 needs 536870912 pages"),
            (lambda: folio.to_dense(table, LENS, PAGE_SIZE, 3), "request 4 needs 4 pages; the dense table has 3"),
            (lambda: folio.paged_indptr([1, -2], PAGE_SIZE), "request 1 is -2"),
            (lambda: folio.paged_indptr([1], 0), "page_size is 0"),
            (lambda: folio.paged_indptr(np.zeros(2, np.float32), 1), "seq_lens is float32; int32 and int64 are taken"),
            (lambda: folio.slot_mapping(table, [5], [0], PAGE_SIZE), "token 0 belongs to row 5"),
            (lambda: folio.slot_mapping(table, [0, 0], [0], PAGE_SIZE), "positions and slots have 2, 1 and 1"),
            (lambda: folio.expand_pages([-1], 2), "-1"), (lambda: folio.validate(table, LENS, PAGE_SIZE, 5), "row 0"),
            (lambda: folio.shard_len(3, 2, 2, 1), "rank")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            call()
    for call in (lambda: folio.to_csr(table, "abc", PAGE_SIZE), lambda: folio.paged_indptr([1], "x"),
                 lambda: folio.paged_indptr([None], 1)):
        with pytest.raises((TypeError, folio.InvalidArgument)):
            call()


def test_a_row_ends_at_its_last_column():
    wide = np.arange(30, dtype=np.int32).reshape(3, 10)
    table = folio.dense_table(wide[:, 2:5])
    assert folio.to_dense(table, [3, 3, 3], 1).tolist() == wide[:, 2:5].tolist()
    for refused in (lambda: folio.to_dense(table, [4], 1), lambda: folio.slot_mapping(table, [0], [3], 1),
                    lambda: folio.validate(table, [4], 1, 100)):
        with pytest.raises(folio.InvalidArgument, match="row 0 needs 4 pages"):
            refused()


def test_outputs_that_do_not_fit_stay_as_they_are(table):
    indptr, last, ids = np.full(6, -9, np.int32), np.full(5, -9, np.int32), np.full(10, -9, np.int32)
    read_only = np.full(5, -9, np.int32)
    read_only.flags.writeable = False
    for arrays, message in [((indptr[:5], last), "indptr has 5 entries"), ((indptr, last[::2]), "last_page_len"),
                            ((indptr.astype(np.int64), last), "indptr is int64; it must be int32"),
                            ((indptr, read_only), "last_page_len is read-only"),
                            ((indptr, indptr[:5]), "last_page_len overlaps indptr")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            folio.paged_indptr(CONTEXT, LENS, PAGE_SIZE, *arrays)
    for refused, message in [
            (lambda: folio.to_csr(CONTEXT, table, LENS, PAGE_SIZE, indptr, ids[:8], last), "room for 8"),
            (lambda: folio.token_indices(CONTEXT, table, LENS, PAGE_SIZE, indptr, ids), "27 tokens; the list has"),
            (lambda: folio.to_dense(CONTEXT, table, LENS, PAGE_SIZE, ids.reshape(5, 2)), "2 columns"),
            (lambda: folio.validate(CONTEXT, table, LENS, PAGE_SIZE, 20, status=ids[:1]), "status")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            refused()
    assert set(indptr) == set(last) == set(ids) == set(read_only) == {-9}


# Pages of caches.

HEADS, DIM_QK, DIM_V, PAGES = 2, 16, 8, 20


def cache(element, seed=2, pages=PAGES):
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal((pages, PAGE_SIZE, HEADS, dim)).astype(np.float32).astype(element)
                 for dim in (DIM_QK, DIM_V))


def same_bits(a, b):
    return np.array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


@pytest.mark.parametrize("element", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_pages_are_copied(element):
    source, target = cache(element), cache(element, seed=3, pages=7)
    expected = [half.copy() for half in target]
    for half, new in zip(expected, source):
        half[[6, 0, 3]] = new[[1, 19, 1]]
    caches = folio.make_nhd_view(*source), folio.make_nhd_view(*target)
    folio.copy_pages(CONTEXT, *caches, [1, 19, 1], np.array([6, 0, 3]))
    assert all(map(same_bits, target, expected))


def test_pages_are_converted():
    source = cache(np.float32)
    target = [np.zeros((PAGES, HEADS, PAGE_SIZE, dim), ml_dtypes.float8_e4m3fn) for dim in (DIM_QK, DIM_V)]
    heads = np.array([0.5, 4.0], np.float32)
    scales = folio.CacheConvertScales(to_k=folio.Scale(data=heads, granularity="per_head"), to_v=2.0)
    folio.convert_pages(CONTEXT, folio.make_nhd_view(*source), folio.make_hnd_view(*target), [3, 4], [0, 1], scales)
    for half, new, factor in zip(target, source, (heads[:, None], np.float32(2))):
        rounded = (new[[3, 4]] / factor).astype(ml_dtypes.float8_e4m3fn)
        assert same_bits(half[:2], rounded.transpose(0, 2, 1, 3)) and not half[2:].astype(np.float32).any()


@pytest.mark.parametrize("element,out_element", [(np.float32, np.float32), (ml_dtypes.bfloat16, np.float32),
                                                 (ml_dtypes.float8_e5m2, np.float32), (np.float16, np.float16)])
def test_rows_are_gathered(element, out_element, table):
    halves = cache(element)
    out = [np.full((sum(LENS), HEADS, dim), 9, out_element) for dim in (DIM_QK, DIM_V)]
    fp8 = element == ml_dtypes.float8_e5m2
    requests = np.arange(1, 6, dtype=np.float32)
    k_scale = folio.Scale(data=requests, granularity="per_request") if fp8 else 1.0
    folio.gather_kv(CONTEXT, folio.make_nhd_view(*halves), table, LENS, *out, k_scale=k_scale)
    slots = sum(TOKENS, [])
    factor = np.repeat(requests, LENS)[:, None, None] if fp8 else np.float32(1)
    expected = [half.reshape(-1, HEADS, half.shape[3])[slots].astype(out_element) for half in halves]
    assert same_bits(out[0], expected[0] * factor.astype(out_element) if fp8 else expected[0])
    assert same_bits(out[1], expected[1])


def test_used_pages_are_dequantized(table):
    source = cache(ml_dtypes.float8_e4m3fn)
    pages = folio.num_dequantized_pages(LENS, PAGE_SIZE)
    assert pages == 1 + sum(COUNTS)
    target = [np.full((pages, PAGE_SIZE, HEADS, dim), 7, ml_dtypes.bfloat16) for dim in (DIM_QK, DIM_V)]
    made = np.full((5, 5), -9, np.int32)
    caches = folio.make_nhd_view(*source), folio.make_nhd_view(*target)
    folio.dequantize_pages(CONTEXT, caches[0], table, LENS, 0.5, 2.0, caches[1], made)
    numbers = iter(range(1, pages))
    assert made.tolist() == [[next(numbers) for _ in row] + [0] * (5 - len(row)) for row in ROWS]
    for half, old, scale in zip(target, source, (0.5, 2.0)):
        for row, new_row, length in zip(ROWS, made, LENS):
            for t in range(length):
                stored = old[row[t // PAGE_SIZE], t % PAGE_SIZE].astype(np.float32)
                assert same_bits(half[new_row[t // PAGE_SIZE], t % PAGE_SIZE], (stored * scale).astype(half.dtype))
        assert np.all(half[0] == 7)


def test_latent_keys_are_put_together():
    random = np.random.default_rng(5)
    nope, pe = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 4, 8), (3, 1, 5)))
    k = np.zeros((3, 4, 13), np.float32)
    folio.concat_mla_k(CONTEXT, k, nope, pe)
    assert np.array_equal(k, np.concatenate([nope, np.broadcast_to(pe, (3, 4, 5))], axis=2))
    k[...] = 0
    with pytest.raises(folio.InvalidArgument):
        folio.concat_mla_k(CONTEXT, k, nope, pe[:2])
    assert not k.any()


def test_sizes_of_caches():
    shape = folio.KvCacheShape(num_pages=3, page_size=4, num_kv_heads=2, head_dim_qk=16, head_dim_v=8)
    assert (folio.k_elements(shape), folio.v_elements(shape), folio.token_scale_elements(shape)) == (384, 192, 24)
    shape.num_pages = 2**62
    with pytest.raises(folio.InvalidArgument):
        folio.k_elements(shape)


def test_refusals_of_pages_write_nothing(table):
    source, target = cache(np.float32), [np.full((7, PAGE_SIZE, HEADS, dim), 7, np.float32) for dim in (DIM_QK, DIM_V)]
    frozen = [half.copy() for half in target]
    for half in frozen:
        half.flags.writeable = False
    read, write, other, fixed = map(lambda halves: folio.make_nhd_view(*halves),
                                    (source, target, cache(np.float16), frozen))
    out = [np.full((sum(LENS), HEADS, dim), 7, np.float32) for dim in (DIM_QK, DIM_V)]
    made, scales = np.zeros((5, 4), np.int32), folio.CacheConvertScales(to_k=2.0)
    spoiled = folio.csr_table(np.array([1, 99, 2], np.int32), np.array([0, 3], np.int32))
    for refused, message in [
            (lambda: folio.copy_pages(CONTEXT, read, write, [0, 20], [0, 1]), "20"),
            (lambda: folio.copy_pages(CONTEXT, read, write, [0, 1], [0, 7]), "7"),
            (lambda: folio.copy_pages(CONTEXT, read, write, [0, 1], [2, 2]), "2"),
            (lambda: folio.copy_pages(CONTEXT, read, write, [0], [2, 3]), "1|2"),
            (lambda: folio.copy_pages(CONTEXT, other, write, [0], [2]), "different dtype"),
            (lambda: folio.copy_pages(CONTEXT, read, fixed, [0], [2]), "to_cache.k is read-only"),
            (lambda: folio.convert_pages(CONTEXT, read, write, [0], [2], scales), "fp8|scale"),
            (lambda: folio.gather_kv(CONTEXT, read, spoiled, [12], out[0][:12], out[1][:12]), "99"),
            (lambda: folio.gather_kv(CONTEXT, read, table, LENS, out[0][:5], out[1]), "k_out"),
            (lambda: folio.dequantize_pages(CONTEXT, read, table, LENS, 1.0, 1.0, write, made), "fp8"),
            (lambda: folio.dequantize_pages(CONTEXT, read, table, LENS, 1.0, 1.0, write, made[:4]),
             r"new_table has shape \[4, 4\]; there are 5 requests")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            refused()
    assert all(np.all(array == 7) for array in [*target, *out])
