#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "capi/common/guard.hpp"
#include "core/error.hpp"
#include "folio/c/folio.h"
#include "folio/types/attention.hpp"
#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

/// C structures to the C++ ones: sizes and enumerations are checked here, everything else by the functions themselves.
/// Both libraries compile this in, hidden.
namespace folio::inline v0::capi {

/// A structure larger than any that will be: what an uninitialised struct_size looks like.
inline constexpr uint32_t kLargestStruct = 4096;

/// The function that fills a growing structure with its defaults; for messages.
template <typename Struct>
inline constexpr const char* kInitFunction = nullptr;

/// Bytes of a growing structure in earlier versions. What grew since is 0 by default.
template <typename Struct>
inline constexpr std::array<uint32_t, 0> kEarlierSizes{};

/// Sizes of a structure that this version knows.
struct KnownSizes {
  std::span<const uint32_t> earlier;
  size_t now;
};
template <typename Struct>
inline constexpr KnownSizes kKnownSizes{kEarlierSizes<Struct>, sizeof(Struct)};

/// Throws unless a structure may have `size` bytes: a known size, or more.
void check_struct_size(uint64_t size, const KnownSizes& known, const char* name, const char* init_function);

/// Throws unless a structure of `size` bytes at `data` can be read: a longer one than this version knows may only have
/// zeros in the fields behind.
void check_struct(const void* data, uint32_t size, const KnownSizes& known, const char* name,
                  const char* init_function);

/// A copy of a growing structure, cut to what this version knows. Fields that the caller's version lacks are 0.
template <typename Struct>
Struct read_struct(const Struct* given, const char* name) {
  static_assert(kInitFunction<Struct> != nullptr);
  core::require(given != nullptr, name, " is null");
  check_struct(given, given->struct_size, kKnownSizes<Struct>, name, kInitFunction<Struct>);
  Struct copy;
  const size_t size = given->struct_size < sizeof(Struct) ? given->struct_size : sizeof(Struct);
  std::memset(reinterpret_cast<std::byte*>(&copy) + size, 0, sizeof(Struct) - size);
  std::memcpy(&copy, given, size);
  return copy;
}

/// Writes `values` up to the caller's size of the structure, and zeros into the fields behind what this version knows.
template <typename Struct>
void write_struct(Struct* given, size_t struct_size, const Struct& values, const char* name) {
  static_assert(kInitFunction<Struct> != nullptr);
  check_struct_size(struct_size, kKnownSizes<Struct>, name, kInitFunction<Struct>);
  auto* const bytes = reinterpret_cast<unsigned char*>(given);
  const size_t known = struct_size < sizeof(Struct) ? struct_size : sizeof(Struct);
  std::memcpy(bytes, &values, known);
  std::memset(bytes + known, 0, struct_size - known);
  given->struct_size = static_cast<uint32_t>(struct_size);
}

/// As above, of a structure that the caller has initialised.
template <typename Struct>
void write_struct(Struct* given, const Struct& values, const char* name) {
  deref(given, name);
  write_struct(given, given->struct_size, values, name);
}

/// What a folio_..._init function does. `defaults` is static, so that its padding is 0 too.
template <typename Struct>
folio_status init_struct(Struct* given, size_t struct_size, const Struct& defaults, const char* name) noexcept {
  return guarded([&] {
    deref(given, name);
    write_struct(given, struct_size, defaults, name);
  });
}

/// Elements of an array made from C structures. Up to kInline need no memory, so that a step allocates nothing.
template <typename Element>
class ConvertedArray {
 public:
  static constexpr size_t kInline = 8;

  /// Converts `count` structures, which lie given[0].struct_size bytes apart.
  template <typename Struct, typename Convert>
  ConvertedArray(const Struct* given, int32_t count, const char* name, const Convert& convert) {
    core::require(count >= 0, "the number of ", name, " is ", count);
    core::require(given != nullptr || count == 0, name, " is null");
    size_ = static_cast<size_t>(count);
    if (size_ > kInline) large_.resize(size_);
    const auto* bytes = reinterpret_cast<const std::byte*>(given);
    const size_t stride = count > 0 ? given->struct_size : 0;
    core::require(stride % alignof(Struct) == 0, name, "[0].struct_size is ", stride, "; it is a multiple of ",
                  alignof(Struct));
    for (size_t i = 0; i < size_; ++i) {
      // The first element's size is checked before the second is looked for.
      const auto* element = reinterpret_cast<const Struct*>(bytes + i * stride);
      const Struct copy = read_struct(element, name);
      core::require(copy.struct_size == stride, name, "[", i, "].struct_size is ", copy.struct_size,
                    "; that of the first is ", stride);
      data()[i] = convert(copy);
    }
  }
  std::span<const Element> view() const noexcept { return {size_ > kInline ? large_.data() : small_.data(), size_}; }

 private:
  Element* data() noexcept { return size_ > kInline ? large_.data() : small_.data(); }

  std::array<Element, kInline> small_{};
  std::vector<Element> large_;
  size_t size_ = 0;
};

/// An array as C gives it. Null is an array of no elements.
template <typename T>
std::span<T> to_span(T* data, int64_t count, const char* name) {
  core::require(count >= 0, name, " has ", count, " elements");
  core::require(data != nullptr || count == 0, name, " is null, but has ", count, " elements");
  return {data, static_cast<size_t>(count)};
}

/// An array that may be left out: empty where it is null.
template <typename T>
std::span<T> to_optional_span(T* data, int64_t count, const char* name) {
  core::require(count >= 0, name, " has ", count, " elements");
  return data == nullptr ? std::span<T>() : std::span<T>(data, static_cast<size_t>(count));
}

/// The enumerator of a C value; enumerations count from `first` to `last`.
template <typename Enum>
Enum to_enum(int32_t value, Enum last, const char* name, Enum first = Enum{}) {
  core::require(value >= static_cast<int32_t>(first) && value <= static_cast<int32_t>(last), name, " is ", value, "; ",
                static_cast<int32_t>(first), " to ", static_cast<int32_t>(last), " are known");
  return static_cast<Enum>(value);
}

std::string to_string(const char* text);  ///< NULL becomes ""
DType to_dtype(int32_t value, const char* name);
/// `name` is the dtype's, for messages.
TensorView to_view(const folio_tensor_view& view, const char* name);
ConstTensorView to_view(const folio_const_tensor_view& view, const char* name);
LseView to_lse(const folio_lse_view* lse);  ///< NULL: not wanted
PageTableView to_table(const folio_page_table_view& table, const char* name);
KvCacheView to_cache(const folio_kv_cache& given, const char* name);
Scale to_scale(const folio_scale& scale, const char* name);  ///< a value of 0, as in memory of zeros, is the default
Scale to_scale(const folio_scale* scale, const char* name);  ///< NULL: the default
KvShard to_shard(const folio_kv_shard& shard);               ///< all zeros are the default
KvShard to_shard(const folio_kv_shard* shard);               ///< NULL: the default
folio_kv_cache to_c(const KvCacheView& view);

}  // namespace folio::inline v0::capi
