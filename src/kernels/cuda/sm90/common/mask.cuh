#pragma once

#include "kernels/cuda/attention_kernel.hpp"

/// Visibility of single tokens.
namespace folio::inline v0::kernels::cuda::sm90 {

/// Whether row `row` sees local token `token`: its range, and from rows.mask_begin on the custom mask's bit. `Rows` has
/// the kernel's visible_begin, visible_end, mask_begin and mask_bit.
template <typename Rows>
__device__ __forceinline__ bool is_visible(const AttentionParams& params, const Rows& rows, int32_t row,
                                           int32_t token) {
  if (token < rows.visible_begin[row] || token >= rows.visible_end[row]) return false;
  if (token < rows.mask_begin[row]) return true;
  const int64_t bit = rows.mask_bit[row] + token;
  return (params.custom_mask[bit >> 3] >> (bit & 7) & 1) != 0;
}

}  // namespace folio::inline v0::kernels::cuda::sm90
