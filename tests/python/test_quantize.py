"""Quantisation of whole tensors beside ml_dtypes, and NVFP4 beside its definition."""

import folio
import ml_dtypes
import numpy as np
import pytest

import problems

CONTEXT = folio.Context.cpu(num_threads=2)
INPUTS = [np.float32, np.float16, ml_dtypes.bfloat16]


def values(*shape, element=np.float32, seed=1):
    return (4 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32).astype(element)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("element", INPUTS)
@pytest.mark.parametrize("out_element", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("scale", [1.0, 0.01, folio.Scale(data=np.array([0.5], np.float32))])
def test_fp8_is_the_rounded_quotient(element, out_element, scale):
    given = values(5, 3, 24, element=element)
    out = np.zeros((5, 6, 24), out_element)[:, ::2]
    folio.quantize_fp8(CONTEXT, given, out, scale)
    factor = np.float32(0.5 if isinstance(scale, folio.Scale) else scale)
    largest = float(ml_dtypes.finfo(out_element).max)
    expected = np.clip(given.astype(np.float32) / factor, -largest, largest).astype(out_element)
    assert np.array_equal(bits(out), bits(expected))


# The values of e2m1, and which two neighbours a value between them goes to: the nearer one, on a tie the even one.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest_e2m1(x):
    size = np.minimum(np.abs(x), 6.0)
    distance = np.abs(size[..., None] - E2M1)
    nearest = distance.min(axis=-1, keepdims=True)
    odd = np.arange(8) % 2  # of the code's last bit
    code = np.argmin(np.where(distance == nearest, odd, 2), axis=-1)
    return code + 8 * np.signbit(x)


def nvfp4(x, global_scale):
    """(codes [tokens, heads, dim], factors as float32 [tokens, heads * dim / 16])"""
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, 16)
    most = np.abs(blocks).max(axis=-1)
    factors = np.minimum(np.float32(global_scale) * most / np.float32(6), np.float32(448))
    factors = factors.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = blocks * np.float32(global_scale) / factors[..., None]
    scaled = np.where(factors[..., None] == 0, 0, scaled)
    return nearest_e2m1(scaled).reshape(x.shape), factors


@pytest.mark.parametrize("element", INPUTS)
@pytest.mark.parametrize("first_row", [0, 130])
def test_nvfp4_is_its_definition(element, first_row):
    tokens, heads, dim = 7, 3, 32
    given = values(tokens, heads, dim, element=element)
    given[2, 1] = 0
    per_row = heads * dim // folio.NVFP4_BLOCK_SIZE
    size = folio.nvfp4_scale_bytes(first_row + tokens, per_row)
    assert size == -(-(first_row + tokens) // 128) * -(-per_row // 4) * 512
    memory = np.full(size, 0xAB, np.uint8)
    packed = np.zeros((tokens, heads, dim // 2), np.uint8)
    global_scale = 448 * 6 / float(np.abs(given.astype(np.float32)).max())
    folio.quantize_nvfp4(CONTEXT, given, packed, folio.BlockScaleArgs(memory, first_row), global_scale)
    codes, factors = nvfp4(given, global_scale)
    places = np.array([[folio.nvfp4_scale_index(first_row + t, b, per_row) for b in range(per_row)]
                       for t in range(tokens)])
    assert len(set(places.flat)) == places.size and places.max() < size
    stored = memory[places].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(stored, factors)
    got = np.stack([packed & 15, packed >> 4], axis=-1).reshape(given.shape)
    assert np.array_equal(got, codes)
    untouched = np.ones(size, bool)
    untouched[places] = False
    assert np.all(memory[untouched] == 0xAB)
    back = np.zeros(given.shape, np.float32)
    named = folio.TensorView(packed, "float4_e2m1fn_x2")
    folio.dequantize_nvfp4(CONTEXT, named, folio.BlockScaleArgs(memory, first_row), global_scale, back)
    signed = np.where(got & 8, -1.0, 1.0) * E2M1[got & 7]
    exact = signed.reshape(tokens, per_row, 16).astype(np.float32) * stored[..., None] / np.float32(global_scale)
    assert np.array_equal(back.reshape(exact.shape), exact)


def test_scales_of_a_first_batch():
    q, k, v = values(4, 2, 8), values(4, 2, 8, element=np.float16, seed=2), np.zeros((0, 2, 8), np.float32)
    scales = np.zeros(3, np.float32)
    folio.calculate_kv_scales(CONTEXT, q, k, v, scales)
    expected = [np.abs(q).max() / np.float32(200), np.abs(k).max().astype(np.float32) / np.float32(200), 1]
    np.testing.assert_array_almost_equal_nulp(scales, np.array(expected, np.float32), 1)
    folio.calculate_kv_scales(CONTEXT, q, k, q[..., ::2], scales, folio.KvScaleConstants(q=1.0, v=2.0))
    expected = [np.abs(q).max(), expected[1], np.abs(q[..., ::2]).max() / np.float32(2)]
    np.testing.assert_array_almost_equal_nulp(scales, np.array(expected, np.float32), 1)
    assert folio.KvScaleConstants() == folio.KvScaleConstants(q=200.0, k=200.0, v=100.0)


def test_refusals_write_nothing():
    given, out = values(3, 2, 32), np.full((3, 2, 32), 7, ml_dtypes.float8_e4m3fn)
    packed, memory = np.full((3, 2, 16), 7, np.uint8), np.full(512, 7, np.uint8)
    scales = np.full(3, 7, np.float32)
    factors, zero = folio.BlockScaleArgs(memory), folio.KvScaleConstants(k=0.0)
    frozen = memory.copy()
    frozen.flags.writeable = False
    for refused, message in [
            (lambda: folio.quantize_fp8(CONTEXT, given, out[:2], 1.0), "shape|tokens|2"),
            (lambda: folio.quantize_fp8(CONTEXT, given, out, 0.0), "scale"),
            (lambda: folio.quantize_fp8(CONTEXT, given, out, "x"), "scale must be a number"),
            (lambda: folio.quantize_fp8(CONTEXT, given, given, 1.0), "float32"),
            (lambda: folio.quantize_fp8(CONTEXT, given.astype(np.int32), out, 1.0), "input is int32"),
            (lambda: folio.quantize_nvfp4(CONTEXT, given, packed[:, :, :8], factors, 1.0), "8|16"),
            (lambda: folio.quantize_nvfp4(CONTEXT, given, packed, factors, -1.0), "scale"),
            (lambda: folio.quantize_nvfp4(CONTEXT, given, packed, folio.BlockScaleArgs(memory, 127), 1.0),
             "block_scale.data has 512 bytes; 130 rows of 4 blocks take 1024"),
            (lambda: folio.quantize_nvfp4(CONTEXT, given, packed, folio.BlockScaleArgs(frozen), 1.0),
             "block_scale.data is read-only"),
            (lambda: folio.BlockScaleArgs(memory, -1), "first_row is -1"),
            (lambda: folio.BlockScaleArgs(memory.reshape(2, 256)), r"data has shape \[2, 256\]"),
            (lambda: folio.dequantize_nvfp4(CONTEXT, packed, factors, 1.0, given[:2]), "2|3"),
            (lambda: folio.calculate_kv_scales(CONTEXT, given, given, given, scales[:2]), "scales"),
            (lambda: folio.calculate_kv_scales(CONTEXT, given, given, given, scales, zero), "k"),
            (lambda: folio.nvfp4_scale_index(0, 4, 4), "block 4 of row 0"),
            (lambda: folio.nvfp4_scale_bytes(-1, 4), "not negative")]:
        with pytest.raises(folio.InvalidArgument, match=message):
            refused()
    assert np.all(packed == 7) and np.all(memory == 7) and np.all(scales == 7) and np.all(out.astype(np.float32) == 7)


def test_attention_writes_nvfp4_as_its_quantiser_does():
    problem = problems.make("bfloat16", "mixed", dim_v=32)
    problem.config.out = "float32"
    wide, _ = problems.run(problem, CONTEXT, out=np.zeros((9, 4, 32), np.float32))
    scale, size = 448 * 6 / float(np.abs(wide).max()), folio.nvfp4_scale_bytes(2 + 9, 8)
    packed, memory = [np.zeros((9, 4, 16), np.uint8) for _ in range(2)], [np.zeros(size, np.uint8) for _ in range(2)]
    folio.quantize_nvfp4(CONTEXT, wide, packed[0], folio.BlockScaleArgs(memory[0], 2), scale)
    problem.config.out = "float4_e2m1fn_x2"
    op = folio.prepare(CONTEXT, problem.config)
    plan = folio.plan(op, problem.batch_view(), folio.make_plan_buffer(op))
    workspace = folio.Workspace(folio.workspace_size(plan))
    folio.init_workspace(op, workspace)
    args = problem.args(packed[1], out_scale=scale, out_block_scale=folio.BlockScaleArgs(memory[1], 2))
    folio.run(plan, args, workspace)
    assert packed[0].any() and np.array_equal(*packed) and np.array_equal(*memory)

    packed[1][:], memory[1][:] = 0, 0
    layer = folio.Layer(op, folio.make_nhd_view(problem.k, problem.v), sm_scale=problem.rules.sm_scale, out_scale=scale)
    step = folio.Step(plan, folio.csr_table(problem.batch.page_ids, problem.batch.page_indptr))
    layer(step, problem.q, packed[1], out_block_scale=folio.BlockScaleArgs(memory[1], 2))
    assert np.array_equal(*packed) and np.array_equal(*memory)
    packed[1][:], memory[1][:] = 7, 7
    frozen = memory[1].view()
    frozen.flags.writeable = False
    for wrong, message in ((None, "out is uint8|out"), (folio.BlockScaleArgs(frozen, 2), "out_block_scale.data is read-only"),
                           (folio.BlockScaleArgs(memory[1][:512], 128), "out_block_scale.data has 512 bytes; 137 rows")):
        with pytest.raises(folio.InvalidArgument, match=message):
            layer(step, problem.q, packed[1], out_block_scale=wrong)
    assert np.all(packed[1] == 7) and np.all(memory[1] == 7)
    with pytest.raises(folio.InvalidArgument, match="out_block_scale.data has 512 bytes; 137 rows of 8 blocks"):
        problem.args(packed[1], out_scale=scale, out_block_scale=folio.BlockScaleArgs(memory[1][:512], 128))
