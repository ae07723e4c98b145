#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/mbarrier.cuh"

/// Copies of boxes of a tensor between global and shared memory (compute capability 9.0): PTX `cp.async.bulk.tensor`. A
/// CUtensorMap, made on the host, says where the tensor lies; it stands in constant memory, that is in a
/// __grid_constant__ parameter. What a box has beyond the tensor's ends becomes zeros.
namespace folio::inline v0::ptx {

/// Fetches a tensor map ahead of the first copy.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// For what is read once: it leaves the L2 first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// For what many CTAs read: it leaves the L2 last.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Begins, by one thread, the copy of the box at five coordinates, innermost first, to `shared` (aligned to 1024 where
/// the map exchanges pieces). Its bytes, zeros included, count at `barrier`.
__device__ __forceinline__ void tma_load_5d(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3, int32_t c4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

/// Begins, by one thread, the copy of what lies at `shared` as tma_load_5d leaves it to the box at five coordinates.
/// See tma_store_wait_read.
__device__ __forceinline__ void tma_store_5d(const CUtensorMap* map, uint32_t shared, int32_t c0, int32_t c1,
                                             int32_t c2, int32_t c3, int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1]; "
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
/// Waits until shared memory has been read for all boxes that this thread has begun to store.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Waits until they are stored.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace folio::inline v0::ptx
