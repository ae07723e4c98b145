#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "folio/types/attention.hpp"
#include "scheduler/device/job.hpp"
#include "scheduler/device/single_tiles.hpp"
#include "scheduler/scheduler.hpp"

/// Planning where the lengths are (BatchView::where == kDevice): the host's side. launch_plan
/// (scheduler/cuda/plan_kernel.hpp) enqueues it.
///
/// The host knows the counts, the addresses and the op's bounds; the lengths are whatever the device finds. A request
/// whose lengths are wrong or beyond the bounds is planned as one without keys: the rows it has get a work tile that
/// writes out = 0 and LSE = -inf, its lengths in the image are 0, and the lowest such request ends up in
/// PlanImageHeader::status. The other requests are planned as if its lengths had been 0 from the start. Where cu_q does
/// not ascend from 0 to at most num_tokens, each entry counts as the largest so far; entries outside [0, num_tokens]
/// count as 0, but the last as num_tokens where it is larger; a request of which either entry had to be changed is at
/// fault, and has the rows between them.
namespace folio::inline v0::scheduler {

/// Why a batch of device lengths cannot be planned on the device; empty if it can. Throws Error(kInvalidArgument) for
/// counts, segments or a config that make_plan refuses too.
std::string device_plan_refusal(const SchedulerConfig& config, const BatchView& batch);

/// What the device scheduler is given. The batch must be one that device_plan_refusal has nothing against.
device::PlanInput device_plan_input(const SchedulerConfig& config, const BatchView& batch);

/// What the short way of single_tiles.hpp is given; nothing where it does not take the batch. `image`: the device's.
std::optional<device::SingleInput> single_tiles_input(const device::PlanInput& input, std::byte* image);

}  // namespace folio::inline v0::scheduler
