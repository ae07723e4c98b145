"""What a token-pool step puts into memory that stays: the request table, a captured batch's inputs, drafts' arrays."""

import folio
import numpy as np
import pytest
from folio.backends import token_pool
from folio.backends.token_pool import DeviceFaults, DeviceReqToTokenPool, ForwardBatch, GraphInputs, SpecInfo

CONTEXT = folio.Context.cpu(num_threads=1)


def test_the_request_table_of_a_context():
    pool = DeviceReqToTokenPool(3, 6, CONTEXT)
    assert (pool.size, pool.max_context_len, pool.available) == (3, 6, 3)
    assert pool.alloc() == 1 and pool.alloc(2).tolist() == [2, 3] and pool.alloc() is None and pool.is_held(3)
    pool.write(1, 0, [5, 6])
    pool.write_batch([2, 0, 1], [11, 12, 0, 7], first=[0, 0, 2], lens=[2, 1, 1])
    pool.write_batch([2, 1], np.array([13, 8], np.int64), ends=np.array([3, 4], np.int32))
    pool.write_batch([3], [21, 22], first=[4], tokens_per_request=2, faults=DeviceFaults(CONTEXT))
    assert pool.entries.tolist() == [[0] * 6, [5, 6, 7, 8, 0, 0], [11, 12, 13, 0, 0, 0], [0, 0, 0, 0, 21, 22]]
    for message, call in {
            "row 1, which has 6": lambda: pool.write(1, 5, [1, 2]),
            "row 0 is the dummy row": lambda: pool.write(0, 0, [1]),
            "one of them is given": lambda: pool.write_batch([1], [1]),
            "request 0 has slot 4294967296": lambda: pool.write_batch([1], [1 << 32], ends=[1]),
            "lens has 2 entries": lambda: pool.write_batch([1], [1], ends=[1], lens=[1, 1]),
    }.items():
        with pytest.raises(folio.InvalidArgument, match=message):
            call()
    entries = pool.entries
    pool.clear()
    assert pool.available == 3 and "3 of 3 rows" in repr(pool)
    del pool
    assert entries.shape == (4, 6) and not entries.any()  # the memory lives with its views


def test_a_copy_of_a_host_pool_serves_steps():
    rows = folio.ReqToTokenPool(2, 8)
    pool = DeviceReqToTokenPool(rows, CONTEXT)
    row = pool.alloc()
    pool.write(row, 0, [4, 9, 2])
    assert rows.is_held(row) and rows.row(row).tolist()[:3] == [4, 9, 2]
    backend = token_pool.TokenPoolBackend(num_heads=1, num_kv_heads=1, head_dim=64, kv_cache_dtype="float32",
                                          q_dtype="float32", req_to_token=pool, context=CONTEXT)
    kv = folio.KvPool(folio.KvPoolConfig(num_slots=16, num_layers=1, num_kv_heads=1, head_dim_qk=64, head_dim_v=64,
                                         dtype="float32"))
    backend.init_forward_metadata(ForwardBatch(forward_mode="extend", req_pool_indices=[row], seq_lens=[3],
                                               extend_prefix_lens=[0], out_cache_loc=[4, 9, 2], token_to_kv_pool=kv))
    (wrapper,) = backend.forward_metadata["prefill_wrappers"]
    assert wrapper["kv_starts"].tolist() == [0]


def test_captured_inputs_are_padded():
    inputs = GraphInputs(4, 2, CONTEXT)
    batch = ForwardBatch(forward_mode="target_verify", req_pool_indices=[3, 1], seq_lens=[9, 5],
                         out_cache_loc=[7, 8, 4, 5], spec_info=SpecInfo(draft_token_num=2, tree_mask=[13, 13]))
    padded = inputs.pad(batch, 3)
    assert padded.batch_size == 3 and padded.seq_lens_sum == 15 and batch.batch_size == 2
    assert padded.req_pool_indices.tolist() == [3, 1, 0] and padded.seq_lens.tolist() == [9, 5, 1]
    assert padded.seq_lens_cpu.tolist() == [9, 5, 1] and padded.out_cache_loc.tolist() == [7, 8, 4, 5, 0, 0]
    with pytest.raises(folio.InvalidArgument, match="room for 4"):
        inputs.pad(batch, 5)
    with pytest.raises(folio.InvalidArgument, match="draft_token_num is 2; the inputs are for 1"):
        GraphInputs(4, context=CONTEXT).pad(batch, 4)


def test_drafts_into_the_callers_arrays():
    """On a CPU what the functions without `faults` return."""
    faults = DeviceFaults(CONTEXT)
    table = np.arange(4 * 40, dtype=np.int32).reshape(4, 40)
    branches = token_pool.DraftBranches(topk=2, num_steps=3)
    rows, lens = np.array([2, 1], np.int32), np.array([5, 3], np.int32)
    indptr, indices = token_pool.generate_draft_decode_kv_indices(table, rows, lens, branches, 2)
    out_indptr, out = np.full((2, 5), -1, np.int32), np.full((2, 24), -1, np.int32)
    token_pool.generate_draft_decode_kv_indices(table, rows, lens, branches, 2, kv_indptr=out_indptr, kv_indices=out,
                                                faults=faults)
    assert np.array_equal(out_indptr, indptr)
    for step, count in enumerate(indptr[:, -1]):
        assert np.array_equal(out[step, :count], indices[step, :count]) and np.all(out[step, count:] == -1)
    shape = token_pool.DraftTreeShape(topk=2, spec_steps=2, draft_token_num=4)
    scores = np.array([[0.9, 0.8, 0.7, 0.1, 0.5, 0.2]] * 2, np.float32)
    tokens, bonus = np.arange(12).reshape(2, 6), np.array([7, 8])
    selected, drafts = np.zeros((2, 3), np.int64), np.zeros((2, 4), np.int64)
    token_pool.select_draft_tokens(scores, tokens, bonus, shape, selected_index=selected, draft_tokens=drafts,
                                   faults=faults)
    expected = token_pool.select_draft_tokens(scores, tokens, bonus, shape)
    assert np.array_equal(selected, expected[0]) and np.array_equal(drafts, expected[1])
    parent_list = np.array([[-1, 0, 1]] * 2)
    parents, positions, index, child, sibling = (np.zeros((2, 4), np.int32) for _ in range(5))
    token_pool.draft_tree_parents(parent_list, selected, shape, parents=parents, faults=faults)
    assert np.array_equal(parents, token_pool.draft_tree_parents(parent_list, selected, shape))
    token_pool.draft_tree_positions(parents, lens, positions=positions, faults=faults)
    assert np.array_equal(positions, token_pool.draft_tree_positions(parents, lens))
    token_pool.draft_tree_links(parents, 4, retrieve_index=index, next_token=child, next_sibling=sibling, faults=faults)
    for got, wanted in zip((index, child, sibling), token_pool.draft_tree_links(parents, 4)):
        assert np.array_equal(got, wanted)
    mask = np.zeros(200, np.uint8)
    token_pool.fill_tree_mask("full_mask", parents, lens, 4, 3, mask=mask, faults=faults)
    wanted = token_pool.fill_tree_mask("full_mask", parents, lens, 4, 3)
    assert np.array_equal(mask[:len(wanted)], wanted)
    with pytest.raises(folio.InvalidArgument, match="positions is int64; it must be int32"):
        token_pool.draft_tree_positions(parents, lens, positions=np.zeros((2, 4), np.int64), faults=faults)
    with pytest.raises(folio.InvalidArgument, match="next_token overlaps retrieve_index"):
        token_pool.draft_tree_links(parents, 4, retrieve_index=index, next_token=index, next_sibling=sibling,
                                    faults=faults)
    faults.check()
