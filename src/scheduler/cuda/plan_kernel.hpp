#pragma once

#include "folio/types/device.hpp"
#include "scheduler/device_scheduler.hpp"
#include "scheduler/plan_image.hpp"

namespace folio::inline v0::scheduler {

/// Enqueues the planning of a batch with device lengths: one or two kernels that read them and write the whole image.
/// Allocates nothing and waits for nothing, so a graph can capture it. device_plan_refusal(config, batch) must be
/// empty. `image` is device memory of plan_image_bytes(config) bytes, aligned to kPlanImageAlignment. `sticky` is
/// null, or memory that the device can write (for example mapped host memory). It is written only when a request
/// could not be planned, and its owner resets it. Throws Error(kDeviceError) where the launch fails.
void launch_plan(const SchedulerConfig& config, const BatchView& batch, void* image, PlanStatus* sticky, Stream stream);

/// Enqueues the comparison of a schedule with its checksum. A changed schedule loses its work: later launches read
/// nothing more of it and write nothing, and `changed` becomes 1. All pointers are device addresses. Throws
/// Error(kDeviceError) where the launch fails.
void launch_checksum_check(const uint64_t* schedule, const ChecksumRecord* record, int32_t* changed, Stream stream);

}  // namespace folio::inline v0::scheduler
