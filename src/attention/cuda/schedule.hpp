#pragma once

#include "attention/cuda/stages.hpp"
#include "attention/gpu_backend.hpp"
#include "platform/cuda/memory.hpp"

namespace folio::inline v0::attention::cuda {

class CudaSchedule final : public GpuSchedule {
 public:
  CudaSchedule(int32_t device, int32_t most_workers);
  void seal(std::span<const scheduler::PlanView* const> plans, const ScheduleLayout& layout, std::byte* memory,
            Stream stream) override;
  void check(Stream stream) const override;
  void report() override;

 private:
  int32_t device_;
  Stages stages_;
  platform::cuda::DeviceMemory record_;   ///< a scheduler::ChecksumRecord
  platform::cuda::DeviceMemory no_work_;  ///< the worker lists of a plan without items
  platform::cuda::PinnedMemory changed_;  ///< an int32_t, which the comparison sets
  const std::byte* memory_ = nullptr;     ///< what was sealed last
};

}  // namespace folio::inline v0::attention::cuda
