#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "folio/types/attention.hpp"
#include "scheduler/device/inputs.hpp"
#include "scheduler/device/single_tiles.hpp"
#include "scheduler/scheduler.hpp"

/// Scheduling on the device, where the lengths are (BatchView::where == kDevice): the host's part. launch_plan
/// (scheduler/cuda/plan_kernel.hpp) enqueues it.
///
/// The host knows the counts, the addresses and the op's bounds; the device finds the lengths. A request with lengths
/// that are wrong or beyond the bounds is planned as one without keys. Its rows get a work tile that writes out = 0
/// and LSE = -inf, and its lengths in the image are 0. The lowest such request is reported in
/// PlanImageHeader::status. The other requests are planned as if its lengths had been 0.
///
/// Where cu_q does not ascend from 0 to at most num_tokens, each entry counts as the largest so far. Entries outside
/// [0, num_tokens] count as 0, except that a last entry above num_tokens counts as num_tokens. A request with a
/// changed entry is at fault, and has the rows between the corrected entries.
namespace folio::inline v0::scheduler {

/// Why a batch with device lengths cannot be planned on the device; empty if it can. Throws Error(kInvalidArgument)
/// for counts, segments or a config that make_plan refuses too.
std::string device_plan_refusal(const SchedulerConfig& config, const BatchView& batch);

/// Input of the device scheduler. Requires an empty device_plan_refusal.
device::PlanInput device_plan_input(const SchedulerConfig& config, const BatchView& batch);

/// Input of the fast path of single_tiles.hpp; nothing where it does not take the batch. `image` is a device address.
std::optional<device::SingleInput> single_tiles_input(const device::PlanInput& input, std::byte* image);

}  // namespace folio::inline v0::scheduler
