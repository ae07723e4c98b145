#pragma once

#include "folio/types/device.hpp"
#include "scheduler/seal.hpp"

namespace folio::inline v0::scheduler {

/// Enqueues the comparison of a schedule with its record. One that was changed loses its work: launches behind read
/// nothing more of it and write nothing, and `changed` (memory that the device can write) becomes 1. All pointers are
/// the device's. Throws Error(kDeviceError) where the launch fails.
void launch_checksum_check(const uint64_t* schedule, const ChecksumRecord* record, int32_t* changed, Stream stream);

}  // namespace folio::inline v0::scheduler
