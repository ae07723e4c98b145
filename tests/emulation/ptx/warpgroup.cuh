#pragma once

#include "warp_emulator.hpp"

/// src/ptx/warpgroup.cuh, emulated: fibers have registers of their own.
namespace folio::inline v0::ptx {

template <int32_t Count>
void give_up_registers() {}
template <int32_t Count>
void claim_registers() {}

inline bool elect() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}

}  // namespace folio::inline v0::ptx
