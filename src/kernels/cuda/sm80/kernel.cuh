#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "core/error.hpp"
#include "kernels/cuda/common/launch.hpp"
#include "kernels/cuda/sm80/mainloop_decode.cuh"
#include "kernels/cuda/sm80/mainloop_large_head.cuh"
#include "kernels/cuda/sm80/mainloop_prefill.cuh"
#include "kernels/cuda/sm80/sm80_kernel.hpp"

/// "cuda-sm80": a CTA of four warps computes the work tiles of one list of the plan, one after the other. All warps
/// have the same role: each issues its share of the copies (cp.async) and its MMAs (mma.sync.m16n8k16).
///
///                 decode (up to 16 rows)           prefill (up to 128 rows)          large head (> 256, up to 32 rows)
///   warp w        tokens 16w..16w+15 of 64         16 or 32 rows, all tokens         GEMM0: 16 rows x 8 tokens
///                                                                                    GEMM1: a quarter of head_dim_v
///   KV tile       64 tokens, 16 a warp             64 tokens (32: head_dim_qk > 128) 16 tokens
///   stages        1 to 4 of K and V, each warp     3, shared: K, V, next K, next V   3 of K = V, or 1 of K and 1 of V
///                 has its own (fp8: 2 to 8)        (fp8: 2, and a staging buffer)
///   barriers      none in the mainloop             2 a KV tile (__syncthreads)       2 a KV tile
///   row state     one a warp, reduced at the end   one a row                         one a row, repeated by all warps
///   registers     255 at most (2 CTAs an SM)       O 128, S 64, fragments 24         O 128
///
///   prefill, one KV tile i; three stages rotate:
///
///     cp.async   | K(i+1) -> stage 2            | V(i+1) -> stage 0
///     MMA        | GEMM0: S = Q K(i)  (stage 0) | GEMM1: O += P V(i)  (stage 1)
///     other      | row max, lazy rescaling      | P of the next 16 tokens; addresses of tile i + 2, page ids of i + 3
///                ^ wait K(i), barrier           ^ wait V(i), barrier
///
///   shared memory: Q | stages of K and V | SharedStorage. After the mainloop O takes the place of Q and the stages,
///   for the epilogue.
namespace folio::inline v0::kernels::cuda::sm80 {

/// The path of a row must not depend on other requests (kBatchInvariant: rows of a shared segment's work tile do), nor
/// on how many rows of its request are computed at once (kScheduleInvariant).
__device__ __forceinline__ bool may_take_decode_path(const AttentionParams& params, const scheduler::PlanView& plan) {
  if (params.determinism <= Determinism::kRunToRun) return true;
  if (params.determinism >= Determinism::kScheduleInvariant) return false;
  for (int32_t s = 0; s < plan.num_segments; ++s) {
    if (plan.segments[s].shared) return false;
  }
  return true;
}

/// `Fp8`: all keys and values are e4m3 in rows of whole 16-byte chunks, and T is float16.
template <typename T, int32_t DimQk, int32_t DimV, bool Fp8>
__global__ void __launch_bounds__(kThreads, 2) attention_kernel(const __grid_constant__ AttentionParams params) {
  constexpr HeadDims kDims{DimQk, DimV};
  constexpr int32_t kRowTiles = row_tiles_per_warp(kDims);
  constexpr int32_t kRows = rows_per_tile(kDims);
  static_assert(tile_bytes(kDims) + static_cast<int32_t>(sizeof(SharedStorage<kRows>)) <= kMaxSmemBytes);
  extern __shared__ __align__(128) unsigned char memory[];
  auto& storage = *reinterpret_cast<SharedStorage<kRows>*>(memory + tile_bytes(kDims));
  const uint32_t shared = ptx::shared_address(memory);
  const scheduler::PlanView& plan = params.plan->view;
  const bool decode_allowed = may_take_decode_path(params, plan);
  constexpr int32_t kPlaces = kRows * (DimV / 4) / kThreads;
  OutputTileState<kPlaces> running;
  float* const results = reinterpret_cast<float*>(memory);
  const int32_t end = plan.worker_indptr[blockIdx.x + 1];
  int32_t i = plan.worker_indptr[blockIdx.x];
  if (threadIdx.x == 0 && i < end) storage.next = plan.work_tiles[i];
  for (; i < end; ++i) {
    if (threadIdx.x == 0) init_work_tile(params, plan, storage.next, storage.context);
    __syncthreads();
    if (i + 1 < end) prefetch_work_tile(plan.work_tiles[i + 1], storage);
    const WorkTileContext& context = storage.context;
    const bool takes_decode_path = decode_allowed && context.num_rows <= kDecodeRows;
    const bool half = kRowTiles == 1 || context.num_rows <= kRows / kRowTiles;
    const int32_t query_rows = takes_decode_path ? kDecodeRows : (half ? kRows / kRowTiles : kRows);
    locate_queries(params, storage, query_rows);
    __syncthreads();
    if constexpr (Fp8) {
      convert_queries<DimQk>(params, storage, shared, query_rows, takes_decode_path);
    } else {
      copy_queries<T, DimQk>(params, storage, shared, query_rows);
    }
    ptx::cp_async_commit();
    bind_rows(params, plan, storage);
    if (takes_decode_path) {
      DecodeMainloop<T, DimQk, DimV, Fp8, kRows>(params, context, storage, shared).run(results);
    } else if (half) {
      PrefillMainloop<T, DimQk, DimV, Fp8, 1, kRows>(params, context, storage, shared).run(results);
    } else {
      PrefillMainloop<T, DimQk, DimV, Fp8, kRowTiles, kRows>(params, context, storage, shared).run(results);
    }
    __syncthreads();
    run_epilogue<DimV>(params, storage, results, takes_decode_path ? kWarps : 1, running);
    const int32_t merge = context.work_tile.combine_tile;
    __syncthreads();
    if (merge >= 0 && params.combine_counters != nullptr) combine_if_last<DimV>(params, merge);
  }
}

/// Head dimensions above 256. All work tiles take one path, in which a row's bits depend on KV tiles of 16 tokens at
/// absolute positions alone.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    attention_large_head_kernel(const __grid_constant__ AttentionParams params) {
  static_assert(kLargeHeadBytes + static_cast<int32_t>(sizeof(SharedStorage<kLargeHeadRows>)) <= kMaxSmemBytes);
  static_assert(4 * kLargeHeadRows * epilogue_stride(kLargeHeadDims) <= kLargeHeadBytes);
  extern __shared__ __align__(128) unsigned char memory[];
  auto& storage = *reinterpret_cast<SharedStorage<kLargeHeadRows>*>(memory + kLargeHeadBytes);
  const uint32_t shared = ptx::shared_address(memory);
  const scheduler::PlanView& plan = params.plan->view;
  OutputTileState<kLargeHeadRows*(kLargeHeadDims.v / 4) / kThreads> running;
  float* const results = reinterpret_cast<float*>(memory);
  float* const scores = reinterpret_cast<float*>(memory + kLargeHeadScores);
  const int32_t end = plan.worker_indptr[blockIdx.x + 1];
  int32_t i = plan.worker_indptr[blockIdx.x];
  if (threadIdx.x == 0 && i < end) storage.next = plan.work_tiles[i];
  for (; i < end; ++i) {
    if (threadIdx.x == 0) init_work_tile(params, plan, storage.next, storage.context);
    __syncthreads();
    if (i + 1 < end) prefetch_work_tile(plan.work_tiles[i + 1], storage);
    locate_queries(params, storage, kLargeHeadRows);
    __syncthreads();
    copy_queries<T, kLargeHeadDims.qk>(params, storage, shared, kLargeHeadRows);
    ptx::cp_async_commit();
    bind_rows(params, plan, storage);
    LargeHeadMainloop<T, kLargeHeadRows>(params, storage.context, storage, shared, scores).run(results);
    __syncthreads();
    run_epilogue<kLargeHeadDims.v>(params, storage, results, 1, running);
    const int32_t merge = storage.context.work_tile.combine_tile;
    __syncthreads();
    if (merge >= 0 && params.combine_counters != nullptr) combine_if_last<kLargeHeadDims.v>(params, merge);
  }
}

/// Enqueues a kernel with `bytes` of shared memory. See allow_shared_memory.
template <auto Kernel>
void launch_kernel(const AttentionParams& params, int32_t num_workers, int32_t bytes, Stream stream) {
  // Two CTAs share an SM.
  cudaError_t status = allow_shared_memory<Kernel>(bytes, true);
  if (status == cudaSuccess) {
    Kernel<<<num_workers, kThreads, bytes, native(stream)>>>(params);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm80: ", cudaGetErrorString(status));
  }
}

template <DType Type, int32_t DimQk, int32_t DimV>
void launch_attention(const AttentionParams& params, int32_t num_workers, Stream stream) {
  using T = std::conditional_t<Type == DType::kBFloat16, __nv_bfloat16, __half>;
  constexpr HeadDims kDims{DimQk, DimV};
  if constexpr (DimQk == kLargeHeadDims.qk) {
    constexpr int32_t kBytes = kLargeHeadBytes + static_cast<int32_t>(sizeof(SharedStorage<kLargeHeadRows>));
    launch_kernel<attention_large_head_kernel<T>>(params, num_workers, kBytes, stream);
  } else {
    constexpr int32_t kBytes = tile_bytes(kDims) + static_cast<int32_t>(sizeof(SharedStorage<rows_per_tile(kDims)>));
    constexpr bool kFp8 = Type == DType::kFloat8E4M3;
    launch_kernel<attention_kernel<T, DimQk, DimV, kFp8>>(params, num_workers, kBytes, stream);
  }
}

}  // namespace folio::inline v0::kernels::cuda::sm80
