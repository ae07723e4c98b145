#pragma once

#include <array>
#include <cstddef>

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

}  // namespace folio::inline v0::attention::cuda
