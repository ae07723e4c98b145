#pragma once

#include "kernels/cuda/sm90/decode/scores.cuh"
#include "planner/partition_rule.hpp"

/// How a row of an item ends: a warp joins the math warps' states of it, folds them into the chain's and writes them.
namespace folio::inline v0::kernels::cuda::sm90 {

/// A lane's components of a row: kRuns runs of kRun neighbours, 32 * kRun apart. The last run may lie beyond the row.
template <int32_t DimV>
struct LaneComponents {
  static constexpr int32_t kRun = run_components(DimV);
  static constexpr int32_t kCount = lane_components(DimV);
  float x[kCount];
};

/// What a chain of items has accumulated before the present one, of one row: a lane's place in shared memory. Touched
/// at the ends of items only.
template <int32_t DimV>
class RunningRow {
 public:
  static constexpr int32_t kCount = lane_components(DimV);
  /// `running`: of all rows. `part`: of the warp's rows.
  __device__ __forceinline__ RunningRow(float* running, int32_t part, int32_t warps, int32_t lane)
      : place_(running +
               (static_cast<int32_t>(threadIdx.x) / 32 * (kMaxRows / warps) + part) * 32 * running_floats(DimV) +
               lane) {}
  __device__ __forceinline__ float& max() const { return place_[0]; }
  __device__ __forceinline__ float& sum() const { return place_[32]; }
  __device__ __forceinline__ float& value(int32_t i) const { return place_[32 * (2 + i)]; }

 private:
  float* place_;
};

/// For states in local memory: the address is hidden from the compiler.
template <typename Running>
__device__ __forceinline__ Running& hidden(Running& state) {
  Running* address = &state;
  asm volatile("" : "+l"(address)::"memory");
  return *address;
}

/// Two neighbouring components of a row that ends here, in any type and at any address. Called: one of its many ways is
/// taken, and instructions that are jumped over have to be fetched all the same.
__device__ FOLIO_CALLED inline void write_any_two(const AttentionParams& params, int64_t at, float x, float y) {
  if (is_fp8(params.out_dtype)) {
    auto* const to = static_cast<uint8_t*>(params.out) + at;
    const float scale = scale_at(params.out_scale, 0, 0);
    const bool e4m3 = params.out_dtype == DType::kFloat8E4M3;
    to[0] = e4m3 ? float_to_fp8_e4m3(x / scale) : float_to_fp8_e5m2(x / scale);
    to[1] = e4m3 ? float_to_fp8_e4m3(y / scale) : float_to_fp8_e5m2(y / scale);
    return;
  }
  if (params.out_dtype == DType::kFloat32) {
    auto* const to = static_cast<float*>(params.out) + at;
    to[0] = x;
    to[1] = y;
    return;
  }
  auto* const to = static_cast<uint16_t*>(params.out) + at;
  const uint32_t pair =
      params.out_dtype == DType::kFloat16 ? ptx::pack_two<__half>(x, y) : ptx::pack_two<__nv_bfloat16>(x, y);
  to[0] = static_cast<uint16_t>(pair);
  to[1] = static_cast<uint16_t>(pair >> 16);
}

/// The same, of 16-bit pairs without a call.
__device__ __forceinline__ void write_two(const AttentionParams& params, int64_t at, float x, float y) {
  const bool is_half = params.out_dtype == DType::kFloat16;
  if (!params.out_pairs || (!is_half && params.out_dtype != DType::kBFloat16)) return write_any_two(params, at, x, y);
  const uint32_t pair = is_half ? ptx::pack_two<__half>(x, y) : ptx::pack_two<__nv_bfloat16>(x, y);
  *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(params.out) + at) = pair;
}

/// By a warp: ends row `row` of the item, whose states' values stand in `results` [math_warps][kResultRows][stride].
template <int32_t DimV, typename State>
__device__ __forceinline__ void end_row_of_item(const AttentionParams& params, const State& state,
                                                const ItemContext& context, const float* results, int32_t row,
                                                int32_t lane, float* running) {
  using Components = LaneComponents<DimV>;
  constexpr int32_t kStride = result_stride({DimV, DimV});
  const planner::WorkItem& item = context.item;
  const int32_t place = row % kResultRows;
  const float top = lane < State::kWarps ? state.top[lane][place] : -INFINITY;
  const float lane_sum = lane < State::kWarps ? state.sum[lane][place] : 0.0f;
  float max = top;
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, step));
  const float mine = is_empty(top, lane_sum) ? -1.0f : (top == max ? 1.0f : exp2f(top - max));
  float sum = 0.0f;
  Components value{};
#pragma unroll 2
  for (int32_t w = 0; w < State::kWarps; ++w) {
    const float factor = __shfl_sync(kAllLanes, mine, w);
    const float other = __shfl_sync(kAllLanes, lane_sum, w);
    if (factor < 0.0f) continue;
    sum = __fmaf_rn(other, factor, sum);
    const float* const from = results + (w * kResultRows + place) * kStride + Components::kRun * lane;
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; ++i) {
      const int32_t d = i / Components::kRun * 32 * Components::kRun + i % Components::kRun;
      if (DimV % (32 * Components::kRun) != 0 && d + Components::kRun * lane >= DimV) continue;
      value.x[i] = __fmaf_rn(from[d], factor, value.x[i]);
    }
  }
#pragma unroll
  for (float& x : value.x) x = __fmul_rn(x, context.v_scale[row]);
  const RunningRow<DimV> before(running, row / State::kWarps, State::kWarps, lane);
  if ((item.flags & planner::kStart) == 0) {
    const Fold factors = fold_factors(before.max(), before.sum(), max, sum);
    sum = fold(factors, before.sum(), sum);
    max = factors.max;
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; ++i) value.x[i] = fold(factors, before.value(i), value.x[i]);
  }
  if ((item.flags & planner::kFinish) == 0) {
    before.max() = max;
    before.sum() = sum;
#pragma unroll
    for (int32_t i = 0; i < Components::kCount; ++i) before.value(i) = value.x[i];
    return;
  }
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
      params.partial_max[partial] = max;
      params.partial_sum[partial] = sum;
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
    write_two(params, at + d, end.empty ? 0.0f : x * end.factor + 0.0f, end.empty ? 0.0f : y * end.factor + 0.0f);
  });
}

}  // namespace folio::inline v0::kernels::cuda::sm90
