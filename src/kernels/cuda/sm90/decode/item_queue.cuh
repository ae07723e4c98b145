#pragma once

#include "planner/plan_view.hpp"

namespace folio::inline v0::kernels::cuda::sm90 {

/// The items of a thread block, in order: those of its work list.
class ItemQueue {
 public:
  __device__ __forceinline__ explicit ItemQueue(const planner::PlanView& plan)
      : next_(plan.worker_indptr[blockIdx.x]), end_(plan.worker_indptr[blockIdx.x + 1]) {}

  /// Index of the next item, -1 where there is none. By all lanes of the scheduler's warp.
  __device__ __forceinline__ int32_t take() { return next_ < end_ ? next_++ : -1; }

 private:
  int32_t next_;
  int32_t end_;
};

}  // namespace folio::inline v0::kernels::cuda::sm90
