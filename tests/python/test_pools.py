"""Pools, allocators and rows, beside programs of a few lines that keep the same books."""

import gc

import folio
import ml_dtypes
import numpy as np
import pytest

LAYERS, HEADS, DIM_QK, DIM_V, PAGE_SIZE, SLOTS = 2, 2, 16, 8, 4, 24
CONTEXT = folio.Context.cpu(num_threads=1)


def config(dtype="float32", **changes):
    standard = {"num_slots": SLOTS, "page_size": PAGE_SIZE, "num_layers": LAYERS, "num_kv_heads": HEADS,
                "head_dim_qk": DIM_QK, "head_dim_v": DIM_V}
    return folio.KvPoolConfig(**{**standard, "dtype": dtype, **changes})


def tokens(count, seed=1, element=np.float32):
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal((count, HEADS, dim)).astype(element) for dim in (DIM_QK, DIM_V))


@pytest.mark.parametrize("dtype,element", [("float32", np.float32), ("float16", np.float16),
                                           ("bfloat16", ml_dtypes.bfloat16)])
def test_tokens_are_where_they_were_written(dtype, element):
    pool = folio.KvPool(config(dtype))
    assert (pool.num_slots, pool.buffer_len, pool.config.page_size) == (SLOTS, SLOTS + PAGE_SIZE, PAGE_SIZE)
    k, v = tokens(6, element=element)
    slots = np.array([5, 27, 4, -1, 11, 20], np.int32)
    folio.write_kv_cache(CONTEXT, pool.write_args(1, k, v, slots))
    expected = [np.zeros((SLOTS + PAGE_SIZE, HEADS, dim), element) for dim in (DIM_QK, DIM_V)]
    for half, new in zip(expected, (k, v)):
        half[slots[slots >= 0]] = new[slots >= 0]
    for buffer, wanted in zip((pool.key_buffer(1), pool.value_buffer(1)), expected):
        held = buffer.numpy()
        assert held.dtype == element and np.array_equal(held, wanted)
        assert not pool.key_buffer(0).numpy().any()


def test_leading_dimensions_are_the_tokens():
    pool = folio.KvPool(config())
    k, v = tokens(6)
    args = pool.write_args(0, k.reshape(2, 3, HEADS * DIM_QK), v.reshape(1, 6, HEADS, DIM_V), [4, 5, 6, 7, 8, 9])
    folio.write_kv_cache(CONTEXT, args)
    assert np.array_equal(pool.key_buffer(0).numpy()[4:10], k)
    assert np.array_equal(pool.value_buffer(0).numpy()[4:10], v)


def test_buffers_are_live_and_outlive_their_pool():
    pool = folio.KvPool(config())
    keys, view = pool.key_buffer(0), pool.view(0)
    keys.numpy()[3, 1, 2] = 5
    assert pool.key_buffer(0).numpy()[3, 1, 2] == 5
    assert np.from_dlpack(keys)[3, 1, 2] == 5
    del pool
    gc.collect()
    assert keys.numpy()[3, 1, 2] == 5 and keys.numpy().sum() == 5
    assert (view.num_pages, view.page_size) == (7, PAGE_SIZE)


def test_pages_of_other_sizes_are_the_same_memory():
    pool = folio.KvPool(config())
    wide = pool.view(1, 14)
    assert (wide.num_pages, wide.page_size, wide.dtype) == (2, 14, folio.float32)
    k, v = tokens(2)
    folio.write_kv_cache(CONTEXT, folio.CacheWriteArgs(k, v, np.array([14, 3]), wide))
    assert np.array_equal(pool.key_buffer(1).numpy()[[14, 3]], k)
    with pytest.raises(folio.InvalidArgument, match="page_size is 5"):
        pool.view(1, 5)
    packed = folio.KvPool(config("bfloat16", page_size=16, num_slots=32, layout="cpu_packed"))
    assert packed.view(0).format == folio.KvFormat.CPU_PACKED
    for refused in (lambda: packed.view(0, 8), lambda: packed.key_buffer(0)):
        with pytest.raises(folio.Error) as caught:
            refused()
        assert caught.value.code == folio.ErrorCode.UNSUPPORTED


def test_borrowed_memory():
    shapes = [(SLOTS + PAGE_SIZE, HEADS, dim) for dim in (DIM_QK, DIM_V)]
    memory = [[np.zeros(shape, np.float32) for _ in range(LAYERS)] for shape in shapes]
    pool = folio.KvPool(config(), *memory)
    assert folio.KvPool.k_bytes_per_layer(pool.config) == memory[0][0].nbytes
    assert folio.KvPool.v_bytes_per_layer(pool.config) == memory[1][0].nbytes
    k, v = tokens(3)
    folio.write_kv_cache(CONTEXT, pool.write_args(1, k, v, np.array([4, 9, 5])))
    assert np.array_equal(memory[0][1][[4, 9, 5]], k) and np.array_equal(memory[1][1][[4, 9, 5]], v)
    assert not memory[0][0].any()
    read_only = memory[0][1].copy()
    read_only.flags.writeable = False
    for layer, message in [(memory[0][1][1:], r"k\[1\] has \d+ bytes; a layer of the pool has"),
                           (memory[0][1][::-1], r"k\[1\] has a stride"), (read_only, r"k\[1\] is read-only"),
                           (memory[0][1].astype(np.float16), r"k\[1\] is float16; the pool is float32"),
                           (None, r"k\[1\] is None")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            folio.KvPool(config(), [memory[0][0], layer], memory[1])
    with pytest.raises(folio.InvalidArgument, match="1 addresses for keys and 2 for values"):
        folio.KvPool(config(), memory[0][:1], memory[1])


def test_scales_of_an_fp8_pool():
    pool = folio.KvPool(config("float8_e4m3fn"))
    heads = np.array([0.5, 2.0], np.float32)
    pool.set_scales(0, folio.Scale(data=heads, granularity="per_head"), 0.25)
    assert pool.v_scale(0).value == 0.25 and pool.k_scale(0).granularity == folio.ScaleGranularity.PER_HEAD
    assert pool.k_scale(1).value == 1.0
    k, v = tokens(2)
    folio.write_kv_cache(CONTEXT, pool.write_args(0, k, v, [4, 5]))
    rounded = (k / heads[:, None]).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(pool.key_buffer(0).numpy()[4:6].view(np.uint8), rounded.view(np.uint8))
    rounded = (v / np.float32(0.25)).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(pool.value_buffer(0).numpy()[4:6].view(np.uint8), rounded.view(np.uint8))
    for bad, message in [(-1.0, "k is -1|k_scale is -1|scale"), ("x", "k must be a number"),
                         (folio.Scale(data=heads[:1], granularity="per_head"), "k.data has 1 heads; there are 2")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            pool.set_scales(0, bad, 1.0)
    assert pool.v_scale(0).value == 0.25
    with pytest.raises(folio.InvalidArgument, match="only fp8 pools have scales"):
        folio.KvPool(config()).set_scales(0, 2.0, 1.0)


def test_refusals_of_pools():
    pool = folio.KvPool(config())
    k, v = tokens(2)
    for layer in (-1, LAYERS):
        for refused in (lambda: pool.view(layer), lambda: pool.key_buffer(layer), lambda: pool.k_scale(layer),
                        lambda: pool.write_args(layer, k, v, [4, 5])):
            with pytest.raises(folio.InvalidArgument, match=f"layer {layer} is not of this pool"):
                refused()
    with pytest.raises(folio.InvalidArgument, match="k has 2 tokens, slots has 3"):
        pool.write_args(0, k, v, [4, 5, 6])
    with pytest.raises(TypeError, match=r"slots\[1\]: expected an integer, got 1.5"):
        pool.write_args(0, k, v, [4, 1.5])
    with pytest.raises(folio.InvalidArgument, match="num_slots is 23"):
        folio.KvPool(config(num_slots=23))
    with pytest.raises(folio.InvalidArgument):
        folio.KvPool(config("float4_e2m1fn_x2"))


class Books:
    """A TokenAllocator in a few lines: free pages in order, and those that were freed since."""

    def __init__(self, slots, page_size):
        self.page_size = page_size
        self.free = list(range(1, slots // page_size + 1))
        self.released, self.held = [], set()  # pages, slots

    def take(self, count):
        if count > len(self.free) + len(self.released):
            return None
        if count > len(self.free):
            self.free, self.released = sorted(self.free + self.released), []
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def alloc(self, count):
        pages = self.take(-(-count // self.page_size))
        if pages is None:
            return None
        slots = [page * self.page_size + i for page in pages for i in range(self.page_size)][:count]
        self.held.update(slots)
        return slots

    def extend(self, prefix_lens, seq_lens, last_slots):
        old = [min(seq, -(-prefix // self.page_size) * self.page_size) - prefix
               for prefix, seq in zip(prefix_lens, seq_lens)]
        rest = [seq - prefix - own for prefix, seq, own in zip(prefix_lens, seq_lens, old)]
        pages = self.take(sum(-(-count // self.page_size) for count in rest))
        if pages is None:
            return None
        slots = []
        for own, last, count in zip(old, last_slots, rest):
            slots += [last + 1 + i for i in range(own)]
            mine = [pages.pop(0) for _ in range(-(-count // self.page_size))]
            slots += [page * self.page_size + i for page in mine for i in range(self.page_size)][:count]
        self.held.update(slots)
        return slots

    def give_back(self, slots):
        pages = {slot // self.page_size for slot in slots}
        self.released += pages
        self.held -= {page * self.page_size + i for page in pages for i in range(self.page_size)}

    @property
    def available(self):
        return (len(self.free) + len(self.released)) * self.page_size


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_allocator_keeps_the_same_books(page_size):
    random = np.random.default_rng(page_size)
    allocator, books = folio.TokenAllocator(40 * page_size, page_size), Books(40 * page_size, page_size)
    requests = []  # slots of each
    for _ in range(400):
        kind = random.integers(4)
        if kind == 0 and requests:  # all of them grow
            chosen = [request for request in requests if random.random() < 0.5]
            prefix = [len(request) for request in chosen]
            seq = [length + int(random.integers(0, 3 * page_size)) for length in prefix]
            last = [request[-1] if request else -1 for request in chosen]
            if sum(prefix) and random.random() < 0.5:
                pages = allocator.fresh_pages(prefix, seq, last)
                assert pages == sum(-(-s // page_size) + -p // page_size for p, s in zip(prefix, seq))
            got = allocator.alloc_extend(np.array(prefix, np.int64), seq, last)
            wanted = books.extend(prefix, seq, last)
            assert (got is None) == (wanted is None)
            if wanted is not None:
                assert got.dtype == np.int32 and got.tolist() == wanted
                for request, old, new in zip(chosen, prefix, seq):
                    request += wanted[:new - old]
                    wanted = wanted[new - old:]
        elif kind == 1 and requests:  # decode
            last = [request[-1] for request in requests if request]
            seq = [len(request) + 1 for request in requests if request]
            got = allocator.alloc_decode(seq, np.array(last, np.int32))
            wanted = books.extend([length - 1 for length in seq], seq, last)
            assert (got is None) == (wanted is None)
            if wanted is not None:
                assert got.tolist() == wanted
                for request in filter(None, list(requests)):
                    request.append(wanted.pop(0))
        elif kind == 2 and requests:
            request = requests.pop(random.integers(len(requests)))
            allocator.free(request)
            books.give_back(request)
        else:
            count = int(random.integers(0, 6 * page_size))
            got, wanted = allocator.alloc(count), books.alloc(count)
            assert (got is None) == (wanted is None)
            if wanted is not None:
                assert got.tolist() == wanted
                requests.append(wanted)
        assert allocator.available == books.available
        held = {slot for slot in range(-2, 41 * page_size + 2) if allocator.is_held(slot)}
        assert held == books.held
    allocator.check_invariants()
    allocator.clear()
    assert allocator.available == allocator.size == 40 * page_size


def test_nothing_changes_where_an_allocator_refuses():
    allocator = folio.TokenAllocator(16, 4)
    slots = allocator.alloc(8)
    assert allocator.alloc(9) is None and allocator.alloc(2**62) is None
    assert allocator.alloc_extend([0], [2**31 - 1], [-1]) is None
    for refused, message in [
            (lambda: allocator.free([int(slots[0]), 12]), "12"), (lambda: allocator.free([0]), "0"),
            (lambda: allocator.alloc(-1), "count is -1"),
            (lambda: allocator.alloc_extend([5], [4], [8]), "request 0"),
            (lambda: allocator.alloc_extend([5, 0], [4, 2**31 - 1], [8, 0]), "request 0"),
            (lambda: allocator.alloc_extend([1, 2], [4], [8]), "prefix_lens has 2 entries, seq_lens 1"),
            (lambda: allocator.alloc_decode([6], [13]), "request 0"),
            (lambda: allocator.free([2**31]), r"slots\[0\] is 2147483648"),
            (lambda: allocator.free(np.zeros((1, 1), np.int32)), r"slots has shape \[1, 1\]"),
            (lambda: allocator.free(np.zeros(1, np.float32)), "slots is float32; int32 and int64 are taken")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            refused()
    with pytest.raises(TypeError, match="count: expected an integer, got 'x'"):
        allocator.alloc("x")
    with pytest.raises(TypeError, match=r"slots\[0\]: expected an integer, got True"):
        allocator.free([True])
    assert allocator.available == 8 and all(map(allocator.is_held, slots.tolist()))
    allocator.free(slots.astype(np.int64)[::2])  # any slot of a page gives it back
    assert allocator.available == 16
    with pytest.raises(folio.InvalidArgument):
        allocator.free(slots)
    with pytest.raises(folio.InvalidArgument, match="num_slots is 15"):
        folio.TokenAllocator(15, 4)


def test_a_free_group_holds_pages_back():
    allocator = folio.TokenAllocator(8)
    slots = allocator.alloc(8)
    with allocator.free_group() as group:
        allocator.free(slots[:4])
        assert allocator.available == 0 and group.is_open and "open" in repr(group)
        with pytest.raises(folio.InvalidArgument):
            allocator.free_group()
        with pytest.raises(folio.InvalidArgument):
            allocator.clear()
    assert allocator.available == 4 and not group.is_open
    group.close()
    other = allocator.free_group()
    del allocator
    gc.collect()
    other.close()


def test_window_copies():
    allocator = folio.WindowTokenAllocator(16, 8, page_size=2)
    slots = allocator.alloc(6)
    window = allocator.to_window(slots)
    assert sorted(window.tolist()) == list(range(2, 8)) and np.array_equal(window % 2, slots % 2)
    assert allocator.window_available == 2 and allocator.alloc(4) is None
    allocator.free_window(slots[:2])
    assert (allocator.available, allocator.window_available) == (10, 4)
    assert [allocator.has_window_copy(int(slot)) for slot in slots] == [False] * 2 + [True] * 4
    assert allocator.to_window([int(slots[1]), -1]).tolist() == [1, -1]
    more = allocator.alloc_extend([0], [3], [-1])
    assert allocator.alloc_decode([4], [int(more[-1])]).tolist() == [more[-1] + 1]
    allocator.apply(folio.SlotChanges(freed=slots[2:], window_freed=more[:1]))
    assert not any(map(allocator.is_held, slots[2:].tolist())) and not allocator.has_window_copy(int(more[0]))
    for refused in (lambda: allocator.free_window([15]), lambda: allocator.free([0]),
                    lambda: folio.WindowTokenAllocator(16, 7, page_size=2)):
        with pytest.raises(folio.InvalidArgument):
            refused()
    allocator.check_invariants()
    allocator.clear()
    assert (allocator.available, allocator.window_available) == (allocator.size, allocator.window_size) == (16, 8)


def test_rows_of_requests():
    rows = folio.ReqToTokenPool(3, 8)
    assert [rows.alloc(), rows.alloc(), rows.alloc(), rows.alloc()] == [1, 2, 3, None]
    rows.free(2)
    rows.free(1)
    assert rows.available == 2 and rows.alloc(3) is None and rows.available == 2
    assert rows.alloc(2).tolist() == [2, 1]  # longest free first
    live = rows.row(2)
    rows.write(2, 3, np.array([7, 8, 9], np.int64))
    rows.write(2, 0, [4])
    expected = np.zeros((4, 8), np.int32)
    expected[2] = [4, 0, 0, 7, 8, 9, 0, 0]
    assert np.array_equal(rows.entries, expected) and np.array_equal(live, expected[2])
    table = rows.table()
    assert table.num_rows == 4
    assert folio.to_dense(table, [0, 0, 6, 0], 1).tolist()[2] == [4, 0, 0, 7, 8, 9]
    for array in (live, rows.entries):
        with pytest.raises(ValueError):
            array[:] = 1
    for refused, message in [(lambda: rows.write(2, 6, [1, 2, 3]), "position|6"),
                             (lambda: rows.write(0, 0, [1]), "row 0"),
                             (lambda: rows.free(0), "row 0"), (lambda: rows.row(4), "row 4"),
                             (lambda: rows.alloc(-1), "count is -1"), (lambda: folio.ReqToTokenPool(0, 1), "max_reqs"),
                             (lambda: rows.write(2, 0, [2**40]), r"slots\[0\] is 1099511627776")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            refused()
    assert np.array_equal(rows.entries, expected)
    rows.clear()
    assert rows.available == rows.size == 3 and not rows.entries.any()
    del rows
    gc.collect()
    assert not live.any() and folio.to_dense(table, [2], 1).tolist() == [[0, 0]]
