#pragma once

#include <cstdint>

namespace folio::inline v0::kernels::cuda {

/// Whose head stands at a place where the heads of each KV head are rank 0's, then rank 1's and so on.
struct HeadOwner {
  int32_t rank;
  int32_t head;  ///< among that rank's
};

/// On both devices. `heads`: of one rank; `groups`: KV heads, which divides it.
constexpr HeadOwner head_owner(int32_t place, int32_t ranks, int32_t heads, int32_t groups) {
  const int32_t per_group = heads / groups;
  return {place / per_group % ranks, place / (per_group * ranks) * per_group + place % per_group};
}

}  // namespace folio::inline v0::kernels::cuda
