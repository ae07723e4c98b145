"""Names of enumerators and element types: what is taken where one is wanted, and what is refused."""

import copy
import pickle

import folio
import ml_dtypes
import numpy as np
import pytest

SIZES = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim_qk": 32, "head_dim_v": 32}
DTYPES = {
    folio.float32: ["float32", np.float32, np.dtype("float32"), np.dtype("=f4")],
    folio.float16: ["float16", np.float16, np.dtype(np.float16)],
    folio.bfloat16: ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
    folio.float8_e4m3fn: ["float8_e4m3fn", "fp8_e4m3", ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)],
    folio.float8_e5m2: ["float8_e5m2", "fp8_e5m2", ml_dtypes.float8_e5m2, np.dtype(ml_dtypes.float8_e5m2)],
    folio.float4_e2m1fn_x2: ["float4_e2m1fn_x2", "fp4_e2m1x2"],
    folio.int8: ["int8", np.int8, np.dtype(np.int8)],
}
ENUMS = [folio.DeviceType, folio.Where, folio.ThreadPinning, folio.KvFormat, folio.KvSource, folio.MaskKind,
         folio.SegmentMask, folio.CustomMaskScope, folio.Determinism, folio.LseBase, folio.ScaleGranularity,
         folio.ErrorCode, folio.DType]


def config(**given):
    return folio.AttentionConfig(**SIZES, **given)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_dtypes_of_other_libraries(dtype):
    assert getattr(folio, dtype.name) is dtype is folio.DType[dtype.name]
    for given in [dtype, *DTYPES[dtype]]:
        assert config(q=given).q is dtype
        changed = config()
        changed.kv = given
        assert changed.kv is dtype


def test_dtypes_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for dtype in DTYPES:
        if hasattr(torch, dtype.name):
            assert config(q=getattr(torch, dtype.name)).q is dtype
    with pytest.raises(TypeError):
        config(q=torch.float64)


def test_a_dtype_left_out_is_none():
    assert config().out is None and config(out=None).out is None
    changed = config(out="float32", ragged_kv="float16")
    changed.out = changed.ragged_kv = None
    assert changed.out is None and changed.ragged_kv is None


@pytest.mark.parametrize("given", ["float64", "FLOAT32", "", "unset", np.float64, np.dtype(">f4"), ml_dtypes.int4,
                                   float, 1, None, np.zeros(3, np.float32), object(), "\udc80"])
def test_what_is_no_dtype(given):
    with pytest.raises((TypeError, folio.InvalidArgument)):
        config(q=given)


@pytest.mark.parametrize("mask", folio.MaskKind)
def test_an_enumerators_name_is_taken_for_it(mask):
    assert config(mask=mask).mask is mask and config(mask=mask.name.lower()).mask is mask
    changed = config()
    changed.mask = mask.name.lower()
    assert changed.mask is mask


def test_every_argument_of_an_enum_takes_a_name():
    lengths = np.array([3], np.int32)
    both = config(kv_format="cpu_packed", determinism="batch_invariant")
    assert (both.kv_format, both.determinism) == (folio.KvFormat.CPU_PACKED, folio.Determinism.BATCH_INVARIANT)
    folio.KvSegment(lengths, source="ragged", mask="all_visible")
    folio.CustomMask(scope="tail", tail_len=lengths)
    assert folio.LseView(np.zeros((1, 2), np.float32), "two").base is folio.LseBase.TWO
    scale = folio.Scale(data=np.ones(2, np.float32), granularity="per_head")
    assert scale.granularity is folio.ScaleGranularity.PER_HEAD
    folio.AttentionStateView(np.zeros((1, 2, 8), np.float32), np.zeros((1, 2), np.float32), base="e")


@pytest.mark.parametrize("given", ["casual", "CAUSAL", "kCausal", "", 1, True, None, folio.LseBase.E, b"causal"])
def test_what_is_no_enumerator(given):
    with pytest.raises((TypeError, folio.InvalidArgument)):
        config(mask=given)


def test_features():
    both = folio.Feature.SOFT_CAP | folio.Feature.SINKS
    for given in (both, ["soft_cap", "sinks"], ("sinks", folio.Feature.SOFT_CAP), {folio.Feature.SINKS, "soft_cap"},
                  iter(["soft_cap", both])):
        assert config(features=given).features == both
    assert config(features="alibi").features == folio.Feature.ALIBI
    for nothing in (None, [], folio.Feature(0)):
        assert config(features=nothing).features == folio.Feature(0)
    changed = config()
    changed.features = ["rope_llama"]
    assert changed.features == folio.Feature.ROPE_LLAMA
    for wrong in ("sink", ["sinks", 1], 3, ["soft_cap,sinks"], object(), {"sinks": 1, 2: 3}):
        with pytest.raises((TypeError, folio.InvalidArgument)):
            config(features=wrong)


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_enumerators_are_copied_and_pickled(enum):
    for member in enum:
        assert copy.copy(member) is copy.deepcopy(member) is pickle.loads(pickle.dumps(member)) is member
        assert enum(member.value) is member and enum[member.name] is member


def test_sets_of_features_are_pickled():
    both = folio.Feature.SOFT_CAP | folio.Feature.ROPE_LLAMA
    assert pickle.loads(pickle.dumps(both)) == both == copy.deepcopy(both)
