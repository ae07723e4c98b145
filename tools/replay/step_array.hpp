#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

#include "replay/gpu.hpp"

namespace folio::replay {

/// One of a step's arrays where kernels read it: the host's own on a CPU, a copy of it on a GPU.
class StepArray {
 public:
  explicit StepArray(const Context& context) : context_(context) {}

  /// Valid until the next call, which waits for whoever reads the last array.
  template <typename T>
  std::span<const T> place(std::span<const T> values) {
    if (!gpu::is_gpu(context_)) return values;
    if (values.size_bytes() > bytes_) {
      bytes_ = 2 * values.size_bytes();
      memory_ = gpu::allocate(context_, bytes_);
    }
    if (!values.empty()) gpu::upload(context_, memory_.get(), values.data(), values.size_bytes());
    return {reinterpret_cast<const T*>(memory_.get()), values.size()};
  }

 private:
  Context context_;
  std::shared_ptr<std::byte> memory_;
  size_t bytes_ = 0;
};

}  // namespace folio::replay
