#pragma once

#include "ptx/mbarrier.cuh"

/// src/ptx/named_barrier.cuh, emulated.
namespace folio::inline v0::ptx {

inline void mbarrier_wait_warp(uint32_t barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);
}
inline void named_barrier_arrive(int32_t id, int32_t threads) {
  emulation::named_barrier_arrive(id, threads);
}

}  // namespace folio::inline v0::ptx
