#pragma once

#include <cstdint>

/// Registers of a warpgroup, four warps whose first has a number that is a multiple of 4 (compute capability 9.0
/// alone): PTX `setmaxnreg`. The kernel begins with as many registers a thread as its launch bounds leave; groups that
/// need few give up theirs, those that need many wait for them. By all warps of a group, outside of branches within it.
namespace folio::inline v0::ptx {

/// `Count`: of 24 to 256, a multiple of 8, not more than the group has.
template <int32_t Count>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

/// Not fewer than the group has; waits until there are so many.
template <int32_t Count>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace folio::inline v0::ptx
