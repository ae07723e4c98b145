#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "attention/gpu_kernels.hpp"
#include "attention/gpu_schedule.hpp"
#include "folio/types/attention.hpp"
#include "folio/types/device.hpp"
#include "kernels/cuda/attention_kernel.hpp"
#include "scheduler/plan_image.hpp"
#include "scheduler/scheduler.hpp"

namespace folio::inline v0::attention {

/// A plan's memory on a GPU: one image, which kernels read, and what it takes to fill it.
class GpuPlanMemory {
 public:
  virtual ~GpuPlanMemory() = default;
  /// Enqueues the copy of a host plan into the image. Waits only where every stage is still being copied from.
  virtual void upload(const scheduler::PlanView& plan, Stream stream) = 0;
  /// Enqueues the planning of a batch with device lengths.
  virtual void plan_on_device(const BatchView& batch, Stream stream) = 0;
  /// Throws kInvalidArgument if a plan made on the device since the last call met a request it could not plan.
  virtual void report() = 0;
  virtual const scheduler::PlanImageHeader* image() const = 0;
  /// See kernels::cuda::kTileCounters; null where items are not claimed. The address never changes.
  virtual uint32_t* tile_counters() const = 0;
  /// See AttentionParams::combine_counters; null where items are claimed. The address never changes.
  virtual uint32_t* combine_counters() const = 0;
};

/// A stream beside the caller's, for work that needs nothing of what is enqueued there in the meantime.
class GpuSideStream {
 public:
  virtual ~GpuSideStream() = default;
  /// What is enqueued on the returned stream from here on waits for all that `stream` has. Under capture it belongs to
  /// the same graph.
  virtual Stream fork(Stream stream) = 0;
  /// What is enqueued on `stream` from here on waits for it.
  virtual void join(Stream stream) = 0;
};

/// What attention asks of one GPU. Implemented in attention/cuda, absent from builds without a toolkit.
class GpuBackend : public GpuKernels {
 public:
  virtual int32_t num_sms() const = 0;
  virtual int32_t compute_capability() const = 0;
  virtual std::span<const kernels::cuda::AttentionKernel* const> kernels() const = 0;
  /// `reports`: whether `report` is to hear of requests that could not be planned.
  virtual std::unique_ptr<GpuPlanMemory> make_plan_memory(const scheduler::SchedulerConfig& config,
                                                          bool reports) const = 0;
  virtual std::unique_ptr<GpuSideStream> make_side_stream() const = 0;
  /// `most_workers`: of the plans that will be sealed.
  virtual std::unique_ptr<GpuSchedule> make_schedule(int32_t most_workers) const = 0;
  virtual void launch(const kernels::cuda::AttentionKernel& kernel, const kernels::cuda::AttentionParams& params,
                      const kernels::cuda::LaunchShape& shape, Stream stream) const = 0;
  virtual void synchronize(Stream stream) const = 0;
  /// Device memory, aligned to 256 bytes. Freeing it waits for what is enqueued. Throws kOutOfMemory.
  virtual std::shared_ptr<void> allocate(size_t bytes) const = 0;
  /// Enqueues a copy within this GPU's memory.
  virtual void copy(void* to, const void* from, size_t bytes, Stream stream) const = 0;
  /// Enqueues a copy from the host. On return `from` may be changed, if it is ordinary memory and not page-locked.
  virtual void upload(void* to, const void* from, size_t bytes, Stream stream) const = 0;
  /// Copies to the host and waits for it.
  virtual void download(void* to, const void* from, size_t bytes, Stream stream) const = 0;
  /// Lets the GPU use host memory at its own address, and takes that back. For tests: such memory is slow.
  virtual void map_host_memory(void* data, size_t bytes) const = 0;
  virtual void unmap_host_memory(void* data) const noexcept = 0;
};

/// Throws kUnavailable: no CUDA kernels in this build, no driver, no such device, or one too old for any kernel.
std::shared_ptr<const GpuBackend> open_gpu(int32_t index);

}  // namespace folio::inline v0::attention
