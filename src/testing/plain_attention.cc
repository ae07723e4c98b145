#include "testing/plain_attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "testing/nested_sum.hpp"
#include "testing/rotation.hpp"

namespace folio::inline v0::verify {
namespace {

/// One key of a request, wherever it comes from.
struct Key {
  const KvRowModel* row;
  const SegmentModel* segment;
  int32_t token;     ///< within the row
  int32_t position;  ///< global
};

std::vector<Key> keys_of(const Problem& problem, size_t request) {
  std::vector<Key> keys;
  for (const SegmentModel& segment : problem.segments) {
    const int32_t index = segment.row_of_request[request];
    if (index < 0) continue;
    const KvRowModel& row = segment.rows[static_cast<size_t>(index)];
    for (int32_t j = 0; j < row.kv_len; ++j) keys.push_back({&row, &segment, j, segment.position(row, j)});
  }
  return keys;
}

/// Whether query `i` of the request sees its key number `j`.
bool sees(const Problem& problem, const RequestModel& request, int32_t i, const std::vector<Key>& keys, size_t j) {
  const Key& key = keys[j];
  if (key.segment->mask == SegmentMask::kAllVisible) return true;
  const int64_t q_pos = int64_t{request.q_first_pos} + i;
  const int64_t distance = q_pos - key.position;  // positive: the key lies before the query
  if (problem.config.window_left >= 0 && distance > problem.config.window_left) return false;
  if (problem.config.window_right >= 0 && -distance > problem.config.window_right) return false;
  if (problem.config.mask == MaskKind::kCausal) return distance >= 0;
  if (problem.config.mask != MaskKind::kCustom) return true;
  const int64_t column = static_cast<int64_t>(j) - (static_cast<int64_t>(keys.size()) - request.mask_columns);
  return column < 0 || request.mask[static_cast<size_t>(i * request.mask_columns + column)] != 0;
}

template <typename Real>
class PlainRow {
 public:
  PlainRow(const Problem& problem, size_t request, Rotation<Real>& rotation)
      : problem_(problem), request_(request), keys_(keys_of(problem, request)), rotation_(rotation) {}

  void run(int32_t token, int32_t head, AttentionResult<Real>& result) {
    const AttentionConfig& config = problem_.config;
    const int32_t kv_head = head / (config.num_q_heads / config.num_kv_heads);
    const auto r = static_cast<int32_t>(request_);
    const RequestModel& request = problem_.requests[request_];
    const auto dim_v = static_cast<size_t>(config.head_dim_v);
    read(request.q.data() + (int64_t{token} * config.num_q_heads + head) * config.head_dim_qk,
         int64_t{request.q_first_pos} + token, q_);
    const Real scale = (problem_.sm_scale != 0.0f ? Real(problem_.sm_scale) : 1 / std::sqrt(Real(config.head_dim_qk))) *
                       Real(problem_.q_scale.at(r, kv_head));

    constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
    const Real sink = problem_.sinks.empty() ? -kInfinity : Real(problem_.sinks[static_cast<size_t>(head)]);
    Real largest = sink;
    visible_.clear();
    logits_.clear();
    for (size_t j = 0; j < keys_.size(); ++j) {
      if (!sees(problem_, request, token, keys_, j)) continue;
      const Key& key = keys_[j];
      read(key.row->k.data() + (int64_t{key.token} * config.num_kv_heads + kv_head) * config.head_dim_qk, key.position,
           k_);
      Real dot = 0;
      Real terms = 0;
      Real steps = 0;
      Real largest_of_step = 0;
      for (size_t d = 0; d < q_.size(); ++d) {
        const Real product = q_[d] * k_[d];
        if (d % 32 == 0) {
          steps += largest_of_step;
          largest_of_step = std::abs(dot);
        }
        largest_of_step = std::max(largest_of_step, std::abs(product));
        dot += product;
        terms += std::abs(product);
      }
      const Real k_scale = scale * Real(key.segment->k_scale.at(r, kv_head));
      Real logit = dot * k_scale;
      result.largest_terms = std::max(result.largest_terms, terms * k_scale);
      result.largest_steps = std::max(result.largest_steps, (steps + largest_of_step) * std::abs(k_scale));
      result.largest_logit = std::max(result.largest_logit, std::abs(logit));
      const Real cap = problem_.logits_soft_cap;
      if (cap > 0) logit = cap * std::tanh(logit / cap);
      if (!problem_.alibi_slopes.empty()) {
        const int64_t distance = std::abs(int64_t{request.q_first_pos} + token - key.position);
        logit -= Real(problem_.alibi_slopes[static_cast<size_t>(head)]) * static_cast<Real>(distance);
        result.largest_logit = std::max(result.largest_logit, std::abs(logit));
      }
      visible_.push_back(j);
      logits_.push_back(logit);
      largest = std::max(largest, logit);
    }

    sums_.reset(2 * dim_v + 1);  // of p v, of |p v|, of p
    for (size_t i = 0; i < visible_.size(); ++i) {
      const Key& key = keys_[visible_[i]];
      const Real weight = std::exp(logits_[i] - largest);
      const float* v = key.row->v.data() + (int64_t{key.token} * config.num_kv_heads + kv_head) * config.head_dim_v;
      const Real v_scale = Real(key.segment->v_scale.at(r, kv_head));
      const Real scaled = weight * v_scale;
      const std::span<Real> sums = sums_.next_term();
      for (size_t d = 0; d < dim_v; ++d) {
        result.largest_value = std::max(result.largest_value, std::abs(v_scale * Real(v[d])));
        sums[d] += scaled * Real(v[d]);
        sums[dim_v + d] += std::abs(scaled * Real(v[d]));
      }
      sums[2 * dim_v] += weight;
    }
    const Real denominator = (sink == -kInfinity ? Real(0) : std::exp(sink - largest)) + sums_.total(2 * dim_v);
    const bool empty = visible_.empty();
    Real most = 0;
    for (size_t d = 0; d < dim_v; ++d) {
      result.out.push_back(empty ? Real(0) : sums_.total(d) / denominator);
      most = std::max(most, sums_.total(dim_v + d));
    }
    result.weight.push_back(empty ? Real(0) : most / denominator);
    result.lse.push_back(denominator == 0 ? -kInfinity : largest + std::log(denominator));
  }

 private:
  void read(const float* stored, int64_t position, std::vector<Real>& vector) const {
    vector.assign(stored, stored + problem_.config.head_dim_qk);
    if (problem_.config.features.has(Feature::kRopeLlama)) rotation_.rotate(position, vector);
  }

  const Problem& problem_;
  size_t request_;
  std::vector<Key> keys_;
  Rotation<Real>& rotation_;
  std::vector<Real> q_, k_;
  std::vector<size_t> visible_;
  std::vector<Real> logits_;
  NestedSum<Real> sums_;
};

template <typename Real>
AttentionResult<Real> attention_of(const Problem& problem) {
  AttentionResult<Real> result;
  Rotation<Real> rotation(problem.rope, problem.config.head_dim_qk);
  for (size_t r = 0; r < problem.requests.size(); ++r) {
    PlainRow<Real> row(problem, r, rotation);
    result.most_keys = std::max(result.most_keys, problem.num_keys(r));
    for (int32_t token = 0; token < problem.requests[r].q_len; ++token) {
      for (int32_t head = 0; head < problem.config.num_q_heads; ++head) row.run(token, head, result);
    }
  }
  return result;
}

}  // namespace

AttentionResult<float> plain_attention(const Problem& problem) {
  return attention_of<float>(problem);
}
AttentionResult<double> plain_attention_double(const Problem& problem) {
  return attention_of<double>(problem);
}

}  // namespace folio::inline v0::verify
