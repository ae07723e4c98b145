"""Plain structs: construction, properties, repr, ==, copies, pickles; and what everything else says of itself."""

import copy
import pickle

import folio
import numpy as np
import pytest

import problems

BOUNDS = {"max_requests": 4, "max_tokens": 9, "max_q_len": 5, "max_kv_len": 40}
# Of every class what must be given, and other values than the defaults.
STRUCTS = {
    folio.AttentionConfig: (
        {"num_q_heads": 8, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_v": 32},
        {"q": folio.float16, "kv": folio.float8_e4m3fn, "ragged_kv": folio.float16, "out": folio.float32,
         "kv_format": folio.KvFormat.CPU_PACKED, "page_size": 32, "mask": folio.MaskKind.NONE, "window_left": 7,
         "window_right": 3, "attention_chunk": 64, "span_window_left": -1,
         "features": folio.Feature.SINKS | folio.Feature.SOFT_CAP, "determinism": folio.Determinism.BATCH_INVARIANT}),
    folio.GraphBounds: (BOUNDS, {"max_shared_levels": 1}),
    folio.WorkloadMix: ({}, {"decode_tokens": 300.5, "prefill_tokens": 1200.0}),
    folio.PrepareOptions: ({}, {"bounds": folio.GraphBounds(**BOUNDS), "force_kernel": "generic", "num_workers": 3,
                                "allow_fp8_mma": True, "max_kv_splits": 2, "mix": folio.WorkloadMix(decode_tokens=1)}),
    folio.KvShard: ({}, {"world": 4, "rank": 3, "interleave": 16}),
    folio.RopeArgs: ({}, {"theta": 5e5, "scale": 2.0}),
}
each = pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)


@each
def test_every_field_is_given_read_and_set(struct):
    needed, others = STRUCTS[struct]
    standard = struct(**needed)
    for name, value in others.items():
        assert getattr(standard, name) != value, f"{name} is tried with its default"
        given = struct(**needed, **{name: value})
        changed = struct(**needed)
        setattr(changed, name, value)
        assert getattr(given, name) == getattr(changed, name) == value
        assert given == changed != standard
        setattr(changed, name, getattr(standard, name))
        assert changed == standard
    for name in needed:
        with pytest.raises(TypeError, match=f"misses the argument '{name}'"):
            struct(**{other: value for other, value in needed.items() if other != name})


@each
def test_the_cases_here_know_every_field(struct):
    needed, others = STRUCTS[struct]
    fields = {name for name, value in vars(struct).items() if isinstance(value, property)}
    assert fields == {*needed, *others}


@each
def test_repr_makes_it_again(struct):
    needed, others = STRUCTS[struct]
    for given in (struct(**needed), struct(**needed, **others)):
        assert eval(repr(given), {"folio": folio}) == given
        assert "\n" not in repr(given)


@each
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
                         ids=["copy", "deepcopy", "pickle"])
def test_copies_are_equal_and_apart(struct, copied):
    needed, others = STRUCTS[struct]
    one = struct(**needed, **others)
    other = copied(one)
    assert other == one and other is not one and type(other) is struct
    name, value = next(iter(others.items()))
    setattr(other, name, getattr(struct(**needed), name))
    assert other != one and getattr(one, name) == value


def test_a_pickle_of_fewer_fields_gets_defaults():
    options = folio.PrepareOptions.__new__(folio.PrepareOptions)
    options.__setstate__({"num_workers": 3})
    assert options == folio.PrepareOptions(num_workers=3)
    for state, name in (({"workers": 3}, "workers"), ({"num_workers": "x"}, "num_workers")):
        with pytest.raises(TypeError, match=name):
            folio.PrepareOptions.__new__(folio.PrepareOptions).__setstate__(state)


def test_a_struct_inside_is_changed_in_place():
    options = folio.PrepareOptions(bounds=folio.GraphBounds(**BOUNDS))
    options.bounds.max_requests = 77
    assert options.bounds.max_requests == 77
    options.bounds = None
    assert options.bounds is None


def test_equality_is_of_one_class():
    assert folio.KvShard() != folio.PrepareOptions() and folio.KvShard() != 1 and folio.KvShard() is not None
    assert not folio.KvShard() == None  # noqa: E711
    with pytest.raises(TypeError, match="unhashable"):
        hash(folio.KvShard())


def test_answers():
    context, config = folio.Context.cpu(num_threads=2), problems.make().config
    for ask in (lambda: context.device, lambda: folio.explain(context, config)[0],
                lambda: folio.recommended_kv_format(config, context)):
        one, other = ask(), ask()
        assert one == other and hash(one) == hash(other) and repr(one) == repr(other)
        assert one != config
        with pytest.raises(AttributeError):
            setattr(one, "index", 1)
    assert repr(context.device) == "folio.Device(type=folio.DeviceType.CPU, index=0)"
    assert len(set(folio.explain(context, config))) == len(folio.explain(context, config))


def test_reprs():
    problem = problems.make("float32", "mixed", sinks=True)
    context = folio.Context.cpu(num_threads=3)
    op = folio.prepare(context, problem.config)
    buffer = folio.make_plan_buffer(op)
    plan = folio.plan(op, problem.batch_view(), buffer)
    out, lse = problem.outputs()
    cache = folio.make_nhd_view(problem.k, problem.v)
    ragged = folio.RaggedKvView(problem.q, problem.q, [0, 2])
    read_only = problem.q.copy()
    read_only.flags.writeable = False
    sizes = "4 q heads, 2 KV heads, head_dim 32/24, q float32, kv float32, pages of 16, mask causal"
    kernel = f"{op.kernel_name} on the CPU, {sizes}"
    expected = {
        context: "Context: the CPU, 3 threads",
        op: f"AttentionOp: {kernel}",
        buffer: f"PlanBuffer: plans of {kernel}",
        plan: f"AttentionPlan: 4 requests, 9 tokens, 1 segment, of {kernel}",
        folio.Workspace(300): "Workspace: 300 bytes of its own, on the CPU",
        folio.Workspace(np.zeros(512, np.uint8)): "Workspace: 512 bytes, on the CPU",
        problem.batch_view(): "BatchView: 4 requests, 9 tokens, 1 segment, on the CPU",
        problem.args(out, lse): "AttentionArgs: q float32 [9, 4, 32], out float32 [9, 4, 24], lse base e, 1 segment, "
                                "sm_scale 0.176777, sinks, on the CPU",
        problem.segment(): "SegmentArgs: 8 pages of 16 tokens, float32, table of 4 rows, on the CPU",
        folio.SegmentArgs(ragged=ragged, k_scale=0.5):
            "SegmentArgs: ragged k float32 [9, 4, 32], v float32 [9, 4, 32], k_scale 0.5, on the CPU",
        folio.TensorView(problem.q): "TensorView: float32 [9, 4, 32], on the CPU",
        folio.TensorView(read_only[0, 0, 0]): "TensorView: float32 [], read-only, on the CPU",
        folio.LseView(lse, "two"): "LseView: float32 [9, 4], base two, on the CPU",
        folio.Scale(0.5): "Scale: 0.5",
        folio.Scale(data=np.ones(3, np.float32), granularity="per_head"): "Scale: per_head float32 [3]",
        cache: "KvCacheView: 8 pages of 16 tokens, 2 KV heads, head_dim 32/24, float32, strided, on the CPU",
        folio.csr_table([1], [0, 1]): "PageTableView: csr, 1 row, 1 page id, on the CPU",
        folio.dense_table([[1, 2]], 1): "PageTableView: dense [1, 2] from column 1, on the CPU",
        ragged: "RaggedKvView: k float32 [9, 4, 32], v float32 [9, 4, 32], 1 row, on the CPU",
        folio.KvSegment([1], first_pos=[2], group_indptr=[0, 1], mask="all_visible", shard=folio.KvShard(world=2)):
            "KvSegment: paged, 1 row of shared keys, first_pos given, all_visible, shard 0 of 2, on the CPU",
        folio.CustomMask(scope="tail", tail_len=[2]): "CustomMask: tail, 1 request",
        folio.CacheWriteArgs(problem.q[:, :2].copy(), None, [1], cache):
            "CacheWriteArgs: 1 slot, k float32 [9, 2, 32], into 8 pages of 16 tokens float32, on the CPU",
        folio.AttentionStateView(out, lse): "AttentionStateView: out float32 [9, 4, 24], lse base e, on the CPU",
        folio.AttentionStatesView(out[None], lse[None]):
            "AttentionStatesView: out float32 [1, 9, 4, 24], lse base e, on the CPU",
    }
    for value, text in expected.items():
        assert repr(value) == f"<folio.{text}>"
    assert repr(folio.MaskKind.CAUSAL) == "folio.MaskKind.CAUSAL" and repr(folio.bfloat16) == "folio.bfloat16"
    assert repr(folio.Feature(0)) == "folio.Feature(0)"
