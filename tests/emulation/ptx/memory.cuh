#pragma once

#include "warp_emulator.hpp"

/// src/ptx/memory.cuh, emulated: what the Hopper kernels use of it.
namespace folio::inline v0::ptx {

inline uint32_t shared_address(const void* data) {
  return emulation::shared_offset(data);
}
inline void st_shared_16(uint32_t shared, const uint4& value) {
  std::memcpy(emulation::shared_memory() + shared, &value, 16);
}
inline uint4 ld_shared_16(uint32_t shared) {
  uint4 value;
  std::memcpy(&value, emulation::shared_memory() + shared, 16);
  return value;
}
inline uint32_t ld_shared_4(uint32_t shared) {
  uint32_t value;
  std::memcpy(&value, emulation::shared_memory() + shared, 4);
  return value;
}
inline void st_shared_4(uint32_t shared, uint32_t value) {
  std::memcpy(emulation::shared_memory() + shared, &value, 4);
}
inline void prefetch_l2(const void*) {}
inline void read_constant(const uint32_t*) {}
inline void ld_global_4_if(int32_t& to, const int32_t* from, bool wanted) {
  if (wanted) to = *from;
}
inline void cp_async_16(uint32_t shared, const void* global, bool valid) {
  emulation::copy_later(emulation::shared_memory() + shared, global, valid ? 16 : 0, valid ? 0 : 16);
}
inline void cp_async_wait_all() {
  emulation::finish_copies();
}

}  // namespace folio::inline v0::ptx
