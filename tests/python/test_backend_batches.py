"""Batches made from batches, the order of requests, and merges: what the backends share."""

import folio
import numpy as np
import pytest
from folio import backends
from folio.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder

import paged_attention
from backend_steps import Engine

CONTEXT = folio.Context.cpu(num_threads=2)


def test_chunked_local_attention():
    chunk = 32
    engine = Engine()
    layer = FlashAttentionImpl(4, 64, 0.125, 2, model_dtype="float32", context=CONTEXT)
    spec = backends.AttentionSpec(page_size=16, num_kv_heads=2, head_size=64, dtype="float32")
    model = backends.ModelConfig(dtype="float32", num_attention_heads=4, num_kv_heads=2)
    builder = FlashAttentionMetadataBuilder(spec, {"a": layer}, backends.EngineConfig(model=model))
    cache = np.zeros(FlashAttentionBackend.get_kv_cache_shape(64, 16, 2, 64), np.float32)
    for schedule in ({"a": 50, "b": 20}, {"a": 1, "b": 30}, {"a": 1, "b": 1}):
        step = engine.step(schedule)
        batch = backends.CommonAttentionMetadata(**step.batch_arguments())
        local = backends.make_local_attention_virtual_batches(chunk, batch, 16)
        assert local.num_actual_tokens == len(step.q) and local.slot_mapping is batch.slot_mapping
        metadata = builder.build(0, local)
        layer.do_kv_cache_update(None, step.k, step.v, cache, metadata.slot_mapping)
        out = layer.forward(None, step.q, step.k, step.v, cache, metadata, np.empty_like(step.q))
        token = 0
        for name, q_len, seq_len in zip(step.names, step.q_lens, step.seq_lens):
            one = engine.requests[name]
            for i in range(q_len):
                position = seq_len - q_len + i
                keys = slice(position // chunk * chunk, position + 1)
                for head in range(4):
                    exact, _, magnitude = paged_attention.row(
                        step.q[token, head].astype(np.float64), one.k[keys, head // 2].astype(np.float64),
                        one.v[keys, head // 2].astype(np.float64), engine.rules(causal=False), 0, head)
                    assert np.all(np.abs(out[token, head] - exact) <= 1e-5 * (magnitude + 1))
                token += 1
    with pytest.raises(folio.InvalidArgument, match="attn_chunk_size 20 is not divisible by block_size 16"):
        backends.make_local_attention_virtual_batches(20, batch, 16)


def test_fast_prefill_keeps_the_tokens_whose_logits_are_wanted():
    batch = backends.CommonAttentionMetadata(
        query_start_loc=[0, 5, 6, 9], seq_lens=[5, 8, 12], block_table=np.ones((3, 1), np.int32),
        slot_mapping=list(range(9)), logits_indices_padded=[4, 5, 7, 8, 0, 0], num_logits_indices=4)
    made = backends.make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    assert made.query_start_loc.tolist() == [0, 1, 2, 4] and made.seq_lens.tolist() == [5, 8, 12]
    assert (made.num_actual_tokens, made.max_query_len, made.slot_mapping) == (4, 2, None)
    wrong = backends.CommonAttentionMetadata(query_start_loc=[0, 5], seq_lens=[5], logits_indices_padded=[2],
                                             num_logits_indices=1)
    with pytest.raises(folio.InvalidArgument, match="only those of a request's last tokens"):
        backends.make_kv_sharing_fast_prefill_common_attn_metadata(wrong)


def test_merges_of_prefix_and_suffix():
    random = np.random.default_rng(2)
    prefix, suffix = random.standard_normal((2, 6, 4, 64)).astype(np.float32)
    prefix_lse, suffix_lse = random.standard_normal((2, 4, 6)).astype(np.float32)
    out, lse = np.empty_like(prefix), np.empty_like(prefix_lse)
    backends.merge_attn_states(out, prefix, prefix_lse, suffix, suffix_lse, lse, 4, context=CONTEXT)
    weights = np.exp(np.stack([prefix_lse, suffix_lse]).astype(np.float64))
    share = (weights[0] / weights.sum(0)).T[..., None]
    exact = share * prefix + (1 - share) * suffix
    exact[4:] = suffix[4:]
    assert np.all(np.abs(out - exact) <= 1e-6 * (np.abs(prefix) + np.abs(suffix) + 1))
    assert np.allclose(lse[:, :4], np.log(weights.sum(0))[:, :4], atol=1e-6)
    assert np.array_equal(lse[:, 4:], suffix_lse[:, 4:])
    with pytest.raises(folio.InvalidArgument, match="suffix_lse is float32"):
        backends.merge_attn_states(out, prefix, prefix_lse, suffix, suffix_lse.T, context=CONTEXT)
    with pytest.raises(folio.InvalidArgument, match="prefill_tokens_with_context is 9"):
        backends.merge_attn_states(out, prefix, prefix_lse, suffix, suffix_lse, None, 9, context=CONTEXT)


def test_the_order_of_requests():
    batch = backends.CommonAttentionMetadata(query_start_loc=[0, 1, 2, 9], seq_lens=[5, 4, 7])
    assert backends.split_decodes_and_prefills(batch) == (2, 1, 2, 7)
    assert backends.split_decodes_prefills_and_extends(batch) == (2, 0, 1, 2, 0, 7)
    order = ["prefill", "decode", "extend"]

    def swap(i, j):
        order[i], order[j] = order[j], order[i]

    assert backends.reorder_batch_to_split_decodes_and_prefills([9, 1, 4], [0, 8, 3], swap)
    assert order == ["decode", "extend", "prefill"]
    with pytest.raises(ZeroDivisionError):
        backends.reorder_batch_to_split_decodes_and_prefills([9, 1, 4], [0, 8, 3], lambda i, j: 1 // 0)
    padding = backends.GraphPadding(backends.default_capture_sizes(16))
    assert [padding.pad_for_cudagraph(n) for n in (0, 1, 3, 9)] == [0, 1, 4, 16]
    assert backends.use_cascade_attention(512, [3] * 16, 8, 2, False, False, False, 132)
    assert not backends.use_cascade_attention(128, [1] * 16, 8, 2, False, False, False, 132)
