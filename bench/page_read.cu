#include "page_read.hpp"

#include <cuda_bf16.h>

#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

namespace folio_bench {
namespace {

namespace ptx = folio::ptx;

constexpr int kThreads = 512;

/// A thread block takes a page of both pools; every thread has four reads of 16 bytes under way.
__global__ void __launch_bounds__(kThreads)
    read_kernel(const uint4* k, const uint4* v, size_t pieces, const int32_t* pages, int32_t num_pages, int32_t* sink) {
  uint32_t all = 0;
  for (int32_t p = blockIdx.x; p < num_pages; p += gridDim.x) {
    for (const uint4* pool : {k, v}) {
      const uint4* const page = pool + pages[p] * pieces;
#pragma unroll 4
      for (size_t i = threadIdx.x; i < pieces; i += kThreads) {
        const uint4 piece = __ldcs(page + i);
        all ^= piece.x ^ piece.y ^ piece.z ^ piece.w;
      }
    }
  }
  if (all == 0x12345678u) *sink = 1;
}

constexpr int32_t kStages = 4;
constexpr uint32_t kStageBytes = 16 * 1024;
constexpr uint32_t kRingBytes = kStages * kStageBytes;

/// A warp has a ring of 64 KiB that the copy engine fills from what it claims, 16 KiB at a time: pages in the list's
/// order, of each its part of both pools. What is claimed next is asked for a stage ahead.
__global__ void __launch_bounds__(32)
    bulk_read_kernel(const unsigned char* k, const unsigned char* v, uint32_t page_bytes, const int32_t* pages,
                     uint32_t num_claims, uint32_t* counters) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t arrived[kStages];
  const uint32_t lane = threadIdx.x;
  const uint32_t barriers = ptx::shared_address(arrived);
  if (lane == 0) {
    for (uint32_t i = 0; i < kStages; ++i) ptx::init_barrier(barriers + 8 * i, 1);
    ptx::publish_barriers();
  }
  __syncwarp();
  const uint32_t copies = page_bytes < kStageBytes ? kStageBytes / page_bytes : 1;  // of a claim
  const uint32_t bytes = kStageBytes / copies;
  const uint32_t pieces = page_bytes < kStageBytes ? 1 : page_bytes / kStageBytes;  // of a page
  uint32_t claim = blockIdx.x;
  uint32_t begun = 0;
  for (; claim < num_claims; ++begun) {
    const uint32_t next = lane == 0 ? gridDim.x + atomicAdd(counters, 1u) : 0;
    const uint32_t stage = begun % kStages;
    if (begun >= kStages) ptx::wait(barriers + 8 * stage, (begun / kStages + 1) & 1);
    __syncwarp();
    if (lane == 0) ptx::arrive_expecting(barriers + 8 * stage, kStageBytes);
    __syncwarp();
    const unsigned char* const pool = claim / pieces % 2 == 0 ? k : v;
    const uint32_t first = claim / pieces / 2 * copies;
    for (uint32_t i = lane; i < copies; i += 32) {
      const unsigned char* const from =
          pool + size_t{page_bytes} * static_cast<uint32_t>(pages[first + i]) + claim % pieces * size_t{kStageBytes};
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       ptx::shared_address(ring) + stage * kStageBytes + i * bytes),
                   "l"(from), "r"(bytes), "r"(barriers + 8 * stage)
                   : "memory");
    }
    claim = __shfl_sync(0xffffffffu, next, 0);
  }
  for (uint32_t i = begun < kStages ? 0 : begun - kStages; i < begun; ++i) {
    ptx::wait(barriers + 8 * (i % kStages), (i / kStages) & 1);
  }
  if (lane == 0) {
    __threadfence();
    if (atomicAdd(counters + 1, 1u) == gridDim.x - 1) counters[0] = counters[1] = 0;
  }
#endif
}

__device__ uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

__global__ void fill_kernel(__nv_bfloat16* data, size_t elements, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < elements; i += size_t{gridDim.x} * blockDim.x) {
    float sum = 0.0f;  // four uniform numbers: variance 4 / 12
    for (uint32_t n = 0; n < 4; ++n) {
      sum += static_cast<float>(mixed(static_cast<uint32_t>(i) * 4 + n + seed * 0x9e3779b9u)) * 0x1p-32f - 0.5f;
    }
    data[i] = __float2bfloat16_rn(sum * 1.7320508f);
  }
}

__global__ void fill_codes_kernel(uint32_t* data, size_t words, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words; i += size_t{gridDim.x} * blockDim.x) {
    data[i] = mixed(static_cast<uint32_t>(i) + seed * 0x9e3779b9u) & 0xbfbfbfbfu;
  }
}

}  // namespace

void read_pages(const void* k, const void* v, size_t page_bytes, const int32_t* pages, int32_t num_pages, int32_t* sink,
                cudaStream_t stream) {
  read_kernel<<<4 * 132, kThreads, 0, stream>>>(static_cast<const uint4*>(k), static_cast<const uint4*>(v),
                                                page_bytes / sizeof(uint4), pages, num_pages, sink);
}

void bulk_read_pages(const void* k, const void* v, size_t page_bytes, const int32_t* pages, int32_t num_pages,
                     uint32_t* counters, cudaStream_t stream) {
  cudaFuncSetAttribute(bulk_read_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
  const auto num_claims = static_cast<uint32_t>(2 * page_bytes * static_cast<size_t>(num_pages) / kStageBytes);
  bulk_read_kernel<<<3 * 132, 32, kRingBytes, stream>>>(static_cast<const unsigned char*>(k),
                                                        static_cast<const unsigned char*>(v),
                                                        static_cast<uint32_t>(page_bytes), pages, num_claims, counters);
}

void fill_normal(void* data, size_t elements, uint32_t seed, cudaStream_t stream) {
  fill_kernel<<<1024, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(data), elements, seed);
}

void fill_codes(void* data, size_t bytes, uint32_t seed, cudaStream_t stream) {
  fill_codes_kernel<<<1024, 256, 0, stream>>>(static_cast<uint32_t*>(data), bytes / 4, seed);
}

}  // namespace folio_bench
