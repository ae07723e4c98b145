"""PcpAttention: attention over queries that ranks divide, against attention in float64 over the undivided batch."""

import folio
import numpy as np
import pytest

CONTEXT = folio.Context.cpu(num_threads=1)
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
CU_Q, SEQ_LENS = [0, 5, 6, 26], [40, 17, 20]  # the last request is new
EPS32 = 2.0 ** -23


def rows(seed, *shape):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


class Case:
    def __init__(self, world, interleave):
        self.world, self.interleave = world, interleave
        self.q = rows(1, CU_Q[-1], HEADS, DIM)
        self.keys = [rows(10 + r, n, KV_HEADS, DIM) for r, n in enumerate(SEQ_LENS)]
        self.values = [rows(20 + r, n, KV_HEADS, DIM) for r, n in enumerate(SEQ_LENS)]

    def first(self, request):
        return SEQ_LENS[request] - (CU_Q[request + 1] - CU_Q[request])

    def new(self, halves):
        return np.concatenate([half[self.first(r):] for r, half in enumerate(halves)])

    def shard(self, rank):
        """The rank's older tokens in pages, request by request; what nobody wrote is NaN."""
        halves, table, page = [], [], 1
        for r in range(len(SEQ_LENS)):
            local = folio.get_dcp_local_seq_lens([SEQ_LENS[r]], self.world, rank, self.interleave)[0]
            table.append(list(range(page, page + -(-local // PAGE))))
            page += len(table[-1])
        for half in (self.keys, self.values):
            cache = np.full((page, PAGE, KV_HEADS, DIM), np.nan, np.float32)
            for r, tokens in enumerate(half):
                own = [p for p in range(self.first(r)) if p // self.interleave % self.world == rank]
                for j, p in enumerate(own):
                    cache[table[r][j // PAGE], j % PAGE] = tokens[p]
            halves.append(cache)
        indptr = np.cumsum([0, *map(len, table)]).astype(np.int32)
        return halves, folio.csr_table(np.array(sum(table, []), np.int32), indptr)

    def exact(self, token):
        request = int(np.searchsorted(CU_Q, token, side="right")) - 1
        end = self.first(request) + token - CU_Q[request] + 1
        keys, values = (half[request][:end].astype(np.float64).repeat(HEADS // KV_HEADS, 1)
                        for half in (self.keys, self.values))
        scores = np.einsum("hd,thd->ht", self.q[token].astype(np.float64), keys) / np.sqrt(DIM)
        weights = np.exp(scores)
        return np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), values), np.log(weights.sum(1))

    def run(self, group, exchange="automatic", bounds=None, max_tokens=0):
        attention = folio.AttentionConfig(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_v=DIM,
                                          q="float32", kv="float32", page_size=PAGE)
        config = folio.PcpConfig(attention=attention, interleave=self.interleave, exchange=exchange, bounds=bounds)
        pcp = folio.PcpAttention(CONTEXT, group, config)
        plan = pcp.plan(folio.PcpBatch(CU_Q, SEQ_LENS, max_tokens=max_tokens))
        tokens = folio.pcp_tokens(CU_Q, self.world, group.rank)
        assert (plan.num_requests, plan.num_tokens) == (3, len(tokens))
        padding = max(max_tokens - len(tokens), 0)
        q, k, v = (np.concatenate([one[tokens], np.full((padding, *one.shape[1:]), np.nan, np.float32)])
                   for one in (self.q, self.new(self.keys), self.new(self.values)))
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        halves, table = self.shard(group.rank)
        args = folio.PcpArgs(q, k, v, out, folio.make_nhd_view(*halves), table, lse=lse)
        workspace = folio.Workspace(pcp.workspace_size(plan))
        pcp.run(plan, args, workspace)
        for j, token in enumerate(tokens):
            exact, exact_lse = self.exact(token)
            assert np.all(np.abs(out[j] - exact) <= 256 * EPS32)
            assert np.all(np.abs(lse[j] - exact_lse) <= 256 * EPS32 * (1 + np.abs(exact_lse)))
        return pcp, plan, args, workspace


@pytest.mark.parametrize("exchange", ["automatic", "pass_q", "pass_kv"])
@pytest.mark.parametrize("world,interleave", [(1, 1), (2, 1), (3, 4)])
def test_attention_over_divided_queries(world, interleave, exchange):
    case = Case(world, interleave)
    for pcp, plan, *_ in folio.run_ranks(world, lambda group: case.run(group, exchange)):
        wanted = folio.PcpExchange[exchange.upper()]
        assert plan.exchange == wanted or wanted == folio.PcpExchange.AUTOMATIC
        assert plan.max_tokens == folio.max_pcp_tokens(CU_Q, world) and plan.pass_kv_bytes > 0


def test_steps_within_bounds():
    bounds = folio.GraphBounds(max_requests=3, max_tokens=30, max_q_len=20, max_kv_len=64)
    case = Case(2, 1)

    def body(group):
        pcp, plan, *_ = case.run(group, bounds=bounds, max_tokens=18)
        assert (plan.max_tokens, plan.exchange) == (18, folio.PcpExchange.PASS_Q)
        assert pcp.workspace_size() >= pcp.workspace_size(plan)
        with pytest.raises(folio.InvalidArgument, match="max_tokens is 3; it is 0, or from the most tokens of a rank"):
            pcp.plan(folio.PcpBatch(CU_Q, SEQ_LENS, max_tokens=3))
        return pcp.config.bounds.max_tokens

    assert folio.run_ranks(2, body) == [30, 30]


def test_tokens_of_ranks():
    world = 2
    pieces = [folio.pcp_tokens(CU_Q, world, rank) for rank in range(world)]
    assert sorted(np.concatenate(pieces)) == list(range(CU_Q[-1]))
    most = folio.max_pcp_tokens(CU_Q, world)
    gathered = np.concatenate([np.pad(piece, (0, most - len(piece)), constant_values=-1) for piece in pieces])
    assert gathered[folio.pcp_token_rows(CU_Q, world, most)].tolist() == list(range(CU_Q[-1]))
    for rank, piece in enumerate(pieces):
        counts = np.diff(folio.pcp_local_cu_q(CU_Q, world, rank))
        assert counts.tolist() == [int(np.sum((piece >= a) & (piece < b))) for a, b in zip(CU_Q, CU_Q[1:])]
    with pytest.raises(folio.InvalidArgument, match="cu_q descends"):
        folio.pcp_tokens([0, 2, 1], 2, 0)


def test_refusals():
    case = Case(1, 1)
    (group,) = folio.make_thread_groups(1)
    pcp, plan, args, workspace = case.run(group)
    assert "rank 0 of 1" in repr(pcp) and "3 requests" in repr(plan)
    for refused, message in [
            (lambda: folio.PcpBatch([0, 1], [1, 2]), "cu_q has 2 entries, seq_lens 2"),
            (lambda: pcp.plan(folio.PcpBatch([0, 2], [1])), "request 0"),
            (lambda: pcp.workspace_size(), "only PcpConfig::bounds says"),
            (lambda: folio.PcpAttention(CONTEXT, group, pcp.config).run(plan, args, workspace),
             "plan is of another PcpAttention")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            refused()
    short = folio.csr_table(np.array([1], np.int32), np.array([0, 1, 1, 1], np.int32))
    plan = pcp.plan(folio.PcpBatch(CU_Q, SEQ_LENS))
    halves, _ = case.shard(0)
    with pytest.raises(folio.InvalidArgument, match="row 0 needs 3 pages"):
        pcp.run(plan, folio.PcpArgs(case.q, case.q[:, :2], case.q[:, :2], np.empty_like(case.q),
                                    folio.make_nhd_view(*halves), short), workspace)
