#include "page_read.hpp"

#include <cuda_bf16.h>

#include <stdexcept>

#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

namespace folio_bench {
namespace {

namespace ptx = folio::ptx;

constexpr int kThreads = 512;

/// A CTA takes a page of both pools; every thread has four reads of 16 bytes under way.
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

constexpr uint32_t kStages = 4;
constexpr uint32_t kStageBytes = 16 * 1024;

/// What a claim stands for: `bytes` of one pool, of one page or of `pages` whole ones.
struct Pieces {
  CUtensorMap pools[2];  ///< lines of 128 bytes
  const int32_t* ids;
  uint32_t page_lines;
  uint32_t bytes;  ///< of a claim, up to kStageBytes
  uint32_t pages;  ///< of a claim
  uint32_t parts;  ///< claims of a page
  uint32_t num_dynamic_tiles;
};

/// A warp has a ring of 64 KiB that TMA fills with what it claims: pages in the list's order, of each its
/// part of both pools. The next claim and its pages' ids are asked for a stage ahead.
__global__ void __launch_bounds__(32) bulk_read_kernel(const __grid_constant__ Pieces pieces, uint32_t* counters) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t arrived[kStages];
  const uint32_t lane = threadIdx.x;
  const uint32_t barriers = ptx::shared_address(arrived);
  if (lane == 0) {
    for (uint32_t i = 0; i < kStages; ++i) ptx::mbarrier_init(barriers + 8 * i, 1);
    ptx::mbarrier_init_fence();
  }
  __syncwarp();
  const auto id_of = [&](uint32_t claim) {
    return lane < pieces.pages && claim < pieces.num_dynamic_tiles
               ? pieces.ids[claim / pieces.parts / 2 * pieces.pages + lane]
               : 0;
  };
  uint32_t claim = blockIdx.x;
  int32_t id = id_of(claim);
  uint32_t ticket = lane == 0 ? atomicAdd(counters, 1u) : 0;
  uint32_t begun = 0;
  for (; claim < pieces.num_dynamic_tiles; ++begun) {
    const uint32_t stage = begun % kStages;
    if (begun >= kStages) ptx::mbarrier_wait(barriers + 8 * stage, (begun / kStages + 1) & 1);
    const uint32_t next = gridDim.x + __shfl_sync(0xffffffffu, ticket, 0);
    if (lane == 0) {
      ticket = atomicAdd(counters, 1u);
      ptx::mbarrier_arrive_expect_tx(barriers + 8 * stage, pieces.bytes);
    }
    const int32_t next_id = id_of(next);
    __syncwarp();
    if (lane < pieces.pages) {
      const uint32_t bytes = pieces.bytes / pieces.pages;
      const uint32_t line = pieces.page_lines * static_cast<uint32_t>(id) + claim % pieces.parts * (pieces.bytes / 128);
      asm volatile(
          "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1, {%2, %3}], [%4], %5;" ::"r"(ptx::shared_address(ring) + stage * kStageBytes + lane * bytes),
          "l"(&pieces.pools[claim / pieces.parts % 2]), "r"(0), "r"(line), "r"(barriers + 8 * stage),
          "l"(ptx::evict_first_policy())
          : "memory");
    }
    claim = next;
    id = next_id;
  }
  for (uint32_t i = begun < kStages ? 0 : begun - kStages; i < begun; ++i) {
    ptx::mbarrier_wait(barriers + 8 * (i % kStages), (i / kStages) & 1);
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

__global__ void fill_fp8_kernel(uint32_t* data, size_t words, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words; i += size_t{gridDim.x} * blockDim.x) {
    data[i] = mixed(static_cast<uint32_t>(i) + seed * 0x9e3779b9u) & 0xbfbfbfbfu;
  }
}

__global__ void occupy_kernel(uint64_t nanoseconds) {
  uint64_t begin;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  for (uint64_t now = begin; now - begin < nanoseconds;) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
}

}  // namespace

void read_pages(const void* k, const void* v, size_t page_bytes, const int32_t* pages, int32_t num_pages, int32_t* sink,
                cudaStream_t stream) {
  read_kernel<<<4 * 132, kThreads, 0, stream>>>(static_cast<const uint4*>(k), static_cast<const uint4*>(v),
                                                page_bytes / sizeof(uint4), pages, num_pages, sink);
}

void bulk_read_pages(const void* k, const void* v, size_t page_bytes, size_t pool_bytes, const int32_t* pages,
                     int32_t num_pages, uint32_t* counters, cudaStream_t stream) {
  constexpr uint32_t kRingBytes = kStages * kStageBytes;
  cudaFuncSetAttribute(bulk_read_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
  const auto bytes_of_page = static_cast<uint32_t>(page_bytes);
  Pieces pieces{};
  pieces.ids = pages;
  pieces.page_lines = bytes_of_page / 128;
  pieces.parts = 1;
  while (bytes_of_page % (128 * pieces.parts) != 0 || bytes_of_page / pieces.parts > kStageBytes) ++pieces.parts;
  pieces.pages = 1;
  while (pieces.parts == 1 && 2 * pieces.pages * bytes_of_page <= kStageBytes && 2 * pieces.pages <= 32 &&
         static_cast<uint32_t>(num_pages) % (2 * pieces.pages) == 0) {
    pieces.pages *= 2;
  }
  pieces.bytes = bytes_of_page / pieces.parts * pieces.pages;
  pieces.num_dynamic_tiles = 2 * static_cast<uint32_t>(num_pages) * pieces.parts / pieces.pages;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  if (function == nullptr) throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  for (const void* pool : {k, v}) {
    const cuuint64_t dims[2] = {64, pool_bytes / 128};
    const cuuint64_t step = 128;
    const cuuint32_t box[2] = {64, pieces.bytes / pieces.pages / 128};
    const cuuint32_t ones[2] = {1, 1};
    // Promotion would fetch more than is asked for.
    const CUresult status =
        encode(&pieces.pools[pool == k ? 0 : 1], CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<void*>(pool), dims,
               &step, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) throw std::runtime_error("the pools cannot be described by a tensor map");
  }
  bulk_read_kernel<<<3 * 132, 32, kRingBytes, stream>>>(pieces, counters);
}

void occupy(uint32_t microseconds, cudaStream_t stream) {
  occupy_kernel<<<1, 1, 0, stream>>>(uint64_t{1000} * microseconds);
}

void fill_normal(void* data, size_t elements, uint32_t seed, cudaStream_t stream) {
  fill_kernel<<<1024, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(data), elements, seed);
}

void fill_fp8(void* data, size_t bytes, uint32_t seed, cudaStream_t stream) {
  fill_fp8_kernel<<<1024, 256, 0, stream>>>(static_cast<uint32_t*>(data), bytes / 4, seed);
}

}  // namespace folio_bench
