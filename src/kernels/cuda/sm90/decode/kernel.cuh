#pragma once

#include "kernels/cuda/sm90/decode/consumer.cuh"
#include "kernels/cuda/sm90/decode/scheduler.cuh"
#include "ptx/control.cuh"

/// The persistent kernel, one CTA per SM.
///
///   warp 8: TileFetcher (scheduler.cuh)              warps 0-7 (0-3 at head_dim 256): ConsumerWarp (consumer.cuh)
///   +--------------------------------------+         +---------------------------------------------------------+
///   | DynamicTileScheduler -> work tile    |         | consumer_wait: tile batch                               |
///   | mask bounds of its rows (a lane each)|         | mainloop over every 8th KV tile (16 tokens) of it:      |
///   | places of its tokens (page table)    |         |   KvPipeline::produce        TMA or cp.async, its own   |
///   | queries (cp.async)                   |         |   gemm0  S^T = K Q^T         mma.sync.m16n8k16          |
///   | producer_acquire                     |<-empty--|   mask, online softmax       lazy rescaling             |
///   | write context, batch, places         |         |   gemm1  O^T = V^T P^T                                  |
///   | producer_commit                      |--full-->| consumer_release                                        |
///   +--------------------------------------+         | epilogue: cross-warp reduction, output or partial       |
///                                                    +---------------------------------------------------------+
///
///   barriers     batch_full[2]     scheduler warp -> consumers      64 arrivals: two per lane, one after its cp.async
///                batch_empty[2]    consumers -> scheduler warp      one arrival per consumer thread
///                kv_full[8][S]     TMA/cp.async -> the same warp    64 arrivals and the TMA's bytes; no empty barrier:
///                                                                   the warp that releases a stage also refills it
///                named barrier 1   consumers, in the epilogue: all states are in shared memory
///                reduce_empty      ... and have been read: one arrival per consumer thread
///   stages       2 tile batches of up to 64 KV tiles (by threads, 32 at 192/128 and for 16 rows), with as many
///                contexts and queries
///                S KV tiles per warp: 16 KiB of each warp's own, 2 of bfloat16 at 128, 4 of fp8; at least 2
///   registers    128 per thread for 8 rows (a CTA of the combine kernel fits beside this one), 168 for 16; no
///                setmaxnreg; up to 255 at head_dim 256, with five warps
///
/// No wgmma: arithmetic is about 1 % of the time, and eight rows would fill an eighth of its 64.
namespace folio::inline v0::kernels::cuda::sm90::decode {

/// Shared memory, with what aligns it to 1024 bytes.
template <int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
constexpr int32_t smem_bytes() {
  constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8), kRows};
  return 1024 + smem_layout(kDims).storage +
         static_cast<int32_t>(sizeof(SharedStorage<consumer_warps(kDims), stages(kDims)>));
}

/// The roles of the warps. `smem` is aligned to 1024 bytes; kRows: most rows of a work tile.
template <typename T, int32_t DimQk, int32_t DimV, Fp8 kFp8, int32_t kRows>
__device__ __forceinline__ void run_cta(const DecodeParams& params, unsigned char* smem) {
  constexpr HeadDims kDims{DimQk, DimV, element_bytes(kFp8), kRows};
  using Storage = SharedStorage<consumer_warps(kDims), stages(kDims)>;
  static_assert(smem_layout(kDims).storage % alignof(Storage) == 0);
  static_assert(DimQk % 16 == 0 && DimV % 16 == 0 && (kFp8 == Fp8::kNone || (DimQk % 64 == 0 && DimV % 64 == 0)));
  Storage& storage = *reinterpret_cast<Storage*>(smem + smem_layout(kDims).storage);
  prefetch_page_table(params.attention, cta_threads(kDims));
  prefetch_parameters(params.attention);
  if (threadIdx.x == 0) {
    for (int32_t i = 0; i < kBatchStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&storage.batch_full[i]), kLaneArrivals);
      ptx::mbarrier_init(ptx::shared_address(&storage.batch_empty[i]), consumer_threads(kDims));
    }
    ptx::mbarrier_init(ptx::shared_address(&storage.reduce_empty), consumer_threads(kDims));
    for (int32_t i = 0; i < consumer_warps(kDims) * stages(kDims); ++i) {
      ptx::mbarrier_init(ptx::shared_address(&storage.kv_full[0][0] + i), kLaneArrivals);
    }
    ptx::mbarrier_init_fence();
  }
  if (threadIdx.x == 32) {
    for (int32_t i = 0; i < kMaxSegments; ++i) {
      if (params.copy_tokens[i] == kCpAsync) continue;
      ptx::prefetch_tensormap(&params.maps[i].k);
      ptx::prefetch_tensormap(&params.maps[i].v);
    }
  }
  __syncthreads();
  // Everything before this overlaps the kernel before. From here on the plan is there, which the combine kernel reads
  // while it waits for this one.
  // The prefill pass, if there is one, runs beside this kernel and began when the kernel before both had ended.
  const bool runs_beside = params.attention.other_plan != nullptr;
  if (!runs_beside) ptx::griddep_wait();
  ptx::griddep_launch_dependents();
  if (threadIdx.x >= consumer_threads(kDims)) {
    TileFetcher<T, DimQk, DimV, kFp8, kRows>(params, smem, storage).run();
  } else {
    ConsumerWarp<T, DimQk, DimV, kFp8, kRows>(params, smem, storage).run();
  }
  if (runs_beside) ptx::griddep_wait();  // by every thread: whatever comes next waits for this kernel alone
}

/// What an instantiation is compiled for: the 16-bit type of its MMA, and fp8 data in shared memory or none.
template <DType kType>
struct ElementOf {
  using Type = __half;
  static constexpr Fp8 kFp8 = kType == DType::kFloat8E4M3   ? Fp8::kE4M3
                              : kType == DType::kFloat8E5M2 ? Fp8::kE5M2
                                                            : Fp8::kNone;
};
template <>
struct ElementOf<DType::kBFloat16> {
  using Type = __nv_bfloat16;
  static constexpr Fp8 kFp8 = Fp8::kNone;
};

}  // namespace folio::inline v0::kernels::cuda::sm90::decode
