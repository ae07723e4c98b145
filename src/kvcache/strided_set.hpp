#pragma once

#include <array>
#include <cstdint>

#include "folio/types/kv_cache.hpp"
#include "folio/types/tensor_view.hpp"

namespace folio::inline v0::kvcache {

/// The bytes that a strided view touches: rows of `row_bytes` at base + i0 * stride0 + i1 * stride1 + ..., sorted from
/// the largest stride to the smallest; dimensions that move nowhere (count 1, stride 0) are left out.
struct StridedSet {
  struct Dim {
    int64_t count;
    int64_t stride;  ///< bytes, > 0
  };
  uintptr_t base = 0;
  std::array<Dim, 3> dims{};
  int32_t num_dims = 0;
  int64_t row_bytes = 0;
  int64_t extent = 0;    ///< bytes from base to the end of the last row; 0 = empty
  bool distinct = true;  ///< no two rows overlap, each dimension lying inside the gaps of the next larger one
};

/// The K or the V half of a cache. `name` ("k", "v") is for messages. Throws kInvalidArgument for negative strides and
/// for sets that reach over the end of the address space. Sizes must be >= 0, the dtype one that has a size.
StridedSet k_set(const KvCacheView& cache);
StridedSet v_set(const KvCacheView& cache);

/// The scales of an int8 cache's K or V half, which `scales` are.
StridedSet token_scale_set(const char* name, const KvCacheView& cache, const TokenScales& scales);

/// A tensor [tokens, heads, head_dim] with a contiguous innermost dimension, of which `tokens` count.
StridedSet rows_set(const char* name, const ConstTensorView& tensor, int64_t tokens);

/// True if no byte belongs to both sets. Exact for sets whose dimensions nest (pages around tokens around heads, in any
/// order); of other sets that share a range of addresses it says false.
bool lie_apart(const StridedSet& a, const StridedSet& b);

/// True if V is a part of K: each token's V lies inside the same token's K (as in latent attention, 512 of 576).
/// For caches that passed validate().
bool v_aliases_k(const KvCacheView& cache);

}  // namespace folio::inline v0::kvcache
