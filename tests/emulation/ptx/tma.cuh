#pragma once

#include "warp_emulator.hpp"

/// src/ptx/tma.cuh, emulated.
namespace folio::inline v0::ptx {

inline void prefetch_map(const CUtensorMap*) {}
inline uint64_t evict_first_policy() {
  return 0;
}
inline uint64_t evict_last_policy() {
  return 0;
}
inline void copy_box_5d(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int32_t c0, int32_t c1, int32_t c2,
                        int32_t c3, int32_t c4, uint64_t) {
  emulation::copy_box(shared, map, barrier, {c0, c1, c2, c3, c4});
}
inline void store_box_5d(const CUtensorMap* map, uint32_t shared, int32_t c0, int32_t c1, int32_t c2, int32_t c3,
                         int32_t c4) {
  emulation::store_box(map, shared, {c0, c1, c2, c3, c4});
}
inline void wait_box_reads() {
  emulation::finish_copies();
}
inline void wait_box_stores() {
  emulation::finish_copies();
}
inline void order_before_box_copies() {}

}  // namespace folio::inline v0::ptx
