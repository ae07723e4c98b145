#pragma once

#include <cstdint>

/// Words that GPUs of one host and their kernels give each other (PTX `st.release.sys`, `ld.acquire.sys`), and the time
/// that a kernel waits for one.
namespace folio::inline v0::ptx {

/// Whoever reads the word with ld_acquire_system sees what this thread has written before, and what it has seen others
/// write: by __syncthreads its whole CTA's.
__device__ __forceinline__ void st_release_system(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t ld_acquire_system(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

/// Nanoseconds since a time that all SMs have in common. It advances by steps of up to a few microseconds.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

/// Between two looks at a word that another kernel will write.
__device__ __forceinline__ void wait_for_other_grids() {}

}  // namespace folio::inline v0::ptx
