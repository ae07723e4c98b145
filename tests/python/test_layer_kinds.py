"""folio.backends.layer_kinds: what the engines' plug-ins share."""

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import folio  # noqa: E402
from folio.backends.layer_kinds import BoundLayers, LayerKind, PreparedKind, context_of  # noqa: E402

FIELDS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim_qk": 32, "head_dim_v": 32, "q": torch.float32, "kv": torch.float32,
          "page_size": 16, "mask": "causal", "window_left": -1, "window_right": -1, "features": ()}


def prepared_of(bounds=None, **changes):
    return PreparedKind(LayerKind(**{**FIELDS, **changes}), context_of("cpu", num_threads=2), "cpu", bounds=bounds)


@pytest.mark.parametrize("field", FIELDS)
def test_kinds_are_keys(field):
    other = {"q": torch.bfloat16, "kv": torch.bfloat16, "mask": "none", "features": ("sinks",)}.get(field, 64)
    one, same, another = (LayerKind(**fields) for fields in (FIELDS, dict(FIELDS), {**FIELDS, field: other}))
    assert one == same and hash(one) == hash(same) and len({one: 1, same: 2, another: 3}) == 2


def test_a_kinds_config():
    config = LayerKind(**{**FIELDS, "features": ("sinks",), "window_left": 8}).config("batch_invariant")
    assert (config.num_q_heads, config.page_size, config.window_left) == (4, 16, 8)
    assert config.mask is folio.MaskKind.CAUSAL and config.determinism is folio.Determinism.BATCH_INVARIANT
    assert config.features == folio.Feature.SINKS


def test_layers_of_a_kind_share_a_step():
    prepared = prepared_of()
    step = prepared.step(prepared.plan([0, 2], [folio.KvSegment([20])], 2), [[[1, 0]]])
    for value in (1.0, 2.0):
        cache = torch.full((2, 16, 2, 32), value)
        layer = folio.Layer(prepared.op, folio.make_nhd_view(cache, cache))
        assert torch.allclose(layer(step, torch.ones(2, 4, 32), torch.empty(2, 4, 32)), torch.tensor(value))


def test_a_workspace_grows_where_nothing_is_captured():
    lengths = [3000] * 7
    free = prepared_of()
    before = free.workspace
    plan = free.plan(list(range(8)), [folio.KvSegment(lengths)], 7)
    assert free.workspace.bytes >= folio.workspace_size(plan)
    bounds = folio.GraphBounds(max_requests=8, max_tokens=8, max_q_len=8, max_kv_len=4096)
    captured = prepared_of(bounds)
    workspace = captured.workspace
    captured.plan(list(range(8)), [folio.KvSegment(lengths)], 7)
    assert captured.workspace is workspace, "a captured graph would keep the old workspace's address"
    assert before.bytes <= free.workspace.bytes
    with pytest.raises(folio.InvalidArgument, match="9"):
        captured.plan(list(range(10)), [folio.KvSegment([1] * 9)], 9)


def test_bound_layers():
    bound, first, second = BoundLayers(), prepared_of(), prepared_of()
    assert bound.find(first, (1, 2)) is None
    assert bound.add(first, (1, 2), "layer") == "layer" == bound.find(first, (1, 2))
    assert bound.find(first, (1, 3)) is None and bound.find(second, (1, 2)) is None
    bound.add(first, (1, 3), "moved")
    assert bound.find(first, (1, 3)) == "moved" and bound.find(first, (1, 2)) is None
    bound.clear()
    assert bound.find(first, (1, 3)) is None


def test_contexts():
    assert context_of("cpu", 2) is context_of(torch.device("cpu"), 2)
    assert context_of("cpu", 2) is not context_of("cpu", 1)
    own = os.sched_getaffinity(0)
    assert context_of("cpu", 1, own) is context_of("cpu", 1, sorted(own, reverse=True))
    assert os.sched_getaffinity(0) == own
    with pytest.raises(NotImplementedError, match="not meta"):
        context_of("meta")
