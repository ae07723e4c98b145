#include <algorithm>
#include <cstring>

#include "backends/common/gpu_memory.hpp"
#include "backends/flash_attn/builder_state.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {

static_assert(core::AlignedBuffer::kWorkspaceAlignment % SealedPlan::kSealAlignment == 0);

ScheduleMemory::ScheduleMemory(const AttentionOp& op, int64_t fixed_ints)
    : device_(op.context().device()), sealed_(op), memory_(device_), fixed_(fixed_ints > 0) {
  if (fixed_) reserve(fixed_ints);
}

void ScheduleMemory::reserve(int64_t ints) {
  memory_.reserve(static_cast<size_t>(ints) * sizeof(int32_t));
  if (device_.type == DeviceType::kCpu) std::memset(memory_.data(), 0, memory_.bytes());  // a GPU's is zero
  used_ = 0;
}

/// Integers [from, to) become zeros.
void ScheduleMemory::clear(size_t from, size_t to, Stream stream) {
  int32_t* const first = memory_.as<int32_t>() + from;
  if (device_.type == DeviceType::kCpu) {
    std::fill_n(first, to - from, 0);
  } else {
    const auto bytes = static_cast<int64_t>((to - from) * sizeof(int32_t));
    gpu::zero_rows(device_.index, first, bytes, bytes, 1, stream);
  }
}

std::span<const int32_t> ScheduleMemory::seal(const AttentionPlan& plan, Stream stream) {
  const int64_t needed = SealedPlan::size(plan);
  if (needed > capacity()) {
    core::require(!fixed_, "the schedule takes ", needed, " integers; the captured batches' memory has ", capacity());
    reserve(needed + needed / 2);
  }
  const std::span<int32_t> memory(memory_.as<int32_t>(), static_cast<size_t>(capacity()));
  const std::span<const int32_t> schedule = sealed_.seal(plan, memory, stream);
  // Whatever lies beyond the longest schedule so far is zero already.
  if (schedule.size() < used_) clear(schedule.size(), used_, stream);
  used_ = schedule.size();
  return schedule;
}

}  // namespace folio::inline v0::backends
