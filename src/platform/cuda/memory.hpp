#pragma once

#include <cstddef>

/// Memory that the GPU reads and writes. Owned, move-only, freed with its object. Captures of other streams go on.
namespace folio::inline v0::platform::cuda {

/// Device memory, aligned to 256 bytes. Freeing waits for the device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// Throws Error(kOutOfMemory).
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  void* data() const noexcept { return data_; }
  size_t size() const noexcept { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Page-locked host memory that copies to and from the device run beside the host, and that the device can read and
/// write at the same address.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  /// Throws Error(kOutOfMemory).
  explicit PinnedMemory(size_t bytes);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  void* data() const noexcept { return data_; }
  size_t size() const noexcept { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace folio::inline v0::platform::cuda
