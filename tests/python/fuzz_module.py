"""Calls every function of the module with random arguments, right and wrong ones, on the CPU.

Nothing may end the process, and nothing but Error, TypeError, ValueError and, without memory, MemoryError may be raised.
What attention, writes and merges accept is compared with the oracle, or with numpy. A case depends on the seed, its
number, and, for calls of anything, on the cases before it:

    fuzz_module.py --seed 7 --first 1234 --cases 1 --verbose
"""

import argparse
import enum
import faulthandler
import random as randoms
import re
import resource
import sys
import time
import warnings

import folio
import ml_dtypes
import numpy as np

import fuzz_serving
import fuzz_values
from fuzz_serving import Mismatch

REFUSALS = (folio.Error, TypeError, ValueError, MemoryError)  # the last is numpy's, of the driver's own arrays
CONTEXTS = [folio.Context.cpu(num_threads=n) for n in (1, 3)]
EPS32 = float(np.finfo(np.float32).eps)
ELEMENTS = {
    folio.float32: np.float32, folio.float16: np.float16, folio.bfloat16: ml_dtypes.bfloat16,
    folio.float8_e4m3fn: ml_dtypes.float8_e4m3fn, folio.float8_e5m2: ml_dtypes.float8_e5m2,
}


FP8 = [folio.float8_e4m3fn, folio.float8_e5m2]


class Maker:
    """Makes the arguments of one case. Each goes through `give`, which spoils it now and then."""

    def __init__(self, random):
        self.random = random
        self.numpy = np.random.default_rng(random.getrandbits(64))
        self.odds = random.choice([0, 0, 0.02, 0.05, 0.3])
        self.longest = {"k": 0.0, "v": 0.0}  # of a key's vector, of a value: as they are attended over

    def give(self, value):
        return fuzz_values.spoil(value, self.random) if self.random.random() < self.odds else value

    def kept(self, arguments):
        return {name: self.give(value) for name, value in arguments.items()}

    def values(self, *shape, element=np.float32):
        return self.numpy.standard_normal(shape).astype(np.float32).astype(element)

    def measure(self, k, v, k_scale, v_scale):
        scales = [abs(scale) if isinstance(scale, float) else 6.0 for scale in (k_scale, v_scale)]  # arrays: below 6
        longest_k = np.linalg.norm(k.astype(np.float64), axis=-1).max(initial=0) * scales[0]
        longest_v = np.abs(v.astype(np.float64)).max(initial=0) * scales[1]
        self.longest = {"k": max(self.longest["k"], longest_k), "v": max(self.longest["v"], longest_v)}

    def indptr(self, lengths):
        return np.cumsum([0, *lengths]).astype(np.int32)

    def ints(self, values):
        """Lengths, offsets, ids: in one of the forms that are taken."""
        return self.give(self.some(values, values, values, values.astype(np.int64), values.tolist()))

    def some(self, *choices):
        return self.random.choice(choices)


def make_config(maker):
    some = maker.some
    kv_heads, q = some(1, 2, 3), some(*list(ELEMENTS)[:3])
    features = None
    for feature in (folio.Feature.SOFT_CAP, folio.Feature.ALIBI, folio.Feature.SINKS):
        if some(True, False, False):
            features = feature if features is None else features | feature
    mask = some(folio.MaskKind.NONE, folio.MaskKind.CAUSAL, folio.MaskKind.CAUSAL, folio.MaskKind.CUSTOM)
    rules = [folio.Feature.KV_START]
    if mask == folio.MaskKind.CAUSAL:
        rules += [folio.Feature.SPANS, folio.Feature.REQUEST_CAUSAL]
    for feature in rules:
        if some(True, False, False):
            features = feature if features is None else features | feature
    packed = some(True, False, False, False) and q != folio.float32
    ds_mla = {} if packed or some(True, True, True, False) else {
        "num_q_heads": some(1, 2, 5), "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_v": 512,
        "kv": folio.float8_e4m3fn, "kv_format": folio.KvFormat.FP8_DS_MLA}
    return {
        "num_q_heads": kv_heads * some(1, 2, 5), "num_kv_heads": kv_heads, "head_dim_qk": some(8, 32, 64, 72),
        "head_dim_v": some(8, 24, 64), "q": q, "kv": some(q, q, folio.float8_e4m3fn, folio.float8_e5m2, folio.int8),
        "out": some(None, None, q, *ELEMENTS),
        "page_size": 16 if packed else some(1, 3, 16, 64),
        "kv_format": folio.KvFormat.CPU_PACKED if packed else folio.KvFormat.STRIDED,
        "mask": mask, "attention_chunk": some(0, 0, 7, 64),
        "window_left": some(-1, -1, 0, 5, 40), "window_right": some(-1, -1, 0, 3), "features": features,
        "determinism": some(*folio.Determinism.__members__.values()),
    } | ds_mla


def make_rules(maker, op, q_len):
    """Arrays of the rules that the op was prepared for, or None."""
    features, tokens, rules = op.config.features, sum(q_len), {}
    declared = {name: features is not None and features & getattr(folio.Feature, feature) for name, feature in
                {"kv_start": "KV_START", "causal": "REQUEST_CAUSAL", "spans": "SPANS"}.items()}
    if declared["kv_start"]:
        rules["kv_start"] = maker.ints(maker.numpy.integers(-5, 40, len(q_len)).astype(np.int32))
    if declared["causal"]:
        flags = maker.numpy.random(len(q_len)) < 0.5
        rules["causal"] = maker.give(maker.some(flags, flags.tolist(), flags.astype(np.uint8)))
    if declared["spans"]:
        rules["spans"] = maker.ints(maker.numpy.integers(-5, 60, (tokens, 2)).astype(np.int32))
    return rules


def make_int8_cache(maker, config, pages):
    """Tokens, and a view of the arrays that they were written into."""
    heads, size, dims = config["num_kv_heads"], config["page_size"], (config["head_dim_qk"], config["head_dim_v"])
    packed = config["kv_format"] == folio.KvFormat.CPU_PACKED
    head_major = packed or maker.some(True, False)
    page = (heads, size) if head_major else (size, heads)
    stored = [np.zeros((pages, *page, dim), np.int8) for dim in dims]
    if packed:
        stored[1] = np.zeros((pages, heads, size // 2, dims[1], 2), np.int8)
    scales = [np.zeros((pages, *page), np.float32) for _ in range(2)]
    make = folio.make_cpu_packed_view if packed else folio.make_hnd_view if head_major else folio.make_nhd_view
    k, v = (maker.values(pages * size, heads, dim) for dim in dims)
    cache = make(*stored, k_token_scales=scales[0], v_token_scales=scales[1])
    args = folio.CacheWriteArgs(k, v, np.arange(pages * size), cache)
    folio.write_kv_cache(folio.Context.cpu(num_threads=1), args)
    return k, v, lambda k, v: make(*map(maker.give, stored), k_token_scales=maker.give(scales[0]),
                                   v_token_scales=maker.give(scales[1]))


def make_cache(maker, config, pages):
    heads, size, dims = config["num_kv_heads"], config["page_size"], (config["head_dim_qk"], config["head_dim_v"])
    if config["kv_format"] == folio.KvFormat.FP8_DS_MLA:
        rows, k = np.zeros((pages, size, 656), np.uint8), maker.values(pages * size, 1, dims[0])
        slots, context = np.arange(pages * size), folio.Context.cpu(num_threads=1)
        folio.write_kv_cache(context, folio.CacheWriteArgs(k, None, slots, folio.make_fp8_ds_mla_view(rows)))
        return k, k[..., :dims[1]], lambda k, v: folio.make_fp8_ds_mla_view(maker.give(rows))
    if config["kv"] == folio.int8:
        return make_int8_cache(maker, config, pages)
    element = ELEMENTS[config["kv"]]
    if config["kv_format"] == folio.KvFormat.CPU_PACKED:
        k = maker.values(pages, heads, size, dims[0], element=element)
        return k, maker.values(pages, heads, size // 2, dims[1], 2, element=element), folio.make_cpu_packed_view
    if maker.some(True, False):
        k, v = (maker.values(pages, size, heads, dim, element=element) for dim in dims)
        return k, v, folio.make_nhd_view
    k, v = (maker.values(pages, heads, size, dim, element=element) for dim in dims)
    return k, v, folio.make_hnd_view


def make_table(maker, config, lengths, pages):
    counts = [-(-length // config["page_size"]) for length in lengths]
    rows = [maker.numpy.integers(0, pages, count).astype(np.int32) for count in counts]
    if maker.some(True, False):
        ids = np.concatenate([*rows, np.zeros(0, np.int32)]).astype(np.int32)
        return folio.csr_table(maker.ints(ids), maker.ints(maker.indptr(counts)))
    first, spare = maker.some(0, 0, 2), maker.some(0, 0, 3)
    entries = np.full((len(rows), first + max([*counts, 0]) + spare), -1, np.int32)
    for entry, row in zip(entries, rows):
        entry[first:first + len(row)] = row
    return folio.dense_table(maker.ints(entries), maker.give(first))


def make_scale(maker, heads, requests):
    kinds = folio.ScaleGranularity
    shape, kind = maker.some(((1,), kinds.PER_TENSOR), ((heads,), kinds.PER_HEAD), ((requests,), kinds.PER_REQUEST),
                             ((requests, heads), kinds.PER_REQUEST_AND_HEAD))
    if maker.some(True, True, False):
        return maker.give(maker.some(1.0, 0.5, 2.0))
    return folio.Scale(data=maker.give(np.abs(maker.values(*shape)) + np.float32(0.5)), granularity=maker.give(kind))


def make_segments(maker, config, q_len, sharded):
    """(KvSegment, SegmentArgs, keys of every request, memory for a layer and a step) of each part: a prefix that
    neighbours share, pages, and ragged keys of their own."""
    requests, heads, parts = len(q_len), config["num_kv_heads"], []
    before = np.zeros(requests, np.int32)  # keys of the parts so far
    shard = folio.KvShard(world=2, rank=1, interleave=3) if sharded else folio.KvShard()
    kinds = maker.some(["paged"], ["paged"], ["ragged"], ["paged", "ragged"], ["shared", "paged"], ["shared", "ragged"])
    for kind in kinds:
        groups, given = [1] * requests, {"first_pos": maker.ints(before) if before.any() else None, "shard": shard}
        if kind == "shared" and requests > 1:
            cut = maker.random.randrange(1, requests)
            groups = [cut, requests - cut]
            given["group_indptr"] = maker.ints(maker.indptr(groups))
        lengths = [maker.some(0, 1, 15, 16, 17, 40, 130) for _ in groups]
        own = np.repeat(lengths, groups).astype(np.int32)
        before = before + own
        scales = {"k_scale": make_scale(maker, heads, requests), "v_scale": make_scale(maker, heads, requests)}
        source = folio.KvSource.RAGGED if kind == "ragged" else folio.KvSource.PAGED
        if kind == "ragged":
            element = ELEMENTS[config["q"] if config["kv"] in (*FP8, folio.int8) else config["kv"]]
            k, v = (maker.values(sum(lengths), heads, config[dim], element=element)
                    for dim in ("head_dim_qk", "head_dim_v"))
            memory = {"ragged": (maker.give(k), maker.give(v)), "table": maker.ints(maker.indptr(lengths))}
            where = {"ragged": folio.RaggedKvView(*memory["ragged"], memory["table"])}
        else:
            pages = maker.some(1, 5, 40)
            k, v, view = make_cache(maker, config, pages)
            memory = where = {"cache": view(maker.give(k), maker.give(v)),
                              "table": make_table(maker, config, lengths, pages)}
        maker.measure(k, v, *scales.values())
        segment = folio.KvSegment(maker.ints(np.array(lengths, np.int32)), source=maker.give(source), **given)
        parts.append((segment, folio.SegmentArgs(**where, **scales), own, {**memory, **scales}))
    return parts


def make_custom_mask(maker, config, q_len, parts):
    """(its shape, its bits, or bools that are packed)"""
    if config["mask"] != folio.MaskKind.CUSTOM:
        return None, None
    columns = sum(own for _, _, own, _ in parts)
    shape = folio.CustomMask()
    if maker.some(True, False):
        columns = np.array([maker.random.randint(0, int(keys)) for keys in columns], np.int32)
        shape = folio.CustomMask(scope=folio.CustomMaskScope.TAIL, tail_len=maker.ints(columns))
    size = sum(-(-length * int(count) // 8) for length, count in zip(q_len, columns))
    bits = maker.numpy.integers(0, 256, size).astype(np.uint8)
    bools = [maker.numpy.random((length, int(count))) < 0.5 for length, count in zip(q_len, columns)]
    return shape, maker.some(bits, bools, folio.pack_custom_mask(bools))


def make_args(maker, config, op, q_len, parts, mask_bits):
    tokens, heads = sum(q_len), config["num_q_heads"]
    q = maker.values(tokens, heads, config["head_dim_qk"], element=ELEMENTS[config["q"]])
    out = np.zeros((tokens, heads, config["head_dim_v"]), ELEMENTS[op.config.out])
    lse = np.zeros((tokens, heads), np.float32)
    features = config["features"] or folio.Feature(0)
    given = {
        "lse": maker.some(lse, lse, None), "sm_scale": maker.some(0.0, 0.3),
        "logits_soft_cap": 4.0 if folio.Feature.SOFT_CAP in features else 0.0,
        "alibi_slopes": np.abs(maker.values(heads)) / 8 if folio.Feature.ALIBI in features else None,
        "sinks": maker.values(heads) if folio.Feature.SINKS in features else None, "q_scale": 1.0,
        "out_scale": maker.some(1.0, 0.5) if op.config.out in FP8 else 1.0, "custom_mask": mask_bits,
    }
    given = maker.kept(given)
    q, out = maker.give(q), maker.give(out)
    return folio.AttentionArgs(q, out, maker.give([part[1] for part in parts]), **given), q, out, given


def attention(random):
    """A whole step: prepared, planned, run, and compared with the oracle."""
    maker = Maker(random)
    wanted = make_config(maker)
    config = folio.AttentionConfig(**maker.kept(wanted))
    context = random.choice(CONTEXTS)
    workers = maker.give(maker.some(0, 1, 4))
    options = folio.PrepareOptions(num_workers=min(workers, 64) if isinstance(workers, int) else workers)
    op = folio.prepare(context, config, options)
    q_len = [maker.some(0, 1, 1, 2, 17) for _ in range(maker.some(0, 1, 2, 4))]
    sharded = wanted["mask"] != folio.MaskKind.CUSTOM and maker.some(True, False, False)
    parts = make_segments(maker, wanted, q_len, sharded)
    mask, mask_bits = make_custom_mask(maker, wanted, q_len, parts)
    positions = None  # of a shard they must be said
    if sharded or maker.some(True, False, False, False):
        positions = maker.numpy.integers(0, 300, len(q_len)).astype(np.int32)
    batch = folio.BatchView(maker.ints(maker.indptr(q_len)), [part[0] for part in parts], num_tokens=maker.give(None),
                            q_first_pos=maker.give(positions), custom_mask=mask, **make_rules(maker, op, q_len))
    buffer = folio.make_plan_buffer(op)
    plan = folio.plan(op, batch, buffer, stream=maker.give(None))
    folio.summary(plan)
    folio.check_plans(buffer)
    args, q, out, given = make_args(maker, wanted, op, q_len, parts, mask_bits)
    workspace = folio.Workspace(maker.give(max(folio.workspace_size(plan), folio.workspace_size(op))))
    folio.init_workspace(op, workspace)
    keep(random, config, context, options, op, *parts[0][:2], batch, buffer, plan, args, workspace)
    folio.run(plan, args, workspace)
    folio.validate(plan, args)
    by_layer(op, plan, [part[3] for part in parts], q, out, given)
    compare(maker, config, op, batch, args, q, out, given)


def refuse_as_run_does(error, what):
    """Raises what `what` refused although run took it: a Mismatch, unless memory was short."""
    if isinstance(error, MemoryError) or getattr(error, "code", None) == folio.ErrorCode.OUT_OF_MEMORY:
        raise error
    raise Mismatch(f"run takes what {what} refuses: {error}") from error


def by_layer(op, plan, parts, q, out, given):
    """A layer in a step takes what run takes, and gives the same bits."""
    paged, ragged = ([part for part in parts if kind in part] for kind in ("cache", "ragged"))
    if len(paged) > 1 or len(ragged) > 1 or not isinstance(out, np.ndarray):
        return  # a layer has one scale for all of its paged segments
    bound = {name: value for name, value in given.items() if name not in ("lse", "custom_mask")}
    for kind, prefix in ((paged, ""), (ragged, "ragged_")):
        bound.update({prefix + name: part[name] for part in kind for name in ("k_scale", "v_scale")})
    again = np.zeros_like(out)
    try:
        layer = folio.Layer(op, paged[0]["cache"] if paged else None, **bound)
        step = folio.Step(plan, [part["table"] for part in parts], custom_mask=given["custom_mask"])
        layer(step, q, again, ragged=[part["ragged"] for part in ragged] or None)
    except REFUSALS as error:
        refuse_as_run_does(error, "a layer")
    if again.tobytes() != out.tobytes():
        raise Mismatch(f"{op.kernel_name}: a layer's result has other bits than run's")
    keep(randoms.Random(0), layer, step)


def compare(maker, config, op, batch, args, q, out, given):
    try:
        exact, exact_lse = folio.reference_attention(config, batch, args)
    except REFUSALS as error:
        refuse_as_run_does(error, "the oracle")
    if maker.odds or not isinstance(out, np.ndarray):
        return  # of spoiled arguments a bound is not known
    scale = given["out_scale"]
    # As problems.assert_close, with the largest value for the mean of the values. A position is below 1024, a slope 1.
    # Probabilities and queries may be rounded to the 16-bit type.
    exactly = op.config.q == op.config.kv == folio.float32
    coarse, keys = EPS32 if exactly else 2.0**-8, 512
    length = np.linalg.norm(q.astype(np.float64), axis=2).max(initial=0)
    sm_scale = given["sm_scale"] or config.head_dim_qk**-0.5
    logit = EPS32 * ((config.head_dim_qk + 4) * length * maker.longest["k"] * sm_scale + 4 * 1024)
    eps = float(ml_dtypes.finfo(out.dtype).eps)
    allowed = maker.longest["v"] * (2 * logit + 2 * keys * EPS32 + coarse) / scale + np.abs(exact) / scale * eps
    allowed = allowed + float(ml_dtypes.finfo(out.dtype).smallest_subnormal)
    limit = float(ml_dtypes.finfo(out.dtype).max)
    error = np.abs(out.astype(np.float64) - np.clip(exact / scale, -limit, limit))
    if not np.all(error <= allowed):
        raise Mismatch(f"{op.kernel_name}: an output is off by {error.max()}; {allowed.max()} is allowed")
    lse = given["lse"]
    if lse is None:
        return
    if not np.array_equal(np.isneginf(lse), np.isneginf(exact_lse)):
        raise Mismatch(f"{op.kernel_name}: other rows are empty")
    finite = np.isfinite(exact_lse)
    error = np.abs(lse[finite] - exact_lse[finite])
    if not np.all(error <= logit + keys * EPS32 + 2 * EPS32 * np.abs(exact_lse[finite])):
        raise Mismatch(f"{op.kernel_name}: an LSE is off by {error.max()}")


def write(random):
    """New tokens into a cache: those that were taken are there, and nothing else changed."""
    maker = Maker(random)
    pages, size, heads, dim, tokens = 4, maker.some(1, 4, 16), maker.some(1, 3), maker.some(8, 40), maker.some(0, 1, 9)
    element = maker.some(*list(ELEMENTS.values())[:3])
    k, v = (maker.values(tokens, heads, dim, element=element) for _ in range(2))
    caches = [np.zeros((pages, size, heads, dim), element) for _ in range(2)]
    slots = maker.numpy.permutation(pages * size)[:tokens].astype(np.int64)
    k, v = k[:len(slots)], v[:len(slots)]
    taken = maker.kept({"k": k, "v": v, "slot_mapping": maker.ints(slots) if maker.some(True, False) else slots})
    args = folio.CacheWriteArgs(**taken, cache=folio.make_nhd_view(*map(maker.give, caches)),
                                **maker.kept({"num_slots": None, "k_scale": 1.0, "v_scale": 1.0}))
    folio.write_kv_cache(random.choice(CONTEXTS), args)
    if maker.odds:
        return
    for cache, new in zip(caches, (k, v)):
        expected = np.zeros((pages * size, heads, dim), element)
        expected[slots] = new
        if not np.array_equal(cache.reshape(expected.shape), expected):
            raise Mismatch("a cache holds something else")


def merge(random):
    """States of a row, merged; against numpy."""
    maker = Maker(random)
    tokens, states, heads, dim = maker.some(0, 1, 5), maker.some(1, 2, 3), maker.some(1, 4), maker.some(8, 24)
    out = maker.values(tokens, states, heads, dim)
    lse = maker.values(tokens, states, heads)
    merged, merged_lse = np.zeros((tokens, heads, dim), np.float32), np.zeros((tokens, heads), np.float32)
    target = maker.kept({"out": merged, "lse": merged_lse, "out_scale": 1.0, "stream": None})
    context = random.choice(CONTEXTS)
    if states == 2:
        parts = [folio.AttentionStateView(maker.give(out[:, i]), maker.give(lse[:, i])) for i in range(2)]
        folio.merge_state(context, *parts, **target)
    else:
        folio.merge_states(context, folio.AttentionStatesView(maker.give(out), maker.give(lse)), **target)
    if maker.odds:
        return
    weights = np.exp(lse.astype(np.float64))
    exact = (weights[..., None] * out).sum(1) / weights.sum(1)[..., None]
    if not np.all(np.abs(merged - exact) <= 64 * EPS32 * 6 * (1 + np.abs(lse).max(initial=0))):
        raise Mismatch("a merged state is off")


OBJECTS = []  # what was made, for later calls


def keep(random, *objects):
    OBJECTS.extend(objects)
    while len(OBJECTS) > 200:
        del OBJECTS[random.randrange(len(OBJECTS))]


def parameters_of(function):
    """{name: names of the classes that it takes}, for each overload of a nanobind signature."""
    if not hasattr(function, "__nb_signature__"):
        return [{}]
    overloads = [re.findall(r"(\w+): ([\w.\[\]| ]+)", entry[0]) for entry in function.__nb_signature__]
    return [{name: re.findall(r"_folio\.(\w+)", kind) for name, kind in entries if name != "self"}
            for entries in overloads]


PUBLIC = {name: getattr(folio, name) for name in dir(folio) if not name.startswith("_")}
ENUMS = [value for value in PUBLIC.values() if isinstance(value, type) and issubclass(value, enum.Enum)]
CLASSES = [value for value in PUBLIC.values()
           if isinstance(value, type) and value not in ENUMS and not issubclass(value, Exception)]
METHODS = [(kind, name) for kind in CLASSES for name, value in vars(kind).items()
           if hasattr(value, "__nb_signature__") and (not name.startswith("__") or name == "__enter__")]
CALLS = [*(value for value in PUBLIC.values() if hasattr(value, "__nb_signature__")), *CLASSES, folio.Context.cpu,
         folio.Context.cuda]
ENUMERATORS = [member for kind in ENUMS for member in kind]


# What costs memory, threads or time in proportion: more of it is no error.
LIMITS = {"num_threads": 3, "world": 3, "n": 50, "concurrency": 4, "count": 10_000, "num_slots": 10_000,
          "num_window_slots": 10_000, "num_layers": 3, "num_kv_heads": 64, "head_dim_qk": 640, "head_dim_v": 640,
          "max_reqs": 100, "max_context_len": 10_000, "columns": 10_000, "bytes": 10**7}


def any_value(random, classes):
    """Of the classes that a parameter takes, where there is one; or else anything."""
    fitting = [value for value in [*OBJECTS, *ENUMERATORS] if type(value).__name__ in classes]
    if fitting and random.random() < 0.9:
        return random.choice(fitting)
    if random.random() < 0.5:
        return fuzz_values.array(random)
    return random.choice([fuzz_values.scalar(random), random.choice(ENUMERATORS), OBJECTS[-3:],
                          OBJECTS[-1] if OBJECTS else None])


def anything(random):
    """Any function or class, with arguments of any kind; results serve as arguments again."""
    function = random.choice(CALLS)
    if random.random() < 0.4:
        kind, name = random.choice(METHODS)
        selves = [value for value in OBJECTS if type(value) is kind]
        function = getattr(random.choice(selves), name) if selves else kind
    parameters = random.choice(parameters_of(function.__init__ if function in CLASSES else function))
    given = {name: any_value(random, classes) for name, classes in parameters.items() if random.random() < 0.8}
    for name, most in LIMITS.items():
        if isinstance(given.get(name), (int, float)):
            given[name] = min(given[name], most)
    if "timeout" in parameters:
        given["timeout"] = 0.01  # other ranks may never come
    positional = not given.keys() & {"timeout", *LIMITS} and random.random() < 0.1
    result = function(*given.values()) if positional else function(**given)
    for attribute in dir(result):
        if not attribute.startswith("__"):
            getattr(result, attribute)
    repr(result)
    if type(result) in CLASSES:
        keep(random, result)


def serving(kind):
    """A case of fuzz_serving.py."""
    def case(random):
        kind(Maker(random), random.choice(CONTEXTS))
    case.__name__ = kind.__name__
    return case


MOST_MEMORY = 8 << 30

KINDS = [attention, attention, attention, attention, write, merge, anything, anything,
         *map(serving, fuzz_serving.KINDS)]


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=20, help="how long; without --cases")
    options.add_argument("--cases", type=int, help="how many, however long it takes")
    options.add_argument("--first", type=int, default=0, help="the number of the first case")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--verbose", action="store_true", help="say each case and its refusal")
    given = options.parse_args()
    faulthandler.enable()
    # A case may ask for a table of any size. What the machine has, or says that it has, must not decide.
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    warnings.simplefilter("ignore")  # numpy's, about casts of what is to be refused
    sys.unraisablehook = lambda _: None  # of executors that are no executors
    taken, refused, number = {}, {}, given.first
    deadline = time.monotonic() + given.seconds
    while number < given.first + given.cases if given.cases is not None else time.monotonic() < deadline:
        random = randoms.Random(f"{given.seed}/{number}")
        kind = random.choice(KINDS)
        if given.verbose:
            print(f"case {number}: {kind.__name__}", file=sys.stderr, flush=True)
        try:
            kind(random)
            taken[kind.__name__] = taken.get(kind.__name__, 0) + 1
        except REFUSALS as error:
            refused[kind.__name__] = refused.get(kind.__name__, 0) + 1
            if given.verbose:
                print(f"  {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        except BaseException:
            print(f"failed: --seed {given.seed} --first {number} --cases 1", file=sys.stderr, flush=True)
            raise
        number += 1
    print(f"{number - given.first} cases; taken: {taken}; refused: {refused}")
    if given.cases is None and not all(taken.get(kind.__name__) and refused.get(kind.__name__) for kind in KINDS):
        sys.exit("some kind of case was always or never refused: the driver tests nothing")


if __name__ == "__main__":
    main()
