#include "kernels/cpu/generic/combine/combine.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

#include "kernels/cpu/generic/combine/row_convert.hpp"

namespace folio::inline v0::kernels::generic {

namespace {

constexpr int32_t kChunk = 256;  // elements of a row held at a time; two such rows stay in the L1

const std::byte* at(const void* data, DType dtype, int64_t offset) noexcept {
  return static_cast<const std::byte*>(data) + offset * size_of(dtype);
}
std::byte* at(void* data, DType dtype, int64_t offset) noexcept {
  return static_cast<std::byte*>(data) + offset * size_of(dtype);
}

/// One row of the batch: its states and their scales, exp(lse - max_lse) / sum.
class Row {
 public:
  Row(const CombineParams& params, int64_t token, int64_t head) noexcept : params_(params), token_(token), head_(head) {
    for_each_state([this](const CombineSource&, int64_t, double lse) {
      if (lse > max_lse_ || std::isnan(lse)) max_lse_ = lse;  // nothing is greater than a NaN: it stays
    });
    for_each_state([this](const CombineSource&, int64_t, double lse) { sum_ += scale_of(lse); });
  }

  bool empty() const noexcept { return max_lse_ == -std::numeric_limits<double>::infinity(); }

  /// In natural units; -inf where all states are empty.
  double lse() const noexcept { return empty() ? max_lse_ : max_lse_ + static_cast<double>(std::log(sum_)); }

  /// acc[i] = sum over states of scale * element first + i.
  void accumulate(int32_t first, int32_t n, float* acc) const noexcept {
    const float inverse = 1.0f / sum_;
    bool first_state = true;
    for_each_state([&](const CombineSource& source, int64_t state, double lse) {
      const float scale = scale_of(lse) * inverse;
      const int64_t offset =
          state * source.state_stride + token_ * source.token_stride + head_ * source.head_stride + first;
      alignas(64) float values[kChunk];
      load_row(at(source.out, source.dtype, offset), source.dtype, n, values);
      if (first_state) {  // no sum from 0, which would turn a single state's -0 into 0
        for (int32_t i = 0; i < n; ++i) acc[i] = scale * values[i];
        first_state = false;
      } else {
        for (int32_t i = 0; i < n; ++i) acc[i] += scale * values[i];
      }
    });
  }

 private:
  float scale_of(double lse) const noexcept { return std::exp(static_cast<float>(lse - max_lse_)); }

  /// Calls visit(source, state, lse in natural units) for the states that are not empty.
  template <typename Visit>
  void for_each_state(const Visit& visit) const noexcept {
    for (const CombineSource& source : params_.sources) {
      const float* lse = source.lse + token_ * source.lse_token_stride + head_ * source.lse_head_stride;
      for (int64_t state = 0; state < source.num_states; ++state) {
        const auto value = static_cast<double>(lse[state * source.lse_state_stride]);
        if (std::isinf(value)) continue;
        visit(source, state, source.base == LseBase::k2 ? value * std::numbers::ln2 : value);
      }
    }
  }

  const CombineParams& params_;
  int64_t token_;
  int64_t head_;
  double max_lse_ = -std::numeric_limits<double>::infinity();
  float sum_ = 0.0f;
};

void combine_row(const CombineParams& params, int64_t token, int64_t head) noexcept {
  const Row row(params, token, head);
  const int64_t offset = token * params.out_token_stride + head * params.out_head_stride;
  alignas(64) float acc[kChunk];
  for (int32_t first = 0; first < params.head_dim; first += kChunk) {
    const int32_t n = std::min(kChunk, params.head_dim - first);
    if (row.empty()) {
      std::fill_n(acc, n, 0.0f);
    } else {
      row.accumulate(first, n, acc);
    }
    store_row(acc, params.out_scale, params.out_dtype, n, at(params.out, params.out_dtype, offset + first));
  }
  if (params.lse.data != nullptr) {
    const double lse = row.lse();
    params.lse.data[token * params.lse.token_stride + head * params.lse.head_stride] =
        static_cast<float>(params.lse.base == LseBase::k2 ? lse * std::numbers::log2e : lse);
  }
}

}  // namespace

void combine_rows(const CombineParams& params, int64_t begin, int64_t end) noexcept {
  for (int64_t r = begin; r < end; ++r) {
    const int64_t token = r / params.num_heads;
    if (params.mask != nullptr && params.mask[token] == 0) continue;
    combine_row(params, token, r % params.num_heads);
  }
}

}  // namespace folio::inline v0::kernels::generic
