#pragma once

#include "folio/types/device.hpp"
#include "scheduler/device_plan.hpp"
#include "scheduler/plan_image.hpp"

namespace folio::inline v0::scheduler {

/// Enqueues the planning of a batch with device lengths: one kernel, or two, that read them and write the whole image.
/// It allocates and waits for nothing, so it can be captured into a graph. `batch` must be one for which
/// device_plan_refusal(config, batch) is empty; `image` is device memory of plan_image_bytes(config) bytes, aligned to
/// kPlanImageAlignment. `sticky` (memory that the device can write, e.g. mapped host memory; or null) is written only
/// when a request could not be planned: its owner resets it. Throws Error(kDeviceError) where the launch fails.
void launch_plan(const SchedulerConfig& config, const BatchView& batch, void* image, PlanStatus* sticky, Stream stream);

}  // namespace folio::inline v0::scheduler
