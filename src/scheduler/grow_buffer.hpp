#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "core/error.hpp"

namespace folio::inline v0::scheduler {

/// An array that only grows, so that planning allocates nothing once it has seen its largest batch. Unlike std::vector
/// it never initialises elements.
template <typename T>
class GrowBuffer {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  /// Room for `count` elements; the first `size()` keep their values.
  void reserve(int64_t count) {
    if (count <= capacity_) return;
    const int64_t grown = capacity_ + capacity_ / 2 > count ? capacity_ + capacity_ / 2 : count;
    try {
      auto larger = std::make_unique_for_overwrite<T[]>(static_cast<size_t>(grown));
      if (size_ > 0) std::memcpy(larger.get(), data_.get(), static_cast<size_t>(size_) * sizeof(T));
      data_ = std::move(larger);
    } catch (const std::bad_alloc&) {
      core::fail(ErrorCode::kOutOfMemory, "a plan needs an array of ", grown, " elements of ", sizeof(T),
                 " bytes, which the system does not have");
    }
    capacity_ = grown;
  }

  /// Forgets the elements, keeps the memory.
  void clear() noexcept { size_ = 0; }

  /// `count` elements with any values.
  T* resize(int64_t count) {
    reserve(count);
    size_ = count;
    return data_.get();
  }

  void push_back(const T& value) {
    if (size_ == capacity_) [[unlikely]] {
      const T copy = value;
      reserve(size_ + 1);
      data_[static_cast<size_t>(size_++)] = copy;
      return;
    }
    data_[static_cast<size_t>(size_++)] = value;
  }

  /// One more element, of any value, to be filled where it lies.
  T& add() {
    reserve(size_ + 1);
    return data_[static_cast<size_t>(size_++)];
  }

  int64_t size() const noexcept { return size_; }
  T* data() noexcept { return data_.get(); }
  const T* data() const noexcept { return data_.get(); }
  T& operator[](int64_t i) noexcept { return data_[static_cast<size_t>(i)]; }
  const T& operator[](int64_t i) const noexcept { return data_[static_cast<size_t>(i)]; }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
};

}  // namespace folio::inline v0::scheduler
