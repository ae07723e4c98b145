#include <algorithm>
#include <cmath>
#include <sstream>

#include "backends/flashinfer/batch_test_util.hpp"
#include "folio/attention.hpp"
#include "folio/reference.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends::testing {
namespace {

constexpr int32_t kSampledRows = 128;

/// Relative error of rounding to nearest: 2^-p for p bits of significand.
double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return 0x1p-8;
    case DType::kFloat16: return 0x1p-11;
    default: return 0x1p-24;
  }
}

/// The batch with its keys and values as float32 rows, one request after the other: what the oracle is asked about, so
/// that pages, tables and slots have no part in what is expected.
class Expectation {
 public:
  Expectation(const BatchFixture& fixture, const std::vector<BatchFixture::History>& history, float sm_scale) {
    const LayerSetup& setup = fixture.setup;
    for (size_t request = 0; request < history.size(); ++request) {
      k_.insert(k_.end(), history[request].k.begin(), history[request].k.end());
      v_.insert(v_.end(), history[request].v.begin(), history[request].v.end());
      indptr_.push_back(indptr_.back() + fixture.seq_lens[request]);
    }
    for (float value : v_) v_magnitude_.push_back(std::abs(value));
    config_.num_q_heads = setup.num_heads;
    config_.num_kv_heads = setup.num_kv_heads;
    config_.head_dim_qk = config_.head_dim_v = setup.head_size;
    config_.mask = setup.mask;
    config_.window_left = setup.sliding_window ? *setup.sliding_window - 1 : -1;
    if (setup.window_both_sides) config_.window_right = config_.window_left;
    lengths_.source = KvSource::kRagged;
    lengths_.kv_len = fixture.seq_lens.data();
    batch_.num_requests = static_cast<int32_t>(history.size());
    batch_.num_tokens = fixture.num_tokens();
    batch_.cu_q = fixture.query_start_loc.data();
    batch_.segments = {&lengths_, 1};
    args_.q = fixture.packed_query();
    args_.sm_scale = sm_scale;
    args_.logits_soft_cap = setup.logits_soft_cap.value_or(0.0f);
    args_.alibi_slopes = setup.alibi ? fixture.alibi_slopes.data() : nullptr;
    args_.sinks = setup.sinks ? fixture.sinks.data() : nullptr;
    args_.q_scale.value = setup.quantize_query ? setup.q_scale : 1.0f;
  }

  /// sum of p * v, or with `magnitudes` of p * |v|.
  void row(int32_t token, int32_t head, bool magnitudes, std::span<double> out) {
    const std::vector<float>& v = magnitudes ? v_magnitude_ : v_;
    const int64_t rows = indptr_.back();
    SegmentArgs segment;
    segment.ragged.k = ConstTensorView(k_.data(), DType::kFloat32, {rows, config_.num_kv_heads, config_.head_dim_qk});
    segment.ragged.v = ConstTensorView(v.data(), DType::kFloat32, {rows, config_.num_kv_heads, config_.head_dim_v});
    segment.ragged.indptr = indptr_.data();
    args_.segments = {&segment, 1};
    verify::reference_row(config_, batch_, args_, token, head, out);
  }

 private:
  std::vector<float> k_, v_, v_magnitude_;
  std::vector<int32_t> indptr_{0};
  AttentionConfig config_;
  KvSegment lengths_;
  BatchView batch_;
  AttentionArgs args_;
};

}  // namespace

double BatchFixture::p_roundoff() const {
  AttentionConfig config;
  config.num_q_heads = setup.num_heads;
  config.num_kv_heads = setup.num_kv_heads;
  config.head_dim_qk = config.head_dim_v = setup.head_size;
  config.page_size = setup.page_size;
  config.q = q_dtype();
  config.kv = cache_dtype();
  config.out = DType::kFloat32;
  return unit_roundoff(prepare(context, config).p_dtype());
}

std::string BatchFixture::wrong_output() const {
  Expectation expectation(*this, history_, sm_scale());
  // The output is rounded to the model's dtype once, and kernels may round every probability to it, or to what they
  // say; the rest is float32: exponentials, sums and logits of at most 2^6 roundings each.
  const double unit = unit_roundoff(setup.model_dtype);
  const double p_unit = std::max(unit, p_roundoff());
  constexpr double kFloat32Work = 0x1p-24 * 64;
  std::vector<double> expected(static_cast<size_t>(setup.head_size));
  std::vector<double> magnitude(expected.size());
  // Of large batches a sample: an odd step meets every head, and every request of more than a few tokens.
  const int32_t num_rows = num_tokens() * setup.num_heads;
  const int32_t step = (num_rows / kSampledRows) | 1;
  for (int32_t row = 0; row < num_rows; row += step) {
    expectation.row(row / setup.num_heads, row % setup.num_heads, false, expected);
    expectation.row(row / setup.num_heads, row % setup.num_heads, true, magnitude);
    for (size_t d = 0; d < expected.size(); ++d) {
      const double allowed = unit * std::abs(expected[d]) + (p_unit + kFloat32Work) * magnitude[d];
      const float actual =
          load_as_float(out_memory.data(), setup.model_dtype, int64_t{row} * setup.head_size + static_cast<int64_t>(d));
      if (!(std::abs(actual - expected[d]) <= allowed)) {  // NaN is wrong too
        std::ostringstream text;
        text << "token " << row / setup.num_heads << ", head " << row % setup.num_heads << ", component " << d << ": "
             << actual << " instead of " << expected[d] << ", allowed " << allowed;
        return text.str();
      }
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
        const float k_scale = setup.k_scale * head_scale(i / setup.head_size);
        const float v_scale = setup.v_scale * head_scale(i / setup.head_size);
        if (loaded(slot, 0, i) * k_scale != history_[request].k[at] ||
            loaded(slot, 1, i) * v_scale != history_[request].v[at]) {
          std::ostringstream text;
          text << "request " << request << ", position " << position << ", element " << i << " holds "
               << loaded(slot, 0, i) << " and " << loaded(slot, 1, i) << " instead of "
               << history_[request].k[at] / k_scale << " and " << history_[request].v[at] / v_scale;
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

}  // namespace folio::inline v0::backends::testing
