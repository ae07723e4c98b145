"""How arrays are borrowed: where they lie, what they are, that nothing is copied, and what is refused."""

import gc
import sys

import folio
import ml_dtypes
import numpy as np
import pytest

import problems
from foreign_array import BFLOAT, CUDA, FLOAT8_E4M3FN, FLOAT8_E5M2, ForeignArray


def refused(match):
    return pytest.raises(folio.InvalidArgument, match=match)


def test_a_view_is_the_array_itself():
    array = np.arange(48, dtype=np.float32).reshape(2, 4, 6)
    part = array[:, 1::2, :3]
    view = folio.TensorView(part)
    assert view.data == part.ctypes.data
    assert (view.shape, view.strides, view.dtype) == ((2, 2, 3), (24, 12, 1), folio.float32)


@pytest.mark.parametrize("element,integers,dtype", [
    (ml_dtypes.bfloat16, np.uint16, folio.bfloat16),
    (ml_dtypes.float8_e4m3fn, np.uint8, folio.float8_e4m3fn),
    (ml_dtypes.float8_e5m2, np.uint8, folio.float8_e5m2),
])
def test_types_that_numpy_lacks(element, integers, dtype):
    array = np.ones((4, 6), element)[:, ::2]
    view = folio.TensorView(array)
    assert (view.dtype, view.data, view.strides) == (dtype, array.ctypes.data, (6, 2))
    bits = array.view(integers)
    assert folio.TensorView(bits, dtype).dtype == dtype
    with refused("says no float type; name it"):
        folio.TensorView(bits)
    with refused("cannot be taken as"):
        folio.TensorView(array, folio.float32)
    with refused("takes elements of"):
        folio.TensorView(bits, folio.float32)


@pytest.mark.parametrize("code,integers,dtype", [
    (BFLOAT, np.uint16, folio.bfloat16),
    (FLOAT8_E4M3FN, np.uint8, folio.float8_e4m3fn),
    (FLOAT8_E5M2, np.uint8, folio.float8_e5m2),
])
def test_types_as_dlpack_names_them(code, integers, dtype):
    assert folio.TensorView(ForeignArray(np.zeros((2, 3), integers), code)).dtype == dtype


def test_foreign_arrays_are_held_and_let_go():
    array = ForeignArray(np.zeros(4, np.float32), count_releases=True)
    view = folio.TensorView(array)
    assert (array.exports, array.releases) == (1, 0)
    del view
    gc.collect()
    assert array.releases == 1


def test_merges_hold_their_outputs_until_they_have_written_them():
    class Out(ForeignArray):
        def _release(self, pointer):
            self.seen = self.array.copy()
            super()._release(pointer)

    context, lse = folio.Context.cpu(num_threads=1), np.zeros((2, 3), np.float32)
    ones = np.ones((2, 3, 8), np.float32)
    state, out = folio.AttentionStateView(ones, lse), Out(np.zeros_like(ones), count_releases=True)
    folio.merge_state(context, state, state, out)
    assert out.releases == 1 and np.all(out.seen == 1)
    states, out = folio.AttentionStatesView(ones[:, None], lse[:, None]), Out(np.zeros_like(ones), count_releases=True)
    folio.merge_states(context, states, out)
    assert out.releases == 1 and np.all(out.seen == 1)


def test_objects_keep_the_memory_they_point_into():
    lengths = np.array([3], np.int32)
    before = sys.getrefcount(lengths)
    batch = folio.BatchView(np.array([0, 1], np.int32), [folio.KvSegment(lengths)])
    assert sys.getrefcount(lengths) > before
    del batch
    gc.collect()
    assert sys.getrefcount(lengths) == before


def test_everything_may_be_a_temporary():
    problem = problems.make("float32", "mixed")
    out, lse = problem.outputs()
    op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    args = problem.args(out, lse)
    problem.k, problem.v, problem.q = problem.k.copy(), problem.v.copy(), problem.q.copy()
    del op
    gc.collect()
    folio.run(plan, args, folio.Workspace(folio.workspace_size(plan)))
    problems.assert_close(problem, out, lse, problem.exact())


def test_strided_inputs_and_outputs_are_used_in_place():
    problem = problems.make("float32", "mixed")
    exact = problem.exact()
    tokens, heads, dim_v = *problem.q.shape[:2], problem.v.shape[3]
    fused = np.full((tokens, 3, heads, 40), np.nan, np.float32)
    fused[:, 0, :, :problem.q.shape[2]] = problem.q
    problem.q = fused[:, 0, :, :problem.q.shape[2]]
    memory = np.full((problem.k.shape[0], 2, *problem.k.shape[1:]), np.nan, np.float32)  # K and V of a page in turn
    memory[:, 0], memory[:, 1, :, :, :dim_v] = problem.k, problem.v
    problem.k, problem.v = memory[:, 0], memory[:, 1, :, :, :dim_v]
    out = np.full((heads, tokens, dim_v + 8), 7, np.float32).transpose(1, 0, 2)
    lse = np.full((heads, tokens + 1), 7, np.float32).T[:tokens]
    problems.run(problem, out=out[:, :, :dim_v], lse=lse)
    problems.assert_close(problem, out[:, :, :dim_v], lse, exact)
    assert np.all(out[:, :, dim_v:] == 7) and np.all(lse.base[:, tokens] == 7)


class TestEmptyArrays:
    """Idle steps. numpy gives an array without elements strides of 0."""

    def test_strides_are_those_of_a_packed_array(self):
        for shape, strides in (((0, 4, 32), (128, 32, 1)), ((3, 0, 2), (2, 2, 1)), ((2, 3, 0), (3, 1, 1))):
            assert folio.TensorView(np.zeros(shape, np.float32)).strides == strides

    @pytest.mark.parametrize("table", ["csr", "dense", "no columns"])
    def test_no_tokens(self, table):
        problem = problems.make("float32", "decode")
        requests = 0 if table == "dense" else 3
        problem.batch.q_len, problem.batch.kv_len = [0] * requests, [0] * requests
        problem.batch.pages = [[] for _ in range(requests)]
        problem.q = problem.q[:0].copy()
        problem.k, problem.v = problem.k[:0].copy(), problem.v[:0].copy()
        if table != "csr":
            entries = np.zeros((requests, 0 if table == "no columns" else 4), np.int32)
            problem.segment = lambda: folio.SegmentArgs(folio.make_nhd_view(problem.k, problem.v),
                                                        folio.dense_table(entries))
        out, lse = problems.run(problem)
        assert out.shape == (0, 4, 24) and lse.shape == (0, 4)
        oracle = folio.reference_attention(problem.config, problem.batch_view(), problem.args(None))
        assert [part.shape for part in oracle] == [(0, 4, 24), (0, 4)]

    def test_nothing_in_the_cache(self):
        problem = problems.make("float32", "decode")
        problem.batch.kv_len, problem.batch.pages = [0] * 3, [[]] * 3
        problem.k, problem.v = problem.k[:0].copy(), problem.v[:0].copy()
        out, lse = problems.run(problem)
        assert not out.any() and np.isneginf(lse).all()

    def test_scales_writes_and_merges(self):
        granularity = folio.ScaleGranularity
        for shape, kind in (((0,), granularity.PER_REQUEST), ((0, 2), granularity.PER_REQUEST_AND_HEAD)):
            folio.Scale(data=np.zeros(shape, np.float32), granularity=kind)
        with refused("data is empty; a scale per tensor is one number"):
            folio.Scale(data=np.zeros(0, np.float32))
        context, tokens = folio.Context.cpu(num_threads=1), np.zeros((0, 2, 32), np.float32)
        cache = folio.make_nhd_view(*(np.zeros((1, 16, 2, 32), np.float32) for _ in range(2)))
        folio.write_kv_cache(context, folio.CacheWriteArgs(tokens, tokens, np.zeros(0, np.int64), cache))
        state = folio.AttentionStateView(tokens, np.zeros((0, 2), np.float32))
        folio.merge_state(context, state, state, tokens.copy(), np.zeros((0, 2), np.float32))
        states = folio.AttentionStatesView(np.zeros((0, 3, 2, 32), np.float32), np.zeros((0, 3, 2), np.float32))
        folio.merge_states(context, states, tokens.copy(), np.zeros((0, 2), np.float32))


@pytest.fixture(name="problem")
def make_problem():
    return problems.make("float32", "mixed")


def with_q(problem, q):
    problem.q = q
    return problem


class TestRefusals:
    def test_dtype(self, problem):
        with refused("q is float16; the op was prepared for float32"):
            problems.run(with_q(problem, problem.q.astype(np.float16)), out=problem.outputs()[0])
        with refused("q is float64; float32, float16, bfloat16 and fp8 are taken"):
            problems.run(with_q(problem, problem.q.astype(np.float64)))
        with refused("lse is float64; it must be float32"):
            fresh = problems.make("float32", "mixed")
            problems.run(fresh, lse=np.zeros(fresh.q.shape[:2]))

    def test_integers(self, problem):
        with refused("kv_len is int16; int32 and int64 are taken"):
            folio.KvSegment(np.array([1, 2], np.int16))
        with refused("slot_mapping is float32; int32 and int64 are taken"):
            folio.CacheWriteArgs(problem.q, problem.q, np.zeros(3, np.float32),
                                 folio.make_nhd_view(problem.k, problem.v))
        with refused("table.indices has a stride of 2"):
            folio.csr_table(np.zeros(8, np.int32)[::2], np.zeros(2, np.int32))
        with refused("cu_q has shape .* one dimension"):
            folio.BatchView(np.zeros((2, 2), np.int32), [])

    def test_shape(self, problem):
        out, lse = problem.outputs()
        with refused(r"out is \[8, 4, 24\]; it must be \[9, 4, 24\]"):
            problems.run(problem, out=out[:-1])
        with refused(r"lse is \[9, 3\]; it must be \[9, 4\]"):
            problems.run(problem, lse=lse[:, :3])
        with refused("rank 2"):
            problems.run(problem, out=out[:, 0])
        with refused("k has 4 tokens a page, v 16|k has 16 tokens a page, v 4"):
            folio.make_nhd_view(problem.k[:, :4], problem.v)
        with refused("3 entries; cu_q has requests: 4"):
            folio.BatchView(problem.batch.cu_q, [folio.KvSegment(problem.batch.lengths[:3])])
        sinks = problems.make("float32", "mixed", sinks=True)
        sinks.rules.sinks = sinks.rules.sinks[:2]
        with refused("sinks has 2 entries; there are 4 q heads"):
            problems.run(sinks)

    def test_strides(self, problem):
        with refused("q's innermost stride is 2; it must be 1"):
            problems.run(with_q(problem, np.repeat(problem.q, 2, axis=2)[:, :, ::2]))
        with refused("k has a stride of 2 elements in dimension 3"):
            folio.make_nhd_view(np.repeat(problem.k, 2, axis=3)[..., ::2], problem.v)
        with refused("rows overlap"):
            problem = problems.make("float32", "mixed")
            problems.run(problem, out=np.lib.stride_tricks.as_strided(problem.outputs()[0], (9, 4, 24), (0, 96, 4)))

    @pytest.mark.parametrize("mask", [False, [True, False, False]])
    def test_masked(self, problem, mask):
        masked = np.ma.array(np.zeros(3, np.float32), mask=mask)
        with refused("array is a masked array, and Folio would not see its mask"):
            folio.TensorView(masked)
        with refused("kv_len is a masked array"):
            folio.KvSegment(masked.astype(np.int32))
        assert folio.TensorView(masked.data).shape == (3,)
        assert folio.TensorView(np.zeros(3, np.float32).view(np.recarray)).shape == (3,)

    def test_read_only(self, problem):
        out, lse = problem.outputs()
        out.flags.writeable = False
        with refused("out is read-only"):
            problems.run(problem, out=out)
        lse.flags.writeable = False
        with refused("lse is read-only"):
            problems.run(problem, lse=lse)
        problem.k.flags.writeable = problem.q.flags.writeable = False
        problems.assert_close(problem, *problems.run(problem), problem.exact())  # inputs may be
        cache = folio.make_nhd_view(problem.k, problem.v)
        with refused("the cache's k is read-only"):
            folio.CacheWriteArgs(problem.q, problem.q, np.zeros(3, np.int64), cache)

    def test_device(self, problem):
        out, lse = problem.outputs()
        with refused("q lies on CUDA device 1; the context is the CPU"):
            problems.run(with_q(problem, ForeignArray(problem.q, device=CUDA, index=1)), out=out, lse=lse)
        problem = problems.make("float32", "mixed")
        lengths = [ForeignArray(array, device=CUDA) for array in (problem.batch.cu_q, problem.batch.lengths)]
        with refused("num_tokens must be given where cu_q lies on a GPU"):
            folio.BatchView(lengths[0], [folio.KvSegment(lengths[1])])
        batch = folio.BatchView(lengths[0], [folio.KvSegment(lengths[1])], num_tokens=9)
        assert batch.where == folio.Where.DEVICE
        op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
        with refused("cu_q lies on CUDA device 0; the context is the CPU"):
            folio.plan(op, batch, folio.make_plan_buffer(op))
        with refused("a batch's lengths lie in one place"):
            folio.BatchView(problem.batch.cu_q, [folio.KvSegment(lengths[1])])

    def test_what_is_no_array(self, problem):
        out, _ = problem.outputs()
        with refused("q: expected an array, got a list: it has neither __dlpack__ nor a buffer"):
            folio.AttentionArgs([1.0], out, [])
        differentiable = ForeignArray(problem.q)
        differentiable.requires_grad = True
        with refused("q requires a gradient"):
            folio.AttentionArgs(differentiable, out, [])
        with refused("array is not aligned"):
            folio.TensorView(np.zeros(17, np.uint8)[1:].view(np.float32))
        op = folio.prepare(folio.Context.cpu(num_threads=1), problem.config)
        buffer = folio.make_plan_buffer(op)
        with refused("stream must be None"):
            folio.plan(op, problem.batch_view(), buffer, stream="main")
        with refused("takes no stream"):
            folio.plan(op, problem.batch_view(), buffer, stream=1)
        plan = folio.plan(op, problem.batch_view(), buffer)
        with refused("out is None"):
            folio.run(plan, problem.args(None), folio.Workspace(folio.workspace_size(op)))
        with refused("workspace must be a contiguous array of uint8"):
            folio.Workspace(np.zeros(64, np.float32))


@pytest.mark.parametrize("scalar", [np.datetime64("2020-01-01"), np.timedelta64(1, "D")])
def test_scalars_of_a_time_are_no_arrays(scalar):
    """numpy exports them as a buffer without strides."""
    for call in (lambda: folio.TensorView(scalar), lambda: folio.current_stream([scalar])):
        with refused("expected an array, got a numpy.(datetime|timedelta)64"):
            call()
    with pytest.raises((folio.InvalidArgument, TypeError)):
        folio.KvSegment(scalar)
