#include <array>

#include "folio/reference.hpp"
#include "replay/row_problem.hpp"

namespace folio::replay {

void oracle_row(const RowProblem& problem, std::span<double> out) {
  AttentionConfig config;
  config.num_q_heads = config.num_kv_heads = 1;
  config.head_dim_qk = problem.head_dim_qk;
  config.head_dim_v = problem.head_dim_v;
  config.q = config.kv = config.ragged_kv = DType::kFloat32;
  config.window_left = problem.window_left;
  if (problem.logits_soft_cap != 0.0f) config.features = Feature::kSoftCap;

  const std::array<int32_t, 2> cu_q = {0, 1};
  const std::array<int32_t, 2> kv_indptr = {0, problem.kv_len};
  KvSegment lengths;
  lengths.source = KvSource::kRagged;
  lengths.kv_len = &problem.kv_len;
  BatchView batch;
  batch.num_requests = batch.num_tokens = 1;
  batch.cu_q = cu_q.data();
  batch.segments = std::span<const KvSegment>(&lengths, 1);

  SegmentArgs segment;
  segment.ragged.k = ConstTensorView(problem.k.data(), DType::kFloat32, {problem.kv_len, 1, problem.head_dim_qk});
  segment.ragged.v = ConstTensorView(problem.v.data(), DType::kFloat32, {problem.kv_len, 1, problem.head_dim_v});
  segment.ragged.indptr = kv_indptr.data();
  AttentionArgs args;
  args.q = ConstTensorView(problem.q.data(), DType::kFloat32, {1, 1, problem.head_dim_qk});
  args.segments = std::span<const SegmentArgs>(&segment, 1);
  args.logits_soft_cap = problem.logits_soft_cap;
  verify::reference_row(config, batch, args, 0, 0, out);
}

}  // namespace folio::replay
