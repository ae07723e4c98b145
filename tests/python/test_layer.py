"""folio.Layer and folio.Step: a layer's memory is bound once, a step's tables once; results beside the exact ones."""

import dataclasses
import threading

import folio
import ml_dtypes
import numpy as np
import pytest

import problems

CONTEXT = folio.Context.cpu(num_threads=2)


def refused(message):
    return pytest.raises(folio.InvalidArgument, match=message)


def table_of(problem):
    return folio.csr_table(problem.batch.page_ids, problem.batch.page_indptr)


def bind(problem, **changes):
    """A layer and a step of a problem."""
    op = folio.prepare(CONTEXT, problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    given = {"sm_scale": problem.rules.sm_scale, "logits_soft_cap": problem.rules.cap, "sinks": problem.rules.sinks,
             "alibi_slopes": problem.rules.slopes}
    layer = folio.Layer(op, folio.make_nhd_view(problem.k, problem.v), **{**given, **changes})
    return layer, folio.Step(plan, table_of(problem))


@pytest.fixture
def problem():
    return problems.make()


@pytest.fixture
def bound(problem):
    return bind(problem)


class TestResults:
    @pytest.mark.parametrize("dtype", problems.DTYPES)
    @pytest.mark.parametrize("batch", problems.BATCHES)
    def test_equal_the_exact_ones(self, dtype, batch):
        problem = problems.make(dtype, batch)
        layer, step = bind(problem)
        out, lse = problem.outputs()
        assert layer(step, problem.q, out, lse) is out
        problems.assert_close(problem, out, lse, problem.exact())

    def test_tokens_of_two_dimensions(self):
        """[batch, queries, heads, head_dim], of any strides that one stride covers; others are refused."""
        problem = problems.make(batch="decode")
        layer, step = bind(problem)
        plain, _ = problem.outputs()
        layer(step, problem.q, plain)
        wide = np.zeros((3, 2, *problem.q.shape[1:]), problem.q.dtype)
        for shape, q in (((3, 1), problem.q[:, None]), ((1, 3), problem.q[None]), ((3, 1), wide[:, :1])):
            q[...] = problem.q.reshape(q.shape)
            out = np.zeros((*shape, *plain.shape[1:]), plain.dtype)
            assert layer(step, q, out) is out
            assert np.array_equal(out.reshape(plain.shape), plain)
        many = np.zeros((2, 4, *problem.q.shape[1:]), problem.q.dtype)
        with refused(r"q has strides .* in its leading dimensions; one stride must cover \[2, 3, "):
            layer(step, many[:, :3], plain)
        with refused("out"):
            layer(step, problem.q[:, None], np.zeros((2, 1, *plain.shape[1:]), plain.dtype))

    @pytest.mark.parametrize("rules", [{"cap": 3.0}, {"slopes": True}, {"sinks": True}, {"window": (9, -1)}])
    def test_a_layers_own_features(self, rules):
        problem = problems.make(**rules)
        layer, step = bind(problem)
        out, lse = problem.outputs()
        layer(step, problem.q, out, lse)
        problems.assert_close(problem, out, lse, problem.exact())

    def test_one_step_serves_all_layers(self):
        first = problems.make()
        second = dataclasses.replace(first, k=-first.k / 2, v=first.v * 3)  # other values, in the same pages
        layer, step = bind(first)
        other = folio.Layer(layer.op, folio.make_nhd_view(second.k, second.v), sm_scale=second.rules.sm_scale)
        for run, of in ((layer, first), (other, second), (layer, first)):
            out, lse = of.outputs()
            run(step, of.q, out, lse)
            problems.assert_close(of, out, lse, of.exact())

    def test_rotary_embedding(self):
        """Against run, which takes the same arguments."""
        problem = problems.make()
        config = folio.AttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim_qk=32, head_dim_v=24, q="float32",
                                       kv="float32", features="rope_llama")
        problem.config = config
        rope = folio.RopeArgs(theta=500.0)
        layer, step = bind(problem, rope=rope)
        out, expected = (problem.outputs()[0] for _ in range(2))
        layer(step, problem.q, out)
        workspace = folio.Workspace(folio.workspace_size(layer.op))
        folio.init_workspace(layer.op, workspace)
        folio.run(step.plan, problem.args(expected, rope=rope), workspace)
        assert np.array_equal(out, expected)
        plain = folio.Layer(layer.op, folio.make_nhd_view(problem.k, problem.v), sm_scale=problem.rules.sm_scale)
        plain(step, problem.q, expected)
        assert not np.array_equal(out, expected)

    def test_scales(self, problem):
        """Stored values are twice as small, and the scales say so; powers of two change no bit."""
        plain, step = bind(problem)
        expected, _ = problem.outputs()
        plain(step, problem.q, expected)
        problem.k, problem.v = problem.k / 2, problem.v / 4
        per_head = folio.Scale(data=np.full(2, 4, np.float32), granularity="per_head")
        layer, step = bind(problem, k_scale=2.0, v_scale=per_head)
        out, _ = problem.outputs()
        layer(step, problem.q, out)
        assert np.array_equal(out, expected)

    @pytest.mark.parametrize("element", [np.int32, np.int64])
    def test_tables_of_rows_and_columns(self, problem, element):
        """An engine's block table as it is, wider than the requests need."""
        layer, step = bind(problem)
        rows = np.full((len(problem.batch.pages), 7), 10**6, element)
        for row, pages in enumerate(problem.batch.pages):
            rows[row, :len(pages)] = pages
        out, lse = problem.outputs()
        layer(folio.Step(step.plan, rows[:, :5]), problem.q, out, lse)
        problems.assert_close(problem, out, lse, problem.exact())

    def test_a_workspace_of_the_callers(self, problem, bound):
        layer, step = bound
        workspace = folio.Workspace(folio.workspace_size(layer.op))
        folio.init_workspace(layer.op, workspace)
        out, lse = problem.outputs()
        layer(folio.Step(step.plan, table_of(problem), workspace), problem.q, out, lse)
        problems.assert_close(problem, out, lse, problem.exact())
        with pytest.raises(folio.Error) as raised:
            layer(folio.Step(step.plan, table_of(problem), folio.Workspace(0)), problem.q, out, lse)
        assert raised.value.code == folio.ErrorCode.WORKSPACE_TOO_SMALL

    def test_a_second_lse_base(self, problem, bound):
        layer, step = bound
        out, natural = problem.outputs()
        layer(step, problem.q, out, natural)
        binary = np.zeros_like(natural)
        layer(step, problem.q, out, folio.LseView(binary, "two"))
        finite = np.isfinite(natural)
        eps = np.finfo(np.float32).eps  # one rounding of the product, two of the two logarithms
        assert np.allclose(binary[finite] * np.log(2), natural[finite], rtol=3 * eps, atol=3 * eps)


class TestPages:
    def test_are_the_steps_own(self, problem, bound):
        """What the caller writes into a table after the step was made does not reach it."""
        layer, _ = bound
        plan = folio.plan(layer.op, problem.batch_view(), folio.make_plan_buffer(layer.op))
        ids, offsets = problem.batch.page_ids, problem.batch.page_indptr
        step = folio.Step(plan, folio.csr_table(ids, offsets))
        ids[:], offsets[:] = -1, 10**9
        out, lse = problem.outputs()
        layer(step, problem.q, out, lse)
        problems.assert_close(problem, out, lse, problem.exact())

    @pytest.mark.parametrize("page", [-1, 10**6])
    def test_beyond_the_cache_are_refused(self, problem, bound, page):
        layer, step = bound
        ids = problem.batch.page_ids
        ids[2] = page
        wrong = folio.Step(step.plan, folio.csr_table(ids, problem.batch.page_indptr))
        out, _ = problem.outputs()
        for _ in range(2):
            with refused(str(page)):
                layer(wrong, problem.q, out)
        assert np.all(np.isnan(out))
        layer(step, problem.q, out)
        assert not np.any(np.isnan(out))

    def test_of_another_layer_do_not_matter(self, problem, bound):
        """A smaller cache has fewer pages: the same step is right for one layer and wrong for the other."""
        layer, step = bound
        last = max(map(max, filter(None, problem.batch.pages)))
        small = folio.Layer(layer.op, folio.make_nhd_view(problem.k[:last], problem.v[:last]))
        out, _ = problem.outputs()
        with refused(f"{last}"):
            small(step, problem.q, out)
        layer(step, problem.q, out)

    def test_too_short_a_table(self, problem, bound):
        layer, step = bound
        with refused("has 1 columns; row 0 needs 3 pages"):
            folio.Step(step.plan, np.zeros((4, 1), np.int32))
        short = folio.Step(step.plan, folio.csr_table(problem.batch.page_ids, np.zeros(5, np.int32)))
        with refused("row 0 has 0 entries"):
            layer(short, problem.q, problem.outputs()[0])


def ragged_problem():
    """A prefill without a cache, and the same keys in pages for the exact result."""
    problem = problems.make("float32", "prefill")
    keys = [np.concatenate([half[page] for page in own])[:length]
            for half in (problem.k, problem.v) for own, length in zip(problem.batch.pages, problem.batch.kv_len)]
    return problem, np.concatenate(keys[:2]), np.concatenate(keys[2:])


class TestRagged:
    def test_keys_and_values_come_with_the_call(self):
        problem, k, v = ragged_problem()
        op = folio.prepare(CONTEXT, problem.config)
        batch = folio.BatchView(problem.batch.cu_q, [folio.KvSegment(problem.batch.lengths, source="ragged")])
        plan = folio.plan(op, batch, folio.make_plan_buffer(op))
        offsets = np.cumsum([0, *problem.batch.kv_len]).astype(np.int32)
        step = folio.Step(plan, [offsets])
        offsets[:] = 0
        layer = folio.Layer(op, sm_scale=problem.rules.sm_scale)
        out, lse = problem.outputs()
        layer(step, problem.q, out, lse, ragged=(k, v))
        problems.assert_close(problem, out, lse, problem.exact())
        layer(step, problem.q, out, lse, ragged=[(k, v)])
        problems.assert_close(problem, out, lse, problem.exact())
        halves = folio.Layer(op, sm_scale=problem.rules.sm_scale, ragged_k_scale=2.0, ragged_v_scale=4.0)
        halves(step, problem.q, out, lse, ragged=(k / 2, v / 4))
        problems.assert_close(problem, out, lse, problem.exact())
        with refused("ragged has 0 pairs"):
            layer(step, problem.q, out)
        with refused("ragged has 2 pairs .*the plan has 1"):
            layer(step, problem.q, out, ragged=[(k, v), (k, v)])
        with pytest.raises(TypeError, match="ragged: expected a tuple"):
            layer(step, problem.q, out, ragged=[k, v])
        with pytest.raises(TypeError, match="ragged: expected a tuple"):
            layer(step, problem.q, out, ragged=k)
        with refused(r"tables\[0\] has 1 entries; the plan's 2 rows"):
            folio.Step(plan, offsets[:1])

    def test_past_pages_and_new_tokens(self):
        """The first pages' keys lie in the cache, the last tokens of each request come with the call."""
        problem = problems.make("float32", "decode")
        past = [length - 1 for length in problem.batch.kv_len]
        new = [tuple(half[own[last // 16], last % 16] for half in (problem.k, problem.v))
               for own, last in zip(problem.batch.pages, past)]
        k, v = (np.stack([pair[i] for pair in new]) for i in range(2))
        op = folio.prepare(CONTEXT, problem.config)
        segments = [folio.KvSegment(np.array(past, np.int32)), folio.KvSegment(np.ones(3, np.int32), source="ragged")]
        plan = folio.plan(op, folio.BatchView(problem.batch.cu_q, segments), folio.make_plan_buffer(op))
        step = folio.Step(plan, [table_of(problem), np.arange(4, dtype=np.int32)])
        layer = folio.Layer(op, folio.make_nhd_view(problem.k, problem.v), sm_scale=problem.rules.sm_scale)
        out, lse = problem.outputs()
        exact = problem.exact()
        layer(step, problem.q, out, lse, (k, v))
        problems.assert_close(problem, out, lse, exact)
        with refused("the layer has no cache; segment 0 of the plan is paged"):
            folio.Layer(op)(step, problem.q, out, ragged=(k, v))

    def test_a_cache_for_each_paged_segment(self):
        problem = problems.make("float32", "decode")
        first, last = np.array([16, 0, 0], np.int32), np.array([17, 1, 16], np.int32)
        op = folio.prepare(CONTEXT, problem.config)
        plan = folio.plan(op, folio.BatchView(problem.batch.cu_q, [folio.KvSegment(first), folio.KvSegment(last)]),
                          folio.make_plan_buffer(op))
        pages = problem.batch.pages
        tables = [np.array([[pages[0][0]], [0], [0]], np.int32), np.zeros((3, 2), np.int32)]
        tables[1][0], tables[1][1, 0], tables[1][2, 0] = pages[0][1:], pages[1][0], pages[2][0]
        caches = [folio.make_nhd_view(problem.k.copy(), problem.v.copy()) for _ in range(2)]
        layer = folio.Layer(op, caches, sm_scale=problem.rules.sm_scale)
        out, lse = problem.outputs()
        layer(folio.Step(plan, tables), problem.q, out, lse)
        problems.assert_close(problem, out, lse, problem.exact())
        with refused("the layer has 3 caches; the plan has 2 paged segments"):
            folio.Layer(op, [*caches, caches[0]])(folio.Step(plan, tables), problem.q, out)
        with refused("the layer has 2 caches; write takes a layer with one"):
            layer.write(np.zeros(1, np.int64), problem.q[:1, :2], problem.q[:1, :2])


class TestWrite:
    @pytest.fixture
    def empty(self, problem):
        problem.k, problem.v = np.zeros_like(problem.k), np.zeros_like(problem.v)
        return problem

    def test_slots_of_the_step(self, empty):
        layer, step = bind(empty)
        random = np.random.default_rng(3)
        k, v = (random.standard_normal((9, 2, half.shape[3])).astype(np.float32) for half in (empty.k, empty.v))
        slots = random.permutation(empty.k.shape[0] * 16)[:9].astype(np.int64)
        slots[4] = -1
        with_slots = folio.Step(step.plan, table_of(empty), slot_mapping=slots)
        kept = slots.copy()
        slots[:] = 10**9  # the step has its own
        layer.write(with_slots, k, v)
        expected_k, expected_v = np.zeros_like(empty.k), np.zeros_like(empty.v)
        for token, slot in enumerate(kept):
            if slot >= 0:
                expected_k[slot // 16, slot % 16], expected_v[slot // 16, slot % 16] = k[token], v[token]
        assert np.array_equal(empty.k, expected_k) and np.array_equal(empty.v, expected_v)
        layer.write(kept[::-1].copy(), k, v)
        assert np.array_equal(empty.k[kept[0] // 16, kept[0] % 16], k[8])

    def test_fp8_divides_by_the_scales(self):
        problem = problems.make("bfloat16")
        config = folio.AttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim_qk=32, head_dim_v=32, q="bfloat16",
                                       kv="float8_e4m3fn")
        op = folio.prepare(CONTEXT, config)
        k, v = (np.zeros((2, 16, 2, 32), ml_dtypes.float8_e4m3fn) for _ in range(2))
        layer = folio.Layer(op, folio.make_nhd_view(k, v), k_scale=2.0, v_scale=0.5)
        new = np.full((1, 2, 32), 8, problem.q.dtype)
        layer.write(np.array([17]), new, new)
        assert np.all(k[1, 1].astype(np.float32) == 4) and np.all(v[1, 1].astype(np.float32) == 16)

    def test_what_is_refused(self, problem, bound):
        layer, step = bound
        before = problem.k.copy()
        k, v = np.zeros((1, 2, 32), np.float32), np.zeros((1, 2, 24), np.float32)
        with refused("the step has no slot_mapping"):
            layer.write(step, k, v)
        with refused("slot_mapping is float32; int32 and int64 are taken"):
            layer.write(np.zeros(1, np.float32), k, v)
        with refused("1000000"):
            layer.write(np.array([1000000]), k, v)
        with refused("k"):
            layer.write(np.array([0]), k[:, :1], v)
        frozen = problem.k.copy()
        frozen.flags.writeable = False
        with refused("the cache's k is read-only"):
            folio.Layer(layer.op, folio.make_nhd_view(frozen, problem.v)).write(np.array([0]), k, v)
        with refused("the layer has 0 caches"):
            folio.Layer(layer.op).write(np.array([0]), k, v)
        assert np.array_equal(before, problem.k, equal_nan=True)


class TestRefusals:
    @pytest.mark.parametrize("change, message", [
        ({"sinks": np.zeros(3, np.float32)}, "sinks has 3 entries; there are 4 q heads"),
        ({"alibi_slopes": np.zeros(4)}, "alibi_slopes is float64; it must be float32"),
        ({"k_scale": "x"}, "k_scale must be a number or a folio.Scale"),
        ({"v_scale": folio.Scale(data=np.ones(1, np.float32), granularity="per_head")}, "v_scale.data has 1 heads"),
    ])
    def test_of_a_layer(self, problem, change, message):
        with refused(message):
            bind(problem, **change)

    def test_caches_that_the_op_was_not_prepared_for(self, problem, bound):
        op = bound[0].op
        with refused("cache has page_size 8; the op was prepared for 16"):
            folio.Layer(op, folio.make_nhd_view(problem.k[:, :8], problem.v[:, :8]))
        with refused("cache has head_dim_v 16; the op was prepared for 24"):
            folio.Layer(op, folio.make_nhd_view(problem.k, problem.v[..., :16]))
        with refused("cache is float16; the op was prepared for float32"):
            folio.Layer(op, folio.make_nhd_view(problem.k.astype(np.float16), problem.v.astype(np.float16)))
        with refused(r"cache\[1\] has num_kv_heads 1; the op was prepared for 2"):
            folio.Layer(op, [folio.make_nhd_view(problem.k, problem.v),
                             folio.make_nhd_view(problem.k[:, :, :1], problem.v[:, :, :1])])
        with pytest.raises(TypeError, match="cache: expected a folio.KvCacheView, .* got a numpy.ndarray"):
            folio.Layer(op, problem.k)

    def test_of_a_call(self, problem, bound):
        layer, step = bound
        out, lse = problem.outputs()
        before = out.copy()
        with refused("q is float64"):
            layer(step, problem.q.astype(np.float64), out)
        with refused("q is float16; the op was prepared for float32"):
            layer(step, problem.q.astype(np.float16), out)
        with refused("out is .*8, 4, 24"):
            layer(step, problem.q, out[:8])
        with refused("lse is .*8, 4.; it must be .9, 4."):
            layer(step, problem.q, out, lse[:8])
        with refused("lse is float64"):
            layer(step, problem.q, out, lse.astype(np.float64))
        frozen = out.copy()
        frozen.flags.writeable = False
        with refused("out is read-only"):
            layer(step, problem.q, frozen)
        with refused("out is None"):
            layer(step, problem.q, None)
        assert np.array_equal(before, out, equal_nan=True)

    def test_a_scale_a_request(self, problem):
        per_request = folio.Scale(data=np.ones(3, np.float32), granularity="per_request")
        layer, step = bind(problem, k_scale=per_request)
        with refused("k_scale.data has 3 requests; there are 4"):
            layer(step, problem.q, problem.outputs()[0])

    def test_features_that_were_not_declared(self, problem):
        layer, step = bind(problem, logits_soft_cap=3.0)
        with refused("logits_soft_cap is given, but the op was not prepared for it"):
            layer(step, problem.q, problem.outputs()[0])

    def test_a_step_of_another_op(self, problem, bound):
        layer, _ = bound
        with refused("the step's plan was made by another op"):
            layer(bind(problem)[1], problem.q, problem.outputs()[0])
        assert layer.op == bound[1].op and layer.op != bind(problem)[0].op
        assert len({layer.op, bound[1].op}) == 1

    def test_a_step_whose_buffer_has_moved_on(self, problem):
        op = folio.prepare(CONTEXT, problem.config)
        buffer = folio.make_plan_buffer(op)
        layer = folio.Layer(op, folio.make_nhd_view(problem.k, problem.v))
        step = folio.Step(folio.plan(op, problem.batch_view(), buffer), table_of(problem))
        folio.plan(op, problem.batch_view(), buffer)
        with pytest.raises(folio.Error) as raised:
            layer(step, problem.q, problem.outputs()[0])
        assert raised.value.code == folio.ErrorCode.STALE_PLAN

    def test_of_a_step(self, problem, bound):
        _, step = bound
        with refused("tables has 2 entries; the plan has 1 segments"):
            folio.Step(step.plan, [table_of(problem)] * 2)
        with refused(r"tables\[0\] is int16; int32 and int64 are taken"):
            folio.Step(step.plan, np.zeros((4, 3), np.int16))
        with pytest.raises(TypeError, match="plan: expected a folio.AttentionPlan, got a folio.*Step"):
            folio.Step(step, table_of(problem))
        with pytest.raises(TypeError, match="workspace: expected a folio.Workspace or None, got 1024"):
            folio.Step(step.plan, table_of(problem), 1024)
        with refused("stream must be"):
            folio.Step(step.plan, table_of(problem), stream="x")

    def test_custom_masks_come_with_the_step(self):
        problem = problems.make("float32", "decode")
        config = folio.AttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim_qk=32, head_dim_v=24, q="float32",
                                       kv="float32", mask="custom")
        op = folio.prepare(CONTEXT, config)
        batch = folio.BatchView(problem.batch.cu_q, [folio.KvSegment(problem.batch.lengths)],
                                custom_mask=folio.CustomMask())
        plan = folio.plan(op, batch, folio.make_plan_buffer(op))
        layer = folio.Layer(op, folio.make_nhd_view(problem.k, problem.v), sm_scale=problem.rules.sm_scale)
        all_visible = np.full(sum(-(-length // 8) for length in problem.batch.kv_len), 255, np.uint8)
        out, lse = problem.outputs()
        for mask in (all_visible, [np.ones((1, length), bool) for length in problem.batch.kv_len]):
            out, lse = problem.outputs()
            layer(folio.Step(plan, table_of(problem), custom_mask=mask), problem.q, out, lse)
            problems.assert_close(problem, out, lse, problem.exact())  # a decode's query sees all keys
        with refused("custom_mask"):
            folio.Step(plan, table_of(problem), custom_mask=[np.ones((1, 5), bool)] * 3)
        with refused("custom_mask has 1 bytes"):
            layer(folio.Step(plan, table_of(problem), custom_mask=all_visible[:1]), problem.q, out)


def test_text(bound):
    layer, step = bound
    assert repr(layer).startswith(f"<folio.Layer: {layer.op.kernel_name} on the CPU")
    assert repr(layer).endswith(", 1 cache>")
    assert repr(step).startswith("<folio.Step: 4 requests, 9 tokens, 1 segment")
    assert (step.num_requests, step.num_tokens) == (4, 9)


def test_threads_share_a_step():
    """Layers of one step from several threads: they run one at a time, since they share a workspace."""
    problem = problems.make("float32", "mixed")
    layer, step = bind(problem)
    exact = problem.exact()
    failures = []

    def work():
        try:
            for _ in range(50):
                out, lse = problem.outputs()
                layer(step, problem.q, out, lse)
                problems.assert_close(problem, out, lse, exact)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
