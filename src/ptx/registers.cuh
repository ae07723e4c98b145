#pragma once

#include <cstdint>

/// Registers that change hands between the warps of a thread block (compute capability 9.0a): PTX `setmaxnreg`. By all
/// four warps of a group (whose number of the first is a multiple of four), once, in a kernel compiled with a bound on
/// its threads. Counts are multiples of 8, of 24 to 256.
namespace folio::inline v0::ptx {

/// From here on this group's threads have `Count` registers, fewer than before; the others are free for another group.
template <int32_t Count>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

/// From here on this group's threads have `Count` registers, more than before: waits until there are as many.
template <int32_t Count>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace folio::inline v0::ptx
