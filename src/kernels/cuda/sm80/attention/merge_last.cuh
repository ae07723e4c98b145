#pragma once

#include "kernels/cuda/common/merge_row.cuh"
#include "kernels/cuda/sm80/attention/shape.hpp"

namespace folio::inline v0::kernels::cuda::sm80 {

/// By all threads, once the CTA has written a partial result, a barrier ago: counts it among its merge's, and
/// folds them where it is the last. Which CTA that is changes from run to run; the order of folding does not.
/// The counter ends as it began, for the next launch. Not inlined, as it is seldom called and needs registers.
template <int32_t DimV>
__device__ __noinline__ void merge_if_last(const AttentionParams& params, int32_t merge) {
  constexpr int32_t kParts = DimV <= kMergePart ? 1 : (DimV <= 2 * kMergePart ? 2 : 4);
  static_assert(DimV <= kParts * kMergePart);
  const scheduler::PlanView& plan = params.plan->view;
  const scheduler::CombineTile item = plan.combine_tiles[merge];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  bool last = false;
  if (thread == 0) {
    __threadfence();  // what the CTA wrote comes before the count
    uint32_t* const finished = params.combine_counters + merge;
    last = atomicAdd(finished, 1u) + 1 == static_cast<uint32_t>(item.source_end - item.source_begin);
    if (last) *finished = 0;
    __threadfence();  // what the others wrote comes after it
  }
  if (__syncthreads_or(static_cast<int>(last)) == 0) return;
  merge_item<kParts>(params, plan, item, thread / 32, kWarps, thread % 32);
}

}  // namespace folio::inline v0::kernels::cuda::sm80
