#pragma once

#include <cstdint>

/// Registers and lanes of a warpgroup, four warps whose first has a number that is a multiple of 4 (compute
/// capability 9.0 alone): PTX `setmaxnreg`, `elect`. The kernel begins with as many registers a thread as its launch
/// bounds leave; groups that need few give up theirs, those that need many wait for them. By all warps of a group,
/// outside of branches within it.
namespace folio::inline v0::ptx {

/// `Count`: of 24 to 256, a multiple of 8, not more than the group has.
template <int32_t Count>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

/// Not fewer than the group has; waits until there are so many.
template <int32_t Count>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

/// True in one lane of the warp, the same every time; all 32 call it. The compiler knows that a branch on it is one
/// thread's.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

}  // namespace folio::inline v0::ptx
