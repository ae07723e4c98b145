#include "attention/cuda/plan_memory.hpp"

#include <algorithm>
#include <atomic>
#include <new>

#include "attention/run_args.hpp"
#include "core/error.hpp"
#include "platform/cuda/device.hpp"
#include "scheduler/cuda/plan_kernel.hpp"
#include "scheduler/device_scheduler.hpp"

namespace folio::inline v0::attention::cuda {

namespace gpu = platform::cuda;

CudaPlanMemory::CudaPlanMemory(int32_t device, const scheduler::SchedulerConfig& config, bool reports)
    : device_(device), config_(config), reports_(reports) {
  const gpu::DeviceScope scope(device_);
  status_ = gpu::PinnedMemory(sizeof(Status));
  new (status_.data()) Status{};
  counters_ = gpu::DeviceMemory(sizeof(uint32_t) *
                                static_cast<size_t>(is_dynamic() ? kernels::cuda::kTileCounters : config_.num_workers));
  const gpu::OwnedStream stream;  // of its own: it waits for nobody's work
  gpu::check(cudaMemsetAsync(counters_.data(), 0, counters_.size(), gpu::native(stream.get())),
             "clearing a plan buffer's counters");
  gpu::synchronize(stream.get());
  if (!config_.bounds) return;
  // All at once: later allocations could wait for a stream that is stalled.
  image_ = gpu::DeviceMemory(scheduler::plan_image_bytes(config_));
  stages_.reserve(image_.size());
}

/// Only without bounds, where no graph knows the address. Freeing waits for what still reads the old image.
void CudaPlanMemory::grow(size_t bytes) {
  if (bytes <= image_.size()) return;
  if (config_.bounds) {
    core::fail(ErrorCode::kInvalidArgument, "the plan's image takes ", bytes, " bytes; the op's bounds allow ",
               image_.size(), ": it has more segments than they count on");
  }
  image_ = gpu::DeviceMemory(std::max(bytes, 2 * image_.size()));
}

void CudaPlanMemory::upload(const scheduler::PlanView& plan, Stream stream) {
  const gpu::DeviceScope scope(device_);
  if (gpu::is_capturing(stream)) {
    core::fail(ErrorCode::kInvalidArgument,
               "host lengths cannot be planned into a graph under capture, which would replay this one plan's bytes; "
               "give device lengths (BatchView::where = kDevice), or plan before the capture");
  }
  const size_t bytes = scheduler::plan_image_bytes(plan);
  grow(bytes);
  std::byte* const stage = stages_.take(bytes, image_.size());
  const size_t used = scheduler::pack_plan(plan, stage, stages_.bytes(), image_.data());
  gpu::check(cudaMemcpyAsync(image_.data(), stage, used, cudaMemcpyHostToDevice, gpu::native(stream)),
             "copying a plan to the device");
  stages_.copied(stream);
  find_cu_q(scheduler::counts_of(plan));
}

/// Lengths begin with cu_q.
void CudaPlanMemory::find_cu_q(const scheduler::PlanImageCounts& counts) {
  const auto* const begin = static_cast<const std::byte*>(image_.data());
  cu_q_ = reinterpret_cast<const int32_t*>(begin + scheduler::carve_plan_image(counts).lengths);
}

void CudaPlanMemory::plan_on_device(const BatchView& batch, Stream stream) {
  const gpu::DeviceScope scope(device_);
  const std::string refusal = scheduler::device_plan_refusal(config_, batch);
  if (!refusal.empty()) core::fail(ErrorCode::kUnsupported, refusal);
  gpu::check_nothing_failed_before();
  auto* const sticky = reports_ ? &status()->plan : nullptr;
  scheduler::launch_plan(config_, batch, image_.data(), sticky, stream);
  find_cu_q(scheduler::counts_within_bounds(config_));
}

void CudaPlanMemory::report() {
  scheduler::PlanStatus& status = this->status()->plan;
  const std::atomic_ref problem(status.problem);
  if (problem.load(std::memory_order_acquire) != scheduler::PlanProblem::kNone) [[unlikely]] {
    const scheduler::PlanStatus found = status;  // the device writes it again only once it is forgotten
    problem.store(scheduler::PlanProblem::kNone, std::memory_order_release);
    core::fail(ErrorCode::kInvalidArgument, "an earlier plan from device lengths: ", scheduler::describe(found));
  }
  report_tables(this->status()->tables, "an earlier run of a captured graph: ");
}

const scheduler::PlanImageHeader* CudaPlanMemory::image() const {
  return static_cast<const scheduler::PlanImageHeader*>(image_.data());
}

uint32_t* CudaPlanMemory::tile_counters() const {
  return is_dynamic() ? static_cast<uint32_t*>(counters_.data()) : nullptr;
}

uint32_t* CudaPlanMemory::combine_counters() const {
  return is_dynamic() ? nullptr : static_cast<uint32_t*>(counters_.data());
}

/// Memory for a record, at the head of a stage: the schedule behind it keeps its alignment.
constexpr size_t kRecordBytes = round_up_to_alignment(sizeof(scheduler::ChecksumRecord));

CudaSchedule::CudaSchedule(int32_t device, int32_t most_workers) : device_(device) {
  const gpu::DeviceScope scope(device_);
  record_ = gpu::DeviceMemory(kRecordBytes);
  no_work_ = gpu::DeviceMemory((static_cast<size_t>(most_workers) + 1) * sizeof(int32_t));
  changed_ = gpu::PinnedMemory(sizeof(int32_t));
  new (changed_.data()) int32_t(0);
  const gpu::OwnedStream stream;  // of its own: it waits for nobody's work
  gpu::check(cudaMemsetAsync(no_work_.data(), 0, no_work_.size(), gpu::native(stream.get())), "clearing worker lists");
  gpu::check(cudaMemsetAsync(record_.data(), 0, record_.size(), gpu::native(stream.get())), "clearing a record");
  gpu::synchronize(stream.get());
}

void CudaSchedule::seal(std::span<const scheduler::PlanView* const> plans, const ScheduleLayout& layout,
                        std::byte* memory, Stream stream) {
  const gpu::DeviceScope scope(device_);
  std::byte* const stage = stages_.take(kRecordBytes + layout.bytes, 2 * (kRecordBytes + layout.bytes));
  std::byte* const schedule = stage + kRecordBytes;
  fill_schedule(plans, layout, schedule, memory);
  new (stage) scheduler::ChecksumRecord(
      make_record(plans.size(), layout, schedule, memory, static_cast<const int32_t*>(no_work_.data())));
  const auto copy = [&](void* to, const void* from, size_t bytes) {
    gpu::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, gpu::native(stream)),
               "copying a schedule to the device");
  };
  copy(memory, schedule, layout.bytes);
  copy(record_.data(), stage, sizeof(scheduler::ChecksumRecord));
  stages_.copied(stream);
  memory_ = memory;
}

void CudaSchedule::check(Stream stream) const {
  const gpu::DeviceScope scope(device_);
  gpu::check_nothing_failed_before();
  scheduler::launch_checksum_check(reinterpret_cast<const uint64_t*>(memory_),
                                   static_cast<const scheduler::ChecksumRecord*>(record_.data()),
                                   static_cast<int32_t*>(changed_.data()), stream);
}

void CudaSchedule::report() {
  auto& changed = *static_cast<volatile int32_t*>(changed_.data());
  if (changed == 0) return;
  changed = 0;
  fail_changed();
}

Stream CudaSideStream::fork(Stream stream) {
  const gpu::DeviceScope scope(device_);
  forked_.record(stream);
  forked_.hold(side_.get());
  return side_.get();
}

void CudaSideStream::join(Stream stream) {
  const gpu::DeviceScope scope(device_);
  done_.record(side_.get());
  done_.hold(stream);
}

}  // namespace folio::inline v0::attention::cuda
