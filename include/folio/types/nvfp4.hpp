#pragma once

#include <cstdint>

#include "folio/types/export.hpp"

/// Where the scale factors of an NVFP4 matrix lie: one e4m3 byte for every kNvfp4BlockSize neighbouring values of a
/// row, in tiles of 128 rows by 4 blocks, as the matrix units of NVIDIA's Blackwell read them (cuBLAS, "1D block
/// scaling factors layout"). A row is a token's heads one after the other: num_heads * head_dim / 16 blocks.
namespace folio::inline v0 {

inline constexpr int32_t kNvfp4BlockSize = 16;
inline constexpr int32_t kNvfp4TileRows = 128;
inline constexpr int32_t kNvfp4TileBlocks = 4;

/// The byte of block `block` of row `row`.
FOLIO_HOST_DEVICE constexpr int64_t nvfp4_scale_index(int64_t row, int64_t block, int64_t blocks_per_row) noexcept {
  const int64_t tiles_per_row = (blocks_per_row + kNvfp4TileBlocks - 1) / kNvfp4TileBlocks;
  const int64_t tile = row / kNvfp4TileRows * tiles_per_row + block / kNvfp4TileBlocks;
  const int64_t in_tile = row % kNvfp4TileRows;
  return tile * (kNvfp4TileRows * kNvfp4TileBlocks) + in_tile % 32 * 16 + in_tile / 32 * 4 + block % kNvfp4TileBlocks;
}

/// Bytes of the scale factors of a whole matrix: both dimensions padded to whole tiles. Padding is never written.
FOLIO_HOST_DEVICE constexpr int64_t nvfp4_scale_bytes(int64_t rows, int64_t blocks_per_row) noexcept {
  const int64_t row_tiles = (rows + kNvfp4TileRows - 1) / kNvfp4TileRows;
  const int64_t block_tiles = (blocks_per_row + kNvfp4TileBlocks - 1) / kNvfp4TileBlocks;
  return row_tiles * block_tiles * kNvfp4TileRows * kNvfp4TileBlocks;
}

}  // namespace folio::inline v0
