"""Groups of threads, what they combine, and attention over a divided cache, beside numpy over the whole one."""

import threading
import time

import folio
import ml_dtypes
import numpy as np
import pytest

import paged_attention
import problems

CONTEXT = folio.Context.cpu(num_threads=1)
EPS32 = float(np.finfo(np.float32).eps)


def sent(rank, *shape, element=np.float32):
    return np.random.default_rng(100 + rank).standard_normal(shape).astype(np.float32).astype(element)


def code_of(call):
    with pytest.raises(folio.Error) as caught:
        call()
    return caught.value.code


@pytest.mark.parametrize("world", [1, 2, 3])
def test_operations(world):
    def body(group):
        assert (group.size, group.device.type) == (world, folio.DeviceType.CPU) and f"of {world}" in repr(group)
        mine = sent(group.rank, world, 4)
        gathered, exchanged = np.zeros((world, world, 4), np.float32), np.zeros((world, 4), np.float32)
        group.all_gather(mine, gathered)
        group.all_to_all(mine, exchanged)
        group.barrier()
        total, part = mine.copy(), np.zeros(4, np.float32)
        group.all_reduce_sum(total)
        group.reduce_scatter_sum(mine, part)
        halves = np.zeros((world, 3), ml_dtypes.bfloat16)
        group.all_gather(sent(group.rank, 3, element=ml_dtypes.bfloat16), halves)
        return group.rank, gathered, exchanged, total, part, halves

    everybody = [sent(rank, world, 4) for rank in range(world)]
    in_order = everybody[0].copy()
    for other in everybody[1:]:
        in_order = in_order + other
    for rank, (number, gathered, exchanged, total, part, halves) in enumerate(folio.run_ranks(world, body)):
        assert number == rank and np.array_equal(gathered, everybody)
        assert np.array_equal(exchanged, [one[rank] for one in everybody])
        assert np.array_equal(total, in_order) and np.array_equal(part, in_order[rank])
        assert np.array_equal(halves.view(np.uint16),
                              np.stack([sent(r, 3, element=ml_dtypes.bfloat16) for r in range(world)]).view(np.uint16))


def test_what_a_rank_raises_ends_the_others():
    seen = {}

    def body(group):
        if group.rank == 1:
            raise KeyError("rank one")
        try:
            group.barrier()
        except folio.Error as error:
            seen[group.rank] = error.code
            raise

    with pytest.raises((KeyError, folio.Error)):
        folio.run_ranks(3, body)
    assert seen == {0: folio.ErrorCode.UNAVAILABLE, 2: folio.ErrorCode.UNAVAILABLE}
    with pytest.raises(KeyError, match="alone"):
        folio.run_ranks(1, lambda group: {}["alone"])


def test_a_group_that_outlives_its_body_is_left():
    groups = folio.run_ranks(2, lambda group: group)
    assert [group.rank for group in groups] == [0, 1]
    assert code_of(groups[0].barrier) == folio.ErrorCode.UNAVAILABLE
    groups[0].fail("too late")


def test_failures_of_groups():
    first, second = folio.make_thread_groups(2, timeout=0.05)
    assert code_of(first.barrier) == folio.ErrorCode.UNAVAILABLE  # nobody came
    assert code_of(second.barrier) == folio.ErrorCode.UNAVAILABLE
    first, second = folio.make_thread_groups(2)
    waiting = threading.Thread(target=lambda: codes.append(code_of(first.barrier)))
    codes = []
    waiting.start()
    time.sleep(0.01)
    second.fail("given up")
    waiting.join()
    assert codes == [folio.ErrorCode.UNAVAILABLE]

    def disagree(group):
        data = np.zeros(2 + group.rank, np.float32)
        assert code_of(lambda: group.all_reduce_sum(data)) == folio.ErrorCode.UNAVAILABLE

    folio.run_ranks(2, disagree)


def test_refusals_before_anything_is_sent():
    (group,) = folio.make_thread_groups(1)
    out, frozen = np.full(4, 7, np.float32), np.full(4, 7, np.float32)
    frozen.flags.writeable = False
    for call, message in [
            (lambda: group.all_gather(out[:3], out), "recv has 16 bytes; those that all ranks send are 12"),
            (lambda: group.all_gather(out, frozen), "recv is read-only"),
            (lambda: group.all_to_all(out[:2], out), "recv has 16 bytes; as send it must have 8"),
            (lambda: group.all_reduce_sum(out[::2]), "data is not contiguous"),
            (lambda: group.all_reduce_sum(out.astype(np.float64)), "data is float64; it must be float32"),
            (lambda: group.reduce_scatter_sum(out[:3], out), "send has 12 bytes; a part for every rank is 16"),
            (lambda: group.barrier(stream=3), "stream"), (lambda: folio.make_thread_groups(0), "world is 0"),
            (lambda: folio.make_thread_groups(1, timeout=0), "timeout is 0"),
            (lambda: folio.run_ranks(2, print, timeout=float("nan")), "timeout is nan")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            call()
    assert np.all(out == 7) and np.all(frozen == 7)
    with pytest.raises(TypeError):
        folio.run_ranks(2, None)


def test_shares_of_lengths():
    lens, world, interleave = [0, 1, 7, 40], 3, 2
    expected = [[sum(p // interleave % world == rank for p in range(length)) for rank in range(world)]
                for length in lens]
    assert folio.get_dcp_local_seq_lens(lens, world, interleave=interleave).tolist() == expected
    for rank in range(world):
        local = folio.get_dcp_local_seq_lens(np.array(lens), world, rank, interleave)
        assert local.tolist() == [row[rank] for row in expected]
    assert folio.max_dcp_context_len(40, world, interleave) == -(-40 // 6) * 2 >= max(map(max, expected))
    assert folio.dcp_combine_from_name("a2a", 2) == folio.DcpCombine.ALL_TO_ALL
    assert folio.dcp_combine_from_name("ag_rs", 1) == folio.DcpCombine.ALL_GATHER_REDUCE_SCATTER
    assert folio.dcp_transport_from_name("peer") == folio.DcpTransport.PEER
    assert folio.use_replicated_queries(None, "all_to_all", 2, 1)
    assert not folio.use_replicated_queries(True, "all_to_all", 1, 1)
    assert [folio.lse_lanes(dtype) for dtype in ("float32", "bfloat16")] == [1, 2]
    for call in (lambda: folio.get_dcp_local_seq_lens([-1], 2), lambda: folio.get_dcp_local_seq_lens([1], 2, 2),
                 lambda: folio.get_dcp_local_seq_lens([1], 0), lambda: folio.dcp_combine_from_name("ring", 2),
                 lambda: folio.dcp_transport_from_name("nvls"),
                 lambda: folio.lse_lanes("float8_e4m3fn")):
        with pytest.raises(folio.InvalidArgument):
            call()


@pytest.mark.parametrize("combine,name", [("rs", "cp_lse_ag_out_rs"), ("ar", "cp_lse_ag_out_ar"),
                                          ("a2a", "dcp_a2a_lse_reduce")])
def test_partial_results_are_combined(combine, name):
    world, tokens, heads, dim = 2, 5, 4, 8
    out = [sent(rank, tokens, heads, dim) for rank in range(world)]
    lse = [sent(10 + rank, tokens, heads) for rank in range(world)]
    lse[0][1, 2] = np.inf  # empty
    local, starts = [[3, 0], [2, 2]], [0, 2, 4]  # rank 0 has no keys of the second request; row 4 is padding
    weights = np.exp(np.stack(lse).astype(np.float64))
    weights[0, 1, 2] = weights[0, 2:4] = weights[:, 4] = 0
    total = weights.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.where(total[..., None] > 0, (weights[..., None] * np.stack(out)).sum(0) / total[..., None], 0)
        exact_lse = np.log(total)

    def body(group):
        own = heads if combine == "ar" else heads // world
        made, made_lse = np.full((tokens, own, dim), 7, np.float32), np.full((tokens, own), 7, np.float32)
        workspace = folio.Workspace(folio.combine_workspace_size(world, tokens, heads, dim))
        partial = folio.AttentionStateView(out[group.rank], lse[group.rank])
        empty = folio.EmptyRows(local[group.rank], starts)
        getattr(folio, name)(CONTEXT, group, partial, made, made_lse, workspace, empty)
        with pytest.raises(folio.InvalidArgument, match="lse is"):
            getattr(folio, name)(CONTEXT, group, partial, made, made_lse[:2], workspace, empty)
        return made, made_lse

    for rank, (made, made_lse) in enumerate(folio.run_ranks(world, body)):
        share = slice(None) if combine == "ar" else slice(rank * heads // world, (rank + 1) * heads // world)
        # Weights are off by a few roundings each, of values below the sum of the partials' sizes.
        allowed = 32 * EPS32 * (np.abs(np.stack(out)).sum(0) + 1) * (1 + 8)
        assert np.all(np.abs(made - exact[:, share]) <= allowed[:, share])
        finite = np.isfinite(exact_lse[:, share])
        assert np.array_equal(np.isneginf(made_lse), ~finite)
        assert np.all(np.abs(made_lse[finite] - exact_lse[:, share][finite]) <= 64 * EPS32)


def test_empty_rows_are_masked():
    lse = np.ones((5, 3), np.float32)
    folio.mask_empty_rows(CONTEXT, folio.EmptyRows(np.array([2, 0, 1], np.int32), [0, 1, 3, 4]), lse)
    assert np.isneginf(lse).tolist() == [[row in (1, 2, 4)] * 3 for row in range(5)] and np.all(lse[[0, 3]] == 1)
    before = lse.copy()
    for rows, message in [(folio.EmptyRows([1], [0, 6]), "ends at 6"), (folio.EmptyRows([1, 0], [0, 2]), "2 entries"),
                          (folio.EmptyRows([1, 0], [0, 3, 2]), "descends"),
                          (folio.EmptyRows([1], [-1, 2]), "begins at -1")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            folio.mask_empty_rows(CONTEXT, rows, lse)
    assert np.array_equal(lse, before)


class Divided:
    """A problem whose keys lie on several ranks. Every rank has queries of its own."""

    def __init__(self, world, interleave, dtype, num_cached=1, **rules):
        self.world, self.interleave, self.num_cached = world, interleave, num_cached
        self.ranks = [problems.make(dtype, "mixed", **rules) for _ in range(world)]
        for rank, problem in enumerate(self.ranks):
            problem.q = sent(rank, *problem.q.shape, element=problem.q.dtype)
        self.whole = self.ranks[0]
        batch = self.whole.batch
        self.keys = [[paged_attention.keys_of(half, pages, length) for pages, length in zip(batch.pages, batch.kv_len)]
                     for half in (self.whole.k, self.whole.v)]

    def new_tokens(self):
        batch = self.whole.batch
        return tuple(np.concatenate([keys[len(keys) - q_len:] for keys, q_len in zip(half, batch.q_len)])
                     .astype(self.whole.k.dtype) for half in self.keys)

    def shard(self, rank):
        """This rank's cache, NaN where nothing may be read, and its table."""
        size, page, rows, halves = problems.PAGE_SIZE, 1, [], []
        local = [[p for p in range(length) if p // self.interleave % self.world == rank]
                 for length in self.whole.batch.kv_len]
        for own in local:
            count = -(-len(own) // size)
            rows.append(list(range(page, page + count)))
            page += count
        for half in self.keys:
            cache = np.full((page, size, *half[0].shape[1:]), np.nan)
            for row, own, keys in zip(rows, local, half):
                for j, p in enumerate(own):
                    cache[row[j // size], j % size] = keys[p]
            halves.append(cache.astype(self.whole.k.dtype))
        table = folio.csr_table(np.array(sum(rows, []), np.int32), np.cumsum([0, *map(len, rows)]).astype(np.int32))
        return halves, table

    def run(self, group, combine="all_gather_reduce_scatter", all_heads_out=False, partial_dtype=None,
            in_two_steps=False):
        problem = self.ranks[group.rank]
        config = folio.DcpConfig(attention=problem.config, interleave=self.interleave, combine=combine,
                                 replicated_queries=all_heads_out, all_heads_out=all_heads_out,
                                 partial_dtype=partial_dtype)
        attention = folio.DcpAttention(CONTEXT, group, config)
        plan = attention.plan(folio.DcpBatch(problem.batch.cu_q, problem.batch.kv_len, num_cached=self.num_cached))
        assert plan.reads_new_tokens and (plan.num_requests, plan.num_tokens) == (4, 9)
        (k, v), (halves, table) = self.new_tokens(), self.shard(group.rank)
        out, lse = problem.outputs()
        q = problem.q
        if all_heads_out:
            q = np.concatenate([one.q for one in self.ranks], axis=1)
            out, lse = np.tile(out, (1, self.world, 1)), np.tile(lse, (1, self.world))
        args = folio.DcpArgs(q, out, folio.make_nhd_view(*halves), table, k=k, v=v, lse=lse,
                             sm_scale=problem.rules.sm_scale, logits_soft_cap=problem.rules.cap,
                             alibi_slopes=problem.rules.slopes, sinks=problem.rules.sinks)
        workspace = folio.Workspace(attention.workspace_size(plan))
        if in_two_steps:
            attention.start(plan, args, workspace)
            with pytest.raises(folio.InvalidArgument, match="not finished"):
                attention.run(plan, args, workspace)
            attention.finish()
        else:
            attention.run(plan, args, workspace)
        return out, lse, attention, plan, args


@pytest.mark.parametrize("combine,world,interleave", [("all_gather_reduce_scatter", 1, 1),
                                                      ("all_gather_reduce_scatter", 2, 1), ("all_to_all", 2, 1),
                                                      ("all_gather_reduce_scatter", 3, 4), ("all_to_all", 3, 4)])
@pytest.mark.parametrize("rules", [{}, {"window": (9, -1), "sinks": True}, {"cap": 4.0, "slopes": True}])
def test_attention_over_a_divided_cache(combine, world, interleave, rules):
    divided = Divided(world, interleave, "float32", **rules)
    results = folio.run_ranks(world, lambda group: divided.run(group, combine))
    for problem, (out, lse, *_) in zip(divided.ranks, results):
        # As one pass, but for the roundings of the merges: a few more eps of each value and of the LSE.
        exact_out, exact_lse, magnitude = problem.exact()
        problems.assert_close(problem, out, lse, (exact_out, exact_lse, 2 * magnitude))


@pytest.mark.parametrize("combine", ["all_gather_reduce_scatter", "all_to_all"])
def test_partial_results_of_sixteen_bits(combine):
    divided = Divided(2, 1, "bfloat16", sinks=True)
    results = folio.run_ranks(2, lambda group: divided.run(group, combine, partial_dtype="bfloat16"))
    rounded = 0.0
    for problem, (out, lse, attention, *_) in zip(divided.ranks, results):
        assert attention.config.partial_dtype == folio.bfloat16
        assert attention.cached_op.config.out == folio.bfloat16
        exact_out, exact_lse, magnitude = problem.exact()
        # Each partial result is rounded once more: half a step of bfloat16 of the values' sizes.
        assert np.all(np.abs(out.astype(np.float64) - exact_out) <= 2**-8 * (np.abs(exact_out) + 2 * magnitude))
        rounded = max(rounded, np.abs(out.astype(np.float64) - exact_out).max())
    assert rounded > 0
    (group, _) = folio.make_thread_groups(2)
    assert folio.DcpAttention(CONTEXT, group, folio.DcpConfig(attention=divided.whole.config)
                              ).config.partial_dtype == folio.float32
    with pytest.raises(folio.InvalidArgument, match="partial_dtype is float16 and out bfloat16"):
        divided.run(group, partial_dtype="float16")


def test_layers_in_two_steps():
    divided = Divided(2, 1, "float32")
    whole = folio.run_ranks(2, divided.run)
    halves = folio.run_ranks(2, lambda group: divided.run(group, in_two_steps=True))
    for one, two in zip(whole, halves):
        assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])
    with pytest.raises(folio.InvalidArgument, match="no layer was started"):
        halves[0][2].finish()


def test_results_of_all_heads():
    divided = Divided(2, 1, "float32")
    results = folio.run_ranks(2, lambda group: divided.run(group, all_heads_out=True))
    for out, lse, attention, plan, args in results:
        assert attention.config.all_heads_out
        for rank, problem in enumerate(divided.ranks):
            own = slice(rank * problem.q.shape[1], (rank + 1) * problem.q.shape[1])
            exact_out, exact_lse, magnitude = problem.exact()
            problems.assert_close(problem, np.ascontiguousarray(out[:, own]), np.ascontiguousarray(lse[:, own]),
                                  (exact_out, exact_lse, 2 * magnitude))
    (group,) = folio.make_thread_groups(1)
    with pytest.raises(folio.InvalidArgument, match="replicated_queries"):
        folio.DcpAttention(CONTEXT, group, folio.DcpConfig(attention=divided.whole.config, all_heads_out=True))


def test_cross_attention_over_a_divided_cache():
    """More queries than the encoder has keys, all of which lie in the cache."""
    config = folio.AttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim_qk=32, head_dim_v=32, q="float32",
                                   kv="float32", page_size=problems.PAGE_SIZE)
    cu_q, kv_len, table = [0, 3, 5], [2, 2 * problems.PAGE_SIZE - 1], folio.csr_table([0, 1, 2], [0, 1, 3])
    q, out = sent(0, 5, 4, 32), np.full((5, 4, 32), 7, np.float32)
    k, v = (sent(half, 3, problems.PAGE_SIZE, 2, 32) for half in (1, 2))
    (group,) = folio.make_thread_groups(1)
    attention = folio.DcpAttention(CONTEXT, group, folio.DcpConfig(attention=config))
    batch = folio.DcpBatch(cu_q, kv_len, num_cached=2, all_visible=True, cross_attention=True)
    assert batch.cross_attention
    plan = attention.plan(batch)
    attention.run(plan, folio.DcpArgs(q, out, folio.make_nhd_view(k, v), table),
                  folio.Workspace(attention.workspace_size(plan)))
    for row in range(5):
        request = int(row >= 3)
        pages, length = ([0], [1, 2])[request], kv_len[request]
        keys, values = (half[pages].reshape(-1, 2, 32)[:length].astype(np.float64).repeat(2, 1) for half in (k, v))
        weights = np.exp(np.einsum("hd,thd->ht", q[row], keys) / np.sqrt(32))
        exact = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), values)
        assert np.all(np.abs(out[row] - exact) <= 64 * EPS32 * (1 + np.abs(values).max()))
    with pytest.raises(folio.InvalidArgument, match="request 0"):
        attention.plan(folio.DcpBatch(cu_q, kv_len, num_cached=2, all_visible=True))
    with pytest.raises(folio.InvalidArgument, match="num_cached of 1"):
        attention.plan(folio.DcpBatch(cu_q, kv_len, num_cached=1, cross_attention=True))


def test_refusals_of_divided_attention():
    divided = Divided(1, 1, "float32")
    (group,) = folio.make_thread_groups(1)
    out, lse, attention, plan, args = divided.run(group)
    assert "rank 0 of 1" in repr(attention) and attention.group is not None
    assert attention.config.interleave == 1 and attention.cached_op.config.out == folio.float32
    out[...] = 7
    halves, _ = divided.shard(0)
    workspace = folio.Workspace(attention.workspace_size(plan))

    def with_table(pages):
        table = folio.csr_table(np.array(pages, np.int32), np.array([0, len(pages), *[len(pages)] * 3], np.int32))
        return folio.DcpArgs(divided.whole.q, out, folio.make_nhd_view(*halves), table, k=out, v=out)

    for refused, message in [
            (lambda: attention.run(plan, with_table([1, 2, 99, 0, 0]), workspace), "row 1 needs|99"),
            (lambda: attention.run(plan, with_table([1]), workspace), "row 0 needs 3 pages"),
            (lambda: attention.plan(folio.DcpBatch([0, 2], [1])), "request 0"),
            (lambda: attention.plan(folio.DcpBatch([0, 1], [1], num_cached=2)), "num_cached is 2"),
            (lambda: folio.DcpBatch([0, 1], [1, 2]), "cu_q has 2 entries, seq_lens 2"),
            (lambda: folio.DcpAttention(CONTEXT, group, folio.DcpConfig(attention=divided.whole.config, interleave=0)),
             "interleave is 0")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            refused()
    assert np.all(out == 7)
    again = attention.plan(folio.DcpBatch(divided.whole.batch.cu_q, divided.whole.batch.kv_len, num_cached=1))
    assert code_of(lambda: attention.run(plan, args, workspace)) == folio.ErrorCode.STALE_PLAN
    assert code_of(lambda: attention.run(again, args, folio.Workspace(0))) == folio.ErrorCode.WORKSPACE_TOO_SMALL
    other = folio.DcpAttention(CONTEXT, group, attention.config)
    with pytest.raises(folio.InvalidArgument, match="plan is of another DcpAttention"):
        other.run(again, args, workspace)
    lent = folio.run_ranks(1, lambda lent: folio.DcpAttention(CONTEXT, lent, attention.config))[0]
    assert code_of(lambda: lent.plan(folio.DcpBatch([0, 1], [1]))) == folio.ErrorCode.UNAVAILABLE


def test_bounds_are_the_same_on_all_ranks_and_hold_every_batch():
    def body(group):
        attention = folio.AttentionConfig(num_q_heads=2, num_kv_heads=2, head_dim_qk=16, head_dim_v=16, q="float32",
                                          page_size=16)
        bounds = folio.GraphBounds(max_requests=2, max_tokens=8, max_q_len=4, max_kv_len=64)
        dcp = folio.DcpAttention(CONTEXT, group, folio.DcpConfig(attention=attention, bounds=bounds))
        batch = folio.DcpBatch([0, 1], [64])
        assert (batch.where, batch.num_tokens) == (folio.Where.HOST, 1)
        plan = dcp.plan(batch)
        assert plan.num_tokens == 1 and dcp.workspace_size() >= dcp.workspace_size(plan) > 0
        with pytest.raises(folio.InvalidArgument, match=r"num_tokens is 2; with lengths on the host it is 0 or cu_q"):
            dcp.plan(folio.DcpBatch([0, 1], [64], num_tokens=2))
        with pytest.raises(folio.InvalidArgument, match="request 0: seq_lens is 65; the bounds allow 64"):
            dcp.plan(folio.DcpBatch([0, 1], [65]))
        dcp.check()
        bounds.max_kv_len += group.rank
        with pytest.raises(folio.InvalidArgument, match="of the group has another configuration than rank"):
            folio.DcpAttention(CONTEXT, group, folio.DcpConfig(attention=attention, bounds=bounds))
        return dcp.config.bounds.max_kv_len

    assert folio.run_ranks(2, body) == [64, 64]


class Mailbox:
    """A group of two threads in Python: what each sends is kept in a list, between two barriers."""

    def __init__(self, rank, sent, barrier):
        self.rank, self.sent, self.meet = rank, sent, barrier

    def exchange(self, data, take):
        self.sent[self.rank] = data.copy()
        self.meet.wait(10)
        taken = take([self.sent[0], self.sent[1]])
        self.meet.wait(10)
        return taken

    def all_gather(self, send, recv):
        recv[:] = self.exchange(send, np.concatenate)

    def all_to_all(self, send, recv):
        half = len(send) // 2
        recv[:] = self.exchange(send, lambda all: np.concatenate([one[self.rank * half:][:half] for one in all]))

    def all_reduce_sum(self, data):
        data[:] = self.exchange(data, lambda all: all[0] + all[1])

    def reduce_scatter_sum(self, send, recv):
        recv[:] = self.exchange(send, lambda all: (all[0] + all[1])[self.rank * len(recv):][:len(recv)])

    def barrier(self):
        self.meet.wait(10)


@pytest.mark.parametrize("combine", ["all_gather_reduce_scatter", "all_to_all"])
def test_a_group_that_python_implements(combine):
    divided, sent_by, meet = Divided(2, 1, "float32"), [None, None], threading.Barrier(2)
    results = [None, None]

    def serve(rank):
        group = folio.make_process_group(Mailbox(rank, sent_by, meet), rank, 2)
        data = np.array([rank, 3], np.float32)
        group.all_reduce_sum(data)
        results[rank] = (*divided.run(group, combine)[:2], data)

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = folio.run_ranks(2, lambda group: divided.run(group, combine)[:2])
    for (out, lse, data), (wanted, wanted_lse) in zip(results, same):
        assert np.array_equal(out, wanted) and np.array_equal(lse, wanted_lse) and data.tolist() == [1, 6]


def test_what_an_implementation_raises_ends_its_group():
    class Broken(Mailbox):
        def barrier(self):
            raise OSError("the cable")

    group = folio.make_process_group(Broken(0, [None, None], None), 0, 2)
    for call in (group.barrier, lambda: group.all_reduce_sum(np.zeros(1, np.float32))):
        with pytest.raises(folio.Error, match="barrier of rank 0 raised.*the cable") as caught:
            call()
        assert caught.value.code == folio.ErrorCode.UNAVAILABLE
    with pytest.raises(TypeError, match="no method all_gather"):
        folio.make_process_group(object(), 0, 2)
    with pytest.raises(folio.InvalidArgument, match="rank 2 of 2"):
        folio.make_process_group(Broken(0, [], None), 2, 2)
