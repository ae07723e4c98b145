#pragma once

#include <cstdint>

/// Control of grids and warps (compute capability 9.0): programmatic dependent launch (PTX `griddepcontrol`),
/// register reallocation between warpgroups (`setmaxnreg`) and lane election (`elect`).
namespace folio::inline v0::ptx {

/// threadIdx.x, read again at every call. So the compiler does not keep what one path derives from it in registers
/// throughout the others.
__device__ __forceinline__ int32_t thread_index() {
  int32_t number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

/// Values that are computed before what follows: the compiler does not delay them.
__device__ __forceinline__ void compute_here(float& a, uint32_t& b) {
  asm volatile("" : "+f"(a), "+r"(b));
}

// Programmatic dependent launch (PDL) overlaps two kernels of one stream. The host launches the second with
// cudaLaunchAttributeProgrammaticStreamSerialization. Without that attribute, and before compute capability 9.0, both
// functions do nothing: the second kernel starts when the first has completed.

/// In the first kernel: the second may start once every CTA has called this or exited.
__device__ __forceinline__ void griddep_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// In the second kernel: waits until all prerequisite kernels have completed and their writes are visible.
__device__ __forceinline__ void griddep_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Registers of a warpgroup: four consecutive warps, the first a multiple of 4 (sm_90a only). The launch bounds set the
// registers per thread at entry. Producer warpgroups release some, consumer warpgroups wait for them. All warps of a
// warpgroup call these, outside of divergent code.

/// Lowers the limit to `Count` registers per thread: 24 to 256, a multiple of 8, at most the present number.
template <int32_t Count>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

/// Raises the limit to `Count` registers per thread. Waits until they are free.
template <int32_t Count>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

/// True in one lane of the warp, always the same one. All 32 lanes call it. The compiler knows that a branch on the
/// result has a single active thread.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

}  // namespace folio::inline v0::ptx
