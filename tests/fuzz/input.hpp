#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <vector>

/// Takes values off the front of a fuzzer's bytes. Where they run out, everything is zero, so that every input is
/// whole.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  template <typename T>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    const size_t count = sizeof(T) < size_ ? sizeof(T) : size_;
    if (count > 0) std::memcpy(&value, data_, count);
    data_ += count;
    size_ -= count;
    return value;
  }

  /// A value in [low, high].
  int32_t take_between(int32_t low, int32_t high) {
    const auto range = static_cast<uint32_t>(high) - static_cast<uint32_t>(low) + 1;
    const auto drawn = take<uint32_t>();
    return static_cast<int32_t>(static_cast<uint32_t>(low) + (range == 0 ? drawn : drawn % range));
  }

  /// A length, id or offset: mostly small and sensible, sometimes anything at all.
  int32_t take_length(int32_t usual) {
    const auto kind = take<uint8_t>();
    if (kind < 240) return static_cast<int32_t>(take<uint16_t>()) % (usual + 1);
    if (kind < 248) return -static_cast<int32_t>(take<uint8_t>());
    return take<int32_t>();
  }

  std::vector<int32_t> take_lengths(size_t count, int32_t usual) {
    std::vector<int32_t> values(count);
    for (int32_t& value : values) value = take_length(usual);
    return values;
  }

  /// All that is left.
  std::string_view rest() {
    const std::string_view text(reinterpret_cast<const char*>(data_), size_);
    data_ += size_;
    size_ = 0;
    return text;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

/// Says what is not so, and stops the process as a crash does: what a fuzz target calls when a result is wrong.
#define FUZZ_CHECK(condition)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      __builtin_trap();                                                    \
    }                                                                      \
  } while (false)
