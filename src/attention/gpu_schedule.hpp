#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "folio/types/device.hpp"
#include "scheduler/plan_image.hpp"
#include "scheduler/plan_view.hpp"

namespace folio::inline v0::attention {

/// Where a GPU's schedule has the headers that kernels begin at: one of each of the op's plans, of a pair of kernels
/// two. The places do not depend on the plans' sizes, since graphs know them.
struct ScheduleLayout {
  static constexpr size_t kHeaderBytes = 256;

  std::array<size_t, scheduler::ChecksumRecord::kMaxImages> images{};
  size_t bytes = 0;  ///< a multiple of 8
};

/// `image_bytes`: of each plan's image.
ScheduleLayout lay_out_schedule(std::span<const size_t> image_bytes);

/// Memory of a GPU that holds a schedule, in the engine's hands once it is made: written by `seal`, compared by
/// `check`.
class GpuSchedule {
 public:
  virtual ~GpuSchedule() = default;
  /// Enqueues the writing of those plans to `memory`, aligned to 256 bytes, and of what `check` compares it with.
  virtual void seal(std::span<const scheduler::PlanView* const> plans, const ScheduleLayout& layout, std::byte* memory,
                    Stream stream) = 0;
  /// Enqueues the comparison: a schedule that was changed loses its work.
  virtual void check(Stream stream) const = 0;
  /// Throws kInvalidArgument if a comparison since the last call has found a change.
  virtual void report() = 0;
};

/// Writes a schedule to `stage`, as it is to lie at `memory`.
void fill_schedule(std::span<const scheduler::PlanView* const> plans, const ScheduleLayout& layout, std::byte* stage,
                   const std::byte* memory);

/// What is kept of the schedule in `stage`. `no_work`: as many zeros as any worker_indptr has entries, for kernels.
scheduler::ChecksumRecord make_record(size_t num_plans, const ScheduleLayout& layout, const std::byte* stage,
                                      std::byte* memory, const int32_t* no_work);

[[noreturn]] void fail_changed();

}  // namespace folio::inline v0::attention
