#pragma once

#include "warp_emulator.hpp"

/// src/ptx/cp_async.cuh, emulated: what cuda-sm90-decode uses of it.
namespace folio::inline v0::ptx {

inline uint32_t shared_address(const void* data) {
  return emulation::shared_offset(data);
}
inline void copy_16_async(uint32_t shared, const void* global, bool valid) {
  emulation::copy_later(emulation::shared_memory() + shared, global, valid ? 16 : 0, valid ? 0 : 16);
}
inline void store_16(uint32_t shared, const uint4& value) {
  std::memcpy(emulation::shared_memory() + shared, &value, 16);
}
inline uint4 load_16(uint32_t shared) {
  uint4 value;
  std::memcpy(&value, emulation::shared_memory() + shared, 16);
  return value;
}
inline uint32_t load_4(uint32_t shared) {
  uint32_t value;
  std::memcpy(&value, emulation::shared_memory() + shared, 4);
  return value;
}
inline void store_4(uint32_t shared, uint32_t value) {
  std::memcpy(emulation::shared_memory() + shared, &value, 4);
}
inline void wait_all_copies() {
  emulation::finish_copies();
}

}  // namespace folio::inline v0::ptx
