#pragma once

#include <cmath>
#include <cstdint>

#include "folio/types/export.hpp"
#include "kernels/cuda/attention_kernel.hpp"
#include "scheduler/plan_view.hpp"

/// How the two passes of an op share the GPU (decision 0076). A decode leaves the tensor cores idle, a prefill the
/// memory. So the prefill pass takes some SMs and the decode pass begins on the others at once; what the prefill pass
/// leaves when it ends, the decode pass takes too. Results do not depend on the partition.
namespace folio::inline v0::kernels::cuda::sm90 {

/// A prefill that outlasts the decode costs its whole rest, one that ends early little. So it counts for more.
constexpr float kPrefillMargin = 1.25f;

/// Nanoseconds of a step whose prefill pass has `prefill_ctas` of the plans' workers, one an SM.
FOLIO_HOST_DEVICE inline float step_time(const scheduler::PlanView& prefill, const PassCost& prefill_cost,
                                         const scheduler::PlanView& decode, const PassCost& decode_cost,
                                         int32_t prefill_ctas) {
  const auto workers = static_cast<float>(decode.num_workers);
  const float work_tile = prefill_cost.work_tile + prefill_cost.unit * static_cast<float>(prefill.work_cost) /
                                                       static_cast<float>(prefill.num_dynamic_tiles);
  const int32_t tiles_per_cta = (prefill.num_dynamic_tiles + prefill_ctas - 1) / prefill_ctas;
  const float prefill_time = work_tile * static_cast<float>(tiles_per_cta);
  const float decode_time = (decode_cost.unit * static_cast<float>(decode.work_cost) +
                             decode_cost.work_tile * static_cast<float>(decode.num_dynamic_tiles)) /
                            workers;
  // Without a share x of the SMs, a decode keeps about 1 - x^1.75 of its bandwidth (measured for x of 0.18 to 0.6).
  const float share = static_cast<float>(prefill_ctas) / workers;
  const float lost = share * sqrtf(share * sqrtf(share));
  const float together = decode_time + prefill_time * lost;
  const float prefill_end = kPrefillMargin * prefill_time;
  return together > prefill_end ? together : prefill_end;
}

}  // namespace folio::inline v0::kernels::cuda::sm90
