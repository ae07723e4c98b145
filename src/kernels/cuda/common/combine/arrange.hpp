#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/device.hpp"

namespace folio::inline v0::kernels::cuda {

/// Puts the queries of several ranks beside each other on a GPU: to [num_tokens, ranks * heads] rows of row_bytes, in
/// which the heads of KV head k are rank 0's, then rank 1's and so on. And their slopes, [ranks * heads], likewise.
/// All addresses are the device's; strides are in bytes. `enqueue` throws Error(kDeviceError) where the launch fails.
struct ArrangeParams {
  const std::byte* from = nullptr;  ///< row (rank, token, head)
  int64_t rank_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  std::byte* to = nullptr;  ///< a place's owner: head_owner (head_order.hpp)
  int64_t num_tokens = 0;
  int32_t ranks = 1;
  int32_t heads = 1;   ///< of one rank
  int32_t groups = 1;  ///< KV heads; divides heads
  int64_t row_bytes = 0;
  float* slopes_to = nullptr;         ///< null: none are wanted
  const std::byte* slopes = nullptr;  ///< slope (rank, head), packed within a rank; null: zeros
  int64_t slopes_rank_stride = 0;
};
void enqueue(const ArrangeParams& params, Stream stream);

}  // namespace folio::inline v0::kernels::cuda
