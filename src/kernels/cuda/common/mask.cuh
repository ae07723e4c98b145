#pragma once

#include <cstdint>

#include "kernels/cuda/attention_kernel.hpp"

/// Which keys a row sees, and at which positions they stand.
namespace folio::inline v0::kernels::cuda {

/// Offset from the segment's first position of a local token; scheduler::shard_offset in 32 bits.
__device__ __forceinline__ uint32_t position_offset(const KvShard& shard, uint32_t token) {
  if (shard.world == 1) return token;
  const auto interleave = static_cast<uint32_t>(shard.interleave);
  const uint32_t stripe = token / interleave;
  return stripe * static_cast<uint32_t>(shard.world) * interleave + static_cast<uint32_t>(shard.rank) * interleave +
         (token - stripe * interleave);
}

/// Whether row `row` sees local token `token`: its range, and from rows.mask_begin on the custom mask's bit. `Rows` has
/// visible_begin, visible_end, mask_begin and mask_bit, by row.
template <typename Rows>
__device__ __forceinline__ bool is_visible(const AttentionParams& params, const Rows& rows, int32_t row,
                                           int32_t token) {
  if (token < rows.visible_begin[row] || token >= rows.visible_end[row]) return false;
  if (token < rows.mask_begin[row]) return true;
  const int64_t bit = rows.mask_bit[row] + token;
  return (params.custom_mask[bit >> 3] >> (bit & 7) & 1) != 0;
}

}  // namespace folio::inline v0::kernels::cuda
