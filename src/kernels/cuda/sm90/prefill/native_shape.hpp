#pragma once

#include "kernels/cuda/sm90/prefill/shape.hpp"

/// Where codes stand in shared memory where products take them as they are: in the room that tiles of 16 bits have. A
/// tile's tokens, a row's queries and a component's values are rows of 128 bytes, their pieces of 16 exchanged by the
/// row's number, as boxes leave them and products want them.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

constexpr HeadDims kNativeDims{128, 128};
constexpr int32_t kNativeTokens = tile_tokens(kNativeDims);
constexpr int32_t kNativeRow = 128;     ///< bytes: codes of a token, or of a component's values of a tile
constexpr int32_t kNativeEight = 1024;  ///< bytes of eight rows
constexpr int32_t kNativeTile = 128 * kNativeRow;
/// Tiles in shared memory: of keys, of values as they come, of values transposed. Eight in all.
constexpr int32_t kKeyStages = 3;
constexpr int32_t kRawStages = 2;
constexpr int32_t kValueStages = 3;
static_assert(kKeyStages <= kMaxStages && kValueStages <= kMaxStages && kNativeTokens == 128);
static_assert((kKeyStages + kRawStages + kValueStages) * kNativeTile <= shared_layout(kNativeDims).queries);

constexpr uint32_t kNativeRaw = kKeyStages * kNativeTile;
constexpr uint32_t kNativeValues = kNativeRaw + kRawStages * kNativeTile;

/// Byte offset of 16-byte piece `piece` of row `row` of a tile.
FOLIO_HOST_DEVICE constexpr int32_t native_offset(int32_t row, int32_t piece) {
  return row * kNativeRow + ((piece ^ row) & 7) * 16;
}

/// Where a tile's token stands in a row of transposed values: of sixteen tokens, pairs of the first eight and of the
/// last alternate, which is the order in which a lane has its weights.
FOLIO_HOST_DEVICE constexpr int32_t native_column(int32_t token) {
  return token / 16 * 16 + token % 8 / 2 * 4 + token % 16 / 8 * 2 + token % 2;
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
