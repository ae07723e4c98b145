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

/// Number of the chunk that has a position.
int64_t chunk_of(const Problem& problem, const RequestModel& request, int64_t position) {
  const int64_t start = problem.config.features.has(Feature::kKvStart) ? request.kv_start : 0;
  return static_cast<int64_t>(
      std::floor(static_cast<double>(position - start) / static_cast<double>(problem.config.attention_chunk)));
}

/// Whether query `i` of the request sees a key at `position` by its mask or by its span, apart from a custom mask's
/// bits.
bool sees_position(const Problem& problem, const RequestModel& request, int32_t i, int64_t position) {
  const AttentionConfig& config = problem.config;
  const int64_t q_pos = int64_t{request.q_first_pos} + i;
  if (config.features.has(Feature::kKvStart) && position < request.kv_start) return false;
  if (config.attention_chunk > 0 && chunk_of(problem, request, position) != chunk_of(problem, request, q_pos)) {
    return false;
  }
  const int64_t distance = q_pos - position;  // positive: the key lies before the query
  if (config.window_right >= 0 && -distance > config.window_right) return false;
  if (config.features.has(Feature::kSpans)) {
    const SpanModel& span = request.spans[static_cast<size_t>(i)];
    const bool near = config.span_window_left < 0 || distance <= config.span_window_left;
    if (near && position >= span.begin && position < span.end) return true;
  }
  if (config.window_left >= 0 && distance > config.window_left) return false;
  const bool lifted = config.features.has(Feature::kRequestCausal) && !request.causal;
  return config.mask != MaskKind::kCausal || lifted || distance >= 0;
}

/// Positions of which all keys between are visible: [first, last].
struct Hull {
  int64_t first = std::numeric_limits<int64_t>::max();
  int64_t last = std::numeric_limits<int64_t>::min();
  void add(int64_t position) {
    first = std::min(first, position);
    last = std::max(last, position);
  }
};

/// The visible positions of query `i`, found one by one: as far as the request's keys and everything that moves its
/// mask.
Hull hull_of(const Problem& problem, const RequestModel& request, int32_t i, const std::vector<Key>& keys) {
  Hull looked_at;
  for (const Key& key : keys) looked_at.add(key.position);
  looked_at.add(int64_t{request.q_first_pos} + i);
  looked_at.add(request.kv_start);
  if (!request.spans.empty()) {
    looked_at.add(request.spans[static_cast<size_t>(i)].begin);
    looked_at.add(request.spans[static_cast<size_t>(i)].end);
  }
  Hull hull;
  for (int64_t position = looked_at.first - 1; position <= looked_at.last + 1; ++position) {
    if (sees_position(problem, request, i, position)) hull.add(position);
  }
  return hull;
}

/// Which of its keys query `i` of the request sees.
std::vector<size_t> seen_by(const Problem& problem, const RequestModel& request, int32_t i,
                            const std::vector<Key>& keys) {
  const bool spans = problem.config.features.has(Feature::kSpans);
  const Hull hull = spans ? hull_of(problem, request, i, keys) : Hull{};
  std::vector<size_t> seen;
  for (size_t j = 0; j < keys.size(); ++j) {
    const Key& key = keys[j];
    const int64_t column = static_cast<int64_t>(j) - (static_cast<int64_t>(keys.size()) - request.mask_columns);
    const bool masked = problem.config.mask == MaskKind::kCustom && column >= 0 &&
                        request.mask[static_cast<size_t>(i * request.mask_columns + column)] == 0;
    const bool visible = spans ? key.position >= hull.first && key.position <= hull.last
                               : sees_position(problem, request, i, key.position) && !masked;
    if (key.segment->mask == SegmentMask::kAllVisible || visible) seen.push_back(j);
  }
  return seen;
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
    if (token != token_) {  // all heads see the same
      visible_ = seen_by(problem_, request, token, keys_);
      token_ = token;
    }
    logits_.clear();
    for (const size_t j : visible_) {
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
  int32_t token_ = -1;  ///< whose keys are in visible_
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
