#pragma once

#include <cstdint>

#include "attention/cuda/stages.hpp"
#include "attention/gpu_backend.hpp"
#include "platform/cuda/memory.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::attention::cuda {

/// The image in device memory; with bounds it never moves, so that captured graphs keep its address. Host plans reach
/// it through page-locked stages, each guarded by an event: a stage is written again only once its copy is done.
class CudaPlanMemory final : public GpuPlanMemory {
 public:
  CudaPlanMemory(int32_t device, const scheduler::SchedulerConfig& config, bool reports);
  void upload(const scheduler::PlanView& plan, Stream stream) override;
  void plan_on_device(const BatchView& batch, Stream stream) override;
  void report() override;
  const scheduler::PlanImageHeader* image() const override;
  uint32_t* tile_counters() const override;
  uint32_t* combine_counters() const override;

 private:
  void grow(size_t bytes);
  bool claims() const { return config_.tile.schedule == scheduler::Schedule::kDynamic; }

  int32_t device_;
  scheduler::SchedulerConfig config_;
  bool reports_;
  platform::cuda::DeviceMemory image_;
  platform::cuda::DeviceMemory counters_;  ///< beside the image, which every plan overwrites
  Stages stages_;
  platform::cuda::PinnedMemory status_;  ///< one PlanStatus, written by the device scheduler
};

class CudaSideStream final : public GpuSideStream {
 public:
  explicit CudaSideStream(int32_t device) : device_(device) {}
  Stream fork(Stream stream) override;
  void join(Stream stream) override;

 private:
  int32_t device_;
  platform::cuda::OwnedStream side_;
  platform::cuda::Event forked_;
  platform::cuda::Event done_;
};

}  // namespace folio::inline v0::attention::cuda
