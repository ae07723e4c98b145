#pragma once

#include <cstdint>

#include "folio/types/device.hpp"

namespace folio::inline v0::kernels::cuda {

/// lse [cu_q[num_requests], num_heads], base 2, gets slope[head] * first_pos[request] / ln 2 added, in place, in
/// double: from logits biased by distances to those biased by -slope * (row - key), where rows count from the request's
/// first query. All addresses are the device's.
struct ShiftLseParams {
  float* lse = nullptr;
  const int32_t* cu_q = nullptr;       ///< [num_requests + 1]
  const int32_t* first_pos = nullptr;  ///< [num_requests], the position of the first query
  const float* slopes = nullptr;       ///< [num_heads]
  int32_t num_requests = 0;
  int32_t num_heads = 0;
};

/// Throws Error(kDeviceError) where the launch fails.
void enqueue(const ShiftLseParams& params, Stream stream);

}  // namespace folio::inline v0::kernels::cuda
