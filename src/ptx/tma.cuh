#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/barrier.cuh"

/// TMA (compute capability 9.0): PTX `cp.async.bulk.tensor` moves a tile of a tensor between global and shared memory.
/// The host encodes the tensor's shape and the tile's (boxDim) in a CUtensorMap. Kernels take it as a __grid_constant__
/// parameter. Elements of a tile outside of the tensor become zeros.
namespace folio::inline v0::ptx {

/// Fetches a tensor map ahead of the first load.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// L2 cache policy for data that is read once: evicted first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// L2 cache policy for data that many CTAs read: evicted last.
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Issues, from one thread, the load of the TMA tile at five coordinates, innermost first, to `shared` (aligned to 1024
/// if the map swizzles 128 bytes). All its bytes, zeros included, count at `barrier`.
__device__ __forceinline__ void tma_load_5d(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int32_t c0,
                                            int32_t c1, int32_t c2, int32_t c3, int32_t c4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

/// Issues, from one thread, the store of the TMA tile at `shared`, laid out as tma_load_5d writes it, to five
/// coordinates, and commits it. See tma_store_wait_read.
__device__ __forceinline__ void tma_store_5d(const CUtensorMap* map, uint32_t shared, int32_t c0, int32_t c1,
                                             int32_t c2, int32_t c3, int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1]; "
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
/// Waits until this thread's TMA stores have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Waits until this thread's TMA stores are complete.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace folio::inline v0::ptx
