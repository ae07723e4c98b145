#include "folio/kv_cache.hpp"

#include <utility>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "folio/types/ds_mla.hpp"
#include "kvcache/strided_set.hpp"

namespace folio::inline v0 {
namespace {

using core::require;

/// Smaller pages would leave the packed format's pairs and vectors half empty.
constexpr int32_t kMinPackedPage = 16;

void check_positive(const char* name, int32_t value) {
  require(value >= 1, name, " is ", value, "; it must be 1 or more");
}

void check_sizes(int64_t num_pages, int32_t page_size, int32_t num_kv_heads, int32_t head_dim_qk, int32_t head_dim_v) {
  require(num_pages >= 0, "num_pages is ", num_pages, "; it must not be negative");
  check_positive("page_size", page_size);
  check_positive("num_kv_heads", num_kv_heads);
  check_positive("head_dim_qk", head_dim_qk);
  check_positive("head_dim_v", head_dim_v);
}

void check_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt8: return;
    case DType::kUnset:
    case DType::kFloat4E2M1x2: break;
  }
  core::fail(ErrorCode::kInvalidArgument, "the cache's dtype is ", to_string(dtype),
             "; float32, float16, bfloat16, fp8_e4m3, fp8_e5m2 and int8 are offered");
}

void check_packed(int32_t page_size, DType dtype) {
  if (dtype == DType::kFloat32) {
    core::fail(
        ErrorCode::kUnsupported,
        "a CPU-packed cache of float32; float16, bfloat16, fp8_e4m3, fp8_e5m2 and int8 are offered, float32 caches "
        "are strided");
  }
  if (page_size < kMinPackedPage || page_size % 2 != 0) {
    core::fail(ErrorCode::kUnsupported, "a CPU-packed cache with page_size ", page_size, "; even sizes from ",
               kMinPackedPage, " on are offered");
  }
}

void check_ds_mla(const KvCacheView& cache) {
  require(cache.dtype == DType::kFloat8E4M3 && cache.num_kv_heads == 1 && cache.head_dim_qk == kDsMlaHeadDimQk &&
              cache.head_dim_v == kDsMlaLatentDim,
          "an fp8_ds_mla cache of ", to_string(cache.dtype), ", num_kv_heads ", cache.num_kv_heads, ", head_dim_qk ",
          cache.head_dim_qk, ", head_dim_v ", cache.head_dim_v, "; it has fp8_e4m3, 1, ", kDsMlaHeadDimQk, " and ",
          kDsMlaLatentDim);
  const KvStrides& k = cache.k_strides;
  const KvStrides& v = cache.v_strides;
  require(cache.k == cache.v && k.page == v.page && k.token == v.token,
          "v or v_strides of an fp8_ds_mla cache differ from k's; a row holds both");
  require(reinterpret_cast<uintptr_t>(cache.k) % kDsMlaAlignment == 0 && k.page % kDsMlaAlignment == 0 &&
              k.token % kDsMlaAlignment == 0,
          "an fp8_ds_mla cache with page stride ", k.page, " and token stride ", k.token,
          "; its address and strides must be multiples of ", kDsMlaAlignment, " bytes");
}

int64_t elements(const char* half, const KvCacheShape& shape, int32_t head_dim) {
  const int64_t factors[] = {shape.num_pages, shape.page_size, shape.num_kv_heads, head_dim};
  int64_t product = 1;
  bool negative = false;
  bool zero = false;
  bool overflow = false;
  for (const int64_t factor : factors) {
    negative = negative || factor < 0;
    zero = zero || factor == 0;
    overflow = overflow || __builtin_mul_overflow(product, factor, &product);
  }
  require(!negative && (zero || !overflow), half, " has num_pages ", shape.num_pages, ", page_size ", shape.page_size,
          ", num_kv_heads ", shape.num_kv_heads, ", head_dim ", head_dim,
          "; sizes must not be negative, nor their product beyond 2^63 - 1");
  return zero ? 0 : product;
}

KvCacheView make_view(KvFormat format, const KvCacheShape& shape, void* k, void* v) {
  check_sizes(shape.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim_qk, shape.head_dim_v);
  check_dtype(shape.dtype);
  KvCacheView cache;
  cache.format = format;
  cache.dtype = shape.dtype;
  cache.k = k;
  cache.v = v;
  cache.num_pages = shape.num_pages;
  cache.page_size = shape.page_size;
  cache.num_kv_heads = shape.num_kv_heads;
  cache.head_dim_qk = shape.head_dim_qk;
  cache.head_dim_v = shape.head_dim_v;
  return cache;
}

/// make_view for an int8 cache, with its scales; without their strides.
KvCacheView make_int8_view(KvFormat format, const KvCacheShape& shape, void* k, void* v, float* k_token_scales,
                           float* v_token_scales) {
  require(shape.dtype == DType::kInt8, "token scales are given, but the cache's dtype is ", to_string(shape.dtype),
          "; int8 caches have them");
  KvCacheView cache = make_view(format, shape, k, v);
  cache.k_token_scales.data = k_token_scales;
  cache.v_token_scales.data = v_token_scales;
  return cache;
}

KvStrides token_major(int32_t page_size, int64_t heads, int64_t dim) {
  const int64_t token = core::checked_mul(heads, dim);
  return {core::checked_mul(int64_t{page_size}, token), token, dim};
}

KvStrides head_major(int32_t page_size, int64_t heads, int64_t dim) {
  const int64_t head = core::checked_mul(int64_t{page_size}, dim);
  return {core::checked_mul(heads, head), dim, head};
}

void check_pointer(const char* name, const void* data, const KvCacheView& cache) {
  require(data != nullptr || cache.num_pages == 0, name, " is null");
  require(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size_of(cache.dtype)) == 0, name,
          " is not aligned to an element of ", to_string(cache.dtype));
}

void check_distinct(const char* name, const kvcache::StridedSet& set, const KvStrides& strides) {
  require(set.distinct, name, "_strides {page ", strides.page, ", token ", strides.token, ", head ", strides.head,
          "} make tokens overlap; each dimension must lie inside the stride of the next larger one");
}

bool same_strides(const KvStrides& a, const KvStrides& b) {
  return a.page == b.page && a.token == b.token && a.head == b.head;
}

void check_no_token_scales(const char* name, const TokenScales& scales, DType dtype) {
  require(scales.data == nullptr && same_strides(scales.strides, {}), name, " are given, but the cache is ",
          to_string(dtype), "; int8 caches have them");
}

void check_token_scales(const KvCacheView& cache) {
  const TokenScales& k = cache.k_token_scales;
  const TokenScales& v = cache.v_token_scales;
  for (const auto& [name, scales] : {std::pair{"k_token_scales", &k}, {"v_token_scales", &v}}) {
    require(scales->data != nullptr || cache.num_pages == 0, name,
            ".data is null; an int8 cache has a scale for each token and KV head");
    require(reinterpret_cast<uintptr_t>(scales->data) % alignof(float) == 0, name, ".data is not aligned to a float");
    const kvcache::StridedSet set = kvcache::token_scale_set(name, cache, *scales);
    check_distinct(name, set, scales->strides);
    require(kvcache::lie_apart(set, kvcache::k_set(cache)) && kvcache::lie_apart(set, kvcache::v_set(cache)), name,
            " overlap k or v");
  }
  if (kvcache::v_aliases_k(cache)) {
    require(k.data == v.data && same_strides(k.strides, v.strides),
            "v_token_scales differ from k_token_scales, but V is a part of K; they must be the same array");
    return;
  }
  require(kvcache::lie_apart(kvcache::token_scale_set("k_token_scales", cache, k),
                             kvcache::token_scale_set("v_token_scales", cache, v)),
          "k_token_scales and v_token_scales overlap");
}

/// Sets the strides by `strides_of` (page size, heads, dim), and checks the view.
template <typename StridesOf>
KvCacheView with_strides(KvCacheView cache, const StridesOf& strides_of) {
  cache.k_strides = strides_of(cache.page_size, cache.num_kv_heads, cache.head_dim_qk);
  cache.v_strides = strides_of(cache.page_size, cache.num_kv_heads, cache.head_dim_v);
  if (cache.format == KvFormat::kCpuPacked) cache.v_strides.token = 2 * int64_t{cache.head_dim_v};
  if (cache.dtype == DType::kInt8) {
    cache.k_token_scales.strides = cache.v_token_scales.strides = strides_of(cache.page_size, cache.num_kv_heads, 1);
  }
  validate(cache);
  return cache;
}

}  // namespace

int64_t k_elements(const KvCacheShape& shape) {
  return elements("k", shape, shape.head_dim_qk);
}

int64_t v_elements(const KvCacheShape& shape) {
  return elements("v", shape, shape.head_dim_v);
}

int64_t token_scale_elements(const KvCacheShape& shape) {
  return elements("token_scales", shape, 1);
}

KvCacheView make_nhd_view(const KvCacheShape& shape, void* k, void* v) {
  return with_strides(make_view(KvFormat::kStrided, shape, k, v), token_major);
}

KvCacheView make_hnd_view(const KvCacheShape& shape, void* k, void* v) {
  return with_strides(make_view(KvFormat::kStrided, shape, k, v), head_major);
}

KvCacheView make_cpu_packed_view(const KvCacheShape& shape, void* k, void* v) {
  return with_strides(make_view(KvFormat::kCpuPacked, shape, k, v), head_major);
}

KvCacheView make_nhd_view(const KvCacheShape& shape, void* k, void* v, float* k_token_scales, float* v_token_scales) {
  return with_strides(make_int8_view(KvFormat::kStrided, shape, k, v, k_token_scales, v_token_scales), token_major);
}

KvCacheView make_hnd_view(const KvCacheShape& shape, void* k, void* v, float* k_token_scales, float* v_token_scales) {
  return with_strides(make_int8_view(KvFormat::kStrided, shape, k, v, k_token_scales, v_token_scales), head_major);
}

KvCacheView make_cpu_packed_view(const KvCacheShape& shape, void* k, void* v, float* k_token_scales,
                                 float* v_token_scales) {
  return with_strides(make_int8_view(KvFormat::kCpuPacked, shape, k, v, k_token_scales, v_token_scales), head_major);
}

KvCacheView make_fp8_ds_mla_view(int64_t num_pages, int32_t page_size, void* data) {
  KvCacheView cache = make_view(KvFormat::kFp8DsMla,
                                {.num_pages = num_pages,
                                 .page_size = page_size,
                                 .num_kv_heads = 1,
                                 .head_dim_qk = kDsMlaHeadDimQk,
                                 .head_dim_v = kDsMlaLatentDim,
                                 .dtype = DType::kFloat8E4M3},
                                data, data);
  cache.k_strides = cache.v_strides = token_major(page_size, 1, kDsMlaRowBytes);
  validate(cache);
  return cache;
}

void validate(const KvCacheView& cache) {
  const bool packed = cache.format == KvFormat::kCpuPacked;
  const bool ds_mla = cache.format == KvFormat::kFp8DsMla;
  require(packed || ds_mla || cache.format == KvFormat::kStrided, "format is ", static_cast<int32_t>(cache.format),
          "; strided (0), CPU-packed (1) and fp8_ds_mla (2) are offered");
  check_sizes(cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim_qk, cache.head_dim_v);
  check_dtype(cache.dtype);
  if (packed) {
    check_packed(cache.page_size, cache.dtype);
    require(cache.k_strides.token == cache.head_dim_qk, "k_strides.token of a CPU-packed cache is ",
            cache.k_strides.token, "; it must be head_dim_qk (", cache.head_dim_qk, ")");
    require(cache.v_strides.token == 2 * int64_t{cache.head_dim_v}, "v_strides.token of a CPU-packed cache is ",
            cache.v_strides.token, "; from a token pair to the next it must be 2 * head_dim_v (",
            2 * int64_t{cache.head_dim_v}, ")");
  }
  if (ds_mla) check_ds_mla(cache);
  check_pointer("k", cache.k, cache);
  check_pointer("v", cache.v, cache);
  const kvcache::StridedSet k = kvcache::k_set(cache);
  const kvcache::StridedSet v = kvcache::v_set(cache);
  check_distinct("k", k, cache.k_strides);
  check_distinct("v", v, cache.v_strides);
  require(kvcache::lie_apart(k, v) || kvcache::v_aliases_k(cache),
          "k and v overlap; they must lie apart, or each token's v inside the same token's k");
  if (cache.dtype == DType::kInt8) return check_token_scales(cache);
  check_no_token_scales("k_token_scales", cache.k_token_scales, cache.dtype);
  check_no_token_scales("v_token_scales", cache.v_token_scales, cache.dtype);
}

}  // namespace folio::inline v0
