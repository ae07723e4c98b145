#pragma once

// Attention of one request by the float64 oracle, over keys that are named by the rows they lie in: for targets that
// give a kernel page tables, offsets or slots of any kind.
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "folio/folio.hpp"
#include "folio/reference.hpp"
#include "input.hpp"
#include "values.hpp"

namespace oracle {

/// Places of the values that belong to a row: its key, its value, its query.
enum Part : uint32_t { kKey = 0, kValue = 1 << 12, kQuery = 2 << 12 };

/// Component `place` of all heads of a row.
inline float component(Part part, int64_t row, int64_t place) {
  return value_of(1, static_cast<uint32_t>(row), static_cast<uint32_t>(part) + static_cast<uint32_t>(place));
}

/// `count` rows of `width` components.
inline std::vector<float> rows(Part part, int64_t count, int64_t width) {
  std::vector<float> values;
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t place = 0; place < width; ++place) values.push_back(component(part, row, place));
  }
  return values;
}

struct Request {
  std::vector<int64_t> keys;  ///< the rows of its keys, in order
  int64_t first_row = 0;      ///< of its queries and outputs
  int32_t q_len = 0;
};

/// Holds outputs [rows, heads, head_dim_v], and log-sum-exps [rows, heads] unless null, against what attention over the
/// request's keys is. `layer` has what applies to the logits: scales, cap, sinks, slopes, mask bits of this request.
inline void check(const folio::AttentionConfig& config, const folio::AttentionArgs& layer, const Request& request,
                  const std::vector<float>& out, const float* lse, folio::LseBase base) {
  const auto gather = [&](Part part, int32_t dim) {
    std::vector<float> values;
    for (const int64_t row : request.keys) {
      for (int64_t i = 0; i < int64_t{config.num_kv_heads} * dim; ++i) values.push_back(component(part, row, i));
    }
    return values;
  };
  const std::vector<float> k = gather(kKey, config.head_dim_qk), v = gather(kValue, config.head_dim_v);
  std::vector<float> q;
  for (int64_t row = request.first_row; row < request.first_row + request.q_len; ++row) {
    for (int64_t i = 0; i < int64_t{config.num_q_heads} * config.head_dim_qk; ++i) {
      q.push_back(component(kQuery, row, i));
    }
  }
  const auto num_keys = static_cast<int32_t>(request.keys.size());
  const int32_t cu_q[] = {0, request.q_len}, indptr[] = {0, num_keys};
  folio::KvSegment segment;
  segment.source = folio::KvSource::kRagged;
  segment.kv_len = &num_keys;
  folio::BatchView batch;
  batch.num_requests = 1;
  batch.num_tokens = request.q_len;
  batch.cu_q = cu_q;
  batch.segments = {&segment, 1};
  folio::SegmentArgs keys = layer.segments.empty() ? folio::SegmentArgs() : layer.segments[0];
  keys.ragged.k = {k.data(), folio::DType::kFloat32, {num_keys, config.num_kv_heads, config.head_dim_qk}};
  keys.ragged.v = {v.data(), folio::DType::kFloat32, {num_keys, config.num_kv_heads, config.head_dim_v}};
  keys.ragged.indptr = indptr;
  folio::AttentionArgs args = layer;
  args.q = {q.data(), folio::DType::kFloat32, {request.q_len, config.num_q_heads, config.head_dim_qk}};
  args.segments = {&keys, 1};
  std::vector<double> exact(static_cast<size_t>(config.head_dim_v));
  for (int32_t t = 0; t < request.q_len; ++t) {
    for (int32_t head = 0; head < config.num_q_heads; ++head) {
      const double expected = folio::verify::reference_row(config, batch, args, t, head, exact);
      const auto row = static_cast<size_t>((request.first_row + t) * config.num_q_heads + head);
      if (lse != nullptr) FUZZ_CHECK(near(lse[row], base == folio::LseBase::k2 ? expected / M_LN2 : expected));
      for (size_t d = 0; d < exact.size(); ++d) FUZZ_CHECK(near(out[row * exact.size() + d], exact[d]));
    }
  }
}

}  // namespace oracle
