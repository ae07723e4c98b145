#include "kvcache/strided_set.hpp"

#include <algorithm>
#include <limits>

#include "core/error.hpp"
#include "folio/types/ds_mla.hpp"

namespace folio::inline v0::kvcache {
namespace {

using core::require;

/// Distances between two sets of this size, and their sums, stay inside 64 bits.
constexpr int64_t kMaxExtent = int64_t{1} << 61;

struct NamedDim {
  const char* name;
  int64_t count;
  int64_t stride;  ///< elements
};

/// Keeps the dimensions sorted, the largest stride first.
void insert_dim(StridedSet& set, StridedSet::Dim dim) {
  size_t at = static_cast<size_t>(set.num_dims++);
  for (; at > 0 && set.dims[at - 1].stride < dim.stride; --at) set.dims[at] = set.dims[at - 1];
  set.dims[at] = dim;
}

StridedSet make_set(const char* name, const void* data, std::array<NamedDim, 3> dims, int64_t row_elements,
                    int32_t element_bytes) {
  StridedSet set;
  set.base = reinterpret_cast<uintptr_t>(data);
  bool empty = row_elements == 0;
  for (const NamedDim& dim : dims) {
    require(dim.stride >= 0, name, "'s ", dim.name, " stride is ", dim.stride, "; it must not be negative");
    empty = empty || dim.count == 0;
  }
  if (empty) return set;

  bool fits = row_elements <= kMaxExtent / element_bytes;
  int64_t last = 0;
  for (const NamedDim& dim : dims) {
    int64_t reach = 0;
    fits = fits && dim.stride <= kMaxExtent / element_bytes &&
           !__builtin_mul_overflow(dim.count - 1, dim.stride * element_bytes, &reach) &&
           !__builtin_add_overflow(last, reach, &last);
    if (!fits) break;
    if (dim.count > 1 && dim.stride == 0) set.distinct = false;
    if (dim.count > 1 && dim.stride > 0) {
      insert_dim(set, {dim.count, dim.stride * element_bytes});
    }
  }
  set.row_bytes = fits ? row_elements * element_bytes : 0;
  fits = fits && last <= kMaxExtent - set.row_bytes;
  uintptr_t end = 0;
  fits = fits && !__builtin_add_overflow(set.base, static_cast<uintptr_t>(last + set.row_bytes), &end);
  require(fits, name, "'s sizes and strides reach beyond the address space (", dims[0].name, ": ", dims[0].count,
          " by ", dims[0].stride, ", ", dims[1].name, ": ", dims[1].count, " by ", dims[1].stride, ", ", dims[2].name,
          ": ", dims[2].count, " by ", dims[2].stride, " elements)");
  set.extent = last + set.row_bytes;

  int64_t inner = set.row_bytes;
  for (int32_t i = set.num_dims - 1; i >= 0; --i) {
    const StridedSet::Dim& dim = set.dims[static_cast<size_t>(i)];
    if (dim.stride < inner) set.distinct = false;
    inner += (dim.count - 1) * dim.stride;
  }
  return set;
}

int64_t floor_div(int64_t value, int64_t divisor) {
  return value / divisor - (value % divisor < 0 ? 1 : 0);
}

/// Whether the sets a (from its dimension i on, at 0) and b (from j on, at `delta`) share no byte.
bool apart_from(const StridedSet& a, int32_t i, int64_t extent_a, const StridedSet& b, int32_t j, int64_t extent_b,
                int64_t delta) {
  if (delta >= extent_a || delta <= -extent_b) return true;
  const StridedSet::Dim none{1, 0};
  const StridedSet::Dim& dim_a = i < a.num_dims ? a.dims[static_cast<size_t>(i)] : none;
  const StridedSet::Dim& dim_b = j < b.num_dims ? b.dims[static_cast<size_t>(j)] : none;
  const int64_t stride = std::max(dim_a.stride, dim_b.stride);
  if (stride == 0) return false;
  const bool peel_a = dim_a.stride == stride;
  const bool peel_b = dim_b.stride == stride;
  const int64_t reach_a = peel_a ? dim_a.count - 1 : 0;
  const int64_t reach_b = peel_b ? dim_b.count - 1 : 0;
  const int64_t inner_a = extent_a - reach_a * stride;
  const int64_t inner_b = extent_b - reach_b * stride;
  // Index differences m for which what lies inside this dimension comes near: -inner_b < delta + m * stride < inner_a.
  const int64_t first = std::max(-reach_a, floor_div(-inner_b - delta, stride) + 1);
  const int64_t last = std::min(reach_b, floor_div(inner_a - 1 - delta, stride));
  if (last - first > 3) return false;  // does not nest
  for (int64_t m = first; m <= last; ++m) {
    if (!apart_from(a, i + peel_a, inner_a, b, j + peel_b, inner_b, delta + m * stride)) return false;
  }
  return true;
}

}  // namespace

StridedSet k_set(const KvCacheView& cache) {
  const KvStrides& s = cache.k_strides;
  return make_set(
      "k", cache.k,
      {{{"page", cache.num_pages, s.page}, {"token", cache.page_size, s.token}, {"head", cache.num_kv_heads, s.head}}},
      cache.format == KvFormat::kFp8DsMla ? kDsMlaRowBytes : cache.head_dim_qk, size_of(cache.dtype));
}

StridedSet v_set(const KvCacheView& cache) {
  if (cache.format == KvFormat::kFp8DsMla) return k_set(cache);
  const KvStrides& s = cache.v_strides;
  const bool pairs = cache.format == KvFormat::kCpuPacked;
  return make_set("v", cache.v,
                  {{{"page", cache.num_pages, s.page},
                    {"token", pairs ? cache.page_size / 2 : cache.page_size, s.token},
                    {"head", cache.num_kv_heads, s.head}}},
                  static_cast<int64_t>(cache.head_dim_v) * (pairs ? 2 : 1), size_of(cache.dtype));
}

StridedSet token_scale_set(const char* name, const KvCacheView& cache, const TokenScales& scales) {
  const KvStrides& s = scales.strides;
  return make_set(
      name, scales.data,
      {{{"page", cache.num_pages, s.page}, {"token", cache.page_size, s.token}, {"head", cache.num_kv_heads, s.head}}},
      1, sizeof(float));
}

StridedSet rows_set(const char* name, const ConstTensorView& tensor, int64_t tokens) {
  return make_set(
      name, tensor.data,
      {{{"token", tokens, tensor.strides[0]}, {"head", tensor.shape[1], tensor.strides[1]}, {"outer", 1, 0}}},
      tensor.shape[2], size_of(tensor.dtype));
}

bool lie_apart(const StridedSet& a, const StridedSet& b) {
  if (a.extent == 0 || b.extent == 0) return true;
  const uintptr_t end_a = a.base + static_cast<uintptr_t>(a.extent);
  const uintptr_t end_b = b.base + static_cast<uintptr_t>(b.extent);
  if (end_a <= b.base || end_b <= a.base) return true;
  const int64_t delta =
      b.base >= a.base ? static_cast<int64_t>(b.base - a.base) : -static_cast<int64_t>(a.base - b.base);
  return apart_from(a, 0, a.extent, b, 0, b.extent, delta);
}

bool v_aliases_k(const KvCacheView& cache) {
  if (cache.format == KvFormat::kFp8DsMla) return true;
  if (cache.format != KvFormat::kStrided || cache.num_pages == 0) return false;
  const auto k = reinterpret_cast<uintptr_t>(cache.k);
  const auto v = reinterpret_cast<uintptr_t>(cache.v);
  const auto bytes = static_cast<uintptr_t>(size_of(cache.dtype));
  const auto same = [](int64_t count, int64_t a, int64_t b) { return count == 1 || a == b; };
  return v >= k && cache.head_dim_v <= cache.head_dim_qk &&
         v - k <= static_cast<uintptr_t>(cache.head_dim_qk - cache.head_dim_v) * bytes &&
         same(cache.num_pages, cache.k_strides.page, cache.v_strides.page) &&
         same(cache.page_size, cache.k_strides.token, cache.v_strides.token) &&
         same(cache.num_kv_heads, cache.k_strides.head, cache.v_strides.head);
}

}  // namespace folio::inline v0::kvcache
