#pragma once

#include "kernels/cuda/sm90/common/epilogue.cuh"
#include "kernels/cuda/sm90/mla/smem.cuh"

/// The epilogue of a consumer: folds a work tile's accumulators into those of its output tile, and writes rows that are
/// finished, or partial results for the split-KV combine.
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// GEMM1 has N = 128: a consumer's half of the 512 components is two blocks. A lane has 64 accumulators of each.
constexpr int32_t kOBlocks = RowsLayout::kHalfColumnBlocks / 2;
constexpr int32_t kOBlockValues = 64;

/// A lane's accumulators of earlier work tiles of the same output tile. Only epilogues use them, so they are kept in
/// local memory: see in_local_memory.
struct OutputTileState {
  float o[kOBlocks][kOBlockValues];
  float row_max[2];
  float row_sum[2];
};

/// Which elements a lane has: rows first_row and first_row + 8, pairs of components, 8 apart.
struct LaneElements {
  int32_t first_row;
  int32_t first_component;
  bool writes_row_stats;  ///< the one lane of a row that writes its LSE or its row_max and row_sum
};

/// Calls function(component, x, y) for the lane's pairs of row `h`.
template <typename Function>
__device__ __forceinline__ void for_pairs(float (&o)[kOBlocks][kOBlockValues], int32_t h, const LaneElements& lane,
                                          const Function& function) {
#pragma unroll
  for (int32_t b = 0; b < kOBlocks; ++b) {
#pragma unroll
    for (int32_t i = 0; i < kOBlockValues; i += 4) {
      function(lane.first_component + 128 * b + 2 * i, o[b][i + 2 * h], o[b][i + 2 * h + 1]);
    }
  }
}

/// Transposes 4 x 4 words of a quad: lane t gives word t of four groups, and gets all words of group t.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], bool odd, bool upper) {
#pragma unroll
  for (int32_t i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(kAllLanes, odd ? words[i] : words[i + 1], 1);
    words[i] = odd ? got : words[i];
    words[i + 1] = odd ? words[i + 1] : got;
  }
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? words[i] : words[i + 2], 2);
    words[i] = upper ? got : words[i];
    words[i + 2] = upper ? words[i + 2] : got;
  }
}

/// Writes row `h` of the lane's rows, of a 16-bit type, in chunks of 16 bytes. `to`: the row's first component; only
/// lanes whose row is `valid` write. By whole warps.
template <typename Out>
__device__ __forceinline__ void write_row_16B(const float (&o)[kOBlocks][kOBlockValues], int32_t h,
                                              const LaneElements& lane, const RowEnd& end, Out* to, bool valid) {
  const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
  Out* const chunk = to + lane.first_component + 6 * t;  // of group t, where the quad's first lane has components 0, 1
#pragma unroll
  for (int32_t b = 0; b < kOBlocks; ++b) {
#pragma unroll
    for (int32_t i = 0; i < kOBlockValues; i += 16) {
      uint32_t words[4];
#pragma unroll
      for (int32_t k = 0; k < 4; ++k) {
        words[k] =
            ptx::pack_two<Out>(row_value(end, o[b][i + 4 * k + 2 * h]), row_value(end, o[b][i + 4 * k + 2 * h + 1]));
      }
      transpose_quad(words, t % 2 != 0, t >= 2);
      if (valid) *reinterpret_cast<uint4*>(chunk + 128 * b + 2 * i) = uint4{words[0], words[1], words[2], words[3]};
    }
  }
}

/// Ends a work tile. `row_max`, `row_sum`: of the lane's rows, reduced over lanes and consumers. `o`: the lane's
/// accumulators, which are overwritten.
__device__ __forceinline__ void epilogue(const AttentionParams& params, const WorkTileContext& context,
                                         const RowInfo& rows, float (&row_max)[2], float (&row_sum)[2],
                                         float (&o)[kOBlocks][kOBlockValues], const LaneElements& lane,
                                         OutputTileState& output_tile) {
  const scheduler::WorkTile& work_tile = context.work_tile;
  bool valid[2];  // the work tile has the row
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    valid[h] = lane.first_row + 8 * h < context.num_rows;
    const float v_scale = valid[h] ? rows.v_scale[lane.first_row + 8 * h] : 1.0f;
    if (__all_sync(kAllLanes, v_scale == 1.0f)) continue;
    for_pairs(o, h, lane, [&](int32_t, float& x, float& y) {
      x = __fmul_rn(x, v_scale);
      y = __fmul_rn(y, v_scale);
    });
  }
  OutputTileState& before = in_local_memory(output_tile);
  if ((work_tile.flags & scheduler::kStart) == 0) {
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const Fold factors = fold_factors(before.row_max[h], before.row_sum[h], row_max[h], row_sum[h]);
      row_sum[h] = fold(factors, before.row_sum[h], row_sum[h]);
      row_max[h] = factors.max;
#pragma unroll
      for (int32_t b = 0; b < kOBlocks; ++b) {
#pragma unroll
        for (int32_t i = 2 * h; i < kOBlockValues; i += 4) {
          o[b][i] = fold(factors, before.o[b][i], o[b][i]);
          o[b][i + 1] = fold(factors, before.o[b][i + 1], o[b][i + 1]);
        }
      }
    }
  }
  if ((work_tile.flags & scheduler::kFinish) == 0) {
#pragma unroll
    for (int32_t b = 0; b < kOBlocks; ++b) {
#pragma unroll
      for (int32_t i = 0; i < kOBlockValues; ++i) before.o[b][i] = o[b][i];
    }
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      before.row_max[h] = row_max[h];
      before.row_sum[h] = row_sum[h];
    }
    return;
  }
  if (context.out_16B && work_tile.partial < 0) {
    if (!__any_sync(kAllLanes, valid[0] || valid[1])) return;
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = valid[h] ? lane.first_row + 8 * h : 0;
      const int32_t token = rows.token[row];
      const int32_t q_head = rows.q_head[row];
      const RowEnd end = end_row(params, q_head, row_max[h], row_sum[h]);
      if (valid[h] && lane.writes_row_stats) write_lse(params, token, q_head, end);
      const int64_t at = token * params.out_token_stride + q_head * params.out_head_stride;
      if (params.out_dtype == DType::kBFloat16) {
        write_row_16B(o, h, lane, end, static_cast<__nv_bfloat16*>(params.out) + at, valid[h]);
      } else {
        write_row_16B(o, h, lane, end, static_cast<__half*>(params.out) + at, valid[h]);
      }
    }
    return;
  }
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    if (!valid[h]) continue;
    const int32_t row = lane.first_row + 8 * h;
    if (work_tile.partial >= 0) {
      const int32_t partial = work_tile.partial + row;
      if (lane.writes_row_stats) {
        params.partial_row_max[partial] = row_max[h];
        params.partial_row_sum[partial] = row_sum[h];
      }
      float* const to = params.partial_acc + int64_t{partial} * kHeadDimV;
      for_pairs(o, h, lane, [&](int32_t d, float x, float y) { *reinterpret_cast<float2*>(to + d) = float2{x, y}; });
      continue;
    }
    const int32_t token = rows.token[row];
    const int32_t q_head = rows.q_head[row];
    const RowEnd end = end_row(params, q_head, row_max[h], row_sum[h]);
    if (lane.writes_row_stats) write_lse(params, token, q_head, end);
    const int64_t at = token * params.out_token_stride + q_head * params.out_head_stride;
    for_pairs(o, h, lane, [&](int32_t, float& x, float& y) {
      x = row_value(end, x);
      y = row_value(end, y);
    });
#pragma unroll
    for (int32_t b = 0; b < kOBlocks; ++b) {  // the output tile is finished: its state is free
#pragma unroll
      for (int32_t i = 0; i < kOBlockValues; ++i) before.o[b][i] = o[b][i];
    }
#pragma unroll 1
    for (int32_t i = 0; i < kOBlocks * kOBlockValues; i += 4) {
      const float* const two = &before.o[i / kOBlockValues][i % kOBlockValues + 2 * h];
      write_pair(params, at + lane.first_component + 2 * i, two[0], two[1]);
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
