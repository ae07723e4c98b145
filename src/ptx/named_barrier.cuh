#pragma once

#include "ptx/mbarrier.cuh"

/// Barriers as whole warps use them whose next instructions are products.
namespace folio::inline v0::ptx {

/// `wait` by whole warps. The compiler sees no branch: what was equal in all lanes before stays so to it.
__device__ __forceinline__ void mbarrier_wait_warp(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n@!p bra "
      "AGAIN;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// `meet` for those who do not wait for the others.
__device__ __forceinline__ void named_barrier_arrive(int32_t id, int32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace folio::inline v0::ptx
