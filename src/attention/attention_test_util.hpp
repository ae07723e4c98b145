#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "folio/folio.hpp"

namespace folio::inline v0::attention {

/// A small valid batch, whole: two requests (5 and 20 keys, one query each), pages of 8, two KV heads, four q heads,
/// head_dim 16, float32. Tests break one thing at a time.
struct SmallDecode {
  Context context = Context::cpu({.executor = {}, .num_threads = 2, .force_kernel = {}});
  AttentionConfig config;
  std::vector<int32_t> cu_q{0, 1, 2};
  std::vector<int32_t> kv_len{5, 20};
  std::vector<int32_t> indptr{0, 1, 4};
  std::vector<int32_t> indices{3, 0, 2, 1};
  std::vector<float> k, v, q, out, lse;
  std::array<KvSegment, 1> segments;
  std::array<SegmentArgs, 1> segment_args;
  BatchView batch;
  AttentionArgs args;
  core::AlignedBuffer memory;

  SmallDecode() {
    config.num_q_heads = 4;
    config.num_kv_heads = 2;
    config.head_dim_qk = config.head_dim_v = 16;
    config.q = config.kv = DType::kFloat32;
    config.page_size = 8;
    const size_t half = 4 * 8 * 2 * 16;
    k.resize(half);
    v.resize(half);
    for (size_t i = 0; i < half; ++i) {
      k[i] = static_cast<float>(i % 7) * 0.25f - 0.75f;
      v[i] = static_cast<float>(i % 11) * 0.5f - 2.5f;
    }
    q.assign(2 * 4 * 16, 0.5f);
    out.assign(2 * 4 * 16, -1.0f);
    lse.assign(2 * 4, -1.0f);

    segments[0].kv_len = kv_len.data();
    batch.num_requests = 2;
    batch.num_tokens = 2;
    batch.cu_q = cu_q.data();
    batch.segments = segments;

    segment_args[0].cache = make_nhd_view({4, 8, 2, 16, 16, DType::kFloat32}, k.data(), v.data());
    segment_args[0].table = csr_table(indices, indptr);
    args.q = ConstTensorView(q.data(), DType::kFloat32, {2, 4, 16});
    args.out = TensorView(out.data(), DType::kFloat32, {2, 4, 16});
    args.lse = {lse.data(), 4, 1, LseBase::kE};
    args.segments = segment_args;
  }

  Workspace workspace(size_t bytes) {
    memory = core::AlignedBuffer(bytes, core::AlignedBuffer::kWorkspaceAlignment);
    return {memory.data(), bytes};
  }
};

}  // namespace folio::inline v0::attention
