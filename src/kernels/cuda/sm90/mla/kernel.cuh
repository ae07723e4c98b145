#pragma once

#include "kernels/cuda/sm90/mla/consumer.cuh"
#include "kernels/cuda/sm90/mla/producer.cuh"
#include "ptx/control.cuh"
#if !defined(FOLIO_EMULATED_KERNEL)  // which takes run_cta alone
#include <cuda_runtime.h>

#include <type_traits>

#include "core/error.hpp"
#include "kernels/cuda/common/launch.hpp"
#endif

/// One persistent CTA per SM, three warpgroups:
///
///   warps 0-2   producer    72 registers   each loads one part of every KV tile: V left, V right, RoPE
///   warp  3                 72 registers   claims work tiles; loads Q
///   warps 4-7   consumer 0  216 registers  P of even KV tiles; O[:, 0:256]   of all rows
///   warps 8-11  consumer 1  216 registers  P of odd KV tiles;  O[:, 256:512] of all rows
///
/// Shared memory. A KV tile is 64 tokens: V left, V right (256 components each, keys too) and the RoPE part:
///
///   | stage 0: V left | V right | RoPE, then P | stage 1: V left | V right | RoPE, then P | Q | SharedStorage |
///   |      32 KiB     |  32 KiB |     8 KiB    |                72 KiB                    | 72 KiB | 8 KiB   |
///
/// Barriers. Arrows point from those who arrive to those who wait:
///
///   work_tile_full [2 slots]     producer -> consumers   the rows are described, Q is loaded
///   work_tile_empty[2 slots]     consumers -> producer   the epilogue is done
///   q_empty                      consumers -> producer   GEMM0 has read Q for the last time
///   kv_full [2 stages][3 parts]  producer -> consumers   TMA bytes, cp.async or committed after a scan
///   kv_empty[2 stages][3 parts]  consumers -> producer   a half of V: from its consumer; RoPE: from both, P is read
///   v_landed[2 stages]           TMA -> producer         V of boundary tiles, to be zeroed and scanned
///   fp8_landed[2 stages][3 parts] warp 3 -> warps 0-2    fp8 data of a part, to be dequantized
///   p_full    [even, odd][4]     warp <-> warp           P and TileStats, between warps of the same rows
///   row_sum_full[4]              warp <-> warp           row_sum of the work tile
///
/// Where TMA does not load keys and values, all four producer warps copy them; they find the rows' visible ranges
/// together. Where these are fp8, warp 3 loads them and warps 0 to 2 dequantize them: see producer_fp8.cuh.
///
/// Mainloop, pairs of KV tiles that nothing masks. Time goes from left to right:
///
///   consumer 0 | GEMM0(0) | softmax(0)         | GEMM1(0)   (waits for P of 1)  | GEMM1(1) | GEMM0(2) | ...
///   consumer 1 |          | GEMM0(1)           | GEMM1(0) and softmax(1)        | GEMM1(1) |          | GEMM0(3) ...
///
/// A named barrier holds GEMM0(1) back until GEMM0(0) is issued: else both end at once, and nothing runs beside
/// softmax(0). softmax(1) starts from the row_max of softmax(0).
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// What each thread does. `smem`: shared memory, from a multiple of 1024 on. `HasFp8`: q or segments may be
/// fp8.
template <typename T, int32_t DimQk, bool General, bool HasFp8>
__device__ __forceinline__ void run_cta(const MlaParams& params, unsigned char* smem) {
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem + kStorageOffset);
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kWorkTileSlots; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&storage.work_tile_full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&storage.work_tile_empty[i]), kConsumerThreads);
    }
    ptx::mbarrier_init(ptx::shared_address(&storage.q_empty), kConsumerThreads);
    for (int32_t i = 0; i < kStages; ++i) {
      for (int32_t part = 0; part < kKvParts; ++part) {
        ptx::mbarrier_init(ptx::shared_address(&storage.kv_full[i][part]), kFullArrivals);
        ptx::mbarrier_init(ptx::shared_address(&storage.kv_empty[i][part]),
                           part == kRope ? kConsumerThreads : kWarpgroupThreads);
      }
      ptx::mbarrier_init(ptx::shared_address(&storage.v_landed[i]), kLandedArrivals);
      if constexpr (HasFp8) {
        for (uint64_t& landed : storage.fp8_landed[i]) {
          ptx::mbarrier_init(ptx::shared_address(&landed), kFp8LandedArrivals);
        }
      }
    }
    for (int32_t i = 0; i < 2; ++i) {
      for (int32_t warp = 0; warp < kWarpgroupWarps; ++warp) {
        ptx::mbarrier_init(ptx::shared_address(&storage.p_full[i][warp]), 32);
      }
    }
    for (uint64_t& full : storage.row_sum_full) ptx::mbarrier_init(ptx::shared_address(&full), 2 * 32);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::warpgroup_reg_dealloc<kProducerRegisters>();
    Producer<T, DimQk, HasFp8>(params, smem, storage).run();
  } else {
    ptx::warpgroup_reg_alloc<kConsumerRegisters>();
    ConsumerWarpgroup<T, DimQk, General, HasFp8>(params, smem, storage).run();
  }
}

#if !defined(FOLIO_EMULATED_KERNEL)
template <typename T, int32_t DimQk, bool General, bool HasFp8>
__global__ void __launch_bounds__(kThreads, 1) mla_kernel(const __grid_constant__ MlaParams params) {
  extern __shared__ __align__(16) unsigned char raw[];
  ptx::griddep_launch_dependents();
  run_cta<T, DimQk, General, HasFp8>(params, raw + (1024 - ptx::shared_address(raw) % 1024) % 1024);
}

/// Enqueues a kernel. See allow_shared_memory.
template <auto Kernel>
void launch_kernel(const MlaParams& params, int32_t num_workers, Stream stream) {
  cudaError_t status = allow_shared_memory<Kernel>(kSmemBytes, false);
  if (status == cudaSuccess) {
    Kernel<<<num_workers, kThreads, kSmemBytes, static_cast<cudaStream_t>(stream.handle)>>>(params);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm90-mla: ", cudaGetErrorString(status));
  }
}

template <DType kDType, int32_t DimQk>
void launch_instantiation(const AttentionParams& attention, bool general, bool fp8, int32_t num_workers,
                          Stream stream) {
  using T = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;
  const MlaParams params = make_params(attention, kDType);
  const auto launch =
      general
          ? (fp8 ? launch_kernel<mla_kernel<T, DimQk, true, true>> : launch_kernel<mla_kernel<T, DimQk, true, false>>)
          : (fp8 ? launch_kernel<mla_kernel<T, DimQk, false, true>>
                 : launch_kernel<mla_kernel<T, DimQk, false, false>>);
  launch(params, num_workers, stream);
}
#endif

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
