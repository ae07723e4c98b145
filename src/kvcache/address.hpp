#pragma once

#include <cstddef>
#include <cstdint>

#include "folio/types/kv_cache.hpp"

/// Where the rows of a cache lie: (page, token, head) to an address, for every format. 64-bit throughout: pools beyond
/// 2^31 elements are ordinary. Nothing is checked; for views that passed validate().
namespace folio::inline v0::kvcache {

/// The K or the V half of a cache, with strides in bytes.
struct CacheHalf {
  std::byte* data = nullptr;
  int64_t page_stride = 0;
  int64_t token_stride = 0;  ///< with step 2: from a token pair to the next
  int64_t head_stride = 0;
  int32_t element_bytes = 0;
  int32_t step = 1;         ///< elements from a component to the next: 2 in the pairs of a packed V, else 1
  TokenScales scales = {};  ///< of int8 caches

  /// Component 0 of a token's row; component d lies d * step elements further.
  std::byte* row(int64_t page, int64_t token, int64_t head) const noexcept {
    const int64_t in_page =
        step == 2 ? (token >> 1) * token_stride + (token & 1) * element_bytes : token * token_stride;
    return data + page * page_stride + in_page + head * head_stride;
  }
  bool has_scales() const noexcept { return scales.data != nullptr; }
  float& scale(int64_t page, int64_t token, int64_t head) const noexcept {
    const KvStrides& strides = scales.strides;
    return scales.data[page * strides.page + token * strides.token + head * strides.head];
  }
};

inline CacheHalf cache_half(void* data, const KvStrides& strides, const TokenScales& scales, DType dtype,
                            int32_t step) noexcept {
  const int32_t bytes = size_of(dtype);
  return {static_cast<std::byte*>(data),
          strides.page * bytes,
          strides.token * bytes,
          strides.head * bytes,
          bytes,
          step,
          scales};
}

inline CacheHalf k_half(const KvCacheView& cache) noexcept {
  return cache_half(cache.k, cache.k_strides, cache.k_token_scales, cache.dtype, 1);
}

inline CacheHalf v_half(const KvCacheView& cache) noexcept {
  return cache_half(cache.v, cache.v_strides, cache.v_token_scales, cache.dtype,
                    cache.format == KvFormat::kCpuPacked ? 2 : 1);
}

}  // namespace folio::inline v0::kvcache
