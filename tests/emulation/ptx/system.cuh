#pragma once

#include <chrono>
#include <cstdint>

#include "waiting_grids.hpp"

/// src/ptx/system.cuh, emulated: words are the processor's atomics, since kernels of other processes read them too.
namespace folio::inline v0::ptx {

inline void st_release_system(uint32_t* at, uint32_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

inline uint32_t ld_acquire_system(const uint32_t* at) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

inline uint64_t global_timer() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

inline void wait_for_other_grids() {
  emulation::let_other_grids_run();
}

}  // namespace folio::inline v0::ptx
