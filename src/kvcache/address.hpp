#pragma once

#include <cstdint>

#include "folio/types/kv_cache.hpp"

/// Where elements of a cache lie, in elements from its k or v pointer. 64-bit throughout: pools beyond 2^31 elements are
/// ordinary. Nothing is checked; for views that passed validate().
namespace folio::inline v0::kvcache {

/// Component 0 of a token's key; the others follow it.
inline int64_t k_offset(const KvCacheView& cache, int64_t page, int64_t token, int64_t head) noexcept {
  return page * cache.k_strides.page + token * cache.k_strides.token + head * cache.k_strides.head;
}

/// Component 0 of a token's value; component d lies v_step(cache) * d further.
inline int64_t v_offset(const KvCacheView& cache, int64_t page, int64_t token, int64_t head) noexcept {
  const bool pairs = cache.format == KvFormat::kCpuPacked;
  const int64_t in_page = pairs ? (token >> 1) * cache.v_strides.token + (token & 1) : token * cache.v_strides.token;
  return page * cache.v_strides.page + in_page + head * cache.v_strides.head;
}

/// Elements from a component of V to the next.
inline int64_t v_step(const KvCacheView& cache) noexcept {
  return cache.format == KvFormat::kCpuPacked ? 2 : 1;
}

}  // namespace folio::inline v0::kvcache
