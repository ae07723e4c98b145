#pragma once

#include "kernels/cuda/sm90/decode/shared_state.cuh"

/// Where the tokens of a segment's row lie, looked up by whoever needs it.
namespace folio::inline v0::kernels::cuda::sm90 {

struct PageWalk {
  const int32_t* pages;  ///< null: ragged
  int32_t first_token;   ///< ragged
  uint32_t page_size;
  int32_t shift;  ///< the page size is 2^shift; -1 if it is no power of two
  int32_t begin;  ///< tokens to be read: [begin, end)
  int32_t end;

  __device__ __forceinline__ bool has(int32_t token, int32_t box) const { return token + box > begin && token < end; }

  /// The place of `box` tokens of one page.
  __device__ __forceinline__ TokenPlace place_of(int32_t token, int32_t box) const {
    if (!has(token, box)) return {0, -1};
    if (pages == nullptr) return {0, first_token + token};
    const auto number = static_cast<uint32_t>(token);
    const uint32_t column = shift >= 0 ? number >> shift : number / page_size;
    return {pages[column], static_cast<int32_t>(number - column * page_size)};
  }
};

/// Where the first rows of segment 0 begin in its table, a row a lane, asked for before it is known which is needed.
/// By all lanes of a warp.
class RowBegins {
 public:
  __device__ __forceinline__ RowBegins(const AttentionParams& params, int32_t lane) {
    const SegmentParams& segment = params.segments[0];
    if (segment.indptr != nullptr && lane < segment.num_rows) begin_ = segment.indptr[lane];
  }
  __device__ __forceinline__ int32_t of(const AttentionParams& params, const planner::WorkItem& item) const {
    const bool early = item.segment == 0 && item.kv_row < min(params.segments[0].num_rows, 32);
    return early ? __shfl_sync(kAllLanes, begin_, item.kv_row) : params.segments[item.segment].indptr[item.kv_row];
  }

 private:
  int32_t begin_ = 0;
};

/// Of an item that has keys.
__device__ __forceinline__ PageWalk page_walk(const AttentionParams& params, const planner::WorkItem& item,
                                              const RowBegins& begins) {
  const SegmentParams& segment = params.segments[item.segment];
  PageWalk walk{nullptr, 0, static_cast<uint32_t>(segment.page_size), -1, item.kv_begin, item.kv_end};
  const int32_t begin = segment.indptr != nullptr ? begins.of(params, item) : 0;
  if (!segment.paged) {
    walk.first_token = begin;
    return walk;
  }
  walk.pages = segment.indices +
               (segment.indptr != nullptr ? int64_t{begin} : item.kv_row * segment.row_stride + segment.first_column);
  if ((walk.page_size & (walk.page_size - 1)) == 0) walk.shift = __ffs(segment.page_size) - 1;
  return walk;
}

}  // namespace folio::inline v0::kernels::cuda::sm90
