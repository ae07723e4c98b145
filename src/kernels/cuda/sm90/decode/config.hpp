#pragma once

#include <cstdint>

#include "folio/types/export.hpp"
#include "kernels/cuda/sm90/common/config.hpp"

/// Tile shapes, warps, stages and the layout of shared memory. Plain integers, for host and device.
namespace folio::inline v0::kernels::cuda::sm90::decode {

constexpr int32_t kTileTokens = 16;  ///< tokens of a KV tile: one consumer warp takes it as a whole
constexpr int32_t kTileRows = 8;     ///< packed rows of a work tile
constexpr int32_t kMaxRows = 16;     ///< ... of a double-height one
constexpr int32_t kBatchStages = 2;  ///< of the queue of tile batches, and as many contexts and queries

/// How a KV tile comes to shared memory: tokens of one copy.
constexpr int32_t kCpAsync = 1;        ///< by threads: any strides, alignment and page size
constexpr int32_t kTmaHalfTile = 8;    ///< two TMA tiles: page sizes that are multiples of 8
constexpr int32_t kTmaWholeTile = 16;  ///< one TMA tile: page sizes that are multiples of 16

/// What a kernel is compiled for: head dimensions, bytes of an element of keys and values in shared memory, and most
/// rows of a work tile.
struct HeadDims {
  int32_t qk;
  int32_t v;
  int32_t bytes = 2;
  int32_t rows = kTileRows;
};

/// At head_dim 256, shared memory has room for two KV tiles of each of four warps only.
constexpr int32_t consumer_warps(const HeadDims& dims) {
  return dims.qk > 192 ? 4 : 8;
}
constexpr int32_t consumer_threads(const HeadDims& dims) {
  return 32 * consumer_warps(dims);
}
/// The consumer warps and the scheduler warp.
constexpr int32_t cta_threads(const HeadDims& dims) {
  return consumer_threads(dims) + 32;
}
/// Least rows of a work tile: one GQA group. Eight rows are one n8 column tile of the MMA, sixteen are two.
constexpr int32_t work_tile_rows(int32_t group_size) {
  return group_size <= kTileRows ? kTileRows : kMaxRows;
}
/// The thread count of __launch_bounds__, which sets the registers of a thread. Nine warps put three into one quarter
/// of the SM. With 128 registers (kTileRows) a fourth warp fits beside them: a CTA of the combine kernel, which waits
/// there until the last of them has ended. Sixteen rows need 168 registers.
constexpr int32_t launch_bound_threads(const HeadDims& dims, int32_t rows) {
  if (consumer_warps(dims) != 8) return cta_threads(dims);
  return rows == kTileRows ? 512 : 384;
}
/// Granularity at which the scheduler splits keys: one KV tile of every consumer warp.
constexpr int32_t schedule_tokens(const HeadDims& dims) {
  return consumer_warps(dims) * kTileTokens;
}

/// Places of a tile batch. At 192/128, and beside the reduction of sixteen rows, there is room for half as many.
constexpr int32_t batch_places(const HeadDims& dims) {
  return dims.qk == 192 || dims.rows == kMaxRows ? 512 : 1024;
}

/// Most KV tiles of a tile batch with that many places, of `copy_tokens` tokens each.
FOLIO_HOST_DEVICE constexpr int32_t batch_tiles(int32_t places, int32_t copy_tokens) {
  const int32_t fit = places * copy_tokens / kTileTokens;
  return fit < 64 ? fit : 64;
}

/// Bytes of the keys or the values of a KV tile.
constexpr int32_t tile_bytes(int32_t dim, int32_t bytes) {
  return bytes * kTileTokens * dim;
}
/// A stage of a warp's KV pipeline: keys, then values.
constexpr int32_t stage_bytes(const HeadDims& dims) {
  return tile_bytes(dims.qk, dims.bytes) + tile_bytes(dims.v, dims.bytes);
}
/// Stages of a warp's KV pipeline: 128 KiB for all warps together, but at least two each.
constexpr int32_t stages(const HeadDims& dims) {
  const int32_t fit = 128 * 1024 / consumer_warps(dims) / stage_bytes(dims);
  return fit < 2 ? 2 : fit;
}

/// Width of the TMA swizzle: 128 bytes, or 64 where a token's bytes are no multiple of 128.
FOLIO_HOST_DEVICE constexpr int32_t swizzle_bytes(int32_t dim, int32_t bytes) {
  return dim * bytes % 128 == 0 ? 128 : 64;
}

/// Byte offset of 16-byte chunk `chunk` of token `token` in the keys or the values of a KV tile. Each TMA tile stores
/// the first swizzle_bytes of all its tokens, then the next. The swizzle exchanges chunks by the token's number, so
/// that equal chunks of eight tokens lie in different banks.
FOLIO_HOST_DEVICE constexpr int32_t swizzled_offset(int32_t dim, int32_t bytes, int32_t copy_tokens, int32_t token,
                                                    int32_t chunk) {
  const int32_t rows = copy_tokens == kTmaHalfTile ? kTmaHalfTile : kTileTokens;
  const int32_t width = swizzle_bytes(dim, bytes);
  const int32_t chunks = width / 16;
  const int32_t row = token % rows;
  const int32_t exchange = width == 128 ? row & 7 : row >> 1 & 3;
  return token / rows * rows * dim * bytes + (chunk / chunks * rows + row) * width + (chunk % chunks ^ exchange) * 16;
}

/// Bytes of a query row, padded so that eight rows begin in different banks.
constexpr int32_t query_stride(const HeadDims& dims) {
  return 2 * dims.qk + 16;
}
/// Floats of a row of partial O in the cross-warp reduction, padded likewise.
constexpr int32_t reduce_stride(const HeadDims& dims) {
  return dims.v + 4;
}
/// Rows of each warp that are reduced at a time: all of a work tile's where there is room.
constexpr int32_t reduce_rows(const HeadDims& dims) {
  return dims.qk <= 128 ? dims.rows : kTileRows;
}

/// Neighbouring components of an O row that one lane reduces, and all that it reduces. The runs of a lane are 32 runs
/// apart.
constexpr int32_t run_components(int32_t dim_v) {
  return dim_v % 128 == 0 ? 4 : 2;
}
constexpr int32_t lane_components(int32_t dim_v) {
  const int32_t across = 32 * run_components(dim_v);
  return run_components(dim_v) * ((dim_v + across - 1) / across);
}
/// Floats of a row's state between an output tile's work tiles: row_max, row_sum, two of padding, the lanes' O.
constexpr int32_t running_floats(int32_t dim_v) {
  return 4 + 32 * lane_components(dim_v);
}

/// Byte offsets in shared memory, from an address that is a multiple of 1024.
struct SmemLayout {
  int32_t kv;       ///< [consumer_warps][stages][stage_bytes]
  int32_t reduce;   ///< [consumer_warps][reduce_rows][reduce_stride] float
  int32_t running;  ///< [kMaxRows][running_floats] float
  int32_t queries;  ///< [kBatchStages][kMaxRows][query_stride]
  int32_t places;   ///< [kBatchStages][batch_places] TokenPlace
  int32_t storage;  ///< SharedStorage
};
constexpr SmemLayout smem_layout(const HeadDims& dims) {
  SmemLayout layout{};
  layout.kv = 0;
  layout.reduce = consumer_warps(dims) * stages(dims) * stage_bytes(dims);
  layout.running = layout.reduce + 4 * consumer_warps(dims) * reduce_rows(dims) * reduce_stride(dims);
  layout.queries = layout.running + 4 * kMaxRows * running_floats(dims.v);
  layout.places = layout.queries + kBatchStages * kMaxRows * query_stride(dims);
  layout.storage = layout.places + kBatchStages * batch_places(dims) * 8;
  return layout;
}

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
