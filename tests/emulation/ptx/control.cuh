#pragma once

#include "warp_emulator.hpp"

/// src/ptx/control.cuh, emulated: kernels run one after the other, and fibers have registers of their own.
namespace folio::inline v0::ptx {

inline int32_t thread_index() {
  return static_cast<int32_t>(threadIdx.x);
}

inline void compute_here(float&, uint32_t&) {}

inline void griddep_launch_dependents() {}
inline void griddep_wait() {}

template <int32_t Count>
void warpgroup_reg_dealloc() {}
template <int32_t Count>
void warpgroup_reg_alloc() {}

inline bool elect_one() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}

}  // namespace folio::inline v0::ptx
