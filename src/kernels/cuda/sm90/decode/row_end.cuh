#pragma once

#include "kernels/cuda/sm90/common/epilogue.cuh"
#include "kernels/cuda/sm90/decode/scores.cuh"
#include "scheduler/mask_bounds.hpp"

/// How a row of an item ends: a warp joins the math warps' states of it, folds them into the chain's and writes them.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// A lane's components of a row: kRuns runs of kRun neighbours, 32 * kRun apart. The last run may lie beyond the row.
template <int32_t DimV>
struct LaneComponents {
  static constexpr int32_t kRun = run_components(DimV);
  static constexpr int32_t kCount = lane_components(DimV);
  float x[kCount];
};

/// What a chain of items has accumulated before the present one, of one row, in shared memory: local memory, first
/// touched, takes 2 microseconds. By the lanes of the warp that ends the row in every item; touched at their ends only.
template <int32_t DimV>
class RunningRow {
  using Components = LaneComponents<DimV>;

 public:
  /// `running`: [kMaxRows][running_floats].
  __device__ __forceinline__ RunningRow(float* running, int32_t row, int32_t lane)
      : state_(running + row * running_floats(DimV)), mine_(state_ + 4 + Components::kRun * lane), lane_(lane) {}

  __device__ __forceinline__ float max() const { return state_[0]; }
  __device__ __forceinline__ float sum() const { return state_[1]; }
  __device__ __forceinline__ float value(int32_t i) const { return mine_[offset(i)]; }

  __device__ __forceinline__ void store(float max, float sum, const Components& values) const {
    __syncwarp();  // all have read what there was
    if (lane_ == 0) {
      state_[0] = max;
      state_[1] = sum;
    }
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; ++i) mine_[offset(i)] = values.x[i];
  }

 private:
  __device__ __forceinline__ static int32_t offset(int32_t i) {
    return i / Components::kRun * 32 * Components::kRun + i % Components::kRun;
  }

  float* const state_;
  float* const mine_;
  const int32_t lane_;
};

/// Neighbouring floats of shared memory, which begin at a multiple of their size, at once.
template <int32_t Count>
__device__ __forceinline__ void read_run(float* to, const float* from) {
  static_assert(Count == 2 || Count == 4);
  if constexpr (Count == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  } else {
    const float2 two = *reinterpret_cast<const float2*>(from);
    to[0] = two.x;
    to[1] = two.y;
  }
}

/// By a warp: ends row `row` of the item, whose states' values stand in `results` [math_warps][kResultRows][stride].
template <int32_t DimV, typename State>
__device__ __forceinline__ void end_row_of_item(const AttentionParams& params, const State& state,
                                                const ItemContext& context, const float* results, int32_t row,
                                                int32_t lane, float* running) {
  using Components = LaneComponents<DimV>;
  constexpr int32_t kStride = result_stride({DimV, DimV});
  const scheduler::WorkTile& item = context.item;
  const int32_t place = row % kResultRows;
  // Every lane has all warps' maxima and sums, and nothing but the sums waits for what is before it. An empty state's
  // values are zeros.
  constexpr int32_t kWarps = State::kWarps;
  float tops[kWarps];
  float sums[kWarps];
#pragma unroll
  for (int32_t w = 0; w < kWarps; w += 4) {
    read_run<4>(tops + w, state.top[place] + w);
    read_run<4>(sums + w, state.sum[place] + w);
  }
  Components values[kWarps];
#pragma unroll
  for (int32_t w = 0; w < kWarps; ++w) {
    const float* const from = results + (w * kResultRows + place) * kStride + Components::kRun * lane;
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; i += Components::kRun) {
      const int32_t d = i / Components::kRun * 32 * Components::kRun;
      if (DimV % (32 * Components::kRun) != 0 && d + Components::kRun * lane >= DimV) continue;
      read_run<Components::kRun>(values[w].x + i, from + d);
    }
  }
  float max = tops[0];
#pragma unroll
  for (int32_t w = 1; w < kWarps; ++w) max = fmaxf(max, tops[w]);
  float sum = 0.0f;
  Components value{};
#pragma unroll
  for (int32_t w = 0; w < kWarps; ++w) {
    const float grown = tops[w] == max ? 1.0f : ptx::ex2_approx(tops[w] - max);
    const float factor = is_empty(tops[w], sums[w]) ? 0.0f : grown;
    sum = __fmaf_rn(sums[w], factor, sum);
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; ++i) value.x[i] = __fmaf_rn(values[w].x[i], factor, value.x[i]);
  }
#pragma unroll
  for (float& x : value.x) x = __fmul_rn(x, context.v_scale[row]);
  const RunningRow<DimV> before(running, row, lane);
  if ((item.flags & scheduler::kStart) == 0) {
    const Fold factors = fold_factors(before.max(), before.sum(), max, sum);
    sum = fold(factors, before.sum(), sum);
    max = factors.max;
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; ++i) value.x[i] = fold(factors, before.value(i), value.x[i]);
  }
  if ((item.flags & scheduler::kFinish) == 0) return before.store(max, sum, value);
  const auto for_pairs = [&](const auto& write) {
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; i += 2) {
      const int32_t d = Components::kRun * lane + i / Components::kRun * 32 * Components::kRun + i % Components::kRun;
      if (d < DimV) write(d, value.x[i], value.x[i + 1]);
    }
  };
  if (item.partial >= 0) {
    const int32_t partial = item.partial + row;
    if (lane == 0) {
      params.partial_row_max[partial] = max;
      params.partial_row_sum[partial] = sum;
    }
    float* const to = params.partial_acc + int64_t{partial} * params.head_dim_v;
    for_pairs([&](int32_t d, float x, float y) { *reinterpret_cast<float2*>(to + d) = float2{x, y}; });
    return;
  }
  const RowPlace target = row_place(params, item, row);
  const RowEnd end = end_row(params, target.q_head, max, sum);
  if (lane == 0) write_lse(params, target.token, target.q_head, end);
  const int64_t at = target.token * params.out_token_stride + target.q_head * params.out_head_stride;
  for_pairs([&](int32_t d, float x, float y) {
    write_pair(params, at + d, end.empty ? 0.0f : x * end.factor + 0.0f, end.empty ? 0.0f : y * end.factor + 0.0f);
  });
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
