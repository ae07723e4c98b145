#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "backends/flashinfer/batch_fixture.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::backends::testing {
namespace {

/// Relative error of rounding to nearest: 2^-p for p bits of significand.
double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return 0x1p-8;
    case DType::kFloat16: return 0x1p-11;
    default: return 0x1p-24;
  }
}

}  // namespace

std::string BatchFixture::wrong_row(size_t request, int32_t query_token, int32_t head) const {
  const int32_t head_size = setup.head_size;
  const int32_t query_len = query_start_loc[request + 1] - query_start_loc[request];
  const int32_t position = seq_lens[request] - query_len + query_token;
  const int32_t first_key = setup.sliding_window ? std::max(0, position - *setup.sliding_window + 1) : 0;
  const int32_t kv_head = head / (setup.num_heads / setup.num_kv_heads);
  const int64_t row = (int64_t{query_start_loc[request]} + query_token) * setup.num_heads + head;
  const History& history = history_[request];
  const auto kv_at = [&](int32_t at) { return static_cast<size_t>((at * setup.num_kv_heads + kv_head) * head_size); };

  std::vector<double> q(static_cast<size_t>(head_size));
  for (int32_t d = 0; d < head_size; ++d) {
    q[static_cast<size_t>(d)] =
        load_as_float(q_memory.data(), q_dtype(), row * head_size + d) * (setup.quantize_query ? setup.q_scale : 1.0f);
  }
  std::vector<double> logits;
  double most = setup.sinks ? sinks[static_cast<size_t>(head)] : -std::numeric_limits<double>::infinity();
  for (int32_t at = first_key; at <= position; ++at) {
    double logit = 0.0;
    for (int32_t d = 0; d < head_size; ++d) {
      logit += q[static_cast<size_t>(d)] * history.k[kv_at(at) + static_cast<size_t>(d)];
    }
    logit *= sm_scale();
    if (setup.logits_soft_cap) logit = *setup.logits_soft_cap * std::tanh(logit / *setup.logits_soft_cap);
    if (setup.alibi) logit -= double{alibi_slopes[static_cast<size_t>(head)]} * (position - at);
    logits.push_back(logit);
    most = std::max(most, logit);
  }
  double denominator = setup.sinks ? std::exp(sinks[static_cast<size_t>(head)] - most) : 0.0;
  std::vector<double> sum(static_cast<size_t>(head_size));
  std::vector<double> sum_of_magnitudes(sum.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp(logits[i] - most);
    denominator += weight;
    for (size_t d = 0; d < sum.size(); ++d) {
      const double v = history.v[kv_at(first_key + static_cast<int32_t>(i)) + d];
      sum[d] += weight * v;
      sum_of_magnitudes[d] += weight * std::abs(v);
    }
  }
  // The output is rounded to the model's dtype once, and kernels may round every probability to it; the rest is
  // float32: exponentials, sums and logits of at most 2^6 roundings each.
  const double unit = unit_roundoff(setup.model_dtype);
  constexpr double kFloat32Work = 0x1p-24 * 64;
  for (size_t d = 0; d < sum.size(); ++d) {
    const double expected = sum[d] / denominator;
    const double allowed = unit * std::abs(expected) + (unit + kFloat32Work) * sum_of_magnitudes[d] / denominator;
    const float actual = load_as_float(out_memory.data(), setup.model_dtype, row * head_size + static_cast<int64_t>(d));
    if (!(std::abs(actual - expected) <= allowed)) {  // NaN is wrong too
      std::ostringstream text;
      text << "request " << request << ", token " << query_token << ", head " << head << ", component " << d << ": "
           << actual << " instead of " << expected << ", allowed " << allowed;
      return text.str();
    }
  }
  return {};
}

std::string BatchFixture::wrong_output() const {
  for (size_t request = 0; request < seq_lens.size(); ++request) {
    const int32_t query_len = query_start_loc[request + 1] - query_start_loc[request];
    for (int32_t i = 0; i < query_len * setup.num_heads; ++i) {
      std::string wrong = wrong_row(request, i / setup.num_heads, i % setup.num_heads);
      if (!wrong.empty()) return wrong;
    }
  }
  const auto row_bytes = static_cast<size_t>(setup.num_heads * setup.head_size * size_of(setup.model_dtype));
  const auto padding = out_memory.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(num_tokens()) * row_bytes);
  const bool untouched = std::all_of(padding, out_memory.end(), [](std::byte byte) { return byte == kUnwritten; });
  return untouched ? "" : "padding rows were written";
}

std::string BatchFixture::wrong_cache() const {
  std::vector<bool> owned(static_cast<size_t>(num_pages_ * setup.page_size));
  const auto loaded = [&](int64_t slot, int32_t half, int32_t i) {
    return load_as_float(cache_memory.data(), cache_dtype(),
                         cache_index(slot, half, i / setup.head_size, i % setup.head_size));
  };
  const int32_t per_token = setup.num_kv_heads * setup.head_size;
  for (size_t request = 0; request < seq_lens.size(); ++request) {
    for (int32_t position = 0; position < seq_lens[request]; ++position) {
      const int64_t slot = slot_of(request, position);
      owned[static_cast<size_t>(slot)] = true;
      for (int32_t i = 0; i < per_token; ++i) {
        const auto at = static_cast<size_t>(position * per_token + i);
        if (loaded(slot, 0, i) * setup.k_scale != history_[request].k[at] ||
            loaded(slot, 1, i) * setup.v_scale != history_[request].v[at]) {
          std::ostringstream text;
          text << "request " << request << ", position " << position << ", element " << i << " holds "
               << loaded(slot, 0, i) << " and " << loaded(slot, 1, i) << " instead of "
               << history_[request].k[at] / setup.k_scale << " and " << history_[request].v[at] / setup.v_scale;
          return text.str();
        }
      }
    }
  }
  for (size_t slot = 0; slot < owned.size(); ++slot) {
    for (int32_t i = 0; i < per_token && !owned[slot]; ++i) {
      const auto at = static_cast<int64_t>(slot);
      if (!std::isnan(loaded(at, 0, i)) || !std::isnan(loaded(at, 1, i))) {
        return "slot " + std::to_string(slot) + ", which nobody owns, was written";
      }
    }
  }
  return {};
}

}  // namespace folio::backends::testing
