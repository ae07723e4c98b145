"""pymllm's and SGLang's token-pool backend on Folio, over steps of a small engine, beside numpy in float64."""

import dataclasses

import folio
import ml_dtypes
import numpy as np
import pytest
from folio.backends import token_pool
from folio.backends.token_pool import ForwardBatch, ForwardMode, RadixAttention, SpecInfo, TokenPoolBackend

import paged_attention
from backend_steps import DTYPES, Engine

CONTEXT = folio.Context.cpu(num_threads=2)
MAX_CONTEXT = 192


@dataclasses.dataclass
class Served:
    row: int
    slots: list
    k: np.ndarray
    v: np.ndarray


class Pools:
    """Rows, slots and memory of running requests, and what attention over them is."""

    def __init__(self, dtype="float32", page_size=1, seed=3, **config):
        self.engine = Engine(dtype, seed=seed)
        self.page_size = page_size
        sizes = folio.KvPoolConfig(num_slots=512, page_size=page_size, num_layers=1, num_kv_heads=2, head_dim_qk=64,
                                   head_dim_v=64, dtype=dtype)
        shape = (512 + page_size, 2, 64)
        self.k, self.v = np.zeros(shape, DTYPES[dtype]), np.zeros(shape, DTYPES[dtype])
        self.pool = folio.KvPool(sizes, [self.k], [self.v])
        self.rows = folio.ReqToTokenPool(8, MAX_CONTEXT)
        self.free = [int(page) for page in self.engine.random.permutation(np.arange(1, 512 // page_size + 1))]
        self.served = {}
        self.backend = TokenPoolBackend(num_heads=4, num_kv_heads=2, head_dim=64, kv_cache_dtype=dtype, q_dtype=dtype,
                                        req_to_token=self.rows, page_size=page_size, context=CONTEXT, **config)

    def layer(self, **changes):
        return RadixAttention(num_heads=4, head_dim=64, scaling=0.125, num_kv_heads=2, layer_id=0, **changes)

    def grow(self, schedule):
        """Rows and slots of new tokens: (q, k, v, slots)."""
        tokens = sum(schedule.values())
        engine = self.engine
        q, k, v = engine.values(tokens, 4, 64), engine.values(tokens, 2, 64), engine.values(tokens, 2, 64)
        slots, first = [], 0
        for name, count in schedule.items():
            if name not in self.served:
                self.served[name] = Served(self.rows.alloc(), [], k[:0], v[:0])
            one = self.served[name]
            before = len(one.slots)
            for position in range(before, before + count):
                if position % self.page_size == 0:
                    self.page = self.free.pop() * self.page_size
                    one.slots.append(self.page)
                else:
                    one.slots.append(one.slots[-1] + 1)
            self.rows.write(one.row, before, one.slots[before:])
            one.k = np.concatenate([one.k, k[first:first + count]])
            one.v = np.concatenate([one.v, v[first:first + count]])
            slots += one.slots[before:]
            first += count
        return q, k, v, slots

    def batch(self, mode, schedule, slots, **changes):
        served = [self.served[name] for name in schedule]
        given = {
            "forward_mode": mode,
            "req_pool_indices": [one.row for one in served],
            "seq_lens": [len(one.slots) for one in served],
            "out_cache_loc": slots,
            "token_to_kv_pool": self.pool,
        }
        if mode in ("extend", "mixed", "draft_extend"):
            given["extend_prefix_lens"] = [len(one.slots) - count for one, count in zip(served, schedule.values())]
        return ForwardBatch(**{**given, **changes})

    def assert_close(self, schedule, q, out, rules):
        """By the bound of backend_steps: here every request's last tokens are the queries."""
        step = dataclasses.make_dataclass("Step", ["names", "q_lens", "seq_lens", "q"])(
            list(schedule), list(schedule.values()), [len(self.served[name].slots) for name in schedule], q)
        self.engine.requests = self.served
        self.engine.assert_close(step, out.reshape(q.shape), rules)


RULES = {
    "plain": ({}, {}, {}),
    "window": ({"sliding_window_size": 5}, {"sliding_window_size": 5}, {"left": 5}),
    "full layer of a model with windows": ({"sliding_window_size": 5}, {}, {}),
    "cap": ({"logit_cap": True}, {"logit_cap": 2.5}, {"cap": 2.5}),
}

STEPS = [
    ("extend", {"a": 5, "b": 40}),
    ("extend", {"a": 1, "b": 17}),
    ("decode", {"a": 1, "b": 1}),
    ("mixed", {"b": 1, "c": 33, "a": 1}),
    ("decode", {"c": 1, "a": 1}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["auto", "ragged", "paged"])
@pytest.mark.parametrize("name", RULES)
def test_steps(dtype, path, name):
    config, layer, rules = RULES[name]
    pools = Pools(dtype, extend_path=path, **config)
    for mode, schedule in STEPS:
        q, k, v, slots = pools.grow(schedule)
        batch = pools.batch(mode, schedule, slots)
        pools.backend.init_forward_metadata(batch)
        out = pools.layer(**layer).forward(pools.backend, q, k, v, batch)
        assert out.shape == (len(q), 256) and out.dtype == q.dtype
        pools.assert_close(schedule, q, out, pools.engine.rules(**rules))


def test_a_wrong_rule_is_noticed():
    pools = Pools(sliding_window_size=5)
    schedule = {"a": 30}
    q, k, v, slots = pools.grow(schedule)
    batch = pools.batch("extend", schedule, slots)
    pools.backend.init_forward_metadata(batch)
    out = pools.backend.forward(q, k, v, pools.layer(sliding_window_size=5), batch)
    with pytest.raises(AssertionError):
        pools.assert_close(schedule, q, out, pools.engine.rules(left=4))


def test_pages_and_fused_heads_and_given_outputs():
    pools = Pools("bfloat16", page_size=16)
    for mode, schedule in STEPS:
        q, k, v, slots = pools.grow(schedule)
        batch = pools.batch(mode, schedule, slots)
        pools.backend.init_forward_metadata(batch)
        out = np.empty((len(q), 4, 64), q.dtype)
        result = pools.backend.forward(q.reshape(len(q), 256), k.reshape(len(q), 128), v.reshape(len(q), 128),
                                       pools.layer(), batch, out=out)
        assert result is out
        pools.assert_close(schedule, q, out, pools.engine.rules())
        shown = pools.backend.forward_metadata
        wrapper = shown["decode_wrappers" if mode == "decode" else "prefill_wrappers"][0]
        assert wrapper["page_size"] == 16 and len(wrapper["kv_indptr"]) == len(schedule) + 1


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    pools = Pools("float16")
    for mode, schedule in STEPS:
        q, k, v, slots = pools.grow(schedule)
        batch = pools.batch(mode, schedule, torch.tensor(slots))
        pools.backend.init_forward_metadata(batch)
        out = pools.backend.forward(*map(torch.from_numpy, (q, k, v)), pools.layer(), batch)
        assert isinstance(out, torch.Tensor) and out.dtype == torch.float16
        pools.assert_close(schedule, q, out.numpy(), pools.engine.rules())


def test_layers_that_share_a_cache_read_it():
    pools = Pools(extend_path="ragged")
    schedule = {"a": 20, "b": 3}
    q, k, v, slots = pools.grow(schedule)
    batch = pools.batch("extend", schedule, slots)
    pools.backend.init_forward_metadata(batch)
    first = pools.backend.forward_extend(q, k, v, pools.layer(), batch)
    second = pools.backend.forward_extend(q, None, None, pools.layer(), batch)
    for out in (first, second):
        pools.assert_close(schedule, q, out, pools.engine.rules())


def test_idle_steps_give_zeros():
    pools = Pools()
    batch = ForwardBatch(forward_mode="idle")
    pools.backend.init_forward_metadata(batch)
    out = np.full((2, 256), 7.0, np.float32)
    pools.backend.forward(np.ones((2, 256), np.float32), None, None, pools.layer(), batch, out=out)
    assert np.all(out == 0)


def test_captured_decodes_replay_other_lengths():
    pools = Pools()
    start = {"a": 9, "b": 20, "c": 1}
    q, k, v, slots = pools.grow(start)
    batch = pools.batch("extend", start, slots)
    pools.backend.init_forward_metadata(batch)
    pools.backend.forward(q, k, v, pools.layer(), batch)
    pools.backend.init_cuda_graph_state(4, 4)
    fill = pools.backend.get_cuda_graph_seq_len_fill_value()
    pools.backend.init_forward_metadata_capture_cuda_graph(4, 4, [0] * 4, [fill] * 4, "decode",
                                                           token_to_kv_pool=pools.pool)
    for schedule in ({"a": 1, "b": 1, "c": 1}, {"c": 1, "a": 1}):
        q, k, v, slots = pools.grow(schedule)
        padding = 4 - len(schedule)
        served = [pools.served[name] for name in schedule]
        rows = [one.row for one in served] + [0] * padding
        lens = [len(one.slots) for one in served] + [fill] * padding
        pools.backend.init_forward_metadata_replay_cuda_graph(4, rows, lens, sum(lens), "decode",
                                                              token_to_kv_pool=pools.pool)
        batch = ForwardBatch(forward_mode="decode", req_pool_indices=rows, seq_lens=lens,
                             out_cache_loc=slots + [0] * padding, token_to_kv_pool=pools.pool)
        wide = [np.concatenate([values, np.zeros((padding, *values.shape[1:]), values.dtype)])
                for values in (q, k, v)]
        out = pools.backend.forward_decode(*wide, pools.layer(), batch)
        pools.assert_close(schedule, q, out[:len(q)], pools.engine.rules())
    with pytest.raises(folio.InvalidArgument, match="no batch of 2 requests was captured"):
        pools.backend.init_forward_metadata_replay_cuda_graph(2, [1, 2], [3, 3], 6, "decode",
                                                              token_to_kv_pool=pools.pool)
    with pytest.raises(folio.InvalidArgument, match="seq_lens_sum is 5"):
        pools.backend.init_forward_metadata_replay_cuda_graph(4, [0] * 4, [1] * 4, 5, "decode",
                                                              token_to_kv_pool=pools.pool)


def tree_rows(parents):
    """Which nodes each node sees: itself and its ancestors."""
    rows = []
    for node in range(len(parents)):
        seen, at = {node}, node
        while parents[at] >= 0:
            at = parents[at]
            seen.add(at)
        rows.append(sorted(seen))
    return rows


def test_trees_of_drafts_see_their_own_path():
    pools = Pools()
    before = {"a": 11, "b": 30}
    q, k, v, slots = pools.grow(before)
    batch = pools.batch("extend", before, slots)
    pools.backend.init_forward_metadata(batch)
    pools.backend.forward(q, k, v, pools.layer(), batch)
    parents = [[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]]
    drafts = {"a": 5, "b": 5}
    lens = [11, 30]
    q, k, v, slots = pools.grow(drafts)
    mask = token_pool.fill_tree_mask("tail_bits", parents, lens, 5)
    spec = SpecInfo(draft_token_num=5, tree_mask=mask)
    batch = pools.batch("target_verify", drafts, slots, seq_lens=lens, spec_info=spec)
    pools.backend.init_forward_metadata(batch)
    out = pools.backend.forward(q, k, v, pools.layer(), batch).reshape(q.shape)
    positions = token_pool.draft_tree_positions(parents, lens)
    assert positions.tolist() == [[11, 12, 12, 13, 13], [30, 31, 32, 32, 31]]
    for request, name in enumerate(drafts):
        one = pools.served[name]
        for node, seen in enumerate(tree_rows(parents[request])):
            keys = [*range(lens[request]), *(lens[request] + other for other in seen)]
            for head in range(4):
                token = request * 5 + node
                exact, _, magnitude = paged_attention.row(
                    q[token, head].astype(np.float64), one.k[keys, head // 2].astype(np.float64),
                    one.v[keys, head // 2].astype(np.float64), pools.engine.rules(causal=False), 0, head)
                assert np.all(np.abs(out[token, head] - exact) <= 1e-5 * (magnitude + 1))


def test_lists_of_slots():
    random = np.random.default_rng(5)
    table = random.permutation(8 * 40).reshape(8, 40).astype(np.int32)
    rows, lens, starts = [3, 1, 7], [10, 0, 25], [0, 4, 9]
    indptr = token_pool.kv_indptr_from_lens(lens)
    assert indptr.tolist() == [0, 10, 10, 35]
    indices = np.full(40, -1, np.int32)
    token_pool.create_kv_indices(table, rows, lens, indptr, np.array(starts), indices)
    expected = np.concatenate([table[row, start:start + length] for row, start, length in zip(rows, starts, lens)])
    assert np.array_equal(indices[:35], expected) and np.all(indices[35:] == -1)
    with pytest.raises(folio.InvalidArgument, match="request 2 has row 8"):
        token_pool.create_kv_indices(table, [3, 1, 8], lens, indptr, None, indices)
    with pytest.raises(folio.InvalidArgument, match="slot"):
        token_pool.create_kv_indices(table, rows, lens, indptr, None, indices, num_slots=2)
    kept, first = token_pool.window_kv_ranges([10, 3], None, 4)
    assert kept.tolist() == [5, 3] and first.tolist() == [5, 0]
    kept, first = token_pool.window_prefix_ranges([10, 3], 4)
    assert kept.tolist() == [4, 3] and first.tolist() == [6, 0]
    branches = token_pool.DraftBranches(topk=2, num_steps=3)
    indptr, indices = token_pool.generate_draft_decode_kv_indices(table, [2, 4], [5, 1], branches, 2)
    assert indptr.tolist() == [[0, 6, 12, 14, 16], [0, 7, 14, 17, 20]]
    assert np.array_equal(indices[1, 7:14], [*table[2, :5], table[2, 8], table[2, 9]])
    assert indices.shape[1] == token_pool.draft_kv_indices_len(6, 2, branches, 2)


def test_draft_trees():
    shape = token_pool.DraftTreeShape(topk=2, spec_steps=2, draft_token_num=4)
    assert token_pool.draft_candidates(shape) == 6 and token_pool.draft_parent_list_len(shape) == 3
    scores = np.array([[0.9, 0.8, 0.7, 0.1, 0.5, 0.2]], np.float32)
    selected, drafts = token_pool.select_draft_tokens(scores, np.arange(10, 16)[None], [7], shape)
    assert selected.tolist() == [[0, 1, 2]] and drafts.tolist() == [[7, 10, 11, 12]]
    parents = token_pool.draft_tree_parents([[-1, 0, 1]], selected, shape)
    assert parents.tolist() == [[-1, 0, 0, 1]]
    index, child, sibling = token_pool.draft_tree_links(parents, 4)
    assert (index.tolist(), child.tolist(), sibling.tolist()) == ([[0, 1, 2, 3]], [[1, 3, -1, -1]], [[-1, 2, -1, -1]])
    assert token_pool.fill_tree_mask("qlen_only", parents, [5], 4).reshape(4, 4).tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def test_what_is_refused_leaves_everything_as_it_was():
    pools = Pools()
    schedule = {"a": 4, "b": 2}
    q, k, v, slots = pools.grow(schedule)
    refused = {
        "req_pool_indices has 1 entries": {"req_pool_indices": [1]},
        "request 1 has row 20": {"req_pool_indices": [1, 20]},
        "request 0 has seq_len 500": {"seq_lens": [500, 2]},
        "seq_lens_sum is 9": {"seq_lens_sum": 9},
        "request 0 has a prefix of 5": {"extend_prefix_lens": [5, 0]},
        "encoder_lens is given": {"encoder_lens": [1, 1]},
        "spec_info.draft_token_num is given": {"spec_info": SpecInfo(draft_token_num=3)},
        "token_to_kv_pool is None": {"token_to_kv_pool": None},
    }
    for message, changes in refused.items():
        with pytest.raises(folio.InvalidArgument, match=message):
            pools.backend.init_forward_metadata(pools.batch("extend", schedule, slots, **changes))
    assert pools.backend.forward_metadata is None
    with pytest.raises(TypeError, match="token_to_kv_pool: expected"):
        pools.batch("extend", schedule, slots, token_to_kv_pool=q)
    with pytest.raises((TypeError, folio.InvalidArgument), match="forward_mode"):
        pools.batch("sideways", schedule, slots)
    batch = pools.batch("extend", schedule, slots)
    layer = pools.layer()
    with pytest.raises(folio.InvalidArgument, match="call init_forward_metadata"):
        pools.backend.forward(q, k, v, layer, batch)
    pools.backend.init_forward_metadata(batch)
    moved = [slots[1], slots[0], *slots[2:]]
    out = np.full((6, 256), 7.0, np.float32)
    calls = {
        r"q is \[5": (q[:5], k, v, layer, batch),
        "k and v are both given": (q, k, None, layer, batch),
        "the layer has num_heads 2": (q, k, v, RadixAttention(num_heads=2, num_kv_heads=2, head_dim=64), batch),
        "the layer's logit_cap is 3": (q, k, v, pools.layer(logit_cap=3.0), batch),
        "sliding_window_size|window": (q, k, v, pools.layer(sliding_window_size=4), batch),
        "out_cache_loc has slot": (q, k, v, layer, pools.batch("extend", schedule, moved)),
        "the pool does not have|layer": (q, k, v, RadixAttention(num_heads=4, num_kv_heads=2, head_dim=64, layer_id=3),
                                         batch),
        "forward_batch: expected": (q, k, v, layer, {}),
    }
    for message, arguments in calls.items():
        with pytest.raises((folio.InvalidArgument, TypeError), match=message):
            pools.backend.forward(*arguments, True, out)
    with pytest.raises(folio.InvalidArgument, match="the present metadata is not a decode's"):
        pools.backend.forward_decode(q, k, v, layer, batch)
    assert np.all(out == 7.0) and not np.any(pools.k) and not np.any(pools.v)
    pools.assert_close(schedule, q, pools.backend.forward(q, k, v, layer, batch), pools.engine.rules())


def test_configurations_that_contradict_themselves_are_refused():
    table = np.zeros((4, 32), np.int32)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "context": CONTEXT}
    for message, changes in {
            "num_q_heads is 3": {"num_heads": 3},
            "req_to_token is float32": {"req_to_token": table.astype(np.float32)},
            "req_to_token has shape": {"req_to_token": table[0]},
            "kv_indptr_buf is int64": {"kv_indptr_buf": np.zeros(9, np.int64)},
            "kv_indptr_buf": {"kv_indptr_buf": np.zeros(2, np.int32)},
            "q_dtype": {"q_dtype": "float8_e4m3fn"},
    }.items():
        with pytest.raises(folio.Error, match=message):
            TokenPoolBackend(**{**sizes, "req_to_token": table, **changes})
    backend = TokenPoolBackend(**sizes, req_to_token=table, sliding_window_size=3)
    assert backend.num_wrappers == 2 and backend.dispatch_reason == token_pool.WrapperDispatch.SLIDING_WINDOW
    layer = RadixAttention(num_heads=4, num_kv_heads=2, head_dim=64, sliding_window_size=3)
    assert backend.wrapper_index(layer) == 0 and backend.wrapper_index(RadixAttention(num_heads=4, num_kv_heads=2,
                                                                                    head_dim=64)) == 1
    assert token_pool.FlashInferAttnBackend is TokenPoolBackend
    assert token_pool.should_use_tensor_core("float16", 28, 8) is False
    assert token_pool.should_use_tensor_core("float8_e4m3fn", 8, 8) is True
    assert token_pool.capture_batch_sizes(9) == [1, 2, 4, 8]
    assert [int(mode.value) for mode in (ForwardMode.EXTEND, ForwardMode.IDLE)] == [1, 4]


def test_a_workspace_may_be_shared():
    workspace = token_pool.TokenPoolWorkspace(CONTEXT)
    table = np.zeros((4, 32), np.int32)
    for _ in range(2):
        TokenPoolBackend(num_heads=4, num_kv_heads=2, head_dim=64, req_to_token=table, workspace=workspace,
                         context=CONTEXT)
    assert workspace.bytes > 0


class Rank:
    """Two requests of one rank: its tokens' slots and keys, the queries of its heads. Without a group the only one."""

    TOTAL = [46, 6]  # tokens of each request in the end

    def __init__(self, interleave, group=None, **config):
        self.group, self.interleave = group, interleave
        random = np.random.default_rng(7)
        self.k, self.v = (random.standard_normal((2, 64, 2, 64), dtype=np.float32) for _ in range(2))
        halves = [np.zeros((64, 2, 64), np.float32) for _ in range(2)]
        sizes = folio.KvPoolConfig(num_slots=63, page_size=1, num_layers=1, num_kv_heads=2, head_dim_qk=64, head_dim_v=64,
                                   dtype="float32")
        self.halves, self.pool = halves, folio.KvPool(sizes, [halves[0]], [halves[1]])
        self.rows = np.zeros((3, 64), np.int32)
        self.lens, self.held, self.free = [0, 0], [0, 0], iter(range(1, 64))
        self.backend = TokenPoolBackend(num_heads=4, num_kv_heads=2, head_dim=64, kv_cache_dtype="float32", q_dtype="float32",
                                        req_to_token=self.rows, dcp_group=group, cp_kv_cache_interleave_size=interleave,
                                        context=folio.Context.cpu(num_threads=1), **config)

    def step(self, mode, new, q):
        slots = []
        for request, count in enumerate(new):
            for position in range(self.lens[request], self.lens[request] + count):
                mine = self.group is None or position // self.interleave % self.group.size == self.group.rank
                slots.append(next(self.free) if mine else -1)
                if mine:
                    self.rows[request + 1, self.held[request]] = slots[-1]
                    self.held[request] += 1
        older, self.lens = self.lens, [had + count for had, count in zip(self.lens, new)]
        k, v = (np.concatenate([half[r, older[r]:self.lens[r]] for r in range(2)]) for half in (self.k, self.v))
        batch = ForwardBatch(forward_mode=mode, req_pool_indices=[1, 2], seq_lens=self.lens, out_cache_loc=slots,
                             token_to_kv_pool=self.pool, **({"extend_prefix_lens": older} if mode == "extend" else {}))
        layer = RadixAttention(num_heads=4, head_dim=64, scaling=0.125, num_kv_heads=2, layer_id=0)
        self.backend.init_forward_metadata(batch)
        out = self.backend.forward(q, k, v, layer, batch)
        self.backend.check_plans()
        return out


@pytest.mark.parametrize("world, interleave, config", [
    (2, 1, {}),
    (3, 16, {"dcp_comm_backend": "a2a", "extend_path": "paged"}),
    (2, 4, {"dcp_replicated_queries": True, "extend_path": "ragged"}),
    (2, 4, {"dcp_replicated_queries": True, "dcp_all_heads_out": True, "dcp_transport": folio.DcpTransport.GROUP}),
])
def test_ranks_together_are_the_whole_pool(world, interleave, config):
    steps = [("extend", [40, 5]), ("extend", [5, 0]), ("decode", [1, 1])]
    random = np.random.default_rng(9)
    queries = [random.standard_normal((world, sum(new), 4, 64), dtype=np.float32) for _, new in steps]

    def heads(rank, q):
        return np.concatenate(list(q), axis=1) if config.get("dcp_replicated_queries") else q[rank]

    def serve(group):
        rank = Rank(interleave, group, **config)
        return [rank.step(mode, new, np.ascontiguousarray(heads(group.rank, q))) for (mode, new), q in zip(steps, queries)]

    divided = folio.run_ranks(world, serve)
    for r in range(world):
        whole = Rank(1)
        for number, ((mode, new), q) in enumerate(zip(steps, queries)):
            expected = whole.step(mode, new, q[r])
            if config.get("dcp_all_heads_out"):
                found = [outs[number][:, r * 256:(r + 1) * 256] for outs in divided]
            else:
                found = [divided[r][number]]
            for out in found:
                np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)


def test_what_ranks_cannot_divide_is_refused():
    groups = folio.make_thread_groups(2)
    with pytest.raises(TypeError, match="dcp_group"):
        Rank(1, 3)
    for message, config in [("cp_kv_cache_interleave_size is 0", {}), ("needs ag_rs", {
            "dcp_comm_backend": "a2a", "dcp_replicated_queries": True, "dcp_all_heads_out": True})]:
        with pytest.raises(folio.InvalidArgument, match=message):
            Rank(1 if config else 0, groups[0], **config)
