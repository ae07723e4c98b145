#pragma once

/// Two kernels of one stream that overlap (compute capability 9.0): PTX `griddepcontrol`. The second is launched with
/// cudaLaunchAttributeProgrammaticStreamSerialization. On older parts, and without the attribute, nothing happens: the
/// second kernel begins when the first has ended.
namespace folio::inline v0::ptx {

/// In the first kernel: the second may begin once every CTA has called this or ended.
__device__ __forceinline__ void griddep_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// In the second kernel: waits until the kernels before it have ended and their writes can be read.
__device__ __forceinline__ void griddep_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace folio::inline v0::ptx
