"""Custom masks as bools: packed as kernels read them, held against the batch, and computed with."""

import folio
import numpy as np
import pytest

import problems


def refused(match):
    return pytest.raises(folio.InvalidArgument, match=match)


def bits_of(masks):
    """The layout as CustomMask says it, by numpy."""
    return np.concatenate([np.packbits(mask, axis=None, bitorder="little") for mask in masks] or
                          [np.zeros(0, np.uint8)])


def random_masks(shapes, seed=1):
    random = np.random.default_rng(seed)
    return [random.random(shape) < 0.6 for shape in shapes]


def exact(problem, visible):
    """(out, lse) in float64: `visible` has a [queries, keys] matrix of bools a request."""
    batch, group = problem.batch, problem.q.shape[1] // problem.k.shape[2]
    outs, lses, token = [], [], 0
    for q_len, kv_len, pages, seen in zip(batch.q_len, batch.kv_len, batch.pages, visible):
        places = [(pages[t // 16], t % 16) for t in range(kv_len)]
        k = np.array([problem.k[place] for place in places], np.float64).reshape(kv_len, *problem.k.shape[2:])
        v = np.array([problem.v[place] for place in places], np.float64).reshape(kv_len, *problem.v.shape[2:])
        for i in range(q_len):
            q = problem.q[token].astype(np.float64)
            logits = np.einsum("hd,khd->hk", q, np.repeat(k, group, axis=1)) * problem.rules.sm_scale
            logits[:, ~seen[i]] = -np.inf
            top = logits.max(axis=1, initial=-1e30)
            weights = np.exp(logits - top[:, None])
            total = weights.sum(axis=1)
            with np.errstate(divide="ignore"):
                lses.append(top + np.log(total))
            outs.append(np.einsum("hk,khd->hd", weights / np.maximum(total, 1e-300)[:, None],
                                  np.repeat(v, group, axis=1)))
            token += 1
    return np.array(outs), np.array(lses)


def make_problem(batch="mixed"):
    problem = problems.make("float32", batch)
    problem.config.mask = "custom"
    return problem


def run(problem, view, mask):
    """(out, lse) of run, having checked them against the oracle's."""
    op = folio.prepare(folio.Context.cpu(num_threads=2), problem.config)
    plan = folio.plan(op, view, folio.make_plan_buffer(op))
    out, lse = problem.outputs()
    args = problem.args(out, lse, custom_mask=mask)
    folio.run(plan, args, folio.Workspace(folio.workspace_size(plan)))
    oracle_out, oracle_lse = folio.reference_attention(problem.config, view, args)
    assert_close(problem, out, lse, (oracle_out, oracle_lse))
    return out, lse


def assert_close(problem, out, lse, wanted):
    """As problems.assert_close, with the largest value for the weighted mean of the values."""
    longest = np.nanmax(np.abs(problem.v))
    problems.assert_close(problem, out, lse, (*wanted, np.full(wanted[0].shape, longest)))


def keys_of(problem):
    return list(zip(problem.batch.q_len, problem.batch.kv_len))


@pytest.mark.parametrize("batch", problems.BATCHES)
def test_masks_of_all_keys(batch):
    problem = make_problem(batch)
    masks = random_masks(keys_of(problem))
    wanted = exact(problem, masks)
    view = problem.batch_view()
    flat = np.concatenate([mask.ravel() for mask in masks])
    for given in (masks, tuple(masks), folio.pack_custom_mask(masks), folio.pack_custom_mask(masks, view),
                  folio.pack_custom_mask(flat, view), bits_of(masks)):
        assert_close(problem, *run(problem, view, given), wanted)


def test_masks_of_the_last_keys():
    problem = make_problem()
    tail_len = [6, 5, 0, 3]
    masks = random_masks(list(zip(problem.batch.q_len, tail_len)))
    whole = [np.hstack([np.ones((mask.shape[0], kv_len - mask.shape[1]), bool), mask])
             for mask, kv_len in zip(masks, problem.batch.kv_len)]
    view = folio.BatchView(problem.batch.cu_q, [folio.KvSegment(problem.batch.lengths)],
                           custom_mask=folio.CustomMask(scope="tail", tail_len=tail_len))
    for given in (masks, folio.pack_custom_mask(np.concatenate([mask.ravel() for mask in masks]), view)):
        assert_close(problem, *run(problem, view, given), exact(problem, whole))


def test_a_causal_mask_of_bools_is_causal():
    problem = problems.make("float32", "mixed")
    causal, causal_lse = problems.run(problem)
    problem.config.mask = folio.MaskKind.CUSTOM
    masks = [np.tri(q_len, kv_len, kv_len - q_len, dtype=bool) for q_len, kv_len in keys_of(problem)]
    out, lse = run(problem, problem.batch_view(), masks)
    assert_close(problem, out, lse, (causal.astype(np.float64), causal_lse.astype(np.float64)))


def test_columns_count_shared_keys():
    """Two requests share a prefix of 16 keys, a third has none of it."""
    shared = folio.KvSegment([16], group_indptr=[0, 2])
    own = folio.KvSegment([3, 5, 7])
    view = folio.BatchView([0, 1, 3, 4], [shared, own])
    masks = random_masks([(1, 19), (2, 21), (1, 7)])
    assert np.array_equal(folio.pack_custom_mask(masks, view), bits_of(masks))


@pytest.mark.parametrize("shapes", [[], [(1, 1)], [(3, 8), (2, 4)], [(0, 5), (5, 0), (3, 7)], [(1, 9), (9, 1)]])
def test_layout(shapes):
    masks = random_masks(shapes)
    packed = folio.pack_custom_mask(masks)
    assert packed.dtype == np.uint8 and np.array_equal(packed, bits_of(masks))
    assert np.array_equal(folio.pack_custom_mask([mask.T.copy().T for mask in masks]), packed)


def test_arrays_of_one_shape():
    masks = np.random.default_rng(3).random((4, 3, 7)) < 0.5
    assert np.array_equal(folio.pack_custom_mask(masks), bits_of(masks))
    assert np.array_equal(folio.pack_custom_mask(masks[0]), bits_of(masks[:1]))


def test_torch_masks_are_packed_by_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    masks = random_masks([(3, 9), (0, 4), (2, 8), (1, 1)])
    packed = folio.pack_custom_mask([torch.from_numpy(mask) for mask in masks])
    assert isinstance(packed, torch.Tensor) and packed.dtype == torch.uint8
    assert np.array_equal(packed.numpy(), bits_of(masks))
    problem = make_problem("prefill")
    masks = random_masks(keys_of(problem))
    wanted = exact(problem, masks)
    flat = torch.from_numpy(np.concatenate([mask.ravel() for mask in masks]))
    view = problem.batch_view()
    for given in ([torch.from_numpy(mask) for mask in masks], folio.pack_custom_mask(flat, view)):
        assert_close(problem, *run(problem, view, given), wanted)


class TestRefusals:
    def test_shapes_that_are_not_the_batchs(self):
        problem = make_problem()
        masks = random_masks(keys_of(problem))
        view = problem.batch_view()
        swapped = [masks[1], masks[0], *masks[2:]]
        with refused(r"custom_mask\[0\] is \[5, 21\]; request 0 has \[1, 40\] queries and columns"):
            run(problem, view, swapped)
        with refused("custom_mask has 3 masks; there are 4 requests"):
            run(problem, view, masks[:3])
        with refused(r"mask\[3\] is \[3, 4\]; request 3 has \[3, 3\]"):
            folio.pack_custom_mask([*masks[:3], np.ones((3, 4), bool)], view)
        with refused("mask has 7 entries; the batch's masks have 154"):
            folio.pack_custom_mask(np.ones(7, bool), view)
        with refused(r"custom_mask\[0\] is"):
            folio.reference_attention(problem.config, view, problem.args(None, custom_mask=swapped))

    def test_vectors_need_the_batch(self):
        with refused("mask has one dimension, and only the batch says"):
            folio.pack_custom_mask(np.ones(7, bool))
        problem = make_problem("decode")
        with refused("custom_mask has one dimension, and only the batch says"):
            problem.args(None, custom_mask=np.ones(50, bool))

    @pytest.mark.parametrize("given,message", [
        ([np.ones((2, 3), np.uint8)], r"mask\[0\] is uint8; a mask must be bool"),
        (np.ones((2, 3)), "mask is float64; a mask must be bool"),
        ([np.ones(3, bool)], r"mask\[0\] has shape \[3\]; a mask must be \[queries, columns\]"),
        ([[True, False]], r"mask\[0\]: expected an array, got a list"),
        (np.ones((1, 1, 1, 1), bool), r"mask has shape \[1, 1, 1, 1\]"),
        (3, "mask: expected an array, got 3"),
    ])
    def test_what_is_no_mask(self, given, message):
        with refused(message):
            folio.pack_custom_mask(given)
