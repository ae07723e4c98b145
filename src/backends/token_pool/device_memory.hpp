#pragma once

#include <cstddef>
#include <memory>

#include "core/aligned_buffer.hpp"
#include "folio/types/device.hpp"

namespace folio::inline v0::backends::token_pool {

/// Memory on a context's device, host or GPU. Move-only.
class ContextMemory {
 public:
  explicit ContextMemory(const Device& device) : device_(device) {}

  /// At least `bytes`, 256-byte aligned; what it held is lost if it has to grow. Throws kOutOfMemory.
  void reserve(size_t bytes);
  size_t bytes() const noexcept { return bytes_; }
  void* data() noexcept { return device_.type == DeviceType::kCpu ? host_.data() : gpu_.get(); }
  template <typename T>
  T* as() noexcept {
    return static_cast<T*>(data());
  }

 private:
  Device device_;
  size_t bytes_ = 0;
  core::AlignedBuffer host_;
  std::shared_ptr<void> gpu_;
};

}  // namespace folio::inline v0::backends::token_pool
