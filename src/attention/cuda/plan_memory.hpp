#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/gpu_backend.hpp"
#include "platform/cuda/memory.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::attention::cuda {

/// Page-locked memory that plans are written to before they are copied to the device, each guarded by an event: a stage
/// is written again only once its copy is done.
class Stages {
 public:
  /// All at once: later allocations could wait for a stream that is stalled.
  void reserve(size_t bytes) {
    for (Stage& stage : stages_) stage.memory = platform::cuda::PinnedMemory(bytes);
  }
  /// The next stage, of at least `bytes`, `roomy` where it has to be had anew. Waits only where all are being copied.
  std::byte* take(size_t bytes, size_t roomy) {
    next_ = (next_ + 1) % kStages;
    Stage& stage = stages_[next_];
    stage.copied.wait();
    if (stage.memory.size() < bytes) stage.memory = platform::cuda::PinnedMemory(roomy);
    return static_cast<std::byte*>(stage.memory.data());
  }
  size_t bytes() const { return stages_[next_].memory.size(); }  ///< of the last one taken
  /// Its copies have been enqueued on `stream`.
  void copied(Stream stream) { stages_[next_].copied.record(stream); }

 private:
  struct Stage {
    platform::cuda::PinnedMemory memory;
    platform::cuda::Event copied;
  };
  /// Plans in flight beside the one being made before `take` waits.
  static constexpr size_t kStages = 4;

  std::array<Stage, kStages> stages_;
  size_t next_ = 0;
};

/// The image in device memory; with bounds it never moves, so that captured graphs keep its address. Host plans reach
/// it through page-locked stages, each guarded by an event: a stage is written again only once its copy is done.
class CudaPlanMemory final : public GpuPlanMemory {
 public:
  CudaPlanMemory(int32_t device, const scheduler::SchedulerConfig& config, bool reports);
  void upload(const scheduler::PlanView& plan, Stream stream) override;
  void plan_on_device(const BatchView& batch, Stream stream) override;
  void report() override;
  kernels::cuda::TableFault* table_fault() const override { return &status()->tables; }
  const scheduler::PlanImageHeader* image() const override;
  const int32_t* cu_q() const override { return cu_q_; }
  uint32_t* tile_counters() const override;
  uint32_t* combine_counters() const override;

 private:
  /// What the device reports to the host: in page-locked memory, which the device writes at the host's address.
  struct Status {
    scheduler::PlanStatus plan;  ///< by the device scheduler
    kernels::cuda::TableFault tables;
  };

  Status* status() const { return static_cast<Status*>(status_.data()); }
  void grow(size_t bytes);
  void find_cu_q(const scheduler::PlanImageCounts& counts);
  bool is_dynamic() const { return config_.tile.schedule == scheduler::Schedule::kDynamic; }

  int32_t device_;
  scheduler::SchedulerConfig config_;
  bool reports_;
  platform::cuda::DeviceMemory image_;
  const int32_t* cu_q_ = nullptr;          ///< in the image
  platform::cuda::DeviceMemory counters_;  ///< beside the image, which every plan overwrites
  Stages stages_;
  platform::cuda::PinnedMemory status_;  ///< a Status
};

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
  platform::cuda::DeviceMemory no_work_;  ///< the worker lists of a plan without work tiles
  platform::cuda::PinnedMemory changed_;  ///< an int32_t, which the comparison sets
  const std::byte* memory_ = nullptr;     ///< what was sealed last
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
