#pragma once

#include "kernels/cuda/sm90/mla/consumer.cuh"
#include "kernels/cuda/sm90/mla/consumer_swap_ab.cuh"
#include "kernels/cuda/sm90/mla/producer.cuh"
#include "ptx/control.cuh"

#include <type_traits>
#if !defined(FOLIO_EMULATED_KERNEL)  // which takes run_cta alone
#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/launch.hpp"
#endif

/// One persistent CTA per SM, three warpgroups:
///
///   warps 0-2   producer    72 registers   each loads one part of every KV tile: V left, V right, RoPE; Q
///   warp  3     scheduler   72 registers   claims work tiles and describes them
///   warps 4-7   consumer 0  216 registers  P of even KV tiles; O[:, 0:256]   of all rows
///   warps 8-11  consumer 1  216 registers  P of odd KV tiles;  O[:, 256:512] of all rows
///
/// Few packed rows (SwapAbConsumer): the same roles. With fp8 keys warps 12 to 15 compute P of all KV tiles, the
/// consumers only multiply it by V. Traits has the registers of every kernel.
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
///   swap_ab_p_full[stages], swap_ab_row_sum_full[2 slots]        the same with few packed rows, between warpgroups
///
/// Where TMA does not load keys and values, all four producer warps copy them. Where these are fp8 and rows many, warp
/// 3 loads them and warps 0 to 2 dequantize them: see producer_fp8.cuh.
///
/// Mainloop, pairs of KV tiles that nothing masks. Time goes from left to right:
///
///   consumer 0 | GEMM0(0) | softmax(0)         | GEMM1(0)   (waits for P of 1)  | GEMM1(1) | GEMM0(2) | ...
///   consumer 1 |          | GEMM0(1)           | GEMM1(0) and softmax(1)        | GEMM1(1) |          | GEMM0(3) ...
///
/// A named barrier holds GEMM0(1) back until GEMM0(0) is issued: else both end at once, and nothing runs beside
/// softmax(0). softmax(1) starts from the row_max of softmax(0).
namespace folio::inline v0::kernels::cuda::sm90::mla {

/// Brings parameters to the SM's constant cache, a line or two per warp: segment 0's, and those behind the segments.
__device__ __forceinline__ void prefetch_parameters(const MlaParams& params) {
  constexpr int32_t kLine = 64 / sizeof(uint32_t);
  constexpr int32_t kSegmentLines = 3;
  constexpr auto kAlone = static_cast<int32_t>(offsetof(AttentionParams, num_q_heads) / sizeof(uint32_t));
  constexpr int32_t kWarps = kThreads / 32;
  static_assert(sizeof(SegmentParams) <= kSegmentLines * 64);
  static_assert(kAlone * sizeof(uint32_t) + (kWarps - kSegmentLines) * 64 >= sizeof(AttentionParams));
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  const auto word = warp < kSegmentLines ? kLine * warp : kAlone + kLine * (warp - kSegmentLines);
  constexpr auto kLast = static_cast<int32_t>(sizeof(AttentionParams) / sizeof(uint32_t)) - 1;
  ptx::read_constant(reinterpret_cast<const uint32_t*>(&params.attention) + (word < kLast ? word : kLast));
  if (warp == 0) ptx::read_constant(reinterpret_cast<const uint32_t*>(&params.copies[0]));
  if (warp == 1) ptx::read_constant(reinterpret_cast<const uint32_t*>(&params.q_tma_heads));
}

/// Asks for what the first work tile will need.
__device__ __forceinline__ void prefetch(const MlaParams& params) {
  prefetch_page_table(params.attention, kThreads);
  prefetch_parameters(params);
  if (threadIdx.x == 32 && params.copies[0].tma_tokens > 0) ptx::prefetch_tensormap(&params.maps[0].k);
  if (threadIdx.x == 64 && params.q_by_tma) ptx::prefetch_tensormap(&params.q_map);
  if (threadIdx.x == 96) {
    const scheduler::PlanView& plan = params.attention.plan->view;
    const auto tile = static_cast<int32_t>(blockIdx.x);
    if (tile < plan.num_dynamic_tiles) {
      ptx::touch_global(&plan.work_tiles[tile]);
      ptx::touch_global(plan.segments);
    }
  }
}

/// What each thread does. `smem`: shared memory, from a multiple of 1024 on. `General`: there is a soft cap, ALiBi or a
/// custom mask; with swapped operands the kernel looks for itself.
template <typename Traits, bool General>
__device__ __forceinline__ void run_cta(const MlaParams& params, unsigned char* smem) {
  using L = typename Traits::L;
  using Storage = typename Traits::Storage;
  Storage& storage = *reinterpret_cast<Storage*>(smem + L::kStorageOffset);
  prefetch(params);
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kWorkTileSlots; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&storage.work_tile_full[i]), kFullArrivals);
      ptx::mbarrier_init(ptx::shared_address(&storage.work_tile_empty[i]), Traits::kThreads - kWarpgroupThreads);
    }
    ptx::mbarrier_init(ptx::shared_address(&storage.q_empty),
                       Traits::kSplitsRoles ? kWarpgroupThreads : kConsumerThreads);
    for (int32_t i = 0; i < L::kStages; ++i) {
      for (int32_t part = 0; part < kKvParts; ++part) {
        ptx::mbarrier_init(ptx::shared_address(&storage.kv_full[i][part]), kFullArrivals);
        ptx::mbarrier_init(ptx::shared_address(&storage.kv_empty[i][part]),
                           part == kRope ? kConsumerThreads : kWarpgroupThreads);
      }
      ptx::mbarrier_init(ptx::shared_address(&storage.v_landed[i]), kLandedArrivals);
      if constexpr (Traits::kDequantizes) {
        for (uint64_t& landed : storage.fp8_landed[i]) {
          ptx::mbarrier_init(ptx::shared_address(&landed), kFp8LandedArrivals);
        }
      }
    }
    if constexpr (Traits::kSwapsAb) {
      for (uint64_t& full : storage.swap_ab_p_full) ptx::mbarrier_init(ptx::shared_address(&full), kWarpgroupThreads);
      for (uint64_t& full : storage.swap_ab_row_sum_full) {
        ptx::mbarrier_init(ptx::shared_address(&full), Traits::kSplitsRoles ? kWarpgroupThreads : kConsumerThreads);
      }
    } else {
      for (auto& of_tiles : storage.p_full) {
        for (uint64_t& full : of_tiles) ptx::mbarrier_init(ptx::shared_address(&full), 32);
      }
      for (uint64_t& full : storage.row_sum_full) ptx::mbarrier_init(ptx::shared_address(&full), 2 * 32);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    Producer<Traits>(params, smem, storage).run();
  } else if (Traits::kSplitsRoles && threadIdx.x >= kThreads) {
    if constexpr (Traits::kSplitsRoles) {
      ptx::warpgroup_reg_alloc<Traits::kScoresRegisters>();
      SwapAbConsumer<Traits, true>(params, smem, storage).run();
    }
  } else {
    ptx::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    if constexpr (Traits::kSwapsAb) {
      SwapAbConsumer<Traits, !Traits::kSplitsRoles>(params, smem, storage).run();
    } else {
      ConsumerWarpgroup<Traits, General>(params, smem, storage).run();
    }
  }
}

template <DType kDType>
using ElementOf = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;
template <DType kDType, int32_t DimQk, bool Dequantizes>
using RowsTraits = Traits<ElementOf<kDType>, DimQk, kBlockM, Dequantizes, Fp8::kNone>;
using RowsDsMlaTraits = Traits<__half, kHeadDimsQk[0], kBlockM, true, Fp8::kNone, true>;
template <DType kDType, int32_t DimQk, Fp8 kFp8, bool DsMla>
using SwapAbTraits = Traits<ElementOf<kDType>, DimQk, kSwapAbRows, false, kFp8, DsMla>;

/// Enqueues a kernel.
template <typename Traits, bool General>
void launch_kernel(const MlaParams& params, int32_t num_workers, Stream stream);

#if !defined(FOLIO_EMULATED_KERNEL)
template <typename Traits, bool General>
__global__ void __launch_bounds__(65536 / Traits::kRegisters / 128 * 128, 1)
    mla_kernel(const __grid_constant__ MlaParams params) {
  extern __shared__ __align__(16) unsigned char raw[];
  ptx::griddep_launch_dependents();
  run_cta<Traits, General>(params, raw + (1024 - ptx::shared_address(raw) % 1024) % 1024);
}

/// See allow_shared_memory.
template <typename Traits, bool General>
void launch_kernel(const MlaParams& params, int32_t num_workers, Stream stream) {
  constexpr int32_t kBytes = smem_bytes<Traits>();
  cudaError_t status = allow_shared_memory<mla_kernel<Traits, General>>(kBytes, Traits::kSwapsAb);
  if (status == cudaSuccess) {
    const auto native = static_cast<cudaStream_t>(stream.handle);
    mla_kernel<Traits, General><<<num_workers, Traits::kThreads, kBytes, native>>>(params);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm90-mla: ", cudaGetErrorString(status));
  }
}
#endif

template <DType kDType, int32_t DimQk>
void launch_rows(const AttentionParams& attention, bool general, bool fp8, int32_t num_workers, Stream stream) {
  const MlaParams params = make_params(attention, kDType);
  const auto launch = general ? (fp8 ? launch_kernel<RowsTraits<kDType, DimQk, true>, true>
                                     : launch_kernel<RowsTraits<kDType, DimQk, false>, true>)
                              : (fp8 ? launch_kernel<RowsTraits<kDType, DimQk, true>, false>
                                     : launch_kernel<RowsTraits<kDType, DimQk, false>, false>);
  launch(params, num_workers, stream);
}

template <bool General>
void launch_rows_ds_mla(const AttentionParams& attention, int32_t num_workers, Stream stream) {
  launch_kernel<RowsDsMlaTraits, General>(make_params(attention, DType::kFloat16), num_workers, stream);
}

template <DType kDType, int32_t DimQk, Fp8 kFp8, bool DsMla>
void launch_swap_ab(const AttentionParams& attention, int32_t num_workers, Stream stream) {
  launch_kernel<SwapAbTraits<kDType, DimQk, kFp8, DsMla>, false>(make_params(attention, kDType), num_workers, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm90::mla
