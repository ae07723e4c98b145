#include <algorithm>
#include <cstring>

#include "backends/flash_attn/builder_state.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {

ScheduleMemory::ScheduleMemory(const AttentionOp& op, int64_t fixed_ints) : sealed_(op), fixed_(fixed_ints > 0) {
  if (fixed_) reserve(fixed_ints);
}

void ScheduleMemory::reserve(int64_t ints) {
  memory_ = core::AlignedBuffer(static_cast<size_t>(ints) * sizeof(int32_t), attention::SealedPlan::kSealAlignment);
  std::memset(memory_.data(), 0, memory_.bytes());
  used_ = 0;
}

std::span<const int32_t> ScheduleMemory::seal(const AttentionPlan& plan) {
  const int64_t needed = attention::SealedPlan::size(plan);
  if (needed > capacity()) {
    core::require(!fixed_, "the schedule takes ", needed, " integers; the captured batches' memory has ", capacity());
    reserve(needed + needed / 2);
  }
  const std::span<int32_t> memory(memory_.as<int32_t>(), static_cast<size_t>(capacity()));
  const std::span<const int32_t> schedule = sealed_.seal(plan, memory);
  // Whatever lies beyond the longest schedule so far is zero already.
  if (schedule.size() < used_) {
    std::fill(memory.begin() + static_cast<std::ptrdiff_t>(schedule.size()),
              memory.begin() + static_cast<std::ptrdiff_t>(used_), 0);
  }
  used_ = schedule.size();
  return schedule;
}

}  // namespace folio::inline v0::backends
