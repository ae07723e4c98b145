#pragma once

#include "kernels/cuda/sm90/decode/shared_state.cuh"
#include "ptx/memory.cuh"

/// Where the tokens of a segment's row lie, looked up by whoever needs it.
namespace folio::inline v0::kernels::cuda::sm90::decode {

struct PageWalk {
  const int32_t* pages;  ///< null: ragged
  int32_t first_token;   ///< ragged
  uint32_t page_size;
  int32_t shift;  ///< the page size is 2^shift; -1 if it is no power of two
  int32_t begin;  ///< tokens to be read: [begin, end)
  int32_t end;

  __device__ __forceinline__ bool has(int32_t token, int32_t box) const { return token + box > begin && token < end; }

  /// The places of `box` tokens of one page each, the first of which are `step` tokens apart. All are asked for before
  /// the first has come.
  template <int32_t kCount>
  __device__ __forceinline__ void find(int32_t token, int32_t step, int32_t box, TokenPlace (&places)[kCount]) const {
    uint32_t columns[kCount];
    if (shift >= 0) {
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) columns[i] = static_cast<uint32_t>(token + i * step) >> shift;
    } else {
#pragma unroll
      for (int32_t i = 0; i < kCount; ++i) columns[i] = static_cast<uint32_t>(token + i * step) / page_size;
    }
#pragma unroll
    for (int32_t i = 0; i < kCount; ++i) {
      const int32_t at = token + i * step;
      const bool seen = has(at, box);
      const int32_t in_page = pages == nullptr ? first_token + at : at - static_cast<int32_t>(columns[i] * page_size);
      places[i] = {0, seen ? in_page : -1};
      ptx::ld_global_4_if(places[i].page, pages + columns[i], seen && pages != nullptr);
    }
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
  __device__ __forceinline__ int32_t of(const AttentionParams& params, const scheduler::WorkTile& item) const {
    const bool early = item.segment == 0 && item.kv_row < min(params.segments[0].num_rows, 32);
    return early ? __shfl_sync(kAllLanes, begin_, item.kv_row) : params.segments[item.segment].indptr[item.kv_row];
  }

 private:
  int32_t begin_ = 0;
};

/// Of an item that has keys.
__device__ __forceinline__ PageWalk page_walk(const AttentionParams& params, const scheduler::WorkTile& item,
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

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
