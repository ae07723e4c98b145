#pragma once

#include "warp_emulator.hpp"

/// src/ptx/barrier.cuh, emulated.
namespace folio::inline v0::ptx {

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  emulation::mbarrier_init(barrier, arrivals);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier, uint32_t count = 1) {
  emulation::complete_reads();
  emulation::mbarrier_arrive(barrier, count);
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulation::expect(barrier, bytes);
  mbarrier_arrive(barrier);
}
inline void cp_async_mbarrier_arrive(uint32_t barrier) {
  emulation::cp_async_mbarrier_arrive(barrier);
}
inline bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  return emulation::mbarrier_test_wait(barrier, parity);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!emulation::mbarrier_test_wait(barrier, parity)) emulation::yield();
}
inline void mbarrier_wait_warp(uint32_t barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);
}
inline void named_barrier_sync(int32_t id, int32_t threads) {
  emulation::named_barrier_sync(id, threads);
}
inline bool named_barrier_any(int32_t id, int32_t threads, bool mine) {
  return emulation::named_barrier_any(id, threads, mine);
}
inline void named_barrier_arrive(int32_t id, int32_t threads) {
  emulation::named_barrier_arrive(id, threads);
}
inline void fence_view_async_shared() {
  emulation::complete_reads();
}

}  // namespace folio::inline v0::ptx
