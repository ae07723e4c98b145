#pragma once

#include <cstdint>

/// Barriers and fences (as CUTLASS's arch/barrier.h).
///
/// An mbarrier (PTX `mbarrier`, compute capability 9.0) is an object in shared memory. It counts arrivals and, for
/// asynchronous copies, bytes. Phase n, counted from 0, completes when all its arrivals and all its bytes are in. A
/// waiter names the phase by its parity, n & 1, and must not fall a whole phase behind.
///
/// A named barrier (PTX `bar`) is one of the CTA's 16 hardware barriers. Barrier 0 is __syncthreads.
namespace folio::inline v0::ptx {

/// Initialises eight bytes of shared memory (aligned to eight) as a barrier of `arrivals` per phase. Other threads may
/// use it after mbarrier_init_fence and a CTA-wide barrier.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Called by the thread that initialised barriers: makes them visible to the async proxy (TMA).
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// One arrival. Releases this thread's earlier writes.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// `count` arrivals at once.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/// One arrival. The phase also waits for `bytes` more of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// One arrival, once every cp.async that this thread has issued is complete. It is one of the barrier's arrivals.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Whether the phase of this parity is complete. If so, this thread sees what was released to it and copied.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}

/// Waits until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(complete)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (complete == 0);
}

/// mbarrier_wait by a whole warp, ahead of its MMAs. The loop is inside the assembly, so the compiler sees no branch:
/// values that were warp-uniform before the wait stay uniform.
__device__ __forceinline__ void mbarrier_wait_warp(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n@!p bra "
      "AGAIN;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Arrives at named barrier `id` (1 to 15) and waits for `threads` of the CTA's threads, a multiple of 32.
__device__ __forceinline__ void named_barrier_sync(int32_t id, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// named_barrier_sync that tells every thread whether `mine` is true in any of them.
__device__ __forceinline__ bool named_barrier_any(int32_t id, int32_t threads, bool mine) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\nbar.red.or.pred p, %2, %3, q;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(any)
               : "r"(mine ? 1u : 0u), "r"(id), "r"(threads)
               : "memory");
  return any != 0;
}

/// Arrives without waiting. `threads` counts the waiting threads too.
__device__ __forceinline__ void named_barrier_arrive(int32_t id, int32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// CUTLASS's fence of the same name. It orders this thread's accesses of shared memory before accesses of the async
/// proxy (TMA, wgmma) that are issued after a barrier.
__device__ __forceinline__ void fence_view_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace folio::inline v0::ptx
