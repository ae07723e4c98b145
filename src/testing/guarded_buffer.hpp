#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace folio::inline v0::verify {

/// Which end of the memory touches an inaccessible page; the other end is guarded as well, up to a page's slack away.
enum class GuardedEnd { kBack, kFront };

/// All ones are a NaN in every float dtype; int8 has scales of NaN.
inline constexpr uint8_t kNanByte = 0xff;

/// Memory between two inaccessible pages: reading or writing beyond it is a crash, not a quiet error.
class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  /// `bytes` (0 is fine) filled with `fill`. At kBack, `bytes` should be a multiple of the alignment wanted.
  /// Throws kOutOfMemory.
  explicit GuardedBuffer(size_t bytes, GuardedEnd end = GuardedEnd::kBack, uint8_t fill = 0);
  GuardedBuffer(GuardedBuffer&& other) noexcept;
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept;
  ~GuardedBuffer();

  /// `bytes` of addresses, none of them accessible until opened: what lies far apart, without the memory in between.
  static GuardedBuffer sparse(size_t bytes);
  /// Makes [offset, offset + bytes) of a sparse buffer accessible, and the rest of the OS pages that it lies in; filled
  /// with `fill`. Ranges must ascend and may share such a page.
  void open(size_t offset, size_t bytes, uint8_t fill);

  /// A copy of `values`.
  template <typename T>
  static GuardedBuffer of(const std::vector<T>& values, GuardedEnd end = GuardedEnd::kBack) {
    GuardedBuffer buffer(values.size() * sizeof(T), end);
    if (!values.empty()) std::memcpy(buffer.data(), values.data(), values.size() * sizeof(T));
    return buffer;
  }

  void* data() const { return data_; }
  size_t size() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::span<uint8_t> bytes() const { return {as<uint8_t>(), bytes_}; }

  void fill(uint8_t value) const;  ///< not for sparse ones
  /// The accessible ranges, whole OS pages.
  template <typename Visit>
  void for_each_range(const Visit& visit) const {
    for (const Range& range : open_) {
      if (range.bytes > 0) visit(range.begin, range.bytes);
    }
  }
  void protect() const;  ///< from here on read-only: a write crashes
  void unprotect() const;

  /// Whether the memory is small enough to be kept, and not sparse.
  bool can_be_kept() const;
  /// From here on the memory is never given back to the system: the next buffer of as many OS pages gets it. For what
  /// a GPU has been let use, which costs more than most runs.
  void keep() const { kept_ = true; }
  bool is_kept() const { return kept_; }  ///< since this buffer, or an earlier one that had the memory, said so

 private:
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  mutable bool kept_ = false;
  struct Range {
    std::byte* begin;
    size_t bytes;
  };
  void set_access(int access) const;
  std::vector<Range> open_;  ///< accessible OS pages
};

}  // namespace folio::inline v0::verify
