#pragma once

#include "ptx/barrier.cuh"
#include "warp_emulator.hpp"

/// src/ptx/tma.cuh, emulated.
namespace folio::inline v0::ptx {

inline void prefetch_tensormap(const CUtensorMap*) {}
inline uint64_t evict_first_policy() {
  return 0;
}
inline uint64_t evict_last_policy() {
  return 0;
}
inline void tma_load_5d(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int32_t c0, int32_t c1, int32_t c2,
                        int32_t c3, int32_t c4, uint64_t) {
  emulation::copy_box(shared, map, barrier, {c0, c1, c2, c3, c4});
}
inline void tma_store_5d(const CUtensorMap* map, uint32_t shared, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                         int32_t c4) {
  emulation::store_box(map, shared, {c0, c1, c2, c3, c4});
}
inline void tma_store_wait_read() {
  emulation::finish_copies();
}
inline void tma_store_wait() {
  emulation::finish_copies();
}

}  // namespace folio::inline v0::ptx
