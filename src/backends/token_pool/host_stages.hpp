#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "folio/types/device.hpp"

/// The host's arrays on their way to a GPU.
namespace folio::inline v0::backends::token_pool {

/// Page-locked memory that kernels read where it lies, each piece guarded by an event. Waits for no kernel: where all
/// pieces are still to be read, another one is allocated.
class HostStages {
 public:
  virtual ~HostStages() = default;
  /// Memory that no enqueued kernel reads. Throws kInvalidArgument where `stream` is being captured: a replay would
  /// read what other calls have written there since.
  virtual std::byte* take(size_t bytes, Stream stream) = 0;
  /// The kernels that read the memory taken last have been enqueued on `stream`.
  virtual void used(Stream stream) = 0;
};

/// Arrays one after the other in a stage.
class StagedArrays {
 public:
  static constexpr size_t kAlignment = 16;
  /// Bytes of an array with what keeps the next one aligned.
  template <typename T>
  static size_t bytes_of(std::span<const T> values) {
    return (values.size_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  }

  explicit StagedArrays(std::byte* memory) : next_(memory) {}
  /// Room for `count` values.
  template <typename T>
  std::span<T> room(size_t count) {
    auto* const values = reinterpret_cast<T*>(next_);
    next_ += bytes_of(std::span<const T>(values, count));
    return {values, count};
  }
  template <typename T>
  const T* add(std::span<const T> values) {
    const std::span<T> to = room<T>(values.size());
    if (!values.empty()) std::memcpy(to.data(), values.data(), values.size_bytes());
    return to.data();
  }

 private:
  std::byte* next_;
};

}  // namespace folio::inline v0::backends::token_pool
