#pragma once

#include <cstddef>

#include "kernels/cuda/sm90/decode/page_walk.cuh"
#include "ptx/memory.cuh"

/// What a math warp finds out by itself of its CTA's first item, from the item's range alone, so that its
/// first copies begin before the scheduler's warp knows which rows see what: 5 microseconds of a short batch's 15
/// otherwise.
namespace folio::inline v0::kernels::cuda::sm90::decode {

struct Ahead {
  TokenPlace place{};  ///< lane 2i's and 2i + 1's: of the boxes of the warp's tile i
  int32_t count = 0;   ///< tiles; 0 also where tokens are not copied by boxes
  int32_t box = kSingles;
  int32_t head = 0;
  int32_t segment = 0;
};

/// Brings the beginning of the page table, as much as there are threads for lines of it, to the L2,
/// before it may be read: it is coherent.
__device__ __forceinline__ void prefetch_table(const AttentionParams& params, int32_t threads) {
  constexpr int32_t kLine = 128 / sizeof(int32_t);
  const SegmentParams& segment = params.segments[0];
  if (!segment.paged) return;
  const int32_t line = static_cast<int32_t>(blockIdx.x) * threads + static_cast<int32_t>(threadIdx.x);
  if (line < segment.num_indices / kLine + 1 && line * kLine < segment.num_indices) {
    ptx::prefetch_l2(segment.indices + line * kLine);
  }
  if (line == 0 && segment.indptr != nullptr) ptx::prefetch_l2(segment.indptr);
}

/// Brings parameters to the SM's constant cache, a line a warp: the first segment's, and all that stand
/// alone. Read when they are needed, they would wait behind the first copies.
__device__ __forceinline__ void touch_parameters(const AttentionParams& params) {
  constexpr int32_t kLine = 64 / sizeof(uint32_t);
  constexpr int32_t kSegmentLines = 4;
  constexpr auto kAlone = static_cast<int32_t>(offsetof(AttentionParams, num_q_heads) / sizeof(uint32_t));
  static_assert((kAlone + kLine * (8 - kSegmentLines) + 1) * sizeof(uint32_t) <= sizeof(AttentionParams));
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;  // of up to nine
  const int32_t word = warp < kSegmentLines ? kLine * warp : kAlone + kLine * (warp - kSegmentLines);
  ptx::read_constant(reinterpret_cast<const uint32_t*>(&params) + word);
}

/// By all lanes of math warp `warp`. `stages`: most tiles; `step`: tokens from one of the warp's tiles to the next.
__device__ __forceinline__ Ahead look_ahead(const DecodeParams& params, int32_t warp, int32_t lane, int32_t stages,
                                            int32_t step) {
  const AttentionParams& attention = params.attention;
  const RowBegins begins(attention, lane);
  const scheduler::PlanView& plan = attention.plan->view;
  const auto claim = static_cast<int32_t>(blockIdx.x);
  Ahead ahead;
  if (claim >= plan.num_dynamic_tiles) return ahead;
  const scheduler::WorkTile item = plan.work_tiles[claim];
  const int32_t first = item.kv_begin / kTileTokens * kTileTokens + warp * kTileTokens;
  ahead.box = params.box[item.segment];
  ahead.head = item.kv_head;
  ahead.segment = item.segment;
  if (ahead.box == kSingles || item.kv_begin >= item.kv_end || first >= item.kv_end) return ahead;
  ahead.count = min((item.kv_end - first + step - 1) / step, stages);
  const PageWalk walk = page_walk(attention, item, begins);
  const int32_t in_tile = ahead.box == kSmallBox ? lane % 2 * kSmallBox : 0;
  TokenPlace place[1];
  walk.find(first + lane / 2 * step + in_tile, 0, ahead.box, place);
  ahead.place = place[0];
  return ahead;
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
