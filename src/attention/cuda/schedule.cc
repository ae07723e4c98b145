#include "attention/cuda/schedule.hpp"

#include <cstring>
#include <new>

#include "attention/workspace.hpp"
#include "core/error.hpp"
#include "platform/cuda/device.hpp"
#include "scheduler/cuda/plan_kernel.hpp"

namespace folio::inline v0::attention::cuda {

namespace gpu = platform::cuda;

namespace {
constexpr size_t kRecordBytes = round_up_to_alignment(sizeof(scheduler::ChecksumRecord));
}

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

}  // namespace folio::inline v0::attention::cuda
