#pragma once

#include "kernels/cuda/common/kv_cache_views.cuh"
#include "kernels/cuda/common/merge_states/merge_states.hpp"
#include "kernels/cuda/common/numeric_conversion.cuh"

/// A row's merge by a group of lanes, whatever the number of states.
namespace folio::inline v0::kernels::cuda {

/// A row's states, read by a group of lanes of one warp: lane i holds the states i, i + kLanes and so on.
template <int32_t kLanes>
class MergedRow {
 public:
  __device__ MergedRow(const CombineParams& params, int64_t token, int32_t head, int32_t lane)
      : params_(params),
        token_(token),
        head_(head),
        lane_(lane),
        num_states_(params.sources[0].num_states + params.sources[1].num_states) {
    bool nan = false;
    for (int64_t s = lane; s < num_states_; s += kLanes) {
      const double lse = lse_of(s);
      if (isinf(lse)) continue;
      nan = nan || isnan(lse);
      top_ = fmax(top_, lse);
    }
#pragma unroll
    for (int32_t step = kLanes / 2; step > 0; step /= 2) {
      top_ = fmax(top_, __shfl_xor_sync(0xffffffffu, top_, step));
      nan = __shfl_xor_sync(0xffffffffu, static_cast<int32_t>(nan), step) != 0 || nan;
    }
    if (nan) top_ = nan_value();
    for (int64_t first = 0; first < num_states_; first += kLanes) {
      const float mine = relative(first + lane);
      const auto count = static_cast<int32_t>(min(int64_t{kLanes}, num_states_ - first));
      for (int32_t i = 0; i < count; ++i) {
        const float other = __shfl_sync(0xffffffffu, mine, i, kLanes);
        if (other != kEmpty) sum_ = __fadd_rn(sum_, other);
      }
      if (first == 0) first_relative_ = mine;
    }
    inverse_ = __fdiv_rn(1.0f, sum_);
  }

  __device__ bool empty() const {
    return top_ == -INFINITY;
  }
  /// In natural units; -inf where all states are empty.
  __device__ double lse() const {
    return empty() ? top_ : top_ + static_cast<double>(static_cast<float>(log(static_cast<double>(sum_))));
  }

  /// acc = sum over states of weight * elements from `d` on. All lanes of the group call; `active` ones have elements.
  template <int32_t kElements>
  __device__ void accumulate(int32_t d, bool active, float* acc) const {
    bool first_state = true;
#pragma unroll
    for (int32_t i = 0; i < kElements; ++i) acc[i] = 0.0f;
    for (int64_t first = 0; first < num_states_; first += kLanes) {
      const float mine = first == 0 ? first_relative_ : relative(first + lane_);
      const auto count = static_cast<int32_t>(min(int64_t{kLanes}, num_states_ - first));
#pragma unroll 2
      for (int32_t i = 0; i < count; ++i) {
        const float other = __shfl_sync(0xffffffffu, mine, i, kLanes);
        float values[kElements];
        if (active) load(first + i, d, values);
        if (other == kEmpty || !active) continue;
        const float weight = __fmul_rn(other, inverse_);
#pragma unroll
        for (int32_t e = 0; e < kElements; ++e) {
          const float part = __fmul_rn(weight, values[e]);
          acc[e] = first_state ? part : __fadd_rn(acc[e], part);  // no sum from 0, which would lose a -0
        }
        first_state = false;
      }
    }
  }

 private:
  static constexpr float kEmpty = -1.0f;  ///< instead of a weight

  __device__ static double nan_value() {
    return __longlong_as_double(0x7ff8000000000000);
  }
  __device__ const CombineSource& source_of(int64_t& state) const {
    if (state < params_.sources[0].num_states) return params_.sources[0];
    state -= params_.sources[0].num_states;
    return params_.sources[1];
  }
  /// In natural units.
  __device__ double lse_of(int64_t state) const {
    const CombineSource& source = source_of(state);
    const double lse =
        source.lse[token_ * source.lse_token_stride + head_ * source.lse_head_stride + state * source.lse_state_stride];
    return source.base == LseBase::k2 ? lse * kLn2 : lse;
  }
  /// e^(lse - top), kEmpty for an empty state or none.
  __device__ float relative(int64_t state) const {
    if (state >= num_states_) return kEmpty;
    const double lse = lse_of(state);
    if (isinf(lse)) return kEmpty;
    return static_cast<float>(exp(static_cast<double>(static_cast<float>(lse - top_))));
  }
  template <int32_t kElements>
  __device__ void load(int64_t state, int32_t d, float (&values)[kElements]) const {
    const CombineSource& source = source_of(state);
    const int64_t at = token_ * source.token_stride + head_ * source.head_stride + state * source.state_stride + d;
    load_floats<kElements>(element_at(static_cast<const std::byte*>(source.out), source.dtype, at), source.dtype,
                           values);
  }

  static constexpr double kLn2 = 0.693147180559945309417;

  const CombineParams& params_;
  const int64_t token_;
  const int32_t head_;
  const int32_t lane_;
  const int64_t num_states_;
  double top_ = -INFINITY;
  float sum_ = 0.0f;
  float inverse_ = 0.0f;
  float first_relative_ = kEmpty;
};

/// Merges row `mine` and writes it, where it is below `rows`: kLanes lanes a row, each kElements neighbours at a time.
/// All lanes of the warp call; those of other rows keep them company in shuffles.
template <int32_t kLanes, int32_t kElements>
__device__ void merge_row(const CombineParams& params, int64_t mine, int64_t rows) {
  constexpr double kLog2E = 1.44269504088896340736;
  const int32_t lane = threadIdx.x % kLanes;
  const int64_t row = min(mine, rows - 1);
  const int64_t token = row / params.num_heads;
  const auto head = static_cast<int32_t>(row % params.num_heads);
  const bool writes = mine < rows && (params.mask == nullptr || params.mask[token] != 0);
  const MergedRow<kLanes> states(params, token, head, lane);
  const int64_t to = token * params.out_token_stride + head * params.out_head_stride;
  const float scale = is_fp8(params.out_dtype) ? scale_at(params.out_scale, 0, 0) : 1.0f;
  for (int32_t begin = 0; begin < params.head_dim; begin += kLanes * kElements) {
    const int32_t d = begin + lane * kElements;
    const bool active = writes && d < params.head_dim;
    float acc[kElements];
    states.template accumulate<kElements>(d, active, acc);
    if (!active) continue;
    if (is_fp8(params.out_dtype)) {
      for (float& value : acc) value /= scale;
    }
    store_floats<kElements>(element_at(static_cast<std::byte*>(params.out), params.out_dtype, to + d), params.out_dtype,
                            acc);
  }
  __syncwarp();  // an LSE may take the place of one that the row's lanes have read
  if (lane == 0 && writes && params.lse.data != nullptr) {
    const double lse = states.lse();
    params.lse.data[token * params.lse.token_stride + head * params.lse.head_stride] =
        static_cast<float>(params.lse.base == LseBase::k2 ? lse * kLog2E : lse);
  }
}

}  // namespace folio::inline v0::kernels::cuda
