#pragma once

// What a serving engine's requests hold, by its own book-keeping: tokens, the slots that they lie in, and the values
// that attention over them must give. Nothing here asks the library but its float64 oracle, which is given the values
// themselves and no cache, table or plan.
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "folio/folio.hpp"
#include "folio/pools.hpp"
#include "folio/reference.hpp"
#include "input.hpp"
#include "values.hpp"

namespace serving {

constexpr int32_t kMostRequests = 6;
constexpr int32_t kMostTokens = 48;  // of a request
constexpr int32_t kPoolTokens = 128;

/// One request: token i is `tokens[i]` and lies in `slots[i]`. The first `lock->length()` slots are the prefix cache's.
struct Request {
  std::vector<int32_t> tokens, slots;
  std::optional<folio::PrefixLock> lock;
  int32_t length() const { return static_cast<int32_t>(tokens.size()); }
};

/// Places of the values that belong to a token: its keys, its values, its query.
enum Part : uint32_t { kKey = 0, kValue = 1 << 12, kQuery = 2 << 12 };

/// A token's row of `heads` times `dim` values.
inline void append_row(std::vector<float>& rows, int32_t token, int32_t position, Part part, int32_t heads,
                       int32_t dim) {
  for (int32_t i = 0; i < heads * dim; ++i) {
    rows.push_back(value_of(static_cast<uint32_t>(token), static_cast<uint32_t>(position),
                            static_cast<uint32_t>(part) + static_cast<uint32_t>(i)));
  }
}

/// The results of a step, packed: [tokens, heads, head_dim_v] and [tokens, heads]; without lse where nothing returns
/// it.
struct StepOutput {
  std::vector<float> out, lse;
};

/// What a layer does to its logits besides mask and window.
struct LayerFeatures {
  float sm_scale = 0.0f;  ///< 0 = 1 / sqrt(head_dim_qk)
  float logits_soft_cap = 0.0f;
  std::vector<float> sinks, alibi_slopes;  ///< [num_q_heads] or empty
};

/// Compares rows of the last `q_len` tokens of a request with the oracle: `first_row` is their first row of `output`.
/// Only keys [first_key, last_key) count.
inline void check_rows(const folio::AttentionConfig& config, const Request& request, int32_t q_len, int32_t first_key,
                       int32_t last_key, const StepOutput& output, size_t first_row,
                       const LayerFeatures& features = {}) {
  std::vector<float> q, k, v;
  const int32_t length = request.length();
  for (int32_t p = length - q_len; p < length; ++p) {
    append_row(q, request.tokens[static_cast<size_t>(p)], p, kQuery, config.num_q_heads, config.head_dim_qk);
  }
  for (int32_t p = first_key; p < last_key; ++p) {
    append_row(k, request.tokens[static_cast<size_t>(p)], p, kKey, config.num_kv_heads, config.head_dim_qk);
    append_row(v, request.tokens[static_cast<size_t>(p)], p, kValue, config.num_kv_heads, config.head_dim_v);
  }
  const int32_t cu_q[] = {0, q_len}, kv_len[] = {last_key - first_key}, first_pos[] = {first_key};
  const int32_t indptr[] = {0, last_key - first_key}, q_first_pos[] = {length - q_len};
  folio::KvSegment segment;
  segment.source = folio::KvSource::kRagged;
  segment.kv_len = kv_len;
  segment.first_pos = first_pos;
  folio::BatchView batch;
  batch.num_requests = 1;
  batch.num_tokens = q_len;
  batch.cu_q = cu_q;
  batch.q_first_pos = q_first_pos;
  batch.segments = {&segment, 1};
  folio::SegmentArgs keys;
  keys.ragged.k = {k.data(), folio::DType::kFloat32, {kv_len[0], config.num_kv_heads, config.head_dim_qk}};
  keys.ragged.v = {v.data(), folio::DType::kFloat32, {kv_len[0], config.num_kv_heads, config.head_dim_v}};
  keys.ragged.indptr = indptr;
  folio::AttentionArgs args;
  args.q = {q.data(), folio::DType::kFloat32, {q_len, config.num_q_heads, config.head_dim_qk}};
  args.segments = {&keys, 1};
  args.sm_scale = features.sm_scale;
  args.logits_soft_cap = features.logits_soft_cap;
  if (!features.sinks.empty()) args.sinks = features.sinks.data();
  if (!features.alibi_slopes.empty()) args.alibi_slopes = features.alibi_slopes.data();
  std::vector<double> exact(static_cast<size_t>(config.head_dim_v));
  for (int32_t t = 0; t < q_len; ++t) {
    for (int32_t h = 0; h < config.num_q_heads; ++h) {
      const double lse = folio::verify::reference_row(config, batch, args, t, h, exact);
      const size_t row =
          (first_row + static_cast<size_t>(t)) * static_cast<size_t>(config.num_q_heads) + static_cast<size_t>(h);
      FUZZ_CHECK(output.lse.empty() || near(output.lse[row], lse));
      for (size_t d = 0; d < exact.size(); ++d) FUZZ_CHECK(near(output.out[row * exact.size() + d], exact[d]));
    }
  }
}

}  // namespace serving
