#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>

#include "c_handles.hpp"
#include "folio/c/folio.h"

namespace folio_c_test {

inline folio_const_tensor_view rows(const float* data, int64_t tokens, int64_t heads, int64_t dim) {
  folio_const_tensor_view view{data, FOLIO_DTYPE_FLOAT32, 3, {tokens, heads, dim}, {heads * dim, dim, 1}};
  return view;
}

/// A decode of two requests (5 and 20 keys) over pages of 8, two KV heads, four q heads, head_dim 16, float32; every
/// structure at hand to be spoilt. All keys are alike, so that a row of the result is the mean of its request's values.
struct Decode {
  static constexpr int32_t kPages = 4, kPageSize = 8, kKvHeads = 2, kHeads = 4, kDim = 16;

  explicit Decode(int32_t validate_tables = 0) {
    folio_context_options options = FOLIO_CONTEXT_OPTIONS_INIT;
    options.num_threads = 2;
    options.validate_tables = validate_tables;
    folio_context* raw_context = nullptr;
    EXPECT_EQ(folio_create_cpu_context(&options, &raw_context), FOLIO_OK) << folio_last_error();
    context.reset(raw_context);
    config.num_q_heads = kHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim_qk = config.head_dim_v = kDim;
    config.q = config.kv = FOLIO_DTYPE_FLOAT32;
    config.page_size = kPageSize;
    folio_op* raw_op = nullptr;
    EXPECT_EQ(folio_prepare(context.get(), &config, nullptr, &raw_op), FOLIO_OK) << folio_last_error();
    op.reset(raw_op);
    folio_plan_buffer* raw_buffer = nullptr;
    EXPECT_EQ(folio_create_plan_buffer(op.get(), &raw_buffer), FOLIO_OK) << folio_last_error();
    buffer.reset(raw_buffer);

    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / (kKvHeads * kDim));  // its slot
    q.fill(1.0f);
    out.fill(-7.0f);
    segment.kv_len = kv_len.data();
    batch.num_requests = 2;
    batch.num_tokens = 2;
    batch.cu_q = cu_q.data();
    batch.segments = &segment;
    batch.num_segments = 1;
    EXPECT_EQ(folio_make_nhd_view(&shape, k.data(), v.data(), &segment_args.cache), FOLIO_OK) << folio_last_error();
    segment_args.table.indices = pages.data();
    segment_args.table.num_indices = 4;
    segment_args.table.indptr = indptr.data();
    segment_args.table.num_rows = 2;
    args.segments = &segment_args;
    args.num_segments = 1;
    args.q = rows(q.data(), 2, kHeads, kDim);
    args.out = {out.data(), FOLIO_DTYPE_FLOAT32, 3, {2, kHeads, kDim}, {kHeads * kDim, kDim, 1}};
  }

  folio_status plan_batch() { return folio_make_plan(op.get(), &batch, buffer.get(), nullptr, &plan); }

  /// Workspace of the size that is asked for, filled with NaN patterns.
  void* allocate(size_t bytes) {
    workspace_bytes = bytes;
    workspace.reset(std::aligned_alloc(256, bytes > 0 ? bytes : 256));
    for (size_t i = 0; i < bytes; ++i) static_cast<unsigned char*>(workspace.get())[i] = 0xff;
    return workspace.get();
  }
  folio_status run() {
    size_t bytes = 0;
    const folio_status sized = folio_workspace_size(op.get(), &bytes);
    if (sized != FOLIO_OK) return sized;
    return folio_run(&plan, &args, allocate(bytes), bytes, nullptr);
  }

  /// The mean slot of a request's tokens.
  float expected(size_t request) const {
    double sum = 0;
    for (int32_t t = 0; t < kv_len[request]; ++t) {
      const int32_t page = pages[static_cast<size_t>(indptr[request] + t / kPageSize)];
      sum += page * kPageSize + t % kPageSize;
    }
    return static_cast<float>(sum / kv_len[request]);
  }
  void expect_result() const {
    constexpr size_t kRow = static_cast<size_t>(kHeads) * kDim;
    for (size_t i = 0; i < out.size(); ++i) {
      const float mean = expected(i / kRow);
      // Up to 20 equal weights and as many float32 additions.
      EXPECT_NEAR(out[i], mean, 24 * 0x1p-23f * 32) << i;
    }
  }

  Owned<folio_context> context;
  Owned<folio_op> op;
  Owned<folio_plan_buffer> buffer;
  Owned<void> workspace;
  size_t workspace_bytes = 0;
  folio_attention_config config = FOLIO_ATTENTION_CONFIG_INIT;
  folio_kv_cache_shape shape = {kPages, kPageSize, kKvHeads, kDim, kDim, FOLIO_DTYPE_FLOAT32};
  folio_kv_segment segment = FOLIO_KV_SEGMENT_INIT;
  folio_batch batch = FOLIO_BATCH_INIT;
  folio_segment_args segment_args = FOLIO_SEGMENT_ARGS_INIT;
  folio_attention_args args = FOLIO_ATTENTION_ARGS_INIT;
  folio_plan plan = {nullptr, 0};
  std::array<int32_t, 2> kv_len = {5, 20};
  std::array<int32_t, 3> cu_q = {0, 1, 2};
  std::array<int32_t, 3> indptr = {0, 1, 4};
  std::array<int32_t, 4> pages = {3, 0, 2, 1};
  std::array<float, kPages * kPageSize * kKvHeads * kDim> k{}, v{};
  std::array<float, 2 * kHeads * kDim> q{}, out{};
};

}  // namespace folio_c_test
