#pragma once

#include <cstdint>

/// Asynchronous copies from global to shared memory (compute capability 8.0): PTX `cp.async`.
namespace folio::inline v0::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* data) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(data));
}

/// Copies 16 bytes past the first-level cache, or writes 16 zero bytes where `valid` is false; then nothing is read.
/// Both addresses are multiples of 16.
__device__ __forceinline__ void copy_16_async(uint32_t shared, const void* global, bool valid) {
  const uint32_t bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

/// The same, always valid.
__device__ __forceinline__ void copy_16_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

/// 16 bytes at once, from registers.
__device__ __forceinline__ void store_16(uint32_t shared, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ uint32_t load_4(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ void store_4(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

/// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most the last `Pending` groups of this thread are under way. Other threads see what was copied after
/// a barrier.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace folio::inline v0::ptx
