#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "core/aligned_buffer.hpp"
#include "folio/types/device.hpp"

namespace folio::inline v0::backends {

/// Memory on a context's device, host or GPU. Move-only.
class ContextMemory {
 public:
  explicit ContextMemory(const Device& device) : device_(device) {}

  /// At least `bytes`, 256-byte aligned; what it held is lost if it has to grow. On a GPU growing waits for what is
  /// enqueued. Throws kOutOfMemory.
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

/// An array of a step where a context's kernels read it: on a CPU the array itself, on a GPU a copy in memory of its
/// own, whose address stays while the array fits. Move-only.
class KernelArray {
 public:
  explicit KernelArray(const Device& device) : device_(device), memory_(device) {}

  /// Room on a GPU, for arrays whose address captured graphs know.
  void reserve(size_t bytes);
  /// Enqueues the copy of an array that lies at `where`; returns what kernels are to be given. On a CPU `from` itself.
  template <typename T>
  const T* put(std::span<const T> from, Stream stream, Where where = Where::kHost) {
    if (device_.type == DeviceType::kCpu) return from.data();
    copy(from.data(), from.size_bytes(), stream, where);
    return memory_.as<T>();
  }
  /// Room for `count` values, which the caller's kernels write. A GPU's only.
  template <typename T>
  std::span<T> room(size_t count) {
    grow(count * sizeof(T));
    return {memory_.as<T>(), count};
  }

 private:
  void grow(size_t bytes);
  void copy(const void* from, size_t bytes, Stream stream, Where where);

  Device device_;
  ContextMemory memory_;
};

/// A layer's values, [heads], where a GPU's kernels read them; null on a CPU, whose kernels read the host's, and
/// without values.
std::shared_ptr<float> copy_on_gpu(const Device& device, std::span<const float> values);
/// As many other values at the same address, which captured graphs know. Waits for the copy.
void update_on_gpu(const Device& device, const std::shared_ptr<float>& memory, std::span<const float> values);
/// What a run's arguments name: null without values.
inline const float* kernel_values(std::span<const float> values, const std::shared_ptr<float>& on_gpu) {
  if (values.empty()) return nullptr;
  return on_gpu != nullptr ? on_gpu.get() : values.data();
}

}  // namespace folio::inline v0::backends
