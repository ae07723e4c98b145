#pragma once

#include "kernels/cuda/sm90/common/epilogue.cuh"
#include "kernels/cuda/sm90/mla/mask.cuh"
#include "kernels/cuda/sm90/mla/softmax.cuh"

/// Scores, masks and values of a lane where MMAs have their operands swapped: tokens are rows of GEMM0, packed rows its
/// columns.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// What a lane has, with g = lane / 4 and t = lane % 4. Score 4j + i is that of row 8j + 2t + i % 2 and of token
/// i / 2 of the lane's two, which are eight apart. Row number r of the lane is 8 (r / 2) + 2t + r % 2.
template <typename Traits>
struct SwapAbLane {
  static constexpr int32_t kRows = Traits::kBlockM / 4;    ///< of a lane
  static constexpr int32_t kScores = Traits::kBlockM / 2;  ///< of a lane in a KV tile
  static constexpr Fp8 kFp8 = Traits::kFp8;

  int32_t warp;
  int32_t lane;
  __device__ __forceinline__ explicit SwapAbLane(int32_t thread)
      : warp(thread % kWarpgroupThreads / 32), lane(thread % 32) {}
  __device__ __forceinline__ int32_t g() const { return lane / 4; }
  __device__ __forceinline__ int32_t row(int32_t r) const { return r / 2 * 8 + lane % 4 * 2 + r % 2; }
  /// The lane's first token of a KV tile.
  __device__ __forceinline__ int32_t token() const { return warp * 16 + (kFp8 == Fp8::kNone ? g() : fp8_token(g())); }
  /// The lane's row of a score.
  static __device__ __forceinline__ constexpr int32_t row_of(int32_t score) { return score / 4 * 2 + score % 2; }
  static __device__ __forceinline__ constexpr int32_t token_of(int32_t score) { return score / 2 % 2 * 8; }
  /// The component of accumulator `i` of block `block` of 64, in a consumer's half of V. fp8: a lane has eight
  /// neighbours.
  __device__ __forceinline__ int32_t component(int32_t block, int32_t i) const {
    return kFp8 == Fp8::kNone ? 64 * block + 16 * warp + g() + i / 2 % 2 * 8
                              : 64 * warp + 8 * g() + 2 * block + i / 2 % 2;
  }
};

/// Scores to base-2 logits where there is a soft cap, ALiBi or a custom mask, which is applied too. `first`: the lane's
/// first token.
template <typename Traits, int32_t Count>
__device__ __forceinline__ void to_general_logits(const AttentionParams& params, const WorkTileContext& context,
                                                  const RowInfo& rows, const SwapAbLane<Traits>& lane, int32_t first,
                                                  float (&s)[Count]) {
  struct {
    float x[Count];
  } local;
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) local.x[i] = s[i];
  auto& in_memory = in_local_memory(local);  // indexed by a loop that is not unrolled
#pragma unroll 1
  for (int32_t i = 0; i < Count; ++i) {
    const int32_t row = lane.row(lane.row_of(i));
    const int32_t token = first + lane.token_of(i);
    float x = __fmul_rn(in_memory.x[i], rows.scale[row]);
    if (params.soft_cap != 0.0f) x = soft_capped(x, params.soft_cap, 2.0f * kLog2E / params.soft_cap);
    if (params.alibi_slopes != nullptr && row < context.num_rows) {
      const int64_t key = context.first_pos + position_offset(context.shard, static_cast<uint32_t>(token));
      const int64_t distance = rows.position[row] - key;
      x = __fadd_rn(x, -__fmul_rn(params.alibi_slopes[rows.q_head[row]],
                                  static_cast<float>(distance < 0 ? -distance : distance)));
    }
    if (has_bias(params)) x = __fmul_rn(x, kLog2E);
    if (context.custom_mask && !is_visible(params, rows, row, token)) x = -INFINITY;
    in_memory.x[i] = x;
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) s[i] = in_memory.x[i];
}

/// See negate_scores of rows.
template <typename Traits, int32_t Count>
__device__ __forceinline__ void negate_scores(const RowInfo& rows, const SwapAbLane<Traits>& lane, float (&s)[Count]) {
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) {
    const float scale = rows.scale[lane.row(lane.row_of(i))];
    s[i] = __fmul_rn(s[i], scale > 0.0f ? 1.0f : (scale < 0.0f ? -1.0f : scale));
  }
}

/// Sets the scores of invisible tokens to -infinity. `first`: the lane's first token.
template <typename Traits, int32_t Count>
__device__ __forceinline__ void mask_scores(const RowInfo& rows, const SwapAbLane<Traits>& lane, int32_t first,
                                            float (&s)[Count]) {
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) {
    const int32_t row = lane.row(lane.row_of(i));
    const int32_t token = first + lane.token_of(i);
    if (token < rows.visible_begin[row] || token >= rows.visible_end[row]) s[i] = -INFINITY;
  }
}

/// Adds the NaN and Inf of a half of V, at `half`, to the accumulators of the rows that see them. `first`: the KV
/// tile's first token.
template <typename Traits, int32_t Blocks, int32_t Count>
__device__ __forceinline__ void add_nonfinite(const AttentionParams& params, const RowInfo& rows,
                                              const SwapAbLane<Traits>& lane, uint32_t half, int32_t first,
                                              float (&o)[Blocks][Count]) {
  using T = typename Traits::T;
  constexpr int32_t kBytes = element_bytes(Traits::kFp8);
  struct {
    float x[Blocks][Count];
  } local;
#pragma unroll
  for (int32_t b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) local.x[b][i] = o[b][i];
  }
  auto& acc = in_local_memory(local);
#pragma unroll 1
  for (int32_t n = 0; n < kBlockN * Blocks * 2; ++n) {
    const int32_t token = n / (Blocks * 2);
    const int32_t block = n / 2 % Blocks;
    const int32_t at = kBytes * lane.component(block, n % 2 * 2);
    const auto word = static_cast<uint32_t>(tile_offset(token, at / 16) + at % 16 / 4 * 4);
    const int32_t element = at % 4 / kBytes;
    const uint32_t values = ptx::ld_shared_4(half + word);
    if ((nonfinite_mask<T, Traits::kFp8>(values) >> 8 * kBytes * element & 1u) == 0) continue;
    const float value = element_of<T, Traits::kFp8>(values, element);
#pragma unroll 1
    for (int32_t r = 0; r < lane.kRows; ++r) {
      if (is_visible(params, rows, lane.row(r), first + token)) acc.x[block][r / 2 * 4 + n % 2 * 2 + r % 2] += value;
    }
  }
  asm volatile("" ::: "memory");
#pragma unroll
  for (int32_t b = 0; b < Blocks; ++b) {
#pragma unroll
    for (int32_t i = 0; i < Count; ++i) o[b][i] = acc.x[b][i];
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
