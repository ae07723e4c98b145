#pragma once

#include <cstddef>
#include <utility>

namespace folio::inline v0::core {

/// Owned, aligned, uninitialised host memory. From 4 MiB on it starts on a 2 MiB boundary and asks the OS for huge
/// pages: attention walks large pools with strides that miss the TLB otherwise. Move-only.
class AlignedBuffer {
 public:
  static constexpr size_t kCacheLine = 64;
  static constexpr size_t kWorkspaceAlignment = 256;
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kHugePageThreshold = size_t{4} << 20;

  AlignedBuffer() noexcept = default;
  /// `alignment`: a power of two, at most kHugePage. 0 bytes gives an empty buffer. Throws Error: kOutOfMemory,
  /// kInvalidArgument (alignment).
  explicit AlignedBuffer(size_t bytes, size_t alignment = kCacheLine);
  ~AlignedBuffer();
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() noexcept { return data_; }
  const std::byte* data() const noexcept { return data_; }
  size_t bytes() const noexcept { return bytes_; }

  template <typename T>
  T* as() noexcept {
    return reinterpret_cast<T*>(data_);
  }
  template <typename T>
  const T* as() const noexcept {
    return reinterpret_cast<const T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace folio::inline v0::core
