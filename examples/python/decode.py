"""Two requests generate one token each over a paged cache: written, planned, attended over, and checked by the oracle."""

import folio
import numpy as np

PAGES, PAGE_SIZE, KV_HEADS, Q_HEADS, DIM = 5, 16, 2, 8, 64


def main():
    random = np.random.default_rng(1)
    k_cache, v_cache = (np.zeros((PAGES, PAGE_SIZE, KV_HEADS, DIM), np.float32) for _ in range(2))
    cache = folio.make_nhd_view(k_cache, v_cache)

    # Their 20 and 7 keys lie in pages {4, 1} and {2}.
    kv_len = [20, 7]
    table = folio.csr_table([4, 1, 2], [0, 2, 3])
    slots = np.r_[4 * PAGE_SIZE:5 * PAGE_SIZE, PAGE_SIZE:PAGE_SIZE + 4, 2 * PAGE_SIZE:2 * PAGE_SIZE + 7]
    k, v = (random.standard_normal((27, KV_HEADS, DIM), dtype=np.float32) for _ in range(2))
    context = folio.Context.cpu()
    folio.write_kv_cache(context, folio.CacheWriteArgs(k, v, slots, cache))

    config = folio.AttentionConfig(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_v=DIM,
                                   q=folio.float32, kv=folio.float32, page_size=PAGE_SIZE)
    op = folio.prepare(context, config)  # once per group of layers
    buffer = folio.make_plan_buffer(op)
    workspace = folio.Workspace(folio.workspace_size(op))
    folio.init_workspace(op, workspace)

    batch = folio.BatchView([0, 1, 2], [folio.KvSegment(kv_len)])
    plan = folio.plan(op, batch, buffer)  # once per step: reads lengths only

    q = random.standard_normal((2, Q_HEADS, DIM), dtype=np.float32)
    out = np.empty_like(q)
    args = folio.AttentionArgs(q, out, [folio.SegmentArgs(cache, table)])
    folio.run(plan, args, workspace)  # once per layer: into `out`, nothing is copied

    exact, _ = folio.reference_attention(config, batch, args)
    error = np.abs(out - exact).max()
    print(f"{op.kernel_name} on {folio.Context.cpu().concurrency} threads: largest error {error:.1e}")
    # Values lie around 1, logits within a few units: some roundings per term of a float32 sum of 20.
    return 0 if error <= 64 * 20 * np.finfo(np.float32).eps else 1


if __name__ == "__main__":
    raise SystemExit(main())
