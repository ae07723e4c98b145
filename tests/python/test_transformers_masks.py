"""What transformers' masks become: lengths, windows or bits that say the same of every query and key."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: scripts/install_deps.sh python-engines")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import folio.integrations.transformers as integration  # noqa: E402: after the skips
import tiny_models  # noqa: E402
from folio.integrations.transformers.paged import paged_attention  # noqa: E402
from folio.integrations.transformers.masks import ranges_mask  # noqa: E402
from folio.integrations.transformers.visibility import VisibleRanges, find_visibility  # noqa: E402
from transformers import masking_utils  # noqa: E402

integration.register()
transformers.logging.set_verbosity_error()


def visible_pairs(found):
    """bool [batch, queries, keys] that a Visibility says."""
    return found.with_bits().bits


def read(mask, batch, q_length, kv_length, causal=True, window=None):
    return find_visibility(mask, batch, q_length, kv_length, causal=causal, window=window)


def box(batch, q_length, kv_length, causal, window, padding):
    """The pairs themselves, one by one."""
    pairs = np.zeros((batch, q_length, kv_length), bool)
    for b, i, j in np.ndindex(*pairs.shape):
        at = kv_length - q_length + i
        pairs[b, i, j] = (not causal or j <= at) and (window is None or j > at - window)
    return pairs & padding[:, None, :]


@pytest.mark.parametrize("seed", range(40))
def test_masks_of_four_dimensions_are_exact(seed):
    random = np.random.default_rng(seed)
    batch, q_length = int(random.integers(1, 4)), int(random.integers(1, 12))
    kv_length = q_length + int(random.integers(0, 12))
    window = None if random.random() < 0.4 else int(random.integers(1, 14))
    padding = np.zeros((batch, kv_length), bool)
    for row in padding:
        begin, end = sorted(random.integers(0, kv_length + 1, 2))
        row[begin:end] = True
    pairs = box(batch, q_length, kv_length, random.random() < 0.7, window, padding)
    if random.random() < 0.3:
        pairs ^= random.random(pairs.shape) < 0.2
    given = torch.from_numpy(pairs)[:, None]
    additive = torch.zeros(given.shape).masked_fill(~given, float(random.choice([-np.inf, torch.finfo().min, -1e9])))
    for mask in (given, additive, additive.bfloat16(), given.expand(-1, 3, -1, -1)):
        found = read(mask, batch, q_length, kv_length)
        assert np.array_equal(visible_pairs(found), pairs)


@pytest.mark.parametrize("causal,window", [(True, None), (True, 1), (True, 5), (False, None)])
@pytest.mark.parametrize("q_length,kv_length", [(8, 8), (3, 11), (1, 20)])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_plain_masks_need_no_bits(causal, window, q_length, kv_length, side):
    """Given as padding or as pairs. Of padding Folio knows that nobody reads the padding's own queries."""
    padding = np.ones((3, kv_length), bool)
    padding[1, slice(0, 4) if side == "left" else slice(kv_length - 2, None)] = side == "none"
    pairs = box(3, q_length, kv_length, causal, window, padding)
    found = read(torch.from_numpy(pairs)[:, None], 3, q_length, kv_length)
    assert found.bits is None and np.array_equal(visible_pairs(found), pairs)
    if causal:
        pairs &= padding[:, kv_length - q_length :, None]
    for mask in (torch.from_numpy(padding), torch.from_numpy(padding).long(), None)[: 3 if side == "none" else 2]:
        found = read(mask, 3, q_length, kv_length, causal, window)
        assert found.bits is None and np.array_equal(visible_pairs(found), pairs)
        assert found.causal == (causal or q_length == 1)


def test_a_sliding_window_around_each_query_needs_no_bits():
    pairs = np.abs(np.arange(12)[:, None] - np.arange(12)) <= 3
    found = read(torch.from_numpy(pairs)[None, None], 1, 12, 12)
    assert found.bits is None and np.array_equal(visible_pairs(found)[0], pairs)


def test_holes_and_chunks_need_bits():
    padding = torch.tensor([[1, 1, 0, 0, 1, 1]])
    found = read(padding, 1, 1, 6)
    assert found.bits is not None and visible_pairs(found)[0, 0].tolist() == [True, True, False, False, True, True]
    chunks = masking_utils.sdpa_mask(
        batch_size=1,
        q_length=8,
        kv_length=8,
        mask_function=masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=int)),
        allow_is_causal_skip=False,
    )
    found = read(chunks, 1, 8, 8)
    assert found.bits is not None and np.array_equal(visible_pairs(found)[0], chunks[0, 0].numpy())


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sizes", [(6, 6, 0, 0), (1, 9, 8, 0), (3, 9, 9, 3), (4, 20, 5, 0)])
def test_mask_functions_become_ranges(window, sizes):
    q_length, kv_length, q_offset, kv_offset = sizes
    causal, sliding = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function
    padding = torch.ones(2, q_offset + q_length, dtype=torch.bool)
    padding[1, :2] = False
    arguments = dict(
        batch_size=2,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=sliding(window) if window else causal,
        attention_mask=padding,
    )
    mask = ranges_mask(**arguments)
    assert isinstance(mask, VisibleRanges)
    expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False).expand(2, 1, q_length, kv_length)
    tokens = padding[:, q_offset:]
    pairs = visible_pairs(read(mask, 2, q_length, kv_length))
    assert np.array_equal(pairs[tokens.numpy()], expected[:, 0][tokens].numpy())
    assert not pairs[~tokens.numpy()].any()


def test_functions_that_only_look_like_a_window_are_materialised():
    sliding = masking_utils.sliding_window_causal_mask_function(4)
    even = masking_utils.and_masks(lambda b, h, q, k: k % 2 == 0, masking_utils.causal_mask_function)
    both = masking_utils.and_masks(sliding, masking_utils.causal_mask_function)
    for function in (even, both):
        mask = ranges_mask(batch_size=1, q_length=6, kv_length=6, mask_function=function)
        assert mask.dtype == torch.bool and mask.shape == (1, 1, 6, 6)


def test_what_is_no_visibility_is_refused():
    mask = torch.zeros(1, 1, 2, 3)
    with pytest.raises(ValueError, match="adds a bias"):
        read(mask - 0.5, 1, 2, 3)
    with pytest.raises(ValueError, match="differs from head to head"):
        read(torch.tensor([[[[True] * 3] * 2, [[True, True, False]] * 2]]), 1, 2, 3)
    with pytest.raises(ValueError, match="of four dimensions it is bool or additive"):
        read(mask.int(), 1, 2, 3)
    with pytest.raises(ValueError, match=r"has shape \[1, 1, 2, 3\]; the layer has 1 x 2 queries and 4 keys"):
        read(mask, 1, 2, 4)
    with pytest.raises(ValueError, match="two or four dimensions"):
        read(mask[0], 1, 2, 3)
    with pytest.raises(ValueError, match="belong to another step"):
        read(ranges_mask(batch_size=1, q_length=2, kv_length=2), 1, 2, 3)


def call(module=None, batch=1, q_length=2, dtype=torch.float32, value=0.0, **options):
    q, k = torch.zeros(batch, 4, q_length, 16, dtype=dtype), torch.full((batch, 2, 5, 16), value, dtype=dtype)
    function = paged_attention if "cache" in options else transformers.AttentionInterface()["folio"]
    options.setdefault("attention_mask", None)
    return function(module or torch.nn.Module(), q, k, k, **options)[0]


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(indices=torch.zeros(1)), r"sparse attention over `indices` \(DSA\) is not offered"),
        (dict(position_bias=torch.zeros(1)), "position_bias is not offered"),
        (dict(dropout=0.1), r"dropout is 0.1; Folio is for inference"),
        (dict(output_attentions=True), "output_attentions is not offered"),
        (dict(cu_seq_lens_q=torch.zeros(2)), "packs several sequences into one row"),
        (dict(is_causal=False, sliding_window=4), "a sliding window that is not causal needs an attention_mask"),
        (dict(cache=None), "serves generate_batch alone"),
        (dict(dtype=torch.float64), "float32, float16 and bfloat16"),
        (dict(scaling=0.0), "scaling is 0"),
    ],
)
def test_refusals(options, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        call(**options)


def test_gradients_are_refused():
    model = tiny_models.make("llama")
    model.set_attn_implementation("folio")
    ids = torch.tensor([[1, 2, 3]], device=tiny_models.DEVICE)
    with pytest.raises(NotImplementedError, match="there is no backward pass; call the model under torch.no_grad"):
        model(ids)
    with torch.inference_mode():
        assert model(ids).logits.isfinite().all()


def test_compiled_models_break_their_graph_with_the_reason():
    model = tiny_models.make("llama")
    model.set_attn_implementation("folio")
    with torch.no_grad(), pytest.raises(Exception, match="Folio plans on the host"):
        torch.compile(model, fullgraph=True, backend="eager")(torch.tensor([[1, 2, 3]], device=tiny_models.DEVICE))


def test_padding_is_zero():
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    out = call(batch=2, q_length=5, attention_mask=mask, value=1.0)
    assert not out[1].any() and not out[0, :3].any() and (out[0, 3:] == 1).all()


@pytest.mark.parametrize("seed", range(20))
def test_keys_from_the_beginning_of_a_page(seed):
    random = np.random.default_rng(seed)
    q_length, window = int(random.integers(1, 4)), int(random.integers(1, 9))
    pairs = box(2, q_length, 20, True, window, np.ones((2, 20), bool))
    found = read(torch.from_numpy(pairs)[:, None], 2, q_length, 20)
    moved = found.from_multiples_of(4)
    assert moved.bits is None and not (moved.kv_start % 4).any()
    assert np.array_equal(visible_pairs(moved), pairs)
    padded = np.ones((2, 20), bool)
    padded[1, :5] = False
    for pairs in (box(2, q_length, 20, True, None, padded), box(2, q_length, 20, True, window, padded)):
        moved = read(torch.from_numpy(pairs)[:, None], 2, q_length, 20).from_multiples_of(4)
        assert not (moved.kv_start % 4).any() and np.array_equal(visible_pairs(moved), pairs)
