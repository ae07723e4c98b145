#pragma once

#include <cstdint>

/// Loads, stores and cp.async (as CUTLASS's arch/memory.h and arch/memory_sm80.h). Shared memory is named by 32-bit
/// addresses in the shared window.
namespace folio::inline v0::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* data) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(data));
}

// Shared memory. Addresses are multiples of the access size.

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

/// Waits until the loads from shared memory that `x` was computed of are complete. TMA writes by the async proxy, which
/// __syncwarp does not order behind loads: issued while they are on their way, it may write first. A fence
/// (fence_view_async_shared) orders them too, and takes longer. `shared`: any address but 0; the store never executes.
__device__ __forceinline__ void wait_loaded(uint32_t x, uint32_t shared) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, %1, 0; @p st.shared.b32 [%1], %0;}" ::"r"(x), "r"(shared) : "memory");
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

// Global memory.

/// Loads 16 bytes, bypassing the L1, if `wanted`; otherwise `to` keeps its value. In assembly because many such loads
/// are to be in flight at once: the compiler would load into other registers and stall to move each result.
__device__ __forceinline__ void ld_global_16_if(float4& to, const void* from, bool wanted) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];}"
               : "+f"(to.x), "+f"(to.y), "+f"(to.z), "+f"(to.w)
               : "l"(from), "r"(static_cast<int>(wanted))
               : "memory");
}

/// Loads a word if `wanted`; otherwise `to` keeps its value. Predicated, not branched, so that several loads overlap.
__device__ __forceinline__ void ld_global_4_if(int32_t& to, const int32_t* from, bool wanted) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.b32 %0, [%1];}"
               : "+r"(to)
               : "l"(from), "r"(static_cast<int>(wanted))
               : "memory");
}

/// Reads a word of the kernel's parameters only to bring its line into the constant cache.
__device__ __forceinline__ void read_constant(const uint32_t* word) {
  asm volatile("" ::"r"(*word));
}

/// Brings the line of an address, a multiple of four, into the L1. Does not wait.
__device__ __forceinline__ void touch_global(const void* address) {
  asm volatile("{.reg .b32 word; ld.global.b32 word, [%0];}" ::"l"(address) : "memory");
}

/// Brings the line of an address into the L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// Asynchronous copies from global to shared memory (compute capability 8.0): PTX `cp.async`.

/// Copies `bytes` of 0 to 16, bypassing the L1, and fills the rest of the 16 with zeros. With 0 bytes, nothing is read.
/// Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16_zfill(uint32_t shared, const void* global, int32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

/// Copies 16 bytes if `valid`, otherwise writes zeros.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
  cp_async_16_zfill(shared, global, valid ? 16 : 0);
}

/// Copies 16 bytes.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

/// Copies 4 bytes through the L1.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

/// Copies 4 bytes through the L1 if `wanted`; otherwise nothing is read or written.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool wanted) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 4;}" ::"r"(shared),
               "l"(global), "r"(static_cast<int32_t>(wanted))
               : "memory");
}

/// Commits this thread's cp.async operations as one group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most the last `Pending` groups of this thread are in flight. Other threads see the copied data after
/// a barrier.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/// Waits for all cp.async operations of this thread, committed or not.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace folio::inline v0::ptx
