"""folio.paged_attention: one call, beside prepare, plan and run bit for bit and beside the exact results; refusals."""

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


def one_call(problem, **changes):
    rules = problem.rules
    given = {"cu_q": problem.batch.cu_q, "sm_scale": rules.sm_scale, "logits_soft_cap": rules.cap, "sinks": rules.sinks,
             "alibi_slopes": rules.slopes, "causal": problem.config.mask is folio.MaskKind.CAUSAL,
             "window_left": problem.config.window_left, "window_right": problem.config.window_right,
             "page_table": table_of(problem), "seq_lens": problem.batch.lengths, "context": CONTEXT}
    return folio.paged_attention(problem.q, problem.k, problem.v, **{**given, **changes})


def by_the_core(problem):
    op = folio.prepare(CONTEXT, problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    workspace = folio.Workspace(folio.workspace_size(plan))
    folio.init_workspace(op, workspace)
    out, lse = problem.outputs()
    folio.run(plan, problem.args(out, lse), workspace)
    return out, lse


@pytest.fixture
def problem():
    return problems.make()


@pytest.fixture
def decode():
    return problems.make(batch="decode")


class TestResults:
    @pytest.mark.parametrize("dtype", problems.DTYPES)
    @pytest.mark.parametrize("batch", problems.BATCHES)
    def test_equal_the_cores_and_the_exact_ones(self, dtype, batch):
        problem = problems.make(dtype, batch)
        out, lse = problem.outputs()
        assert one_call(problem, out=out, lse=lse) is out
        expected, expected_lse = by_the_core(problem)
        assert out.tobytes() == expected.tobytes() and lse.tobytes() == expected_lse.tobytes()
        problems.assert_close(problem, out, lse, problem.exact())

    @pytest.mark.parametrize("changes", [
        {"cap": 20.0}, {"slopes": True}, {"sinks": True}, {"window": (5, -1)}, {"causal": False, "window": (7, 2)}],
        ids=lambda changes: "-".join(changes))
    def test_features(self, changes):
        problem = problems.make(**changes)
        out, lse = problem.outputs()
        one_call(problem, out=out, lse=lse)
        assert out.tobytes() == by_the_core(problem)[0].tobytes()
        problems.assert_close(problem, out, lse, problem.exact())

    @pytest.mark.parametrize("dtype", problems.DTYPES)
    def test_an_output_is_made(self, dtype):
        problem = problems.make(dtype)
        out = one_call(problem)
        assert isinstance(out, np.ndarray) and out.dtype == problem.q.dtype
        assert out.tobytes() == by_the_core(problem)[0].tobytes()

    def test_without_cu_q_every_request_has_one_token(self, decode):
        assert one_call(decode, cu_q=None).tobytes() == by_the_core(decode)[0].tobytes()

    def test_lists_and_int64(self, decode):
        indptr, ids = decode.batch.page_indptr, np.asarray(decode.batch.page_ids)
        rows = [[*map(int, ids[a:b]), 0, 0, 0][:3] for a, b in zip(indptr, indptr[1:])]
        expected = by_the_core(decode)[0].tobytes()
        lengths = [int(n) for n in decode.batch.lengths]
        assert one_call(decode, page_table=rows, seq_lens=lengths, cu_q=None).tobytes() == expected
        assert one_call(decode, page_table=np.array(rows, np.int64), seq_lens=np.array(lengths)).tobytes() == expected

    def test_the_context_of_the_cpu_is_made_where_none_is_given(self, decode):
        _, lse = decode.outputs()
        out = one_call(decode, context=None, lse=lse)
        problems.assert_close(decode, out, lse, decode.exact())

    @pytest.mark.parametrize("element, scale", [(ml_dtypes.float8_e4m3fn, 0.01), (np.int8, 1.0)])
    def test_quantized_caches(self, element, scale):
        random = np.random.default_rng(2)
        q = random.standard_normal((3, 4, 32), np.float32)
        new_k, new_v = random.standard_normal((2, 80, 2, 32), np.float32)
        k, v = np.zeros((2, 5, 16, 2, 32), element)
        scales = {}
        if element is np.int8:
            k_scales, v_scales = np.zeros((2, 5, 16, 2), np.float32)
            scales = {"k_token_scales": k_scales, "v_token_scales": v_scales}
        cache = folio.make_nhd_view(k, v, **scales)
        factors = {} if element is np.int8 else {"k_scale": scale, "v_scale": scale}
        folio.write_kv_cache(CONTEXT, folio.CacheWriteArgs(new_k, new_v, list(range(80)), cache, **factors))
        table, lengths = np.array([[0, 1], [2, 3], [4, 0]], np.int32), [20, 32, 5]
        out = folio.paged_attention(q, cache, None, table, lengths, context=CONTEXT, **factors)
        plain = folio.paged_attention(q, new_k.reshape(5, 16, 2, 32), new_v.reshape(5, 16, 2, 32), table, lengths,
                                      context=CONTEXT)
        # A component is off by half a step: 2^-4 of itself in e4m3, 1/254 of its token's largest in int8.
        assert 0 < np.abs(out - plain).max() < 0.3
        if element is not np.int8:
            again = folio.paged_attention(q, k, v, table, lengths, context=CONTEXT, **factors)
            assert again.tobytes() == out.tobytes()
            assert folio.paged_attention(q, k, v, table, lengths, context=CONTEXT, k_scale=scale).tobytes() != out.tobytes()

    def test_more_contexts_than_are_kept(self, decode):
        expected = by_the_core(decode)[0]
        for _ in range(20):
            out = one_call(decode, context=folio.Context.cpu(num_threads=1))
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)

    def test_threads_take_turns(self):
        made = [problems.make(batch=batch, seed=seed) for seed, batch in enumerate(problems.BATCHES)]
        expected = [by_the_core(problem)[0].tobytes() for problem in made]
        wrong = []

        def call(index):
            for _ in range(50):
                if one_call(made[index]).tobytes() != expected[index]:
                    wrong.append(index)

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(made))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestTorch:
    def test_tensors(self, decode):
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(x) for x in (decode.q, decode.k, decode.v))
        lengths = torch.tensor(decode.batch.lengths)
        out = folio.paged_attention(q, k, v, table_of(decode), lengths, sm_scale=decode.rules.sm_scale, context=CONTEXT)
        assert isinstance(out, torch.Tensor) and out.numpy().tobytes() == by_the_core(decode)[0].tobytes()

    def test_fp8_queries_make_bfloat16(self, decode):
        torch = pytest.importorskip("torch")
        q, k, v = (torch.from_numpy(np.nan_to_num(x)).to(torch.float8_e4m3fn) for x in (decode.q, decode.k, decode.v))
        out = folio.paged_attention(q, k, v, table_of(decode), decode.batch.lengths, context=CONTEXT)
        assert out.dtype is torch.bfloat16 and out.shape == (3, 4, 24)

    def test_on_a_gpu_on_the_current_stream(self, decode):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no GPU")
        ids, indptr = (torch.tensor(np.asarray(x), dtype=torch.int32).cuda()
                       for x in (decode.batch.page_ids, decode.batch.page_indptr))
        q, k, v = (torch.from_numpy(x).cuda() for x in (decode.q, decode.k, decode.v))
        table, side = folio.csr_table(ids, indptr), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            late = torch.zeros_like(q)
            torch.cuda._sleep(100_000_000)
            late.copy_(q)
            out = folio.paged_attention(late, k, v, table, decode.batch.lengths, sm_scale=decode.rules.sm_scale)
        side.synchronize()
        np.testing.assert_allclose(out.cpu().numpy(), by_the_core(decode)[0], rtol=1e-2, atol=1e-2)
        with refused("seq_lens lies on CUDA device 0; it is read on the host"):
            folio.paged_attention(q, k, v, table, torch.tensor(decode.batch.lengths).cuda())


class TestRefusals:
    @pytest.mark.parametrize("changes, message", [
        ({"seq_lens": [40, 21, 0, -3]}, "length of request 3 is -3"),
        ({"seq_lens": [40, 21]}, "cu_q has 5 entries; seq_lens has 2 requests"),
        ({"seq_lens": [4000, 21, 0, 3]}, "table"),
        ({"cu_q": None}, "q has 9 tokens and seq_lens 4 requests; without cu_q every request has one token"),
        ({"cu_q": []}, "cu_q is empty"),
        ({"cu_q": [0, 1, 6, 6]}, "cu_q has 4 entries"),
        ({"cu_q": [0, 1, 6, 5, 9]}, "cu_q falls from 6 to 5"),
        ({"cu_q": [0, 1, 6, 6, 10]}, "cu_q ends at 10"),
        ({"page_table": [[0]]}, "1 rows"),
        ({"page_table": [[99, 99, 99]] * 4}, "is page 99; the cache has"),
        ({"window_left": -4}, "window_left is -4"),
        ({"window_right": 4}, "window_right is 4 with causal"),
        ({"sinks": np.ones(3, np.float32)}, "sinks has 3 entries; there are 4 q heads"),
        ({"lse": np.ones((9, 3), np.float32)}, r"lse is \[9, 3\]"),
        ({"k_scale": 0.0}, "k_scale"),
        ({"out": np.zeros((8, 4, 24), np.float32)}, r"out is \[8, 4, 24\]; it must be \[9, 4, 24\]"),
        ({"stream": 5}, "a stream is given with a CPU's context"),
        ({"determinism": "always"}, "always"),
    ], ids=lambda value: str(value)[:40])
    def test_wrong_arguments(self, problem, changes, message):
        out, lse = problem.outputs()
        with refused(message):
            one_call(problem, **{"out": out, "lse": lse, **changes})
        assert np.isnan(out).all() and np.isnan(lse).all()

    def test_an_output_with_padding_is_not_made(self, problem):
        with refused("out is None, and cu_q ends at 8 of q's 9 tokens"):
            one_call(problem, cu_q=[0, 1, 6, 6, 8])
        out, _ = problem.outputs()
        one_call(problem, cu_q=[0, 1, 6, 6, 8], out=out)
        assert not np.isnan(out[:8]).any() and np.isnan(out[8:]).all()

    def test_caches(self, problem):
        view = folio.make_nhd_view(problem.k, problem.v)
        rest = [table_of(problem), problem.batch.lengths]
        with refused("v_cache is None"):
            folio.paged_attention(problem.q, problem.k, None, *rest)
        with refused("v_cache is given with a folio.KvCacheView"):
            folio.paged_attention(problem.q, view, problem.v, *rest)
        with refused(r"q has shape .*; it must be \[tokens, q heads, head_dim\]"):
            folio.paged_attention(problem.q[0], view, None, *rest)
        with refused("out is None; it is made for tensors of torch"):
            folio.paged_attention(folio.TensorView(problem.q), view, None, *rest, cu_q=problem.batch.cu_q)
