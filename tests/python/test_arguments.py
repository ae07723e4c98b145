"""Wrong arguments: every function says which one, what it expected and what it got, in one line."""

import re

import folio
import numpy as np
import pytest

import problems
import signatures

WRONG = object()  # what nothing takes
CALLABLES = signatures.public_callables()


class Samples:
    """A value for each parameter type: of the module's classes one that functions take."""

    def __init__(self):
        problem = problems.make("float32", "mixed")
        out, lse = problem.outputs()
        context = folio.Context.cpu(num_threads=1)
        op = folio.prepare(context, problem.config)
        buffer = folio.make_plan_buffer(op)
        plan = folio.plan(op, problem.batch_view(), buffer)
        cache = folio.make_nhd_view(problem.k, problem.v)
        state, states = folio.AttentionStateView(out, lse), folio.AttentionStatesView(out[None], lse[None])
        self.made = [
            context, op, buffer, plan, cache, state, states, problem.config, problem.batch_view(), problem.args(out),
            problem.segment(), folio.Workspace(0), folio.csr_table([], [0]), folio.KvSegment([1]),
            folio.RaggedKvView(problem.q, problem.q, [0]), folio.CustomMask(), folio.KvShard(), folio.PrepareOptions(),
            folio.RopeArgs(), folio.Scale(1.0),
            folio.GraphBounds(max_requests=1, max_tokens=1, max_q_len=1, max_kv_len=1),
            folio.CacheWriteArgs(problem.q[:, :2].copy(), None, [1], cache), *folio.MaskKind, folio.float32,
        ]

    def of(self, kind):
        """None where there is none."""
        plain = {"int": 1, "float": 1.0, "bool": True, "str": "", "object": np.zeros(1, np.int32), "None": None}
        for one in kind.split(" | "):
            if one in plain:
                return plain[one]
            if one.startswith("collections.abc.Callable"):
                return len
            if one.startswith("collections.abc."):
                return []
            name = one.split(".")[-1]
            for value in self.made:
                if type(value).__name__ == name:
                    return value
            members = getattr(getattr(folio._folio, name, None), "__members__", {})
            if members:
                return next(iter(members.values()))
        return WRONG


@pytest.fixture(name="samples", scope="module")
def make_samples():
    return Samples()


def typed(parameter):
    """Whether nanobind refuses WRONG by itself: where it says `object`, the function looks."""
    return parameter.type and not {"object", "typing.Any"} & set(parameter.type.split(" | ")) - {
        "typing.Any" if "DType" in parameter.type else None}


def with_one_wrong(samples, parameters):
    """(name, arguments) for every parameter that has a type, wrong in turn; all that are needed are given."""
    needed = {one.name: samples.of(one.type) for one in parameters if one.required}
    if WRONG in needed.values():
        return  # of a class that is made in another file's tests
    for one in parameters:
        if typed(one):
            yield one.name, {**needed, one.name: WRONG}


SINGLE = {name: found for name, found in CALLABLES.items() if len(found[1]) == 1}


@pytest.mark.parametrize("name", SINGLE)
def test_a_wrong_kind_is_named(samples, name):
    function, (parameters,) = SINGLE[name]
    for argument, given in with_one_wrong(samples, parameters):
        with pytest.raises((TypeError, folio.InvalidArgument)) as caught:
            function(**given)
        message = str(caught.value)
        if type(caught.value) is TypeError:
            assert re.fullmatch(f"{argument}: expected .+, got an object", message)
        else:  # the signature is written by hand, and the function looks for itself, in an order of its own
            assert any(re.search(rf"\b{one.name}\b", message) for one in parameters) and "\n" not in message


def test_enough_is_tried(samples):
    tried = [argument for _, (parameters,) in SINGLE.values() for argument, _ in with_one_wrong(samples, parameters)]
    assert len(tried) > 80 and len(SINGLE) > 30


@pytest.mark.parametrize("name", SINGLE)
def test_names_and_numbers_of_arguments(samples, name):
    function, (parameters,) = SINGLE[name]
    shown = re.escape(name)
    needed = {one.name: samples.of(one.type) for one in parameters if one.required}
    with pytest.raises(TypeError, match=rf"^{shown}\(\) has no argument 'no_such'; it takes "):
        function(**needed, no_such=1)
    too_many = rf"^{shown}\(\) takes \d+ positional arguments?, not {len(parameters) + 1}; it takes"
    with pytest.raises(TypeError, match=too_many):
        function(*[WRONG] * (len(parameters) + 1))
    for missing in needed:
        rest = {one: value for one, value in needed.items() if one != missing}
        with pytest.raises(TypeError, match=rf"^{shown}\(\) misses the argument '{missing}'; it takes "):
            function(**rest)


def test_every_setter_names_its_field():
    tried = 0
    for cls in (folio.AttentionConfig, folio.GraphBounds, folio.PrepareOptions, folio.KvShard, folio.RopeArgs):
        sizes = {one.name: 8 for one in signatures.overloads(cls.__init__)[0] if one.required}
        made = cls(**sizes)
        before = cls(**sizes)
        for field, value in vars(cls).items():
            if not isinstance(value, property):
                continue
            with pytest.raises(TypeError, match=f"^{field}: expected .+, got an object$"):
                setattr(made, field, WRONG)
            tried += 1
        assert made == before
    assert tried == 33


SIZES = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "head_dim_v": 8}
DTYPES = "'float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'float4_e2m1fn_x2' or 'int8'"
FEATURES = "'soft_cap', 'alibi', 'sinks', 'rope_llama', 'spans', 'request_causal' or 'kv_start'"


@pytest.mark.parametrize("given,kind,message", [
    ({"page_size": "x"}, TypeError, "page_size: expected an integer, got 'x'"),
    ({"page_size": 1.0}, TypeError, "page_size: expected an integer, got 1.0"),
    ({"page_size": None}, TypeError, "page_size: expected an integer, got None"),
    ({"page_size": np.zeros(3)}, TypeError, "page_size: expected an integer, got a numpy.ndarray"),
    ({"page_size": 2**31}, folio.InvalidArgument, "page_size: 2147483648 is out of range"),
    ({"page_size": -2**31 - 1}, folio.InvalidArgument, "page_size: -2147483649 is out of range"),
    ({"page_size": 10**30}, folio.InvalidArgument, f"page_size: {10**30} is out of range"),
    ({"mask": "casual"}, folio.InvalidArgument, "mask: expected 'none', 'causal' or 'custom', got 'casual'"),
    ({"mask": 1}, TypeError, "mask: expected a folio.MaskKind: 'none', 'causal' or 'custom', got 1"),
    ({"mask": folio.LseBase.E}, TypeError,
     "mask: expected a folio.MaskKind: 'none', 'causal' or 'custom', got a folio.LseBase"),
    ({"q": "float64"}, folio.InvalidArgument, f"q: expected {DTYPES}, got 'float64'"),
    ({"q": np.float64}, TypeError,
     f"q: expected a dtype of folio, torch, numpy or ml_dtypes: {DTYPES}, got <class 'numpy.float64'>"),
    ({"q": None}, TypeError, f"q: expected a dtype of folio, torch, numpy or ml_dtypes: {DTYPES}, got None"),
    ({"features": "sink"}, folio.InvalidArgument, f"features: expected {FEATURES}, got 'sink'"),
    ({"features": ["sinks", "sink"]}, folio.InvalidArgument, f"features[1]: expected {FEATURES}, got 'sink'"),
    ({"features": [3]}, TypeError, f"features[0]: expected a folio.Feature: {FEATURES}, got 3"),
    ({"features": 3}, TypeError, f"features: expected a folio.Feature: {FEATURES}, got 3"),
])
def test_messages(given, kind, message):
    with pytest.raises(kind) as caught:
        folio.AttentionConfig(**SIZES, **given)
    assert str(caught.value) == message
    (name, value), = given.items()
    config = folio.AttentionConfig(**SIZES)
    with pytest.raises(kind) as caught:
        setattr(config, name, value)
    assert str(caught.value) == message and config == folio.AttentionConfig(**SIZES)


def test_a_negative_number_beside_one_out_of_range():
    with pytest.raises(folio.InvalidArgument, match="^attention_chunk: 1099511627776 is out of range"):
        folio.AttentionConfig(**SIZES, window_left=-1, attention_chunk=2**40)


def test_elements_and_overloads():
    with pytest.raises(TypeError, match=r"^segments\[1\]: expected a folio.KvSegment, got 1$"):
        folio.BatchView([0], [folio.KvSegment([]), 1])
    with pytest.raises(TypeError, match="^segments: expected a sequence, each a folio.KvSegment, got 3$"):
        folio.BatchView([0], 3)
    with pytest.raises(TypeError, match="^op: expected a folio.AttentionOp, got 'x'; or plan: expected a folio."):
        folio.workspace_size("x")
    with pytest.raises(TypeError, match=r"^workspace_size\(\) misses the argument 'op'"):
        folio.workspace_size()
    with pytest.raises(TypeError, match=r"^prepare\(\) is given 'context' twice"):
        folio.prepare(folio.Context.cpu(), context=folio.Context.cpu())


class Nasty:
    """Whose repr and type raise."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __index__(self):
        raise RuntimeError("no index")

    def __iter__(self):
        raise RuntimeError("no iterator")

    def __getattr__(self, name):
        raise RuntimeError("no attribute")


def test_values_that_raise_are_refused_all_the_same():
    for name in ("page_size", "q", "mask", "features"):
        with pytest.raises((TypeError, RuntimeError)):
            folio.AttentionConfig(**SIZES, **{name: Nasty()})
    with pytest.raises((TypeError, RuntimeError)):
        folio.KvSegment([Nasty()])


# Of the arguments that arrays are given by: what a call without it is, and the argument's name.
def problem_calls():
    problem = problems.make("float32", "mixed")
    out, lse = problem.outputs()
    k, v, q = problem.k, problem.v, problem.q
    cache, segment = folio.make_nhd_view(k, v), [problem.segment()]
    lengths = problem.batch.lengths
    new = q[:, :2].copy()
    return {
        "k": [lambda x: folio.make_nhd_view(x, v), lambda x: folio.make_hnd_view(x, v),
              lambda x: folio.make_cpu_packed_view(x, v), lambda x: folio.RaggedKvView(x, q, [0]),
              lambda x: folio.CacheWriteArgs(x, v, [1], cache)],
        "v": [lambda x: folio.make_nhd_view(k, x), lambda x: folio.RaggedKvView(q, x, [0]),
              lambda x: folio.CacheWriteArgs(new, x, [1], cache)],
        "indptr": [lambda x: folio.RaggedKvView(q, q, x), lambda x: folio.csr_table([1], x)],
        "indices": [lambda x: folio.csr_table(x, [0])],
        "entries": [folio.dense_table],
        "slot_mapping": [lambda x: folio.CacheWriteArgs(new, None, x, cache)],
        "k_scale": [lambda x: folio.CacheWriteArgs(new, None, [1], cache, k_scale=x),
                    lambda x: folio.SegmentArgs(cache, k_scale=x)],
        "v_scale": [lambda x: folio.SegmentArgs(cache, v_scale=x)],
        "kv_len": [folio.KvSegment], "first_pos": [lambda x: folio.KvSegment(lengths, first_pos=x)],
        "group_indptr": [lambda x: folio.KvSegment(lengths, group_indptr=x)],
        "tail_len": [lambda x: folio.CustomMask(tail_len=x)],
        "cu_q": [lambda x: folio.BatchView(x, [])],
        "q_first_pos": [lambda x: folio.BatchView([0, 1], [], q_first_pos=x)],
        "q": [lambda x: folio.AttentionArgs(x, out, segment)], "out": [
            lambda x: folio.AttentionArgs(q, x, segment), lambda x: folio.AttentionStateView(x, lse),
            lambda x: folio.AttentionStatesView(x, lse)],
        "lse": [lambda x: folio.AttentionArgs(q, out, segment, lse=x), lambda x: folio.AttentionStateView(out, x)],
        "alibi_slopes": [lambda x: folio.AttentionArgs(q, out, segment, alibi_slopes=x)],
        "sinks": [lambda x: folio.AttentionArgs(q, out, segment, sinks=x)],
        "q_scale": [lambda x: folio.AttentionArgs(q, out, segment, q_scale=x)],
        "out_scale": [lambda x: folio.AttentionArgs(q, out, segment, out_scale=x)],
        "custom_mask": [lambda x: folio.AttentionArgs(q, out, segment, custom_mask=x)],
        "mask": [folio.pack_custom_mask], "array": [folio.TensorView], "data": [folio.LseView,
                                                                              lambda x: folio.Scale(data=x)],
        "workspace": [folio.Workspace], "arrays": [lambda x: folio.current_stream([x])],
        "stream": [lambda x: folio.write_kv_cache(folio.Context.cpu(num_threads=1),
                                                  folio.CacheWriteArgs(new, None, [1] * 9, cache), stream=x)],
    }


@pytest.mark.parametrize("name", problem_calls())
@pytest.mark.parametrize("wrong", ["x", WRONG, np.zeros((1, 1, 1, 1, 1, 1), np.complex64)],
                         ids=["string", "object", "complex"])
def test_wrong_arrays_are_named(name, wrong):
    for call in problem_calls()[name]:
        with pytest.raises(folio.InvalidArgument) as caught:
            call(wrong)
        assert re.match(rf"([\w.]+\.)?{name}\b", str(caught.value)), str(caught.value)
