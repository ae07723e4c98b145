"""Lengths, offsets and ids: int32 arrays are borrowed; int64 arrays, lists and tuples are taken and copied once."""

import folio
import folio.backends
import numpy as np
import pytest

import problems
from foreign_array import CUDA, ForeignArray


def refused(match):
    return pytest.raises(folio.InvalidArgument, match=match)


def as_list(array):
    return array.tolist()


def as_tuple(array):
    return tuple(array.tolist())


def as_int64(array):
    return array.astype(np.int64)


def as_strided_int64(array):
    return np.repeat(array.astype(np.int64), 2, axis=-1)[..., ::2]


FORMS = [as_list, as_tuple, as_int64, as_strided_int64]


def result(problem, convert, dense):
    """What a layer computes whose every length, offset and id is given as `convert` makes it."""
    batch = problem.batch
    if dense:
        entries = np.full((len(batch.pages), max(map(len, batch.pages))), -1, np.int32)
        for row, pages in zip(entries, batch.pages):
            row[:len(pages)] = pages
        table = folio.dense_table(convert(entries))
    else:
        table = folio.csr_table(convert(batch.page_ids), convert(batch.page_indptr))
    first = np.zeros(len(batch.q_len), np.int32)
    groups = np.arange(len(batch.q_len) + 1, dtype=np.int32)
    positions = np.array(batch.kv_len, np.int32) - np.array(batch.q_len, np.int32)
    segment = folio.KvSegment(convert(batch.lengths), first_pos=convert(first), group_indptr=convert(groups))
    view = folio.BatchView(convert(batch.cu_q), [segment], q_first_pos=convert(positions))
    assert view.num_tokens == batch.cu_q[-1]
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    plan = folio.plan(op, view, folio.make_plan_buffer(op))
    out, lse = problem.outputs()
    cache = folio.make_nhd_view(problem.k, problem.v)
    args = folio.AttentionArgs(problem.q, out, [folio.SegmentArgs(cache, table)], lse=lse)
    folio.run(plan, args, folio.Workspace(folio.workspace_size(plan)))
    return out, lse


@pytest.mark.parametrize("dense", [False, True], ids=["csr", "dense"])
@pytest.mark.parametrize("convert", FORMS)
def test_every_form_computes_the_same(convert, dense):
    problem = problems.make("float32", "mixed")
    expected = result(problem, lambda array: array, dense)
    problems.assert_close(problem, *expected, problem.exact())
    for got, wanted in zip(result(problem, convert, dense), expected):
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("slots", [[3, -1, 7], (3, -1, 7), np.array([3, -1, 7], np.int32), np.array([3, -1, 7])])
def test_slots(slots):
    new = np.arange(3 * 2 * 8, dtype=np.float32).reshape(3, 2, 8) + 1
    k, v = (np.zeros((1, 16, 2, 8), np.float32) for _ in range(2))
    folio.write_kv_cache(folio.Context.cpu(num_threads=1),
                         folio.CacheWriteArgs(new, new, slots, folio.make_nhd_view(k, v)))
    assert np.array_equal(k[0, [3, 7]], new[[0, 2]]) and np.count_nonzero(k) == np.count_nonzero(new[[0, 2]])


def test_ragged_offsets_and_tail_lengths():
    problem = problems.make("float32", "prefill")
    keys, values = problem.q[:, :2].copy(), np.ones((23, 2, 24), np.float32)
    batch = folio.BatchView([0, 7, 23], [folio.KvSegment([7, 16], source="ragged")])
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    plan = folio.plan(op, batch, folio.make_plan_buffer(op))
    out, _ = problem.outputs()
    ragged = folio.RaggedKvView(keys, values, [0, 7, 23])
    args = folio.AttentionArgs(problem.q, out, [folio.SegmentArgs(ragged=ragged)])
    folio.run(plan, args, folio.Workspace(folio.workspace_size(plan)))
    np.testing.assert_allclose(out, 1, rtol=1e-6)  # every value is 1, so every weighted mean is
    folio.BatchView([0, 1], [folio.KvSegment([4])], custom_mask=folio.CustomMask(scope="tail", tail_len=[2]))


def test_copies_are_of_the_moment():
    """An int32 array is read when plan runs, a copy when the object was made."""
    for dtype, expected in ((np.int32, 8), (np.int64, 9)):
        offsets = np.array([0, 9], dtype)
        batch = folio.BatchView(offsets, [folio.KvSegment([9])], num_tokens=9)
        offsets[1] = 8
        problem = problems.make("float32", "mixed")
        op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
        plan = folio.plan(op, batch, folio.make_plan_buffer(op))
        assert folio.summary(plan).qk_pairs > 0 and plan.num_tokens == 9
        out = np.full((9, 4, 24), np.nan, np.float32)
        table = folio.csr_table([0], [0, 1])
        args = folio.AttentionArgs(problem.q, out, [folio.SegmentArgs(
            folio.make_nhd_view(np.ones((1, 16, 2, 32), np.float32), np.ones((1, 16, 2, 24), np.float32)), table)])
        folio.run(plan, args, folio.Workspace(folio.workspace_size(plan)))
        assert np.isfinite(out).all(axis=(1, 2)).sum() == expected


def test_no_entries():
    assert folio.csr_table([], [0]).num_rows == 0
    assert folio.csr_table(np.zeros(0, np.int64), np.zeros(1, np.int64)).num_rows == 0
    assert folio.dense_table([]).num_rows == 0
    assert folio.dense_table([[], []]).num_rows == 2
    assert folio.dense_table(np.zeros((3, 0), np.int64)).num_rows == 3
    assert folio.BatchView([0], []).num_requests == 0
    assert folio.dense_table(range(0, 0)).num_rows == 0


@pytest.mark.parametrize("given,message", [
    ([1, 2**31], r"kv_len\[1\] is 2147483648, which 32 bits do not hold"),
    (np.array([1, 2, -2**31 - 1]), r"kv_len\[2\] is -2147483649, which 32 bits do not hold"),
    ([1, 2**70], r"kv_len\[1\] is 1180591620717411303424, which 64 bits do not hold"),
    (np.array([[1]]), r"kv_len has shape \[1, 1\]; it must have one dimension"),
    (np.array([1.0]), "kv_len is float64; int32 and int64 are taken"),
    (np.array([True]), "kv_len is bool; int32 and int64 are taken"),
    (np.array([1], np.uint32), "kv_len is uint32; int32 and int64 are taken"),
    ("12", "kv_len: expected an array, got '12'"),
    (3, "kv_len: expected an array, got 3"),
    ({1, 2}, "kv_len: expected an array, got a set"),
])
def test_what_is_refused(given, message):
    with refused(message):
        folio.KvSegment(given)
    with pytest.raises(TypeError, match="kv_len: expected a value, got None"):
        folio.KvSegment(None)


@pytest.mark.parametrize("given,message", [
    ([[1, 2], [3]], r"table.entries\[1\] has 1 entries, the row before 2"),
    ([[1, 2], [3, 2**31]], r"table.entries\[1, 1\] is 2147483648"),
    (np.array([[1, 2], [3, 2**40]]), r"table.entries\[1, 1\] is 1099511627776"),
    (np.array([1, 2]), r"table.entries has shape \[2\]; it must have 2 dimensions"),
])
def test_tables_that_are_refused(given, message):
    with refused(message):
        folio.dense_table(given)


# One call of each kind that takes integers: borrowed, copied, and either, by where they lie.
READERS = {
    "kv_len": folio.KvSegment,
    "slot_mapping": lambda given: folio.CacheWriteArgs(*[np.zeros((1, 2, 8), np.float32)] * 2, given, folio.make_nhd_view(
        *[np.zeros((1, 16, 2, 8), np.float32)] * 2)),
    "slots": lambda given: folio.TokenAllocator(64).free(given),
    "seq_lens": lambda given: folio.backends.CommonAttentionMetadata(
        query_start_loc=[0, 1], seq_lens=given, block_table=np.zeros((1, 1), np.int32), slot_mapping=[0]),
}


class Surprise:
    """An integer that has second thoughts."""

    def __index__(self):
        raise ZeroDivisionError("not today")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("wrong,given", [("x", "'x'"), (1.0, "1.0"), (True, "True"), (None, "None"), ([1], "a list"),
                                         (np.array([1]), "a numpy.ndarray"), (np.array(1.0), "a numpy.ndarray")])
def test_a_wrong_kind_of_element_is_a_type_error_everywhere(name, wrong, given):
    with pytest.raises(TypeError, match=rf"^{name}\[1\]: expected an integer, got {given}$"):
        READERS[name]([1, wrong])


@pytest.mark.parametrize("name", READERS)
def test_what_every_reader_says_of_a_value(name):
    with refused(rf"{name}\[0\] is {2**70}, which 64 bits do not hold"):
        READERS[name]((2**70,))
    if name != "slot_mapping":  # int64
        for given in ([1, 2**31], np.array([1, 2**31])):
            with refused(rf"{name}\[1\] is 2147483648, which 32 bits do not hold"):
                READERS[name](given)
    with refused(f"{name} is bool; int32 and int64 are taken"):
        READERS[name](np.array([True]))
    with pytest.raises(ZeroDivisionError, match="not today"):
        READERS[name]([Surprise()])


def test_a_block_table_is_read_like_any_other_table():
    """An id of 64 bits was cut to 32: it named another page."""
    def batch(table):
        return folio.backends.CommonAttentionMetadata(query_start_loc=[0, 1], seq_lens=[5], block_table=table, slot_mapping=[0])

    with refused(r"block_table\[0, 1\] is 4294967297, which 32 bits do not hold"):
        batch(np.array([[1, 2**32 + 1]]))
    with pytest.raises(TypeError, match=r"block_table\[0, 0\]: expected an integer, got 'x'"):
        batch([["x"]])
    batch([[1, 2]])


def test_integers_of_libraries_are_integers():
    assert folio.PrefixKey([np.int64(17), np.array(1, np.int32), 16]).tokens.tolist() == [17, 1, 16]
    assert folio.dense_table([[1, 2], [3, 4]]).num_rows == folio.dense_table(((1, 2), range(2))).num_rows == 2
    for wrong, given in ((1, "1"), ("12", "'12'")):
        with pytest.raises(TypeError, match=rf"table.entries\[0\]: expected a list of integers, got {given}"):
            folio.dense_table([wrong])
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert folio.PrefixKey(list(torch.tensor([17, 1]))).tokens.tolist() == [17, 1]
    with pytest.raises(TypeError, match=r"tokens\[0\]: expected an integer, got a torch.Tensor"):
        folio.PrefixKey([torch.tensor([17])])


class OfAGpu(ForeignArray):
    """An array that its library says is on a GPU, and that it converts there."""

    def astype(self, dtype):
        self.converted = OfAGpu(self.array.astype(dtype), device=CUDA)
        return self.converted


def test_arrays_on_a_gpu_are_converted_by_their_library():
    offsets, lengths = (OfAGpu(np.array(values, np.int64), device=CUDA) for values in ([0, 1, 2], [5, 9]))
    batch = folio.BatchView(offsets, [folio.KvSegment(lengths)], num_tokens=2)
    assert batch.where is folio.Where.DEVICE and batch.num_requests == 2
    assert offsets.converted.array.dtype == lengths.converted.array.dtype == np.int32
    assert offsets.converted.exports == 1
    with refused("kv_len is int64 on CUDA device 0; it must be int32 there"):
        folio.KvSegment(ForeignArray(np.array([1]), device=CUDA))


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    problem = problems.make("float32", "mixed")
    expected = result(problem, lambda array: array, dense=True)
    got = result(problem, lambda array: torch.from_numpy(array).long(), dense=True)
    assert all(np.array_equal(a, b) for a, b in zip(got, expected))


def test_a_list_that_says_another_length_is_not_believed():
    class Longer(list):
        def __len__(self):
            return 1000

    table = folio.dense_table([Longer([1])])
    assert "1" in repr(table)
    with refused(r"spans has shape \[1, 1\]"):
        folio.BatchView([0, 1], [folio.KvSegment([1])], spans=[Longer([1])])
