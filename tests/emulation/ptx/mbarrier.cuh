#pragma once

#include "warp_emulator.hpp"

/// src/ptx/mbarrier.cuh, emulated.
namespace folio::inline v0::ptx {

inline void init_barrier(uint32_t barrier, uint32_t arrivals) {
  emulation::init_barrier(barrier, arrivals);
}
inline void publish_barriers() {}
inline void arrive(uint32_t barrier) {
  emulation::arrive(barrier, 1);
}
inline void arrive(uint32_t barrier, uint32_t count) {
  emulation::arrive(barrier, count);
}
inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  emulation::expect(barrier, bytes);
  emulation::arrive(barrier, 1);
}
inline void arrive_after_copies(uint32_t barrier) {
  emulation::arrive_after_copies(barrier);
}
inline bool has_ended(uint32_t barrier, uint32_t parity) {
  return emulation::has_ended(barrier, parity);
}
inline void wait(uint32_t barrier, uint32_t parity) {
  while (!emulation::has_ended(barrier, parity)) emulation::yield();
}
inline void meet(int32_t id, int32_t threads) {
  emulation::meet(id, threads);
}

}  // namespace folio::inline v0::ptx
