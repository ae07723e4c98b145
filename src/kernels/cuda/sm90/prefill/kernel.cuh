#pragma once

#include <type_traits>

#include "kernels/cuda/sm90/prefill/consumer_fp8_mma.cuh"
#include "kernels/cuda/sm90/prefill/producer_fp8.cuh"
#include "kernels/cuda/sm90/prefill/producer_fp8_mma.cuh"
#include "ptx/control.cuh"

/// The roles of a persistent CTA's warps. One CTA an SM, 384 threads:
///
///   warpgroup 0: producer                             warpgroups 1 and 2: consumers
///   4 warps, 88 registers a thread                    4 warps each, 208 registers a thread
///   (104 where it dequantizes fp8)                    (200)
///
///   warps 2 and 3: TileFetcher
///   next work tile,  tile_full [2]  ----------------> 64 rows of the work tile each
///   its rows, its Q  tile_empty[2]  <---------------- epilogue: O in Q's memory, then TMA or threads store it
///      |
///      | tile_described[2]
///      v             k_pipeline                       mainloop, from the last KV tile to the first:
///   warps 0 and 1    full [stages]  ---------------->   S = Q K^T   GEMM0, wgmma from shared memory
///   K tiles (TMA)    empty[stages]  <----------------   P = softmax(S), in registers
///                    v_pipeline
///   V tiles (TMA)    full [stages]  ---------------->   O += P V    GEMM1, P from registers; it overlaps the
///                    empty[stages]  <----------------   softmax of the next KV tile
///
///   order of loads:  K0, K1, V0, K2, V1, ...          kPingPongBarrier: one consumer at a time issues MMAs;
///                                                     they overlap the other's softmax
///
/// All four producer warps copy what TMA cannot, and do both roles in turn where fetch_warps() says so.
/// Stages and shared memory by head dimensions: docs/kernels/cuda_sm90_prefill.md. FP8 MMA has K, raw V and transposed
/// V in 3 + 2 + 3 stages; its producer transposes V between the last two.
namespace folio::inline v0::kernels::cuda::sm90::prefill {

/// What each thread does. `memory`: shared memory, from a multiple of 1024 on. See launch_prefill.
template <typename T, int32_t DimQk, int32_t DimV, Variant kVariant, Fp8 kFp8 = Fp8::kNone, bool kFp8Mma = false>
__device__ __forceinline__ void run_cta(const PrefillParams& params, unsigned char* memory) {
  static_assert(DimQk % 32 == 0 && DimV % 32 == 0 && DimQk >= DimV && stages({DimQk, DimV}) <= kMaxStages);
  constexpr SmemLayout kLayout = smem_layout({DimQk, DimV});
  constexpr bool kDequantizes = dequantizes(kFp8, kFp8Mma);
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(memory + kLayout.storage);
  static_assert(kLayout.storage % alignof(SharedStorage) == 0);
  init_barriers(storage, has_visible_bits(kVariant) ? kConsumerWarps * 32 : kConsumerWarps,  // see release_k
                32 * fetch_warps(kVariant, kFp8 != Fp8::kNone));
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::warpgroup_reg_dealloc<kDequantizes ? kFp8ProducerRegisters : kProducerRegisters>();
    if constexpr (kFp8Mma) {
      Fp8MmaProducer(params, memory, storage).run();
    } else if constexpr (kDequantizes) {
      static_assert(std::is_same_v<T, __half> && DimQk == kFp8Dim && DimV == kFp8Dim);
      Fp8Producer<kFp8, kVariant>(params, memory, storage).run();
    } else {
      Producer<T, DimQk, DimV, kVariant, fetch_warps(kVariant, false)>(params, memory, storage).run();
    }
  } else {
    ptx::warpgroup_reg_alloc<kDequantizes ? kFp8ConsumerRegisters : kConsumerRegisters>();
    if constexpr (kFp8Mma) {
      static_assert(kFp8 == Fp8::kE4M3 && kVariant == Variant::kPlain);
      static_assert(DimQk == kFp8MmaDims.qk && DimV == kFp8MmaDims.v);
      Fp8MmaConsumerWarpgroup(params, memory, storage).run();
    } else {
      ConsumerWarpgroup<T, DimQk, DimV, kVariant>(params, memory, storage).run();
    }
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm90::prefill
