#pragma once

#include <cuda_runtime.h>

#include "core/error.hpp"
#include "kernels/cuda/common/allow_shared_memory.hpp"
#include "kernels/cuda/sm80/attention/launch.hpp"
#include "kernels/cuda/sm80/attention/merge_last.cuh"
#include "kernels/cuda/sm80/attention/narrow.cuh"

/// The kernel: a CTA takes one work list of the plan, item by item, each in the way that its rows ask for.
namespace folio::inline v0::kernels::cuda::sm80 {

/// A row's way must not depend on other requests (kBatchInvariant: the rows of an item of a shared segment do), nor on
/// how many of its request's rows are computed at once (kScheduleInvariant).
__device__ __forceinline__ bool may_go_narrow(const AttentionParams& params, const scheduler::PlanView& plan) {
  if (params.determinism <= Determinism::kRunToRun) return true;
  if (params.determinism >= Determinism::kScheduleInvariant) return false;
  for (int32_t s = 0; s < plan.num_segments; ++s) {
    if (plan.segments[s].shared) return false;
  }
  return true;
}

/// `Codes`: all keys and values are e4m3 in rows of whole 16 bytes, and T is float16.
template <typename T, int32_t DimQk, int32_t DimV, bool Codes>
__global__ void __launch_bounds__(kThreads, 2) attend_kernel(const __grid_constant__ AttentionParams params) {
  constexpr DimClass kDims{DimQk, DimV};
  constexpr int32_t kRowTiles = row_tiles_per_warp(kDims);
  constexpr int32_t kRows = rows_per_item(kDims);
  static_assert(tile_bytes(kDims) + static_cast<int32_t>(sizeof(RowInfo<kRows>)) <= kSharedLimit);
  extern __shared__ __align__(128) unsigned char memory[];
  auto& rows = *reinterpret_cast<RowInfo<kRows>*>(memory + tile_bytes(kDims));
  const uint32_t shared = ptx::shared_address(memory);
  const scheduler::PlanView& plan = params.plan->view;
  const bool narrow = may_go_narrow(params, plan);
  constexpr int32_t kPlaces = kRows * (DimV / 4) / kThreads;
  RunningState<kPlaces> running;
  float* const results = reinterpret_cast<float*>(memory);
  const int32_t end = plan.worker_indptr[blockIdx.x + 1];
  int32_t i = plan.worker_indptr[blockIdx.x];
  if (threadIdx.x == 0 && i < end) rows.next = plan.work_tiles[i];
  for (; i < end; ++i) {
    if (threadIdx.x == 0) begin_item(params, plan, rows.next, rows.context);
    __syncthreads();
    if (i + 1 < end) fetch_item(plan.work_tiles[i + 1], rows);
    const ItemContext& context = rows.context;
    const bool goes_narrow = narrow && context.num_rows <= kNarrowRows;
    const bool half = kRowTiles == 1 || context.num_rows <= kRows / kRowTiles;
    const int32_t query_rows = goes_narrow ? kNarrowRows : (half ? kRows / kRowTiles : kRows);
    locate_queries(params, rows, query_rows);
    __syncthreads();
    if constexpr (Codes) {
      convert_queries<DimQk>(params, rows, shared, query_rows, goes_narrow);
    } else {
      copy_queries<T, DimQk>(params, rows, shared, query_rows);
    }
    ptx::cp_async_commit();
    bind_rows(params, plan, rows);
    if (goes_narrow) {
      NarrowWay<T, DimQk, DimV, Codes, kRows>(params, context, rows, shared).run(results);
    } else if (half) {
      WideWay<T, DimQk, DimV, Codes, 1, kRows>(params, context, rows, shared).run(results);
    } else {
      WideWay<T, DimQk, DimV, Codes, kRowTiles, kRows>(params, context, rows, shared).run(results);
    }
    __syncthreads();
    finish_rows<DimV>(params, rows, results, goes_narrow ? kWarps : 1, running);
    const int32_t merge = context.item.combine_tile;
    __syncthreads();
    if (merge >= 0 && params.combine_counters != nullptr) merge_if_last<DimV>(params, merge);
  }
}

/// Enqueues a kernel with `bytes` of shared memory. See allow_shared_memory.
template <auto Kernel>
void launch_kernel(const AttentionParams& params, int32_t num_workers, int32_t bytes, Stream stream) {
  // Two CTAs share an SM.
  cudaError_t status = allow_shared_memory<Kernel>(bytes, true);
  if (status == cudaSuccess) {
    Kernel<<<num_workers, kThreads, bytes, static_cast<cudaStream_t>(stream.handle)>>>(params);
    status = cudaGetLastError();
  }
  if (status != cudaSuccess) {
    core::fail(ErrorCode::kDeviceError, "launching cuda-sm80: ", cudaGetErrorString(status));
  }
}

/// Enqueues the kernel of one element type and dimension class.
template <typename T, int32_t DimQk, int32_t DimV, bool Codes = false>
void launch_class(const AttentionParams& params, int32_t num_workers, Stream stream) {
  constexpr DimClass kDims{DimQk, DimV};
  constexpr int32_t kBytes = tile_bytes(kDims) + static_cast<int32_t>(sizeof(RowInfo<rows_per_item(kDims)>));
  launch_kernel<attend_kernel<T, DimQk, DimV, Codes>>(params, num_workers, kBytes, stream);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
