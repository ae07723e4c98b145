#pragma once

#include <numeric>
#include <vector>

#include "folio/folio.hpp"

namespace folio {

/// Attention of one request on the emulated GPU: queries [tokens, heads, head_dim] against `kv_len` tokens of
/// `num_pages` pages, one after the other, of the op's types and sizes; outputs of float32. `sm_scale`: 0 for the
/// default.
inline std::vector<float> run_one_request(const AttentionOp& op, int32_t tokens, const void* q, void* k, void* v,
                                          int32_t kv_len, int32_t num_pages, float soft_cap = 0.0f,
                                          float sm_scale = 0.0f) {
  const AttentionConfig& config = op.config();
  const int32_t heads = config.num_q_heads;
  std::vector<float> out(static_cast<size_t>(tokens) * static_cast<size_t>(heads * config.head_dim_v));
  const int32_t cu_q[] = {0, tokens};
  std::vector<int32_t> pages(static_cast<size_t>(num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  KvSegment lengths;
  lengths.kv_len = &kv_len;
  BatchView batch;
  batch.num_requests = 1;
  batch.num_tokens = tokens;
  batch.cu_q = cu_q;
  batch.segments = {&lengths, 1};
  SegmentArgs segment;
  segment.cache = make_nhd_view(
      {num_pages, config.page_size, config.num_kv_heads, config.head_dim_qk, config.head_dim_v, config.kv}, k, v);
  segment.table.kind = PageTableKind::kDense;
  segment.table.indices = pages.data();
  segment.table.num_indices = segment.table.row_stride = num_pages;
  segment.table.num_rows = 1;
  AttentionArgs args;
  args.q = ConstTensorView(q, config.q, {tokens, heads, config.head_dim_qk});
  args.out = TensorView(out.data(), DType::kFloat32, {tokens, heads, config.head_dim_v});
  args.segments = {&segment, 1};
  args.logits_soft_cap = soft_cap;
  args.sm_scale = sm_scale;
  PlanBuffer buffer = make_plan_buffer(op);
  const AttentionPlan plan = folio::plan(op, batch, buffer);
  const size_t bytes = workspace_size(plan);
  std::vector<unsigned char> memory(bytes + 256);
  void* const aligned = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  init_workspace(op, {aligned, workspace_size(op)});
  run(plan, args, {aligned, bytes});
  return out;
}

}  // namespace folio
