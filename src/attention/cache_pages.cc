#include <algorithm>
#include <array>
#include <new>
#include <vector>

#include "attention/cache_args.hpp"
#include "attention/split_work.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/kv_cache.hpp"

namespace folio::inline v0 {
namespace {

using core::require;
namespace cuda = kernels::cuda;
namespace generic = kernels::generic;

enum class Sharing { kNone, kSameCache };

bool same_strides(const KvStrides& a, const KvStrides& b) {
  return a.page == b.page && a.token == b.token && a.head == b.head;
}

bool same_scales(const TokenScales& a, const TokenScales& b) {
  return a.data == b.data && same_strides(a.strides, b.strides);
}

/// Keys, values and their token scales; those of caches without are empty.
std::array<kvcache::StridedSet, 4> cache_sets(const KvCacheView& cache) {
  std::array<kvcache::StridedSet, 4> sets{kvcache::k_set(cache), kvcache::v_set(cache)};
  if (cache.dtype == DType::kInt8) {
    sets[2] = kvcache::token_scale_set("k_token_scales", cache, cache.k_token_scales);
    sets[3] = kvcache::token_scale_set("v_token_scales", cache, cache.v_token_scales);
  }
  return sets;
}

/// Two caches must lie apart, or be the same one.
Sharing check_sharing(const KvCacheView& from, const KvCacheView& to) {
  bool apart = true;
  for (const kvcache::StridedSet& a : cache_sets(from)) {
    for (const kvcache::StridedSet& b : cache_sets(to)) apart = apart && kvcache::lie_apart(a, b);
  }
  if (apart) return Sharing::kNone;
  require(from.k == to.k && from.v == to.v && from.dtype == to.dtype && from.format == to.format &&
              same_strides(from.k_strides, to.k_strides) && same_strides(from.v_strides, to.v_strides) &&
              same_scales(from.k_token_scales, to.k_token_scales) &&
              same_scales(from.v_token_scales, to.v_token_scales),
          "the two caches share memory, but are not the same cache: dtype, format, pointers and strides must be equal");
  return Sharing::kSameCache;
}

void check_ids(const char* name, std::span<const int32_t> pages, int64_t num_pages) {
  for (size_t i = 0; i < pages.size(); ++i) {
    require(pages[i] >= 0 && pages[i] < num_pages, name, "[", i, "] is page ", pages[i], "; the cache has ", num_pages,
            " pages");
  }
}

/// Sorts a copy of the destinations: the one allocation of these functions.
void check_destinations(std::span<const int32_t> source, std::span<const int32_t> destination, Sharing sharing) {
  std::vector<int32_t> sorted;
  try {
    sorted.assign(destination.begin(), destination.end());
  } catch (const std::bad_alloc&) {
    core::fail(ErrorCode::kOutOfMemory, "no memory to check ", destination.size(), " destination pages");
  }
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    core::fail(ErrorCode::kInvalidArgument, "page ", *twice, " is given twice as a destination");
  }
  if (sharing == Sharing::kNone) return;
  for (size_t i = 0; i < source.size(); ++i) {
    require(!std::binary_search(sorted.begin(), sorted.end(), source[i]), "page ", source[i], " (source[", i,
            "]) is a destination too; within one cache, sources and destinations must be disjoint");
  }
}

void check_caches(const char* function, const KvCacheView& from, const KvCacheView& to, bool on_gpu) {
  validate(from);
  validate(to);
  for (const KvCacheView* cache : {&from, &to}) {
    if (on_gpu) attention::check_gpu_cache(function, *cache);
  }
  require(from.page_size == to.page_size && from.num_kv_heads == to.num_kv_heads &&
              from.head_dim_qk == to.head_dim_qk && from.head_dim_v == to.head_dim_v,
          function, " from page_size ", from.page_size, ", num_kv_heads ", from.num_kv_heads, ", head_dim_qk ",
          from.head_dim_qk, ", head_dim_v ", from.head_dim_v, " to ", to.page_size, ", ", to.num_kv_heads, ", ",
          to.head_dim_qk, ", ", to.head_dim_v, "; sizes must be equal");
  const bool packed = from.format == KvFormat::kCpuPacked || to.format == KvFormat::kCpuPacked;
  const bool ds_mla = from.format == KvFormat::kFp8DsMla || to.format == KvFormat::kFp8DsMla;
  if (packed && ds_mla) {
    core::fail(ErrorCode::kUnsupported, function, " from format ", to_string(from.format), " to ", to_string(to.format),
               "; fp8_ds_mla is converted to and from strided caches");
  }
  if (ds_mla && (from.dtype == DType::kInt8 || to.dtype == DType::kInt8)) {
    core::fail(ErrorCode::kUnsupported, function, " between fp8_ds_mla and int8; each is converted to and from others");
  }
  // What K's conversion writes must be all that V is, or V's values would be lost.
  const auto v_offset = [](const KvCacheView& cache) {
    return reinterpret_cast<uintptr_t>(cache.v) - reinterpret_cast<uintptr_t>(cache.k);
  };
  if (!kvcache::v_aliases_k(to)) return;
  require(kvcache::v_aliases_k(from) && v_offset(from) * static_cast<uintptr_t>(size_of(to.dtype)) ==
                                            v_offset(to) * static_cast<uintptr_t>(size_of(from.dtype)),
          function, ": V is a part of K in `to`, but not the same part of K in `from`");
}

void check_convert_scales(const KvCacheView& from, const KvCacheView& to, const CacheConvertScales& scales,
                          bool readable) {
  const auto check = [&](const char* name, const Scale& scale, const KvCacheView& cache) {
    const bool own = attention::has_own_scales(cache);
    attention::check_scale(name, scale, is_fp8(cache.dtype) && !own,
                           own ? attention::own_scales_reason(cache) : "that cache is not fp8", cache.num_kv_heads, -1,
                           readable);
  };
  check("scales.from_k", scales.from_k, from);
  check("scales.from_v", scales.from_v, from);
  check("scales.to_k", scales.to_k, to);
  check("scales.to_v", scales.to_v, to);
  if (kvcache::v_aliases_k(to)) {
    const auto covered = [](const Scale& v, const Scale& k) {
      return attention::is_default(v) || attention::same_scale(v, k);
    };
    require(covered(scales.from_v, scales.from_k) && covered(scales.to_v, scales.to_k),
            "V is a part of K in `to`; its scales must be K's, or left at their default");
  }
}

/// Whether every bit is kept.
bool is_bitwise(const KvCacheView& from, const KvCacheView& to, const Scale& from_scale, const Scale& to_scale) {
  return from.dtype == to.dtype && attention::has_own_scales(from) == attention::has_own_scales(to) &&
         attention::same_scale(from_scale, to_scale);
}

generic::PageHalf page_half(const KvCacheView& from, const KvCacheView& to, bool is_k, const Scale& from_scale,
                            const Scale& to_scale) {
  const bool bitwise = is_bitwise(from, to, from_scale, to_scale);
  return {is_k ? kvcache::k_half(from) : kvcache::v_half(from),
          is_k ? kvcache::k_half(to) : kvcache::v_half(to),
          attention::row_elements(from, is_k ? from.head_dim_qk : from.head_dim_v, bitwise),
          attention::row_conversion(from.dtype, from.format, to.dtype, to.format, bitwise),
          generic::scale_table(from_scale),
          generic::scale_table(to_scale)};
}

void gpu_convert_pages(const attention::GpuBackend& gpu, const KvCacheView& from, const KvCacheView& to,
                       std::span<const int32_t> source, std::span<const int32_t> destination,
                       const CacheConvertScales& scales, Stream stream, int32_t* status) {
  attention::check_gpu_aligned("source", source.data(), sizeof(int32_t));
  attention::check_gpu_aligned("destination", destination.data(), sizeof(int32_t));
  cuda::PagesParams params;
  params.move = attention::move_of(from, status);
  const auto half = [&](bool is_k, int32_t head_dim, const Scale& from_scale, const Scale& to_scale) {
    const bool bitwise = is_bitwise(from, to, from_scale, to_scale);
    return attention::move_half(attention::move_side(from, is_k), attention::move_side(to, is_k),
                                attention::row_elements(from, head_dim, bitwise), from_scale, to_scale, bitwise);
  };
  params.move.halves[0] = half(true, from.head_dim_qk, scales.from_k, scales.to_k);
  params.move.halves[1] = half(false, from.head_dim_v, scales.from_v, scales.to_v);
  params.move.num_halves = kvcache::v_aliases_k(to) ? 1 : 2;
  params.source = source.data();
  params.destination = destination.data();
  params.num_pairs = core::checked_cast<int64_t>(source.size());
  params.from_pages = from.num_pages;
  params.to_pages = to.num_pages;
  gpu.enqueue(params, stream);
}

void move_pages(const Context& context, const KvCacheView& from, const KvCacheView& to, std::span<const int32_t> source,
                std::span<const int32_t> destination, const CacheConvertScales& scales, Stream stream,
                int32_t* status) {
  require(source.size() == destination.size(), "there are ", source.size(), " source pages and ", destination.size(),
          " destinations; there must be as many");
  const attention::GpuBackend* const gpu = context.state().gpu.get();
  attention::check_status(status, gpu != nullptr);
  if (gpu != nullptr) {
    check_sharing(from, to);
    gpu_convert_pages(*gpu, from, to, source, destination, scales, stream, status);
    return;
  }
  check_ids("source", source, from.num_pages);
  check_ids("destination", destination, to.num_pages);
  check_destinations(source, destination, check_sharing(from, to));

  generic::PageParams params;
  params.k = page_half(from, to, true, scales.from_k, scales.to_k);
  params.v = page_half(from, to, false, scales.from_v, scales.to_v);
  params.has_v = !kvcache::v_aliases_k(to);
  params.source = source.data();
  params.destination = destination.data();
  params.page_size = from.page_size;
  const int64_t heads = from.num_kv_heads;
  const int64_t units = static_cast<int64_t>(source.size()) * heads;
  const double unit_bytes = static_cast<double>(from.page_size) *
                            (static_cast<double>(from.head_dim_qk) + from.head_dim_v) *
                            (size_of(from.dtype) + size_of(to.dtype));
  attention::for_ranges(context, units, attention::wanted_ranges(context, static_cast<double>(units) * unit_bytes),
                        [&](int64_t begin, int64_t end) noexcept {
                          for (int64_t unit = begin; unit < end; ++unit) {
                            generic::convert_page_head(params, unit / heads, unit % heads);
                          }
                        });
}

}  // namespace

void copy_pages(const Context& context, const KvCacheView& from, const KvCacheView& to, std::span<const int32_t> source,
                std::span<const int32_t> destination, Stream stream, int32_t* status) {
  if (context.state().gpu == nullptr) attention::check_device("copy_pages", context, stream);
  check_caches("copy_pages", from, to, context.state().gpu != nullptr);
  require(from.dtype == to.dtype && from.format == to.format,
          "copy_pages between caches of different dtype or format; convert_pages does that");
  move_pages(context, from, to, source, destination, {}, stream, status);
}

void convert_pages(const Context& context, const KvCacheView& from, const KvCacheView& to,
                   std::span<const int32_t> source, std::span<const int32_t> destination,
                   const CacheConvertScales& scales, Stream stream, int32_t* status) {
  const bool readable = context.state().gpu == nullptr;
  if (readable) attention::check_device("convert_pages", context, stream);
  check_caches("convert_pages", from, to, !readable);
  check_convert_scales(from, to, scales, readable);
  move_pages(context, from, to, source, destination, scales, stream, status);
}

}  // namespace folio::inline v0
