"""Both backends over a KV cache that is divided over ranks, threads of this process, beside numpy over the whole one."""

import copy
import pickle

import folio
import ml_dtypes
import numpy as np
import pytest
from folio import backends
from folio.backends import flash_attn, flashinfer

import paged_attention

CONTEXT = folio.Context.cpu(num_threads=1)
PAGE_SIZE, KV_HEADS, HEADS, DIM = 8, 2, 4, 32
SCALE = DIM ** -0.5
BACKENDS = ["flash_attn", "flashinfer"]


class Problem:
    """Requests of (new tokens, all tokens), the queries of every rank's heads, and how a rank's part lies in memory."""

    def __init__(self, world, interleave, lengths, cross=False, seed=3):
        self.world, self.interleave, self.lengths, self.cross = world, interleave, lengths, cross
        random = np.random.default_rng(seed)
        self.q_lens = [q_len for q_len, _ in lengths]
        self.seq_lens = [seq_len for _, seq_len in lengths]
        tokens = sum(self.q_lens)
        self.k = [random.standard_normal((n, KV_HEADS, DIM)).astype(np.float32) for n in self.seq_lens]
        self.v = [random.standard_normal((n, KV_HEADS, DIM)).astype(np.float32) for n in self.seq_lens]
        self.q = random.standard_normal((world, tokens, HEADS, DIM)).astype(np.float32)
        self.slopes = np.linspace(0.02, 0.3, world * HEADS, dtype=np.float32)
        self.sinks = np.linspace(-1.0, 2.0, world * HEADS, dtype=np.float32)
        self.columns = max(-(-n // (PAGE_SIZE * world)) for n in self.seq_lens) + 1
        self.pages = len(lengths) * self.columns + 1

    def own(self, rank):
        return slice(rank * HEADS, (rank + 1) * HEADS)

    def slot(self, rank, request, position):
        stripe = self.interleave * self.world
        if position % stripe // self.interleave != rank:
            return -1
        local = position // stripe * self.interleave + position % self.interleave
        return self.table(rank)[request, local // PAGE_SIZE] * PAGE_SIZE + local % PAGE_SIZE

    def table(self, rank):
        ids = np.random.default_rng(rank).permutation(np.arange(1, self.pages)).astype(np.int32)
        return ids.reshape(len(self.lengths), self.columns)

    def written(self, request):
        """Positions whose keys the step brings, and those that are in the cache before."""
        first = 0 if self.cross else self.seq_lens[request] - self.q_lens[request]
        return range(first, self.seq_lens[request])

    def fill(self, rank, cache, k, v):
        """The older tokens' keys and values: `k` and `v` are the cache's halves [pages, page_size, heads, dim]."""
        for request in range(len(self.lengths)):
            for position in range(self.written(request).start):
                slot = self.slot(rank, request, position)
                if slot >= 0:
                    k[slot // PAGE_SIZE, slot % PAGE_SIZE] = self.k[request][position].astype(cache.dtype)
                    v[slot // PAGE_SIZE, slot % PAGE_SIZE] = self.v[request][position].astype(cache.dtype)

    def new(self, values):
        return np.concatenate([values[r][self.written(r).start:] for r in range(len(self.lengths))])

    def batch(self, rank, **changes):
        lens = {"seq_lens": self.seq_lens}
        if self.cross:
            lens = {"seq_lens": [n + 2 for n in self.q_lens], "encoder_seq_lens": self.seq_lens}
        slots = [self.slot(rank, r, p) for r in range(len(self.lengths)) for p in self.written(r)]
        return backends.CommonAttentionMetadata(**{
            "query_start_loc": np.cumsum([0, *self.q_lens]), "block_table": self.table(rank), "slot_mapping": slots, **lens,
            **changes})

    def config(self, rank, **parallel):
        return backends.EngineConfig(
            model=backends.ModelConfig(dtype="float32", num_attention_heads=HEADS, num_kv_heads=KV_HEADS),
            parallel=backends.ParallelConfig(
                decode_context_parallel_size=self.world, decode_context_parallel_rank=rank,
                cp_kv_cache_interleave_size=self.interleave, **parallel))

    def assert_close(self, rank, out, rules, rounded=0.0):
        """One rank's heads. float32 sums of a few hundred terms; `rounded`: of what probabilities and outputs are."""
        token = 0
        for request, (q_len, seq_len) in enumerate(self.lengths):
            for i in range(q_len):
                for head in range(HEADS):
                    exact, _, magnitude = paged_attention.row(
                        self.q[rank, token, head].astype(np.float64),
                        self.k[request][:, head // (HEADS // KV_HEADS)].astype(np.float64),
                        self.v[request][:, head // (HEADS // KV_HEADS)].astype(np.float64), rules, seq_len - q_len + i,
                        rank * HEADS + head)
                    allowed = (magnitude + np.abs(exact)) * (2.0 ** -24 * 1024 + rounded)
                    assert np.all(np.abs(out[token, head] - exact) <= allowed), (request, i, head)
                token += 1


def make_cache(problem, kind, dtype=np.float32):
    shape = (2, problem.pages) if kind == "flash_attn" else (problem.pages, 2)
    cache = np.full((*shape, PAGE_SIZE, KV_HEADS, DIM), np.nan).astype(dtype)
    halves = (cache[0], cache[1]) if kind == "flash_attn" else (cache[:, 0], cache[:, 1])
    return cache, halves


def run_rank(problem, kind, group, parallel, rules, attn_type="decoder"):
    replicated = parallel.get("dcp_replicated_queries", False)
    all_heads = parallel.get("dcp_all_heads_out", False)
    heads = slice(None) if replicated else problem.own(group.rank)
    layer = dict(model_dtype="float32", context=CONTEXT, dcp_query_ranks=problem.world if replicated else 1,
                 sliding_window=rules.left + 1 if rules.left >= 0 else None, attn_type=attn_type)
    if rules.slopes is not None:
        layer.update(alibi_slopes=rules.slopes[heads].tolist(), sinks=rules.sinks[heads])
    module, name = {"flash_attn": (flash_attn, "FlashAttention"), "flashinfer": (flashinfer, "FlashInfer")}[kind]
    impl = getattr(module, name + "Impl")(HEADS, DIM, SCALE, KV_HEADS, **layer)
    assert impl.dcp_query_ranks == layer["dcp_query_ranks"]
    spec = backends.AttentionSpec(page_size=PAGE_SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype="float32")
    builder = getattr(module, name + "MetadataBuilder")(
        spec, {"layer": impl}, problem.config(group.rank, **parallel), dcp_group=group)
    metadata = builder.build(0, problem.batch(group.rank))
    cache, halves = make_cache(problem, kind)
    problem.fill(group.rank, cache, *halves)
    q = np.concatenate(problem.q, axis=1) if replicated else problem.q[group.rank]
    out = np.full((q.shape[0], HEADS * (problem.world if all_heads else 1), DIM), np.nan, np.float32)
    k, v = problem.new(problem.k), problem.new(problem.v)
    if kind == "flash_attn":
        impl.do_kv_cache_update(None, k, v, cache, metadata.slot_mapping)
        assert metadata.scheduler_metadata is not None
        assert metadata.new_tokens_scheduler_metadata is not None or attn_type != "decoder"
    impl.forward(None, q, k, v, cache, metadata, out)
    return out


MIXED = [(1, 41), (1, 17), (5, 30), (12, 12), (3, 40)]
PARALLEL = {
    "own queries": {},
    "a2a": {"dcp_comm_backend": "a2a"},
    "replicated": {"dcp_replicated_queries": True},
    "all heads": {"dcp_replicated_queries": True, "dcp_all_heads_out": True},
}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("world,interleave", [(2, 1), (3, 4), (4, 8)])
def test_ranks_together_are_the_whole_cache(kind, parallel, world, interleave):
    problem = Problem(world, interleave, MIXED)
    for rules in (paged_attention.Rules(SCALE),
                  paged_attention.Rules(SCALE, left=9, slopes=problem.slopes, sinks=problem.sinks)):
        outputs = folio.run_ranks(world, lambda group: run_rank(problem, kind, group, PARALLEL[parallel], rules))
        for rank, out in enumerate(outputs):
            if parallel != "all heads":
                problem.assert_close(rank, out, rules)
                continue
            for other in range(world):
                problem.assert_close(other, out[:, problem.own(other)], rules)


@pytest.mark.parametrize("world,interleave", [(2, 1), (3, 4)])
def test_cross_attention(world, interleave):
    problem = Problem(world, interleave, [(1, 41), (9, 3), (4, 20)], cross=True)
    for rules in (paged_attention.Rules(SCALE, causal=False),
                  paged_attention.Rules(SCALE, causal=False, slopes=problem.slopes, sinks=problem.sinks)):
        outputs = folio.run_ranks(
            world, lambda group: run_rank(problem, "flash_attn", group, {}, rules, attn_type="encoder_decoder"))
        for rank, out in enumerate(outputs):
            problem.assert_close(rank, out, rules)


def test_a_q_scale_per_head():
    """fp8 queries, keys and values that fp8 holds exactly."""
    fp8, problem = ml_dtypes.float8_e4m3fn, Problem(2, 2, MIXED)
    scales = np.array([0.5, 2.0], np.float32)
    for values in (problem.q, *problem.k, *problem.v):
        values[...] = values.astype(fp8).astype(np.float32)

    def body(group):
        impl = flash_attn.FlashAttentionImpl(HEADS, DIM, SCALE, KV_HEADS, kv_cache_dtype="fp8", model_dtype="float32",
                                             context=CONTEXT)
        config = problem.config(group.rank)
        config = backends.EngineConfig(model=config.model, parallel=config.parallel,
                                       cache=backends.CacheConfig(cache_dtype="fp8"))
        spec = backends.AttentionSpec(page_size=PAGE_SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype="float8_e4m3fn")
        builder = flash_attn.FlashAttentionMetadataBuilder(
            spec, {"layer": impl}, config, flash_attn.FlashAttentionOptions(quantize_query=True), dcp_group=group)
        metadata = builder.build(0, problem.batch(group.rank))
        cache, halves = make_cache(problem, "flash_attn", fp8)
        problem.fill(group.rank, cache, *halves)
        impl.do_kv_cache_update(None, problem.new(problem.k), problem.new(problem.v), cache, metadata.slot_mapping)
        out = np.full(problem.q[group.rank].shape, np.nan, np.float32)
        impl.forward(backends.AttentionLayerScales(q=folio.Scale(data=scales, granularity="per_head")), problem.q[group.rank].astype(fp8),
                     None, None, cache, metadata, out)
        return out

    op = folio.prepare(CONTEXT, folio.AttentionConfig(
        num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_v=DIM, page_size=PAGE_SIZE, q=fp8, kv=fp8,
        out="float32"))
    rounded = 0.0 if op.p_dtype == folio.float32 else 2.0 ** -8
    outputs = folio.run_ranks(2, body)
    problem.q *= np.repeat(scales, HEADS // KV_HEADS)[:, None]
    for rank, out in enumerate(outputs):
        problem.assert_close(rank, out, paged_attention.Rules(SCALE), rounded)


def make_builder(problem, rank, group, **parallel):
    impl = flash_attn.FlashAttentionImpl(HEADS, DIM, SCALE, KV_HEADS, model_dtype="float32", context=CONTEXT)
    spec = backends.AttentionSpec(page_size=PAGE_SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype="float32")
    return impl, flash_attn.FlashAttentionMetadataBuilder(spec, {"layer": impl}, problem.config(rank, **parallel),
                                                          dcp_group=group)


def test_what_contradicts_the_group_is_refused():
    problem = Problem(2, 1, MIXED)
    groups = folio.make_thread_groups(2)
    for text, call in [
        ("dcp_group must be given", lambda: make_builder(problem, 0, None)),
        ("the configuration's is rank 0 of 2", lambda: make_builder(problem, 0, groups[1])),
        ("dcp_query_ranks of 1", lambda: make_builder(problem, 0, groups[0], dcp_replicated_queries=True)),
        ("dcp_all_heads_out is set", lambda: make_builder(problem, 0, groups[0], dcp_all_heads_out=True)),
        ("partial_dtype is float16 and out float32",
         lambda: make_builder(problem, 0, groups[0], dcp_partial_dtype="float16")),
        ("dcp_group is given, but", lambda: make_builder(Problem(1, 1, MIXED), 0, groups[0])),
    ]:
        with pytest.raises(folio.InvalidArgument, match=text):
            call()
    with pytest.raises(TypeError, match="dcp_group"):
        make_builder(problem, 0, "rank 0")
    _, builder = make_builder(problem, 0, groups[0])
    with pytest.raises(folio.InvalidArgument, match="dcp_local_seq_lens of 1; of 41 tokens this rank has 21"):
        builder.build(0, problem.batch(0, dcp_local_seq_lens=[1] * len(MIXED)))
    local = folio.get_dcp_local_seq_lens(problem.seq_lens, 2, 0)
    metadata = builder.build(0, problem.batch(0, dcp_local_seq_lens=local))
    older = np.array(problem.seq_lens) - problem.q_lens
    assert np.array_equal(metadata.dcp_context_kv_lens, folio.get_dcp_local_seq_lens(older, 2, 0))
    assert metadata.max_dcp_context_kv_len == folio.max_dcp_context_len(41, 2, 1)


def test_pages_of_a_rank_are_checked():
    problem = Problem(2, 8, [(1, 41)])  # rank 0 has 24 tokens in 3 pages, rank 1 has 17 in 3
    groups = folio.make_thread_groups(2)
    impl, builder = make_builder(problem, 1, groups[1])
    table = problem.table(1).copy()
    table[0, 3] = -1  # behind the row's pages: never read
    batch = problem.batch(1, block_table=table)
    builder.build(0, batch)
    table[0, 2] = problem.pages
    metadata = builder.build(0, problem.batch(1, block_table=table))
    cache, _ = make_cache(problem, "flash_attn")
    q, k = problem.q[1], problem.new(problem.k)
    with pytest.raises(folio.InvalidArgument, match=r"block_table\[0, 2\]"):
        impl.forward(None, q, k, k, cache, metadata, np.empty_like(q))
    with pytest.raises(folio.InvalidArgument, match="2 pages of 8 tokens on each of 2 ranks"):
        builder.build(0, problem.batch(1, block_table=table[:, :2]))


def test_a_builder_whose_group_is_left():
    problem = Problem(2, 1, MIXED)
    builders = folio.run_ranks(2, lambda group: make_builder(problem, group.rank, group)[1])
    with pytest.raises(folio.Error, match="has left the group") as caught:
        builders[0].build(0, problem.batch(0))
    assert caught.value.code == folio.ErrorCode.UNAVAILABLE


def test_the_configuration_is_a_value():
    config = backends.ParallelConfig(decode_context_parallel_size=2, decode_context_parallel_rank=1,
                                     dcp_comm_backend="a2a", dcp_replicated_queries=True)
    assert copy.copy(config) == config and pickle.loads(pickle.dumps(config)) == config
    assert config != backends.ParallelConfig()
