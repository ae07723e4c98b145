#pragma once

#include "warp_emulator.hpp"

/// src/ptx/memory.cuh, emulated.
namespace folio::inline v0::ptx {

// Addresses in shared memory are offsets from the dynamic memory's beginning; static variables may lie before it.
inline unsigned char* shared_at(uint32_t shared) {
  return emulation::shared_memory() + static_cast<int32_t>(shared);
}

inline uint32_t shared_address(const void* data) {
  return emulation::shared_offset(data);
}
inline void st_shared_16(uint32_t shared, const uint4& value) {
  std::memcpy(shared_at(shared), &value, 16);
}
inline uint4 ld_shared_16(uint32_t shared) {
  uint4 value;
  std::memcpy(&value, shared_at(shared), 16);
  emulation::note_read(shared);
  return value;
}
inline uint32_t ld_shared_4(uint32_t shared) {
  uint32_t value;
  std::memcpy(&value, shared_at(shared), 4);
  return value;
}
inline void st_shared_4(uint32_t shared, uint32_t value) {
  std::memcpy(shared_at(shared), &value, 4);
}
inline void wait_loaded(uint32_t, uint32_t) {
  emulation::complete_reads();
}
inline uint2 ld_shared_8(uint32_t shared) {
  uint2 value;
  std::memcpy(&value, shared_at(shared), 8);
  return value;
}
inline void st_shared_8(uint32_t shared, uint64_t value) {
  std::memcpy(shared_at(shared), &value, 8);
}
inline void touch_global(const void*) {}
inline void prefetch_l2(const void*) {}
inline void read_constant(const uint32_t*) {}
inline void ld_global_4_if(int32_t& to, const int32_t* from, bool wanted) {
  if (wanted) to = *from;
}
inline void ld_global_16_if(float4& to, const void* from, bool wanted) {
  if (wanted) std::memcpy(&to, from, 16);
}
inline void cp_async_16_zfill(uint32_t shared, const void* global, int32_t bytes) {
  emulation::copy_later(shared_at(shared), global, bytes, 16 - bytes);
}
inline void cp_async_16(uint32_t shared, const void* global) {
  cp_async_16_zfill(shared, global, 16);
}
inline void cp_async_4(uint32_t shared, const void* global, bool wanted = true) {
  if (wanted) emulation::copy_later(shared_at(shared), global, 4, 0);
}
inline void cp_async_commit() {
  emulation::commit_copies();
}
template <int Pending>
void cp_async_wait() {
  emulation::finish_groups(Pending);
}
inline void cp_async_16(uint32_t shared, const void* global, bool valid) {
  cp_async_16_zfill(shared, global, valid ? 16 : 0);
}
inline void cp_async_wait_all() {
  emulation::finish_copies();
}

}  // namespace folio::inline v0::ptx
