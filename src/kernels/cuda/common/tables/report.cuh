#pragma once

#include <cstdint>

namespace folio::inline v0::kernels::cuda {

/// Notes that something that a kernel found was left out.
__device__ inline void report(int32_t* status) {
  if (status != nullptr) *status = 1;
}

/// Units that `length`, of at most INT_MAX, takes.
__device__ inline int64_t units_of(int64_t length, int32_t unit) {
  return (static_cast<uint32_t>(length) + static_cast<uint32_t>(unit) - 1) / static_cast<uint32_t>(unit);
}

}  // namespace folio::inline v0::kernels::cuda
