#pragma once

#include "ptx/mbarrier.cuh"

/// src/ptx/warp_barriers.cuh, emulated.
namespace folio::inline v0::ptx {

inline void wait_as_warp(uint32_t barrier, uint32_t parity) {
  wait(barrier, parity);
}
inline void come(int32_t id, int32_t threads) {
  emulation::come(id, threads);
}

}  // namespace folio::inline v0::ptx
