#pragma once

#include <cstdint>

/// Asynchronous copies from global to shared memory (compute capability 8.0): PTX `cp.async`.
namespace folio::inline v0::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* data) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(data));
}

/// Copies `bytes` of 0 to 16 past the L1 and writes zeros behind them; of 0, nothing is read. Both
/// addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16_zfill(uint32_t shared, const void* global, int32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

/// The same, 16 bytes or, where not valid, zeros.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
  cp_async_16_zfill(shared, global, valid ? 16 : 0);
}

/// The same, always valid.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

/// Copies 4 bytes through the L1.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

/// The same where `wanted`; else nothing is read or written.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool wanted) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4;}" ::"r"(shared),
               "l"(global), "r"(static_cast<int32_t>(wanted))
               : "memory");
}

/// 16 bytes at once, from registers.
__device__ __forceinline__ void st_shared_16(uint32_t shared, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ uint4 ld_shared_16(uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

__device__ __forceinline__ uint2 ld_shared_8(uint32_t shared) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_shared_4(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ void st_shared_4(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_8(uint32_t shared, uint64_t value) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(shared), "l"(value) : "memory");
}

/// Ends a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most the last `Pending` groups of this thread are under way. Other threads see what was copied after
/// a barrier.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/// Waits for all copies of this thread, in groups or not.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace folio::inline v0::ptx
