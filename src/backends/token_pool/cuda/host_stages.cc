#include "backends/token_pool/host_stages.hpp"

#include <algorithm>
#include <deque>

#include "backends/token_pool/gpu.hpp"
#include "core/error.hpp"
#include "platform/cuda/device.hpp"
#include "platform/cuda/memory.hpp"
#include "platform/cuda/stream.hpp"

namespace folio::inline v0::backends::token_pool::gpu {
namespace {

using platform::cuda::DeviceScope;

class CudaHostStages final : public HostStages {
 public:
  /// A few at once: later allocations could wait for a stream that is stalled.
  explicit CudaHostStages(int32_t device) : device_(device) {
    const DeviceScope scope(device);
    for (int32_t i = 0; i < kFirstStages; ++i)
      stages_.emplace_back().memory = platform::cuda::PinnedMemory(kLeastBytes);
  }

  /// Waits for the kernels that still read.
  ~CudaHostStages() override {
    try {
      const DeviceScope scope(device_);
      for (const Stage& stage : stages_) stage.read.wait();
      stages_.clear();
    } catch (const Error&) {
      // a process that ends without its device
    }
  }

  std::byte* take(size_t bytes, Stream stream) override {
    const DeviceScope scope(device_);
    if (platform::cuda::is_capturing(stream)) {
      core::fail(
          ErrorCode::kInvalidArgument,
          "arrays on the host cannot be handed over while the stream is being captured: a replay would read what "
          "later calls have written in their place; pass device arrays, or call before the capture");
    }
    taken_ = nullptr;
    for (Stage& stage : stages_) {
      if (!stage.read.passed()) continue;
      if (taken_ == nullptr || stage.memory.size() >= bytes) taken_ = &stage;
      if (stage.memory.size() >= bytes) break;
    }
    if (taken_ == nullptr) taken_ = &stages_.emplace_back();
    if (taken_->memory.size() < bytes) {
      taken_->memory = platform::cuda::PinnedMemory(std::max({bytes, 2 * taken_->memory.size(), kLeastBytes}));
    }
    return static_cast<std::byte*>(taken_->memory.data());
  }

  void used(Stream stream) override {
    const DeviceScope scope(device_);
    taken_->read.record(stream);
  }

 private:
  static constexpr size_t kLeastBytes = 64 * 1024;  ///< a decode step's arrays
  static constexpr int32_t kFirstStages = 4;
  struct Stage {
    platform::cuda::PinnedMemory memory;
    platform::cuda::Event read;
  };

  int32_t device_;
  std::deque<Stage> stages_;  ///< as many as kernels have been in flight
  Stage* taken_ = nullptr;
};

}  // namespace

std::unique_ptr<HostStages> make_stages(int32_t device) {
  return std::make_unique<CudaHostStages>(device);
}

}  // namespace folio::inline v0::backends::token_pool::gpu
