#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "folio/attention.hpp"
#include "folio/c/folio.h"
#include "folio/context.hpp"
#include "folio/kv_cache.hpp"

/// The C handles. Each keeps what it needs alive through the shared states behind the C++ handles.

struct folio_context {
  folio::Context context;
};

struct folio_op {
  folio::AttentionOp op;
  std::string kernel_name;
};

struct folio_plan_buffer {
  folio::PlanBuffer buffer;
};

/// C structures to the C++ ones: sizes and enumerations are checked here, everything else by the functions themselves.
namespace folio::inline v0::capi {

/// A structure larger than any that will be: what an uninitialised struct_size looks like.
inline constexpr uint32_t kLargestStruct = 4096;

/// The function that fills a growing structure with its defaults; for messages.
template <typename Struct>
inline constexpr const char* kInitFunction = nullptr;
template <>
inline constexpr const char* kInitFunction<folio_context_options> = "folio_context_options_init";
template <>
inline constexpr const char* kInitFunction<folio_attention_config> = "folio_attention_config_init";
template <>
inline constexpr const char* kInitFunction<folio_prepare_options> = "folio_prepare_options_init";
template <>
inline constexpr const char* kInitFunction<folio_kv_segment> = "folio_kv_segment_init";
template <>
inline constexpr const char* kInitFunction<folio_batch> = "folio_batch_init";
template <>
inline constexpr const char* kInitFunction<folio_segment_args> = "folio_segment_args_init";
template <>
inline constexpr const char* kInitFunction<folio_attention_args> = "folio_attention_args_init";
template <>
inline constexpr const char* kInitFunction<folio_cache_write_args> = "folio_cache_write_args_init";

/// Bytes of a growing structure's first version. What grew since is 0 by default.
template <typename Struct>
inline constexpr size_t kFirstSize = sizeof(Struct);
template <>
inline constexpr size_t kFirstSize<folio_context_options> = 48;
template <>
inline constexpr size_t kFirstSize<folio_attention_config> = 64;
template <>
inline constexpr size_t kFirstSize<folio_prepare_options> = 48;
template <>
inline constexpr size_t kFirstSize<folio_batch> = 64;
template <>
inline constexpr size_t kFirstSize<folio_segment_args> = 416;
template <>
inline constexpr size_t kFirstSize<folio_cache_write_args> = 376;

/// Sizes of a structure that this version knows.
struct KnownSizes {
  size_t first;  ///< of the first version
  size_t now;
};
template <typename Struct>
inline constexpr KnownSizes kKnownSizes{kFirstSize<Struct>, sizeof(Struct)};

/// Throws unless a structure may have `size` bytes: a known size, or more.
void check_struct_size(uint64_t size, const KnownSizes& known, const char* name, const char* init_function);

/// Throws unless a structure of `size` bytes at `data` can be read: a longer one than this version knows may only have
/// zeros in the fields behind.
void check_struct(const void* data, uint32_t size, const KnownSizes& known, const char* name,
                  const char* init_function);

/// A copy of a growing structure, cut to what this version knows. Fields that the caller's version lacks are 0.
template <typename Struct>
Struct read_struct(const Struct* given, const char* name) {
  core::require(given != nullptr, name, " is null");
  check_struct(given, given->struct_size, kKnownSizes<Struct>, name, kInitFunction<Struct>);
  Struct copy;
  const size_t size = given->struct_size < sizeof(Struct) ? given->struct_size : sizeof(Struct);
  std::memset(reinterpret_cast<std::byte*>(&copy) + size, 0, sizeof(Struct) - size);
  std::memcpy(&copy, given, size);
  return copy;
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

std::string to_string(const char* text);  ///< NULL becomes ""
ContextOptions to_options(const folio_context_options* options);
AttentionConfig to_config(const folio_attention_config* config, const char* name);
WorkloadMix to_mix(const folio_workload_mix& mix);
PrepareOptions to_options(const folio_prepare_options* options);
KvSegment to_segment(const folio_kv_segment& segment);
BatchView to_batch(const folio_batch& batch, std::span<const KvSegment> segments);
SegmentArgs to_segment_args(const folio_segment_args& args);
AttentionArgs to_args(const folio_attention_args& args, std::span<const SegmentArgs> segments);
CacheWriteArgs to_args(const folio_cache_write_args& args);
KvCacheShape to_shape(const folio_kv_cache_shape& shape);
folio_kv_cache_view to_c(const KvCacheView& view);  ///< without its token scales

}  // namespace folio::inline v0::capi
